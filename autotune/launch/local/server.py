"""The fork server as its launcher sees it: the process, the socket to it, and the messages that go over it.

Takes in trials to fork and modules to import; hands out the ranks' pids, their exit codes as they come, and why a
server can't be used. What it does with a message is in worker/serve.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from autotune.errors import LauncherError
from autotune.launch.launcher import Launch
from autotune.launch.local.process_tree import start_worker
from autotune.launch.local.watch import Started
from autotune.protocol.clock import deadline_within, monotonic
from autotune.protocol.private_folder import private_file

__all__ = ["OF_IMPORTS", "Preload", "PreloadFault", "Server"]

OF_IMPORTS = ("hang", "end")
"""Reasons of faults that happen in an import itself."""
_MESSAGE_BYTES = 64 * 1024  # our convention: far more than the numbers of a thousand ranks take
_READY_WITHIN_S = 120.0  # our convention: `import torch` from a cold disk takes up to half a minute
_ANSWER_WITHIN_S = 30.0  # our convention: a fork takes 10 ms
_PRELOADED_WITHIN_S = 120.0  # our convention: a large framework from a cold disk takes half a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """What servers are to import."""

    names: Sequence[str]
    environment: Mapping[str, str]
    left: int
    """Servers that may try it, the next included."""
    is_close: bool = False
    """Whether it is looked after each package, to find the culprit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadFault:
    """Why a server that was to import modules is of no use."""

    reason: str
    """"threads", "device" or "processes", which it has now; "hang" or "end" of an import."""
    culprit: str | None
    """The package whose import it was; None where it is not known."""
    chain: Sequence[str] = ()
    """Modules whose import brings it."""
    preloaded: int = 0
    """Names from the first on that do not bring it."""


class Server:
    """The process that forks ranks, and the socket to it. Starting it does not wait until it is ready."""

    def __init__(self, log: Path, environment: Mapping[str, str], token: str) -> None:
        self._log = log
        self._bad_forks: list[str] | None = None
        self._pids: list[int] = []
        """Ranks that are not reaped."""
        self._running = set[int]()
        """Those whose exit code has not come yet."""
        self._preloads: FileIO | None = None
        """What it imports: the names, then the package that it has come to. None: nothing, or it is done."""
        self._was_asked = False
        self._waited_from = 0.0
        """When it could begin to import, as far as is known."""
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log, "wb", opener=private_file) as output:
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
            self._waited_from = monotonic()
        return self._bad_forks

    def preload(self, preload: Preload) -> None:
        """Have it import modules, unless it has been asked; does not wait for it."""
        if self._was_asked or self._pids:
            return
        asked = json.dumps({"names": preload.names, "environment": preload.environment})
        message = json.dumps({"preload": "closely" if preload.is_close else "at the end"})
        names = os.fdopen(os.memfd_create("autotune-preload"), "r+b", buffering=0)
        names.write(asked.encode())
        try:
            socket.send_fds(self.connection, [message.encode()], [names.fileno()])
        except OSError as error:
            names.close()
            raise self._failure("is gone") from error
        self._preloads = names
        self._was_asked, self._waited_from = True, monotonic()

    def preload_fault(self) -> PreloadFault | None:
        """Wait until it has imported what it was to; None where it can be used."""
        if self._preloads is None:
            return None
        message = self._receive(max(0.0, self._waited_from + deadline_within(_PRELOADED_WITHIN_S) - monotonic()))
        self._preloads.seek(0)
        package = self._preloads.read().decode()
        self._preloads.close()
        self._preloads = None
        if message:
            return PreloadFault(**message) if message["reason"] is not None else None
        culprit = package if package.isidentifier() else None  # else the names, which it has not even read
        return PreloadFault(reason="end" if message is not None else "hang", culprit=culprit)

    def close(self) -> None:
        """Close the connection, which ends the server if it waits for a request."""
        self.connection.close()
        if self._preloads is not None:
            self._preloads.close()

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
            tail = self._log.read_text(errors="replace")[-2000:].strip()  # about a traceback
        return LauncherError(f"the process that starts trials {what}; its log {self._log} ends:\n{tail}")
