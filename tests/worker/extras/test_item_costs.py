"""What an item costs: which items are timed, how, and what comes of odd datasets. Nothing here looks at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.messages.trials import extra_failed
from autotune.note import Note
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import Ceiling
from autotune.worker.extras import item_costs
from autotune.worker.extras.item_costs import item_fetchers, measure_items, with_batch_rates
from autotune.worker.loader import build_loader
from tests.factories import make_loader_costs

LEAST_S = item_costs._LEAST_S
CONFIG = TrainingConfig(micro_batch_size=8)


@pytest.fixture(autouse=True)
def _no_longer_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed number of items for those tests that are not about it."""
    monkeypatch.setattr(item_costs, "_LEAST_S", 0.0)


class Recorder(Dataset[Tensor]):
    """Notes which items were asked for, and with how many threads of torch's; calls a function for each."""

    def __init__(self, length: int = 1000, work: Callable[[int], object] | None = None) -> None:
        self.length, self.asked, self.threads = length, list[int](), set[int]()
        self.work = work or (lambda number: None)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.asked.append(index)
        self.threads.add(torch.get_num_threads())
        self.work(len(self.asked))
        return torch.zeros(4)


class Batched(Recorder):
    """Makes whole batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.sizes.append(len(indices))
        return [torch.zeros(4) for _ in indices]


class Stream(IterableDataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length, self.begun = length, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        return iter(torch.zeros(self.length, 4))


def pause(number: int) -> None:
    """Wait at some of the items."""
    if number % 400 == 0:
        time.sleep(0.02)


def fork(_: int) -> None:
    """Have a process of its own work for each item."""
    pid = os.fork()
    if pid == 0:
        for _ in range(20_000):
            pass
        os._exit(0)
    os.waitpid(pid, 0)


def loader_of(
    dataset: Any, config: TrainingConfig = CONFIG, parts: dict[str, Any] | None = None
) -> DataLoader[Any]:
    workload = Workload(model=None, dataset=dataset, **(parts or {}))
    loader = build_loader(workload, dataset, config, Path("/nowhere"))
    assert isinstance(loader, DataLoader)
    return loader


def costs_of(
    dataset: Any,
    parts: Any = None,
    to_device: Callable[[Any], object] | None = None,
    note: Any = None,
    **settings: Any,
) -> LoaderCosts:
    config = CONFIG.model_copy(update=settings)
    loader = loader_of(dataset, config, parts)
    return measure_items(loader, config, note=note or Mock(), to_device=to_device)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_items_are_drawn_at_random_with_one_thread_which_is_put_back() -> None:
    dataset = Recorder()
    costs = costs_of(dataset)
    assert costs.items == 256
    assert len(set(dataset.asked)) > 100
    assert max(dataset.asked) > 500
    assert dataset.threads == {1}
    assert torch.get_num_threads() == 2


def test_quantiles_are_in_order_and_sizes_are_those_in_the_batch() -> None:
    costs = costs_of(Recorder())
    assert 0 < costs.item_median_s <= costs.item_p99_s <= costs.item_slowest_s
    assert costs.item_bytes == 16
    assert costs.collate_s > 0
    assert costs.disk_bytes_per_item >= 0
    assert costs.transfer_s is None, "without workers"
    assert costs.pin_s is None, "not asked for"
    assert (costs.copy_s, costs.pinned_copy_s) == (None, None), "without an accelerator"


@pytest.mark.parametrize(
    "parts",
    [
        {"shuffle": False},
        {"sampler": range(10)},
        {"batch_sampler": [[0, 1], [2, 3, 4]]},
    ],
)
def test_the_users_own_order_is_followed_without_end(parts: dict[str, Any]) -> None:
    dataset = Recorder(length=10)
    costs_of(dataset, parts=parts)
    assert dataset.asked[:5] == [0, 1, 2, 3, 4]
    assert len(dataset.asked) == 257


def test_a_dataset_that_makes_batches_is_asked_for_batches() -> None:
    dataset = Batched()
    costs = costs_of(dataset)
    assert set(dataset.sizes) == {8}
    assert not dataset.asked
    assert costs.items == 256


class Whole(Batched):
    """Makes a batch of tensors, which nothing collates."""

    def __getitems__(self, indices: list[int]) -> Any:
        self.sizes.append(len(indices))
        return torch.zeros(len(indices), 4), torch.zeros(len(indices))


def test_a_batch_made_as_a_whole_counts_all_its_items() -> None:
    costs = costs_of(Whole(), parts={"collate_fn": lambda batch: batch}, num_workers=1)
    assert costs.items == 256
    assert costs.item_bytes == 20
    assert costs.batch_tensors == 2
    assert costs.transfer_s is not None


def test_own_thread_works_no_longer_than_its_time() -> None:
    costs = costs_of(Recorder())
    assert costs.item_cpu_s - costs.item_others_cpu_s <= costs.item_s * 1.0001


def test_a_subset_is_asked_item_by_item_unless_it_holds_one_that_makes_batches() -> None:
    plain, batched = Recorder(), Batched()
    costs_of(Subset(plain, range(100)))
    assert len(plain.asked) == 257
    costs_of(Subset(batched, range(100)))
    assert set(batched.sizes) == {8}


def test_a_stream_is_begun_anew_at_its_end() -> None:
    stream = Stream(100)
    assert costs_of(stream).items == 256
    assert stream.begun == 3


def test_a_stream_without_an_item_is_told() -> None:
    with pytest.raises(RuntimeError, match="item"):
        costs_of(Stream(0))


def test_a_dataset_smaller_than_a_batch_fills_one_by_repeating() -> None:
    costs = costs_of(Recorder(length=3), micro_batch_size=512)
    assert costs.item_bytes == 16


def test_slow_datasets_give_a_handful_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_costs, "_ITEMS_S", 1e-9)
    assert 1 <= costs_of(Recorder()).items <= 5


def test_cheap_items_are_timed_until_rare_pauses_are_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_costs, "_LEAST_S", LEAST_S)
    costs = costs_of(Recorder(work=pause))
    assert costs.items > 256
    assert costs.item_slowest_s >= 0.02
    assert costs.slow_tail_fraction > 0.4


def test_cheapest_items_end_at_a_number_and_only_a_batch_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_costs, "_LEAST_S", 10.0)
    monkeypatch.setattr(item_costs, "_MOST_ITEMS", 700)
    assert costs_of(Recorder()).items == 700
    fetchers = item_fetchers(loader_of(Batched(), TrainingConfig()))
    assert len(item_costs.time_items(fetchers, 3, inf).kept) <= 32


def test_near_the_deadline_one_item_is_enough() -> None:
    assert measure_items(loader_of(Recorder()), CONFIG, note=Mock(), ends_at=0.0).items == 1


def test_work_in_child_processes_is_cpu_time_of_the_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_costs, "_MOST_ITEMS", 3)
    begun_s = item_costs._children_cpu_s()
    costs = costs_of(Recorder(work=fork))
    assert costs.item_cpu_s * 3 >= (item_costs._children_cpu_s() - begun_s) / 2


@pytest.mark.parametrize(("ranks", "batches"), [(1, 2.0), (2, 5.0), (5, 10.0), (7, 10.0)])
def test_batches_are_told_per_worker_and_core_of_which_ranks_have_a_share(
    ranks: int, batches: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_costs, "usable_cores", lambda: 5)
    ceiling = Ceiling(samples_per_s=80.0, samples=80, seconds=1.0, batches=10)
    costs = make_loader_costs(transfer_s=0.25)
    found = with_batch_rates(costs, ceiling, TrainingConfig(num_workers=2), ranks)
    assert (found.batches_per_worker_per_s, found.batches_per_core_per_s) == (5, batches)
    assert found.transfer_s == 0.25


def failed(note: Mock) -> list[Note]:
    return [call.args[0] for call in note.call_args_list]


def test_a_batch_that_cannot_be_sent_leaves_the_other_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail, note = Mock(side_effect=OSError("no shared memory")), Mock()
    monkeypatch.setattr(item_costs, "_transfer_s", fail)
    monkeypatch.setattr(item_costs, "pinned", fail)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    costs = costs_of(Recorder(), note=note, num_workers=1, pin_memory=True)
    assert (costs.items, costs.transfer_s, costs.pin_s) == (256, None, None)
    cause = "OSError: no shared memory"
    assert failed(note) == [extra_failed(stage, cause) for stage in ("transfer", "pinning")]


def test_a_collate_fn_that_works_once_gives_its_one_figure() -> None:
    note = Mock()
    collate = Mock(side_effect=[torch.zeros(8, 4), ValueError("used up")])
    costs = costs_of(Recorder(), {"collate_fn": collate}, note=note)
    assert (costs.items, costs.item_bytes, costs.collate_s > 0) == (256, 16, True)
    assert failed(note) == [extra_failed("collate_again", "ValueError: used up")]


def test_a_batch_is_sent_through_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_costs, "_TRANSFER_S", 0.02)
    costs = costs_of(TensorDataset(torch.zeros(100, 4), torch.zeros(100)), num_workers=1)
    assert (costs.transfer_s or 0) >= 0


@pytest.mark.parametrize(("collate_s", "transfer_s"), [(0.04, 0.06), (0.2, 0.0)])
def test_a_batchs_way_is_what_it_takes_less_collating(
    collate_s: float, transfer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceiling = Ceiling(samples_per_s=80.0, samples=80, seconds=1.0, batches=10)
    feed, alone = Mock(), Mock(return_value=ceiling)
    monkeypatch.setattr(item_costs, "Feed", feed)
    monkeypatch.setattr(item_costs, "loader_alone", alone)
    monkeypatch.setattr(item_costs, "_mean_s", lambda _: collate_s)
    costs = costs_of(Recorder(), num_workers=2, prefetch_factor=4)
    assert costs.collate_s == collate_s
    assert costs.transfer_s == pytest.approx(transfer_s)
    assert feed.call_args.args[0].num_workers == 1
    _, config = alone.call_args.args
    assert (config.num_workers, config.prefetch_factor) == (1, None)
    feed.return_value.stop.assert_called_once_with()


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stand in for pinning, on a machine that seems to have an accelerator."""
    pin = Mock(side_effect=lambda batch: ("pinned", batch))
    monkeypatch.setattr(item_costs, "pinned", pin)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    return pin


