"""Extrapolate an hour of training from what was watched of a run, and turn gains of steps into gains of it.

Takes a WatchedRun, and of an accelerator the breakdown of a step; returns RunShares whose sum is 1.
What recurs is extrapolated by its period. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from autotune.models.statistics import t_95
from autotune.records.breakdown import TimeBreakdown
from autotune.records.measurement import Interval
from autotune.records.watched_run import RUN_PARTS, Recurring, RunPart, RunShare, WatchedRun

HOUR_S = 3600.0
"""Seconds of training that the shares are of."""
_EVERY_STEP_FROM = 0.8
"""Occurrences per step from which on something counts as part of every step. Source: our
convention."""
_FEWEST = 3
"""Occurrences that show a period. Source: our convention."""
APART: frozenset[RunPart] = frozenset(
    {"startup", "checkpoint", "validation", "logging", "collection", "restart"}
)
"""Parts that a faster step leaves as they are."""
_CUT = 10.0
"""Factor that work may take longer which was still running when the watch ended. Source: our
convention."""
_SEEN_ONCE = 2.0
"""Factor by which the cost of something seen once may be off, either way. Source: our convention."""


class Extrapolated(NamedTuple):
    """Recurring work, extrapolated."""

    kind: Recurring
    per_step_s: Interval
    """Seconds per optimizer step."""
    period: str
    """How often it recurs, in words."""


def run_shares(
    watched: WatchedRun | None, breakdown: TimeBreakdown | None, device_kind: str
) -> tuple[RunShare, ...]:
    """Return the parts of an hour of training, in order; without a watch those of a step alone.

    Parts of every step keep their mean seconds. The interval of each share follows from those of
    what recurs: the more a checkpoint may take, the less is left for the rest.

    Args:
        watched: The script's own run; None of a model and a dataset.
        breakdown: Shares of a step; None if not measured.
        device_kind: "cpu", or an accelerator, whose time the host's clock does not show.
    """
    if watched is None or not watched.steps:
        return () if breakdown is None else tuple(_of_breakdown(breakdown))
    recurring = extrapolate(watched)
    steps_s = _step_seconds(watched, recurring)
    if device_kind != "cpu" and breakdown is not None:
        steps_s = _as_on_device(steps_s, breakdown, recurring)
    start_fraction = min(1.0, watched.startup.total_s / HOUR_S)
    always_s = sum(steps_s.values())
    total_s = always_s + sum(one.per_step_s.value for one in recurring)
    if total_s <= 0:
        return ()

    def share(part: RunPart, seconds: float, low: float, high: float) -> RunShare:
        """Return a part's share, whose seconds per step have these bounds."""
        of = [one for one in recurring if one.kind.part == part]
        others = [one for one in recurring if one.kind.part != part]
        rest_s = always_s + sum(one.per_step_s.value for one in others) - steps_s.get(part, 0.0)
        most_rest = rest_s + sum(one.per_step_s.high - one.per_step_s.value for one in others)
        least_rest = rest_s - sum(one.per_step_s.value - one.per_step_s.low for one in others)
        left = 1.0 - start_fraction
        largest = max(of, key=lambda one: one.per_step_s.value, default=None)
        if largest is not None and largest.per_step_s.value < steps_s.get(part, 0.0):
            largest = None  # most of it is in every step
        return RunShare(
            part=part,
            fraction=_fraction(left * seconds, total_s),
            low=_fraction(left * low, low + most_rest),
            high=_fraction(left * high, high + least_rest),
            seen=sum(one.kind.count for one in of) if of and not steps_s.get(part) else None,
            period="" if largest is None else largest.period,
            place="" if largest is None else largest.kind.place,
        )

    found = [
        RunShare(part="startup", fraction=start_fraction, low=start_fraction, high=start_fraction)
    ]
    for part in RUN_PARTS:
        of = [one.per_step_s for one in recurring if one.kind.part == part]
        own_s = steps_s.get(part, 0.0)
        seconds = own_s + sum(one.value for one in of)
        if seconds > 0:
            low = own_s + sum(one.low for one in of)
            high = own_s + sum(one.high for one in of)
            found.append(share(part, seconds, low, high))
    return tuple(found)


def loop_fraction(shares: Sequence[RunShare]) -> float:
    """Return the share of the run that its steps take, without start-up and what recurs."""
    return 1.0 - sum(share.fraction for share in shares if share.part in APART)


