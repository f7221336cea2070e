"""The first look at items finds a slow tail and threads of their own, and leaves no trace in what is drawn later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune.config.plan import Workload, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.worker.device import open_device
from autotune.worker.extras import item_costs
from autotune.worker.extras.item_costs import TimedItems
from autotune.worker.feed import Feed
from autotune.worker.jobs import probe as first_items
from autotune.worker.jobs.probe import cores_per_item, probe, probe_items

Pair = tuple[Tensor, int]


class Made(Dataset[Pair]):
    """Items by a function of their index."""

    def __init__(self, make: Callable[[int], object], length: int = 10_000) -> None:
        self.make, self.length, self.asked = make, length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Pair:
        self.asked.append(index)
        self.make(index)
        return torch.zeros(4), 0


class Stream(IterableDataset[Pair]):
    """A stream that notes how often it is begun, and what of it is read."""

    def __init__(self, open_s: float = 0.0) -> None:
        self.open_s, self.begun = open_s, 0

    def __iter__(self) -> Iterator[Pair]:
        self.begun += 1
        time.sleep(self.open_s)
        for _ in count():
            time.sleep(0.001)
            yield torch.zeros(4), 0


def nothing(_index: int) -> None:
    """Costs nothing."""


def rarely_slow(index: int) -> None:
    time.sleep(0.05 if index % 16 == 0 else 0.0005)


def never() -> None:
    """No warming is asked for, or does nothing."""


def probed(dataset: Any, model: Any = None) -> WorkloadFacts:
    workload = Workload(model=model or nn.Linear(4, 2), dataset=dataset)
    return probe(workload, TrainingConfig(micro_batch_size=8), open_device("cpu"), Path("/nowhere"))


def test_rare_slow_items_are_seen() -> None:
    facts = probed(Made(rarely_slow))
    assert (facts.slow_tail_fraction or 0) > 0.6
    assert (facts.cores_per_item or 9) < 1.0
    even = probed(Made(lambda _: time.sleep(0.005)))
    assert (even.slow_tail_fraction or 0) < 0.2


@pytest.mark.parametrize(
    ("own_s", "others_s", "wall_s", "cores"),
    [
        (0.5, 0.5, 1.0, 2.0),  # all threads
        (0.1, 0.1, 1.0, 2.0),  # waiting for data hides no threads
        (0.01, 0.01, 1.0, 0.02),  # threads that hardly work
        (0.02, 1.0, 1.0, 1.02),  # an own thread that only waits
        (2.0, 0.0, 1.0, 1.0),  # reading the clocks takes longer than the item
    ],
)
def test_cores_per_item(
    own_s: float, others_s: float, wall_s: float, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_items, "usable_cores", lambda: 4)
    timed = TimedItems(
        kept=[],
        seconds=[wall_s],
        cpu_s=own_s + others_s,
        own_cpu_s=own_s,
        others_cpu_s=others_s,
        disk_bytes=0,
    )
    assert cores_per_item(timed) == pytest.approx(cores)


def test_the_look_runs_as_a_worker_does_with_one_thread_of_torch() -> None:
    seen, before = set[int](), torch.get_num_threads()
    probe_items(DataLoader(Made(lambda _: seen.add(torch.get_num_threads())), 8), 0.0, never)
    assert (seen, torch.get_num_threads()) == ({1}, before)


def test_what_is_drawn_later_is_the_same_however_long_the_look_took() -> None:
    def draws(_index: int) -> None:
        random.random()
        np.random.rand()
        torch.rand(1)

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = drawn()
    seed()
    assert probe_items(DataLoader(Made(draws), 8, shuffle=True), 0.0, never) is not None
    assert drawn() == expected


def test_batches_after_a_look_are_counted_as_they_were_drawn() -> None:
    loader = DataLoader(Made(nothing, length=20), 8)
    feed = Feed(loader)
    sizes = [feed.start().samples]
    assert probe_items(loader, 0.0, never) is not None
    sizes += [feed.take().samples, feed.take().samples]
    assert sizes == [8, 8, 4]


def test_user_code_that_raises_at_a_later_item_leaves_the_facts_unknown() -> None:
    left = iter([None] * 8)  # the first batch works

    def raises(_index: int) -> None:
        if next(left, "over") == "over":
            raise OSError("a broken file")

    looked = probe_items(DataLoader(Made(raises), 8), 0.0, never)
    assert looked is None


def test_a_probe_survives_what_the_look_and_only_the_look_meets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = Made(nothing, length=64)
    monkeypatch.setattr(first_items, "time_items", Mock(side_effect=RuntimeError("the user's")))
    facts = probed(dataset)
    assert (facts.slow_tail_fraction, facts.cores_per_item) == (None, None)


def test_of_slow_items_one_is_enough_to_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_items, "_PROBE_S", 0.01)
    dataset, warm = Made(lambda _: time.sleep(0.05)), Mock()
    assert probe_items(DataLoader(dataset, 8), 0.0, warm) is None
    assert (len(dataset.asked), warm.call_count) == (1, 1)


def test_a_stream_is_begun_once_more_only_where_that_is_quick() -> None:
    quick, slow = Stream(), Stream()
    assert probe_items(DataLoader(quick, 8), 0.1, never) is not None
    assert probe_items(DataLoader(slow, 8), 60.0, never) is None
    assert (quick.begun, slow.begun) == (1, 0)


def test_a_sampler_of_the_users_counts_as_a_stream_but_not_torchs() -> None:
    dataset = Made(nothing)
    batches = [[0, 1], [2, 3]]
    assert probe_items(DataLoader(dataset, batch_sampler=batches), 60.0, never) is None
    assert dataset.asked == []
    assert probe_items(DataLoader(dataset, 8, shuffle=True), 60.0, never) is not None


def test_what_came_from_the_disk_is_read_warm_and_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm, read = Mock(), Mock(side_effect=[0, 4096, 4096, 4096])
    monkeypatch.setattr(item_costs, "bytes_from_disk", read)
    assert probe_items(DataLoader(Made(nothing), 8, shuffle=True), 0.0, warm) is not None
    assert warm.call_count == 1
    assert read.call_count == 4, "items were timed twice"


def test_a_look_without_the_disk_needs_no_other_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_costs, "bytes_from_disk", lambda: 0)
    warm = Mock()
    assert probe_items(DataLoader(Made(lambda _: time.sleep(0.001)), 8), 0.0, warm)
    assert not warm.called


@pytest.mark.parametrize("is_asked", [False, True])
def test_code_that_asks_for_deterministic_algorithms_is_known(is_asked: bool) -> None:
    def model() -> nn.Module:
        torch.backends.cudnn.deterministic = is_asked
        return nn.Linear(4, 2)

    before = torch.backends.cudnn.deterministic
    try:
        facts = probed(Made(nothing), model)
    finally:
        torch.backends.cudnn.deterministic = before
    assert facts.is_deterministic is is_asked
