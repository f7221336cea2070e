"""Replace functions in all modules, those imported by now and those imported later; keep the originals.

Imports neither torch nor anything heavy: every Python process of a command starts with this.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = [
    "after_import",
    "imported_module",
    "open_file",
    "opened",
    "real_os",
    "replace_everywhere",
]

# The original os and io functions, before patching, and their replacement in all modules.

if TYPE_CHECKING:
    import os as real_os
else:
    import os

    real_os = ModuleType("os")
    vars(real_os).update(vars(os))

open_file = io.open
_SPARED = (
    "_frozen_importlib",
    "_io",
    "importlib",
    "posix",
    "zipimport",
    "autotune.worker.script.files",
    "autotune.worker.script.patching",
)
"""Modules that keep the originals: the import system, which caches bytecode, and our own."""


@contextmanager
def opened(path: str, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Open a file by its physical path, and close it afterwards.

    Raises:
        OSError: It can't be opened.
    """
    descriptor = real_os.open(path, flags, mode)
    try:
        yield descriptor
    finally:
        real_os.close(descriptor)


def replace_everywhere(pairs: Sequence[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Replace functions in every imported module, also where `from os import rename` bound them.

    Args:
        pairs: The original functions, each with its replacement.
    """
    wanted = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if name.startswith(_SPARED):
            continue
        try:
            held = object.__getattribute__(module, "__dict__")  # does not load a lazy module
        except AttributeError:
            continue
        if not isinstance(held, dict):
            continue
        for key, value in list(held.items()):
            if id(value) in wanted:
                held[key] = wanted[id(value)]


# Act on a module once it has been imported, whoever imports it and whenever.


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call a function on a module: now if it is imported, else once it has been executed.

    Args:
        name: The module's full name.
        act: The function, which takes the module.
    """
    module = imported_module(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, act))


def imported_module(name: str) -> ModuleType | None:
    """Return a module that has been executed; None if it has not, or not to its end."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find one module by the other finders, and act once it has been executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act
        self._loader: Any = None
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with this object as its loader."""
        # Another object that waits for the same module asks this one too.
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = self._found(path, target)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return spec
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with its own loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its own loader, then act."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Not earlier: many ask for a spec only to know whether there is such a module.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._act(module)

    def _found(
        self, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders find."""
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(self._name, path, target)
                if spec is not None:
                    return spec
        return None
