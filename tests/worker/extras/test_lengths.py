"""Lengths of items are read at random, and batches of several lengths are trained on, as the loader collates them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.records.measurement import Lengths, Tokens
from autotune.worker.device import open_device
from autotune.worker.extras import lengths as timed
from autotune.worker.extras.lengths import length_of_item, measure_lengths
from autotune.worker.feed import Feed
from autotune.worker.loader import build_loader
from autotune.worker.step import open_trainer
from tests.factories.lengths import (
    ByLength,
    Sequences,
    Tagger,
    rows_with_mask,
    tagging_step,
)

_TICK_S = 5e-4


@pytest.fixture(autouse=True)
def _clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock take as long, so that no busy machine keeps steps from being timed."""
    if "real_clock" not in request.fixturenames:
        monkeypatch.setattr(timed, "perf_counter", count(step=_TICK_S).__next__)


@pytest.fixture
def real_clock() -> None:
    """For what depends on the seconds that pass."""


VARIED = [(4, 8, 16, 64)[number % 4] for number in range(400)]


def found(
    lengths: Any = VARIED,
    *,
    is_trained: bool = True,
    config: TrainingConfig | None = None,
    padded: Sequence[int] = (16, 64, 64),
    padding: float | None = 0.6,
    ends_at: float = inf,
    **parts: Any,
) -> Lengths | None:
    """Return what is measured with a configuration, from a loader of batches of eight."""
    own = TrainingConfig(micro_batch_size=8)
    dataset = Sequences(lengths) if isinstance(lengths, list) else lengths
    known: dict[str, Any] = {"collate_fn": rows_with_mask, "step": tagging_step}
    workload = Workload(model=None, dataset=None, **(known | parts))
    loader = build_loader(workload, dataset, own, Path("/nowhere"))
    assert isinstance(loader, DataLoader)
    trainer = None
    if is_trained:
        batch = Feed(loader).start().batch
        trainer = open_trainer(workload, Tagger(), batch, own, open_device("cpu"))
    tokens = Tokens(per_sample=60.0, batches=9, shortest=64, longest=64, padding=padding)
    return measure_lengths(
        loader, config or own, tokens, padded, trainer, seconds=0.002, ends_at=ends_at
    )


def mean_of(lengths: Lengths | None) -> float:
    assert lengths is not None
    return lengths.mean


def timed_lengths(lengths: Lengths | None) -> set[int]:
    assert lengths is not None
    return {step.padded for step in lengths.steps}


@pytest.mark.parametrize(
    ("item", "length"),
    [
        (torch.ones(5, dtype=torch.long), 5),
        (np.ones(6, dtype=np.int32), 6),
        ([1, 2, 3], 3),
        (([1, 2, 3], 0), 3),
        ({"labels": [1], "input_ids": [1, 2]}, 2),
        ({"words": torch.ones(4, dtype=torch.int32), "label": 1}, 4),
        ((torch.ones(5), 1), None),
        (torch.ones(5, dtype=torch.bool), None),
        (torch.ones(3, 8, dtype=torch.uint8), None),
        ("some words", None),
        ([], None),
        (3, None),
    ],
)
def test_the_length_is_that_of_the_first_row_of_whole_numbers(
    item: Any, length: int | None
) -> None:
    assert length_of_item(item) == length


def test_batches_of_several_lengths_are_timed() -> None:
    lengths = found()
    assert lengths is not None
    assert (lengths.items, lengths.longest) == (400, 64)
    assert lengths.mean == pytest.approx(23)
    assert {step.padded for step in lengths.steps} == {4, 8, 16, 64}
    assert all(step.longest == step.padded and step.seconds > 0 for step in lengths.steps)
    assert lengths.padding == 0.6
    assert lengths.buckets.device_time is not None
    assert lengths.packed is not None
    assert lengths.packed.row_tokens == 64


@pytest.mark.parametrize("lengths", [[16] * 400, [4, 8] * 10])
def test_equal_or_few_lengths_give_nothing(lengths: Any) -> None:
    assert found(lengths) is None


def test_items_without_lengths_give_nothing() -> None:
    items = (torch.ones(3),) * 400
    assert found(items, is_trained=False, collate_fn=torch.stack) is None


class Sorted(ByLength):
    """Batches in order of their lengths."""

    def __iter__(self) -> Any:
        return iter(self.batches)


class WholeBatches(Sequences):
    """Hands out the items of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


LONG = [at for at, length in enumerate(VARIED) if length >= 16]


@pytest.mark.parametrize(
    ("lengths", "parts", "mean"),
    [
        (VARIED, {"batch_sampler": Sorted}, 23),  # sorting hides no lengths
        (VARIED, {"sampler": SubsetRandomSampler(LONG)}, 40),  # of those that are left in
        (WholeBatches(VARIED), {"sampler": range(len(VARIED))}, 23),
    ],
)
def test_items_are_read_at_random(lengths: Any, parts: dict[str, Any], mean: float) -> None:
    assert mean_of(found(lengths, **parts)) == pytest.approx(mean)


def test_lengths_end_where_the_collate_function_cuts() -> None:
    def cut(items: list[Tensor]) -> dict[str, Tensor]:
        return rows_with_mask([item[:8] for item in items])

    lengths = found(collate_fn=cut, padded=[8, 8])
    assert mean_of(lengths) == pytest.approx(7)
    assert lengths is not None
    assert lengths.longest == 8


@pytest.mark.usefixtures("real_clock")
def test_steps_that_are_too_slow_are_given_up() -> None:
    def slow(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch)
        time.sleep(0.1)
        return tagging_step(model, batch)

    seen: list[Any] = []
    lengths = found(step=slow)
    assert lengths is not None
    assert lengths.steps == ()
    assert len(seen) < 4


class Stream(IterableDataset[Tensor]):
    """The same rows, one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Sequences(VARIED))


def test_a_stream_whose_batches_are_counted_is_collated_without_its_count() -> None:
    assert timed_lengths(found(Stream(), drop_last=False)) == {4, 8, 16, 64}


def test_texts_have_the_lengths_that_the_collate_function_gives_them() -> None:
    def tokenised(texts: list[str]) -> dict[str, Tensor]:
        return rows_with_mask([torch.ones(len(text.split()), dtype=torch.long) for text in texts])

    lengths = found(tuple("word " * length for length in VARIED), collate_fn=tokenised)
    assert mean_of(lengths) == pytest.approx(23)
    assert timed_lengths(lengths) == {4, 8, 16, 64}


@pytest.mark.parametrize("changes", [{"max_tokens": 512}, {"compile": True}])
def test_batches_that_another_length_would_change_otherwise_are_not_timed(
    changes: dict[str, Any],
) -> None:
    config = TrainingConfig.model_validate({"micro_batch_size": 8} | changes)
    lengths = found(config=config, padding=None)
    assert lengths is not None
    assert lengths.steps == ()
    assert lengths.buckets.device_time is None
    assert lengths.padding == pytest.approx(1 - 23 / 60)


@pytest.mark.usefixtures("real_clock")
def test_near_the_deadline_nothing_is_timed() -> None:
    assert found(is_trained=False, ends_at=perf_counter() - 1.0) is None


def test_the_step_is_the_users_own() -> None:
    seen: list[int] = []

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch["input_ids"].shape[1])
        return tagging_step(model, batch)

    assert found(step=step) is not None
    assert set(seen) == {4, 8, 16, 64}
