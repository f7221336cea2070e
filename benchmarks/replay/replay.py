"""Recorded surfaces, and a launcher that serves them through the product's ordinary launcher seam.

A surface is the whole grid of a workload as surfaces.py has recorded it on a real machine. ReplayLauncher answers a
trial with what was recorded of its configuration and charges the seconds that it took; no figure is made up, and what
was not recorded is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from autotune import TrainingConfig
from autotune.analysis.expectation import DEVICE_SETTINGS
from autotune.launch.launcher import Exit, Launch
from autotune.note import note
from autotune.protocol.disk import write_model
from autotune.protocol.jobs import CurvesJob, DescribeJob, Job, PrecisionJob, ProbeJob, StressJob, TrialJob, read_job
from autotune.protocol.reports import RankReport
from autotune.records.diagnosis import CurvePoint, Curves
from autotune.records.precision_check import PrecisionFigures
from autotune.records.run_summary import changed_settings
from autotune.records.trial import TrialResult
from autotune.settings.environment import Environment
from autotune.settings.training_config import LOADER_SETTINGS
from autotune.settings.workload import WorkloadFacts
from benchmarks import ROOT

__all__ = ["FORMAT_VERSION", "SURFACES", "RecordedTrial", "ReplayLauncher", "Surface", "Visit", "read_surface"]

FORMAT_VERSION = 1
SURFACES = ROOT / "benchmarks" / "surfaces"
Visit = int | Literal["reference"]
"""Which visit of a point a trial was; "reference": the baseline, between other points."""


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """A trial of a point of the grid."""

    config: TrainingConfig
    visit: Visit
    result: TrialResult


@dataclass(frozen=True)
class Surface:
    """A workload's grid, as far as it was recorded."""

    header: Mapping[str, Any]
    trials: tuple[RecordedTrial, ...]
    curves: Curves | None
    curves_s: float
    """Seconds that recording the curves took."""

    @property
    def baseline(self) -> TrainingConfig:
        """What is run today."""
        return TrainingConfig.model_validate(self.header["baseline"])

    @property
    def limit_bytes(self) -> int:
        """The memory limit."""
        return int(self.header["limit_bytes"])

    @property
    def environment(self) -> Environment:
        """The machine that it was recorded on."""
        return Environment.model_validate(self.header["environment"])

    @property
    def facts(self) -> WorkloadFacts:
        """The workload as a probe has seen it."""
        return WorkloadFacts.model_validate(self.header["facts"])

    @cached_property
    def visits(self) -> dict[TrainingConfig, list[TrialResult]]:
        """Every visit of each point, in order; the references are none."""
        found: dict[TrainingConfig, list[TrialResult]] = {}
        for trial in self.trials:
            if trial.visit != "reference":
                found.setdefault(trial.config, []).append(trial.result)
        return found

    @property
    def configs(self) -> list[TrainingConfig]:
        """The points that were visited."""
        return list(self.visits)

    def is_over(self, config: TrainingConfig) -> bool:
        """Whether a visit of a point ran out of memory, or passed the limit."""
        return any(_is_over(result, self.limit_bytes) for result in self.visits[config])

    def rates(self) -> dict[TrainingConfig, float]:
        """The median rate of each point whose every visit ended well and within the limit.

        What a shared machine does to a visit is to slow it down: one of four must not move the point.
        """
        return {
            config: median(result.measurement.samples_per_s for result in results if result.measurement)
            for config, results in self.visits.items()
            if all(result.outcome == "ok" for result in results) and not self.is_over(config)
        }

    def pairs(self) -> Iterator[tuple[float, float]]:
        """The rates of two visits of a point, wherever there are two."""
        for results in self.visits.values():
            rates = [result.measurement.samples_per_s for result in results if result.measurement]
            yield from pairwise(rates)


