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
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from autotune.errors import LauncherError
from autotune.launch.launcher import Exit, Launch
from autotune.launch.local.fresh_interpreter import FreshInterpreterLauncher
from autotune.launch.local.process_tree import kill_all, start_worker
from autotune.launch.local.watch import Started, watch
from autotune.note import Note, note

__all__ = ["ForkServerLauncher"]

_MESSAGE_BYTES = 64 * 1024  # our convention: far more than the numbers of a thousand ranks take
_READY_WITHIN_S = 120.0  # our convention: `import torch` from a cold disk takes up to half a minute
_ANSWER_WITHIN_S = 30.0  # our convention: a fork takes 10 ms
_LOG_TAIL = 2000  # characters, our convention: a traceback


class _BadForkError(Exception):
    """The server's forks can't open a device that trials may run on."""


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
        self._server: _Server | None = _Server(self._log, self._environment, self._token)
        self._fresh: FreshInterpreterLauncher | None = None
        """Starts trials in place of a server whose forks can't open a device."""
        self.notes: tuple[Note, ...] = ()
        """Why the server is not used, where it is not."""

    def launch(self, launch: Launch) -> Exit:
        """Fork the trial's ranks and wait for them; a server that has died is started anew."""
        if self._fresh is not None:
            return self._fresh.launch(launch)
        try:
            return watch(launch, self._token, partial(self._fork, launch))
        except _BadForkError:
            pass  # the trial begins below: what it raises must not name this as its context
        finally:
            if self._server is None or not self._server.reap():
                self.close()  # the server's next answer would be to the trial that is gone
        return self.launch(launch)

    def close(self) -> None:
        """End the server and all processes that have its token."""
        if self._server is not None:
            self._server.connection.close()
            kill_all([self._server.process.pid], self._token)
            self._server.process.wait()
        self._server = None

    def _fork(self, launch: Launch, output: int) -> Started:
        try:
            return self._ready_server().fork(launch, output)
        except LauncherError:  # it has died since the last trial
            self.close()
            return self._ready_server().fork(launch, output)

    def _ready_server(self) -> _Server:
        self._server = self._server or _Server(self._log, self._environment, self._token)
        bad = self._server.bad_forks()
        if bad and self._device != "cpu":
            self._give_up_forks(", ".join(bad))
            raise _BadForkError
        return self._server

    def _give_up_forks(self, devices: str) -> None:
        why = (
            f"each trial starts an interpreter of its own: a package that torch loads by itself has opened {devices}, "
            "which a fork can't open after that; set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where you don't need the package"
        )
        self.notes = (note("forks_cannot_open_device", devices=devices),)
        self._fresh = FreshInterpreterLauncher(self._environment, log_line=f"autotune: {why}\n")
        self.close()


class _Server:
    """The process that forks ranks, and the socket to it. Starting it does not wait until it is ready."""

    def __init__(self, log: Path, environment: Mapping[str, str], token: str) -> None:
        self._log = log
        self._bad_forks: list[str] | None = None
        self._pids: list[int] = []
        """Ranks that are not reaped."""
        self._running = set[int]()
        """Those whose exit code has not come yet."""
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("wb") as output:
            try:
                self.process = start_worker(
                    *("serve", str(theirs.fileno())),
                    environment=environment,
                    token=token,
                    stdin=subprocess.DEVNULL,
                    output=output.fileno(),
                    descriptors=[theirs.fileno()],
                )
            except LauncherError:
                self.connection.close()
                raise

    def bad_forks(self) -> list[str]:
        """Wait until the server is ready; the devices that its forks can't open."""
        if self._bad_forks is None:
            self._bad_forks = self._answer(_READY_WITHIN_S)["bad_forks"]
        return self._bad_forks

    def fork(self, launch: Launch, output: int) -> Started:
        """Have the server fork a trial's ranks, which print to `output`."""
        message = json.dumps({"folder": str(launch.folder.path), "ranks": launch.ranks}).encode()
        try:
            socket.send_fds(self.connection, [message], [output])
        except OSError as error:
            raise self._failure("is gone") from error
        self._pids = self._answer(_ANSWER_WITHIN_S)["pids"]
        self._running = set(range(launch.ranks))
        return Started(pids=self._pids, poll=self._poll, spare=self.process.pid)

    def reap(self) -> bool:
        """Let the server reap the ranks: nothing of them runs any more, and their numbers are not used again.

        False where it can't yet: ranks run, or there are none.
        """
        if self._running or not self._pids:
            return False
        with suppress(OSError):  # the server is gone
            self.connection.send(json.dumps({"reap": self._pids}).encode())
        self._pids = []
        return True

    def _poll(self, timeout_s: float) -> dict[int, int]:
        message = self._receive(timeout_s)
        if message is None:
            return {}
        gone = dict.fromkeys(sorted(self._running), -signal.SIGKILL)  # without the server its ranks die too
        ended: dict[int, int] = {message["rank"]: message["exit"]} if message else gone
        self._running -= ended.keys()
        return ended

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message: None where none comes in time, empty where the server is gone."""
        ready, _, _ = select.select([self.connection], [], [], timeout_s)
        if not ready:
            return None
        message = b""
        with suppress(ConnectionError):
            message = self.connection.recv(_MESSAGE_BYTES)
        return dict(json.loads(message or b"{}"))

    def _answer(self, within_s: float) -> dict[str, Any]:
        message = self._receive(within_s)
        if not message:
            raise self._failure("has ended" if message is not None else f"did not answer within {within_s:.0f} s")
        return message

    def _failure(self, what: str) -> LauncherError:
        tail = ""
        with suppress(OSError):
            tail = self._log.read_text(errors="replace")[-_LOG_TAIL:].strip()
        return LauncherError(f"the process that starts trials {what}; its log {self._log} ends:\n{tail}")
