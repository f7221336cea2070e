"""What a search has found, in sentences: the headline, the headroom, reasons and advice, the course of the search.

Comes in: a RunSummary and its columns. Goes out: sentences, free of markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autotune.analysis.time_estimate import payback_s
from autotune.records.ceilings import HOLDS_FROM, Headroom
from autotune.records.recommendation import Recommendation
from autotune.records.run_summary import RunSummary, changed_settings
from autotune.records.trial import TrialRecord
from autotune.report.figures import Column, Figures, find_trial, list_waits
from autotune.report.text import one_line
from autotune.report.wording.names import OUTCOMES, describe_settings, format_setting
from autotune.report.wording.say import say
from autotune.report.wording.units import (
    format_bytes,
    format_bytes_beside,
    format_count,
    format_duration,
    format_fraction,
    format_times,
    show_interval,
)
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

_MEMORY_OUTCOMES = frozenset({"over_memory", "oom", "host_oom"})
_NOISE = 0.10
"""A rate this far above a ceiling is no noise, the ceiling was measured too low: our convention, over twice the 4 %
that two runs of the same settings may differ by on a CPU (records.measurement.RUN_SPREAD)."""
_NOTHING_LEFT = 0.005
"""Headroom that rounds to none: our convention, half of a per cent."""
_SMALL_HEADROOM = 0.5
"""Up to which it is worded as a limit, above as room: our convention."""


def say_headline(summary: RunSummary, columns: Sequence[Column]) -> str:
    """The result in a sentence or two."""
    found = summary.recommendation
    if found is None:
        return say_nothing_feasible(summary)
    if found.verdict == "already_best":
        return _say_already_best(found)
    if found.verdict == "baseline_infeasible":
        fault = _fault_of_baseline(find_trial(summary, 0), summary.limit_bytes)
        return f"Your configuration {fault}, so no speed-up can be given. The recommended settings work."
    if found.verdict == "unconfirmed":
        return _say_unconfirmed(columns)
    if found.speedup is None:
        return "Faster than your configuration; by how much was not measured."
    interval = show_interval(found.speedup.low, found.speedup.high, "times")
    return f"{format_times(found.speedup.value)} times as fast as your configuration (95 %: {interval})."


def _say_already_best(found: Recommendation) -> str:
    if found.overloaded:
        return "No faster configuration is known to stay within the memory limit on the largest samples: keep yours."
    which = "of those that may be used" if found.is_outrun else "found"
    return f"Your configuration is already the best {which}: no measurable gain."


def _say_unconfirmed(columns: Sequence[Column]) -> str:
    if len(columns) == 1 or columns[1].title != "recommended":
        return "Not confirmed: nothing faster than your configuration was found so far."
    reference, own = columns[0].figures, columns[1].figures
    if own is None or reference is None:
        return "Not confirmed: the recommended settings were measured once."
    ratio = format_times(own.samples_per_s.value / reference.samples_per_s.value)
    return f"Not confirmed: about {ratio} times as fast as your configuration, judging by single runs."


def _fault_of_baseline(trial: TrialRecord | None, limit_bytes: int) -> str:
    limit, run = format_bytes(limit_bytes), None if trial is None else trial.measurement
    outcome = None if trial is None else trial.outcome
    if run is not None and run.memory.is_thrashing:
        return f"has no room to train within the memory limit of {limit}"
    if run is not None and outcome == "over_memory":
        peak = format_bytes_beside(run.peak_memory_bytes, limit_bytes)
        return f"takes {peak} of memory, above the limit of {limit}"
    if outcome in _MEMORY_OUTCOMES:
        return f"runs out of memory (the limit is {limit})"
    if outcome == "timeout":
        return "does not finish in time"
    return "failed when it was measured again" if outcome == "ok" else "could not be measured"


def say_nothing_feasible(summary: RunSummary) -> str:
    """Why there is no recommendation: the nearest miss of the memory limit, measured ones first."""
    limit, trials = format_bytes(summary.limit_bytes), summary.trials
    over = [trial for trial in trials if trial.outcome == "over_memory" and trial.score is not None]
    ended = [trial for trial in trials if trial.outcome in {"oom", "host_oom"} and trial.result.violation is not None]
    if over or ended:
        trial = min(over or ended, key=_violation)
        return (
            f"Nothing meets the memory limit of {limit}. The nearest miss: trial {trial.number} "
            f"({describe_settings(trial.config)}) {_say_miss(trial, summary.limit_bytes)}. "
            "Raise memory_limit or allow smaller batches."
        )
    if not trials:
        return "Nothing was measured."
    outcome, count = Counter(trial.outcome for trial in trials).most_common(1)[0]
    most = f"Nothing to recommend: {format_count(count, 'trial')} of {len(trials)} {OUTCOMES[outcome]}"
    if outcome in {"oom", "host_oom"}:
        return f"{most}. The memory limit is {limit}: raise memory_limit or allow smaller batches."
    return f"{most}: {one_line(next(trial.reason for trial in trials if trial.outcome == outcome))}"


def _say_miss(trial: TrialRecord, limit_bytes: int) -> str:
    if trial.measurement is not None and trial.measurement.memory.is_thrashing:
        return "had no room: memory was released and requested again during training"
    at_least = "" if trial.outcome == "over_memory" else "at least "
    return f"took {at_least}{format_bytes_beside(limit_bytes * (1 + _violation(trial)), limit_bytes)}"


def _violation(trial: TrialRecord) -> float:
    return trial.score.violation if trial.score is not None else trial.result.violation or 0.0


def say_headroom(summary: RunSummary, columns: Sequence[Column]) -> str:
    """How much of the device is used today, what limits it, and what tuning can still gain; "" where not known."""
    found = summary.recommendation
    if found is None:
        return ""
    best = next(column.figures for column in columns if column.number == found.number)
    present = "" if found.verdict == "baseline_infeasible" else _say_present(columns[0].figures, summary.baseline)
    return f"{present} {_say_best(best, is_own=found.number == 0)}".strip()


def _say_present(figures: Figures | None, config: TrainingConfig) -> str:
    if figures is None:
        return ""
    headroom, rate = figures.headroom, figures.samples_per_s.value
    if headroom is not None and headroom.share_of_lower > 1 + _NOISE:
        return _say_implausible(headroom, "You run")
    if figures.device_ceiling and rate / figures.device_ceiling <= 1 + _NOISE:
        device = "this device" if config.world_size == 1 else f"these {config.world_size} devices"
        limit = "the loader alone was not measured" if headroom is None else _say_limit(headroom, config)
        return f"You run at {_share(rate / figures.device_ceiling)} of what {device} can do; {limit}."
    if figures.loader_ceiling:
        reached = _share(rate / figures.loader_ceiling)
        return f"You run at {reached} of what your loader delivers alone; the device alone was not measured."
    return ""


def _say_limit(headroom: Headroom, config: TrainingConfig) -> str:
    if headroom.share_of_lower >= HOLDS_FROM:
        device = "the device itself is" if config.world_size == 1 else "the devices themselves are"
        return f"{'the loader is' if headroom.lower == 'loader' else device} the bottleneck"
    if config.num_workers == 0:
        return "without workers, loading and computing take turns"
    return f"neither side alone limits it: it reaches {_share(headroom.share_of_lower)} of the lower ceiling"


def _say_best(figures: Figures | None, *, is_own: bool) -> str:
    headroom = None if figures is None else figures.headroom
    if headroom is None:
        return ""
    if headroom.share_of_lower > 1 + _NOISE:
        return "" if is_own else _say_implausible(headroom, "The best found runs")
    subject = "Your configuration" if is_own else "The best found"
    reached = f"{subject} reaches {_share(headroom.share_of_lower)} of the lower ceiling, the {headroom.lower}'s"
    if headroom.room < _NOTHING_LEFT:
        return f"{reached}; as long as that stays, tuning can't gain more."
    if headroom.room <= _SMALL_HEADROOM:
        return f"{reached}; as long as that stays, tuning can't gain more than {format_fraction(headroom.room)}."
    return f"{reached}, which leaves room for {format_fraction(headroom.room)} more."


def _say_implausible(headroom: Headroom, subject: str) -> str:
    share = format_fraction(headroom.share_of_lower)
    return f"{subject} at {share} of the {headroom.lower}'s ceiling as measured: that ceiling is too low to judge by."


def _share(fraction: float) -> str:
    """What noise carries above the whole is the whole."""
    return format_fraction(min(1.0, fraction))


def list_changes(summary: RunSummary) -> tuple[tuple[str, str, str], ...]:
    """The settings to change: (name, the baseline's value, the recommended one)."""
    if summary.recommendation is None:
        return ()
    config, baseline = summary.recommendation.config, summary.baseline
    changed = changed_settings(config, baseline)
    return tuple((name, format_setting(name, baseline), format_setting(name, config)) for name in changed)


def list_reasons(summary: RunSummary, columns: Sequence[Column]) -> Iterator[str]:
    """Why this configuration is recommended, a sentence each."""
    found = summary.recommendation
    if found is None:
        return
    yield from map(say, found.reasons)
    if found.number == 0:
        return
    before, after, *_ = list_waits(columns)
    if before is not None and after is not None and found.verdict != "baseline_infeasible":
        now, then = format_fraction(after), format_fraction(before)
        yield f"Waiting for data takes {now} of the time, with your configuration {then}."
    if found.same_batch_number == 0:
        what = "is known to stay within the limit on the largest samples" if found.overloaded else "was found"
        yield f"At the baseline's global batch nothing faster than the baseline {what}."


def list_advice(summary: RunSummary) -> Iterator[str]:
    """What to do about the learning rate and what goes with it, a sentence each."""
    if summary.recommendation is None:
        return
    advice = summary.recommendation.lr_advice
    if advice.rule != "none":
        why = f"the global batch is {advice.batch_ratio:.4g} times the baseline's ({advice.rule} rule)"
        yield f"Change lr from {summary.baseline.lr:.4g} to {advice.lr:.4g}: {why}."
    if advice.betas is not None:
        yield f"Set the optimizer's betas to ({advice.betas[0]:.4g}, {advice.betas[1]:.4g})."
    if advice.eps is not None:
        yield f"Set the optimizer's eps to {advice.eps:.3g}."
    yield from map(say, advice.notes)


def say_course(summary: RunSummary) -> str:
    """How the search went: trials, outcomes, time, why it ended, and when it breaks even."""
    counts = Counter(trial.outcome for trial in summary.trials).most_common()
    outcomes = ", ".join(f"{count} {OUTCOMES[outcome]}" for outcome, count in counts)
    course = f"{format_count(len(summary.trials), 'trial')} in {format_duration(summary.wall_s)}"
    course += f"{f' ({outcomes})' * bool(outcomes)}. Stopped: {one_line(say(summary.stopped_because)).rstrip('.')}."
    found = summary.recommendation
    is_whole = summary.promised_s is not None  # else the time before an interruption is not known
    speedup = found.speedup if found is not None and found.verdict == "faster" and is_whole else None
    paid_s = None if speedup is None else payback_s(summary.wall_s, speedup.value)
    return course + (f" Breaks even after {format_duration(paid_s)} of training at the old speed." if paid_s else "")
