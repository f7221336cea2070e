"""Runs a Case through the product, as a search or trial by trial, and condenses results to what a benchmark keeps.

Also holds TimedLauncher: the product's own launcher, with the clock read at both ends of every launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import autotune
from autotune import Measurement, SearchResult, TrainingConfig, TrialRecord
from autotune.api.setup import opened_launcher, runner_for
from autotune.config.plan import Objective, Plan, SearchSpace
from autotune.files.run_folder import open_run_folder
from autotune.launch.launcher import Exit, Launch, Launcher, is_sharing, notes_of, restart_launcher
from autotune.launch.runner import TrialRunner
from autotune.note import Note
from autotune.policy import WindowRules
from autotune.protocol.disk import write_model
from autotune.protocol.messages import Extras, TrialJob, read_job
from autotune.protocol.payload import write_payload
from autotune.records.trial import TrialResult
from autotune.space.space import ResolvedSpace
from autotune.tuning.probe import probe_workload
from benchmarks.cases.cpu import Case
from benchmarks.yardsticks.workload import workload_of

__all__ = [
    "TRIAL_DEADLINE_S",
    "LaunchTimes",
    "RunTrial",
    "TimedLauncher",
    "measurement_figures",
    "only",
    "open_runner",
    "open_trials",
    "plan_for",
    "search",
    "search_figures",
    "window_s",
]

_DERIVED = {"lr", "world_size", "strategy", "ddp"}
TRIAL_DEADLINE_S = 120.0

RunTrial = Callable[[Mapping[str, Any]], TrialResult]
"""Runs a trial of given settings, under TrainingConfig's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """One launch by time.monotonic, which all processes of a Linux machine share."""

    name: str
    """Such as "trial-003" or "trial-003-again"."""
    called_s: float
    returned_s: float
    after_report_s: float | None
    """From the report's being written to the launcher's return, the sweep included."""
    noted: Mapping[str, float]
    """What the trial itself has noted, by the same clock."""


@dataclass(slots=True)
class TimedLauncher:
    """A launcher that reads the clock around another one. What it starts stays the other's to close."""

    inner: Launcher
    noted_in: Path | None = None
    """A file to which trials append "WHAT TIME" lines."""
    longest_window_s: float | None = None
    """Windows that a search has planned are cut to so many seconds; None: left as they are."""
    launches: list[LaunchTimes] = field(default_factory=list)

    def launch(self, launch: Launch) -> Exit:
        """Launch, and keep the times."""
        if self.noted_in is not None:
            self.noted_in.write_text("")
        if self.longest_window_s is not None:
            _shorten_window(launch.folder.job, self.longest_window_s)
        called_s = time.monotonic()
        ended = self.inner.launch(launch)
        returned_s, now_s = time.monotonic(), time.time()
        after_report_s = None
        with suppress(FileNotFoundError):
            after_report_s = now_s - launch.folder.report.stat().st_mtime
        self.launches.append(
            LaunchTimes(
                name=launch.log.stem,
                called_s=called_s,
                returned_s=returned_s,
                after_report_s=after_report_s,
                noted=self._noted(),
            )
        )
        return ended

    @property
    def notes(self) -> tuple[Note, ...]:
        """The other one's."""
        return notes_of(self.inner)

    @property
    def is_sharing(self) -> bool:
        """Whether trials of the other one share a process."""
        return is_sharing(self.inner)

    def end_shared(self) -> None:
        """As Shares has it."""
        restart_launcher(self.inner)

    def close(self) -> None:
        """Close the other one."""
        self.inner.close()

    def _noted(self) -> dict[str, float]:
        if self.noted_in is None:
            return {}
        pairs = (line.split() for line in self.noted_in.read_text().splitlines())
        return {what: float(when) for what, when in pairs}


def _shorten_window(path: Path, most_s: float) -> None:
    job = read_job(path)
    if isinstance(job, TrialJob):
        window = job.window.model_copy(update={"max_s": min(job.window.max_s, most_s)})
        write_model(path, job.model_copy(update={"window": window}))


def search(case: Case, **options: Any) -> SearchResult:
    """Search a case's settings in a run folder that is thrown away afterwards; options are those of autotune.search."""
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        return autotune.search(
            case.model,
            case.dataset,
            step=case.step,
            optimizer=case.optimizer,
            collate_fn=case.collate_fn,
            loader={"shuffle": case.shuffle},
            baseline=case.settings,
            run_dir=Path(folder) / "run",
            progress=False,
            **options,
        )


