"""Launcher over a fork server: one process that has imported torch forks each rank in some 10 ms. Linux only.

Where the server answers that its forks can't open a device, each rank is an interpreter of its own from then on,
unless trials run on the CPU.

Told what a script imports, it has the server import that too, while its caller goes on: the next trial waits for it.
Where the server can't be forked any more after that, it is ended, and another leaves out what was in the way.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from autotune.errors import LauncherError
from autotune.launch.launcher import Exit, Launch
from autotune.launch.local.fresh_interpreter import FreshInterpreterLauncher
from autotune.launch.local.process_tree import kill_all
from autotune.launch.local.server import OF_IMPORTS, Preload, PreloadFault, Server
from autotune.launch.local.watch import Started, sockets_in, watch
from autotune.messages.trials import forks_cannot_open_device, not_preloaded
from autotune.note import Note

__all__ = ["ForkServerLauncher"]

_PRELOADS = 4  # our convention: all, twice without what was in the way, then what the last one had come through


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
        self._server: Server | None = Server(self._log, self._environment, self._token)
        self._preload: Preload | None = None
        self._fresh: FreshInterpreterLauncher | None = None
        """Starts trials in place of a server whose forks can't open a device."""
        self.notes: tuple[Note, ...] = ()
        """Why the server is not used, or has not imported all that it was to."""

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

    def preload(self, names: Sequence[str], environment: Mapping[str, str]) -> None:
        """As Preloads has it; a second call takes the place of the first, with a new server."""
        if self._fresh is not None:
            return
        if self._preload is not None:
            self.close()
        self._preload = Preload(names=tuple(names), environment=dict(environment), left=_PRELOADS) if names else None
        with suppress(LauncherError):  # the next launch begins anew, or tells it
            self._begun_server()

    def close(self) -> None:
        """End the server and all processes that have its token."""
        if self._server is not None:
            self._server.close()
            kill_all([self._server.process.pid], self._token)
            self._server.process.wait()
        self._server = None

    def _fork(self, launch: Launch, output: int, held: ExitStack) -> Started:
        try:
            return self._fork_once(launch, output, held)
        except LauncherError:  # it has died since the last trial
            self.close()
            return self._fork_once(launch, output, held)

    def _fork_once(self, launch: Launch, output: int, held: ExitStack) -> Started:
        server = self._ready_server()
        held.enter_context(sockets_in(launch.folder))
        return server.fork(launch, output)

    def _begun_server(self) -> Server:
        """The server, which may not be ready yet, with what it is to import."""
        self._server = self._server or Server(self._log, self._environment, self._token)
        if self._preload is not None:
            self._server.preload(self._preload)
        return self._server

    def _ready_server(self) -> Server:
        while True:
            server = self._begun_server()
            bad = server.bad_forks()
            if bad and self._device != "cpu":
                self._give_up_forks(", ".join(bad))
                raise _BadForkError
            fault = server.preload_fault()
            if fault is None or self._preload is None:
                return server
            self.close()
            self._preload = self._reduced(self._preload, fault)

    def _reduced(self, tried: Preload, fault: PreloadFault) -> Preload | None:
        """What the next server is to import; what it is not is noted."""
        if fault.culprit is None and fault.reason not in OF_IMPORTS and not tried.is_close:
            return replace(tried, is_close=True, left=tried.left - 1)
        names = _names_without(tried, fault)
        packages = _packages(set(tried.names).difference(names))
        self.notes += (not_preloaded(packages, fault.culprit, fault.reason),)
        return replace(tried, names=names, left=tried.left - 1) if names else None

    def _give_up_forks(self, devices: str) -> None:
        why = (
            f"each trial starts an interpreter of its own: a package that torch loads by itself has opened {devices}, "
            "which a fork can't open after that; set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where you don't need the package"
        )
        self.notes += (forks_cannot_open_device(devices),)
        self._fresh = FreshInterpreterLauncher(self._environment, log_line=f"autotune: {why}\n")
        self.close()


def _names_without(tried: Preload, fault: PreloadFault) -> tuple[str, ...]:
    """Names that another server may import."""
    if fault.culprit is None or fault.reason in OF_IMPORTS or tried.left <= 1:
        return ()
    if tried.left == 2:
        return tuple(tried.names[: fault.preloaded])
    inside = tuple(f"{name}." for name in fault.chain)
    return tuple(name for name in tried.names if not f"{name}.".startswith(inside))


def _packages(names: Iterable[str]) -> list[str]:
    return sorted({name.partition(".")[0] for name in names})
