"""A machine whose truth is known: each configuration has a rate, and runs stray from it as runs on a shared machine do.

It is a CPU, or a GPU on which the device holds each loop, or the host does: who does is told by the window.

On the log scale a run's rate strays by what lasts for minutes whatever runs, by what belongs to its process, by a slow
drift inside it, and by noise of each block. Comes in: jobs, as any launcher gets them. Goes out: their reports, and a
clock that each job moves on by what it would have taken, with what its seconds went to.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from typing import Literal

from autotune import TrainingConfig
from autotune.config.environment import Environment
from autotune.launch.launcher import Exit, Launch
from autotune.models.evidence import assumed_variation, with_run_variation
from autotune.models.statistics import BATCH_MEANS, window_rate
from autotune.policy import WindowRules
from autotune.protocol.disk import write_model
from autotune.protocol.messages import (
    NO_EXTRAS,
    CurvesJob,
    Extras,
    RankReport,
    StressJob,
    TrialJob,
    read_job,
)
from autotune.records.measurement import Block, Measurement, MemorySample, Window
from autotune.records.trial import TrialResult, sample_scan_s
from autotune.testing import FakeLauncher, FakeTrial, fake_environment, fake_window

__all__ = ["Holder", "Noise", "Sides", "SimulatedMachine"]

Holder = Literal["cpu", "host", "device"]
"""A CPU; a GPU whose loops the host holds, or the device."""

_START_S = 1.0  # of a trial, its warm-up included: our convention, what a small job takes by the fork server
_POINT_S = 0.4  # of a point of the curves: a stretch of 0.2 s and its warm-up
_NO_LIMIT_BYTES = 2**62
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
    slow_first: int = 0
    """Trials at half speed to begin with: another program holds the machine, and nothing notices it."""
    slow_share: float = 0.0
    """Share of jobs at half speed, at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What a configuration's loader and device reach alone, samples/s, and what its processes have in memory."""

    loader: float
    device: float
    peak_bytes: int = _PEAK_BYTES


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
    """A launcher over a truth: samples/s of a configuration in a long run. One device, which trials share in turns."""

    truth: Callable[[TrainingConfig], float]
    noise: Noise
    seed: int
    sides: Callable[[TrainingConfig], Sides] | None = None
    """None: the loader is never the limit."""
    limit_bytes: int = _NO_LIMIT_BYTES
    """A trial that takes more is ended."""
    holder: Holder = "cpu"
    now_s: float = 0.0
    """Seconds of the device so far."""
    trials: int = 0
    """Trials so far."""
    out_of_memory: int = 0
    """Of those, how many were ended for their memory."""
    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the device by the kind of the job."""
    strays: float = 0.0
    """What the logarithm of each rate strays by beside its noise."""
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
        own: dict[str, object] = (
            {"device": "cpu", "device_kind": "cpu"} if self.holder == "cpu" else {}
        )
        own["native_amp_dtypes"] = ("float32", "bfloat16")
        self.environment = fake_environment().model_copy(update=own)
        self._plain = FakeLauncher(self._side_alone, environment=self.environment)

    def now(self) -> float:
        """Time by this machine's clock."""
        return self.now_s

    def launch(self, launch: Launch) -> Exit:
        """Do a job."""
        job, begun_s = read_job(launch.folder.job), self.now_s
        self._begin_process()
        if isinstance(job, TrialJob):
            exit_ = self._trial(job, launch)
        else:
            code = self._plain.launch(launch).code
            self.now_s += _START_S
            if isinstance(job, CurvesJob):
                self.now_s += _POINT_S * (1 + len(job.variations))
            elif isinstance(job, StressJob):
                self.now_s += sample_scan_s(inf) + job.train_s
            exit_ = Exit(code=code, wall_s=self.now_s - begun_s)
        self.spent_s[job.kind] += exit_.wall_s
        return exit_

    def run_whole(self, config: TrainingConfig, window: WindowRules) -> TrialResult:
        """A trial to the end of its window, for whoever has no jobs."""
        begun_s = self.now_s
        self._begin_process()
        result = self._result(config, window, NO_EXTRAS, lambda _: False)
        assert result is not None, "nobody ends it early"
        return result.model_copy(update={"wall_s": self.now_s - begun_s})

    def close(self) -> None:
        """Nothing is held."""

    def _sd(self, share: float) -> float:
        return sqrt(share) * self.noise.between_runs

    def _begin_process(self) -> None:
        self._process = self._chance.gauss(0.0, self._sd(_PROCESS)) + self._minutes.at(self.now_s)
        # no number is drawn without a share, so that seeds decide as they did
        is_hit = self.noise.slow_share > 0 and self._chance.random() < self.noise.slow_share
        if is_hit or self.trials < self.noise.slow_first:
            self._process -= log(2)

    def _sides_of(self, config: TrainingConfig) -> Sides:
        if self.sides is not None:
            return self.sides(config)
        rate = self.truth(config)
        return Sides(loader=1e3 * rate, device=rate)

    def _side_alone(self, config: TrainingConfig) -> FakeTrial:
        """Short stretches of loader and device alone, in the process under way."""
        sides, strays = (
            self._sides_of(config),
            exp(self._process + self._chance.gauss(0.0, self.noise.block)),
        )
        return FakeTrial(
            samples_per_s=self.truth(config) * strays,
            peak_memory_bytes=sides.peak_bytes,
            loader_ceiling=sides.loader * strays,
            device_ceiling=sides.device * strays,
        )

    def _trial(self, job: TrialJob, launch: Launch) -> Exit:
        launch.log.touch(mode=0o600)
        begun_s = self.now_s

        def is_lost(block: Block) -> bool:
            if not job.streams_blocks:
                return False
            launch.blocks.append(block)
            return launch.should_end is not None and launch.should_end()

        result = self._result(job.config, job.window, job.extras, is_lost)
        if result is None:
            return Exit(code=None, ended_for="cancelled", wall_s=self.now_s - begun_s)
        write_model(launch.folder.report, RankReport(result=result))
        return Exit(code=0, wall_s=self.now_s - begun_s)

    def _result(
        self,
        config: TrainingConfig,
        rules: WindowRules,
        extras: Extras,
        is_lost: Callable[[Block], bool],
    ) -> TrialResult | None:
        """What a trial comes to; None where it was ended early."""
        self.trials += 1
        self.now_s += _START_S
        beyond = self._sides_of(config).peak_bytes / self.limit_bytes - 1
        if beyond > 0:
            self.out_of_memory += 1
            reason = "the trial's processes had taken more than the limit, and were ended"
            return TrialResult(outcome="host_oom", reason=reason, violation=beyond)
        drift, blocks = _Wander(self._sd(_DRIFT), _DRIFT_S, self._chance), list[Block]()
        while (ended := _end_of_window(blocks, rules)) is None:
            blocks.append(self._block(config, rules, drift))
            self.now_s += blocks[-1].seconds
            if is_lost(blocks[-1]):
                return None
        measurement = self._measurement(self._held(fake_window(blocks, ended)), config, extras)
        return TrialResult(outcome="ok", measurement=measurement)

    def _held(self, window: Window) -> Window:
        """Return a window that shows who holds the loop: the device by a whole batch, or not at all."""
        if self.holder == "cpu":
            return window
        return window.model_copy(
            update={"host_ahead_s": window.batch_s if self.holder == "device" else 0.0}
        )

    def _block(self, config: TrainingConfig, rules: WindowRules, drift: _Wander) -> Block:
        strays = (
            self.strays
            + self._process
            + drift.at(self.now_s)
            + self._chance.gauss(0.0, self.noise.block)
        )
        rate = self.truth(config) * exp(strays)
        batches = max(1, round(rate * rules.block_s / config.micro_batch_size))
        samples = batches * config.micro_batch_size
        return Block(samples=samples, batches=batches, seconds=samples / rate, data_wait_s=0.0)

    def _measurement(self, window: Window, config: TrainingConfig, extras: Extras) -> Measurement:
        rate = with_run_variation(
            window_rate(window), assumed_variation(self.environment.device_kind)
        )
        side = self._side_alone(config)
        peak_bytes = side.peak_memory_bytes
        return Measurement(
            samples_per_s=rate.value,
            samples_per_s_ci=(rate.low, rate.high),
            busy_fraction=1.0,
            busy_source="simulated",
            data_wait_fraction=0.0,
            peak_memory_bytes=peak_bytes,
            loader_ceiling=side.loader_ceiling if extras.loader_ceiling else None,
            device_ceiling=side.device_ceiling if extras.device_ceiling else None,
            startup_s=_START_S,
            build_s=0.0,
            memory=MemorySample(peak_bytes=peak_bytes, source="simulated"),
            window=window,
            loss=1.0,
        )


def _end_of_window(blocks: list[Block], rules: WindowRules) -> Literal["precision", "time"] | None:
    """Why a window ends, by the rule of worker/window: its interval is narrow, or its time is over."""
    if (
        len(blocks) >= BATCH_MEANS
        and window_rate(fake_window(blocks, "precision"), rules).relative_half_width
        <= rules.precision
    ):
        return "precision"
    return "time" if sum(block.seconds for block in blocks) >= rules.max_s else None
