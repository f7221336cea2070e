"""Find the facts of a workload in one small step and its first items."""

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
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from autotune.config.plan import Workload, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.worker.device import Device, open_device
from autotune.worker.extras import item_costs
from autotune.worker.extras.item_costs import TimedItems
from autotune.worker.feed import Delivery, Feed
from autotune.worker.jobs import probe as probing
from autotune.worker.jobs.probe import (
    _switched_on,
    cores_per_item,
    probe,
    probe_items,
    warm_page_cache,
)


class Stream(IterableDataset[Any]):
    """Items that a function makes each time that the stream is begun."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


def numbers(start: int = 0) -> Iterator[Any]:
    return ((torch.full((4,), float(index)), 0) for index in count(start))


def arrays(step: int = 1) -> Iterator[Any]:
    return ((np.full(4, index * step, dtype=np.float32), 0) for index in count(1))


def by_place() -> Iterator[Any]:
    info = get_worker_info()
    return numbers(0 if info is None else info.id)


def by_presence() -> Iterator[Any]:
    """Ask whether this is a worker, but not which."""
    assert get_worker_info() is None or get_worker_info() is not None
    return numbers()


OPENED = count(1)


class Item:
    def __init__(self, values: Any) -> None:
        self.values = values


def as_pairs(items: list[Any]) -> Any:
    return torch.stack([torch.from_numpy(item.values) for item in items]), torch.zeros(
        len(items), dtype=torch.long
    )


def pairs(samples: int, *shape: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, *(shape or (4,))), torch.randint(0, 2, (samples,)))


def facts_of(dataset: Any, **parts: Any) -> WorkloadFacts:
    """Return what a probe finds out."""
    workload = Workload(**({"model": nn.Linear(4, 2), "dataset": dataset} | parts))
    config = TrainingConfig(micro_batch_size=8)
    return probe(workload, config, open_device("cpu"), Path("/nowhere"))


def test_facts_are_those_of_the_workload() -> None:
    facts = facts_of(pairs(100))
    assert (facts.dataset_length, facts.is_iterable, facts.is_sharded) == (100, False, True)
    assert facts.parameter_count == 10
    assert facts.optimizer.name == "SGD"
    assert facts.step_source.startswith("cross-entropy")
    assert not facts.has_4d_input
    assert facts.fixed_batch_size is None
    assert facts_of(pairs(3)).dataset_length == 3, "smaller than a batch"


@pytest.mark.parametrize(("shape", "is_image"), [((3, 8, 8), True), ((192,), False)])
def test_images_are_told_by_their_dimensions(shape: tuple[int, ...], is_image: bool) -> None:
    data = pairs(8, *shape)
    assert (
        facts_of(data, model=nn.Sequential(nn.Flatten(), nn.Linear(192, 2))).has_4d_input
        == is_image
    )


def test_warming_the_page_cache_does_not_run_through_data_in_memory() -> None:
    assert (
        facts_of(Made(nothing, length=10**12), shuffle=False).dataset_length == 10**12
    )  # it would never end


@pytest.mark.parametrize(
    ("begin", "is_sharded"),
    [
        (numbers, False),  # equal
        (by_place, True),  # asks for its worker
        (by_presence, False),  # asks whether it is in a worker
        (lambda: iter(lambda: (torch.randn(4), 0), None), False),  # one seed
        (arrays, False),  # equal arrays
        (
            lambda: iter(lambda: (np.random.rand(4).astype(np.float32), 0), None),
            False,
        ),  # one seed of NumPy
        (lambda: arrays(next(OPENED)), True),  # arrays of each process
    ],
)
def test_a_stream_is_sharded_if_two_workers_get_different_items(
    begin: Callable[[], Iterator[Any]], is_sharded: bool
) -> None:
    facts = facts_of(Stream(begin))
    assert facts.is_iterable
    assert facts.is_sharded == is_sharded
    assert get_worker_info() is None, "the probe leaves nothing behind"


def test_streams_of_objects_are_compared_by_what_they_hold() -> None:
    items = Stream(lambda: (Item(array) for array, _ in arrays()))
    assert not facts_of(items, collate_fn=as_pairs).is_sharded


def test_a_stream_whose_workers_are_set_up_by_the_user_counts_as_sharded() -> None:
    assert facts_of(Stream(numbers), worker_init_fn=lambda _: None).is_sharded


def test_a_batch_sampler_of_a_size_of_its_own_fixes_it() -> None:
    sampler = torch.utils.data.BatchSampler(range(12), batch_size=6, drop_last=True)
    data = pairs(12)
    assert facts_of(data, batch_sampler=sampler).fixed_batch_size == 6
    assert (
        facts_of(data, batch_sampler=lambda _, size: [list(range(size))]).fixed_batch_size is None
    )


@pytest.mark.parametrize("takes_both", [False, True])
def test_parameters_that_no_gradient_reaches_are_found_in_one_step(takes_both: bool) -> None:
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    model.append(nn.Linear(4, 4).requires_grad_(False))  # frozen weights do not count

    def step(model: Any, batch: Any) -> Tensor:
        loss: Tensor = sum(branch(batch[0]).sum() for branch in model[: 1 + takes_both])
        return loss

    facts = facts_of(pairs(8), model=model, step=step)
    assert facts.has_unused_parameters is not takes_both


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("used up"),
        MemoryError("used up"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_baseline_that_is_out_of_memory_is_left_to_its_trial_to_tell(error: Exception) -> None:
    assert facts_of(pairs(100), step=Mock(side_effect=error)).dataset_length == 100


def images(count: int, *, sizes: tuple[int, ...] = (8,)) -> list[Any]:
    return [(torch.randn(3, sizes[index % len(sizes)], 8), index % 2) for index in range(count)]


def convolving() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("dataset", "parts", "are_fixed"),
    [
        (images(32), {}, True),
        (images(32, sizes=(8,) * 8 + (12,) * 8), {}, False),
        (images(29), {"drop_last": False}, True),
        (images(20), {"drop_last": False}, None),
        (images(16), {}, None),
    ],
    ids=["fixed", "varied", "short_last", "two_and_a_short_one", "too_few"],
)
def test_shapes_are_fixed_where_three_batches_are_alike_but_for_a_short_last_one(
    dataset: Any, parts: dict[str, Any], are_fixed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # else a page cache that is found warm ends it at two batches
    monkeypatch.setattr(probing, "GRAPH_KINDS", ("cpu",))
    facts = facts_of(dataset, model=convolving(), shuffle=False, **parts)
    assert facts.has_fixed_shapes is are_fixed
    assert facts.has_convolutions


class Slow:
    """A feed whose batches take a minute each, by its clock."""

    def __init__(self) -> None:
        self.taken = 0

    def clock(self) -> float:
        return 60.0 * self.taken

    def take(self) -> Delivery:
        self.taken += 1
        return Delivery((torch.zeros(2, 4),), 2, 0.0, 60.0, is_restart=False, had_to_wait=True)


@pytest.mark.parametrize("is_warm", [False, True])
def test_slow_batches_are_taken_for_five_seconds_at_most(
    is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed: Any = Slow()
    first = feed.take()
    monkeypatch.setattr(probing, "perf_counter", feed.clock)
    longest = {"longest_s": 0.0} if is_warm else {}
    shapes = warm_page_cache(feed, first, fewest=3, **longest)
    assert (feed.taken, len(shapes)) == (2, 2)


def test_a_batch_counts_once_for_the_shapes_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "probe_items", lambda _loader, _first_s, warm: warm())
    monkeypatch.setattr(probing, "GRAPH_KINDS", ("cpu",))
    facts = facts_of(images(16), model=convolving(), shuffle=False)
    assert facts.has_fixed_shapes is None, "two batches do not pass for three"


def test_an_optimizer_can_be_fused_where_torch_has_it_and_gradients_are_dense() -> None:
    words = TensorDataset(torch.randint(0, 10, (64,)), torch.randint(0, 2, (64,)))
    for optimizer, can_fuse in (
        (None, True),
        (torch.optim.AdamW, True),
        (torch.optim.RMSprop, False),
    ):
        assert facts_of(pairs(64), optimizer=optimizer).optimizer.can_fuse is can_fuse
    for is_sparse in (False, True):
        model = nn.Sequential(nn.Embedding(10, 2, sparse=is_sparse))
        assert facts_of(words, model=model).optimizer.can_fuse is not is_sparse


class OwnFused(torch.optim.AdamW):
    """Fused by a constructor of its own, which set_fused could not do again."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr, fused=True)


