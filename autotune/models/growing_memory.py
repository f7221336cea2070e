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
from math import exp, inf, log
from statistics import fmean
from typing import NamedTuple, TypeAlias

from autotune.models.memory import trend_of
from autotune.records.measurement import MemorySample, Window
from autotune.records.watched_run import MemoryReading, MemoryUse

_LEAST_READINGS = 3
"""Readings that show whether growth slows down."""
_STEADY = 0.9
"""Pace of the second half over the first one's from which on growth is steady. Source: our
convention."""
_LEAST_NODES = 0.5
"""Nodes of graphs that a script keeps more with each step, at least: each kept loss has one or
more, and a logged loss every other step counts too. Source: our convention."""


Pages: TypeAlias = tuple[int, int]
"""A worker's private bytes, and the anonymous bytes that it shares."""


class PagesRead(NamedTuple):
    """Pages of all workers of one process at one moment."""

    samples: int
    """Samples that the workers had made, all together."""
    pages: Sequence[Pages]


class Copying(NamedTuple):
    """Pages that the workers of one process copy from it."""

    bytes_per_sample: float
    """Growth of a worker per sample that it makes, at the last reading."""
    decay_samples: float
    """Samples of a worker in which that growth falls to 37 %; infinite if it is steady."""
    copied_bytes: float
    """Mean bytes that a worker copied between the readings."""
    shared_bytes: float
    """Mean anonymous memory of a worker that it still shares: the most that it can grow by."""
    workers: int
    samples: int
    """Samples that all workers had made."""

    def further_bytes(self, samples: float) -> float:
        """Return what all workers together still copy while they make this many samples more."""
        if self.bytes_per_sample <= 0:
            return 0.0
        each = max(0.0, samples) / self.workers
        if self.decay_samples < inf:
            each = self.decay_samples * (1 - exp(-each / self.decay_samples))
        return self.workers * min(self.shared_bytes, self.bytes_per_sample * each)


def copying_of(use: MemoryUse) -> Copying | None:
    """Estimate what workers copy; None if they copy nothing, or were read too seldom."""
    readings = [
        PagesRead(
            one.samples,
            [*zip(one.worker_private_bytes, one.worker_shared_bytes, strict=True)],
        )
        for one in use.readings
        if one.worker_shared_bytes
    ]
    return copying_between(readings)


def copying_between(readings: Sequence[PagesRead]) -> Copying | None:
    """Estimate what workers copy, and how it slows down; None if they copy nothing.

    Only shared memory that becomes private counts: what a worker allocates itself, such as a cache,
    is another growth. Items read in order copy at a steady pace. Read in random order, they soon
    fall into pages that are copied already, since a page holds dozens of objects: the pace then
    falls exponentially, as its two halves show.

    Args:
        readings: At least three readings of the same workers, in the order of time.
    """
    if len(readings) < _LEAST_READINGS:
        return None
    first = readings[0]
    last = readings[-1]
    half = (first.samples + last.samples) / 2
    middle = min(readings[1:-1], key=lambda one: abs(one.samples - half))
    workers = len(last.pages)
    is_same = workers == len(first.pages) == len(middle.pages)
    if not workers or not is_same or not first.samples < middle.samples < last.samples:
        return None
    copied = _copied_bytes(first, last)
    if copied <= 0:
        return None

    # Pace of both halves, per sample of a worker
    early_samples = (middle.samples - first.samples) / workers
    late_samples = (last.samples - middle.samples) / workers
    early = _copied_bytes(first, middle) / early_samples
    if early <= 0:
        return None
    # copying never speeds up: a jump at the end, such as of an import, is no pace
    late = min(early, max(0.0, _copied_bytes(middle, last) / late_samples))
    decay_samples = inf
    if 0 < late < _STEADY * early:
        decay_samples = (early_samples + late_samples) / 2 / log(early / late)
        late *= exp(-late_samples / 2 / decay_samples)
    return Copying(
        bytes_per_sample=late,
        decay_samples=decay_samples,
        copied_bytes=copied,
        shared_bytes=fmean(shared for _, shared in last.pages),
        workers=workers,
        samples=last.samples,
    )


def _copied_bytes(first: PagesRead, last: PagesRead) -> float:
    """Return the mean shared bytes of a worker that became its own."""
    grown = fmean(one for one, _ in last.pages) - fmean(one for one, _ in first.pages)
    no_longer_shared = fmean(one for _, one in first.pages) - fmean(one for _, one in last.pages)
    return min(grown, no_longer_shared)


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
        window: The trial's window. Without an epoch, of a stream, nothing is forecast.
    """
    if copying is None or copying.copied_bytes < _LEAST_COPIED_BYTES:
        return memory
    if window.epoch_samples is None:
        return memory
    to_come_bytes = copying.further_bytes(window.epoch_samples - copying.samples)
    changes = {
        "peak_bytes": memory.peak_bytes + round(to_come_bytes),
        "to_come_bytes": round(to_come_bytes),
    }
    return memory.model_copy(update=changes)


class KeptGraphs(NamedTuple):
    """Autograd graphs that the script keeps from step to step."""

    nodes_per_step: float
    bytes_per_step: float
    """Growth of the device's tensors, on a CPU of the process; 0 if it is within the error."""
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
