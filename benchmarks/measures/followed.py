"""What a diagnosis promises of a piece of advice against what following it brings.

Comes in: a job as it is today, and the same job with the advice followed. Goes out: the promise, and the rates of
trials of both, run in turns, in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from autotune.api.diagnose import DiagnosisResult, MeasuringTime, diagnose_plan
from autotune.protocol.jobs import NO_EXTRAS, WindowRules
from benchmarks.cases.cpu import Case
from benchmarks.measures.recording import say
from benchmarks.yardsticks.product_run import RunTrial, measurement_figures, open_trials, plan_for

__all__ = ["follow"]


def follow(
    name: str, kind: str, today: Case, followed: Case, window_s: float, pairs: int
) -> tuple[DiagnosisResult, dict[str, Any]]:
    """The diagnosis of a job, and what was promised by a kind of advice and reached in pairs of trials."""
    measuring = MeasuringTime(window_s=window_s, stretch_s=min(1.0, window_s / 2))
    found = diagnose_plan(plan_for(today, "cpu"), progress=False, measuring=measuring)
    advice = next((piece for piece in found.advice if piece.kind == kind), None)
    say(f"{name}: {found.headline} {'nothing is said' if advice is None else advice.text}")
    rules = WindowRules(max_s=window_s)
    with (
        open_trials(today, device="cpu", window=rules, extras=NO_EXTRAS) as before,
        open_trials(followed, device="cpu", window=rules, extras=NO_EXTRAS) as after,
    ):
        runs = [_pair(today, before, after, is_turned=bool(number % 2)) for number in range(pairs)]
    load = found.diagnosis.evidence.measurement.host_load
    return found, {
        "headline": found.headline,
        "promised": None if advice is None else advice.model_dump(mode="json"),
        "host_load": None if load is None else load.model_dump(mode="json"),
        "reached_times": median(_ratio(pair) for pair in runs),
        "pairs": [{"times": _ratio(pair), "today": pair[0], "followed": pair[1]} for pair in runs],
    }


def _pair(case: Case, before: RunTrial, after: RunTrial, *, is_turned: bool) -> tuple[dict[str, Any], ...]:
    """Both sides' figures, today's first, whichever ran first.

    Raises:
        RuntimeError: a trial did not end well.
    """
    results = [run(case.settings) for run in ((after, before) if is_turned else (before, after))]
    figures = []
    for result in reversed(results) if is_turned else results:
        if result.measurement is None:
            raise RuntimeError(f"a trial must end well, but: {result.outcome}, {result.reason}")
        figures.append(measurement_figures(result.measurement))
    return tuple(figures)


def _ratio(pair: Sequence[dict[str, Any]]) -> float:
    return float(pair[1]["samples_per_s"] / pair[0]["samples_per_s"])
