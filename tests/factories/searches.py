"""Searches over the fake launcher, with a clock that stands still: what is inside a search, without its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import autotune
from autotune.config.plan import Budget, Method, Objective, SearchSpace
from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import Exit, Launch
from autotune.launch.runner import TrialRunner
from autotune.note import Note
from autotune.policy import POLICY, Policy
from autotune.protocol.disk import write_model
from autotune.protocol.messages import DescribeJob, Job, ProbeJob, RankReport, read_job
from autotune.records.measurement import MemoryLimits
from autotune.records.result import Recommendation
from autotune.records.trial import TrialResult
from autotune.space.ranges import Basis
from autotune.space.space import resolve
from autotune.testing import CostModel, FakeLauncher, analytic_cost
from autotune.tuning.loop import Search
from autotune.tuning.outcomes import SearchOutcome
from autotune.tuning.proposer import Proposer
from autotune.tuning.select import select
from autotune.tuning.study import Study
from autotune.tuning.time_budget import Clock, TimeBudget

GIB = 2**30
FIXED: dict[str, Any] = {
    "micro_batch_size": 32,
    "grad_accum_steps": 1,
    "amp_dtype": "float32",
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory": False,
}
"""A space with nothing to search but what is added."""
NARROW: dict[str, Any] = {
    "num_workers": [0, 2, 4, 8],
    "micro_batch_size": [8, 16, 32, 64, 128],
    "grad_accum_steps": [1, 2, 4],
    "prefetch_factor": [2, 4],
    "persistent_workers": True,
}
"""A space in which a search thinks for a fraction of the time, where the space is not what is asked about."""


@dataclass(slots=True)
class FailingLauncher(FakeLauncher):
    """Answers jobs of some kinds with a failure."""

    failures: Mapping[str, TrialResult] = field(default_factory=dict)

    def launch(self, launch: Launch) -> Exit:
        """Fail, or do as the cost model says."""
        job = read_job(launch.folder.job)
        if isinstance(job, DescribeJob | ProbeJob) or job.kind not in self.failures:
            return FakeLauncher.launch(self, launch)
        self.jobs.append(job)
        write_model(launch.folder.report, RankReport(result=self.failures[job.kind]))
        return Exit(code=0, wall_s=0.1)


@dataclass(slots=True)
class Interrupting(FakeLauncher):
    """Is interrupted instead of the first job for which `at` says so, given the trials launched so far."""

    at: Callable[[Job, int], bool] = lambda job, launched: False

    def launch(self, launch: Launch) -> Exit:
        """Be interrupted, or do as the cost model says."""
        if self.at(read_job(launch.folder.job), len(self.launched)):
            raise KeyboardInterrupt
        return FakeLauncher.launch(self, launch)


def fake_search(
    tmp_path: Path, cost: CostModel = analytic_cost, **arguments: Any
) -> autotune.SearchResult:
    """Run a whole search by `autotune.search`, whose folder is `run` in `tmp_path`."""
    launcher = FakeLauncher(cost)
    given = {
        "launcher": launcher,
        "space": NARROW,
        "n_trials": 12,
        "run_dir": tmp_path / "run",
        **arguments,
    }
    return autotune.search(object, list, progress=False, **given)


def make_search(
    folder: Path,
    launcher: FakeLauncher,
    *,
    n_trials: int | None = 12,
    timeout_s: float | None = None,
    now: Callable[[], float] = lambda: 0.0,
    limit_bytes: int = 14 * GIB,
    baseline: TrainingConfig | None = None,
    is_kept: bool = False,
    method: Method = "model",
    policy: Policy = POLICY,
    **space: Any,
) -> Search:
    """Return a search before its first trial, its study a file if `is_kept`; further keywords are settings."""
    folder.mkdir(exist_ok=True)
    resolved = resolve(
        Basis(
            given=SearchSpace.model_validate(space).given(),
            baseline=baseline or TrainingConfig(),
            objective=Objective(memory_limit=limit_bytes),
            facts=launcher.facts,
            environment=launcher.environment,
            policy=policy,
        )
    )
    runner = TrialRunner(
        launcher=launcher,
        payload=folder / "payload",
        scratch=folder,
        logs=folder,
        device="cuda:0",
        seed=0,
        limits=MemoryLimits(limit_bytes=limit_bytes),
        policy=policy,
    )
    study = Study.open(
        folder / "study.db" if is_kept else None, resolved, identity={}, seed=0, method=method
    )
    time = TimeBudget(
        study=study,
        budget=Budget(n_trials=n_trials, timeout_s=timeout_s),
        clock=Clock(timeout_s, started=0.0, now=now),
    )
    return Search(
        time=time,
        runner=runner,
        show=lambda _: None,
        on_record=lambda _: None,
        proposer=Proposer(time),
    )


def finished(
    folder: Path, launcher: FakeLauncher, **arguments: Any
) -> tuple[SearchOutcome, Recommendation]:
    """Search and select."""
    search = make_search(folder, launcher, **arguments)
    search.run()
    return confirmed(search)


def confirmed(search: Search) -> tuple[SearchOutcome, Recommendation]:
    """Select from what a search has found so far."""
    found = search.outcome()
    best = select(found)
    assert best is not None
    return found, best


def codes_of(notes: Iterable[Note]) -> list[str]:
    """Return the codes of notes, in order."""
    return [item.code for item in notes]


def figures_of(notes: Iterable[Note], code: str) -> list[dict[str, Any]]:
    """Return the figures of the notes with a code."""
    return [item.figures for item in notes if item.code == code]
