"""The processor: its name, the cores of it that this process may use, and the control groups that say so."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from math import ceil, inf
from pathlib import Path

__all__ = ["cgroup_folders", "cpu_quota", "cpu_quota_here", "cpuinfo", "processor_name", "usable_cores"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: the lesser of affinity and cgroup quota, at least 1.

    Source: Linux kernel, admin-guide/cgroup-v2 (cpu.max) and scheduler/sched-bwc (cfs_quota_us).
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, ceil(min(affinity, cpu_quota_here())))


def cpu_quota_here() -> float:
    """Cores that this process may use by its control group and all above it; infinite where none limits it."""
    return min([inf, *map(cpu_quota, cgroup_folders("cpu"))])


def cgroup_folders(controller: str) -> list[Path]:
    """This process's group and all above it: the tightest limit counts."""
    folders: list[Path] = []
    with suppress(OSError):
        for line in _CGROUP_MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _CGROUP_ROOT if controllers == "" else _CGROUP_ROOT / controller
            if controllers in {"", controller} or controller in controllers.split(","):
                own = root / path.lstrip("/")
                folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return folders


def cpu_quota(folder: Path) -> float:
    """Cores that a group may use; infinite where it is not limited, which stands there as "max", or as -1."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else inf
    return inf


def processor_name() -> str:
    """The processor's model, such as "AMD EPYC 9354"."""
    return cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def cpuinfo(*names: str) -> str:
    """The value of the first line of /proc/cpuinfo that begins with one of these names; "" where there is none."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
    return ""
