"""Where the time of training goes: intervals of a profiler's trace, and the shares that they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isclose
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from autotune.frozen import FrozenModel

# Busy time from a profiler's events: unions of intervals over streams. Pure functions over
# nanoseconds.
#
# Comes in: the events of a few profiled steps, in any order, with streams that overlap. Goes out:
# how long the device computed, copied and communicated with other ranks, each instant counted once,
# and how long it did nothing since the host had waited for it.


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

    Computing hides copies, and both hide communication: what is left of those two is what they
    cost.
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

    Copies within the device and memsets are the model's own work: clones, and what cuBLAS and cuDNN
    clear. Source: kineto's names of copies, "Memcpy HtoD (Pinned -> Device)"; NCCL's kernels are
    named nccl*.
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


def device_time(
    events: Sequence[DeviceEvent], host_waits: Sequence[tuple[int, int]] = ()
) -> DeviceTime:
    """Sum up the events of one device; `host_waits` are the spans in which the host waited for it."""
    kinds: tuple[EventKind, ...] = ("compute", "copy", "communication")
    compute, copies, communication = (
        union((event.start_ns, event.end_ns) for event in events if event.kind == kind)
        for kind in kinds
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


# Where the time goes: shares of the wall time of training, and what an item costs inside the
# loader.
#
# The worker measures the parts; `breakdown_on_device` and `breakdown_on_cpu` join them into
# fractions that add up to 1.


Part = Literal["data_wait", "device_copy", "compute", "synchronise", "idle"]
PARTS: tuple[Part, ...] = get_args(Part)
"""The parts of the wall time, in the order in which they are shown."""

_Fraction = Annotated[float, Field(ge=0, le=1)]


class Share(FrozenModel):
    """A part of the wall time, and how it was measured."""

    fraction: _Fraction
    """Of the wall time, in 0..1."""
    source: str
    """In a few words, such as "clock around the loader" or "profiler, 5 extra steps"."""


class TimeBreakdown(FrozenModel):
    """Fractions of the wall time of a long run; they add up to 1.

    An instant in which the device works counts as that, whatever the host waits for meanwhile.
    """

    data_wait: Share
    """The device has nothing to do because the loader has not delivered, the restarts of epochs
    included."""
    device_copy: Share
    """Copies to the device that no computing hides."""
    compute: Share
    synchronise: Share
    """The device has nothing to do because the host had waited for it (`.item()`, a copy that
    blocks), and exposed communication with other ranks."""
    idle: Share
    """The device waits for the host to launch the next operation."""
    restart_fraction: _Fraction = 0.0
    """The part of `data_wait` that the restarts of epochs take."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total = sum(share.fraction for share in self.shares().values())
        if not isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(
                f"the fractions of a time breakdown must add up to 1, but add up to {total!r}"
            )
        return self

    def shares(self) -> dict[Part, Share]:
        """The five parts by name, in order."""
        return {name: getattr(self, name) for name in PARTS}


class FormatCost(FrozenModel):
    """What a call that reads an item's data costs, and what a better way costs for the same input on this machine."""

    kind: Literal["text", "image_draft", "image_copy", "parquet"]
    """text: parsed, or an array that is mapped; image_draft: decoded whole and made smaller, or
    decoded smaller; image_copy: the same, or a copy of the final size; parquet: a table read for
    each item, or once for its rows."""
    calls_per_item: float
    """Such calls for an item."""
    item_fraction: _Fraction
    """Share of an item's time in such calls, as long as they take of files that lie in RAM."""
    now_s: float
    """Mean seconds of a call as it is."""
    better_s: float
    """Mean seconds of the better way."""
    figures: dict[str, int] = Field(default_factory=dict)
    """Sizes of what was read."""

    @property
    def saved_fraction(self) -> float:
        """Share of an item's time that the better way saves."""
        return (
            self.item_fraction * max(0.0, 1.0 - self.better_s / self.now_s)
            if self.now_s > 0
            else 0.0
        )


class LoaderCosts(FrozenModel):
    """What data costs inside the loader, in seconds; measured outside the window, item by item, in one process."""

    items: int
    """Items that were timed."""
    item_s: float
    """Mean wall time of one item: `__getitem__`, or the iterable's next."""
    item_cpu_s: float
    """Mean CPU time of one item, all threads of the process; far below `item_s`, the item waits."""
    item_median_s: float
    """Median wall time of one item."""
    item_p99_s: float
    """What 99 of 100 items stay below."""
    item_slowest_s: float
    """The slowest item that was timed."""
    slow_tail_fraction: _Fraction
    """Share of all items' time that is spent in items of over 8 times the median."""
    disk_bytes_per_item: float
    """Bytes that came from the disk, not from the page cache, per item."""
    item_bytes: float
    """Mean size of an item's tensors as they stand in the batch."""
    float32_fraction: _Fraction | None = None
    """Share of float32 in a batch's bytes; None where it was not measured, or the batch has no
    tensor."""
    batch_tensors: int | None = None
    """Tensors of a batch; None where not counted."""
    collate_s: float
    """One batch through collate_fn."""
    transfer_s: float | None = None
    """One batch from a worker to the training process through shared memory; None without workers."""
    pin_s: float | None = None
    """One batch into page-locked memory; None where it is not pinned."""
    copy_s: float | None = None
    """One batch from pageable memory to the device, waited for; None without an accelerator that
    pinning helps."""
    pinned_copy_s: float | None = None
    """The same from page-locked memory."""
    batches_per_worker_per_s: float | None = None
    """The loader alone, per worker (the training process itself counts as one where there are
    none)."""
    batches_per_core_per_s: float | None = None
    """The loader alone, per core that this process may use; of a rank, per core of its share."""

    formats: tuple[FormatCost, ...] = ()
    """Formats that something better was found for."""

    @property
    def cpu_fraction(self) -> float:
        """Share of an item's time in which a core worked on it; above 1 where several did."""
        return self.item_cpu_s / self.item_s if self.item_s > 0 else 1.0


