"""What jobs do in a script beside measuring."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from autotune.worker.attach.loop import scenes


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


def test_a_live_stream_that_gives_no_item_again_holds_no_probe_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "_LONGEST_ITEM_S", 0.05)
    assert scenes._is_sharded(Stream(is_live=True)), "what is not known counts as shared out"
    monkeypatch.undo()
    assert scenes._is_sharded(Stream(asks=True))
    assert not scenes._is_sharded(Stream())
