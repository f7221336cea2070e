"""The functions of os and io as they are before anything stands in for them, and where modules have kept them.

Comes in: functions and what stands in for them. Goes out: nothing: `from os import rename` binds at the import, so that
modules which have done so get the stand-in too.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["FUNCTIONS", "open_file", "replace_everywhere"]

FUNCTIONS = {
    name: getattr(os, name)
    for name in (
        "access", "chdir", "chmod", "chown", "close", "copy_file_range", "fchdir", "fchmod", "fchown", "fstat",
        "ftruncate", "getcwd", "getcwdb", "getxattr", "lchown", "link", "listdir", "listxattr", "lstat", "mkdir",
        "mkfifo", "mknod", "open", "pwrite", "read", "readlink", "remove", "removexattr", "rename", "replace", "rmdir",
        "scandir", "setxattr", "stat", "statvfs", "symlink", "truncate", "unlink", "utime", "write",
    )
}  # fmt: skip
"""By their names in os."""
open_file = io.open
_SPARED = ("_frozen_importlib", "_io", "importlib", "posix", "zipimport", "autotune.worker.attach.redirect")
"""What the import system itself uses: bytecode is to be cached as ever."""


def replace_everywhere(pairs: Sequence[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Replace functions in every module that is imported."""
    wanted = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if name.startswith(_SPARED):
            continue
        try:
            held = object.__getattribute__(module, "__dict__")  # a lazy module is not to be loaded by this
        except AttributeError:
            continue
        if not isinstance(held, dict):
            continue
        for key, value in list(held.items()):
            if id(value) in wanted:
                held[key] = wanted[id(value)]
