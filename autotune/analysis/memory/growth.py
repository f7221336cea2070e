"""Whether memory creeps: how it grows from stretch to stretch of a window, and when it would reach the limit. Pure.

Comes in: what was held after so many batches, and the runs of a configuration. Goes out: a MemoryGrowth, and notes.

A heap that fills in the first seconds is no creep, and allocators grow in steps. So a window's first third does not
count, and the growths of its stretches are taken for independent: a single step leaves zero inside the interval of
their mean, a leak, which adds as much in each, does not. Nor does a dataset that is being cached, which ends with the
first epoch: a window that lies in it says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Literal

from autotune.analysis.statistics import t_95
from autotune.messages.recommendation import memory_growth
from autotune.note import Note
from autotune.records.measurement import Measurement
from autotune.records.memory import MemoryGrowth, MemoryLimits
from autotune.records.recommendation import Recommendation
from autotune.records.trial import TrialRecord, runs_of

__all__ = ["Whose", "creep_notes", "creep_notes_of", "growth_of", "kinds_not_excluded"]

_LEFT_OUT_SHARE = 1 / 3
_MOST_STRETCHES, _FEWEST_STRETCHES = 10, 4
"""Of a window: ten as for its rate (analysis/statistics); with fewer than four the interval says nothing."""
_TOLD_WITHIN_S = 7 * 24 * 3600.0
"""A growth that reaches the limit no sooner is not told: our own convention, longer than most runs between restarts."""
_EXCLUDED_FOR_S = 24 * 3600.0
"""Training that a window must show to be safe from growth, else that is said: our own convention, a day."""
Kind = Literal["host", "device"]
Whose = Literal["baseline", "recommended"]


def growth_of(kind: Kind, points: Sequence[tuple[int, int]], seconds: float) -> MemoryGrowth | None:
    """How memory grows; None where there are too few points to tell.

    Args:
        kind: Whose memory it is.
        points: batches so far, and bytes held then, in the order in which they were read.
        seconds: from the first point to the last.
    """
    kept = points[int(len(points) * _LEFT_OUT_SHARE) :]
    stretches = min(_MOST_STRETCHES, len(kept) - 1)
    if stretches < _FEWEST_STRETCHES:
        return None
    edges = [kept[round(place * (len(kept) - 1) / stretches)] for place in range(stretches + 1)]
    rates = [(later[1] - earlier[1]) / max(1, later[0] - earlier[0]) for earlier, later in pairwise(edges)]
    batches, all_batches = edges[-1][0] - edges[0][0], points[-1][0] - points[0][0]
    return MemoryGrowth(
        kind=kind,
        bytes_per_batch=fmean(rates),
        half_width=t_95(stretches - 1) * stdev(rates) / sqrt(stretches),
        batches=batches,
        seconds=seconds * batches / max(1, all_batches),
        last_bytes=edges[-1][1],
    )


def creep_notes_of(
    trials: Sequence[TrialRecord], chosen: Recommendation | None, limits: MemoryLimits
) -> tuple[Note, ...]:
    """Return the notes on the recommended settings, and on the baseline where that is another trial."""
    numbers: dict[int, Whose] = {0: "baseline"}
    if chosen is not None:
        numbers[chosen.number] = "recommended"
    found = (creep_notes(runs_of(trials, number), limits, whose) for number, whose in numbers.items())
    return tuple(chain.from_iterable(found))


def creep_notes(runs: Sequence[Measurement], limits: MemoryLimits, whose: Whose) -> tuple[Note, ...]:
    """Return a note for each kind of memory that grows in most runs and would reach its limit in a week."""
    return tuple(
        _note(run, growth, limits, whose) for run, growth in _typical(runs) if _creeps(runs, limits, growth.kind)
    )


def kinds_not_excluded(runs: Sequence[Measurement], limits: MemoryLimits) -> tuple[Kind, ...]:
    """Kinds of memory that don't show a creep, but may grow to the limit within a day for all that the windows tell.

    Where all windows had too few blocks, they tell nothing of a kind.
    """
    if not runs:
        return ()
    typical = {growth.kind: (run, growth) for run, growth in _typical(runs)}
    kinds: tuple[Kind, ...] = ("host",) if limits.limit_is_ram else ("host", "device")
    return tuple(
        kind
        for kind in kinds
        if kind not in typical or (not _creeps(runs, limits, kind) and _may_fill(*typical[kind], limits))
    )


def _may_fill(run: Measurement, growth: MemoryGrowth, limits: MemoryLimits) -> bool:
    return growth.high * _EXCLUDED_FOR_S * _batches_per_s(growth) > _left_bytes(run, growth, limits)


def _typical(runs: Sequence[Measurement]) -> Iterator[tuple[Measurement, MemoryGrowth]]:
    """Of each kind the run with the median growth."""
    kinds: tuple[Kind, ...] = ("host", "device")
    for kind in kinds:
        known = sorted(_of_kind(runs, kind), key=lambda one: one[1].bytes_per_batch)
        if known:
            yield known[len(known) // 2]


def _of_kind(runs: Sequence[Measurement], kind: Kind) -> list[tuple[Measurement, MemoryGrowth]]:
    return [(run, growth) for run in runs for growth in run.growth if growth.kind == kind]


def _creeps(runs: Sequence[Measurement], limits: MemoryLimits, kind: Kind) -> bool:
    """Whether most runs show a growth that would reach the limit soon enough to be told."""
    known = _of_kind(runs, kind)
    showing = [
        growth
        for run, growth in known
        if growth.low > 0 and growth.low * _TOLD_WITHIN_S * _batches_per_s(growth) > _left_bytes(run, growth, limits)
    ]
    return 2 * len(showing) > len(known)


def _note(run: Measurement, growth: MemoryGrowth, limits: MemoryLimits, whose: Whose) -> Note:
    batches = _left_bytes(run, growth, limits) / growth.bytes_per_batch
    seen, epoch = run.window.warm_up_batches + sum(block.batches for block in run.blocks), run.window.epoch_samples
    samples = seen * sum(block.samples for block in run.blocks) / sum(block.batches for block in run.blocks)
    return memory_growth(
        whose=whose,
        kind=growth.kind,
        bytes_per_batch=round(growth.bytes_per_batch),
        half_width_bytes=round(growth.half_width),
        seconds=round(growth.seconds, 1),
        batches_to_limit=round(batches),
        limit_within_s=round(batches / _batches_per_s(growth)),
        is_first_epoch=epoch is None or samples < epoch,
    )


def _left_bytes(run: Measurement, growth: MemoryGrowth, limits: MemoryLimits) -> float:
    """Return the bytes of the kind that grows that are left after the run's peak; infinite where no limit is known."""
    if growth.kind == "device" or limits.limit_is_ram:
        return inf if limits.limit_bytes is None else max(0.0, limits.limit_bytes - run.peak_memory_bytes)
    return inf if limits.ram_bytes is None else max(0.0, limits.ram_bytes - growth.last_bytes)


def _batches_per_s(growth: MemoryGrowth) -> float:
    return growth.batches / max(growth.seconds, 1e-9)