def test_what_the_users_code_has_fused_is_what_is_run_today() -> None:
    def observed(optimizer: Any, model: nn.Module) -> tuple[bool, bool]:
        objects = facts_of(pairs(64), model=model, optimizer=optimizer).objects
        return objects.observed.fused, "fused" in objects.names

    model = nn.Linear(4, 2)
    assert observed(torch.optim.Adam(model.parameters(), fused=True), model) == (True, True)
    assert observed(lambda parameters, lr: torch.optim.Adam(parameters, lr, fused=True), model) == (
        True,
        True,
    )
    assert observed(torch.optim.Adam(model.parameters()), model) == (False, False)
    assert observed(None, model) == (False, False)
    assert observed(OwnFused, model) == (False, False)


def test_cudnns_benchmark_of_the_users_code_is_what_is_run_today_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert _switched_on(optimizer, Device(torch.device("cuda:0"), "cuda")) == {
        "cudnn_benchmark": True
    }
    assert _switched_on(optimizer, open_device("cpu")) == {}
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert _switched_on(optimizer, Device(torch.device("cuda:0"), "cuda")) == {}


class Made(Dataset[tuple[Tensor, int]]):
    """Items by a function of their index."""

    def __init__(self, make: Callable[[int], object], length: int = 10_000) -> None:
        self.make, self.length, self.asked = make, length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked.append(index)
        self.make(index)
        return torch.zeros(4), 0


