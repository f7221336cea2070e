"""The fork server is reached by its parent alone, and leaves nothing where that has died."""

from __future__ import annotations

import errno
import os
import signal
from math import inf
from pathlib import Path
from socket import socketpair

import psutil
import pytest

from autotune.launch.launcher import Launch
from autotune.launch.local import LocalLauncher, Server
from autotune.launch.processes import Ranks, _listening_in
from autotune.protocol.channel import Channel, connect
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


def test_the_named_socket_lies_in_a_closed_folder(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    folder.sockets.symlink_to(tmp_path / "gone")  # as of a try that failed
    before = os.umask(0)
    try:
        with _listening_in(folder) as listener:
            made = folder.sockets.readlink()
            assert made.stat().st_mode & 0o777 == 0o700
            channel = connect(folder.sockets)
            assert channel is not None
            channel.close()
            assert listener is not None
    finally:
        os.umask(before)
    assert not made.exists()


def test_exit_codes_of_one_read_come_together() -> None:
    ours, theirs = socketpair()
    server = Server.__new__(Server)
    server.channel, server._running = Channel(ours), {0, 1, 2}
    theirs.send(b'{"rank": 1, "exit": 3}\n{"rank": 0, "exit": 0}\n')
    assert list(server._ended().items()) == [(1, 3), (0, 0)]
    theirs.close()
    assert server._ended() == {2: -signal.SIGKILL}
    assert server._ended() == {}
    server.channel.close()


def test_without_a_descriptor_nobody_is_listened_to_any_more() -> None:
    class Full:
        is_closed = False

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        def close(self) -> None:
            self.is_closed = True

    full = Full()
    ranks = Ranks.__new__(Ranks)
    ranks._listener, ranks._channels = full, []  # type: ignore[assignment]
    launch = Launch(folder=TrialFolder(Path()), log=Path(), deadline_s=1.0)
    assert not ranks._take_messages(launch)
    assert full.is_closed
    assert ranks._listener is None


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
