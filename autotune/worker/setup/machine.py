"""What this machine grants a process, and what a process tree takes of it, read from the kernel.

Hands on RAM, the processor's flags, bytes read from disks, and the peak memory of a process tree.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from math import inf
from pathlib import Path

import psutil

from autotune.settings.applied.cores.processor import cgroup_folders, cpuinfo

__all__ = [
    "bytes_from_disk",
    "processor_flags",
    "reset_tree_peak",
    "tf32_overrides",
    "tree_peak",
    "usable_ram_bytes",
]

_TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables of the environment that change what float32 means: NVIDIA's libraries' own switch, and torch's.
Source: cuBLAS's documentation; aten/src/ATen/Context.h."""


def usable_ram_bytes() -> int:
    """RAM that this process may use: the lesser of the machine's and the cgroup's."""
    return int(min([psutil.virtual_memory().total, *map(_memory_limit, cgroup_folders("memory"))]))


def processor_flags() -> frozenset[str]:
    """Instruction-set flags as Linux lists them; empty elsewhere."""
    return frozenset(cpuinfo("flags", "Features").split())


def tf32_overrides() -> tuple[str, ...]:
    """Those of _TF32_VARIABLES that are set, as NAME=0 or NAME=1: what else one may hold means nothing.

    Source: c10::utils::check_env for torch's; NVIDIA's is documented for 0 alone.
    """
    return tuple(f"{name}={os.environ[name]}" for name in _TF32_VARIABLES if os.environ.get(name) in {"0", "1"})


def bytes_from_disk() -> int:
    """Bytes that this process has had read from disks so far, the page cache not counted; 0 elsewhere than on Linux.

    Source: man 5 proc, /proc/pid/io.
    """
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    return 0


def reset_tree_peak() -> None:
    """Begin a new peak of the memory of this process and of all below it. Source: man 5 proc, /proc/pid/clear_refs."""
    for process in _process_tree():
        with suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def tree_peak() -> tuple[int, str]:
    """Peak memory of this process and of all below it, such as loader workers, and what the figure is made of.

    It is what they have now (on Linux their proportional set sizes, so that shared pages count once), and what each
    has had resident beyond that at its own peak since `reset_tree_peak`. Their peaks need not have come at the same
    time: the sum is an upper bound, never less than the tree had. Takes milliseconds.
    """
    total = 0
    for process in _process_tree():
        with suppress(psutil.Error):
            full = process.memory_full_info()
            total += int(getattr(full, "pss", full.uss)) + _above_present_bytes(process.pid)
    return total, "PSS of the process tree" if sys.platform == "linux" else "USS of the process tree"


def _process_tree() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _above_present_bytes(pid: int) -> int:
    """How much more a process has had resident at its peak than now. 0 where unknown."""
    with suppress(OSError, KeyError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        values = {line.partition(":")[0]: line.split() for line in lines}
        return max(0, int(values["VmHWM"][1]) - int(values["VmRSS"][1])) * 1024
    return 0


def _memory_limit(folder: Path) -> float:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return inf
