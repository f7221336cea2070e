"""Recorded surfaces, and a launcher that serves them through the product's ordinary launcher seam.

A surface is the whole grid of a workload as surfaces.py has recorded it on a real machine. ReplayLauncher answers a
trial with what was recorded of its configuration and charges the seconds that it took; no rate is made up, and what
was not recorded is refused.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from math import exp, inf
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from autotune import TrainingConfig
from autotune.config.environment import Environment
from autotune.config.plan import WorkloadFacts
from autotune.config.training_config import LOADER_SETTINGS
from autotune.launch.launcher import Exit, Launch
from autotune.messages.trials import curves_ended
from autotune.models.forecast import DEVICE_SETTINGS
from autotune.models.observations import adds_workers_in_vain
from autotune.protocol.disk import write_model
from autotune.protocol.messages import (
    CurvesJob,
    DescribeJob,
    Job,
    PrecisionJob,
    ProbeJob,
    RankReport,
    StressJob,
    TrialJob,
    read_job,
)
from autotune.records.ceilings import loader_key
from autotune.records.measurement import MemorySample
from autotune.records.result import CurvePoint, Curves, changed_settings
from autotune.records.trial import PrecisionFigures, StressFigures, TrialResult, sample_scan_s
from benchmarks import ROOT
from benchmarks.replay.truth import Seen, Truth, fit_truth

__all__ = [
    "FORMAT_VERSION",
    "SURFACES",
    "RecordedTrial",
    "ReplayLauncher",
    "Surface",
    "Visit",
    "read_surface",
]

FORMAT_VERSION = 1
SURFACES = ROOT / "benchmarks" / "surfaces"
Visit = int | Literal["reference"]
"""Which visit of a point a trial was; "reference": the baseline, between other points."""
_PAUSE_S = 600.0
"""Between two trials, from which on the second belongs to another sitting, where none was noted: our own convention;
the files hold pauses of two minutes, and of ten minutes to two hours."""


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """A trial of a point of the grid."""

    config: TrainingConfig
    visit: Visit
    result: TrialResult
    sitting: int = 0
    """Which sitting of the recording it belongs to."""


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

    @property
    def name(self) -> str:
        """The workload's."""
        return str(self.header["workload"])

    @property
    def is_held_out(self) -> bool:
        """Whether no constant may be chosen on it."""
        return bool(self.header.get("is_held_out", False))

    @property
    def domains(self) -> Mapping[str, Sequence[Any]]:
        """Values of each setting of the grid."""
        found: Mapping[str, Sequence[Any]] = self.header["domains"]
        return found

    @cached_property
    def visits(self) -> dict[TrainingConfig, list[TrialResult]]:
        """Every visit of each point, in order; the references are visits of the baseline that measured no more."""
        found: dict[TrainingConfig, list[TrialResult]] = {}
        for trial in self.trials:
            result = _window_alone(trial.result) if trial.visit == "reference" else trial.result
            found.setdefault(trial.config, []).append(result)
        return found

    @property
    def configs(self) -> list[TrainingConfig]:
        """The points that were visited."""
        return list(self.visits)

    def is_over(self, config: TrainingConfig) -> bool:
        """Whether a visit of a point ran out of memory, or passed the limit."""
        return any(_is_over(result, self.limit_bytes) for result in self.visits[config])

    @cached_property
    def truth(self) -> Truth:
        """The rate of each point whose every visit ended well and within the limit."""
        usable = {
            config
            for config, results in self.visits.items()
            if all(result.outcome == "ok" for result in results) and not self.is_over(config)
        }
        return fit_truth(
            [
                Seen(trial.config, trial.sitting, trial.result.measurement.samples_per_s)
                for trial in self.trials
                if trial.config in usable and trial.result.measurement is not None
            ]
        )

    def rates(self) -> Mapping[TrainingConfig, float]:
        """The truth's rates."""
        return self.truth.rates

    def visits_of(self, config: TrainingConfig) -> int:
        """How often a point was measured."""
        return len(self.visits[config])

    def launcher(self, seed: int) -> ReplayLauncher:
        """What serves it to a search."""
        return ReplayLauncher(self, seed)

    def trials_of(self, seed: int) -> Callable[[TrainingConfig], TrialResult]:
        """Whole trials, one after the other: a visit of the point by chance."""
        chance = random.Random(seed)
        return lambda config: chance.choice(self.visits[config])

    def pairs(self) -> Iterator[tuple[float, float]]:
        """The rates of two visits of a point, wherever there are two; the references would be most of them."""
        rates: dict[TrainingConfig, list[float]] = {}
        for trial in self.trials:
            if trial.visit != "reference" and trial.result.measurement is not None:
                rates.setdefault(trial.config, []).append(trial.result.measurement.samples_per_s)
        for visits in rates.values():
            yield from pairwise(visits)


