"""Preload a script's imports in the fork server, and check that a process may still be forked."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import find_spec
from itertools import accumulate, groupby
from pathlib import Path, PurePath
from time import monotonic, sleep
from types import ModuleType
from typing import Literal

import numpy as np
import psutil

from autotune.config.plan import INSTALLED
from autotune.protocol.attach import ATTACH_VARIABLE
from autotune.protocol.messages import PreloadResult

# A process may be forked into trials while it has one thread, no device in use and no child processes:
# a fork has none of its parent's threads, but the locks that they held. What costs no fork is checked
# after each module, the rest after each package.


Unfit = Literal["threads", "device", "processes"]
"""What a process has that can't be forked into trials; processes: children, which the end of a
trial would end too."""

_LOADERS = (ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader)
_EXECUTE = "exec_module"
_DEVICE_FILES = re.compile(r"/dev/(nvidia-uvm|kfd|dri/renderD\d+)")
"""Open once CUDA, ROCm or Level Zero is in use, by their drivers' names for them; where it is
otherwise, the fork after each package finds it for the kinds that torch knows."""


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
        # first: its fork ends the threads that prepare for it
        self._bad = frozenset(self.bad_fork_devices())
        self._threads = max(1, _threads())
        self._files = _device_files()
        self._children = _children()

    @contextmanager
    def over_imports(self) -> Iterator[None]:
        """Check after each module's execution."""
        with ExitStack() as patched:
            for loader in _LOADERS:
                own = getattr(loader, _EXECUTE)
                is_own = _EXECUTE in vars(loader)
                setattr(loader, _EXECUTE, self._watched(own))
                patched.callback(
                    *(setattr, loader, _EXECUTE, own) if is_own else (delattr, loader, _EXECUTE)
                )
            yield

    def _watched(
        self, execute: Callable[[object, ModuleType], None]
    ) -> Callable[[object, ModuleType], None]:
        def exec_module(loader: object, module: ModuleType) -> None:
            self._running.append(module.__name__)
            try:
                execute(loader, module)
            finally:
                if self.reason is None and not _device_files() <= self._files:
                    self._found("device", self._running)
                if self.reason is None and _threads() > self._threads and not self._settles():
                    self._found("threads", self._running)
                self._running.pop()

        return exec_module

    def after_package(self, package: str) -> None:
        """Check everything after a package's import, unless something was found meanwhile."""
        if self.reason is not None:
            return
        if not self._bad.issuperset(self.bad_fork_devices()):
            self._found("device", [package])
        elif not self._settles():
            self._found("threads", [package])
        elif not _children() <= self._children:
            self._found("processes", [package])

    def _settles(self) -> bool:
        """Return whether all new threads end by themselves, or when the process forks, as OpenBLAS's do."""
        self.bad_fork_devices()
        until = monotonic() + 0.2  # a thread that has ended is listed for some microseconds more
        while _threads() > self._threads and monotonic() < until:
            sleep(0.002)
        return _threads() <= self._threads

    def _found(self, reason: Unfit, chain: Sequence[str]) -> None:
        self.reason = reason
        self.chain = list(chain)
        self.culprit = chain[-1].partition(".")[0]


def _threads() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - after each module


def _device_files() -> frozenset[str]:
    """Return the files of devices that this process has open."""
    found = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        with suppress(OSError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - as above
    return frozenset(path for path in found if _DEVICE_FILES.fullmatch(path))


def _children() -> frozenset[int]:
    """Return the processes that this one has started and that run."""
    return frozenset(
        one.pid for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE
    )


# What a script imports from installed packages is imported once in the fork server: its forks have it
# from the start.
#
# Imports do more than to define names. Put back after them: Python's signal handlers, the working
# directory, sys.path, the states of random and NumPy. Kept, since a script that imports the
# packages itself would see it too: what they set in os.environ, warnings' filters, the excepthook,
# the start method of multiprocessing, torch's defaults, what is registered with
# os.register_at_fork. Can't be put back: signal handlers that C code has installed, and what an
# import writes to disk. Each rank takes sys.path from its job. Of what a script does before an
# import, only the variables that it sets come before the preloaded one.


_LEFT_OUT = re.compile(r"autotune|(.+\.)?(tests?|test_.*|conftest|__main__)", flags=re.DOTALL)
"""A module whose name, or that of a package around it, is such a one."""


def installed_modules(before: Collection[str]) -> tuple[str, ...]:
    """Return modules of installed packages that this process has imported since, in the order of their imports.

    Those of the standard library take no time; what has no file of its own, is known by another
    name than its own, or belongs to autotune or to tests is left out.

    Args:
        before: Names that were in sys.modules then.
    """
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if name not in before and not _is_left_out(name) and _is_importable(name, module)
    )


