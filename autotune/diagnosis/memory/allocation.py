"""What torch's allocator holds beyond what tensors take of it, and a GPU that one job leaves mostly empty. Pure.

Comes in: an Evidence, and its findings. Goes out: at most one piece of advice of each kind, in bytes or in jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from autotune.diagnosis.gains import advise
from autotune.records.diagnosis import Advice, Evidence, Finding
from autotune.records.measurement import MemorySample

__all__ = ["expandable_segments", "share_gpu"]

_UNUSED = 0.2
"""Of the reserved memory that no tensor takes at its peak, from which on it is fragments: our own convention, far above
the up to 2 MiB by which a block may be rounded (c10/cuda/CUDACachingAllocator.cpp, kRoundLarge)."""
_LEAST_UNUSED = 0.05
"""The same where the allocator found no room: our own convention. Where tensors take all that is reserved, growing
segments win nothing."""
_NEAR_LIMIT = 0.8
"""Of the limit, from which on fragments stand in the way: our own convention; half as much again may not fit."""
_EMPTY = 0.5
"""Of the device's memory, and of its multiprocessors, below which another such job has room beside: two of them."""
_ROOM = 0.9
"""Of a part's memory, or of the device's, that jobs may fill: our own convention, as the memory limit's default. A MIG
instance has some 4 % less than its share (4.75 of an A100's 39.5 GiB for one in eight), and a peak is one window's.
Source: docs.nvidia.com, "MIG User Guide", the listing of GPU instance profiles."""
_MOST_JOBS = 48
"""Clients of one MPS server on a device. Source: docs.nvidia.com, "Multi-Process Service", Volta MPS."""
_HEALTHY = frozenset({"compute", "launch"})
"""Findings that more data would not change."""


class _Profile(NamedTuple):
    """A MIG profile: its share of multiprocessors and of memory, and how many such instances a GPU has."""

    slices: int
    sm_share: float
    memory_share: float
    instances: int


_SEVENTHS = (_Profile(1, 1 / 7, 1 / 8, 7), _Profile(2, 2 / 7, 2 / 8, 3), _Profile(3, 3 / 7, 4 / 8, 2))
_QUARTERS = (_Profile(1, 1 / 4, 1 / 4, 4), _Profile(2, 2 / 4, 2 / 4, 2))
_MIG = {
    **dict.fromkeys(("A100", "H100", "H20", "H200", "GH200", "B200", "GB200", "B300", "GB300"), _SEVENTHS),
    "A30": _QUARTERS,
}
"""GPUs that can be divided, by a word of their names.
Source: docs.nvidia.com, "MIG User Guide", "Supported GPUs" and "Supported MIG Profiles"."""


def expandable_segments(evidence: Evidence) -> Iterator[Advice]:
    """Segments that grow leave fewer fragments where sizes change from batch to batch; the bytes that are at stake.

    Advised on CUDA near the memory limit, unless shapes are fixed or it is set already. Much more reserved than
    allocated, or some more with retries in the window, shows that there are fragments: at most what is reserved beyond
    the tensors' peak is won, and less where the two peaks fell at different times.
    Source: pytorch.org, "CUDA semantics", "Optimizing memory usage with PYTORCH_ALLOC_CONF".
    """
    environment, memory = evidence.environment, evidence.measurement.memory
    if environment.device_kind != "cuda" or environment.has_expandable_segments or _has_fixed_shapes(evidence):
        return
    unused = _unused_bytes(memory)
    if unused is None or memory.peak_bytes < _NEAR_LIMIT * evidence.limit_bytes:
        return
    least = _LEAST_UNUSED if memory.alloc_retries else _UNUSED
    if not unused or unused < least * (memory.reserved_bytes or 0):
        return
    figures: dict[str, JsonValue] = {
        "unused_bytes": unused,
        "reserved_bytes": memory.reserved_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "alloc_retries": memory.alloc_retries or 0,
        "limit_fraction": memory.peak_bytes / evidence.limit_bytes,
    }
    yield advise("expandable_segments", evidence.measurement.samples_per_s, None, {}, **figures)


def share_gpu(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """A GPU that one job leaves mostly empty has room for more of them: how many, not how fast.

    Advised on CUDA where half of memory and multiprocessors stay free, by GPM, and neither data nor copies hold the job
    up. By MIG where the GPU can be divided and a part of it has what the job uses, else by MPS.
    Source: docs.nvidia.com, "MIG User Guide"; "Multi-Process Service".
    """
    environment, run = evidence.environment, evidence.measurement
    sm_fraction = None if run.fullness is None else run.fullness.sm_fraction
    is_healthy = findings[0].bottleneck in _HEALTHY
    if environment.device_kind != "cuda" or not is_healthy or not sm_fraction or evidence.config.world_size > 1:
        return
    memory_share = run.peak_memory_bytes / environment.device_memory_bytes
    if memory_share > _EMPTY or sm_fraction > _EMPTY:
        return
    words = _words(environment.device_name)
    if "MIG" in words:  # it is a part already
        return
    profiles = next((_MIG[word] for word in words if word in _MIG), ())
    fitting = (one for one in profiles if one.sm_share >= sm_fraction and _ROOM * one.memory_share >= memory_share)
    profile = next(fitting, None)
    room_bytes = min(evidence.limit_bytes, _ROOM * environment.device_memory_bytes)
    by_mps = min(int(1 / sm_fraction), int(room_bytes / max(1, run.peak_memory_bytes)), _MOST_JOBS)
    jobs = by_mps if profile is None else profile.instances
    if jobs < 2:  # the limit is below half of the device's memory
        return
    occupancy = None if run.fullness is None else run.fullness.sm_occupancy
    shares = {"sm_fraction": sm_fraction, "sm_occupancy": occupancy, "memory_fraction": memory_share}
    slices = None if profile is None else profile.slices
    yield advise("share_gpu", run.samples_per_s, None, {}, jobs=jobs, mig_slices=slices, **shares)


def _has_fixed_shapes(evidence: Evidence) -> bool:
    """Whether all batches have the same shapes, by the probe's look or by the window's lengths."""
    tokens = evidence.measurement.tokens
    return bool(evidence.facts.has_fixed_shapes) and (tokens is None or tokens.shortest == tokens.longest)


def _unused_bytes(memory: MemorySample) -> int | None:
    """What was reserved beyond the tensors' own peak; None where the device does not tell both."""
    if memory.reserved_bytes is None or memory.allocated_bytes is None:
        return None
    return max(0, memory.reserved_bytes - memory.allocated_bytes)


def _words(name: str) -> list[str]:
    """The words of a product's name: "NVIDIA A100-SXM4-80GB" has A100."""
    return name.upper().replace("-", " ").split()
