"""A GPU on which one workload takes long to build and long to step: what each job of a search costs there.

Comes in: jobs, as any launcher gets them; those that may share a process build only where none is left. Goes out: their
reports, of rates that are known, and a clock that each job moves on by what it would take: optimizer steps counted one
by one, as the worker's own rules have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from autotune import TrainingConfig
from autotune.launch.launcher import Exit, Launch, may_share
from autotune.models.statistics import window_rate
from autotune.protocol.disk import read_model, write_model
from autotune.protocol.messages import (
    NO_EXTRAS,
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
from autotune.records.measurement import Measurement
from autotune.records.trial import sample_scan_s
from autotune.testing import FakeLauncher, FakeTrial

__all__ = ["SlowMachine"]

_START_S = 1.0
"""Of a process, and of its device."""
_STEPS_OF_FRESH, _STEPS_OF_SHARED = 5, 3
"""Before a window. Source: worker/window.py, `warm_up`."""
_BLOCKS = 3
"""Of a window at the least. Source: as above."""
_STEPS_AFTER = 4
"""Of the baseline's extras. Source: worker/extras."""
_POINT_STEPS = 2
"""Of a device's point. Source: worker/side_alone.py."""
_LONG_S = 4.0
"""Of those, from which on a larger batch is left out. Source: worker/jobs/curves.py."""
_GUARD_STEPS, _FEWEST_GUARD_STEPS, _GUARD_S = 45, 15, 30.0
"""Source: worker/jobs/precision.py."""
_REFERENCE_STEPS, _FEWEST_REFERENCE_STEPS, _REFERENCE_S = 20, 5, 15.0
"""Of these, those that a later precision is compared to. Source: as above."""
_STRESS_STEPS = 6
"""Source: worker/jobs/stress.py."""


@dataclass(slots=True)
class SlowMachine:
    """A launcher over it."""

    step_s: Callable[[TrainingConfig], float]
    """Seconds of a micro batch, forward and backward."""
    build_s: float
    noise: float = 0.01
    seed: int = 0
    shares: bool = True
    """Whether trials may share a process."""
    now_s: float = 0.0
    """Seconds so far."""
    jobs: list[tuple[str, float]] = field(default_factory=list)
    """What was done, and the seconds of each."""
    builds: int = 0
    _earlier: int | None = None
    """Trials of the shared process so far; None where there is none."""
    _compared: set[int] = field(default_factory=set)
    """Batches at which it has float32 runs."""
    _plain: FakeLauncher = field(init=False)

    def __post_init__(self) -> None:
        """Take the seed."""
        self._plain = FakeLauncher(self._trial, noise=self.noise, seed=self.seed)

    @property
    def is_sharing(self) -> bool:
        """As Shares has it."""
        return self.shares

    def end_shared(self) -> None:
        """As Shares has it."""
        self._earlier = None

    def now(self) -> float:
        """Time by this machine's clock."""
        return self.now_s

    def close(self) -> None:
        """Nothing is held."""

    def launch(self, launch: Launch) -> Exit:
        """Do a job."""
        job, begun_s = read_job(launch.folder.job), self.now_s
        is_shared = self.shares and may_share(job)
        if self._earlier is None or not is_shared:
            self.now_s += _START_S + self.build_s
            self.builds += 1
            self._earlier = None
            self._compared.clear()
        earlier = self._earlier or 0
        exit_ = self._plain.launch(launch)
        if isinstance(job, TrialJob) and exit_.ended_for == "cancelled":  # after its first blocks
            self.now_s += (
                (_STEPS_OF_SHARED + _BLOCKS) * job.config.grad_accum_steps * self.step_s(job.config)
            )
            self._earlier = earlier if is_shared else None
            return replace(exit_, wall_s=self.now_s - begun_s)
        report = read_model(launch.folder.report, RankReport)
        measured = report.result.measurement
        if measured is not None and isinstance(job, TrialJob):
            measured = self._with_time(measured, job, earlier, startup_s=self.now_s - begun_s)
            report = report.with_result(measurement=measured)
            earlier += 1
        else:
            self.now_s += self._took_s(job)
        if isinstance(job, ProbeJob) and self.shares:
            report = report.model_copy(update={"workload_build_s": self.build_s})
        write_model(launch.folder.report, report)
        self._earlier = earlier if is_shared else None
        self.jobs.append((job.kind, self.now_s - begun_s))
        return Exit(code=exit_.code, wall_s=self.now_s - begun_s)

    def _trial(self, config: TrainingConfig) -> FakeTrial:
        rate = config.micro_batch_size / self.step_s(config)
        peak_bytes = 4 * 2**30 + config.micro_batch_size * 40 * 2**20
        return FakeTrial(
            samples_per_s=rate,
            peak_memory_bytes=peak_bytes,
            loader_ceiling=1e4,
            device_ceiling=rate,
            busy_fraction=0.99,
        )

    def _with_time(
        self, measured: Measurement, job: TrialJob, earlier: int, *, startup_s: float
    ) -> Measurement:
        """The measurement with a window of as many blocks as fit, an optimizer's step each."""
        step_s = job.config.grad_accum_steps * self.step_s(job.config)
        blocks = measured.window.blocks
        count = min(len(blocks), max(_BLOCKS, round(job.window.max_s / blocks[0].seconds)))
        window = measured.window.model_copy(update={"blocks": blocks[:count]})
        rate = window_rate(window)
        before_s = (_STEPS_OF_FRESH if earlier == 0 else _STEPS_OF_SHARED) * step_s
        after_s = _STEPS_AFTER * step_s if job.extras != NO_EXTRAS else 0.0
        self.now_s += before_s + sum(block.seconds for block in window.blocks) + after_s
        return measured.model_copy(
            update={
                "window": window,
                "samples_per_s": rate.value,
                "samples_per_s_ci": (rate.low, rate.high),
                "startup_s": startup_s,
                "build_s": max(0.0, startup_s - _START_S),
                "after_s": after_s,
                "earlier_trials": earlier,
            }
        )

    def _took_s(self, job: Job) -> float:
        if isinstance(job, DescribeJob):
            return 0.0
        step_s = self.step_s(job.config)
        match job:
            case CurvesJob():
                return sum(
                    self._point_s(config, job.config) for config in (job.config, *job.variations)
                )
            case PrecisionJob():
                plain_s = self.step_s(job.config.model_copy(update={"amp_dtype": "float32"}))
                if job.config.micro_batch_size in self._compared:
                    return step_s * min(
                        _REFERENCE_STEPS, max(_FEWEST_REFERENCE_STEPS, _REFERENCE_S // plain_s)
                    )
                self._compared.add(job.config.micro_batch_size)
                pace_s = (plain_s + step_s) / 2
                return min(_GUARD_STEPS * pace_s, max(_FEWEST_GUARD_STEPS * pace_s, _GUARD_S))
            case StressJob():
                return sample_scan_s(inf) + max(job.train_s, _STRESS_STEPS * step_s)
            case _:
                return step_s

    def _point_s(self, config: TrainingConfig, own: TrainingConfig) -> float:
        """Of the device alone in a variation; a larger batch whose steps take long is left out."""
        seconds = _POINT_STEPS * self.step_s(config)
        own_s = _POINT_STEPS * self.step_s(own) * config.micro_batch_size / own.micro_batch_size
        return (
            0.0 if config.micro_batch_size > own.micro_batch_size and own_s > _LONG_S else seconds
        )
