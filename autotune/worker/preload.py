"""What a script imports from installed packages, imported once in the fork server: its forks have it from the start.

Comes in: at the probe's end, in its process, the modules that were there before the script; in the server, names of
modules. Goes out: those names; how far the imports came, and what among them has made the server unfit to be forked: a
fork has none of its parent's threads, but the locks that they held, and can't open a device that its parent has opened.

Imports do more than to define names. Put back after them: Python's signal handlers, the working directory, sys.path,
the states of random and NumPy. Kept, since a script that imports the packages itself would see it too: what they set in
os.environ, warnings' filters, the excepthook, the start method of multiprocessing, torch's defaults, what is registered
with os.register_at_fork. Can't be put back: signal handlers that C code has installed, and what an import writes to
disk. Each rank takes sys.path from its job. Of what a script does before an import, only the variables that it sets
come before the preloaded one.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path, PurePath
from time import perf_counter

import numpy as np

from autotune.protocol.attach import ATTACH_VARIABLE
from autotune.settings.workload import INSTALLED
from autotune.worker.fork_watch import ForkWatch, Unfit

__all__ = ["PreloadResult", "changed_variables", "installed_modules", "preload"]

_LEFT_OUT = re.compile(r"autotune|(.+\.)?(tests?|test_.*|conftest|__main__)", flags=re.DOTALL)
"""A module whose name, or that of a package around it, is such a one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadResult:
    """How far a preload came; one with a reason leaves a process that must not be forked into trials."""

    preloaded: int
    """Names, from the first on, after which the process was still fit; 0 where that is not known."""
    reason: Unfit | None = None
    """What it has now; None: it is fit."""
    culprit: str | None = None
    """The top-level package whose import brought that; None where it is not known: preload closely to find it."""
    chain: tuple[str, ...] = ()
    """Modules that were being imported meanwhile, the outermost first: to import one of them brings it again."""
    raised: tuple[str, ...] = ()
    """Names whose import has raised."""
    seconds: float


def installed_modules(before: Collection[str]) -> tuple[str, ...]:
    """Modules of installed packages that this process has imported since, in the order in which their imports began.

    Those of the standard library take no time; what has no file of its own, is known by another name than its own,
    or belongs to autotune or to tests is left out.

    Args:
        before: Names that were in sys.modules then.
    """
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if name not in before and not _is_left_out(name) and _is_importable(name, module)
    )


def changed_variables(before: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that are set otherwise than before; what a script sets, packages may read at import."""
    own = {ATTACH_VARIABLE}  # which a process changes once it trains
    return {name: value for name, value in os.environ.items() if name not in own and before.get(name) != value}


def _is_left_out(name: str) -> bool:
    parts = name.split(".")
    inside = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return not all(part.isidentifier() for part in parts) or any(_LEFT_OUT.fullmatch(each) for each in inside)


def _is_importable(name: str, module: object) -> bool:
    spec = None
    with suppress(Exception):  # an object in a module's place may raise whatever it likes
        spec = getattr(module, "__spec__", None)
    if not isinstance(spec, ModuleSpec) or spec.name != name or not spec.has_location:
        return False
    return _is_installed(spec)


def _is_installed(spec: ModuleSpec) -> bool:
    """Whether a module comes from a folder of installed packages; editable installs are the user's own code."""
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return any(not INSTALLED.isdisjoint(PurePath(place).parts) for place in places if isinstance(place, str))


def preload(
    names: Sequence[str],
    environment: Mapping[str, str],
    bad_fork_devices: Callable[[], Collection[str]],
    *,
    is_close: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> PreloadResult:
    """Import modules in their order until one makes this process unfit to be forked; what one raises is printed.

    Args:
        names: As `installed_modules` lists them; one whose package is not installed for this process is passed over.
        environment: Variables for the time of the imports; what these set them to stays.
        bad_fork_devices: Forks to find out which kinds of devices forks of this process can't open.
        is_close: Look for them and for child processes after each package, not just at the end.
        tell: Called with the name of each package before it is imported.
    """
    begun, watch, done, raised = perf_counter(), ForkWatch(bad_fork_devices), 0, list[str]()
    with _put_back(), _set(environment), watch.over_imports():
        for package, group in groupby(names, key=_package_of):
            tell(package)
            before, count = done, len(sys.modules)
            for name in group:
                raised += _import(name)
                if watch.reason is not None:
                    break
                done += 1
            if is_close and len(sys.modules) > count:
                watch.look_closely(package)
            if watch.reason is not None:
                done = min(done, before) if watch.chain == [package] else done
                break
        watch.look_closely(None)
    return PreloadResult(
        preloaded=done if watch.reason is None or watch.chain else 0,
        reason=watch.reason,
        culprit=watch.culprit,
        chain=tuple(watch.chain),
        raised=tuple(raised),
        seconds=perf_counter() - begun,
    )


def _package_of(name: str) -> str:
    return name.partition(".")[0]


def _import(name: str) -> list[str]:
    """Import a module; its name again where that has raised."""
    if name in sys.modules:
        return []
    try:
        spec = find_spec(_package_of(name))
        if spec is not None and _is_installed(spec):  # else a trial would find another module under this name
            import_module(name)
    except BaseException:  # noqa: BLE001 - it may even exit; a trial that imports it sees the same
        traceback.print_exc()
        return [name]
    return []


@contextmanager
def _put_back() -> Iterator[None]:
    """Put back what the server or the ranks depend on, and leave no printed text for each fork to print again."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    cwd, path, drawn, drawn_by_numpy = Path.cwd(), list(sys.path), random.getstate(), np.random.get_state()
    yield
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: not Python's
            signal.signal(number, handler)
    os.chdir(cwd)
    sys.path[:] = path
    random.setstate(drawn)
    np.random.set_state(drawn_by_numpy)
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError, AttributeError):  # an import may have closed or replaced it
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