def changed_variables(before: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that differ from before; what a script sets, packages may read at import."""
    own = {ATTACH_VARIABLE}  # which a process changes once it trains
    return {
        name: value
        for name, value in os.environ.items()
        if name not in own and before.get(name) != value
    }


def _is_left_out(name: str) -> bool:
    parts = name.split(".")
    around = accumulate(parts, "{}.{}".format)
    return not all(map(str.isidentifier, parts)) or any(map(_LEFT_OUT.fullmatch, around))


def _is_importable(name: str, module: object) -> bool:
    spec = None
    with suppress(Exception):  # an object in a module's place may raise whatever it likes
        spec = getattr(module, "__spec__", None)
    if not isinstance(spec, ModuleSpec) or spec.name != name or not spec.has_location:
        return False
    return _is_installed(spec)


def _is_installed(spec: ModuleSpec) -> bool:
    """Return whether a module comes from a folder of installed packages; editable installs are the user's own code."""
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return any(
        not INSTALLED.isdisjoint(PurePath(place).parts)
        for place in places
        if isinstance(place, str)
    )


def preload(
    names: Sequence[str],
    environment: Mapping[str, str],
    bad_fork_devices: Callable[[], Collection[str]],
    *,
    before_import: Callable[[str], object] = lambda _: None,
) -> PreloadResult:
    """Import modules in their order until one makes this process unfit to be forked; what one raises is printed.

    Args:
        names: As `installed_modules` lists them; one whose package is not installed for this
            process is passed over.
        environment: Variables for the time of the imports; what these set them to stays.
        bad_fork_devices: Forks to find out which kinds of devices forks of this process can't open.
        before_import: Called with the name of each package.
    """
    watch = ForkWatch(bad_fork_devices)
    done = 0
    with _put_back(), _set(environment), watch.over_imports():
        for package, group in groupby(names, key=_package_of):
            before_import(package)
            before = done
            count = len(sys.modules)
            for name in group:
                _import(name)
                if watch.reason is not None:
                    break
                done += 1
            if len(sys.modules) > count:
                watch.after_package(package)
            if watch.reason is not None:
                done = min(done, before) if watch.chain == [package] else done
                break
    return PreloadResult(
        preloaded=done,
        reason=watch.reason,
        culprit=watch.culprit,
        chain=tuple(watch.chain),
    )


def _package_of(name: str) -> str:
    return name.partition(".")[0]


def _import(name: str) -> None:
    """Import a module, unless a trial would find another one under this name; print what that raises."""
    if name in sys.modules:
        return
    try:
        spec = find_spec(_package_of(name))
        if spec is not None and _is_installed(spec):
            import_module(name)
    except BaseException:  # noqa: BLE001 - it may even exit; a trial that imports it sees the same
        traceback.print_exc()


@contextmanager
def _put_back() -> Iterator[None]:
    """Put back what the server or the ranks depend on, and leave no printed text for each fork to print again."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    cwd = Path.cwd()
    path = list(sys.path)
    drawn = random.getstate()
    drawn_by_numpy = np.random.get_state()
    yield
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: not Python's
            signal.signal(number, handler)
    os.chdir(cwd)
    sys.path[:] = path
    random.setstate(drawn)
    np.random.set_state(drawn_by_numpy)
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(
            OSError, ValueError, AttributeError
        ):  # an import may have closed or replaced it
            if stream is not None:
                stream.flush()
    ctypes.CDLL(None).fflush(None)


@contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    yield
    for name, value in before.items():
        if os.environ.get(name) == environment[name]:  # else an import has chosen another
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
