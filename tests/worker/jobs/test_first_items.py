"""The first look at items finds a slow tail and threads of their own, and leaves no trace in what is drawn later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune.config.plan import Workload, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.worker.device import open_device
from autotune.worker.feed import Feed
from autotune.worker.jobs import probe as first_items
from autotune.worker.jobs.probe import FirstItems, probe, probe_items

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


def probed(dataset: Any, **parts: Any) -> WorkloadFacts:
    workload = Workload(model=nn.Linear(4, 2), dataset=dataset, **parts)
    return probe(workload, TrainingConfig(micro_batch_size=8), open_device("cpu"), Path("/nowhere"))


def test_rare_slow_items_are_seen() -> None:
    facts = probed(Made(rarely_slow))
    assert facts.slow_tail_fraction is not None
    assert facts.slow_tail_fraction > 0.6
    assert facts.cores_per_item is not None
    assert facts.cores_per_item < 1.0


def test_even_items_have_no_tail() -> None:
    facts = probed(Made(lambda _: time.sleep(0.005)))
    assert facts.slow_tail_fraction is not None
    assert facts.slow_tail_fraction < 0.2


def looked_at(
    monkeypatch: pytest.MonkeyPatch, *, own_s: float, others_s: float, wall_s: float, cores: int = 8
) -> FirstItems:
    """What a look sees of items of so many seconds, of CPU time in their own thread and in others."""
    process, thread = iter(count(0.0, own_s + others_s)), iter(count(0.0, own_s))
    monkeypatch.setattr("autotune.worker.extras.item_costs.process_time", lambda: next(process))
    monkeypatch.setattr("autotune.worker.extras.item_costs.thread_time", lambda: next(thread))
    monkeypatch.setattr("autotune.worker.jobs.probe.usable_cores", lambda: cores)
    looked = probe_items(
        DataLoader(Made(lambda _: time.sleep(wall_s)), 8, shuffle=True), 0.0, never
    )
    assert looked is not None
    return looked


def test_cores_are_those_of_all_threads_of_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(
        monkeypatch, own_s=0.5, others_s=0.5, wall_s=0.002
    ).cores_per_item == pytest.approx(2.0)


def test_waiting_for_data_hides_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of its time in two threads; were the machine busy, less."""
    assert looked_at(
        monkeypatch, own_s=0.004, others_s=0.004, wall_s=0.02
    ).cores_per_item == pytest.approx(2.0)


def test_other_threads_that_hardly_work_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, own_s=0.0001, others_s=0.0001, wall_s=0.01).cores_per_item < 0.1


def test_of_an_own_thread_that_only_waits_nobody_knows_how_many_others_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        looked_at(monkeypatch, own_s=0.0001, others_s=0.005, wall_s=0.005, cores=4).cores_per_item
        < 1.2
    )


def test_an_item_that_nothing_else_works_on_keeps_one_core_busy_at_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading the clocks takes longer than an item of some microseconds."""
    assert looked_at(monkeypatch, own_s=0.001, others_s=0.0, wall_s=0.0).cores_per_item == 1.0


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
    monkeypatch.setattr(first_items, "time_items", raising)
    facts = probed(dataset)
    assert (facts.slow_tail_fraction, facts.cores_per_item) == (None, None)


def raising(*_: Any) -> Any:
    raise RuntimeError("the user's")


def test_of_slow_items_one_is_enough_to_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_items, "_PROBE_S", 0.01)
    dataset, warmed = Made(lambda _: time.sleep(0.05)), list[str]()
    assert probe_items(DataLoader(dataset, 8), 0.0, lambda: warmed.append("warmed")) is None
    assert (len(dataset.asked), warmed) == (1, ["warmed"])


def test_a_stream_is_begun_once_more_only_where_that_is_quick() -> None:
    quick, slow = Stream(), Stream()
    assert isinstance(probe_items(DataLoader(quick, 8), 0.1, never), FirstItems)
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
    warmed, read = list[str](), iter([0, 4096, 4096, 4096])
    monkeypatch.setattr("autotune.worker.extras.item_costs.bytes_from_disk", lambda: next(read))
    loader = DataLoader(Made(nothing), 8, shuffle=True)
    assert probe_items(loader, 0.0, lambda: warmed.append("warmed")) is not None
    assert warmed == ["warmed"]
    assert list(read) == [], "both looks have asked"


def test_a_look_without_the_disk_needs_no_other_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.worker.extras.item_costs.bytes_from_disk", lambda: 0)
    warmed = list[str]()
    assert probe_items(
        DataLoader(Made(lambda _: time.sleep(0.001)), 8), 0.0, lambda: warmed.append("warmed")
    )
    assert warmed == []


@pytest.mark.parametrize("is_asked", [False, True])
def test_code_that_asks_for_deterministic_algorithms_is_known(is_asked: bool) -> None:
    def model() -> nn.Module:
        torch.backends.cudnn.deterministic = is_asked
        return nn.Linear(4, 2)

    before = torch.backends.cudnn.deterministic
    try:
        facts = probe(
            Workload(model=model, dataset=Made(nothing)),
            TrainingConfig(micro_batch_size=8),
            open_device("cpu"),
            Path("/nowhere"),
        )
    finally:
        torch.backends.cudnn.deterministic = before
    assert facts.is_deterministic is is_asked
