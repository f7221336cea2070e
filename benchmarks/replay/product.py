"""The product's whole search over a launcher with a clock of its own: probe, search, selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from autotune import TrialRecord
from autotune.api.setup import runner_for
from autotune.config.plan import Budget, Method, Plan
from autotune.files.run_folder import open_run_folder
from autotune.launch.launcher import Launcher
from autotune.records.result import Progress, Recommendation
from autotune.tuning.loop import Search
from autotune.tuning.outcomes import SearchOutcome
from autotune.tuning.probe import probe_workload
from autotune.tuning.proposer import Proposer
from autotune.tuning.select import select
from autotune.tuning.study import Study
from autotune.tuning.time_budget import Clock, TimeBudget

__all__ = ["Timed", "WholeSearch", "search_whole"]

_OPEN = Budget()


class Timed(Launcher, Protocol):
    """A launcher that knows what time it is."""

    def now(self) -> float:
        """Seconds of the device so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSearch:
    """What came of it."""

    found: SearchOutcome
    recommendation: Recommendation | None
    search_s: float
    """When the last trial had ended and only what decides was left, by the launcher's clock."""
    promised: Sequence[tuple[float, float]]
    """Seconds at which a search of how many in all was promised."""


def search_whole(
    plan: Plan,
    launcher: Timed,
    *,
    method: Method = "model",
    budget: Budget = _OPEN,
    on_record: Callable[[Search, TrialRecord], None] = lambda *_: None,
    on_settled: Callable[[Search], None] = lambda _: None,
) -> WholeSearch:
    """Search within the budget's time-out if it has one.

    `on_record` sees each trial, `on_settled` the search once it only decides what the best gains.
    """
    with TemporaryDirectory() as path, open_run_folder(Path(path), fresh=False) as folder:
        runner, space = probe_workload(plan, runner_for(plan, folder, launcher))
        probe_s = max(1.0, launcher.now())
        study = Study.open(None, space, identity={}, seed=plan.seed, method=method)
        clock = Clock(budget.timeout_s, started=0.0, now=launcher.now)
        time = TimeBudget(
            study=study, budget=budget, clock=clock, probe_s=probe_s, build_s=runner.build_s
        )
        settled_s, promised = 0.0, list[tuple[float, float]]()

        def note_phase(progress: Progress) -> None:
            nonlocal settled_s
            if progress.remaining_s is not None:
                promised.append((launcher.now(), launcher.now() + progress.remaining_s))
            if progress.phase == "confirm" and not settled_s:
                settled_s = launcher.now()
                on_settled(search)

        search = Search(
            time=time,
            runner=runner,
            show=note_phase,
            on_record=lambda record: on_record(search, record),
            proposer=Proposer(time, plan.seed),
        )
        found = search.run()
        return WholeSearch(
            found=found,
            recommendation=select(found),
            search_s=settled_s or launcher.now(),
            promised=promised,
        )