def breakdown_on_device(
    device: DeviceTime,
    *,
    profiled_steps: int,
    step_s: float,
    data_wait_s: float,
    restart_s: float,
    exchange_s: float = 0.0,
) -> TimeBreakdown:
    """Shares on an accelerator, of an unprofiled step of a long run, which takes `step_s + restart_s`.

    The device's own work comes from the profiler; what is left is idle time, of which the host's
    waits for the loader explain at most `data_wait_s` a step (the rest of those waits is hidden
    behind queued work), and what follows the host's waits for the device a further part. Restarts
    cost what queued work leaves of them. A profile that shows more work than a step takes (its
    kernels were slowed down) is scaled to the step. `exchange_s` is what the exchange of gradients
    adds to a step, where the profiled ones were without it.
    """
    source = f"profiler in {profiled_steps} extra steps, as a share of a step without it"
    work = [
        part_s / profiled_steps
        for part_s in (device.compute_s, device.copy_s, device.communication_s)
    ]
    total = step_s + restart_s
    restart_s = min(restart_s, max(0.0, total - sum(work)))
    step_s = total - restart_s
    scale = min(1.0, step_s / sum(work)) if sum(work) > 0 else 1.0
    compute, copy, exchange = (part_s * scale for part_s in work)
    exchange += min(exchange_s, max(0.0, step_s - compute - copy - exchange))
    unexplained = max(0.0, step_s - compute - copy - exchange)
    waiting = min(data_wait_s, unexplained)
    synchronising = min(device.after_waits_s / profiled_steps, unexplained - waiting)
    return _breakdown(
        total,
        restart_s,
        data_wait=(
            waiting + restart_s,
            "clock around the loader, less the waits in which the device still works",
        ),
        device_copy=(copy, source),
        compute=(compute, source),
        synchronise=(exchange + synchronising, _source_of_waits(source, device, exchange_s)),
        idle=(unexplained - waiting - synchronising, "what is left of the step"),
    )


def breakdown_on_cpu(  # noqa: PLR0913 - the parts of a step, each by its name
    *,
    step_s: float,
    data_wait_s: float,
    copy_s: float,
    gap_fraction: float,
    restart_s: float,
    profiled_steps: int,
    exchange_s: float = 0.0,
) -> TimeBreakdown:
    """Shares on the CPU, which is its own device, of a step of a long run, which takes `step_s + restart_s`.

    `copy_s` is the time of moving a batch (layout conversions), `gap_fraction` the share of the
    rest of the step that lies outside any operator by the profiler, `exchange_s` what the exchange
    of gradients with other ranks adds.
    """
    waiting = min(data_wait_s, step_s)
    copying = min(copy_s, step_s - waiting)
    exchanging = min(exchange_s, step_s - waiting - copying)
    rest = step_s - waiting - copying - exchanging
    idle = rest * min(1.0, max(0.0, gap_fraction))
    source = f"profiler in {profiled_steps} extra steps"
    own_device = "the CPU is its own device: nothing to wait for"
    return _breakdown(
        step_s + restart_s,
        restart_s,
        data_wait=(waiting + restart_s, "clock around the loader"),
        device_copy=(copying, "clock around moving the batch, in extra steps"),
        compute=(
            rest - idle,
            f"what is left of the step, without the gaps between operators ({source})",
        ),
        synchronise=(exchanging, _EXCHANGE_SOURCE if exchange_s > 0 else own_device),
        idle=(idle, f"gaps between operators ({source})"),
    )


_EXCHANGE_SOURCE = "a step with the exchange of gradients less one without, on batches at hand"


def _source_of_waits(profiler: str, device: DeviceTime, exchange_s: float) -> str:
    """Communication is known from steps with and without the exchange, or from the profiler's own events."""
    by_exchange = f"{_EXCHANGE_SOURCE}; " if exchange_s > 0 else ""
    kernels = "" if by_exchange and device.communication_s <= 0 else "communication, "
    return f"{by_exchange}{profiler}: {kernels}gaps after the host's waits"


def _breakdown(total_s: float, restart_s: float, **parts: tuple[float, str]) -> TimeBreakdown:
    """Shares of a total, of each part's seconds with their source."""
    shares = {
        name: Share(fraction=_fraction(part_s, total_s), source=source)
        for name, (part_s, source) in parts.items()
    }
    return TimeBreakdown(**shares, restart_fraction=_fraction(restart_s, total_s))


def _fraction(part_s: float, total_s: float) -> float:
    return min(1.0, max(0.0, part_s / total_s))
