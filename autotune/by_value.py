"""Code that a trial could not import by name: modules loaded from a file by hand, as pytest's importlib mode does.

cloudpickle sends what is defined in `__main__` by value and all else by name. Here modules that no entry of the search
path leads to are sent by value as well, while a workload is pickled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from types import ModuleType
from typing import Any

import cloudpickle

from autotune.core.workload import PARTS, Workload

__all__ = ["unreachable_by_value"]


@contextmanager
def unreachable_by_value(workload: Workload) -> Iterator[None]:
    """While inside, classes and functions of the workload's unreachable modules are pickled by value."""
    names = {name for part in PARTS for name in _module_names(getattr(workload, part))}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules and not _is_reachable(name)]
    added = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _module_names(part: Any) -> Iterator[str]:
    """Modules of a part's class or function, of a model's submodules, and of the dataset inside a dataset."""
    while part is not None:
        for owner in (part, type(part)):
            name = getattr(owner, "__module__", None)
            if isinstance(name, str):
                yield name
        modules = getattr(part, "modules", None)
        if callable(modules) and not isinstance(part, type):
            with suppress(Exception):  # what a user's attribute of this name does is not ours to fail on
                yield from (type(module).__module__ for module in modules())
        part = getattr(part, "dataset", None)


def _is_reachable(name: str) -> bool:
    top = name.partition(".")[0]
    if name == "__main__" or not isinstance(sys.modules.get(name), ModuleType):
        return True
    return any(finder.find_spec(top) is not None for finder in (BuiltinImporter, FrozenImporter, PathFinder))
