"""Keep the original os and io functions, before patching, and replace functions in all modules."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os as real_os
else:
    import os

    real_os = ModuleType("os")
    vars(real_os).update(vars(os))

__all__ = ["open_file", "opened", "real_os", "replace_everywhere"]

open_file = io.open
_SPARED = (
    "_frozen_importlib",
    "_io",
    "importlib",
    "posix",
    "zipimport",
    "autotune.worker.script.files",
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
