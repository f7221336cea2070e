"""Watch a script's own run: the seconds of each of its parts, and what recurs.

In: calls of the hooks around torch and of the seams around checkpoints, loggers and the collector,
in the thread that trains. Out: a WatchedRun. Each moment counts once, in the innermost part that is
open; parts that recur (a checkpoint, a validation) keep all that happens inside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING

from autotune.records.watched_run import (
    Exchange,
    Modes,
    Recurring,
    RunPart,
    Startup,
    WatchedRun,
)
from autotune.worker.modes import join_modes, observe_modes
from autotune.worker.script.cores import with_cores
from autotune.worker.script.files.protection import files_elsewhere
from autotune.worker.script.hooks import users_place
from autotune.worker.script.memory_use import GrowthWatch, PeakWatch
from autotune.worker.script.patching import opened, real_os
from autotune.worker.script.seams import AUTOMATIC, is_muted
from autotune.worker.script.worker_starts import WorkerStarts

if TYPE_CHECKING:
    from autotune.records.stacks import Stacks

_ABSORBING = frozenset[RunPart]({"checkpoint", "validation", "logging", "copy", "synchronise"})
"""Parts that keep the time of all other parts inside them, except collections."""
_RECURRING = frozenset[RunPart]({"checkpoint", "validation", "logging", "collection", "restart"})
"""Parts whose occurrences are recorded one by one."""
_MOST_KEPT = 1000
"""Occurrences of each kind that are kept one by one, which bounds the report. Source: our
convention."""
_MODES_EVERY_S = 0.5
"""Seconds between two observations of the process's modes. Source: our convention."""
_CORES_AT_STEP = 5
"""Step at which cores are read: an import or a first batch may have changed them by then. Source:
our convention."""
_MOST_KINDS = 50
"""Kinds that are kept apart; further ones only count as their part. Source: our convention."""


@dataclass(slots=True)
class _Kind:
    """Occurrences of one kind of recurring work."""

    count: int = 0
    total_s: float = 0.0
    at_steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    written_bytes: int = 0
    is_cut: bool = False

    def add(self, step: int, seconds: float, written_bytes: int) -> None:
        """Record an occurrence."""
        self.count += 1
        self.total_s += seconds
        self.written_bytes += written_bytes
        if len(self.seconds) < _MOST_KEPT:
            self.at_steps.append(step)
            self.seconds.append(seconds)


@dataclass(slots=True)
class _Pass:
    """A pass over data that is not trained on, until it is known to be over."""

    begun: float
    until: float
    """Time of the last thing that was seen of it."""
    what: str
    place: str
    peak_bytes: int | None = None
    """Peak of memory before it; None if unknown."""
    called_s: float = 0.0
    """Seconds in the model."""
    has_batches: bool = False
    """True once a loader gave a batch for it; else it may be a rollout, or a teacher."""
    is_evaluation: bool = False
    """True once a model was called in eval mode or without gradients."""


