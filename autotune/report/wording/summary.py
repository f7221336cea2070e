"""The sentences about a whole search: the headline, the headroom, reasons and advice, the course.

Comes in: a RunSummary and its columns. Goes out: sentences, free of markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isinf

from autotune.analysis.time_estimate import payback_s
from autotune.messages.units import (
    format_bytes,
    format_bytes_beside,
    format_count,
    format_duration,
    format_fraction,
    format_mean_count,
    format_times,
    show_interval,
)
from autotune.messages.words import OUTCOMES
from autotune.records.ceilings import Headroom
from autotune.records.measurement import Interval, Measurement
from autotune.records.recommendation import LargerBatch, Recommendation
from autotune.records.run_summary import RunSummary, changed_settings
from autotune.records.trial import TrialRecord
from autotune.report.figures import Column, find_trial, headroom_in, list_waits
from autotune.report.text import one_line
from autotune.report.wording.names import describe_settings, format_setting
from autotune.settings.training_config import TrainingConfig

__all__ = [
    "list_advice",
    "list_changes",
    "list_reasons",
    "say_course",
    "say_headline",
    "say_headroom",
    "say_nothing_feasible",
]

_NOTHING_LEFT = 0.005
"""Headroom that rounds to none: our convention, half of a per cent."""
_SMALL_HEADROOM = 0.5
"""Headroom up to which it is worded as a limit: our convention."""
_NO_ROOM = "Raise memory_limit or allow smaller batches."


def say_headline(summary: RunSummary, columns: Sequence[Column]) -> str:
    """Return the result in a sentence or two."""
    found = summary.recommendation
    if found is None:
        return say_nothing_feasible(summary)
    is_change = len(columns) > 1 and columns[1].title == "recommended"
    return " ".join(
        [_say_verdict(summary, found, is_change=is_change), *_say_batches(summary, found), *_say_load(columns)]
    )


def _say_verdict(summary: RunSummary, found: Recommendation, *, is_change: bool) -> str:
    if found.verdict == "already_best" and found.overloaded:
        return "Keep your configuration: no faster one is known to fit the memory limit on the largest samples."
    if found.verdict == "already_best":
        best = "the best usable one" if found.is_outrun else "already the best"
        is_larger_faster = found.larger_batch is not None and found.larger_batch.is_faster
        where = " at its global batch" if is_larger_faster else ""
        return f"Your configuration is {best} found{where}: no measurable gain."
    if found.verdict == "baseline_infeasible":
        fault = _say_fault(find_trial(summary, 0), summary.limit_bytes)
        return f"The recommended configuration works; yours {fault}, so there is no speed-up to report."
    speedup = found.speedup
    if found.verdict == "unconfirmed" and (not is_change or speedup is None):
        return "Not decided: nothing faster than your configuration was found so far."
    assert speedup is not None, "a baseline that ran is a reference"  # noqa: S101 - our own bug
    if found.verdict == "unconfirmed":
        more = f"; about {format_duration(found.more_s)} more should decide" if found.more_s else ""
        between = f"{_interval(speedup)} times as fast as your configuration"
        return f"Not decided: {between}, most likely {format_times(speedup.value)}{more}."
    return f"Proven: {format_times(speedup.value)} times as fast as your configuration (95 %: {_interval(speedup)})."


def _interval(ratio: Interval) -> str:
    return show_interval(ratio.low, ratio.high, "times")


def _say_fault(baseline: TrialRecord | None, limit_bytes: int) -> str:
    """Return why the baseline is no reference, as a predicate."""
    limit = format_bytes(limit_bytes)
    if baseline is None:
        return "could not be measured"
    run = baseline.measurement
    if run is not None and run.memory.is_thrashing:
        return f"has no room to train within the memory limit of {limit}"
    if run is not None and baseline.outcome == "over_memory":
        return f"takes {format_bytes_beside(run.peak_memory_bytes, limit_bytes)}, above the memory limit of {limit}"
    if baseline.outcome in {"over_memory", "oom", "host_oom"}:
        return f"runs out of memory (limit: {limit})"
    if baseline.outcome == "timeout":
        return "does not finish in time"
    return "failed when run again" if baseline.outcome == "ok" else "could not be measured"


def _say_batches(summary: RunSummary, found: Recommendation) -> Iterator[str]:
    """Yield how the best at a larger global batch compares to the best at the baseline's, where both are known."""
    larger = found.larger_batch
    if larger is None or found.same_batch is None or larger.over_same_batch is None or larger.break_even is None:
        return
    own, ratio = found.same_batch.global_batch_size, larger.over_same_batch
    more = f"{format_times(ratio.value)} times the samples/s"
    same = found.same_batch_speedup
    if found.number != larger.number:
        doubt = _doubt_on(larger, summary.objective.larger_batch_gain)
        batch = f"A global batch of {larger.config.global_batch_size} instead of {own}"
        yield f"{batch} gives {more} ({_interval(ratio)}){doubt}."
    elif found.same_batch_number == 0:
        yield f"Its global batch is {larger.config.global_batch_size}; at yours, {own}, nothing faster was found."
    elif same is None:
        best = f"the best at yours, {own} ({_interval(ratio)})"
        yield f"Its global batch is {larger.config.global_batch_size}: {more} of {best}."
    else:
        times = f"{format_times(same.value)} times as fast ({_interval(same)})"
        yield f"Its global batch is {larger.config.global_batch_size}; at yours, {own}, the best is {times}."
    if larger.is_faster:
        yield _say_break_even(larger.break_even)


