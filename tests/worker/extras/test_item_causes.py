"""Causes inside a loader: what is found in datasets, samplers and collate functions of all kinds."""

from __future__ import annotations

import multiprocessing
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autotune.records.breakdown import LoaderCauses
from autotune.worker.extras import item_causes
from autotune.worker.extras.item_causes import (
    function_of,
    measure_causes,
    plain_collate,
    shards_of,
    shared_handles,
)
from tests.factories import make_loader_costs

CHEAP = make_loader_costs(1e-6)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A table in memory, indexed row by row; a mode changes what a list of indices gives."""

    def __init__(self, mode: str = "plain") -> None:
        self.mode = mode
        self.features = torch.arange(300.0).reshape(100, 3)
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        self.asked.append(index)
        if isinstance(index, list) and self.mode == "raises":
            raise SystemError("one at a time")
        if isinstance(index, list) and self.mode == "other values":
            return self.features[0:1], self.features[0:1, 0]
        if self.mode == "random":
            return self.features[index] + torch.rand(1), self.features[index, 0]
        return self.features[index], self.features[index, 0]


class Files(Dataset[Tensor]):
    """Reads a whole file for a part of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "clip.npy"
        np.save(self.path, np.zeros((64, 4096), np.uint8))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.load(self.path)[index].copy())


class Stream(IterableDataset[Tensor]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(10, 4))


class Closed(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        raise OSError("the stream is gone")


class Collator:
    def __call__(self, items: list[Any]) -> Any:
        return torch.stack([item[0] for item in items])


def collate(items: list[Any], scale: float = 1.0) -> Tensor:
    return scale * torch.stack([item[0] for item in items])


def causes_of(dataset: Any, costs: Any = CHEAP, **arguments: Any) -> LoaderCauses:
    loader = DataLoader(dataset, **({"batch_size": 8} | arguments))
    return measure_causes(loader, costs, 8)


def test_a_table_in_memory_gives_a_batch_at_once() -> None:
    for dataset in (Rows(), TensorDataset(torch.arange(30.0).reshape(10, 3))):
        found = causes_of(dataset)
        assert found.is_in_memory
        assert found.batch_fetch_s is not None
        assert not found.makes_batches
        assert found.copy_s is not None


@pytest.mark.parametrize("mode", ["raises", "other values", "random"])
def test_a_batch_at_once_counts_only_with_the_same_values(mode: str) -> None:
    found = causes_of(Rows(mode))
    assert found.batch_fetch_s is None
    assert found.copy_s is not None, "the upper limit"


def test_costly_items_are_never_asked_for_several_at_once() -> None:
    dataset = Rows()
    assert causes_of(dataset, make_loader_costs(5e-3)).batch_fetch_s is None
    assert not any(isinstance(index, list) for index in dataset.asked)


def test_items_that_take_long_are_not_in_memory() -> None:
    assert not causes_of(Rows(), make_loader_costs(5e-3)).is_in_memory


def test_a_file_read_whole_is_seen_by_its_bytes(tmp_path: Path) -> None:
    found = causes_of(Files(tmp_path))
    assert found.peak_bytes_per_item is not None
    assert found.read_bytes_per_item is not None
    assert found.peak_bytes_per_item >= 64 * 4096
    assert found.read_bytes_per_item >= 64 * 4096
    assert not found.is_in_memory, "cheap, but read from a file"


def test_the_own_reading_of_counters_is_left_out() -> None:
    assert item_causes._read_during(lambda: None) == 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"shuffle": True}, "RandomSampler"),
        ({"sampler": WeightedRandomSampler([1.0] * 100, 50)}, "WeightedRandomSampler"),
        ({"batch_sampler": [[0, 1], [2, 3]], "batch_size": 1}, "list"),
        ({"sampler": BatchSampler(SequentialSampler(range(100)), 8, False), "batch_size": None}, "BatchSampler"),
    ],
)  # fmt: skip
def test_samplers_of_all_kinds_are_timed(arguments: dict[str, Any], name: str) -> None:
    found = causes_of(Rows(), **arguments)
    assert found.sampler == name
    assert found.sampler_s is not None
    assert found.sampler_s > 0
    assert found.makes_batches == (arguments.get("batch_size", 8) is None)


def test_a_long_permutation_is_timed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_causes, "_MOST_DRAWN", 20)
    loader = DataLoader(Rows(), batch_size=4, shuffle=True)
    scale, batches = item_causes._index_batches(loader)
    assert scale == 5.0
    assert sum(map(len, batches)) == 20
    weighted = WeightedRandomSampler([1.0] * 100, 80)
    scale, _ = item_causes._index_batches(DataLoader(Rows(), batch_size=4, sampler=weighted))
    assert scale == 4.0


def test_what_raises_is_left_out() -> None:
    class Sampler(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            raise KeyError("no order")

    found = causes_of(Rows(), sampler=Sampler(range(100)))
    assert found.sampler_s is None
    assert causes_of(Closed()).copy_s is None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (collate, "collate"),
        (partial(collate, scale=2.0), "collate"),
        (Collator(), "Collator.__call__"),
        (Collator().__call__, "Collator.__call__"),
    ],
)
def test_a_collate_function_is_named_with_its_place(function: Any, name: str) -> None:
    found = function_of(function)
    assert found.function == name
    assert found.place.startswith("test_item_causes.py:")


def test_a_function_in_c_has_no_place() -> None:
    assert function_of(torch.stack).place == ""


def test_only_the_users_collate_function_is_compared_with_a_plain_one() -> None:
    assert causes_of(Rows()).collate is None
    found = causes_of(Rows(), collate_fn=collate).collate
    assert found is not None
    assert found.plain_s is not None
    without = causes_of(Rows(), collate_fn=collate)
    assert without.batch_fetch_s is None, "it may do more than stack"


def test_plain_collating_pads_and_fails_on_foreign_objects() -> None:
    items = [{"ids": np.arange(n), "more": [1] * n, "label": n} for n in (2, 5, 3)]
    batch = plain_collate(items)
    assert batch["ids"].shape == (3, 5)
    assert batch["more"].shape == (3, 5)
    assert batch["label"].tolist() == [2, 5, 3]
    with pytest.raises(TypeError):
        plain_collate([object(), object()])


def test_locks_and_open_files_are_found_by_name(tmp_path: Path) -> None:
    dataset: Any = Rows()
    assert shared_handles(dataset) == ()
    dataset.itself = dataset
    dataset.lock = multiprocessing.Lock()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        dataset.inner = Rows()
        dataset.inner.archive = archive
        assert set(shared_handles(dataset)) == {"lock (Lock)", "archive (ZipFile)"}


def test_shards_are_those_of_a_stream_or_of_one_inside() -> None:
    assert shards_of(Stream(num_shards=3)) == 3
    assert shards_of(Stream(n_shards=1)) == 1
    assert shards_of(Stream(dataset=Stream(num_shards=2))) == 2
    assert shards_of(Stream(num_shards="all")) is None
    assert shards_of(Stream()) is None
    assert shards_of(Rows()) is None
    cyclic = Stream()
    vars(cyclic)["dataset"] = cyclic
    assert shards_of(cyclic) is None


def test_a_stream_has_no_sampler() -> None:
    found = causes_of(Stream(num_shards=4))
    assert (found.sampler_s, found.stream_shards, found.is_in_memory) == (None, 4, False)


def test_nothing_is_begun_after_the_deadline() -> None:
    dataset = Rows()
    loader = DataLoader(dataset, batch_size=8)
    assert measure_causes(loader, CHEAP, 8, ends_at=0.0).sampler_s is None
    assert not dataset.asked
