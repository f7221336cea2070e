"""A machine whose truth is known: each configuration has a rate, and runs stray from it as runs on a shared machine do.

On the log scale a run's rate strays by what lasts for minutes whatever runs, by what belongs to its process, by a slow
drift inside it, and by noise of each block. Comes in: jobs, as any launcher gets them. Goes out: their reports, and a
clock that each job moves on by what it would have taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, sqrt
from typing import Literal

from autotune import TrainingConfig
from autotune.analysis.rates import window_rate, with_run_spread
from autotune.analysis.statistics import BATCH_MEANS
from autotune.launch.launcher import Exit, Launch
from autotune.protocol.disk import write_model
from autotune.protocol.jobs import CurvesJob, StressJob, TrialJob, WindowRules, read_job
from autotune.protocol.reports import RankReport
from autotune.records.measurement import Block, Measurement, MemorySample, Window
from autotune.records.trial import TrialResult
from autotune.settings.environment import Environment
from autotune.testing import FakeLauncher, FakeTrial
from autotune.testing.fake_figures import fake_environment, fake_window

__all__ = ["Noise", "SimulatedMachine"]

_START_S = 1.0  # of a trial, its warm-up included: our convention, what a small job takes by the fork server
_POINT_S = 0.4  # of a point of the curves: a stretch of 0.2 s and its warm-up
_STRESS_S = 5.0  # as long as a stress run trains
_MINUTES, _PROCESS, _DRIFT = 0.3, 0.3, 0.4
"""Shares of the variance between two runs. Source: benchmarks/results/fidelity-*.json, where halves of one plain run
differ by 0.4 of the variance of pairs of runs; how the rest divides is not known there: our convention."""
_MINUTES_S, _DRIFT_S = 300.0, 7.0
"""Over which each of the two changes: our conventions; the halves of those runs are 7 s long."""
_PEAK_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far runs stray from the truth."""

    between_runs: float
    """Standard deviation of the logarithm of the rate between two runs of the same settings, minutes apart."""
    block: float = 0.04
    """Of a block of 0.2 s by itself: our convention; a window of 8 s then has an error of 0.6 % beside its drift."""


@dataclass(slots=True)
class _Wander:
    """A stationary first-order process: what it is at a time depends on how long ago it was asked."""

    sd: float
    memory_s: float
    chance: random.Random
    value: float = 0.0
    asked_s: float | None = None

    def at(self, time_s: float) -> float:
        """Its value at a time, not before the one asked for last."""
        kept = 0.0 if self.asked_s is None else exp(-(time_s - self.asked_s) / self.memory_s)
        self.value = kept * self.value + self.chance.gauss(0.0, self.sd * sqrt(1 - kept**2))
        self.asked_s = time_s
        return self.value


