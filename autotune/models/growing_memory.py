"""Forecast host memory that loader workers copy page by page, and find graphs that are kept.

Comes in: the memory readings of a watched run. Goes out: growth per sample or step, and what is
still to come. Pure functions.

A forked worker shares the pages of its parent until either writes to them. Reading a Python object
writes its reference count, so the pages of a dataset's lists and dicts are copied as items are
read. Source: pytorch.org, torch.utils.data, "Multi-process data loading", the warning on memory;
github.com/pytorch/pytorch/issues/13246.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from statistics import fmean
from typing import NamedTuple, TypeAlias

from autotune.models.memory import LEFT_OUT_SHARE, trend_of
from autotune.records.measurement import MemorySample, Window
from autotune.records.watched_run import MemoryReading, MemoryUse

_LEAST_READINGS = 3
"""Readings for a slope: one third is left out, and a line needs two points."""
_LEAST_NODES = 0.5
"""Nodes of graphs that a script keeps more with each step, at least: each kept loss has one or
more, and a logged loss every other step counts too. Source: our convention."""


Pages: TypeAlias = tuple[int, int]
"""A worker's private bytes, and the anonymous bytes that it shares."""


class Copying(NamedTuple):
    """Pages that the workers of one process copy from it."""

    bytes_per_sample: float
    """Growth of a worker per sample that it makes."""
    private_bytes: float
    """Mean memory of a worker that it shares with no process, at the last reading."""
    shared_bytes: float
    """Mean anonymous memory of a worker that it still shares: the most that it can grow by."""
    workers: int
    samples: int
    """Samples that all workers had made."""
    copied_bytes: float
    """Mean bytes that a worker copied between the readings."""

    def further_bytes(self, samples: float) -> float:
        """Return what all workers together still copy while they make this many samples more."""
        each = self.bytes_per_sample * max(0.0, samples) / self.workers
        return self.workers * min(self.shared_bytes, each)


def copying_of(use: MemoryUse) -> Copying | None:
    """Estimate what workers copy; None if they copy nothing, or were read too seldom.

    Only shared memory that becomes private counts: what a worker allocates itself, such as a cache,
    is another growth. The first third of the readings is left out, in which a worker writes to
    pages that every process needs.
    """
    known = [reading for reading in use.readings if reading.worker_shared_bytes]
    if len(known) < _LEAST_READINGS:
        return None
    first = known[int(len(known) * LEFT_OUT_SHARE)]
    last = known[-1]
    return copying_between(_pages(first), _pages(last), last.samples - first.samples, last.samples)


def copying_between(
    first: Sequence[Pages], last: Sequence[Pages], samples: int, all_samples: int
) -> Copying | None:
    """Estimate what workers copy from two readings; None if they copied nothing.

    Args:
        first: Private and shared bytes of each worker at the first reading.
        last: The same at the last one.
        samples: Samples that they made in between, all workers together.
        all_samples: Samples that they made since they started.
    """
    workers = len(last)
    if samples <= 0 or not workers or len(first) != workers:
        return None
    grown = fmean(private for private, _ in last) - fmean(private for private, _ in first)
    shared_bytes = fmean(shared for _, shared in last)
    copied = min(grown, fmean(shared for _, shared in first) - shared_bytes)
    if copied <= 0:
        return None
    return Copying(
        bytes_per_sample=copied * workers / samples,
        private_bytes=fmean(private for private, _ in last),
        shared_bytes=shared_bytes,
        workers=workers,
        samples=all_samples,
        copied_bytes=copied,
    )


_LEAST_COPIED_BYTES = 2 * 2**20
"""Bytes that a worker must copy in a trial to count as growth. Workers that only read NumPy arrays
copied 0.9 MiB in 0.1 million samples, pages that every process writes to. Source: our
convention."""


def with_copies(memory: MemorySample, copying: Copying | None, window: Window) -> MemorySample:
    """Return a trial's peak with what its workers still copy by the end of the epoch.

    A short window would miss it, and a search would recommend workers that do not fit.

    Args:
        memory: The peak so far.
        copying: What workers copied since the warm-up began; None if nothing.
        window: The trial's window.
    """
    if copying is None or copying.copied_bytes < _LEAST_COPIED_BYTES:
        return memory
    to_come_bytes = copying.workers * copying.shared_bytes
    if window.epoch_samples is not None:
        to_come_bytes = copying.further_bytes(window.epoch_samples - copying.samples)
    changes = {
        "peak_bytes": memory.peak_bytes + round(to_come_bytes),
        "to_come_bytes": round(to_come_bytes),
    }
    return memory.model_copy(update=changes)


def _pages(reading: MemoryReading) -> list[Pages]:
    pairs = zip(reading.worker_private_bytes, reading.worker_shared_bytes, strict=True)
    return [*pairs]


class KeptGraphs(NamedTuple):
    """Autograd graphs that the script keeps from step to step."""

    nodes_per_step: float
    bytes_per_step: float
    """Growth of the device's tensors, on a CPU of the process; 0 if it is within the error."""
    held_bytes: int | None
    """Memory of that kind at the last reading; None if unknown."""
    is_on_device: bool


def kept_graphs_of(use: MemoryUse) -> KeptGraphs | None:
    """Return the graphs that a script keeps; None if their number does not grow with its steps.

    Every stretch between two readings must show it: a model whose graph varies from step to step
    keeps none.
    """
    counted = [(one.steps, one.graph_nodes) for one in use.readings if one.graph_nodes is not None]
    if len(counted) < _LEAST_READINGS:
        return None
    slowest = inf
    for (steps, nodes), (later_steps, later_nodes) in pairwise(counted):
        slowest = min(slowest, (later_nodes - nodes) / max(1, later_steps - steps))
    if slowest < _LEAST_NODES:
        return None
    first = counted[0]
    last = counted[-1]
    on_device = _points(use.readings, "device_bytes")
    points = on_device or _points(use.readings, "process_bytes")
    trend = trend_of(points)
    return KeptGraphs(
        nodes_per_step=(last[1] - first[1]) / max(1, last[0] - first[0]),
        bytes_per_step=0.0 if trend is None or trend.low <= 0 else trend.bytes_per_count,
        held_bytes=points[-1][1] if points else None,
        is_on_device=bool(on_device),
    )


def _points(readings: Sequence[MemoryReading], name: str) -> list[tuple[int, int]]:
    """Return steps and bytes of the readings that have this field."""
    points = list[tuple[int, int]]()
    for reading in readings:
        held: int | None = getattr(reading, name)
        if held is not None:
            points.append((reading.steps, held))
    return points