def _doubt_on(larger: LargerBatch, least_gain: float) -> str:
    if not larger.is_faster:
        return ", which may be noise"
    return "" if larger.is_worth_it else f", less than the {100 * least_gain:g} % required of a larger batch"


def _say_break_even(scale: Interval) -> str:
    if scale.value == 0:
        return "The larger batch trains sooner at any gradient noise scale."
    low = format_mean_count(scale.low)
    interval = f"{low} or more" if isinf(scale.high) else f"{low} to {format_mean_count(scale.high)}"
    return (
        f"The larger batch trains sooner if your gradient noise scale is above {format_mean_count(scale.value)} "
        f"samples ({interval})."
    )


def _say_load(columns: Sequence[Column]) -> Iterator[str]:
    """Yield how many cores other programs used, where they did while one side of the ratio was measured."""
    sides = [column.figures for column in columns if column.title in {"baseline", "recommended"}]
    loads = [known.host_load for known in sides if known is not None and known.host_load is not None]
    loaded = [load for load in loads if load.is_loaded]
    if loaded:
        worst = max(loaded, key=lambda load: load.others_cores / load.cores)
        yield f"Other programs used {worst.others_cores:.1f} of the {format_count(worst.cores, 'core')} meanwhile."


def say_nothing_feasible(summary: RunSummary) -> str:
    """Return why nothing is recommended: the nearest miss of the memory limit, measured ones first."""
    trials, limit = summary.trials, format_bytes(summary.limit_bytes)
    over = [trial for trial in trials if trial.outcome == "over_memory" and trial.score is not None]
    ended = [trial for trial in trials if trial.outcome in {"oom", "host_oom"} and trial.result.violation is not None]
    nearest = min(over or ended, key=_violation, default=None)
    if nearest is not None:
        which = f"trial {nearest.number} ({describe_settings(nearest.config)})"
        miss = f"{which} {_say_miss(nearest, summary.limit_bytes)}"
        return f"Nothing fits the memory limit of {limit}. Nearest: {miss}. {_NO_ROOM}"
    if not trials:
        return "Nothing was measured."
    outcome, count = Counter(trial.outcome for trial in trials).most_common(1)[0]
    first = next(trial for trial in trials if trial.outcome == outcome)
    again = first.refuted_by
    how = "failed when run again" if again else OUTCOMES[outcome]
    nothing = f"Nothing to recommend: {count} of {format_count(len(trials), 'trial')} {how}"
    if outcome in {"oom", "host_oom"}:
        return f"{nothing}. The memory limit is {limit}. {_NO_ROOM}"
    return f"{nothing}: {one_line((again or first).reason)}"


def _violation(trial: TrialRecord) -> float:
    return trial.score.violation if trial.score is not None else trial.result.violation or 0.0


def _say_miss(trial: TrialRecord, limit_bytes: int) -> str:
    """Return by how much a trial missed the memory limit, as a predicate."""
    if trial.measurement is not None and trial.measurement.memory.is_thrashing:
        return "had no room: memory was released and requested again during training"
    least = "" if trial.outcome == "over_memory" else "at least "
    return f"took {least}{format_bytes_beside(limit_bytes * (1 + _violation(trial)), limit_bytes)}"


def say_headroom(summary: RunSummary, columns: Sequence[Column]) -> str:
    """Return how much of the device is used today, what limits it, and what tuning can still gain; "" if unknown."""
    found = summary.recommendation
    if found is None:
        return ""
    best = next(column.figures for column in columns if column.number == found.number)
    present = "" if found.verdict == "baseline_infeasible" else _say_present(columns[0].figures, summary.baseline)
    return f"{present} {_say_best(best, is_own=found.number == 0)}".strip()


