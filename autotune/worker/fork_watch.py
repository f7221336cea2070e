"""Whether a process may still be forked into trials: it has one thread, no device in use, and no child processes.

Watches imports and hands out the first module whose execution has changed that. A fork has none of its parent's
threads, but the locks that they held. What costs no fork is looked at after each module, the rest when asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from time import monotonic, sleep
from types import ModuleType
from typing import Literal

import psutil

__all__ = ["ForkWatch", "Unfit"]

Unfit = Literal["threads", "device", "processes"]
"""What a process has that can't be forked into trials; processes: children, which the end of a trial would end too."""

_LOADERS = (ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader)
_EXECUTE = "exec_module"
_DEVICE_FILES = re.compile(r"/dev/(nvidia-uvm|kfd|dri/renderD\d+)")
"""Open once CUDA, ROCm or Level Zero is in use, by their drivers' names for them; where it is otherwise, the fork of a
closer look finds it for the kinds that torch knows."""


@dataclass(slots=True)
class ForkWatch:
    """Notices the first module whose execution makes this process unfit to be forked."""

    bad_fork_devices: Callable[[], Collection[str]]
    """Forks to find out which kinds of devices forks of this process can't open."""
    reason: Unfit | None = None
    culprit: str | None = None
    """The top-level package of the innermost module that was executed then."""
    chain: list[str] = field(default_factory=list)
    """All modules that were, the outermost first."""
    _running: list[str] = field(default_factory=list)
    """Modules that are being executed, the outermost first."""
    _bad: frozenset[str] = field(init=False)
    _threads: int = field(init=False)
    _files: frozenset[str] = field(init=False)
    _children: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._bad = frozenset(self.bad_fork_devices())  # its fork ends the threads that prepare for it
        self._threads, self._files, self._children = max(1, _threads()), _device_files(), _children()

    @contextmanager
    def over_imports(self) -> Iterator[None]:
        """Look after each module's execution."""
        with ExitStack() as patched:
            for loader in _LOADERS:
                own, is_own = getattr(loader, _EXECUTE), _EXECUTE in vars(loader)
                setattr(loader, _EXECUTE, self._watched(own))
                patched.callback(*(setattr, loader, _EXECUTE, own) if is_own else (delattr, loader, _EXECUTE))
            yield

    def _watched(self, execute: Callable[[object, ModuleType], None]) -> Callable[[object, ModuleType], None]:
        def exec_module(loader: object, module: ModuleType) -> None:
            self._running.append(module.__name__)
            try:
                execute(loader, module)
            finally:
                self._look()
                self._running.pop()

        return exec_module

    def _look(self) -> None:
        """At what costs no fork; only where there are more threads, one."""
        if self.reason is None and not _device_files() <= self._files:
            self._found("device", self._running)
        if self.reason is None and _threads() > self._threads and not self._settles():
            self._found("threads", self._running)

    def look_closely(self, package: str | None) -> None:
        """At all, after a package's import; None: after several."""
        chain = [] if package is None else [package]
        if self.reason is None and not self._bad.issuperset(self.bad_fork_devices()):
            self._found("device", chain)
        if self.reason is None and not self._settles():
            self._found("threads", chain)
        if self.reason is None and not _children() <= self._children:
            self._found("processes", chain)

    def _settles(self) -> bool:
        """Whether all new threads end by themselves, or when the process forks, as OpenBLAS's do."""
        self.bad_fork_devices()
        until = monotonic() + 0.2  # a thread that has ended is listed for some microseconds more
        while _threads() > self._threads and monotonic() < until:
            sleep(0.002)
        return _threads() <= self._threads

    def _found(self, reason: Unfit, chain: Sequence[str]) -> None:
        self.reason, self.chain = reason, list(chain)
        self.culprit = chain[-1].partition(".")[0] if chain else None


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - after each module


def _device_files() -> frozenset[str]:
    """Files of devices that this process has open."""
    found = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        with suppress(OSError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - as above
    return frozenset(path for path in found if _DEVICE_FILES.fullmatch(path))


def _children() -> frozenset[int]:
    """Processes that this one has started and that run."""
    return frozenset(one.pid for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE)
