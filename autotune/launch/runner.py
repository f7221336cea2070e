"""TrialRunner: runs one job of each kind through a launcher, and hands on its report.

Only trials run as groups. Every other job runs in one process.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autotune.launch.answers import read_answer
from autotune.launch.block_stream import BlockStream, ShouldEnd
from autotune.launch.launcher import Launch, Launcher
from autotune.launch.memory_limits import NO_LIMITS, MemoryLimits
from autotune.launch.repeat import find_place, go_on
from autotune.note import Note
from autotune.protocol import jobs
from autotune.protocol.disk import write_model
from autotune.protocol.reports import RankReport
from autotune.protocol.trial_folder import TrialFolder
from autotune.records.trial import TrialResult
from autotune.settings.training_config import TrainingConfig

__all__ = ["TrialRunner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs trials of one workload on this machine through a launcher."""

    launcher: Launcher
    payload: Path
    scratch: Path
    logs: Path
    device: str
    seed: int
    limits: MemoryLimits = NO_LIMITS
    say: Callable[[Note | str], str] = lambda reason: reason if isinstance(reason, str) else reason.code
    """Words the reason to end a trial; without a wording, its code."""

    @property
    def limit_bytes(self) -> int | None:
        """Memory limit of a trial; None until the device is known."""
        return self.limits.limit_bytes

    def limited(self, *, limit_bytes: int, ram_bytes: int, limit_is_ram: bool) -> TrialRunner:
        """A runner with these limits for its trials."""
        limits = MemoryLimits(limit_bytes=limit_bytes, ram_bytes=ram_bytes, limit_is_ram=limit_is_ram)
        return replace(self, limits=limits)

    def run(
        self,
        config: TrainingConfig,
        *,
        name: str,
        deadline_s: float,
        window: jobs.WindowRules,
        extras: jobs.Extras = jobs.NO_EXTRAS,
        should_end: ShouldEnd | None = None,
    ) -> TrialResult:
        """Measure a configuration. Whatever happens to the trial is an outcome, never an exception.

        `should_end` is called with the blocks of the window so far whenever there is a new one (of a group those of
        rank 0, taken for all ranks). Once it returns a reason, the trial is ended, and is pruned with these blocks.
        """
        job = jobs.TrialJob(
            process=self._process(deadline_s),
            payload=self._payload,
            config=config,
            window=window,
            extras=extras,
            streams_blocks=should_end is not None,
        )
        return find_place(job, partial(self._run, name, should_end)).result

    def probe(self, config: TrainingConfig, *, deadline_s: float) -> RankReport:
        """Take a first look at the workload: environment and facts, or a result with the reason why it fails."""
        job = jobs.ProbeJob(process=self._process(deadline_s), payload=self._payload, config=_alone(config))
        return find_place(job, partial(self._run, "probe", None))

    def describe(self, *, deadline_s: float) -> RankReport:
        """Describe the machine alone, without a workload."""
        return self._run("describe", None, jobs.DescribeJob(process=self._process(deadline_s)))

    def guard(self, config: TrainingConfig, *, name: str, deadline_s: float) -> RankReport:
        """Compare a configuration's precision to float32; `config` has the batch size to compare at."""
        job = jobs.PrecisionJob(process=self._process(deadline_s), payload=self._payload, config=_alone(config))
        return self._run(name, None, job)

    def curves(
        self,
        config: TrainingConfig,
        variations: Sequence[TrainingConfig],
        *,
        deadline_s: float,
        stretch_s: float,
        roofline: bool = False,
    ) -> RankReport:
        """Measure loader and device alone in variations of a configuration, in another process where one ends early."""
        job = jobs.CurvesJob(
            process=self._process(deadline_s),
            payload=self._payload,
            config=_alone(config),
            variations=tuple(map(_alone, variations)),
            stretch_s=stretch_s,
            roofline=roofline,
        )
        return go_on(job, partial(self._run, "curves", None))

    def stress(self, config: TrainingConfig, *, name: str, deadline_s: float, train_s: float) -> RankReport:
        """Train on the largest samples for `train_s` seconds."""
        process = self._process(deadline_s)
        job = jobs.StressJob(process=process, payload=self._payload, config=_alone(config), train_s=train_s)
        return self._run(name, None, job)

    @property
    def _payload(self) -> Path:
        return self.payload.absolute()

    def _process(self, deadline_s: float) -> jobs.ProcessSetup:
        return jobs.ProcessSetup(
            device=self.device,
            seed=self.seed,
            deadline_s=deadline_s,
            limit_bytes=self.limits.limit_bytes,
            sys_path=tuple(entry for entry in sys.path if isinstance(entry, str)),
            working_directory=Path.cwd(),
            python_path=os.environ.get("PYTHONPATH"),
        )

    def _run(self, name: str, should_end: ShouldEnd | None, job: jobs.Job, suffix: str = "") -> RankReport:
        folder = TrialFolder(Path(tempfile.mkdtemp(prefix=f"{name}{suffix}-", dir=self.scratch.absolute())))
        log, ranks, stream = self.logs / f"{name}{suffix}.log", 1, None
        if isinstance(job, jobs.TrialJob):
            ranks = job.config.process_count
            if job.config.strategy == "ddp":
                job = job.model_copy(update={"rendezvous": f"file://{folder.rendezvous}"})
            if job.streams_blocks and should_end is not None:
                stream = BlockStream(folder.blocks, ranks, should_end)
        launch = Launch(
            folder=folder,
            log=log,
            deadline_s=job.process.deadline_s,
            ranks=ranks,
            ram_ceiling_bytes=self.limits.ram_ceiling_bytes,
            should_end=None if stream is None else stream.is_lost,
        )
        try:
            write_model(folder.job, job)
            exit_ = self.launcher.launch(launch)
            report = read_answer(launch, exit_, self.limits)
            if stream is not None and exit_.ended_for == "cancelled" and report.result.outcome == "pruned":
                report = report.model_copy(update={"result": stream.stopped(self.say)})
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)
        result = report.result.model_copy(update={"wall_s": exit_.wall_s, "log": f"{self.logs.name}/{log.name}"})
        return report.model_copy(update={"result": result})


def _alone(config: TrainingConfig) -> TrainingConfig:
    """The same settings in a single process on a single device."""
    if config.strategy == "single":
        return config
    return config.model_copy(update={"strategy": "single", "world_size": 1, "ddp": None})
