"""The largest samples are found as training reads them, and trained on in turns with ordinary batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.messages.trials import largest_samples_not_batched
from autotune.note import Note
from autotune.protocol.messages import StressJob
from autotune.records.trial import StressFigures
from autotune.worker.device import open_device
from autotune.worker.feed import Feed
from autotune.worker.jobs import stress
from autotune.worker.jobs.stress import LargestBatch, bytes_of, largest_batch, train_on_largest
from autotune.worker.loader import build_loader
from tests.factories import make_process
from tests.factories.lengths import ByBudget, Sequences, padded_rows

LENGTHS = [1 + (7 * index) % 50 for index in range(50)]
"""Each length from 1 to 50 once."""


class Texts(Dataset[Tensor]):
    """Sequences of many lengths."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(LENGTHS[index])


class TextStream(IterableDataset[Tensor]):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.ones(length) for length in LENGTHS)


def padded(texts: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)


def mean_step(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch.mean(1, keepdim=True)).mean()
    return loss


NOWHERE = Path("/nowhere")
BOTH = pytest.mark.parametrize("dataset", [Texts(), TextStream()], ids=["by index", "a stream"])


def find(
    dataset: Any = None,
    *,
    workers: int = 0,
    batch_size: int = 4,
    stop_at: float = inf,
    **parts: Any,
) -> LargestBatch:
    """Return the batch of the largest samples of Texts, or of another dataset."""
    dataset = dataset or Texts()
    workload = Workload(model=None, dataset=dataset, **({"collate_fn": padded} | parts))
    config = TrainingConfig(micro_batch_size=batch_size, num_workers=workers)
    loader = build_loader(workload, dataset, config, NOWHERE)
    return largest_batch(workload, loader, batch_size, stop_at)


def lengths_in(found: LargestBatch) -> list[int]:
    return sorted(found.batch.count_nonzero(1).tolist())


def train(
    *, window_s: float = 0.0, ends_at: float = inf, accumulated: int = 1, **parts: Any
) -> StressFigures:
    """Return the figures of a stress run in this process; keywords are parts of the workload."""
    job = StressJob(
        process=make_process(NOWHERE),
        payload=NOWHERE,
        config=TrainingConfig(micro_batch_size=4, grad_accum_steps=accumulated),
        train_s=window_s,
    )
    usual: dict[str, Any] = {"dataset": Texts(), "collate_fn": padded, "step": mean_step}
    workload = Workload(model=nn.Linear(1, 1), **(usual | parts))
    return train_on_largest(workload, job, open_device("cpu"), NOWHERE, ends_at)


@BOTH
def test_the_largest_samples_make_the_batch(dataset: Any) -> None:
    found = find(dataset)
    assert lengths_in(found) == [47, 48, 49, 50]
    assert sorted(found.sizes) == [4 * length for length in range(1, 51)]
    assert found.note is None


def test_they_are_read_by_the_loaders_workers() -> None:
    class Once(Texts):
        is_read_here = False

        def __getitem__(self, index: int) -> Tensor:
            Once.is_read_here = torch.utils.data.get_worker_info() is None
            return super().__getitem__(index)

    assert lengths_in(find(Once(), workers=1)) == [47, 48, 49, 50]
    assert not Once.is_read_here


def test_a_look_that_ends_early_ends_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(Feed, "stop", lambda _: events.append("stopped"))
    find(stop_at=-inf)
    assert events == ["stopped"] * 2, "of the look, and of the batch"


def test_a_sampler_of_the_users_says_which_samples_there_are() -> None:
    short = [index for index, length in enumerate(LENGTHS) if length <= 10]
    found = find(sampler=lambda _: SubsetRandomSampler(short))
    assert lengths_in(found) == [7, 8, 9, 10]


def test_of_a_batch_samplers_batches_the_largest_as_padded_is_taken() -> None:
    batches = [[at, at + 1] for at in range(0, 50, 2)]
    heaviest = max(batches, key=lambda batch: max(LENGTHS[at] for at in batch))
    found = find(batch_sampler=batches)
    assert found.batch.count_nonzero(1).tolist() == [LENGTHS[at] for at in heaviest]
    made = find(
        batch_sampler=lambda data, size: BatchSampler(SequentialSampler(data), size, drop_last=True)
    )
    assert len(made.batch) == 4


def test_of_a_batch_sampler_no_more_batches_are_taken_than_hold_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stress, "_MOST_SIZED", 10)
    taken: list[int] = []

    def endless() -> Iterator[list[int]]:
        for batch in cycle([[0, 1, 2], [3], [4, 5, 6, 7]]):
            taken.append(len(batch))
            yield batch

    found = find(batch_sampler=endless())
    assert taken == [3, 1, 4, 3]
    assert lengths_in(found) == sorted(LENGTHS[at] for at in (4, 5, 6, 7))


def test_a_batch_sampler_that_does_not_keep_to_its_length_is_not_drawn_for_ever() -> None:
    taken: list[int] = []

    class Endless:
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[list[int]]:
            for at in cycle(range(50)):
                taken.append(at)
                assert len(taken) <= 10
                yield [at]

    assert find(batch_sampler=Endless()).batch is not None
    assert len(taken) == 10