def read_surface(path: Path) -> Surface:
    """Read a file of surfaces.py.

    Raises:
        ValueError: it is of another version.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_kind = {
        kind: list(group)
        for kind, group in groupby(sorted(lines, key=lambda line: line["kind"]), key=lambda line: line["kind"])
    }
    (header,) = by_kind["header"]
    if header["version"] != FORMAT_VERSION:
        raise ValueError(f"{path} must be of version {FORMAT_VERSION}, but is of {header['version']}; record it anew")
    curves = by_kind.get("curves", [None])[0]
    return Surface(
        header=header,
        trials=tuple(_trial_of(line) for line in by_kind.get("trial", ())),
        curves=None if curves is None else Curves.model_validate(curves["curves"]),
        curves_s=0.0 if curves is None else float(curves["wall_s"]),
    )


def _trial_of(line: Mapping[str, Any]) -> RecordedTrial:
    return RecordedTrial(
        config=TrainingConfig.model_validate(line["config"]),
        visit=line["visit"],
        result=TrialResult.model_validate(line["result"]),
    )


def _is_over(result: TrialResult, limit_bytes: int) -> bool:
    if result.measurement is None:
        return result.outcome in {"oom", "host_oom"}
    return result.measurement.peak_memory_bytes > limit_bytes


_GUARD_STEPS = 20


@dataclass(slots=True)
class ReplayLauncher:
    """Answers jobs from a surface, and keeps a clock that each answer moves on by what it took when it was recorded.

    A point that was visited several times answers with one of its visits, chosen by the seed. The precision guard
    passes, since no surface holds figures of one; it is charged as two trainings of 20 steps at the recorded rates. A
    run on the largest samples answers that nothing was seen.
    """

    surface: Surface
    seed: int = 0
    now_s: float = 0.0
    """Seconds of the device so far."""
    trials: int = 0
    """Trials so far."""
    out_of_memory: int = 0
    """Of those, how many ran out of memory or passed the limit."""
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Take the seed."""
        self._chance = random.Random(self.seed)

    def now(self) -> float:
        """Time by this launcher's clock."""
        return self.now_s

    def launch(self, launch: Launch) -> Exit:
        """Answer a job from what was recorded."""
        job = read_job(launch.folder.job)
        launch.log.touch(mode=0o600)
        exit_, report = self._answer(job, launch)
        self.now_s += exit_.wall_s
        if report is not None:
            write_model(launch.folder.report, report)
        return exit_

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, job: Job, launch: Launch) -> tuple[Exit, RankReport | None]:
        done, surface = TrialResult(outcome="ok"), self.surface
        match job:
            case DescribeJob() | ProbeJob():
                report = RankReport(result=done, environment=surface.environment, facts=surface.facts)
                return Exit(code=0, wall_s=float(surface.header["probe_s"])), report
            case PrecisionJob():
                return Exit(code=0, wall_s=self._guard_s(job.config)), RankReport(
                    result=done, guard=_passed(job.config)
                )
            case CurvesJob():
                curves, wall_s = self._curves(job)
                return Exit(code=0, wall_s=wall_s), RankReport(result=done, curves=curves)
            case TrialJob():
                return self._trial(job, launch)
            case StressJob():
                return Exit(code=0, wall_s=0.0), RankReport(result=done)

    def _trial(self, job: TrialJob, launch: Launch) -> tuple[Exit, RankReport | None]:
        """A visit of the point; where the parent has it ended early, its blocks until then."""
        result = self._visit(job)
        self.trials += 1
        self.out_of_memory += _is_over(result, self.surface.limit_bytes)
        if job.streams_blocks and result.measurement is not None:
            lost_s = _stream(result, launch)
            if lost_s is not None:
                return Exit(code=None, ended_for="cancelled", wall_s=lost_s), None
        return Exit(code=0, wall_s=result.wall_s), RankReport(result=result.model_copy(update={"wall_s": 0.0}))

    def _visit(self, job: TrialJob) -> TrialResult:
        wants_all = job.extras.breakdown and job.config == self.surface.baseline
        if wants_all:
            visits = [one.result for one in self.surface.trials if one.visit == "reference"]
        else:
            visits = self.surface.visits.get(job.config, [])
        if not visits:
            raise ValueError(f"the surface must hold every configuration that is tried, but lacks {job.config!r}")
        return self._chance.choice(visits)

    def _guard_s(self, config: TrainingConfig) -> float:
        rates = [self._device_rate(one) for one in (config, config.model_copy(update={"amp_dtype": "float32"}))]
        start_s = min(result.measurement.startup_s for result in self.surface.visits[config] if result.measurement)
        return start_s + sum(_GUARD_STEPS * config.global_batch_size / rate for rate in rates)

    def _device_rate(self, config: TrainingConfig) -> float:
        """Of the device alone where that was recorded, else of a run."""
        point = self._point((self.surface.curves or Curves()).device, config, self.surface.baseline, DEVICE_SETTINGS)
        if point is not None and point.ceiling is not None:
            return point.ceiling.samples_per_s
        return fmean(one.measurement.samples_per_s for one in self.surface.visits[config] if one.measurement)

    def _curves(self, job: CurvesJob) -> tuple[Curves, float]:
        """The recorded points among those that are asked for, and what these took."""
        recorded = self.surface.curves
        if recorded is None:
            return Curves(remarks=(note("curves_not_measured", cause="nothing was recorded"),)), 0.0
        asked = [job.config, *job.variations]
        loader = self._points(recorded.loader, asked, job.config, frozenset(LOADER_SETTINGS))
        device = self._points(recorded.device, asked, job.config, DEVICE_SETTINGS)
        overhead_s = self.surface.curves_s - sum(one.took_s for one in (*recorded.loader, *recorded.device))
        taken_s = sum(one.took_s for one in (*loader, *device))
        curves = Curves(loader=loader, device=device, threads=recorded.threads)
        return curves, max(0.0, overhead_s) + taken_s

    def _points(
        self,
        recorded: Sequence[CurvePoint],
        asked: Sequence[TrainingConfig],
        own: TrainingConfig,
        settings: frozenset[str],
    ) -> tuple[CurvePoint, ...]:
        found = [self._point(recorded, config, own, settings) for config in asked]
        return tuple({id(one): one for one in found if one is not None}.values())

    @staticmethod
    def _point(
        recorded: Sequence[CurvePoint], config: TrainingConfig, own: TrainingConfig, settings: frozenset[str]
    ) -> CurvePoint | None:
        """The recorded point of a side in a configuration; None where it does not differ there, or was not recorded."""
        changed = {name: after for name, (_, after) in changed_settings(config, own).items()}
        if changed and not settings & set(changed):
            return None
        wanted = {name: after for name, after in changed.items() if name in settings}
        return next((one for one in recorded if one.changes == wanted), None)


def _stream(result: TrialResult, launch: Launch) -> float | None:
    """Give the parent block after block; seconds until it has the trial ended, None where it does not."""
    assert result.measurement is not None
    window = result.measurement.window
    begun_s = result.measurement.startup_s + window.warm_up_s
    with launch.folder.blocks.open("a", buffering=1) as file:
        for block in window.blocks:
            begun_s += block.seconds
            file.write(f"{block.model_dump_json()}\n")
            if launch.should_end is not None and launch.should_end():
                return begun_s
    return None


def _passed(config: TrainingConfig) -> PrecisionFigures:
    losses = tuple(1.0 for _ in range(_GUARD_STEPS))
    return PrecisionFigures(
        steps=_GUARD_STEPS,
        micro_batch_size=config.micro_batch_size,
        reference_losses=losses,
        losses=losses,
        gradient_cosine=1.0,
        repeat_cosine=1.0,
        repeat_deviation=0.0,
    )
