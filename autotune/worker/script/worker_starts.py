"""Time the start of loader workers in the training process: processes, pickling, first batch.

In: a `with` block around the making of a DataLoader's iterator, and the moment of its first batch.
Out: a `WorkerStart` for each set of workers. Inside the block the methods that start a process and
pickle for it are wrapped; nothing stays wrapped after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import process, reduction
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ReferenceType, ref

from autotune.records.watched_run import WorkerStart

_MOST_STARTS = 100
"""Starts that are recorded; an hour of one-second epochs says no more. Source: our convention."""


@dataclass(slots=True)
class _Open:
    """A set of workers that has not delivered a batch yet."""

    loader: ReferenceType[Any]
    begun: float
    method: str = ""
    workers: int = 0
    start_s: float = 0.0
    pickle_s: float = 0.0
    pickled_bytes: int = 0


class WorkerStarts:
    """Records each start of a training loader's workers."""

    def __init__(self) -> None:
        self._done: list[WorkerStart] = []
        self._open: _Open | None = None

    @property
    def starts(self) -> tuple[WorkerStart, ...]:
        """The starts whose first batch has come, in their order."""
        return tuple(self._done)

    @contextmanager
    def making(self, loader: Any) -> Iterator[None]:
        """Time the processes that this thread starts inside the block, for a loader's iterator.

        Persistent workers that run already start no process: then nothing is recorded.
        """
        found = _Open(ref(loader), perf_counter())
        with _timed_processes(found):
            yield
        self._open = found if found.workers else None

    def has_batch(self, loader: Any) -> None:
        """Close the start of this loader's workers: its first batch has come. Later calls do nothing."""
        found = self._open
        if found is None or found.loader() is not loader:
            return
        self._open = None
        if len(self._done) >= _MOST_STARTS:
            return
        is_pickled = found.pickled_bytes > 0
        self._done.append(
            WorkerStart(
                method=found.method,
                workers=found.workers,
                start_s=found.start_s,
                first_batch_s=perf_counter() - found.begun,
                pickled_bytes=round(found.pickled_bytes / found.workers) if is_pickled else None,
                pickle_s=found.pickle_s / found.workers if is_pickled else None,
            )
        )


@contextmanager
def _timed_processes(found: _Open) -> Iterator[None]:
    """Add what this thread starts and pickles inside the block to `found`."""
    plain_start: Callable[..., None] = process.BaseProcess.start
    plain_dump: Callable[..., None] = reduction.dump
    thread = get_ident()

    def start(self: process.BaseProcess) -> None:
        if get_ident() != thread:
            plain_start(self)
            return
        begun = perf_counter()
        try:
            plain_start(self)
        finally:
            found.start_s += perf_counter() - begun
        found.workers += 1
        found.method = getattr(getattr(self, "_popen", None), "method", "fork")

    def dump(obj: object, file: Any, protocol: int | None = None) -> None:
        if get_ident() != thread:
            plain_dump(obj, file, protocol)
            return
        begun = perf_counter()
        before = _position(file)
        plain_dump(obj, file, protocol)
        found.pickle_s += perf_counter() - begun
        found.pickled_bytes += _position(file) - before

    process.BaseProcess.start = start  # type: ignore[method-assign]
    reduction.dump = dump
    try:
        yield
    finally:
        # What the script put there meanwhile stays
        if process.BaseProcess.start is start:
            process.BaseProcess.start = plain_start  # type: ignore[method-assign]
        if reduction.dump is dump:
            reduction.dump = plain_dump


def _position(file: Any) -> int:
    with suppress(AttributeError, OSError, ValueError):  # a pipe has none
        return int(file.tell())
    return 0