@contextmanager
def open_trials(
    case: Case,
    *,
    device: str,
    window: WindowRules,
    extras: Extras,
    launcher: Launcher | None = None,
) -> Iterator[RunTrial]:
    """A function that runs a trial as a search would, by a TrialRunner, after one probe; no study.

    Without a launcher, which stays the caller's to close, there is a fork server that lives as long as the context.
    """
    with open_runner(case, device=device, launcher=launcher) as (runner, _):
        yield lambda settings: runner.run(
            TrainingConfig.model_validate(dict(settings)),
            name="trial",
            deadline_s=TRIAL_DEADLINE_S,
            window=window,
            extras=extras,
        )


@contextmanager
def open_runner(
    case: Case,
    *,
    device: str,
    space: Mapping[str, Any] | None = None,
    memory_limit: float | str | None = None,
    launcher: Launcher | None = None,
) -> Iterator[tuple[TrialRunner, ResolvedSpace]]:
    """A runner of a case's trials that has looked at the case once, and the space that it would search."""
    plan = plan_for(case, device, space=space, memory_limit=memory_limit)
    with (
        TemporaryDirectory(prefix="autotune-benchmark-") as path,
        open_run_folder(Path(path), fresh=False) as folder,
        opened_launcher(launcher, folder, plan) as starts,
    ):
        write_payload(plan.workload, folder.payload)
        yield probe_workload(plan, runner_for(plan, folder, starts))


def plan_for(
    case: Case,
    device: str,
    *,
    space: Mapping[str, Any] | None = None,
    memory_limit: float | str | None = None,
) -> Plan:
    """What a case asks of the product."""
    limit = {} if memory_limit is None else {"memory_limit": memory_limit}
    return Plan(
        name="trials",
        workload=workload_of(case),
        baseline=TrainingConfig.model_validate(dict(case.settings)),
        space=SearchSpace.model_validate(dict(space or {})),
        objective=Objective.model_validate(limit),
        device=device,
    )


def only(settings: Mapping[str, Any], **searched: Any) -> dict[str, Any]:
    """A space in which all that is not named stays as in `settings`."""
    fixed = TrainingConfig.model_validate(dict(settings)).model_dump(exclude=_DERIVED)
    return {**fixed, **searched}


def search_figures(result: SearchResult) -> dict[str, Any]:
    """What a search has found, with the raw blocks of every window."""
    chosen = result.summary.recommendation
    return {
        "speedup": result.speedup,
        "speedup_ci": None if result.speedup_ci is None else list(result.speedup_ci),
        "verdict": None if chosen is None else chosen.verdict,
        "recommended_trial": None if chosen is None else chosen.number,
        "recommended": result.best.model_dump(mode="json"),
        "same_batch": None
        if result.best_same_batch is None
        else result.best_same_batch.model_dump(mode="json"),
        "reasons": [] if chosen is None else list(map(str, chosen.reasons)),
        "notes": list(map(str, result.summary.notes)),
        "stopped_because": str(result.summary.stopped_because),
        "limit_bytes": result.summary.limit_bytes,
        "wall_s": result.summary.wall_s,
        "stress": None
        if chosen is None or chosen.stress is None
        else chosen.stress.model_dump(mode="json"),
        "trials": [_trial_figures(record) for record in result.trials],
    }


def measurement_figures(measurement: Measurement) -> dict[str, Any]:
    """A measurement with its raw blocks as [samples, seconds, seconds waited for data]."""
    raw = measurement.model_dump(mode="json", exclude={"window": {"blocks"}})
    blocks = [[block.samples, block.seconds, block.data_wait_s] for block in measurement.blocks]
    return {**raw, "blocks": blocks}


def window_s(measurement: Measurement) -> float:
    """Seconds inside the timed window, epoch restarts included."""
    blocks_s = sum(block.seconds for block in measurement.blocks)
    return blocks_s + sum(restart.seconds for restart in measurement.window.restarts)


def _trial_figures(record: TrialRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "config": record.config.model_dump(mode="json", exclude_defaults=True),
        "outcome": record.outcome,
        "reason": record.reason,
        "score": None if record.score is None else record.score.value,
        "wall_s": record.result.wall_s,
        "guard": None
        if record.result.guard is None
        else record.result.guard.model_dump(mode="json"),
        "at_s": record.result.at_s,
        "measurement": None
        if record.measurement is None
        else measurement_figures(record.measurement),
        "repeats": [_repeat_figures(run) for run in record.repeats],
    }


def _repeat_figures(run: TrialResult) -> dict[str, Any]:
    measured = None if run.measurement is None else measurement_figures(run.measurement)
    return {"outcome": run.outcome, "reason": run.reason, "at_s": run.at_s, "measurement": measured}