def nothing(_index: int) -> None:
    """Costs nothing."""


def rarely_slow(index: int) -> None:
    time.sleep(0.05 if index % 16 == 0 else 0.0005)


def test_rare_slow_items_are_seen() -> None:
    facts = facts_of(Made(rarely_slow))
    assert (facts.slow_tail_fraction or 0) > 0.6
    assert (facts.cores_per_item or 9) < 1.0
    even = facts_of(Made(lambda _: time.sleep(0.005)))
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
    monkeypatch.setattr(probing, "usable_cores", lambda: 4)
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
    probe_items(DataLoader(Made(lambda _: seen.add(torch.get_num_threads())), 8), 0.0, Mock())
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
    assert probe_items(DataLoader(Made(draws), 8, shuffle=True), 0.0, Mock()) is not None
    assert drawn() == expected


def test_batches_after_a_look_are_counted_as_they_were_drawn() -> None:
    loader = DataLoader(Made(nothing, length=20), 8)
    feed = Feed(loader)
    sizes = [feed.start().samples]
    assert probe_items(loader, 0.0, Mock()) is not None
    sizes += [feed.take().samples, feed.take().samples]
    assert sizes == [8, 8, 4]


def test_user_code_that_raises_at_a_later_item_leaves_the_facts_unknown() -> None:
    left = iter([None] * 8)  # the first batch works

    def raises(_index: int) -> None:
        if next(left, "over") == "over":
            raise OSError("a broken file")

    looked = probe_items(DataLoader(Made(raises), 8), 0.0, Mock())
    assert looked is None


def test_a_probe_survives_what_the_look_and_only_the_look_meets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = Made(nothing, length=64)
    monkeypatch.setattr(probing, "time_items", Mock(side_effect=RuntimeError("the user's")))
    facts = facts_of(dataset)
    assert (facts.slow_tail_fraction, facts.cores_per_item) == (None, None)


def test_of_slow_items_one_is_enough_to_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_PROBE_S", 0.01)
    dataset, warm = Made(lambda _: time.sleep(0.05)), Mock()
    assert probe_items(DataLoader(dataset, 8), 0.0, warm) is None
    assert (len(dataset.asked), warm.call_count) == (1, 1)


def test_a_stream_is_begun_once_more_only_where_that_is_quick() -> None:
    quick, slow = Mock(side_effect=numbers), Mock(side_effect=numbers)
    assert probe_items(DataLoader(Stream(quick), 8), 0.1, Mock()) is not None
    assert probe_items(DataLoader(Stream(slow), 8), 60.0, Mock()) is None
    assert (quick.call_count, slow.call_count) == (1, 0)


def test_a_sampler_of_the_users_counts_as_a_stream_but_not_torchs() -> None:
    dataset = Made(nothing)
    batches = [[0, 1], [2, 3]]
    assert probe_items(DataLoader(dataset, batch_sampler=batches), 60.0, Mock()) is None
    assert dataset.asked == []
    assert probe_items(DataLoader(dataset, 8, shuffle=True), 60.0, Mock()) is not None


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
        facts = facts_of(Made(nothing), model=model)
    finally:
        torch.backends.cudnn.deterministic = before
    assert facts.is_deterministic is is_asked
