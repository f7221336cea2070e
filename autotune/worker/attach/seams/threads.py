"""The number of threads that a script sets by a variable before it imports torch, which autotune has imported already.

Comes in: the variables before its first line. Goes out: torch's number of threads, at the script's own import of torch.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any

import torch

__all__ = ["follow_variables"]

_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""What torch takes its number of threads from when it is imported; of two that have changed the first counts.
Source: aten/src/ATen/ParallelOpenMP.cpp, get_num_threads, over omp_get_max_threads and mkl_get_max_threads."""


def follow_variables() -> None:
    """At the first import of torch from now on, set its threads as variables say that have changed until then."""
    before, plain, is_over = _values(), builtins.__import__, False

    def importing(name: str, *arguments: Any, **named: Any) -> Any:
        nonlocal is_over
        if not is_over and name.partition(".")[0] == "torch" and not _is_ours(sys._getframe(1)):  # noqa: SLF001
            is_over = True
            if builtins.__import__ is importing:
                builtins.__import__ = plain
            set_now = next((value for value, was in zip(_values(), before, strict=True) if value != was), None)
            if set_now is not None and set_now.isdecimal() and int(set_now) > 0:
                torch.set_num_threads(int(set_now))
        return plain(name, *arguments, **named)

    builtins.__import__ = importing


def _values() -> list[str | None]:
    return [os.environ.get(name) for name in _VARIABLES]


def _is_ours(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "autotune"
