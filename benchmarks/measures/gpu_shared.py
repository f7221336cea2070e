"""Parts of benchmarks/gpu.py on trials that share a process.

Comes in: a Task. Goes out: a shared process compared to processes of their own, and the search of a job that is slow to
build compared to its promise.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from time import monotonic
from typing import Any

from torch import nn

from autotune.policy import WindowRules
from benchmarks.cases.surfaces import grids_for, small_gpu_grids
from benchmarks.measures.gpu_scale import Task, case_of
from benchmarks.measures.part_guard import Figures
from benchmarks.warm_process import compare
from benchmarks.yardsticks.product_run import search, search_figures

__all__ = ["compare_shared_process", "search_slow_build"]

_POINTS, _LEAST_ROUNDS = 3, 2
_WINDOW = WindowRules(max_s=1.0)
_BIAS_WITHIN = 0.03
"""Our own convention: beyond what `fidelity` allows a trial, below what a search calls a gain."""
_PEAKS_WITHIN = 0.1
_BUILD_S = 12.0
"""Beyond the ten seconds from which a search is brief."""


def compare_shared_process(task: Task) -> Figures:
    """The same points of GPT-2 as trials of their own and in a shared process, at once after another."""
    grids = small_gpu_grids() if task.scale.is_small else grids_for("cuda")
    found: Figures = {}
    begun = monotonic()

    def keep(figures: Figures) -> None:
        found.update(figures)
        task.keep(found)

    def goes_on(rounds: int) -> bool:
        return rounds < _LEAST_ROUNDS or task.left_s > (monotonic() - begun) / rounds

    compare(grids["gpt2"], task.scale.device, _POINTS, _WINDOW, keep=keep, goes_on=goes_on)
    told = found["told"]
    if "bias" not in told:
        return {**found, "why_not_judged": f"{told['points']} points were measured each time"}
    return {
        **found,
        "promises": {
            "rates_are_those_of_own_processes": abs(exp(told["bias"]) - 1) <= _BIAS_WITHIN,
            "peaks_are_within_10_percent": max(abs(ratio - 1) for ratio in told["memory_ratio"])
            <= _PEAKS_WITHIN,
        },
    }


def search_slow_build(task: Task) -> Figures:
    """A search left to itself of GPT-2 that takes long to build: trials share a process, and it ends as promised."""
    case, builds = case_of("gpt2", task.scale), task.folder / "builds"
    builds.parent.mkdir(parents=True, exist_ok=True)
    builds.unlink(missing_ok=True)
    slow = replace(case, model=partial(_built_slowly, case.model, builds))
    begun = monotonic()
    try:
        result = search(slow, device=task.scale.device)
        seconds, built = monotonic() - begun, len(builds.read_text().splitlines())
    finally:
        builds.unlink(missing_ok=True)
    chosen, promised_s = result.summary.recommendation, result.summary.promised_s
    earlier = [
        one.measurement.earlier_trials for one in result.trials if one.measurement is not None
    ]
    after_a_build_s = (
        seconds - _BUILD_S
    )  # or more: the promise is made once the first process has built
    return {
        "seconds": seconds,
        "promised_s": promised_s,
        "builds": built,
        "build_s": _BUILD_S,
        "earlier_trials": earlier,
        "verdict": None if chosen is None else chosen.verdict,
        "search": search_figures(result),
        "promises": {
            "trials_shared_a_process": max(earlier, default=0) > 0,
            "ends_as_promised": None if promised_s is None else after_a_build_s <= promised_s,
        },
    }


def _built_slowly(build: Any, builds: Path) -> nn.Module:
    with builds.open("a") as file:
        file.write("built\n")
    time.sleep(_BUILD_S)
    model: nn.Module = build()
    return model
