"""What jobs do in a script besides measuring."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from autotune.worker.feed import QueueDepth
from autotune.worker.script import session
from autotune.worker.script.feeds import Conductor, CountedLoader, ScriptFeed
from tests.worker.script.scripts import LOOP, ScriptRig


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


def test_live_stream_holds_no_probe_up(
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


@pytest.mark.slow
def test_precision_sides_and_largest_samples(rig: ScriptRig) -> None:
    found = rig.probe(rig.write(LOOP))
    runner, own = rig.runner(found.words, found.script), found.observed
    half = own.model_copy(update={"amp_dtype": "bfloat16"})
    guard = runner.guard(half, name="guard", deadline_s=60.0).guard
    assert guard is not None
    assert guard.steps == len(guard.losses) == len(guard.reference_losses) >= 5
    assert guard.gradient_cosine is not None
    assert 0.9 < guard.gradient_cosine < 1
    varied = [half, own.model_copy(update={"num_workers": 1})]
    curves = runner.curves(own, varied, deadline_s=60.0, stretch_s=0.05).curves
    assert curves is not None
    assert curves.loader
    assert curves.device
    stress = runner.stress(own, name="stress", deadline_s=60.0, train_s=0.1).stress
    assert stress is not None
    assert stress.steps >= 3
    assert stress.largest_item_bytes == 8 * 4 + 8


@pytest.mark.parametrize(
    ("prints", "workers", "repeats"),
    [
        ("AABBCCDD", 2, True),
        ("ABBCCDDE", 2, True),
        ("AAAABBBBCC", 4, True),
        ("ABCDEFGH", 2, False),
        ("ABABABAB", 2, False),
        ("AAAAAAAA", 2, False),
        ("ABCD", 2, False),
        ("AA", 2, False),
        ("", 2, False),
    ],
)
def test_batches_that_come_once_from_each_worker_are_repeats(
    prints: str, workers: int, repeats: bool
) -> None:
    assert session.repeats_batches(list(map(ord, prints)), workers) is repeats
