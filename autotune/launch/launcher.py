"""The seam behind which trials run: a Launcher starts the ranks of a trial's folder and reports how they ended.

Also runs trials side by side, each in a thread, or one alone in the calling thread; hands over
results as they end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

from autotune.config.training_config import TrainingConfig
from autotune.note import Note
from autotune.policy import POLICY, Ending
from autotune.protocol.disk import TrialFolder
from autotune.protocol.messages import DescribeJob, Job, ProbeJob, SeriesJob

_Ended = TypeVar("_Ended")
TOKEN_VARIABLE = "AUTOTUNE_TOKEN"  # noqa: S105 - marks processes, no secret
"""Marks the processes of one launcher, so that those which have left their trial's session are
found too."""

EndedFor = Literal["deadline", "memory", "straggling", "standstill", "cancelled", "done"]
"""straggling: it went on after another rank's end; standstill: none of its ranks went on;
cancelled: `Launch.should_end` returned True; done: a script was measured, and what it had started
was still running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One trial to start."""

    folder: TrialFolder
    log: Path
    deadline_s: float
    ranks: int = 1
    """Processes to start side by side."""
    ram_ceiling_bytes: int | None = None
    """All ranks are ended when their process trees together have more than this in memory; None:
    not watched."""
    ram_ceiling: Callable[[], int | None] | None = None
    """Asked for that in place of it, where it changes meanwhile."""
    should_end: Callable[[], bool] | None = None
    """Called many times a second; the ranks are ended once it returns True. None: only the deadline
    ends them."""
    ending: Ending = POLICY.ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a trial's processes ended."""

    code: int | None
    """Exit code of rank 0, the only one of a single process; negative: the signal that ended it;
    None where autotune ended it."""
    codes: tuple[int | None, ...] = ()
    """Such a code for each rank; () from a launcher that has rank 0 report for all."""
    first: int | None = None
    """The rank that ended before any other, by itself; None where none did."""
    first_s: float | None = None
    """Seconds from the start to that rank's end."""
    ended_for: EndedFor | None = None
    """Why autotune ended what still ran."""
    memory_bytes: int | None = None
    """Memory of the process trees when they were ended for it."""
    was_oom_killed: bool = False
    """The kernel's out-of-memory killer struck meanwhile."""
    wall_s: float


class Launcher(Protocol):
    """Runs one trial at a time; nothing of a trial is left when `launch` returns or raises."""

    def launch(self, launch: Launch) -> Exit:
        """Start the ranks, wait for their end or the deadline, and end all that they started.

        Raises:
            LauncherError: no process can be started here.
        """
        ...

    def close(self) -> None:
        """End what runs between trials."""
        ...


@runtime_checkable
class Cluster(Protocol):
    """A launcher over several machines; its `launch` may be called from several threads."""

    @property
    def slots(self) -> int:
        """Trials that it can run at once, each on a machine of its own; hosts come and go."""
        ...


@runtime_checkable
class HasNotes(Protocol):
    """A launcher that has notes about the machines or about itself."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """For the report: trials that are not started as asked for, hosts that are not used."""
        ...


@runtime_checkable
class Preloads(Protocol):
    """A launcher whose trials can have modules imported before they begin."""

    def preload(self, names: Sequence[str], environment: Mapping[str, str]) -> None:
        """Have modules of installed packages imported once for all later trials; returns before that is done.

        To be called while no trial runs. What can't be imported so becomes a note.

        Args:
            names: As worker/preload.py lists them, in the order of their imports.
            environment: Variables for the time of the imports.
        """
        ...


@runtime_checkable
class Shares(Protocol):
    """A launcher that has trials share a process, one after another, where that is sooner."""

    @property
    def is_sharing(self) -> bool:
        """Whether it does, as far as is known by now."""
        ...

    def end_shared(self) -> None:
        """End that process: the next trial is the first of another one."""
        ...


def shares_process(config: TrainingConfig) -> bool:
    """Whether a process that has measured other configurations can measure this one."""
    return config.strategy == "single" and not config.compile and config.numa_binding is None


def may_share(job: Job) -> bool:
    """Whether a job can run in a process that has done others, and can do others after it."""
    if isinstance(job, DescribeJob | SeriesJob) or job.command is not None:
        return False
    return not job.process.blocks_launches and (
        isinstance(job, ProbeJob) or shares_process(job.config)
    )


def is_sharing(launcher: Launcher) -> bool:
    """Whether trials share a process."""
    return isinstance(launcher, Shares) and launcher.is_sharing


def restart_launcher(launcher: Launcher) -> None:
    """See to it that the next trial is the first one of its process."""
    if isinstance(launcher, Shares):
        launcher.end_shared()


def preload_in(launcher: Launcher, names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have a launcher preload modules, where it can: elsewhere each trial imports them itself."""
    if isinstance(launcher, Preloads):
        launcher.preload(names, environment)


def notes_of(launcher: Launcher) -> tuple[Note, ...]:
    """A launcher's notes for the report; they may change between trials."""
    return launcher.notes if isinstance(launcher, HasNotes) else ()


def slots_of(launcher: Launcher) -> int:
    """Trials that a launcher can run at once."""
    return launcher.slots if isinstance(launcher, Cluster) else 1


class SideBySide(Generic[_Ended]):
    """The runs under way. Its length is how many have begun and were not yet returned by `next_ended`.

    When an exception leaves the context, runs under way are not waited for: closing the launcher
    ends them.

    Args:
        most: the most runs that are under way at once.
    """

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="autotune-trial")
        self._ended: SimpleQueue[Future[_Ended]] = SimpleQueue()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def begin(self, run: Callable[[], _Ended], *, is_alone: bool) -> None:
        """Begin a run; if it is alone it has ended when this returns, and what it raises is raised here.

        Ctrl-C reaches the calling thread only: a run in that thread ends at once, with all that it
        has started.
        """
        future: Future[_Ended] = Future() if is_alone else self._pool.submit(run)
        if is_alone:
            future.set_result(run())
        self._count += 1
        future.add_done_callback(self._ended.put)

    def next_ended(self) -> _Ended:
        """Wait for the next run to end; return what it has returned, or raise what it has raised."""
        future = self._ended.get()
        self._count -= 1
        return future.result()
