"""Act once a module has been imported, whoever imports it and whenever. Imports neither torch nor anything heavy."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Act on a module now, where it is imported, else once it is executed."""
    module = sys.modules.get(name)
    if module is not None and not _is_half_done(module):
        act(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, act))


def _is_half_done(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module by the finders behind it, and acts once that is executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act
        self._loader: Any = None
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with this as its loader."""
        if fullname != self._name or self._is_asking:  # another that waits for the same module asks this one too
            return None
        self._is_asking = True
        try:
            spec = self._found(path, target)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return spec
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader does; then act."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self in sys.meta_path:  # until here: many ask for a spec only to know whether there is such a module
            sys.meta_path.remove(self)
        self._act(module)

    def _found(self, path: Sequence[str] | None, target: ModuleType | None) -> importlib.machinery.ModuleSpec | None:
        """What the other finders say."""
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(self._name, path, target)
                if spec is not None:
                    return spec
        return None
