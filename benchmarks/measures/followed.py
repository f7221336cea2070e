"""What a diagnosis promises of a piece of advice against what following it brings.

Comes in: a job as it is today, and the same job with the advice followed. Goes out: the promise, and the rates of
trials of both, run in turns, in pairs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

from autotune.api.diagnose import DiagnosisResult, MeasuringTime, diagnose_plan
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from benchmarks.cases.cpu import Case
from benchmarks.cases.followed_cases import FollowedCase
from benchmarks.measures.recording import say
from benchmarks.yardsticks.product_run import RunTrial, measurement_figures, open_trials, plan_for

__all__ = ["follow", "follow_case", "kept"]


def follow_case(case: FollowedCase, window_s: float, pairs: int) -> dict[str, Any]:
    """Return what was promised of a case and what was reached."""
    limit = case.memory_limit
    with patch.dict(os.environ, case.environment):
        _, found = follow(
            case.name, case.kind, case.today, case.followed, window_s, pairs, memory_limit=limit
        )
    return {"kind": case.kind, "why": case.why} | found | kept(found, case.samples_per_item)


def kept(found: dict[str, Any], samples_per_item: float = 1.0) -> dict[str, Any]:
    """Return what each pair has gained in throughput, and whether that lies within the promised interval.

    Args:
        found: What follow() has found.
        samples_per_item: Today's samples that an item of the followed job holds.
    """
    reached = [
        samples_per_item * _ratio((pair["today"], pair["followed"])) - 1 for pair in found["pairs"]
    ]
    promised = found["promised"]
    interval = (
        None
        if promised is None
        else [promised["figures"].get(end) for end in ("gain_low", "gain_high")]
    )
    if interval is None or None in interval:
        return {"reached": reached, "interval": None, "is_within": None, "pairs_within": None}
    within = [interval[0] <= one <= interval[1] for one in reached]
    is_within = bool(interval[0] <= median(reached) <= interval[1])
    return {
        "reached": reached,
        "interval": interval,
        "is_within": is_within,
        "pairs_within": sum(within),
    }


def follow(  # noqa: PLR0913 - two jobs, and how they are measured
    name: str,
    kind: str,
    today: Case,
    followed: Case,
    window_s: float,
    pairs: int,
    *,
    memory_limit: str | None = None,
) -> tuple[DiagnosisResult, dict[str, Any]]:
    """The diagnosis of a job, and what was promised by a kind of advice and reached in pairs of trials.

    Each job runs in its own settings, but for a batch that is promised; `memory_limit` is the diagnosis' own.
    """
    measuring = MeasuringTime(window_s=window_s, stretch_s=min(2.0, window_s / 2))
    found = diagnose_plan(
        plan_for(today, "cpu", memory_limit=memory_limit), progress=False, measuring=measuring
    )
    advice = next((piece for piece in found.advice if piece.kind == kind), None)
    say(f"{name}: {found.headline} {'nothing is said' if advice is None else advice.text}")
    followed = _with_promised_batch(followed, None if advice is None else advice.figures)
    rules = WindowRules(max_s=window_s)
    with (
        open_trials(today, device="cpu", window=rules, extras=NO_EXTRAS) as before,
        open_trials(followed, device="cpu", window=rules, extras=NO_EXTRAS) as after,
    ):
        sides = (today, before), (followed, after)
        runs = [_pair(sides, is_turned=bool(number % 2)) for number in range(pairs)]
    load = found.diagnosis.evidence.measurement.host_load
    return found, {
        "headline": found.headline,
        "promised": None if advice is None else advice.model_dump(mode="json"),
        "host_load": None if load is None else load.model_dump(mode="json"),
        "reached_times": median(_ratio(pair) for pair in runs),
        "pairs": [{"times": _ratio(pair), "today": pair[0], "followed": pair[1]} for pair in runs],
    }


def _with_promised_batch(followed: Case, figures: Mapping[str, Any] | None) -> Case:
    """The job in the batch that the advice names, where it names one."""
    batch = None if figures is None else figures.get("micro_batch_size")
    return (
        followed
        if batch is None
        else replace(followed, settings={**followed.settings, "micro_batch_size": batch})
    )


def _pair(sides: Sequence[tuple[Case, RunTrial]], *, is_turned: bool) -> tuple[dict[str, Any], ...]:
    """Both sides' figures, today's first, whichever ran first.

    Raises:
        RuntimeError: a trial did not end well.
    """
    results = [run(case.settings) for case, run in (reversed(sides) if is_turned else sides)]
    figures = []
    for result in reversed(results) if is_turned else results:
        if result.measurement is None:
            raise RuntimeError(f"a trial must end well, but: {result.outcome}, {result.reason}")
        figures.append(measurement_figures(result.measurement))
    return tuple(figures)


def _ratio(pair: Sequence[dict[str, Any]]) -> float:
    return float(pair[1]["samples_per_s"] / pair[0]["samples_per_s"])
