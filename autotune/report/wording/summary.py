"""What a search has found, in sentences: the headline, the headroom, reasons and advice, the course of the search.

Comes in: a RunSummary and its columns. Goes out: sentences, free of markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autotune.analysis.time_estimate import payback_s
from autotune.records.measurement import Measurement
from autotune.records.run_summary import RunSummary, changed_settings
from autotune.records.trial import TrialRecord
from autotune.report.figures import Column, find_trial, headroom_in, list_waits
from autotune.report.wording.catalogue import fill
from autotune.report.wording.names import describe_settings, format_setting
from autotune.report.wording.say import say
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
"""Up to which it is worded as a limit, above as room: our convention."""


def say_headline(summary: RunSummary, columns: Sequence[Column]) -> str:
    """The result in a sentence or two."""
    found = summary.recommendation
    if found is None:
        return say_nothing_feasible(summary)
    headline = fill(
        "headline",
        {
            "found": found,
            "baseline": find_trial(summary, 0),
            "limit_bytes": summary.limit_bytes,
            "is_change": len(columns) > 1 and columns[1].title == "recommended",
            "is_larger_faster": found.larger_batch is not None and found.larger_batch.is_faster,
        },
    )
    return " ".join([headline, *_say_batches(summary), *_say_load(columns)])


def _say_batches(summary: RunSummary) -> Iterator[str]:
    """The best at the baseline's global batch beside the best at a larger one, where that has more samples/s."""
    found = summary.recommendation
    if found is None or found.same_batch is None or (larger := found.larger_batch) is None:
        return
    if larger.break_even is not None and larger.over_same_batch is not None:
        yield fill(
            "headline_batches",
            {
                "larger": larger,
                "same": found.same_batch,
                "same_speedup": found.same_batch_speedup,
                "is_baseline": found.same_batch_number == 0,
                "is_recommended": found.number == larger.number,
                "least_gain": summary.objective.larger_batch_gain,
            },
        )


def _say_load(columns: Sequence[Column]) -> Iterator[str]:
    """How much others used the cores, where they did while one side of the ratio was measured."""
    sides = [column.figures for column in columns if column.title in {"baseline", "recommended"}]
    loads = [known.host_load for known in sides if known is not None and known.host_load is not None]
    loaded = [load for load in loads if load.is_loaded]
    if loaded:
        yield fill("headline_load", {"load": max(loaded, key=lambda load: load.others_cores / load.cores)})


def say_nothing_feasible(summary: RunSummary) -> str:
    """Why there is no recommendation: the nearest miss of the memory limit, measured ones first."""
    trials = summary.trials
    over = [trial for trial in trials if trial.outcome == "over_memory" and trial.score is not None]
    ended = [trial for trial in trials if trial.outcome in {"oom", "host_oom"} and trial.result.violation is not None]
    nearest = min(over or ended, key=_violation, default=None)
    outcomes = Counter(trial.outcome for trial in trials)
    with_outcome = [trial for trial in trials if trial.outcome == outcomes.most_common(1)[0][0]]
    return fill(
        "nothing_feasible",
        {
            "limit_bytes": summary.limit_bytes,
            "nearest": nearest,
            "settings": "" if nearest is None else describe_settings(nearest.config),
            "violation": 0.0 if nearest is None else _violation(nearest),
            "trials": trials,
            "with_outcome": with_outcome,
        },
    )


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


def _say_present(figures: Measurement | None, config: TrainingConfig) -> str:
    if figures is None:
        return ""
    known = {name: getattr(figures, name) for name in ("device_ceiling", "loader_ceiling")}
    headroom = headroom_in(figures)
    return fill("present", {**known, "headroom": headroom, "rate": figures.samples_per_s, "config": config})


def _say_best(figures: Measurement | None, *, is_own: bool) -> str:
    headroom = None if figures is None else headroom_in(figures)
    if headroom is None:
        return ""
    limits = {"nothing_left": _NOTHING_LEFT, "small_headroom": _SMALL_HEADROOM}
    return fill("best", {**limits, "headroom": headroom, "is_own": is_own})


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
        yield fill("less_waiting", {"before": before, "after": after})
    if found.same_batch_number == 0:
        yield fill("nothing_faster_at_same_batch", {"overloaded": found.overloaded})


def list_advice(summary: RunSummary) -> Iterator[str]:
    """What to do about the learning rate and what goes with it, a sentence each."""
    if summary.recommendation is None:
        return
    advice = summary.recommendation.lr_advice
    if advice.rule != "none":
        yield fill("change_lr", {"advice": advice, "baseline": summary.baseline})
    if advice.betas is not None:
        yield fill("set_betas", {"betas": advice.betas})
    if advice.eps is not None:
        yield fill("set_eps", {"eps": advice.eps})
    yield from map(say, advice.notes)


def say_course(summary: RunSummary) -> str:
    """How the search went: trials, outcomes, time, why it ended, and when it breaks even."""
    found = summary.recommendation
    is_whole = summary.promised_s is not None  # else the time before an interruption is not known
    speedup = found.speedup if found is not None and found.verdict == "faster" and is_whole else None
    return fill(
        "course",
        {
            "trials": summary.trials,
            "wall_s": summary.wall_s,
            "outcomes": Counter(trial.outcome for trial in summary.trials).most_common(),
            "stopped_because": say(summary.stopped_because),
            "paid_s": None if speedup is None else payback_s(summary.wall_s, speedup.value),
        },
    )
