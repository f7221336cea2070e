"""A ground whose workload takes time to build, with trials that share a process or have one each.

Comes in: jobs for a ground's own server. Goes out: its answers, on its clock; what shares a process with earlier trials
takes no start, and its rate strays from that of a first run as warm_process.py has measured it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune import TrainingConfig
from autotune.launch.launcher import Exit, Launch, may_share
from autotune.protocol.disk import read_model, write_model
from autotune.protocol.messages import (
    DescribeJob,
    ProbeJob,
    RankReport,
    TrialJob,
    read_job,
)
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialResult
from benchmarks.replay.ground import Ground, Server
from benchmarks.replay.truth import Truth

__all__ = ["SlowGround", "Straying"]


@dataclass(frozen=True, slots=True)
class Straying:
    """How a run after others in its process strays from the first of one, on the log scale."""

    bias: float
    spread: float
    """Between settings: how far the bias of one lies from the mean."""
    memory: float = 1.0
    """Its peak of memory over that of a first one."""


@dataclass(frozen=True)
class SlowGround:
    """A ground, with seconds of building at each new process beside what its own starts take."""

    ground: Ground
    start_s: Callable[[TrainingConfig], float]
    """What a process of a configuration takes there beside its job, which one that shares a process has not."""
    build_s: float
    shares: bool
    straying: Straying

    @property
    def name(self) -> str:
        """The ground's."""
        return self.ground.name

    @property
    def is_held_out(self) -> bool:
        """The ground's."""
        return self.ground.is_held_out

    @property
    def baseline(self) -> TrainingConfig:
        """The ground's."""
        return self.ground.baseline

    @property
    def domains(self) -> Mapping[str, Sequence[Any]]:
        """The ground's."""
        return self.ground.domains

    @property
    def limit_bytes(self) -> int:
        """The ground's."""
        return self.ground.limit_bytes

    @property
    def configs(self) -> list[TrainingConfig]:
        """The ground's."""
        return self.ground.configs

    @property
    def truth(self) -> Truth:
        """The ground's."""
        return self.ground.truth

    def visits_of(self, config: TrainingConfig) -> int:
        """The ground's."""
        return self.ground.visits_of(config)

    def launcher(self, seed: int) -> Server:
        """What serves the product's search."""
        return _Processes(self.ground.launcher(seed), self, seed)

    def trials_of(self, seed: int) -> Callable[[TrainingConfig], TrialResult]:
        """Trials with a process each, less their builds."""
        return self.ground.trials_of(seed)


@dataclass(slots=True)
class _Processes:
    """The server of a slow ground."""

    below: Server
    ground: SlowGround
    seed: int
    trials: int = 0
    out_of_memory: int = 0
    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    strays: float = 0.0
    """As Server has it."""
    _saved_s: float = 0.0
    """Against the clock below: negative where builds took more than shared starts saved."""
    _earlier: int | None = None
    """Trials of the shared process so far; None where there is none."""

    @property
    def is_sharing(self) -> bool:
        """As Shares has it."""
        return self.ground.shares

    def end_shared(self) -> None:
        """As Shares has it."""
        self._earlier = None

    def now(self) -> float:
        """Time by this launcher's clock."""
        return self.below.now() - self._saved_s

    def close(self) -> None:
        """Nothing is held."""

    def launch(self, launch: Launch) -> Exit:
        """Do a job; one that can't share a process ends the shared one."""
        job = read_job(launch.folder.job)
        is_shared = self.ground.shares and may_share(job)
        if not is_shared:
            self._earlier = None
        earlier, saved_s = self._earlier, -self.ground.build_s
        if isinstance(job, DescribeJob):
            saved_s = 0.0
        elif earlier is not None:
            saved_s = self.ground.start_s(job.config)
        self.below.strays = self.strays
        if isinstance(job, TrialJob) and earlier is not None and earlier > 0:
            self.below.strays += self._lasting(job.config)
        exit_ = self.below.launch(launch)
        self._saved_s += saved_s
        exit_ = replace(exit_, wall_s=exit_.wall_s - saved_s)
        self.spent_s[job.kind] += exit_.wall_s
        self.trials, self.out_of_memory = self.below.trials, self.below.out_of_memory
        lives_on = exit_.ended_for == "cancelled"
        if launch.folder.report.exists():
            report = read_model(launch.folder.report, RankReport)
            lives_on = report.result.outcome == "ok"
            if isinstance(job, ProbeJob):
                report = report.model_copy(update={"workload_build_s": self.ground.build_s})
            elif isinstance(job, TrialJob) and report.result.measurement is not None:
                measured = self._as_here(report.result.measurement, earlier or 0, saved_s)
                report = report.with_result(measurement=measured)
            write_model(launch.folder.report, report)
        self._earlier = (
            (earlier or 0) + isinstance(job, TrialJob) if is_shared and lives_on else None
        )
        return exit_

    def _lasting(self, config: TrainingConfig) -> float:
        """What a configuration strays by in every process that has run others."""
        strays = self.ground.straying
        chance = random.Random(f"{self.ground.name} {config!r} {self.seed}")
        return chance.gauss(strays.bias, strays.spread)

    def _as_here(self, measured: Measurement, earlier: int, saved_s: float) -> Measurement:
        """The measurement with this process's start and memory."""
        more = self.ground.straying.memory if earlier > 0 else 1.0
        return measured.model_copy(
            update={
                "startup_s": max(0.0, measured.startup_s - saved_s),
                "build_s": max(0.0, measured.build_s - saved_s),
                "earlier_trials": earlier,
                "peak_memory_bytes": int(more * measured.peak_memory_bytes),
            }
        )
