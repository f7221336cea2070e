"""`TrialRunner`: run one job of each kind through a launcher, follow its blocks, return its report."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from autotune.config.plan import ScriptFacts
from autotune.config.training_config import TrainingConfig
from autotune.launch.answers import disturbance_of, ram_ceiling_bytes, read_answer, with_note
from autotune.launch.launcher import Exit, Launch, Launcher
from autotune.messages.trials import curves_ended
from autotune.note import Note
from autotune.policy import POLICY, Policy, WindowRules
from autotune.protocol import messages
from autotune.protocol.disk import (
    TrialFolder,
    deadline_within,
    list_names,
    remove_made,
    write_model,
)
from autotune.protocol.messages import RankReport
from autotune.records.measurement import Block, MemoryLimits
from autotune.records.result import Curves
from autotune.records.trial import TrialResult

# The blocks of a trial under way, and the decision whether it goes on.


ShouldEnd = Callable[[tuple[Block, ...]], Note | str | None]
"""Given the blocks of a trial so far: why it is to be ended, or None."""


@dataclass(slots=True)
class Race:
    """Asks whether a trial may go on each time that blocks of its rank 0 have come."""

    ranks: int
    should_end: ShouldEnd
    blocks: list[Block] = field(default_factory=list)
    """Of rank 0, which the launcher adds."""
    reason: Note | str | None = None
    _asked: int = 0
    """Blocks at the last question."""

    def is_lost(self) -> bool:
        """Return whether the trial is to be ended; called many times a second."""
        if self.reason is None and len(self.blocks) != self._asked:
            self._asked = len(self.blocks)
            self.reason = self.should_end(self._of_all_ranks()) if self.blocks else None
        return self.reason is not None

    def result(self) -> TrialResult:
        """Return the result of a trial that was ended; blocks of the warm-up count if there are no others."""
        blocks = self._of_all_ranks()
        in_window = tuple(block for block in blocks if not block.is_warm_up)
        reason = str(self.reason or "")
        return TrialResult(outcome="pruned", reason=reason, blocks=in_window or blocks)

    def _of_all_ranks(self) -> tuple[Block, ...]:
        """Return the blocks as if all ranks had trained as rank 0 has."""
        return tuple(
            block.model_copy(
                update={
                    "samples": block.samples * self.ranks,
                    "made": None if block.made is None else block.made * self.ranks,
                }
            )
            for block in self.blocks
        )


# TrialRunner: runs one job of each kind through a launcher, and returns its report.
#
# Only trials run as groups; every other job runs in one process. A job is run again to find the
# place of a failure, to go on where a process has ended, or if somebody else has disturbed it; all
# runs share the job's deadline.


_AnyJob = TypeVar(
    "_AnyJob",
    messages.TrialJob,
    messages.ProbeJob,
    messages.PrecisionJob,
    messages.CurvesJob,
    messages.StressJob,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs trials of one workload on this machine through a launcher."""

    launcher: Launcher
    payload: Path
    scratch: Path
    logs: Path
    device: str
    seed: int
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    command: tuple[str, ...] | None = None
    """What is run in place of a workload's parts; None: the payload holds them."""
    script: ScriptFacts | None = None
    """What the probe has seen of the command."""
    build_s: float = 0.0
    """Seconds in which a new process builds the workload, where trials share one and most do not;
    else 0."""
    policy: Policy = POLICY

    @property
    def is_short_search(self) -> bool:
        """Return whether curves and precision checks are kept short."""
        return self.build_s >= self.policy.time.slow_build_s

    def with_script(self, script: ScriptFacts | None) -> TrialRunner:
        """Return a runner whose trials know what was seen of their script."""
        return replace(self, script=script)

    def run(
        self,
        config: TrainingConfig,
        *,
        name: str,
        deadline_s: float,
        window: WindowRules,
        extras: messages.Extras = messages.NO_EXTRAS,
        should_end: ShouldEnd | None = None,
    ) -> TrialResult:
        """Measure a configuration. Whatever happens to the trial is an outcome, never an exception.

        `should_end` is called with the blocks of the window so far whenever there is a new one (of
        a group those of rank 0, taken for all ranks). Once it returns a reason, the trial is ended,
        and is pruned with these blocks.
        """
        own = {"window": window, "extras": extras, "streams_blocks": should_end is not None}
        job = self._job_for(messages.TrialJob, config, deadline_s, **own)
        return self._run(name, job, should_end).result

    def probe(
        self, config: TrainingConfig, *, deadline_s: float, watch_s: float = 0.0
    ) -> RankReport:
        """Probe the workload: return environment and facts, or a result with the reason why it fails.

        A script is watched for `watch_s` seconds after its first step.
        """
        job = self._job_for(messages.ProbeJob, config, deadline_s, watch_s=watch_s)
        return self._run("probe", job)

    def describe(self, *, deadline_s: float) -> RankReport:
        """Describe the machine alone, without a workload."""
        return self._run("describe", messages.DescribeJob(process=self._process(deadline_s)))

    def guard(self, config: TrainingConfig, *, name: str, deadline_s: float) -> RankReport:
        """Compare a configuration's precision to float32; `config` has the batch size to compare at."""
        is_short = self.is_short_search
        job = self._job_for(messages.PrecisionJob, config, deadline_s, is_short_search=is_short)
        return self._run(name, job)

    def curves(
        self,
        config: TrainingConfig,
        variations: Sequence[TrainingConfig],
        *,
        deadline_s: float,
        stretch_s: float,
        roofline: bool = False,
        known: Curves | None = None,
    ) -> RankReport:
        """Measure loader and device alone in variations of a configuration, in another process if one ends early.

        Points of `known` are not measured again, and are reported with the others. A diagnosis,
        which asks for the roofline, shows whole curves; a search adds workers only while the loader
        grows with them.
        """
        alone = variations if self.command is not None else [*map(_alone, variations)]
        job = self._job_for(
            messages.CurvesJob,
            config,
            deadline_s,
            variations=tuple(alone),
            stretch_s=stretch_s,
            roofline=roofline,
            is_short_search=self.is_short_search,
            known=known,
            ends_early=not roofline,
        )
        return go_on(job, lambda rest, suffix: self._run(f"curves{suffix}", rest))

    def stress(
        self, config: TrainingConfig, *, name: str, deadline_s: float, train_s: float
    ) -> RankReport:
        """Train on the largest samples for `train_s` seconds."""
        return self._run(
            name, self._job_for(messages.StressJob, config, deadline_s, train_s=train_s)
        )

    def _job_for(
        self, kind: type[_AnyJob], config: TrainingConfig, deadline_s: float, **own: Any
    ) -> _AnyJob:
        """Return a job of a kind, with the fields that only this kind has."""
        process = self._process(deadline_s)
        if self.command is not None:  # its ranks are its own to start
            own |= {"command": self.command, "script": self.script}
        elif kind is not messages.TrialJob:
            config = _alone(config)
        return kind(process=process, payload=self.payload.absolute(), config=config, **own)

    def _process(self, deadline_s: float) -> messages.ProcessSetup:
        return messages.ProcessSetup(
            device=self.device,
            seed=self.seed,
            deadline_s=deadline_within(deadline_s),
            limit_bytes=self.limits.limit_bytes,
            sys_path=tuple(entry for entry in sys.path if isinstance(entry, str)),
            working_directory=Path.cwd(),
            python_path=os.environ.get("PYTHONPATH"),
        )

    def _run(self, name: str, job: messages.Job, should_end: ShouldEnd | None = None) -> RankReport:
        """Return a job's report; of one that was disturbed, or failed at an unknown place, after another run.

        If somebody else has killed or stopped a job's processes, the second run counts. Of curves,
        another process measures the rest anyway: `go_on`.

        A device's failure is noticed some time after it happened. The job is then run once more,
        with launches that wait for their kernels, in what is left of the deadline, if that is no
        less than the first run took. If it fails the same way, that is the failure; otherwise the
        first failure stays, with a reason that says so. The second run measures nothing after the
        window: what fails there is no failure of the trial.
        """
        report, exit_ = self._run_once(name, job, should_end)
        disturbance = disturbance_of(report, exit_)
        left_s = job.process.deadline_s - exit_.wall_s
        if disturbance is not None and report.curves is None and left_s >= exit_.wall_s:
            again, _ = self._run_once(f"{name}-rerun", job.within(left_s), should_end)
            report = with_note(again, disturbance)

        failure = report.result.failure
        took_s = report.result.wall_s
        left_s = job.process.deadline_s - took_s
        if (
            failure is None
            or not failure.is_asynchronous
            or job.process.blocks_launches
            or not isinstance(job, messages.TrialJob | messages.ProbeJob)
        ):
            return report
        addition = "no time was left to look for the place where the device failed"
        if left_s >= took_s:
            placed = job.within(left_s, blocks_launches=True)
            if isinstance(placed, messages.TrialJob):
                placed = placed.model_copy(
                    update={"extras": messages.NO_EXTRAS, "streams_blocks": False}
                )
            second = self._run(f"{name}-blocking", placed)
            took_s += second.result.wall_s
            found = second.result.failure
            outcome = second.result.outcome
            if outcome == "crashed" and found is not None and not found.is_asynchronous:
                return second.with_result(wall_s=took_s)
            ended = f"it ended differently: {second.result.reason or outcome}"
            end = "it did not fail" if outcome == "ok" else ended
            addition = f"run once more, with launches that wait for their kernels, {end}"
        return report.with_result(reason=f"{report.result.reason} ({addition})", wall_s=took_s)

    def _run_once(
        self, name: str, job: messages.Job, should_end: ShouldEnd | None
    ) -> tuple[RankReport, Exit]:
        folder = TrialFolder(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch.absolute())))
        log = self.logs / f"{name}.log"
        ranks = 1
        race = None
        if isinstance(job, messages.TrialJob):
            is_one = job.command is not None
            ranks = 1 if is_one else job.config.process_count
            if job.config.is_ddp and not is_one:
                job = job.model_copy(update={"rendezvous": f"file://{folder.rendezvous}"})
            if job.streams_blocks and should_end is not None:
                race = Race(ranks, should_end)
        launch = Launch(
            folder=folder,
            log=log,
            deadline_s=job.process.deadline_s,
            ranks=ranks,
            ram_ceiling_bytes=ram_ceiling_bytes(self.limits),
            should_end=None if race is None else race.is_lost,
            blocks=[] if race is None else race.blocks,
            ending=self.policy.ending,
        )
        is_first_probe = isinstance(job, messages.ProbeJob) and job.command is not None
        log.touch(mode=0o600)  # before what is there is listed
        before = list_names(job.process.working_directory) if is_first_probe else None
        try:
            write_model(folder.job, job)
            try:
                exit_ = self.launcher.launch(launch)
            finally:
                left = remove_made(folder.overlay, before=before)
            report = read_answer(launch, exit_, self.limits)
            if left and report.facts is not None and report.facts.script is not None:
                script = report.facts.script.model_copy(update={"new_files": left})
                report = report.model_copy(
                    update={"facts": report.facts.model_copy(update={"script": script})}
                )
            if (
                race is not None
                and exit_.ended_for == "cancelled"
                and report.result.outcome == "pruned"
            ):
                report = report.model_copy(update={"result": race.result()})
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)
        return report.with_result(wall_s=exit_.wall_s, log=f"{self.logs.name}/{log.name}"), exit_


