"""Break down the wall time of training into parts that add up to 1, and record what data costs in the loader.

Comes in: the events of a few profiled steps, and measured seconds of a step's parts. Goes out:
`DeviceTime`, each instant counted once, `TimeBreakdown` and `LoaderCosts`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isclose
from typing import Annotated, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from autotune.frozen import FrozenModel

# Device time from a profiler's events: unions of intervals over overlapping streams, in
# nanoseconds.


EventKind = Literal["compute", "copy", "communication"]

_WAYS = ("htod", "dtoh", "ptop")
"""Directions of copies from or to the device."""


class DeviceEvent(NamedTuple):
    """Activity of the device between two moments."""

    kind: EventKind
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of a batch in a long run, in seconds."""

    step_s: float
    """The whole loop, without restarts of epochs."""
    data_wait_s: float
    """Part of `step_s` in which the loop waits for the loader."""
    restart_s: float
    """The restart of its epoch, divided by the epoch's batches."""
    exchange_s: float = 0.0
    """Time that gradient exchange adds, if the profiled steps were without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Seconds of a device's activities in some steps; of overlapping kinds, the first one counts.

    Computing hides copies, and both hide communication: only the exposed parts count.
    """

    busy_s: float
    """Anything running."""
    compute_s: float
    """A kernel running that is not communication, or a copy within the device, or a memset."""
    copy_s: float
    """A copy to or from the device running without computing: the exposed part."""
    communication_s: float
    """Only communication running: waiting for a straggler counts here, and as busy."""
    after_waits_s: float = 0.0
    """Idle since the host had waited for the device before it launched more work."""


def kind_of(name: str) -> EventKind:
    """Return the kind of a profiler's event, by its name.

    Copies within the device and memsets are the model's own work: clones, and what cuBLAS and cuDNN
    clear. Source: kineto's names of copies, "Memcpy HtoD (Pinned -> Device)"; NCCL's kernels are
    named nccl*.
    """
    low = name.lower()
    if "nccl" in low or "rccl" in low:
        return "communication"
    if low.startswith("memcpy") and any(way in low for way in _WAYS):
        return "copy"
    return "compute"


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals: disjoint, in order; those of no or negative length are dropped."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for span in intervals if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def device_time(
    events: Sequence[DeviceEvent], host_waits: Sequence[tuple[int, int]] = ()
) -> DeviceTime:
    """Sum up the events of one device.

    Args:
        events: Events in any order.
        host_waits: Spans in which the host waited for the device, (start, end) in nanoseconds.
    """
    compute, copies, communication = (
        union((start, end) for own, start, end in events if own == kind)
        for kind in get_args(EventKind)
    )
    computing_or_copying = union([*compute, *copies])
    everything = union([*computing_or_copying, *communication])
    # Gaps that began while the host waited: no work was queued behind them
    after_waits = 0
    for (_, ended), (resumed, _) in pairwise(everything):
        if any(start <= ended <= end for start, end in host_waits):
            after_waits += resumed - ended
    return DeviceTime(
        busy_s=length(everything) * 1e-9,
        compute_s=length(compute) * 1e-9,
        copy_s=(length(computing_or_copying) - length(compute)) * 1e-9,
        communication_s=(length(everything) - length(computing_or_copying)) * 1e-9,
        after_waits_s=after_waits * 1e-9,
    )


# The breakdown: shares of training's wall time, and the costs of an item inside the loader.
#
# The worker measures the parts; `breakdown_on_device` and `breakdown_on_cpu` join them into
# fractions with sum 1.


