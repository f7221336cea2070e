"""A fake launcher over an analytic cost model: whole studies in milliseconds, through the ordinary launcher seam.

`autotune.search(model, dataset, launcher=FakeLauncher(cost_model))` runs the product as it is, but for the trials'
processes: the launcher reads each trial's job and writes the report that a rank would write. For tests of what is built
on autotune, and for simulations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Literal, TypeAlias

from autotune.analysis.forecast.expectation import DEVICE_SETTINGS
from autotune.launch.launcher import Exit, Launch
from autotune.note import Note
from autotune.protocol.disk import write_model
from autotune.protocol.jobs import (
    CurvesJob,
    DescribeJob,
    PrecisionJob,
    ProbeJob,
    SeriesJob,
    StressJob,
    TrialJob,
    WindowRules,
    read_job,
)
from autotune.protocol.reports import RankReport
from autotune.records.conditions import DeviceConditions
from autotune.records.diagnosis import CurvePoint, Curves
from autotune.records.measurement import Measurement
from autotune.records.run_summary import changed_settings
from autotune.records.trial import TrialResult
from autotune.settings.environment import Environment
from autotune.settings.training_config import LOADER_SETTINGS, TrainingConfig
from autotune.settings.workload import WorkloadFacts
from autotune.testing.cost_model import CostModel, FakeTrial, analytic_cost
from autotune.testing.fake_figures import (
    BLOCKS,
    fake_ceilings,
    fake_environment,
    fake_facts,
    fake_guard,
    fake_measurement,
    fake_stress,
)

__all__ = ["FakeLauncher"]

_UNKNOWN = "the cost model does not say"
_SETTINGS = {
    "loader": {*LOADER_SETTINGS, "micro_batch_size", "max_tokens"},
    "device": DEVICE_SETTINGS,
    "copy": {"pin_memory"},
}
"""What the points of a curve may differ in."""
_DONE = TrialResult(outcome="ok")
_AnyJob: TypeAlias = TrialJob | PrecisionJob | CurvesJob | StressJob


@dataclass(slots=True)
class FakeLauncher:
    """Answers trials from a cost model, with a relative noise between trials and between blocks.

    Rank 0 answers for all ranks of a group, which are equal. It stands for `slots` machines of a kind, and may be
    called from several threads. A trial takes no real time; `Exit.wall_s` is what it would have taken on a
    machine of its own. Its noise follows from the seed and its place among the trials launched, which with several
    slots depends on the threads.
    """

    cost: CostModel = analytic_cost
    noise: float = 0.005
    seed: int = 0
    environment: Environment = field(default_factory=fake_environment)
    facts: WorkloadFacts = field(default_factory=fake_facts)
    launched: list[TrainingConfig] = field(default_factory=list)
    """Configurations of all trials so far, further runs included."""
    jobs: list[_AnyJob] = field(default_factory=list)
    """All jobs but probes and descriptions: trials, guards, curves, stress runs."""
    slots: int = 1
    """Trials that it runs at once."""
    notes: tuple[Note, ...] = ()
    """Machines that are not used; there are none."""
    conditions: DeviceConditions | None = None
    """What a probe, and each trial, reports of the device."""
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def launch(self, launch: Launch) -> Exit:
        """Write the report of a made-up trial."""
        job = read_job(launch.folder.job)
        assert not isinstance(job, SeriesJob)  # noqa: S101 - no process is shared here
        launch.log.touch(mode=0o600)
        if isinstance(job, DescribeJob | ProbeJob):
            report = RankReport(
                result=_DONE, environment=self.environment, facts=self.facts, conditions=self.conditions
            )
            write_model(launch.folder.report, report)
            return Exit(code=0, wall_s=0.0)
        with self._lock:
            self.jobs.append(job)
            if isinstance(job, TrialJob):
                self.launched.append(job.config)
            place = len(self.launched)
        trial = self.cost(job.config)
        if trial.hangs or trial.startup_s > launch.deadline_s:
            return Exit(code=None, ended_for="deadline", wall_s=launch.deadline_s)
        report = self._answer(trial, job, place)
        block_s = job.window.block_s if isinstance(job, TrialJob) else WindowRules().block_s
        if isinstance(job, TrialJob) and job.streams_blocks and report.result.measurement is not None:
            lost_after = _stream(report.result.measurement, job, launch)
            if lost_after is not None:
                return Exit(code=None, ended_for="cancelled", wall_s=trial.startup_s + lost_after * block_s)
        write_model(launch.folder.report, report)
        return Exit(code=0, wall_s=trial.startup_s + block_s * BLOCKS)

    def close(self) -> None:
        """Nothing to end."""

    def _answer(self, trial: FakeTrial, job: _AnyJob, place: int) -> RankReport:
        if trial.outcome != "ok":
            return RankReport(result=TrialResult(outcome=trial.outcome, reason=trial.reason, failure=trial.failure))
        match job:
            case TrialJob():
                noise = partial(random.Random(f"{self.seed}/{place}").gauss, 1, self.noise)  # noqa: S311 - made-up noise
                measurement = fake_measurement(trial, job, noise, self.environment, self.conditions)
                return RankReport(result=TrialResult(outcome="ok", measurement=measurement))
            case PrecisionJob():
                return RankReport(result=_DONE, guard=fake_guard(trial, job.config))
            case StressJob():
                return RankReport(result=_DONE, stress=fake_stress(trial))
            case CurvesJob():
                return RankReport(result=_DONE, curves=self._curves(job))

    def _curves(self, job: CurvesJob) -> Curves:
        """Points of the sides that a variation changes, the job's own configuration first, as a rank has them."""
        changed = {config: changed_settings(config, job.config).keys() for config in job.variations}
        loader = [config for config, names in changed.items() if not names.isdisjoint(LOADER_SETTINGS)]
        device = [
            config for config, names in changed.items() if names & DEVICE_SETTINGS and names.isdisjoint(LOADER_SETTINGS)
        ]
        return Curves(
            loader=tuple(self._point("loader", config, job) for config in (job.config, *loader)),
            device=tuple(self._point("device", config, job) for config in (job.config, *device)),
            copy=self._copies(job),
        )

    def _copies(self, job: CurvesJob) -> tuple[CurvePoint, ...]:
        """Copies from pageable and from pinned memory, where the cost model knows any."""
        other = job.config.model_copy(update={"pin_memory": not job.config.pin_memory})
        known = [config for config in (job.config, other) if self.cost(config).copy_ceiling]
        return tuple(self._point("copy", config, job) for config in known)

    def _point(self, side: Literal["loader", "device", "copy"], config: TrainingConfig, job: CurvesJob) -> CurvePoint:
        known: tuple[CurvePoint, ...] = () if job.known is None else getattr(job.known, side)
        changed = changed_settings(config, job.config).items()
        changes: dict[str, object] = {name: after for name, (_, after) in changed if name in _SETTINGS[side]}
        for earlier in known:
            if earlier.changes == changes:
                return earlier
        trial, limit = self.cost(config), job.process.limit_bytes
        peak = trial.peak_memory_bytes if side == "device" else None
        is_device_unknown = trial.device_ceiling is None and trial.busy_fraction == 1
        unknown = {"loader": trial.loader_ceiling is None, "device": is_device_unknown, "copy": False}
        ceiling, reason = None, ""
        if trial.outcome != "ok" or trial.hangs:
            peak, reason = None, trial.reason or trial.outcome
        elif peak is not None and limit is not None and peak > limit:
            peak, reason = None, "the device ran out of memory"
        elif unknown[side]:
            reason = _UNKNOWN
        else:
            ceiling = getattr(fake_ceilings(trial, loader=True, device=True, copy=True), side)
        cpu_s = None if ceiling is None else {"loader": trial.loader_cpu_s, "device": trial.device_cpu_s}.get(side)
        return CurvePoint(
            changes=changes, ceiling=ceiling, cpu_s_per_sample=cpu_s, reason=reason, peak_memory_bytes=peak
        )


def _stream(measurement: Measurement, job: TrialJob, launch: Launch) -> int | None:
    """Write the window's blocks as rank 0 would; after how many of them the parent has the trial ended."""
    with launch.folder.blocks.open("a", buffering=1) as file:
        for number, block in enumerate(measurement.blocks, start=1):
            own = block.model_copy(update={"samples": block.samples // job.config.process_count})
            file.write(f"{own.model_dump_json()}\n")
            if launch.should_end is not None and launch.should_end():
                return number
    return None