def _alone(config: TrainingConfig) -> TrainingConfig:
    """Return the same settings in a single process on a single device."""
    return config.model_copy(update={"strategy": "single", "world_size": 1, "ddp": None})


def go_on(
    job: messages.CurvesJob, run: Callable[[messages.CurvesJob, str], RankReport]
) -> RankReport:
    """Return the report of curves; if a process ended before it had measured all, another one measures the rest.

    The point at which a process ended keeps its reason and is not tried again. A process that has
    added nothing is the last one. If the last one was cut, why it ended stands with the curves.

    Args:
        job: What to measure.
        run: Runs a job; the text is added to the log's name.
    """
    report = run(job, "")
    took_s = report.result.wall_s
    for number in range(2, 4):  # at most three processes: two settings may be fatal
        known = report.curves
        left_s = job.process.deadline_s - took_s
        if known is None or not known.is_cut or left_s <= 0:
            break
        further = run(job.within(left_s).model_copy(update={"known": known}), f"-{number}")
        took_s += further.result.wall_s
        if further.curves in (
            None,
            known,
        ):  # it has measured nothing more, and neither would the next process
            break
        report = further
    curves = report.curves
    if curves is not None and curves.is_cut and report.result.reason:
        others = (note for note in curves.notes if note.code != "curves_cut")
        notes = (*others, curves_ended(report.result.reason))
        curves = curves.model_copy(update={"notes": notes})
    return report.with_result(wall_s=took_s).model_copy(update={"curves": curves})