@dataclass(slots=True)
class SimulatedMachine:
    """A launcher over a truth: samples/s of a configuration in a long run. One CPU, which its trials share in turns."""

    truth: Callable[[TrainingConfig], float]
    noise: Noise
    seed: int
    now_s: float = 0.0
    """Seconds of the device so far."""
    environment: Environment = field(init=False)
    _chance: random.Random = field(init=False)
    _minutes: _Wander = field(init=False)
    _plain: FakeLauncher = field(init=False)
    """Answers all but trials."""
    _process: float = 0.0
    """The logarithm of what the process under way strays by."""

    def __post_init__(self) -> None:
        """Take the seed."""
        self._chance = random.Random(self.seed)
        self._minutes = _Wander(self._sd(_MINUTES), _MINUTES_S, self._chance)
        self.environment = fake_environment().model_copy(
            update={"device": "cpu", "device_kind": "cpu", "native_amp_dtypes": ("float32", "bfloat16")}
        )
        self._plain = FakeLauncher(self._side_alone, environment=self.environment)

    def now(self) -> float:
        """Time by this machine's clock."""
        return self.now_s

    def launch(self, launch: Launch) -> Exit:
        """Do a job."""
        job = read_job(launch.folder.job)
        self._process = self._chance.gauss(0.0, self._sd(_PROCESS)) + self._minutes.at(self.now_s)
        if isinstance(job, TrialJob):
            return self._trial(job, launch)
        done = self._plain.launch(launch)
        wall_s = _START_S
        if isinstance(job, CurvesJob):
            wall_s += _POINT_S * (1 + len(job.variations))
        elif isinstance(job, StressJob):
            wall_s += _STRESS_S
        self.now_s += wall_s
        return Exit(code=done.code, wall_s=wall_s)

    def close(self) -> None:
        """Nothing is held."""

    def _sd(self, share: float) -> float:
        return sqrt(share) * self.noise.between_runs

    def _side_alone(self, config: TrainingConfig) -> FakeTrial:
        """A short stretch in the process under way: the loader is never the limit, the device alone is the rate."""
        rate = self.truth(config) * exp(self._process + self._chance.gauss(0.0, self.noise.block))
        return FakeTrial(
            samples_per_s=rate, peak_memory_bytes=_PEAK_BYTES, loader_ceiling=1e3 * rate, device_ceiling=rate
        )

    def _trial(self, job: TrialJob, launch: Launch) -> Exit:
        launch.log.touch(mode=0o600)
        drift, blocks, begun_s = _Wander(self._sd(_DRIFT), _DRIFT_S, self._chance), list[Block](), self.now_s
        self.now_s += _START_S
        with launch.folder.blocks.open("a", buffering=1) as file:
            while (ended := _end_of_window(blocks, job.window)) is None:
                blocks.append(self._block(job, drift))
                self.now_s += blocks[-1].seconds
                if job.streams_blocks:
                    file.write(f"{blocks[-1].model_dump_json()}\n")
                    if launch.should_end is not None and launch.should_end():
                        return Exit(code=None, ended_for="cancelled", wall_s=self.now_s - begun_s)
        measurement = self._measurement(fake_window(blocks, ended), job)
        write_model(launch.folder.report, RankReport(result=TrialResult(outcome="ok", measurement=measurement)))
        return Exit(code=0, wall_s=self.now_s - begun_s)

    def _block(self, job: TrialJob, drift: _Wander) -> Block:
        strays = self._process + drift.at(self.now_s) + self._chance.gauss(0.0, self.noise.block)
        rate = self.truth(job.config) * exp(strays)
        batches = max(1, round(rate * job.window.block_s / job.config.micro_batch_size))
        samples = batches * job.config.micro_batch_size
        return Block(samples=samples, batches=batches, seconds=samples / rate, data_wait_s=0.0)

    def _measurement(self, window: Window, job: TrialJob) -> Measurement:
        rate = with_run_spread(window_rate(window), self.environment.device_kind)
        side = self._side_alone(job.config)
        return Measurement(
            samples_per_s=rate.value,
            samples_per_s_ci=(rate.low, rate.high),
            busy_fraction=1.0,
            busy_source="simulated",
            data_wait_fraction=0.0,
            peak_memory_bytes=_PEAK_BYTES,
            loader_ceiling=side.loader_ceiling if job.extras.loader_ceiling else None,
            device_ceiling=side.device_ceiling if job.extras.device_ceiling else None,
            startup_s=_START_S,
            build_s=0.0,
            memory=MemorySample(peak_bytes=_PEAK_BYTES, source="simulated"),
            window=window,
            loss=1.0,
        )


def _end_of_window(blocks: list[Block], rules: WindowRules) -> Literal["precision", "time"] | None:
    """Why a window ends, by the rule of worker/measure/loop: its interval is narrow, or its time is over."""
    if (
        len(blocks) >= BATCH_MEANS
        and window_rate(fake_window(blocks, "precision")).relative_half_width <= rules.precision
    ):
        return "precision"
    return "time" if sum(block.seconds for block in blocks) >= rules.max_s else None