def test_pinning_is_timed_after_a_first_one(pinned: Mock) -> None:
    costs = costs_of(Recorder(), pin_memory=True)
    assert (costs.pin_s or 0) > 0
    assert pinned.call_count == 1 + item_costs._REPEATS
    assert {call.args[0].shape for call in pinned.call_args_list} == {(8, 4)}


def test_nothing_is_pinned_where_nothing_comes_of_it(
    pinned: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert costs_of(Recorder(), pin_memory=False).pin_s is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert costs_of(Recorder(), pin_memory=True).pin_s is None
    assert not pinned.called


def test_copies_to_a_device_are_timed_from_both_kinds_of_memory(pinned: Mock) -> None:
    copied: list[Any] = []
    costs = costs_of(Recorder(), to_device=copied.append)
    assert None not in (costs.copy_s, costs.pinned_copy_s)
    assert [isinstance(batch, tuple) for batch in copied] == [False] * 4 + [True] * 4, (
        "the first of each is not timed"
    )
    assert pinned.call_count == 1, "outside the clock"
    assert costs.pin_s is None, "the trial itself does not pin"


def test_a_copy_that_fails_leaves_the_other_costs(pinned: Mock) -> None:
    def to_device(batch: Any) -> None:
        if batch[0] == "pinned":
            raise RuntimeError("nothing left")

    costs = costs_of(Recorder(), to_device=to_device, note=(note := Mock()))
    assert (costs.items, costs.copy_s is not None, costs.pinned_copy_s) == (256, True, None)
    assert failed(note) == [extra_failed("pinned_copy", "RuntimeError: nothing left")]


@pytest.mark.parametrize(
    ("tensors", "fraction"),
    [
        ([torch.zeros(9, 4)], 1.0),
        ([torch.zeros(9, 3, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)], 0.0),
        ([torch.zeros(9, 4), torch.zeros(9, 2, dtype=torch.long)], 0.5),
        ([torch.zeros(9, 0)], None),
    ],
)
def test_float32_is_counted_by_its_bytes(tensors: list[Tensor], fraction: float | None) -> None:
    assert costs_of(TensorDataset(*tensors)).float32_fraction == fraction


@pytest.mark.parametrize(
    ("seconds", "share"),
    [([1.0] * 10, 0.0), ([1.0] * 9 + [91.0], 0.91), ([0.0] * 4, 0.0)],
)
def test_the_slow_tail_is_time_in_items_of_over_eight_medians(
    seconds: list[float], share: float
) -> None:
    assert item_costs.slow_tail(seconds) == pytest.approx(share)
