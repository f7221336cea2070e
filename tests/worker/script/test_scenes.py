"""What jobs do in a script beside measuring."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from autotune.worker.feed import QueueDepth
from autotune.worker.script import session
from autotune.worker.script.feeds import Conductor, CountedLoader, ScriptFeed


class Stream(IterableDataset[int]):
    """A stream that shares its items out, or has none to give when it is asked again."""

    def __init__(self, *, is_live: bool = False, asks: bool = False) -> None:
        self.is_live, self.asks = is_live, asks

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if self.asks and info is not None and info.id > 1:
            return
        if self.is_live:
            Event().wait()
        yield 1


def test_a_live_stream_that_gives_no_item_again_holds_no_probe_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = DataLoader(Stream())
    feed = ScriptFeed(
        Conductor(lambda: None), CountedLoader(loader), iter(loader), QueueDepth(is_shallow=False)
    )
    assert session._is_sharded(Stream(asks=True), feed)
    assert not session._is_sharded(Stream(), feed)
    monkeypatch.setattr(session, "_LONGEST_ITEM_S", 0.05)
    assert not session._is_sharded(Stream(is_live=True), feed), "each worker may give all of it"
