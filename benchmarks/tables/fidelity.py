"""Summary and tables of benchmarks/fidelity.py, from the pairs that it writes down. Pure but for the printing.

Intervals are calculated from each trial's blocks, as the product has them by now: by the spread between runs that a
first search assumes of such a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median
from textwrap import fill
from typing import Any

import numpy as np

from autotune.models.evidence import assumed_variation, with_run_variation
from autotune.models.statistics import window_rate
from autotune.records.measurement import Block, Interval, Window
from benchmarks.measures.recording import print_table

__all__ = ["print_fidelity_tables", "spearman", "summarise"]

_MEDIAN_TARGET = 0.02
_WORST_TARGET = 0.06
_SPREADS = 3.0  # the worst error may also be this many times the plain runs' own spread
_RANK_TARGET = 0.97
_COVERAGE_TARGET = 0.90
_COST_TARGET = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What the pairs of one setting say."""

    workload: str
    index: str
    pairs: int
    plain: float
    """Median of the plain runs, samples per second."""
    trial: float
    naive: float
    error: float
    """Median of the pairs' ratios, trial over plain, less 1."""
    naive_error: float
    """Likewise for ten steps of each plain run over that run."""
    spread: float | None
    """Largest less smallest plain rate, over their median; None for one pair."""
    medians_covered: int
    """Trials whose 95 % interval holds the median of the plain rates."""
    own_covered: int
    """Trials whose 95 % interval holds the plain rate of their own pair."""

    @property
    def allowed(self) -> float:
        """The largest error that is within the target."""
        return max(_WORST_TARGET, _SPREADS * (self.spread or 0.0))


