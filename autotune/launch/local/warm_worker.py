"""Launcher whose trials share a process: it builds the workload once, and measures one configuration after another.

Other than a Launcher's, that process lives on between trials, until `end_shared`. What it can't change runs as the
launcher below starts it, in processes of its own: several ranks, a model that is compiled, bound cores. So that only
one thing runs at a time, the shared process is ended before that. A trial that is stopped early ends itself there, and
its process lives on.

A trial that crashes there is the process's last. Where others were measured before it, it is tried once more as the
first of a new one. If it runs there, that was the others' doing (a dataset that can be read once); the second time so,
every trial has a process of its own from then on. Where it crashes again, later ones are not tried twice. What ran out
of memory, or into its deadline, is not tried again.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from threading import Event

from pydantic import ValidationError

from autotune.errors import AutotuneError
from autotune.launch.launcher import Exit, Launch, Launcher, may_share, notes_of
from autotune.messages.trials import trials_cannot_share
from autotune.note import Note
from autotune.protocol.clock import monotonic
from autotune.protocol.disk import TrialFolder, read_model, write_atomic, write_model
from autotune.protocol.jobs import DescribeJob, Job, SeriesJob, read_job
from autotune.protocol.reports import RankReport
from autotune.records.trial import OUT_OF_MEMORY, Outcome

__all__ = ["WarmWorkerLauncher"]

_TICK_S = 0.01
"""Between two looks whether a job is done: our own convention, beside trials of seconds."""
_BEGUN_WITHIN_S = 150.0
"""The launcher below waits for its server for up to two minutes, and tells what has become of it."""
_FALSE_FAILURES = 2
"""Trials that fail after others alone, from which on trials share no process: our own convention."""


@dataclass(slots=True, kw_only=True)
class _Shared:
    """A process that does jobs one after another, as a trial of the launcher below that runs in a thread."""

    folder: TrialFolder
    log: Path
    kind: SeriesJob
    """What it can do."""
    exit: Future[Exit]
    ending: Event
    """Set where it is to end."""
    ceiling: list[int | None]
    """The RAM ceiling of the job that it does, alone."""
    has_begun: bool = False

    def end(self) -> Exit:
        """End it, and wait until nothing of it is left."""
        self.ending.set()
        try:
            return self.exit.result()
        finally:
            shutil.rmtree(self.folder.path, ignore_errors=True)


class WarmWorkerLauncher:
    """Starts no process before the first trial.

    Args:
        below: Starts the shared process, and the trials that can't share one.
        scratch: Where the folder of the shared process goes.
        logs: Where its log goes, as warm-1.log and so on: all that its trials print.
        least_build_s: Where a workload takes less to build, in the first job, each trial has a process of its own.
    """

    def __init__(
        self,
        below: Launcher,
        scratch: Path,
        logs: Path,
        *,
        least_build_s: float = 0.0,
    ) -> None:
        self.below, self._scratch, self._logs = below, scratch, logs
        self._least_build_s = least_build_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="autotune-warm-worker")
        self._shared: _Shared | None = None
        self._endings: list[Event] = []
        """Of all processes so far."""
        self._kept_bytes = 0
        """RAM that the shared process takes beside its jobs."""
        self._is_decided, self._tries_again = False, True
        self._false_failures = 0
        """Trials that failed after others alone."""
        self.is_sharing = True
        """Whether trials may share a process, as far as is known by now."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """Those of the launcher below, and that trials can't share a process."""
        own = (trials_cannot_share(),) if self._false_failures >= _FALSE_FAILURES else ()
        return (*notes_of(self.below), *own)

    def launch(self, launch: Launch) -> Exit:
        """Run a trial in the shared process where it can be, else as the launcher below does."""
        job = read_job(launch.folder.job)
        if not self.is_sharing or not may_share(job):
            self.end_shared()
            return self.below.launch(launch)
        had_others = self._ready_for(job) is not None
        exit_ = self._run(launch, job)
        left_s, has_crashed = launch.deadline_s - exit_.wall_s, _has_crashed(_report_in(launch.folder), exit_)
        if not had_others or not self._tries_again or left_s < exit_.wall_s or not has_crashed:
            return exit_
        return self._run_again(launch, job, exit_, left_s)

    def end_shared(self) -> None:
        """End the shared process, so that what comes next has the machine to itself; the launcher below lives on."""
        shared, self._shared = self._shared, None
        if shared is not None:
            with suppress(AutotuneError):  # it was never started, and its trial has said so
                shared.end()

    def close(self) -> None:
        """End everything."""
        for ending in self._endings:
            ending.set()
        try:
            self.end_shared()
            self._pool.shutdown()
        finally:
            self.below.close()

    def _decide(self, report: RankReport) -> None:
        """Whether trials share a process, by what the first job has built."""
        self._kept_bytes, build_s = report.kept_bytes, report.workload_build_s
        if not self._is_decided and build_s is not None:
            self._is_decided = True
            if build_s < self._least_build_s:
                self.is_sharing = False
                self.end_shared()

    def _run_again(self, launch: Launch, job: Job, first: Exit, left_s: float) -> Exit:
        """A trial that has crashed after others, as the first of a process: that counts, unless it must be ended."""
        before = launch.folder.report.read_bytes() if launch.folder.report.exists() else None
        for leftover in (launch.folder.report, launch.folder.blocks):
            leftover.unlink(missing_ok=True)
        job = job.model_copy(update={"process": job.process.model_copy(update={"deadline_s": left_s})})
        write_model(launch.folder.job, job)
        again = self._run(replace(launch, deadline_s=left_s), job)
        took_s = first.wall_s + again.wall_s
        if again.ended_for not in {None, "cancelled"} and before is not None:
            write_atomic(launch.folder.report, before)
            return replace(first, wall_s=took_s)
        if again.ended_for != "cancelled" and _outcome_of(_report_in(launch.folder)) != "ok":
            self._tries_again = False
            return replace(again, wall_s=took_s)
        self._false_failures += 1
        if self._false_failures >= _FALSE_FAILURES:
            self.is_sharing = False
            self.end_shared()
        return replace(again, wall_s=took_s)

    def _ready_for(self, job: Job) -> _Shared | None:
        """The shared process, where it runs and can do this job."""
        shared = self._shared
        return shared if shared is not None and not shared.exit.done() and shared.kind == _kind_of(job) else None

    def _shared_for(self, launch: Launch, job: Job) -> _Shared:
        shared = self._ready_for(job)
        if shared is None:
            self.end_shared()
            shared = self._shared = self._begun(launch, job)
        return shared

    def _run(self, launch: Launch, job: Job) -> Exit:
        """Do a job; one that the parent has seen enough of, and that did not end well before, has no report."""
        exit_ = self._done(launch, job)
        report = _report_in(launch.folder)
        if report is not None:
            self._decide(report)
        if not launch.folder.enough.exists() or _outcome_of(report) == "ok":
            return exit_
        launch.folder.report.unlink(missing_ok=True)
        return Exit(code=None, ended_for="cancelled", wall_s=exit_.wall_s)

    def _done(self, launch: Launch, job: Job) -> Exit:
        begun = monotonic()
        try:
            shared = self._shared_for(launch, job)
            begun = _when_begun(shared, begun)
            ceiling_bytes = launch.ram_ceiling_bytes
            shared.ceiling[:] = [None if ceiling_bytes is None else ceiling_bytes + self._kept_bytes]
            _say_where(launch.log, shared.log)
            write_atomic(shared.folder.next, str(launch.folder.path).encode())
            is_late = _is_late(shared, launch, begun + launch.deadline_s)
            if not is_late and not shared.exit.done():
                return Exit(code=0, codes=(0,), wall_s=monotonic() - begun)
        except BaseException:  # Ctrl-C among them
            self.end_shared()
            raise
        self._shared = None
        exit_ = shared.end()
        if is_late:
            exit_ = Exit(code=None, ended_for="deadline", wall_s=0.0)
        return replace(exit_, wall_s=monotonic() - begun)

    def _begun(self, launch: Launch, job: Job) -> _Shared:
        kind, ending, ceiling = _kind_of(job), Event(), [launch.ram_ceiling_bytes]
        self._endings.append(ending)
        number = next(number for number in count(1) if not (self._logs / f"warm-{number}.log").exists())
        folder = TrialFolder(Path(tempfile.mkdtemp(prefix="warm-", dir=self._scratch.absolute())))
        own = {"is_first": len(self._endings) == 1, "least_build_s": self._least_build_s}
        write_model(folder.job, kind.model_copy(update=own))
        log = self._logs / f"warm-{number}.log"
        process = Launch(
            folder=folder,
            log=log,
            deadline_s=kind.process.deadline_s,
            ram_ceiling=lambda: ceiling[0],
            should_end=ending.is_set,
        )
        exit_ = self._pool.submit(self.below.launch, process)
        return _Shared(folder=folder, log=log, kind=kind, exit=exit_, ending=ending, ceiling=ceiling)


