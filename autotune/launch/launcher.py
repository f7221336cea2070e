"""The seam behind which trials run: a Launcher starts the ranks of a trial's folder and reports how they ended.

Also runs trials side by side, each in a thread, and returns their results as they end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, Literal, Protocol, Self, TypeGuard, TypeVar

from autotune.config.training_config import TrainingConfig
from autotune.note import Note
from autotune.policy import POLICY, Ending
from autotune.protocol.disk import TrialFolder
from autotune.protocol.messages import DescribeJob, Job, ProbeJob, WorkloadJob
from autotune.records.measurement import Block

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
    should_end: Callable[[], bool] | None = None
    """Called many times a second; the ranks are ended once it returns True. None: only the deadline
    ends them."""
    blocks: list[Block] = field(default_factory=list)
    """Blocks of rank 0's window so far, which the launcher adds as they come."""
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


def shares_process(config: TrainingConfig) -> bool:
    """Return whether a process that has measured other configurations can measure this one."""
    return config.strategy == "single" and not config.compile and config.numa_binding is None


def may_share(job: Job) -> TypeGuard[WorkloadJob]:
    """Return whether a job can run in a process that has done others, and can do others after it."""
    if isinstance(job, DescribeJob) or job.command is not None:
        return False
    return not job.process.blocks_launches and (
        isinstance(job, ProbeJob) or shares_process(job.config)
    )


def is_sharing(launcher: Launcher) -> bool:
    """Return whether trials share a process, one after another, as far as is known by now."""
    return getattr(launcher, "is_sharing", False)


def restart_launcher(launcher: Launcher) -> None:
    """Make the next trial the first one of its process."""
    if is_sharing(launcher):
        launcher.end_shared()  # type: ignore[attr-defined] # it shares


def preload_in(launcher: Launcher, names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have a launcher import modules once for all later trials, if it can; otherwise each trial imports them.

    Call it while no trial runs. It returns before that is done; what can't be imported so becomes a
    note.

    Args:
        launcher: Runs the trials.
        names: As worker/preload.py lists them, in the order of their imports.
        environment: Variables for the time of the imports.
    """
    if hasattr(launcher, "preload"):
        launcher.preload(names, environment)


def notes_of(launcher: Launcher) -> tuple[Note, ...]:
    """Return a launcher's notes about the machines or itself; they may change between trials."""
    return tuple(getattr(launcher, "notes", ()))


def slots_of(launcher: Launcher) -> int:
    """Return how many trials a launcher can run at once: from several threads, each on a machine of its own."""
    return getattr(launcher, "slots", 1)


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

    def begin(self, run: Callable[[], _Ended]) -> None:
        """Begin a run in a thread of its own."""
        self._count += 1
        self._pool.submit(run).add_done_callback(self._ended.put)

    def next_ended(self) -> _Ended:
        """Wait for the next run to end; return what it has returned, or raise what it has raised."""
        future = self._ended.get()
        self._count -= 1
        return future.result()