def _say_present(figures: Measurement | None, config: TrainingConfig) -> str:
    if figures is None:
        return ""
    rate = figures.samples_per_s
    if figures.device_ceiling:
        headroom = headroom_in(figures)
        share = rate / figures.device_ceiling if headroom is None else headroom.share_of_device
        devices = "this device" if config.world_size == 1 else f"these {config.world_size} devices"
        limit = "the loader alone was not measured" if headroom is None else _say_limit(headroom, config)
        return f"You run at {_share(share)} of what {devices} can do; {limit}."
    if figures.loader_ceiling:
        share = rate / figures.loader_ceiling
        return f"You run at {_share(share)} of what the loader alone reaches; the device alone was not measured."
    return ""


def _share(share: float) -> str:
    """Return a share of a ceiling; noise may carry it above the whole."""
    return format_fraction(min(1.0, share))


def _say_limit(headroom: Headroom, config: TrainingConfig) -> str:
    is_one = config.world_size == 1
    match headroom.limit:
        case "loader":
            return "the loader is the bottleneck"
        case "copy":
            return "copying batches to it is the bottleneck"
        case "host":
            return f"the host that launches {'its' if is_one else 'their'} work is the bottleneck"
        case "device":
            return f"{'the device itself is' if is_one else 'the devices themselves are'} the bottleneck"
        case None if config.num_workers == 0:
            return "without workers, loading and computing take turns"
        case None:
            return f"no side alone limits it: it reaches {_share(headroom.share_of_lower)} of the lowest ceiling"


def _say_best(figures: Measurement | None, *, is_own: bool) -> str:
    headroom = None if figures is None else headroom_in(figures)
    if headroom is None:
        return ""
    side = "copies'" if headroom.lower == "copy" else f"{headroom.lower}'s"
    which = "Your configuration" if is_own else "The best configuration"
    reached = f"{which} reaches {_share(headroom.share_of_lower)} of the lowest ceiling, the {side}"
    if headroom.room < _NOTHING_LEFT:
        return f"{reached}: tuning can gain nothing more."
    room = format_fraction(headroom.room)
    if headroom.room <= _SMALL_HEADROOM:
        return f"{reached}: tuning can gain at most {room} more."
    return f"{reached}: its headroom is {room}."


def list_changes(summary: RunSummary) -> tuple[tuple[str, str, str], ...]:
    """List the settings to change: (name, the baseline's value, the recommended one)."""
    if summary.recommendation is None:
        return ()
    config, baseline = summary.recommendation.config, summary.baseline
    changed = changed_settings(config, baseline)
    return tuple((name, format_setting(name, baseline), format_setting(name, config)) for name in changed)


def list_reasons(summary: RunSummary, columns: Sequence[Column]) -> Iterator[str]:
    """Yield why this configuration is recommended, a sentence each."""
    found = summary.recommendation
    if found is None:
        return
    yield from map(str, found.reasons)
    if found.number == 0:
        return
    before, after, *_ = list_waits(columns)
    if before is not None and after is not None and found.verdict != "baseline_infeasible":
        yield f"Waiting for data takes {format_fraction(after)} of the time; before, {format_fraction(before)}."
    if found.same_batch_number == 0:
        how = "is known to fit the memory limit on the largest samples" if found.overloaded else "was found"
        yield f"At the baseline's global batch nothing faster {how}."


def list_advice(summary: RunSummary) -> Iterator[str]:
    """Yield what to do about the learning rate and what goes with it, a sentence each."""
    if summary.recommendation is None:
        return
    advice = summary.recommendation.lr_advice
    if advice.rule != "none":
        change = f"Change lr from {summary.baseline.lr:.4g} to {advice.lr:.4g}"
        yield f"{change}: the global batch is {advice.batch_ratio:.4g} times the baseline's ({advice.rule} rule)."
    if advice.betas is not None:
        first, second = advice.betas
        yield f"Set the optimizer's betas to ({first:.4g}, {second:.4g})."
    if advice.eps is not None:
        yield f"Set the optimizer's eps to {advice.eps:.3g}."
    yield from map(str, advice.notes)


def say_course(summary: RunSummary) -> str:
    """Return how the search went: trials, outcomes, time, why it ended, and when it breaks even."""
    found = summary.recommendation
    ended = Counter(trial.outcome for trial in summary.trials).most_common()
    outcomes = ", ".join(f"{count} {OUTCOMES[outcome]}" for outcome, count in ended)
    course = f"{format_count(len(summary.trials), 'trial')} in {format_duration(summary.wall_s)}"
    if outcomes:
        course += f" ({outcomes})"
    course += f". Stopped: {one_line(str(summary.stopped_because)).rstrip('.')}."
    # Of a search that was interrupted the time before is not known.
    is_whole = summary.promised_s is not None
    speedup = found.speedup if found is not None and found.verdict == "faster" and is_whole else None
    paid_s = None if speedup is None else payback_s(summary.wall_s, speedup.value)
    if paid_s:
        course += f" Breaks even after {format_duration(paid_s)} of training at the old speed."
    return course