@pytest.mark.parametrize("budget", [64, 128, 1000])
def test_at_every_token_budget_the_largest_bucket_is_found(budget: int) -> None:
    data, config = Sequences([4] * 200 + [50] * 12), TrainingConfig(max_tokens=budget)
    workload = Workload(model=None, dataset=data, collate_fn=padded_rows, batch_sampler=ByBudget)
    loader = build_loader(workload, data, config, NOWHERE)
    found = largest_batch(workload, loader, config.micro_batch_size, inf)
    largest = max(
        len(batch) * max(data.lengths[at] for at in batch) for batch in ByBudget(data, budget)
    )
    assert found.batch["input_ids"].numel() == largest
    assert len(found.sizes) == len(data)


def test_of_a_long_epoch_that_is_sorted_batches_from_all_over_it_are_sized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stress, "_MOST_SIZED", 20)
    order = sorted(range(50), key=LENGTHS.__getitem__)
    random.seed(1)
    found = find(batch_sampler=[order[at : at + 2] for at in range(0, 50, 2)])
    assert len(found.sizes) == 20
    assert max(found.sizes) > 4 * 30, "not the first, shortest ones alone"


def test_a_stress_run_looks_for_a_share_of_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []

    def look(*arguments: Any) -> LargestBatch:
        ends.append(arguments[-1] - perf_counter())
        return LargestBatch(sizes=[], note=Note(code="nothing"))

    monkeypatch.setattr(stress, "largest_batch", look)
    for left_s in (1000.0, 10.0):
        train(ends_at=perf_counter() + left_s)
    assert ends == pytest.approx([4.0, 2.0], abs=0.2)


@BOTH
def test_few_samples_seen_fill_a_batch_in_turns(dataset: Any) -> None:
    found = find(dataset, stop_at=0.0, batch_size=20)
    lengths = found.batch.count_nonzero(1).tolist()
    assert len(found.sizes) == (8 if isinstance(dataset, Texts) else 1)
    assert len(lengths) == 20
    assert sorted(set(lengths)) == sorted(size // 4 for size in found.sizes)
    assert lengths.count(max(lengths)) == -(-20 // len(found.sizes)), "the largest first"


@BOTH
def test_a_batch_holds_no_more_than_an_epoch(dataset: Any) -> None:
    assert len(find(dataset, batch_size=80).batch) == 50


def test_a_batch_of_more_than_a_look_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "_MOST_SIZED", 16)
    found = find(batch_size=40)
    assert (len(found.sizes), len(found.batch)) == (16, 40)


def test_samples_that_do_not_go_together_are_said_and_refute_nothing() -> None:
    def of_one_size(texts: list[Tensor]) -> Tensor:
        if {len(text) for text in texts} == {47, 48, 49, 50}:
            raise ValueError("never together")
        return padded(texts)

    figures = train(collate_fn=of_one_size)
    assert figures.note == largest_samples_not_batched(cause="ValueError: never together")
    assert figures.steps >= 3
    assert (figures.items_seen, figures.largest_batch_bytes) == (50, 0)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.AcceleratorError("CUDA error: out of memory")], ids=str
)
def test_a_lack_of_memory_is_no_remark(error: Exception) -> None:
    with pytest.raises(type(error)):
        find(collate_fn=Mock(side_effect=error))


def test_ordinary_batches_and_the_largest_are_trained_on_in_turns() -> None:
    seen: list[tuple[int, float]] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append((batch.shape[1], float(batch.sum())))
        return mean_step(model, batch.mul_(2.0))

    figures = train(step=step)
    assert figures.steps == len(seen) == 6
    assert seen[::2] == [(50, 47 + 48 + 49 + 50)] * 3, "whatever the step changes"
    assert (figures.items_seen, figures.median_item_bytes) == (50, 102)
    assert figures.largest_item_bytes == 200
    assert figures.largest_batch_bytes == 4 * 50 * 4
    assert figures.memory.peak_bytes > 0


def test_at_least_three_optimizer_steps_are_made_with_accumulation_too() -> None:
    assert train(accumulated=4).steps == 3


def test_a_deadline_that_is_near_ends_it_after_a_step() -> None:
    assert train(ends_at=0.0, window_s=60.0).steps == 1


@given(
    st.lists(st.integers(0, 2**40) | st.floats(), max_size=5),
    st.text("ab", max_size=5),
    st.integers(0, 9),
)
def test_the_size_of_a_sample_is_that_of_all_that_it_holds(
    numbers: list[float], text: str, length: int
) -> None:
    item = {
        "text": text,
        "pair": (torch.zeros(length), [numbers]),
        "raw": torch.zeros(length).numpy(),
    }
    assert bytes_of(item) == len(text) + 8 * length + 8 * len(numbers)


def test_a_sample_of_the_users_own_class_is_measured_by_what_it_holds() -> None:
    class Graph:
        def __init__(self) -> None:
            self.nodes, self.name = torch.zeros(5), "graph"

    assert bytes_of(Graph()) == 5 * 4 + len("graph")
    assert bytes_of(object()) == 0
