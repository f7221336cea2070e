"""Launcher over a fork server: one process that has imported torch forks each rank in some 10 ms. Linux only.

Where the server answers that its forks can't open a device, each rank is an interpreter of its own from then on,
unless trials run on the CPU.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import LauncherError
from autotune.launch.launcher import Exit, Launch, worker_command, worker_environment
from autotune.launch.local.fresh_interpreter import FreshInterpreterLauncher
from autotune.launch.local.log_file import open_log
from autotune.launch.local.process_tree import exit_code, kill_all
from autotune.launch.local.watch import watch
from autotune.note import Note, note

__all__ = ["ForkServerLauncher"]

_MESSAGE_BYTES = 64 * 1024
_READY_WITHIN_S = 120.0  # our convention: `import torch` from a cold disk takes up to half a minute
_ANSWER_WITHIN_S = 30.0  # our convention: a fork takes 10 ms
_LOG_TAIL = 2000


class _BadForkError(Exception):
    """The server's forks can't open these kinds of devices."""

    def __init__(self, devices: Sequence[str]) -> None:
        names = ", ".join(devices)
        super().__init__(
            f"each trial starts an interpreter of its own: a package that torch loads by itself has opened {names}, "
            "which a fork can't open after that; set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where you don't need the package"
        )
        self.note = note("forks_cannot_open_device", devices=names)


class ForkServerLauncher:
    """Starts the server at once, in the background; the first trial waits for it.

    Args:
        server_log: where the server's own output goes.
        environment: what trials see; None: this process's.
        device: torch's name for what trials run on, or "auto".
    """

    def __init__(self, server_log: Path, environment: Mapping[str, str] | None = None, *, device: str = "auto") -> None:
        self._log, self._token, self._device = server_log, uuid.uuid4().hex, device
        self._environment = os.environ if environment is None else environment
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._fresh: FreshInterpreterLauncher | None = None
        """Starts trials in place of a server whose forks can't open a device."""
        self._start()

    @property
    def notes(self) -> tuple[Note, ...]:
        """Why the server is not used, where it is not."""
        return () if self._fresh is None else self._fresh.notes

    def launch(self, launch: Launch) -> Exit:
        """Fork the trial's ranks and wait for them; a server that has died is started anew."""
        if self._fresh is None:
            try:
                return self._launch_forked(launch)
            except _BadForkError as error:
                self._fresh = FreshInterpreterLauncher(self._environment, (error.note,), f"autotune: {error}\n")
        return self._fresh.launch(launch)

    def _launch_forked(self, launch: Launch) -> Exit:
        log, output = open_log(launch.log)
        try:
            ranks = self._fork(launch, output)
        except BaseException:
            log.close()
            self.close()
            raise
        finally:
            os.close(output)
        try:
            return watch(ranks, launch, log, self._token)
        finally:
            if ranks.running:
                self.close()  # the server's next answer would be to the trial that is gone
            else:
                ranks.reap()

    def close(self) -> None:
        """End the server and all processes that have its token."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            kill_all([self._process.pid], self._token)
            self._process.wait()
        self._connection, self._process, self._is_ready = None, None, False

    def _fork(self, launch: Launch, output: int) -> _Ranks:
        try:
            return self._ask(launch, output)
        except LauncherError:  # it has died since the last trial
            self.close()
            return self._ask(launch, output)

    def _ask(self, launch: Launch, output: int) -> _Ranks:
        connection = self._living_server()
        message = json.dumps({"folder": str(launch.folder.path), "ranks": launch.ranks}).encode()
        try:
            socket.send_fds(connection, [message], [output])
        except OSError as error:
            raise self._failure("is gone") from error
        pids = tuple(int(pid) for pid in json.loads(self._answer(_ANSWER_WITHIN_S))["pids"])
        assert self._process is not None  # noqa: S101 - _start made it
        return _Ranks(pids, self._process.pid, connection, set(range(len(pids))))

    def _living_server(self) -> socket.socket:
        if self._process is None or exit_code(self._process) is not None:
            self.close()
            self._start()
        return self._await_ready()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    worker_command("serve", str(theirs.fileno())),
                    env=worker_environment(self._environment, self._token),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise LauncherError(f"the process that starts trials can't be started: {error}") from error
        self._connection = ours

    def _await_ready(self) -> socket.socket:
        assert self._connection is not None  # noqa: S101 - _start made it
        if not self._is_ready:
            bad = json.loads(self._answer(_READY_WITHIN_S))["bad_forks"]
            if bad and self._device != "cpu":
                raise _BadForkError(bad)
            self._is_ready = True
        return self._connection

    def _answer(self, within_s: float) -> bytes:
        assert self._connection is not None  # noqa: S101 - _start made it
        ready, _, _ = select.select([self._connection], [], [], within_s)
        if not ready:
            raise self._failure(f"did not answer within {within_s:.0f} s")
        message = b""
        with suppress(ConnectionError):
            message = self._connection.recv(_MESSAGE_BYTES)
        if not message:
            raise self._failure("has ended")
        return message

    def _failure(self, what: str) -> LauncherError:
        tail = ""
        with suppress(OSError):
            tail = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()
        return LauncherError(f"the process that starts trials {what}; its log {self._log} ends:\n{tail}")


@dataclass(slots=True)
class _Ranks:
    """Forked ranks; the server sends their exit codes, and reaps them when it is told to."""

    pids: tuple[int, ...]
    spare: int | None
    connection: socket.socket
    running: set[int]
    """Ranks whose exit code has not come yet."""

    def poll(self, timeout_s: float) -> dict[int, int]:
        ready, _, _ = select.select([self.connection], [], [], timeout_s)
        if not ready:
            return {}
        message = b""
        with suppress(ConnectionError):
            message = self.connection.recv(_MESSAGE_BYTES)
        if message:
            answer = json.loads(message)
            ended = {int(answer["rank"]): int(answer["exit"])}
        else:  # the server is gone, and its ranks died with it
            ended = dict.fromkeys(sorted(self.running), -signal.SIGKILL)
        self.running -= ended.keys()
        return ended

    def reap(self) -> None:
        """Let the server reap the ranks: nothing of them runs any more, and nobody asks for their numbers."""
        with suppress(OSError):  # the server is gone
            self.connection.send(json.dumps({"reap": self.pids}).encode())
