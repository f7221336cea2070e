"""Runs functions side by side, each in a thread, or one alone in the calling thread; hands over results as they end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self, TypeVar

__all__ = ["SideBySide"]

_Ended = TypeVar("_Ended")


class SideBySide(Generic[_Ended]):
    """The runs under way. Its length is how many have begun and were not yet returned by `next_ended`.

    When an exception leaves the context, runs under way are not waited for: closing the launcher ends them.

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def begin(self, run: Callable[[], _Ended], *, is_alone: bool) -> None:
        """Begin a run; if it is alone it has ended when this returns, and what it raises is raised here.

        Ctrl-C reaches the calling thread only: a run in that thread ends at once, with all that it has started.
        """
        future: Future[_Ended]
        if is_alone:
            future = Future()
            future.set_result(run())
        else:
            future = self._pool.submit(run)
        self._count += 1
        future.add_done_callback(self._ended.put)

    def next_ended(self) -> _Ended:
        """Wait for the next run to end; return what it has returned, or raise what it has raised."""
        future = self._ended.get()
        self._count -= 1
        return future.result()
