"""Busy time from a profiler's events: unions of intervals over streams. Pure functions over nanoseconds.

Comes in: the events of a few profiled steps, in any order, with streams that overlap. Goes out: how long the device
computed, copied and communicated with other ranks, each instant counted once, and how long it did nothing since the
host had waited for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

from autotune.frozen import FrozenModel

__all__ = ["DeviceEvent", "DeviceTime", "device_time", "kind_of", "length", "union"]

EventKind = Literal["compute", "copy", "communication"]

_WAYS = ("htod", "dtoh", "ptop")  # of copies that leave or reach the device


class DeviceEvent(FrozenModel):
    """Something that the device did between two moments."""

    name: str
    kind: EventKind
    start_ns: int
    end_ns: int
    device_index: int = 0


class DeviceTime(FrozenModel):
    """What a device did in some steps, in seconds; where kinds overlap, the instant belongs to the first of them.

    Computing hides copies, and both hide communication: what is left of those two is what they cost.
    """

    busy_s: float
    """With anything at all running."""
    compute_s: float
    """With a kernel running that is not communication, or a copy within the device, or a memset."""
    copy_s: float
    """With a copy to or from the device running and nothing computing: the exposed part."""
    communication_s: float
    """With communication alone running: a rank that waits for a straggler shows here, and as busy."""
    after_waits_s: float = 0.0
    """Idle because the host had waited for the device, and only then launched what comes next."""


def kind_of(name: str) -> EventKind:
    """The kind of a profiler's event, by its name.

    Copies within the device and memsets are the model's own work: clones, and what cuBLAS and cuDNN clear.
    Source: kineto's names of copies, "Memcpy HtoD (Pinned -> Device)"; NCCL's kernels are named nccl*.
    """
    low = name.lower()
    if "nccl" in low or "rccl" in low:
        return "communication"
    return "copy" if low.startswith("memcpy") and any(way in low for way in _WAYS) else "compute"


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The intervals merged: disjoint, in order; empty ones and such that end before they begin are dropped."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for span in intervals if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[tuple[int, int]]) -> int:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def device_time(events: Sequence[DeviceEvent], host_waits: Sequence[tuple[int, int]] = ()) -> DeviceTime:
    """Sum up the events of one device; `host_waits` are the spans in which the host waited for it."""
    kinds: tuple[EventKind, ...] = ("compute", "copy", "communication")
    compute, copies, communication = (
        union((event.start_ns, event.end_ns) for event in events if event.kind == kind) for kind in kinds
    )
    computing_or_copying = union([*compute, *copies])
    everything = union([*computing_or_copying, *communication])
    return DeviceTime(
        busy_s=_seconds(length(everything)),
        compute_s=_seconds(length(compute)),
        copy_s=_seconds(length(computing_or_copying) - length(compute)),
        communication_s=_seconds(length(everything) - length(computing_or_copying)),
        after_waits_s=_seconds(_after_waits(everything, host_waits)),
    )


def _after_waits(busy: Sequence[tuple[int, int]], host_waits: Sequence[tuple[int, int]]) -> int:
    """Length of the gaps between spans of work that began while the host waited: nothing was queued behind them."""
    return sum(
        after[0] - before[1]
        for before, after in pairwise(busy)
        if any(start <= before[1] <= end for start, end in host_waits)
    )


def _seconds(nanoseconds: int) -> float:
    return nanoseconds * 1e-9
