"""Code that a trial could not import by name: modules loaded from a file by hand, as pytest's importlib mode does.

cloudpickle sends what is defined in `__main__` by value and all else by name. Here modules that no entry of the search
path leads to are sent by value as well, while a workload is pickled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import cloudpickle

from autotune.settings.workload import PARTS, Ref, Workload

__all__ = ["unreachable_by_value"]

_DATASETS_DEEP = 8


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
    for _ in range(_DATASETS_DEEP):
        if part is None or isinstance(part, Ref | str):
            return
        inner = None
        with suppress(Exception):  # what a user's attributes of these names do is not ours to fail on
            yield from (name for owner in (part, type(part)) if isinstance(name := owner.__module__, str))
        with suppress(Exception):  # as above
            yield from () if isinstance(part, type) else [type(module).__module__ for module in part.modules()]
        with suppress(Exception):  # as above
            inner = part.dataset
        part = inner


def _is_reachable(name: str) -> bool:
    top = name.partition(".")[0]
    if name == "__main__" or not isinstance(sys.modules.get(name), ModuleType):
        return True
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path if hasattr(finder, "find_spec"))