class Watch:
    """Clock the parts of a run, in the thread that trains.

    Args:
        started: When the process began, by perf_counter.
    """

    def __init__(self, started: float) -> None:
        self.device_kind = "cpu"
        """Kind of the training device, once it is known."""
        self.has_group = False
        """True if training runs in a process group."""
        self._modes_due = 0.0
        self.active_workers: int | None = None
        """Workers of a stream that still have samples."""
        self.is_over = False
        """True once nothing is recorded any more."""
        self._starts = WorkerStarts()
        self._growth = GrowthWatch()
        self._peaks = PeakWatch()
        self._modes: list[Modes] = []
        """Modes at some backward passes."""
        self._cores: Modes | None = None
        """Cores that the process and its workers may use, during a step."""
        self.stacks: Stacks | str = "they were not sampled"
        """Sampled stacks, or the reason why there are none."""
        self.backwards = 0
        """Backward passes since the first step."""
        self.synchronised = 0
        """Those after which DistributedDataParallel exchanged gradients."""
        self.exchange: Exchange | None = None
        self.is_epoch_cut = False
        """True once the script was told that its epoch is over, before it was."""
        self._thread = get_ident()
        """The thread that is watched; the one of the first optimizer step, once there was one."""
        self._steps = 0
        """Optimizer steps after the first one."""
        self._batches = 0
        """Batches of the training loader since the first step."""
        self._epochs_ended = 0
        self._open: list[RunPart] = []
        """Open parts, the innermost last."""
        self._since = perf_counter()
        """Time up to which seconds were added to a part."""
        self._seconds: dict[RunPart, float] = {}
        self._kinds: dict[tuple[RunPart, str, str], _Kind] = {}
        self._pass: _Pass | None = None
        self._other_s: float | None = None
        """Seconds of the script's other code up to an epoch's end, until the next epoch begins."""
        self._apart_s = 0.0
        """Seconds left out so far."""
        self._restart_s: float | None = None
        """Seconds that `iter(loader)` took, until the first batch of the epoch comes."""
        self._began: float | None = None
        """Time of the first step's end; None before it."""
        self._started = started
        self._asked = started
        """Before the first step: time at which a loader was last iterated."""
        self._came = started
        """Before the first step: time at which the first batch of that iterator came."""
        self._startup = Startup(before_loader_s=0.0, first_batch_s=0.0, first_step_s=0.0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the end of the first step; 0 before it."""
        return 0.0 if self._began is None else perf_counter() - self._began

    @property
    def steps(self) -> int:
        """Optimizer steps after the first one."""
        return self._steps

    # Parts

    def inside(self, part: RunPart, what: str = "") -> AbstractContextManager[None]:
        """Return a context whose time belongs to a part; no-op in other threads and once it is over.

        Args:
            part: The part.
            what: The function called, as users write it; recorded for parts that recur.
        """
        if not self._is_watched():
            return nullcontext()
        if part == "checkpoint":
            self._end_pass()
        return self._inside(part, what)

    @contextmanager
    def _inside(self, part: RunPart, what: str) -> Iterator[None]:
        is_absorbed = self._is_absorbed(part)
        is_recorded = part in _RECURRING and not is_absorbed
        # Python collects wherever it happens to be.
        has_place = is_recorded and part != "restart" and not what.startswith(AUTOMATIC)
        place = users_place() if has_place else ""
        began_bytes = _written_bytes() if is_recorded and part == "checkpoint" else 0
        self._enter(part)
        before_s = self._seconds.get(part, 0.0)
        try:
            yield
        finally:
            self._leave()
            if is_recorded and self._began is not None and not self.is_over:
                written = _written_bytes() - began_bytes if part == "checkpoint" else 0
                spent_s = self._seconds.get(part, 0.0) - before_s
                self._kind(part, what, place).add(self._steps, spent_s, written)

    def enter(self, part: RunPart) -> None:
        """Open a part; for work that begins and ends in calls of its own, such as torch's hooks."""
        if self._is_watched():
            self._enter(part)

    def leave(self) -> None:
        """Close the part that was opened last."""
        if self._is_watched():
            self._leave()

    def _is_watched(self) -> bool:
        return not self.is_over and get_ident() == self._thread

    def _is_absorbed(self, part: RunPart) -> bool:
        """Return whether an open part keeps the time of this one."""
        if not self._open or part == "collection":
            return False
        # A loss that is printed waits for all work that the device has queued.
        is_wait = part == "synchronise" and self._open[-1] == "logging"
        return self._open[-1] in _ABSORBING and not is_wait

    def _enter(self, part: RunPart) -> float:
        now = self._spend()
        self._open.append(self._open[-1] if self._is_absorbed(part) else part)
        return now

    def _leave(self) -> float:
        now = self._spend()
        if self._open:  # an exception may have left fewer
            self._open.pop()
        return now

    def _spend(self) -> float:
        """Add the time since the last change to the innermost open part; return the time."""
        now = perf_counter()
        part: RunPart = self._open[-1] if self._open else "other"
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now
        return now

    def _move(self, seconds: float, before: RunPart, after: RunPart) -> None:
        self._seconds[before] = self._seconds.get(before, 0.0) - seconds
        self._seconds[after] = self._seconds.get(after, 0.0) + seconds

    def _kind(self, part: RunPart, what: str, place: str) -> _Kind:
        key = (part, what, place)
        if key not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            key = (part, "others", "")
        return self._kinds.setdefault(key, _Kind())

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave out the time of this context: it is the measurement's own, not the script's."""
        begun = self._spend()
        try:
            yield
        finally:
            self._since = perf_counter()
            self._apart_s += self._since - begun
            if self._began is not None:
                self._began += self._since - begun

    # The training loader

    @contextmanager
    def iterating(self, loader: object) -> Iterator[None]:
        """Clock `iter(loader)` of the training loader, or of one that may become it."""
        if not self._is_watched():
            yield
            return
        self._end_pass()
        begun = self._enter("restart")
        if self._other_s is not None:
            between_s = self._seconds.get("other", 0.0) - self._other_s
            self._kind("other", "between epochs", "").add(self._steps, between_s, 0)
            self._other_s = None
        try:
            with self._starts.making(loader):
                yield
        finally:
            self._restart_s = self._leave() - begun
            if self._began is None:
                self._asked = self._came = begun

    @contextmanager
    def fetching(self, loader: object) -> Iterator[None]:
        """Clock the request for a batch of the training loader."""
        if not self._is_watched():
            yield
            return
        self._end_pass()
        if self._open:  # an exception has left it open
            self._spend()
            self._open.clear()
        begun = self._enter("waiting" if self._restart_s is None else "restart")
        before_s = self._apart_s
        is_ended = False
        try:
            yield
        except StopIteration:
            is_ended = True
            raise
        finally:
            wait_s = self._leave() - begun - (self._apart_s - before_s)
            if not is_ended:
                self._starts.has_batch(loader)
            self._fetched(wait_s, is_ended=is_ended)

    def _fetched(self, wait_s: float, *, is_ended: bool) -> None:
        if self._began is None:
            if self._restart_s is not None:
                self._came = self._since
            self._restart_s = None
            return
        if is_ended:
            self._epochs_ended += 1
            self._other_s = self._seconds.get("other", 0.0)
            return
        if self._restart_s is not None:
            # The first batch costs at least as much as any other; only the rest is the restart's.
            usual_s = self._seconds.get("waiting", 0.0) / self._batches if self._batches else 0.0
            usual_s = min(usual_s, wait_s)
            self._move(usual_s, "restart", "waiting")
            restart_s = self._restart_s + wait_s - usual_s
            self._kind("restart", "iter(DataLoader)", "").add(self._steps, restart_s, 0)
            self._restart_s = None
        self._batches += 1

    # Passes over other data: an evaluation, or a second loader that training reads from

    def side_began(self, what: str) -> None:
        """Record that another loader than the training loader is used.

        Args:
            what: Its dataset's class, or the class of a module called without a loader.
        """
        if not self._is_watched():
            return
        if self._pass is None:
            if self._is_absorbed("validation"):
                return
            now = self._enter("validation")
            self._pass = _Pass(now, now, what, users_place())
            if self._began is not None:
                self._pass.peak_bytes = self._peaks.before(self._steps)
        self._pass.until = perf_counter()

    def side_seen(self) -> None:
        """Record that another loader gave a batch."""
        if self._is_watched() and self._pass is not None:
            self._pass.until = perf_counter()
            self._pass.has_batches = True

    def side_ended(self) -> None:
        """Record that another loader has no more batches."""
        self.side_seen()
        if self._is_watched():
            self._end_pass()

    @contextmanager
    def calling(self, what: str, *, trains: bool) -> Iterator[None]:
        """Clock the call of an outermost module.

        Args:
            what: The module's class.
            trains: It is in training mode, and gradients are on.
        """
        # A transform may be a module: fetching a batch keeps its time.
        is_fetching = bool(self._open) and self._open[-1] in {"waiting", "restart"}
        if not self._is_watched() or is_fetching:
            yield
            return
        if trains:
            self._end_pass()
            with self._inside("forward", ""):
                yield
            return
        self.side_began(what)
        begun = perf_counter()
        try:
            yield
        finally:
            if self._pass is not None:
                self._pass.is_evaluation = True
                self._pass.until = perf_counter()
                self._pass.called_s += self._pass.until - begun

    def backward_begins(self, *, is_synchronised: bool) -> None:
        """Record a backward pass, which ends a pass without training."""
        if self._is_watched():
            self._end_pass()
            if self._began is not None:
                self.backwards += 1
                self.synchronised += is_synchronised
                if perf_counter() >= self._modes_due:
                    with self.apart():
                        modes = observe_modes(self.device_kind, has_group=self.has_group)
                    self._modes.append(modes)
                    self._modes_due = perf_counter() + _MODES_EVERY_S

    def _end_pass(self) -> None:
        """Close the pass at what was last seen of it; what came after it is the script's other code."""
        ended = self._pass
        if ended is None:
            return
        self._pass = None
        now = self._leave()
        self._peaks.after(ended.peak_bytes)
        since_s = min(now - ended.until, self._seconds.get("validation", 0.0))
        self._move(since_s, "validation", "other")  # but what was collected meanwhile
        seconds = ended.until - ended.begun
        if not ended.is_evaluation:
            self._move(seconds, "validation", "waiting")
        elif not ended.has_batches:
            self._move(ended.called_s, "validation", "forward")
            self._move(seconds - ended.called_s, "validation", "other")
        elif self._began is not None and not self.is_over:
            self._kind("validation", ended.what, ended.place).add(self._steps, seconds, 0)

    # Steps

    def stepped(self, steps: int, samples: int, workers: Sequence[int]) -> None:
        """Record an optimizer step; the first one ends the start-up.

        Args:
            steps: Steps so far of the optimizer that steps most.
            samples: Samples that the training loader has delivered in this epoch.
            workers: Process ids of its workers.
        """
        if self.is_over:
            return
        self._steps = steps - 1
        if self._began is not None:
            self._read_process(samples, workers)
            return
        self._thread = get_ident()
        self._began = self._since = perf_counter()
        self._startup = Startup(
            before_loader_s=self._asked - self._started,
            first_batch_s=self._came - self._asked,
            first_step_s=self._began - self._came,
        )
        self._seconds.clear()
        self._open.clear()
        self._kinds.clear()
        self._pass = None
        self._restart_s = None

    def _read_process(self, samples: int, workers: Sequence[int]) -> None:
        """Read memory now and then, and the cores once, during steps."""
        if get_ident() != self._thread or self.is_epoch_cut:
            return
        with self.apart():
            self._growth.read_if_due(steps=self._steps, samples=samples, workers=workers)
            if self._cores is None and self._steps >= _CORES_AT_STEP:
                self._cores = with_cores(Modes(), workers)

    # The result

    def forget(self) -> None:
        """Record nothing any more: this process is a fork."""
        self.is_over = True

    def finish(self, epoch_batches: int | None) -> WatchedRun | None:
        """End the watch, and return what was seen; None if no optimizer stepped.

        May be called from another thread, when the script does not come back.

        Args:
            epoch_batches: Batches of an epoch of the training loader; None if unknown.
        """
        if self._pass is not None and self._pass.is_evaluation and self._pass.has_batches:
            self._pass.until = perf_counter()
            self._kind("validation", self._pass.what, self._pass.place).is_cut = True
        self._end_pass()
        self.is_over = True  # the training thread may go on meanwhile
        return self.so_far(epoch_batches)

    def so_far(self, epoch_batches: int | None) -> WatchedRun | None:
        """Return what was seen so far; see `finish`."""
        if self._began is None:
            return None
        now = self._spend()
        recurring = [
            Recurring(
                part=part,
                what=what,
                place=place,
                at_steps=tuple(kind.at_steps),
                seconds=tuple(kind.seconds),
                count=kind.count,
                total_s=kind.total_s,
                written_bytes=kind.written_bytes,
                is_cut=kind.is_cut,
                is_muted=is_muted(what),
            )
            for (part, what, place), kind in list(self._kinds.items())
        ]
        return WatchedRun(
            startup=self._startup,
            steps=self._steps,
            watched_s=now - self._began,
            parts_s={part: max(0.0, spent_s) for part, spent_s in dict(self._seconds).items()},
            recurring=tuple(recurring),
            batches=self._batches,
            epoch_batches=epoch_batches,
            epochs_ended=self._epochs_ended,
            is_epoch_cut=self.is_epoch_cut,
            worker_starts=self._starts.starts,
            active_workers=self.active_workers,
            modes=self._joined_modes(),
            memory=self._growth.report(self._peaks),
            written_elsewhere=files_elsewhere(),
            exchange=self.exchange,
            stacks=None if isinstance(self.stacks, str) else self.stacks,
            stacks_missing=self.stacks if isinstance(self.stacks, str) else "",
        )

    def _joined_modes(self) -> Modes:
        """Return the modes that were on most of the time, with the cores."""
        modes = join_modes(self._modes)
        if self._cores is None:
            return modes
        known = {name: value for name, value in dict(self._cores).items() if "cores" in name}
        known |= {"grant_source": self._cores.grant_source, "pinned_by": self._cores.pinned_by}
        return modes.model_copy(update=known)


def _written_bytes() -> int:
    """Return the bytes that this thread has written so far; 0 if the system does not count them.

    Source: Linux, proc(5), /proc/pid/io: wchar.
    """
    with suppress(OSError, ValueError, KeyError):  # another kernel may write it otherwise
        with opened("/proc/thread-self/io", real_os.O_RDONLY) as descriptor:
            counts = real_os.read(descriptor, 1024).decode()
        fields = dict(line.split(": ") for line in counts.splitlines())
        return int(fields["wchar"])
    return 0