def known_in_loop(watched: WatchedRun, shares: Sequence[RunShare]) -> float:
    """Return the share of the run in checkpoints, logging and collections within epochs."""
    known = 0.0
    for part in _WITHIN:
        at_ends_s = sum(
            one.kind.total_s
            for one in extrapolate(watched)
            if one.kind.part == part and "epoch" in one.period
        )
        whole_s = watched.parts_s.get(part, 0.0)
        if whole_s > 0:
            known += share_of(shares, part) * max(0.0, 1.0 - at_ends_s / whole_s)
    return known


_WITHIN: tuple[RunPart, ...] = ("checkpoint", "logging", "collection")


def share_of(shares: Sequence[RunShare], part: RunPart) -> float:
    """Return the share of a part of the run; 0 if it was not observed."""
    return sum(share.fraction for share in shares if share.part == part)


def whole_run_gain(shares: Sequence[RunShare], gain: float) -> float:
    """Return the gain of the whole run if its steps get faster by a gain, and all else stays.

    Args:
        shares: The shares of the run; without any, the run consists of steps.
        gain: Gain of the steps' throughput: 0.5 for half as much again.
    """
    won = loop_fraction(shares) * (1.0 - 1.0 / (1.0 + gain))
    return 1.0 / (1.0 - won) - 1.0


def extrapolate(watched: WatchedRun) -> tuple[Extrapolated, ...]:
    """Return what recurs less often than every step, with its seconds per step.

    Work at an epoch's end recurs with each epoch, whose length is known from the loader. Other work
    that came at least three times at equal distances has that period; else its rate is that of a
    Poisson process with as many events.
    """
    return tuple(
        _extrapolated(watched, kind)
        for kind in watched.recurring
        if kind.total_s > 0 and not is_every_step(watched, kind)
    )


def is_every_step(watched: WatchedRun, kind: Recurring) -> bool:
    """Return whether recurring work is part of (nearly) every step."""
    is_frequent = kind.count >= max(_FEWEST, _EVERY_STEP_FROM * watched.steps)
    return is_frequent and not _is_at_epoch_ends(watched, kind)


def _extrapolated(watched: WatchedRun, kind: Recurring) -> Extrapolated:
    each = _mean(kind)
    rate, period = _rate(watched, kind)
    return Extrapolated(
        kind,
        Interval(
            value=rate.value * each.value, low=rate.low * each.low, high=rate.high * each.high
        ),
        period,
    )


def _mean(kind: Recurring) -> Interval:
    """Return the mean seconds of an occurrence."""
    mean_s = kind.total_s / kind.count
    if kind.is_cut:  # how much longer it would have taken is not known
        return Interval(value=mean_s, low=mean_s, high=mean_s * _CUT)
    if kind.count < 2 or len(kind.seconds) < 2:
        return Interval(value=mean_s, low=mean_s / _SEEN_ONCE, high=mean_s * _SEEN_ONCE)
    error_s = stdev(kind.seconds) / sqrt(len(kind.seconds))
    off_s = t_95(len(kind.seconds) - 1) * error_s
    return Interval(value=mean_s, low=max(0.0, mean_s - off_s), high=mean_s + off_s)


def _rate(watched: WatchedRun, kind: Recurring) -> tuple[Interval, str]:
    """Return the occurrences per step, and the period in words."""
    epoch_steps = _epoch_steps(watched)
    if epoch_steps is not None and _is_at_epoch_ends(watched, kind):
        times = kind.count / max(1, watched.epochs_ended)
        if kind.part == "restart":
            times = max(1.0, times)  # the last epoch may not have begun
        rate = times / epoch_steps
        words = "each epoch" if round(times) == 1 else f"{times:.0f} times an epoch"
        if times < _EVERY_STEP_FROM:
            words = f"every {1 / times:.0f} epochs"
        if times >= _EVERY_STEP_FROM or kind.count >= _FEWEST:
            return Interval(value=rate, low=rate, high=rate), words
        return _poisson(kind.count, max(1, watched.epochs_ended) * epoch_steps), words
    gaps = [after - before for before, after in pairwise(kind.at_steps)]
    if len(gaps) >= 2 and min(gaps) > 0 and max(gaps) - min(gaps) <= 1:
        gap = fmean(gaps)
        return Interval(value=1 / gap, low=1 / gap, high=1 / gap), f"every {gap:.0f} steps"
    steps = max(1, watched.steps)
    if kind.count == 1:
        # A script that does it every n steps would have done it twice within 2n.
        # It may also have been the only time.
        high = 1.0 / max(1, *(steps - at for at in kind.at_steps), *kind.at_steps)
        return Interval(value=high / 2, low=0.0, high=high), "seen once"
    return _poisson(kind.count, steps), f"about every {steps / kind.count:.0f} steps"