Part = Literal["data_wait", "device_copy", "compute", "synchronise", "idle"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts of the wall time, in display order."""

_Fraction = Annotated[float, Field(ge=0, le=1)]


class Share(FrozenModel):
    """Share of the wall time, and its source."""

    fraction: _Fraction
    """Fraction of the wall time, in 0..1."""
    source: str
    """In a few words, such as "clock around the loader" or "profiler, 5 extra steps"."""


class TimeBreakdown(FrozenModel):
    """Fractions of the wall time of a long run, with sum 1.

    Device activity takes precedence over any wait of the host at the same time.
    """

    data_wait: Share
    """The device is idle because the loader has not delivered, including epoch restarts."""
    device_copy: Share
    """Copies to the device that computing does not hide."""
    compute: Share
    synchronise: Share
    """The device is idle because the host had waited for it (`.item()`, a blocking copy), and
    exposed communication with other ranks."""
    idle: Share
    """The device waits for the host to launch the next operation."""
    restart_fraction: _Fraction = 0.0
    """Part of `data_wait` for epoch restarts."""
    long_gap_fraction: _Fraction | None = None
    """Part of `idle` in gaps between operators that are longer than any launch: the script's own
    code; None on an accelerator."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total = sum(share.fraction for share in self.shares().values())
        if not isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(
                f"the fractions of a time breakdown must add up to 1, but add up to {total!r}"
            )
        return self

    def shares(self) -> dict[Part, Share]:
        """Return the five parts by name, in order."""
        return {name: getattr(self, name) for name in PARTS}


class FormatCost(FrozenModel):
    """Cost of a call that reads an item's data, and of a better way for the same input on this machine."""

    kind: Literal["text", "image_draft", "image_copy", "parquet"]
    """text: parsed, or a memory-mapped array; image_draft: decoded whole and resized, or decoded
    smaller; image_copy: the same, or a copy of the final size; parquet: a table read per item, or
    once for its rows."""
    calls_per_item: float
    """Calls per item."""
    item_fraction: _Fraction
    """Share of an item's time in such calls, with files in the page cache."""
    now_s: float
    """Mean seconds of the current call."""
    better_s: float
    """Mean seconds of the better way."""
    figures: dict[str, int] = Field(default_factory=dict)
    """Sizes of the data."""

    @property
    def saved_fraction(self) -> float:
        """Share of an item's time that the better way saves."""
        if self.now_s <= 0:
            return 0.0
        return self.item_fraction * max(0.0, 1.0 - self.better_s / self.now_s)


class CollateFunction(FrozenModel):
    """A collate function that is not torch's own, and the time of a plain one on the same items."""

    function: str
    """Its name, as Python's `__qualname__`."""
    place: str
    """File and line, such as "train.py:41"; empty if it is not written in Python."""
    plain_s: float | None = None
    """Seconds of a batch of the same items through torch's default_collate, with pad_sequence for
    tensors of different lengths; None if these do not fit the items."""


class LoaderCauses(FrozenModel):
    """Causes of a slow loader, measured in one process after its items; None where not measured."""

    sampler: str = ""
    """Class that draws the indices: the batch sampler, or the sampler inside of torch's."""
    sampler_s: float | None = None
    """Seconds to draw the indices of one batch, which the training process does even with workers."""
    sampler_start_s: float | None = None
    """Seconds by which the first batch of an epoch takes longer to draw: a permutation, weights."""
    collate: CollateFunction | None = None
    """The user's collate function; None if it is torch's own."""
    copy_s: float | None = None
    """Seconds to copy the tensors of one batch in host memory."""
    is_in_memory: bool = False
    """Items are read from no file, and cost about a call and a copy of their bytes: nothing is gained
    by caching them."""
    makes_batches: bool = False
    """The dataset makes whole batches (`__getitems__`), or its items are the batches."""
    batch_fetch_s: float | None = None
    """Seconds to take the items of one batch from the dataset at once, by a list of indices; None if
    that did not give the same values as collating single items."""
    read_bytes_per_item: float | None = None
    """Bytes per item that were read from files, from the page cache or the disk."""
    peak_bytes_per_item: float | None = None
    """Median of the most memory in use while an item is made, as tracemalloc counts it: Python objects
    and NumPy arrays."""
    shared_handles: tuple[str, ...] = ()
    """Locks and open files of the dataset that all workers share, such as "lock (Lock)"."""
    stream_shards: int | None = None
    """Shards of a stream, by its attribute num_shards or n_shards: no more workers deliver samples."""


class LoaderCosts(FrozenModel):
    """Costs of data inside the loader, in seconds; measured outside the window, item by item, in one process."""

    items: int
    """Items timed."""
    item_s: float
    """Mean wall seconds of one item: `__getitem__`, or the iterable's next."""
    item_cpu_s: float
    """Mean CPU seconds of one item, all threads of the process; far below `item_s`, the item
    waits."""
    item_others_cpu_s: float = 0.0
    """Part of `item_cpu_s` in threads other than the item's own."""
    item_delayed_s: float = 0.0
    """Mean wall seconds of one item in which its thread could run, but other threads had the core."""
    item_median_s: float
    """Median wall seconds of one item."""
    item_p99_s: float
    """99th percentile of an item's wall seconds."""
    item_slowest_s: float
    """Wall seconds of the slowest item."""
    slow_tail_fraction: _Fraction
    """Share of all items' time spent in items over 8 times the median."""
    disk_bytes_per_item: float
    """Bytes per item from the disk, not from the page cache."""
    item_bytes: float
    """Mean bytes of an item's tensors in the batch."""
    float32_fraction: _Fraction | None = None
    """Share of float32 in a batch's bytes; None if not measured, or if the batch has no tensor."""
    batch_tensors: int | None = None
    """Tensors of a batch; None if not counted."""
    collate_s: float
    """Seconds of one batch through collate_fn."""
    transfer_s: float | None = None
    """Seconds of one batch from a worker to the training process through shared memory; None
    without workers."""
    pin_s: float | None = None
    """Seconds of one batch into page-locked memory; None if it is not pinned."""
    copy_s: float | None = None
    """Seconds of one synchronous copy from pageable memory to the device; None without an
    accelerator that benefits from pinning."""
    pinned_copy_s: float | None = None
    """The same from page-locked memory."""
    batches_per_worker_per_s: float | None = None
    """Throughput of the loader alone per worker (without workers, the training process counts as
    one)."""
    batches_per_core_per_s: float | None = None
    """Throughput of the loader alone per core that this process may use; for a rank, per core of
    its share."""

    formats: tuple[FormatCost, ...] = ()
    """Formats with a better way."""
    causes: LoaderCauses | None = None
    """None if not measured."""

    @property
    def cpu_fraction(self) -> float:
        """Mean number of cores that worked during an item's time; above 1 for multithreaded items."""
        return self.item_cpu_s / self.item_s if self.item_s > 0 else 1.0

    @property
    def computing_cores(self) -> float:
        """Mean number of cores that an item keeps busy while it computes, its waits left out."""
        own_s = self.item_cpu_s - self.item_others_cpu_s
        if own_s <= 0 or self.item_others_cpu_s <= 0:
            return self.cpu_fraction
        return max(self.cpu_fraction, self.item_cpu_s / own_s)

    @property
    def tail_fraction(self) -> float:
        """Least share of all items' time that is spent in slow items themselves, not in waits for a core."""
        if self.item_s <= 0:
            return 0.0
        return max(0.0, self.slow_tail_fraction - self.item_delayed_s / self.item_s)

    @property
    def waiting_fraction(self) -> float:
        """Share of an item's time in which it neither computes nor waits for a core: I/O, sleeps, locks."""
        if self.item_s <= 0:
            return 0.0
        return max(0.0, 1.0 - (self.item_cpu_s + self.item_delayed_s) / self.item_s)


def breakdown_on_device(
    device: DeviceTime, times: StepTimes, *, profiled_steps: int
) -> TimeBreakdown:
    """Return the shares of a long run's step on an accelerator, without a profiler.

    The device's own work comes from the profiler; the rest is idle time. Of that, waits for the
    loader explain at most `data_wait_s` (their rest is hidden behind queued work), and gaps after
    the host's waits for the device a further part. Restarts count as far as queued work does not
    hide them. If the profile shows more work than a step takes (its kernels were slowed down), it
    is scaled to the step.

    Args:
        device: Device time of all profiled steps.
        times: Times of a step.
        profiled_steps: Number of profiled steps.
    """
    # The device's own work per step, scaled to what restarts leave of the time
    source = f"profiler in {profiled_steps} extra steps, as a share of a step without it"
    work = [
        part_s / profiled_steps
        for part_s in (device.compute_s, device.copy_s, device.communication_s)
    ]
    total = times.step_s + times.restart_s
    restart_s = min(times.restart_s, max(0.0, total - sum(work)))
    step_s = total - restart_s
    scale = min(1.0, step_s / sum(work)) if sum(work) > 0 else 1.0
    compute, copy, exchange = (part_s * scale for part_s in work)
    exchange += min(times.exchange_s, max(0.0, step_s - compute - copy - exchange))

    # The rest of the step: waits for the loader, then gaps after the host's waits for the device
    unexplained = max(0.0, step_s - compute - copy - exchange)
    waiting = min(times.data_wait_s, unexplained)
    synchronising = min(device.after_waits_s / profiled_steps, unexplained - waiting)
    waits_source = f"{source}: gaps after the host's waits"
    if device.communication_s > 0:
        waits_source = f"{source}: communication, gaps after the host's waits"
    if times.exchange_s > 0:
        waits_source = f"{_EXCHANGE_SOURCE}; {waits_source}"
    return _breakdown(
        total,
        restart_s,
        data_wait=(
            waiting + restart_s,
            "clock around the loader, less the waits in which the device still works",
        ),
        device_copy=(copy, source),
        compute=(compute, source),
        synchronise=(exchange + synchronising, waits_source),
        idle=(unexplained - waiting - synchronising, "what is left of the step"),
    )


def breakdown_on_cpu(
    times: StepTimes,
    *,
    copy_s: float,
    gap_fraction: float,
    long_gap_fraction: float,
    profiled_steps: int,
) -> TimeBreakdown:
    """Return the shares of a long run's step on the CPU, which is its own device.

    Args:
        times: Times of a step.
        copy_s: Seconds of moving a batch (layout conversions).
        gap_fraction: Share of the rest of the step outside any operator, by the profiler.
        long_gap_fraction: The part of it in gaps longer than any launch.
        profiled_steps: Number of profiled steps.
    """
    # Parts with a measured time, then the rest by the profiler's gaps
    step_s = times.step_s
    waiting = min(times.data_wait_s, step_s)
    copying = min(copy_s, step_s - waiting)
    exchanging = min(times.exchange_s, step_s - waiting - copying)
    rest = step_s - waiting - copying - exchanging
    idle = rest * min(1.0, max(0.0, gap_fraction))
    source = f"profiler in {profiled_steps} extra steps"
    own_device = "the CPU is its own device: nothing to wait for"
    return _breakdown(
        step_s + times.restart_s,
        times.restart_s,
        data_wait=(waiting + times.restart_s, "clock around the loader"),
        device_copy=(copying, "clock around moving the batch, in extra steps"),
        compute=(
            rest - idle,
            f"what is left of the step, without the gaps between operators ({source})",
        ),
        synchronise=(exchanging, _EXCHANGE_SOURCE if times.exchange_s > 0 else own_device),
        idle=(idle, f"gaps between operators ({source})"),
    ).model_copy(
        update={
            "long_gap_fraction": _fraction(
                rest * min(gap_fraction, long_gap_fraction), step_s + times.restart_s
            )
        }
    )


_EXCHANGE_SOURCE = "a step with the exchange of gradients less one without, on batches at hand"


def _breakdown(total_s: float, restart_s: float, **parts: tuple[float, str]) -> TimeBreakdown:
    """Return the shares of a total, from each part's seconds and source."""
    shares = {
        name: Share(fraction=_fraction(part_s, total_s), source=source)
        for name, (part_s, source) in parts.items()
    }
    return TimeBreakdown(**shares, restart_fraction=_fraction(restart_s, total_s))


def _fraction(part_s: float, total_s: float) -> float:
    return min(1.0, max(0.0, part_s / total_s))
