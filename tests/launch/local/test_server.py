"""The fork server is reached by its parent alone."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from autotune.launch.local.fork_server import ForkServerLauncher


def test_nobody_else_can_reach_the_server(fork_server: ForkServerLauncher) -> None:
    fork_server.preload((), {})  # it may have been ended by the test before
    fork_server._begun_server()
    assert fork_server._server is not None
    server = fork_server._server
    server.bad_forks()
    assert (server.connection.getsockname(), server.connection.getpeername()) == ("", "")
    assert not os.get_inheritable(server.connection.fileno())
    process = psutil.Process(server.process.pid)
    assert [one for one in process.net_connections("all") if one.status == psutil.CONN_LISTEN or one.laddr] == []


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_what_the_server_prints_is_its_owners_to_read(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        ForkServerLauncher(tmp_path / "server.log").close()
    finally:
        os.umask(before)
    assert (tmp_path / "server.log").stat().st_mode & 0o077 == 0
