"""Trials keep the memory that they free: the variables by which glibc's malloc does so, and what is set for it.

By default glibc gives the memory of large tensors back to the system and takes the page faults anew in the next step;
how many depends on how the heap of a process happens to lie, so that runs of the same settings differ. It reads its
variables when a process starts: they must stand in the environment of the fork server itself. So it is on every device:
which one "auto" is, is only known in the server; batches are put together in host memory for a GPU too. What is kept
counts towards a limit on RAM.
Source: mallopt(3); glibc's malloc/malloc.c (tcache and heap trimming), elf/dl-tunables.list (names of the variables).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

__all__ = ["KEEPING", "has_kept_memory", "malloc_switches", "with_kept_memory"]

KEEPING: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
"""The largest that glibc takes (larger tensors are given back all the same; DEFAULT_MMAP_THRESHOLD_MAX on 64 bits), and
more than a trial's heap holds otherwise: our own convention."""
_OURS = "AUTOTUNE_KEEPS_MEMORY"
"""Set to "1" beside the two where autotune has set them."""
_TUNABLES, _OF_MALLOC = "GLIBC_TUNABLES", "glibc.malloc."


def with_kept_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process for trials: with both variables, where glibc reads them and nobody has chosen.

    A user has chosen who has set either of them or a tunable of malloc, or has another malloc loaded (jemalloc,
    tcmalloc and mimalloc all bear the word), which does not read them.
    """
    own = {name: value for name, value in environment.items() if name != _OURS}
    has_other = "malloc" in environment.get("LD_PRELOAD", "")
    if malloc_switches(own) or has_other or not _has_glibc():
        return own
    return {**own, **KEEPING, _OURS: "1"}


def has_kept_memory(environment: Mapping[str, str]) -> bool:
    """Whether autotune has set the variables in this environment of a trial."""
    return environment.get(_OURS) == "1"


def malloc_switches(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What is set for glibc's malloc to give memory back by, or by its tunables, as NAME=value; () where nothing is."""
    tunables = environment.get(_TUNABLES, "").split(":")
    variables = [f"{name}={environment[name]}" for name in KEEPING if name in environment]
    return (*variables, *(sorted(entry for entry in tunables if entry.startswith(_OF_MALLOC))))


def _has_glibc() -> bool:
    """Whether this interpreter, which trials start again, runs on GNU's C library."""
    with suppress(ValueError, OSError):  # another C library does not know the name
        return sys.platform == "linux" and bool(os.confstr("CS_GNU_LIBC_VERSION"))
    return False
