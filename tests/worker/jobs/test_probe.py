"""One look at a workload finds its facts, and does not run through all of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from autotune.config.plan import Workload, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.worker.device import Device, open_device
from autotune.worker.feed import Delivery
from autotune.worker.jobs import probe as probing
from autotune.worker.jobs.probe import _switched_on, probe, warm_page_cache


class Huge(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(4), index % 2


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
    assert facts_of(Huge(), shuffle=False).dataset_length == 10**12  # it would never end


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


class TwoBranches(nn.Module):
    """Takes one of its two branches, and looks at frozen weights."""

    def __init__(self, *, takes_both: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.frozen, self.takes_both = nn.Linear(4, 4).requires_grad_(False), takes_both

    def forward(self, inputs: Tensor) -> Tensor:
        first: Tensor = self.branches[0](inputs)
        return first + self.branches[1](inputs) if self.takes_both else first


@pytest.mark.parametrize("takes_both", [False, True])
def test_parameters_that_no_gradient_reaches_are_found_in_one_step(takes_both: bool) -> None:
    data = pairs(8)
    assert (
        facts_of(data, model=TwoBranches(takes_both=takes_both)).has_unused_parameters
        is not takes_both
    )


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
    monkeypatch.setattr(
        probing, "GRAPH_KINDS", ("cpu",)
    )  # else a page cache that is found warm ends it at two batches
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
