"""The fork server is reached by its parent alone, and leaves nothing where that has died."""

from __future__ import annotations

import os
import signal
from math import inf
from pathlib import Path

import psutil
import pytest

from autotune.launch.local import LocalLauncher, Server
from autotune.protocol.disk import TrialFolder


def test_nobody_else_can_reach_the_server(fork_server: LocalLauncher) -> None:
    fork_server.preload((), {})  # it may have been ended by the test before
    fork_server._begin_server()
    assert fork_server._server is not None
    server = fork_server._server
    server.bad_forks()
    connection = server.channel._connection
    assert (connection.getsockname(), connection.getpeername()) == ("", "")
    assert not os.get_inheritable(connection.fileno())
    process = psutil.Process(server.process.pid)
    assert [
        one
        for one in process.net_connections("all")
        if one.status == psutil.CONN_LISTEN or one.laddr
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_what_the_server_prints_is_its_owners_to_read(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        LocalLauncher(tmp_path / "server.log").close()
    finally:
        os.umask(before)
    assert (tmp_path / "server.log").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_parent_that_dies_right_after_a_request_leaves_no_folder_of_sockets(
    tmp_path: Path,
) -> None:
    folder, sockets = TrialFolder(tmp_path / "trial"), tmp_path / "pymp-made"
    for place in (folder.path, sockets):
        place.mkdir()
    folder.sockets.symlink_to(sockets)
    server = Server(tmp_path / "server.log", os.environ, "a token")
    server.bad_forks()
    os.kill(server.process.pid, signal.SIGSTOP)  # so that it answers to nobody
    with Path(os.devnull).open("wb") as output:
        request = {"folder": str(folder.path), "ranks": 1, "shared_from_s": inf}
        server.channel.send(request, output.fileno())
    server.channel.close()
    os.kill(server.process.pid, signal.SIGCONT)
    assert server.process.wait(timeout=60) == 0, (tmp_path / "server.log").read_text()
    assert not sockets.exists()
