"""Shortens what trials are asked for, so that searches of real processes take seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotune.api import calls
from autotune.api import search as searching
from autotune.api.search import SearchResult
from autotune.config.plan import Plan
from autotune.launch.launcher import Exit, Launch
from autotune.launch.local import LocalLauncher
from autotune.policy import POLICY, WindowRules
from autotune.protocol.disk import write_model
from autotune.protocol.messages import NO_EXTRAS, CurvesJob, StressJob, TrialJob, read_job
from autotune.report import html

__all__ = ["SHORT", "end_briefly", "shorten", "shorten_all", "shorten_those_of", "without_drawings"]

SHORT = f"from {__name__} import shorten_all; shorten_all()"
"""To run in another interpreter before its search."""
_WINDOW = WindowRules(max_s=0.2, precision=0.5, block_s=0.02)
_STRESS_S = 0.2
_STRETCH_S = 0.05
_PAIRS = 2
"""Of runs of leader and baseline, after which the race is decided."""


def shorten(launch: Launch) -> None:
    """Have a trial end its window early and measure nothing behind it, and have other jobs measure briefly."""
    job = read_job(launch.folder.job)
    if isinstance(job, TrialJob):
        write_model(
            launch.folder.job, job.model_copy(update={"window": _WINDOW, "extras": NO_EXTRAS})
        )
    elif isinstance(job, StressJob):
        write_model(launch.folder.job, job.model_copy(update={"train_s": _STRESS_S}))
    elif isinstance(job, CurvesJob):
        write_model(launch.folder.job, job.model_copy(update={"stretch_s": _STRETCH_S}))


def shorten_all() -> None:
    """Shorten whatever this process launches from now on, decide by few runs, and draw nothing."""
    end_briefly()
    shorten_those_of(LocalLauncher)


def end_briefly() -> None:
    """Have searches of this process decide by few runs, and draw nothing."""
    without_drawings()
    policy, whole = (
        replace(POLICY, proof=replace(POLICY.proof, most_pairs=_PAIRS)),
        searching.run_plan,
    )

    def run_plan(plan: Plan, **given: Any) -> SearchResult:
        return whole(replace(plan, policy=policy), **given)

    for module in (calls, searching):
        vars(module)["run_plan"] = run_plan


def without_drawings() -> None:
    """Have reports written without plots by this process: they take most of the time between trials."""
    vars(html)["draw"] = lambda plot: f'<svg role="img" aria-label="{plot.title}"></svg>'


def shorten_those_of(kind: Any) -> None:
    """The same for one kind of launcher."""
    whole: Callable[[Any, Launch], Exit] = kind.launch

    def launch(self: Any, launch: Launch) -> Exit:
        shorten(launch)
        return whole(self, launch)

    kind.launch = launch