def _kind_of(job: Job) -> SeriesJob:
    """The process that a job which may share one needs."""
    assert not isinstance(job, DescribeJob | SeriesJob)  # noqa: S101 - our own bug
    # longer than a search: each job has a deadline of its own
    process = job.process.model_copy(update={"deadline_s": 7 * 24 * 3600.0, "limit_bytes": None})
    return SeriesJob(process=process, payload=job.payload, cudnn_benchmark=job.config.cudnn_benchmark)


def _when_begun(shared: _Shared, asked: float) -> float:
    """When a process of its own would have begun to count: where this one is new, once it runs."""
    if shared.has_begun:
        return asked
    while not shared.exit.done() and not shared.folder.begun.exists() and monotonic() < asked + _BEGUN_WITHIN_S:
        wait([shared.exit], _TICK_S)
    shared.has_begun = True
    return monotonic()


def _is_late(shared: _Shared, launch: Launch, ends_at: float) -> bool:
    """Wait until a job is done, or its process has ended; whether its deadline is over before that.

    Where the parent has seen enough of it, it is told so, and has some seconds to end its block.
    """
    is_told = launch.should_end is None
    while not shared.exit.done() and shared.folder.next.exists():
        if monotonic() >= ends_at:
            return True
        if not is_told and launch.should_end is not None and launch.should_end():
            with suppress(OSError):  # a full disk: it goes on to the end of its window
                launch.folder.enough.touch(mode=0o600)
                now = monotonic()  # a block takes no longer than all has taken so far
                ends_at = min(ends_at, now + max(launch.ending.block_within_s, now - (ends_at - launch.deadline_s)))
            is_told = True
        wait([shared.exit], _TICK_S)
    return False


def _has_crashed(report: RankReport | None, exit_: Exit) -> bool:
    """Whether a trial has failed in a way that the trials before it may have caused.

    A SIGKILL is somebody else's, or the kernel's: whoever has asked for the trial knows what to make of it.
    """
    is_killed = exit_.was_oom_killed or -signal.SIGKILL in (exit_.code, *exit_.codes)
    outcome = _outcome_of(report)
    return exit_.ended_for is None and not is_killed and outcome != "ok" and outcome not in OUT_OF_MEMORY


def _report_in(folder: TrialFolder) -> RankReport | None:
    with suppress(OSError, ValidationError):
        return read_model(folder.report, RankReport)
    return None


def _outcome_of(report: RankReport | None) -> Outcome | None:
    return None if report is None else report.result.outcome


def _say_where(log: Path, of_all: Path) -> None:
    """Leave in a trial's log where its output is; a full disk costs the log, not the trial."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError), open(os.open(log, flags, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
        file.write(f"autotune: this ran in a process that trials may share; what it prints is in {of_all.name}\n")