def summarise(results: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that the targets are set for, over all settings measured so far."""
    settings = _settings(results)
    if not settings:
        return {}
    by_workload = {
        name: [one for one in settings if one.workload == name] for name in results["pairs"]
    }
    worst = max(settings, key=lambda one: abs(one.error))
    pairs = sum(one.pairs for one in settings)
    ranks = {
        name: spearman([(one.plain, one.trial) for one in own]) for name, own in by_workload.items()
    }
    naive_ranks = {
        name: spearman([(one.plain, one.naive) for one in own]) for name, own in by_workload.items()
    }
    return {
        "settings": len(settings),
        "pairs": pairs,
        **_changes(results),
        "single_trials": _single_trials(results),
        "median_absolute_error": median(abs(one.error) for one in settings),
        "worst_absolute_error": abs(worst.error),
        "worst_setting": f"{worst.workload} {worst.index}",
        "settings_beyond_target": [
            f"{one.workload} {one.index}" for one in settings if abs(one.error) > one.allowed
        ],
        "rank_correlation": spearman([(one.plain, one.trial) for one in settings]),
        "rank_correlation_by_workload": ranks,
        "coverage_of_medians": sum(one.medians_covered for one in settings) / pairs,
        "coverage_of_own_plain": sum(one.own_covered for one in settings) / pairs,
        "median_spread": _median_of(one.spread for one in settings),
        "naive": {
            "median_absolute_error": median(abs(one.naive_error) for one in settings),
            "worst_absolute_error": max(abs(one.naive_error) for one in settings),
            "settings_beyond_target": sum(abs(one.naive_error) > one.allowed for one in settings),
            "rank_correlation": spearman([(one.plain, one.naive) for one in settings]),
            "rank_correlation_by_workload": naive_ranks,
        },
    }


def _single_trials(results: Mapping[str, Any]) -> dict[str, float]:
    """How far each trial lies beside the plain run of its pair: what a search goes by, before any median."""
    measured = [one for settings in results["pairs"].values() for one in settings.values()]
    ratios = [
        pair["trial"]["samples_per_s"] / pair["plain"]["samples_per_s"]
        for one in measured
        for pair in one["pairs"]
    ]
    errors = [abs(ratio - 1) for ratio in ratios]
    return {"median": median(errors), "q90": float(np.quantile(errors, 0.9)), "worst": max(errors)}


def _changes(results: Mapping[str, Any]) -> dict[str, Any]:
    """How much the machine's own speed changed during the pairs, as far as it was looked at."""
    measured = [one for settings in results["pairs"].values() for one in settings.values()]
    drifts = [pair["drift"] for one in measured for pair in one["pairs"] if "drift" in pair]
    return {
        "pairs_put_aside": sum(len(one.get("put_aside", ())) for one in measured),
        "median_change_of_the_machine": _median_of(drifts),
        "worst_change_of_the_machine": max(drifts, default=None),
    }


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation, ties by their mean rank; None where one side does not vary."""
    first, second = _ranks([a for a, _ in pairs]), _ranks([b for _, b in pairs])
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    centre = fmean(first)
    joint = sum((a - centre) * (b - centre) for a, b in zip(first, second, strict=True))
    return joint / sqrt(
        sum((a - centre) ** 2 for a in first) * sum((b - centre) ** 2 for b in second)
    )


def print_fidelity_tables(results: Mapping[str, Any]) -> None:
    """Print a line for each setting, one for each workload, and the targets."""
    settings, summary = _settings(results), summarise(results)
    if not settings:
        print("no pair has been measured yet")
        return
    head = ["workload", "#", "pairs", "plain/s", "trial/s", "error", "A/A", "in CI", "10 steps"]
    print_table(
        "error: median of the pairs' ratios less 1; A/A: spread of the plain runs;\n"
        "in CI: trials whose 95 % interval holds the median plain rate.",
        head,
        [_setting_row(one) for one in settings],
    )
    rows = [_workload_row(name, settings, summary) for name in results["pairs"]]
    head = ["workload", "median err", "worst err", "rank", "10 steps: median", "worst", "rank"]
    print_table("Absolute errors and Spearman's rank correlation.", head, rows)
    print_table(
        "All settings.", ["", "product", "target", "10 steps"], _target_rows(summary, results)
    )
    if summary["median_change_of_the_machine"] is not None:
        usual, most = (
            summary["median_change_of_the_machine"],
            summary["worst_change_of_the_machine"],
        )
        print(
            f"\nDuring the pairs that count the machine's own speed changed by {usual:.0%} in the\n"
            f"median, by {most:.0%} at the most; {summary['pairs_put_aside']} pairs were put aside for it."
        )
    beyond = summary["settings_beyond_target"]
    print("\n" + fill(f"Settings beyond 6 % and three spreads: {', '.join(beyond) or 'none'}.", 80))


def _settings(results: Mapping[str, Any]) -> list[_Setting]:
    return [
        _setting(name, index, one["pairs"], one["settings"]["micro_batch_size"])
        for name, settings in results.get("pairs", {}).items()
        for index, one in sorted(settings.items())
        if one["pairs"]
    ]


def _setting(name: str, index: str, pairs: Sequence[Mapping[str, Any]], batch: int) -> _Setting:
    plains = [pair["plain"]["samples_per_s"] for pair in pairs]
    trials = [pair["trial"]["samples_per_s"] for pair in pairs]
    naive = [pair["plain"]["naive_samples_per_s"] for pair in pairs]
    intervals = [_interval(pair["trial"], batch) for pair in pairs]
    middle = median(plains)
    return _Setting(
        workload=name,
        index=index,
        pairs=len(pairs),
        plain=middle,
        trial=median(trials),
        naive=median(naive),
        error=median(trial / plain for trial, plain in zip(trials, plains, strict=True)) - 1,
        naive_error=median(one / plain for one, plain in zip(naive, plains, strict=True)) - 1,
        spread=(max(plains) - min(plains)) / middle if len(plains) > 1 else None,
        medians_covered=sum(one.low <= middle <= one.high for one in intervals),
        own_covered=sum(
            one.low <= plain <= one.high for one, plain in zip(intervals, plains, strict=True)
        ),
    )


def _interval(trial: Mapping[str, Any], batch: int) -> Interval:
    """In which another long run lies, by the trial's blocks and what is assumed of a CPU."""
    sides = (trial["blocks"][name] for name in ("samples", "seconds", "data_wait_s"))
    blocks = tuple(
        Block(
            samples=samples,
            batches=max(1, round(samples / batch)),
            seconds=seconds,
            data_wait_s=wait_s,
        )
        for samples, seconds, wait_s in zip(*sides, strict=True)
    )
    return with_run_variation(
        window_rate(Window(blocks=blocks, **trial["window"])), assumed_variation("cpu")
    )


def _setting_row(one: _Setting) -> list[str]:
    digits = ",.0f" if one.plain >= 1000 else ",.1f"
    return [
        one.workload,
        one.index,
        str(one.pairs),
        format(one.plain, digits),
        format(one.trial, digits),
        f"{one.error:+.1%}" + ("!" if abs(one.error) > one.allowed else ""),
        _shown(one.spread, ".1%"),
        f"{one.medians_covered}/{one.pairs}",
        f"{one.naive_error:+.1%}",
    ]


def _workload_row(name: str, settings: Sequence[_Setting], summary: Mapping[str, Any]) -> list[str]:
    own = [one for one in settings if one.workload == name]
    errors, naive = [abs(one.error) for one in own], [abs(one.naive_error) for one in own]
    return [
        name,
        f"{median(errors):.1%}",
        f"{max(errors):.1%}",
        _shown(summary["rank_correlation_by_workload"][name], ".2f"),
        f"{median(naive):.1%}",
        f"{max(naive):.1%}",
        _shown(summary["naive"]["rank_correlation_by_workload"][name], ".2f"),
    ]


def _target_rows(summary: Mapping[str, Any], results: Mapping[str, Any]) -> list[list[str]]:
    naive, costs = summary["naive"], results.get("instrumentation", {}).get("jobs", {})
    lowest = _least(summary["rank_correlation_by_workload"])
    naive_lowest = _least(naive["rank_correlation_by_workload"])
    return [
        _row("median error", summary, naive, "median_absolute_error", f"<= {_MEDIAN_TARGET:.0%}"),
        _row(
            "worst error",
            summary,
            naive,
            "worst_absolute_error",
            f"<= {_WORST_TARGET:.0%} or 3 A/A",
        ),
        ["one trial: median error", f"{summary['single_trials']['median']:.1%}", "", "-"],
        ["one trial: 90 % are within", f"{summary['single_trials']['q90']:.1%}", "", "-"],
        ["one trial: worst error", f"{summary['single_trials']['worst']:.1%}", "", "-"],
        [
            "rank correlation, all",
            *_two(summary, naive, "rank_correlation", ".3f", f">= {_RANK_TARGET}"),
        ],
        [
            "the lowest of a workload",
            _shown(lowest, ".3f"),
            f">= {_RANK_TARGET}",
            _shown(naive_lowest, ".3f"),
        ],
        [
            "median plain in trial's CI",
            f"{summary['coverage_of_medians']:.0%}",
            f">= {_COVERAGE_TARGET:.0%}",
            "-",
        ],
        [
            "own plain in trial's CI",
            f"{summary['coverage_of_own_plain']:.0%}",
            f">= {_COVERAGE_TARGET:.0%}",
            "-",
        ],
        ["A/A spread, median", _shown(summary["median_spread"], ".1%"), "", "-"],
        *(
            [f"cost: {name}", f"{one['cost_fraction']:.1%}", f"<= {_COST_TARGET:.0%}", "-"]
            for name, one in costs.items()
        ),
    ]


def _row(
    name: str, summary: Mapping[str, Any], naive: Mapping[str, Any], key: str, target: str
) -> list[str]:
    return [name, *_two(summary, naive, key, ".1%", target)]


def _two(
    summary: Mapping[str, Any], naive: Mapping[str, Any], key: str, form: str, target: str
) -> list[str]:
    return [_shown(summary[key], form), target, _shown(naive[key], form)]


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _least(values: Mapping[str, float | None]) -> float | None:
    return min((value for value in values.values() if value is not None), default=None)


def _median_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