def read_surface(path: Path) -> Surface:
    """Read a file of surfaces.py.

    Raises:
        ValueError: it is of another version.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_kind = {
        kind: [line for line in lines if line["kind"] == kind] for kind in ("header", "curves")
    }
    (header,) = by_kind["header"]
    if header["version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} must be of version {FORMAT_VERSION}, but is of {header['version']}; record it anew"
        )
    curves = next(iter(by_kind["curves"]), None)
    return Surface(
        header=header,
        trials=tuple(_trials_of(lines)),
        curves=None if curves is None else Curves.model_validate(curves["curves"]),
        curves_s=0.0 if curves is None else float(curves["wall_s"]),
    )


def _trials_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[RecordedTrial]:
    """The trials with their sittings: one begins where it was noted, or after a pause."""
    sitting, before_s = 0, inf
    for line in lines:
        at_s = datetime.fromisoformat(line["at"]).timestamp()
        sitting += line["kind"] == "sitting" or at_s - before_s > _PAUSE_S
        before_s = at_s
        if line["kind"] == "trial":
            yield RecordedTrial(
                config=TrainingConfig.model_validate(line["config"]),
                visit=line["visit"],
                result=TrialResult.model_validate(line["result"]),
                sitting=sitting,
            )


def _window_alone(result: TrialResult) -> TrialResult:
    """A trial as if it had measured nothing after its window."""
    if result.measurement is None:
        return result
    nothing = dict.fromkeys(
        ("loader_ceiling", "device_ceiling", "ceilings", "breakdown", "loader_costs")
    )
    measurement = result.measurement.model_copy(update={**nothing, "after_s": 0.0})
    return result.model_copy(update={"measurement": measurement, "wall_s": result.own_s})


def _is_over(result: TrialResult, limit_bytes: int) -> bool:
    if result.measurement is None:
        return result.outcome in {"oom", "host_oom"}
    return result.measurement.peak_memory_bytes > limit_bytes


_GUARD_STEPS = 20
_SideSettings = Callable[[TrainingConfig], tuple[object, ...]]
"""The settings that the rate of a side alone depends on."""
_device_settings: _SideSettings = attrgetter(*sorted(DEVICE_SETTINGS))


@dataclass(slots=True)
class ReplayLauncher:
    """Answers jobs from a surface, and keeps a clock that each answer moves on by what it took when it was recorded.

    A point that was visited several times answers with one of its visits, chosen by the seed. The precision guard
    passes, since no surface holds figures of one; it is charged as two trainings of 20 steps at the recorded rates. A
    run on the largest samples answers with the memory of a visit, and is charged its start, the longest look at sizes,
    and the training that was asked for.
    """

    surface: Surface
    seed: int = 0
    now_s: float = 0.0
    """Seconds of the device so far."""
    trials: int = 0
    """Trials so far."""
    out_of_memory: int = 0
    """Of those, how many ran out of memory or passed the limit."""
    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the device by the kind of the job."""
    strays: float = 0.0
    """What the logarithm of each rate strays by from what was recorded."""
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
        self.spent_s[job.kind] += exit_.wall_s
        if report is not None:
            write_model(launch.folder.report, report)
        return exit_

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, job: Job, launch: Launch) -> tuple[Exit, RankReport | None]:
        done, surface = TrialResult(outcome="ok"), self.surface
        match job:
            case DescribeJob() | ProbeJob():
                report = RankReport(
                    result=done, environment=surface.environment, facts=surface.facts
                )
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
                wall_s = self._start_s(job.config) + sample_scan_s(inf) + job.train_s
                return Exit(code=0, wall_s=wall_s), RankReport(
                    result=done, stress=self._stress(job)
                )

    def _trial(self, job: TrialJob, launch: Launch) -> tuple[Exit, RankReport | None]:
        """A visit of the point; where the parent has it ended early, its blocks until then."""
        result = self._visit(job)
        self.trials += 1
        self.out_of_memory += _is_over(result, self.surface.limit_bytes)
        if job.streams_blocks and result.measurement is not None:
            lost_s = _stream(result, launch)
            if lost_s is not None:
                return Exit(code=None, ended_for="cancelled", wall_s=lost_s), None
        return Exit(code=0, wall_s=result.wall_s), RankReport(
            result=result.model_copy(update={"wall_s": 0.0})
        )

    def _visit(self, job: TrialJob) -> TrialResult:
        wants_all = job.extras.breakdown and job.config == self.surface.baseline
        if wants_all:
            visits = [one.result for one in self.surface.trials if one.visit == "reference"]
        else:
            visits = self.surface.visits.get(job.config, [])
        if not visits:
            raise ValueError(
                f"the surface must hold every configuration that is tried, but lacks {job.config!r}"
            )
        return _strayed(self._chance.choice(visits), exp(self.strays))

    def _guard_s(self, config: TrainingConfig) -> float:
        rates = [
            self._device_rate(one)
            for one in (config, config.model_copy(update={"amp_dtype": "float32"}))
        ]
        return self._start_s(config) + sum(
            _GUARD_STEPS * config.global_batch_size / rate for rate in rates
        )

    def _start_s(self, config: TrainingConfig) -> float:
        return min(
            result.measurement.startup_s
            for result in self.surface.visits[config]
            if result.measurement
        )

    def _stress(self, job: StressJob) -> StressFigures:
        """Samples of one size, whose peak is that of a visit: nothing else was recorded."""
        measurement = self._chance.choice(self.surface.visits[job.config]).measurement
        assert measurement is not None, "what is run on the largest samples has been measured"
        memory = MemorySample(
            peak_bytes=measurement.peak_memory_bytes, source=measurement.memory.source
        )
        return StressFigures(
            steps=max(
                1, round(job.train_s * measurement.samples_per_s / job.config.global_batch_size)
            ),
            seconds=job.train_s,
            items_seen=1,
            median_item_bytes=1.0,
            largest_item_bytes=1,
            memory=memory,
        )

    def _device_rate(self, config: TrainingConfig) -> float:
        """Of the device alone where that was recorded, else of a run."""
        point = self._point((self.surface.curves or Curves()).device, config, _device_settings)
        if point is not None and point.ceiling is not None:
            return point.ceiling.samples_per_s
        return fmean(
            one.measurement.samples_per_s for one in self.surface.visits[config] if one.measurement
        )

    def _curves(self, job: CurvesJob) -> tuple[Curves, float]:
        """The recorded points among those that are asked for, and what these took."""
        recorded = self.surface.curves
        if recorded is None:
            return Curves(notes=(curves_ended("nothing was recorded"),)), 0.0
        loads, trains = set(LOADER_SETTINGS), DEVICE_SETTINGS
        changes = [(config, set(changed_settings(config, job.config))) for config in job.variations]
        # as the worker divides them: what changes the loader says nothing of the device
        loaders = [job.config, *(config for config, names in changes if names & loads)]
        devices = [
            job.config,
            *(config for config, names in changes if names & trains and not names & loads),
        ]
        loader = self._points(recorded.loader, loaders, loader_key)
        device = self._points(recorded.device, devices, _device_settings)
        overhead_s = self.surface.curves_s - sum(
            one.took_s for one in (*recorded.loader, *recorded.device)
        )
        known = job.known or Curves()
        loader, device = _with_known(loader, known.loader), _with_known(device, known.device)
        if job.ends_early:
            loader = _while_growing(loader)
        taken_s = sum(
            one.took_s for one in (*loader, *device) if one not in (*known.loader, *known.device)
        )
        curves = Curves(loader=loader, device=device, threads=recorded.threads)
        return curves, max(0.0, overhead_s) + taken_s

    def _points(
        self,
        recorded: Sequence[CurvePoint],
        asked: Sequence[TrainingConfig],
        settings: _SideSettings,
    ) -> tuple[CurvePoint, ...]:
        """Return the recorded points of a side in some configurations, each once."""
        found = [self._point(recorded, config, settings) for config in asked]
        return tuple({id(one): one for one in found if one is not None}.values())

    def _point(
        self, recorded: Sequence[CurvePoint], config: TrainingConfig, settings: _SideSettings
    ) -> CurvePoint | None:
        """Return the recorded point at which a side runs as it does in a configuration; None without one.

        Settings are compared by what they mean: a prefetch factor left to torch is torch's 2.
        """
        own = self.surface.baseline.model_dump()
        wanted = settings(config)
        points = ((one, TrainingConfig.model_validate({**own, **one.changes})) for one in recorded)
        return next((one for one, at in points if settings(at) == wanted), None)