def _poisson(count: int, steps: float) -> Interval:
    """Return the rate of a Poisson process that showed this many events, with its 95 % interval."""
    from scipy.special import gammaincinv  # not needed for most runs

    return Interval(
        value=count / steps,
        low=float(gammaincinv(count, 0.025)) / steps,
        high=float(gammaincinv(count + 1, 0.975)) / steps,
    )


def _epoch_steps(watched: WatchedRun) -> float | None:
    """Return the optimizer steps of an epoch; None if unknown."""
    if not watched.epoch_batches or not watched.batches or not watched.steps:
        return None
    return watched.epoch_batches * watched.steps / watched.batches


def _is_at_epoch_ends(watched: WatchedRun, kind: Recurring) -> bool:
    """Return whether work happened only around ends of epochs."""
    ends = [
        step
        for own in watched.recurring
        if own.part == "restart"
        for step in own.at_steps
    ]  # fmt: skip
    if watched.is_epoch_cut:
        ends.append(watched.steps)
    if kind.part == "restart" or kind.what == "between epochs":
        return True
    return bool(kind.at_steps) and all(
        any(abs(at - end) <= 1 for end in ends) for at in kind.at_steps
    )


def _step_seconds(watched: WatchedRun, recurring: Sequence[Extrapolated]) -> dict[RunPart, float]:
    """Return the seconds of each part in a step, without what recurs less often."""
    left_s = dict(watched.parts_s)
    for one in recurring:
        part = one.kind.part
        left_s[part] = max(0.0, left_s.get(part, 0.0) - one.kind.total_s)
    return {part: spent_s / watched.steps for part, spent_s in left_s.items() if spent_s > 0}


def _as_on_device(
    steps_s: dict[RunPart, float], breakdown: TimeBreakdown, recurring: Sequence[Extrapolated]
) -> dict[RunPart, float]:
    """Divide a step as its device spends it: the host's clock does not show that.

    The breakdown is of the whole loop: recurring work within an epoch lies in its idle time, and
    restarts in its waits; both are known from the watch. Logging and collections, which the host
    does while the device may work on, count only where the device idles.
    """
    total_s = sum(steps_s.values())
    in_loop_s = sum(one.per_step_s.value for one in recurring if "epoch" not in one.period)
    loop_s = total_s + in_loop_s
    parts: dict[RunPart, float] = {
        "waiting": breakdown.data_wait.fraction - breakdown.restart_fraction,
        "copy": breakdown.device_copy.fraction,
        "compute": breakdown.compute.fraction,
        "synchronise": breakdown.synchronise.fraction,
    }
    found = {part: fraction * loop_s for part, fraction in parts.items() if fraction > 0}
    idle_s = max(0.0, breakdown.idle.fraction * loop_s - in_loop_s)
    hosts: tuple[RunPart, ...] = ("logging", "collection", "checkpoint")
    for part in hosts:
        own_s = min(idle_s, steps_s.get(part, 0.0))
        if own_s > 0:
            found[part] = own_s
            idle_s -= own_s
    if idle_s > 0:
        found["other"] = idle_s
    # To the seconds of a step that the host's clock has
    scale = total_s / max(sum(found.values()), 1e-12)
    return {part: spent_s * scale for part, spent_s in found.items()}


def _of_breakdown(breakdown: TimeBreakdown) -> Iterator[RunShare]:
    """Yield the shares of a step, of a loop that is autotune's own and has nothing else in it."""
    parts: dict[RunPart, float] = {
        "waiting": breakdown.data_wait.fraction - breakdown.restart_fraction,
        "restart": breakdown.restart_fraction,
        "copy": breakdown.device_copy.fraction,
        "compute": breakdown.compute.fraction,
        "synchronise": breakdown.synchronise.fraction,
        "other": breakdown.idle.fraction,
    }
    for part, fraction in parts.items():
        if fraction > 0:
            yield RunShare(part=part, fraction=fraction, low=fraction, high=fraction)


def _fraction(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
