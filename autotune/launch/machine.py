"""What the parent asks of this machine: other searches, NVIDIA's driver, malloc's variables."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import psutil

from autotune.config.command import without_secrets
from autotune.messages.trials import another_search
from autotune.note import Note

# Other searches on this machine share cores, memory and devices, so that each disturbs what the other
# measures.
#
# A search is known by its workers' command line, which other users may read unless /proc is mounted
# with hidepid; those in other containers are not seen, and are noticed by what they use
# (records/measurement).


_WORKER = ("-m", "autotune.worker")
"""In `python -P -m autotune.worker ...`, and in the ranks that were forked from it."""
_MOST_NOTED = 3  # our convention: more say nothing new
_LONGEST = 120  # characters of a command line, our convention: a line and a half of a terminal


class Neighbours:
    """Other searches that were seen while this one runs."""

    def __init__(self) -> None:
        self._noted = set[tuple[int, float]]()

    def new(self) -> tuple[Note, ...]:
        """Return a note for each search that runs now and was not noted before; of many, the first ones.

        This search, those of its own tree and orphans, which init has taken over, are none.
        """
        workers = {
            process.pid: process.info["ppid"]
            for process in psutil.process_iter(["ppid", "cmdline"])
            if tuple(process.info["cmdline"] or ())[2:4] == _WORKER
        }
        notes = []
        for pid in sorted({*workers.values()} - {0, 1, os.getpid(), *workers}):
            with suppress(psutil.Error):  # it has ended
                process = psutil.Process(pid)
                above = {parent.pid for parent in process.parents()}
                key = pid, process.create_time()
                is_ours = not above.isdisjoint({os.getpid(), *workers})
                if is_ours or key in self._noted or len(self._noted) >= _MOST_NOTED:
                    continue
                self._noted.add(key)
                user = "?"
                with suppress(psutil.Error, KeyError):  # a number that has no name
                    user = process.username()
                command = "?"
                with suppress(psutil.Error):
                    words = shlex.join(without_secrets(process.cmdline()))
                    command = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
                notes.append(another_search(pid, user=user, command=command))
        return tuple(notes)


# What the parent asks of NVIDIA's driver: to keep the GPUs initialised between trials, and what
# they are called.
#
# Without persistence mode the driver initialises a GPU for the first process that opens it and
# releases it after the last: this costs each trial one to three seconds, and state such as clocks
# that were set is lost. The parent therefore keeps NVML handles open while trials start and end:
# they initialise the GPU like a CUDA context, but take no memory. Source: NVIDIA Driver
# Persistence, Overview; NVML API reference, nvmlInit_v2 ("GPUs are discovered and initialized in
# nvmlDeviceGetHandleBy* functions"). A Ray cluster's hosts are left alone.


@contextmanager
def kept_initialised(device: str) -> Iterator[None]:
    """Keep handles of at least the GPUs that trials may run on, if they run on any.

    Without NVIDIA's driver nothing is done, and an error of NVML never ends a search. NVML counts
    its users: at the end no other user in this process is disconnected.

    Args:
        device: As asked for: torch's name, or "auto".
    """
    import pynvml

    with ExitStack() as held:
        with suppress(pynvml.NVMLError):
            if device.partition(":")[0] in {"auto", "cuda"}:
                held.enter_context(_opened_nvml())
                _take_handles()
        yield


def driver_and_gpus() -> tuple[str | None, tuple[str, ...]]:
    """Return the driver's version and the GPUs' products, without a CUDA context; (None, ()) without a driver."""
    import pynvml

    try:
        with _opened_nvml():
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            names = tuple(str(pynvml.nvmlDeviceGetName(one)) for one in handles)
            return str(pynvml.nvmlSystemGetDriverVersion()), names
    except pynvml.NVMLError:
        return None, ()


@contextmanager
def _opened_nvml() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _take_handles() -> None:
    """Open handles of the GPUs that CUDA_VISIBLE_DEVICES names by UUID, else of all, unless it hides them.

    Its ordinals are CUDA's, which may count the GPUs in another order (CUDA_DEVICE_ORDER). A handle
    needs no closing: NVML keeps the device initialised until its shutdown.
    """
    import pynvml

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    names: Iterable[object] = map(str.strip, named.split(","))
    take = pynvml.nvmlDeviceGetHandleByUUID
    if not named.startswith(("GPU-", "MIG-")):
        take = pynvml.nvmlDeviceGetHandleByIndex
        names = range(pynvml.nvmlDeviceGetCount() if named[:1].isdecimal() else 0)
    for name in names:
        with suppress(pynvml.NVMLError):  # a device that does not exist, or not this user's
            take(name)


# Trials keep the memory that they free: the variables by which glibc's malloc does so, and what is
# set for it.
#
# By default glibc gives the memory of large tensors back to the system and takes the page faults
# again in the next step; how many depends on how the heap of a process happens to lie, so that runs
# of the same settings differ. It reads its variables when a process starts: they must stand in the
# environment of the fork server itself. So it is on every device: which one "auto" is, is only
# known in the server; batches are put together in host memory for a GPU too. What is kept counts
# towards a limit on RAM. Source: mallopt(3); glibc's malloc/malloc.c (tcache and heap trimming),
# elf/dl-tunables.list (names of the variables).


KEEPING: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
"""The largest that glibc takes (larger tensors are given back all the same;
DEFAULT_MMAP_THRESHOLD_MAX on 64 bits), and more than a trial's heap holds otherwise: our own
convention."""
_OURS = "AUTOTUNE_KEEPS_MEMORY"
"""Set to "1" next to the two where autotune has set them."""
_TUNABLES = "GLIBC_TUNABLES"
_OF_MALLOC = "glibc.malloc."


def with_kept_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process for trials: with both variables, if glibc reads them and nobody has chosen.

    A user has chosen who has set either of them or a tunable of malloc, or has another malloc
    loaded (jemalloc, tcmalloc and mimalloc all bear the word), which does not read them.
    """
    own = {name: value for name, value in environment.items() if name != _OURS}
    has_glibc = False
    with suppress(ValueError, OSError):  # another C library does not know the name
        has_glibc = sys.platform == "linux" and bool(os.confstr("CS_GNU_LIBC_VERSION"))
    if malloc_switches(own) or "malloc" in environment.get("LD_PRELOAD", "") or not has_glibc:
        return own
    return {**own, **KEEPING, _OURS: "1"}


def has_kept_memory(environment: Mapping[str, str]) -> bool:
    """Return whether autotune has set the variables in this environment of a trial."""
    return environment.get(_OURS) == "1"


def malloc_switches(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is set for glibc's malloc to give memory back by, as NAME=value; () if nothing is."""
    tunables = environment.get(_TUNABLES, "").split(":")
    variables = [f"{name}={environment[name]}" for name in KEEPING if name in environment]
    return (*variables, *sorted(entry for entry in tunables if entry.startswith(_OF_MALLOC)))