def _while_growing(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """The points that a worker would measure, which adds workers only while the loader grows."""
    found = list[CurvePoint]()
    for point in points:
        if not adds_workers_in_vain(found, point.changes):
            found.append(point)
    return tuple(found)


def _with_known(
    points: Sequence[CurvePoint], known: Sequence[CurvePoint]
) -> tuple[CurvePoint, ...]:
    """The points, with what an earlier process has measured in the place of those that agree in their settings."""
    earlier = {repr(point.changes): point for point in known}
    return tuple(earlier.get(repr(point.changes), point) for point in points)


def _strayed(result: TrialResult, factor: float) -> TrialResult:
    """A trial whose rate, and that of each block, is so many times as high; its seconds are those that it took."""
    measured = result.measurement
    if measured is None or factor == 1:
        return result
    blocks = tuple(
        block.model_copy(update={"seconds": block.seconds / factor})
        for block in measured.window.blocks
    )
    rates = tuple(factor * end for end in measured.samples_per_s_ci)
    window = measured.window.model_copy(update={"blocks": blocks})
    own = {
        "samples_per_s": factor * measured.samples_per_s,
        "samples_per_s_ci": rates,
        "window": window,
    }
    return result.model_copy(update={"measurement": measured.model_copy(update=own)})


def _stream(result: TrialResult, launch: Launch) -> float | None:
    """Give the parent block after block; seconds until it has the trial ended, None where it does not."""
    assert result.measurement is not None
    window = result.measurement.window
    begun_s = result.measurement.startup_s + window.warm_up_s
    for block in window.blocks:
        begun_s += block.seconds
        launch.blocks.append(block)
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
