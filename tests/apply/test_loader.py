"""Copy the user's DataLoader with other settings; everything else is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
)

from autotune.apply.loader import fixed_batches, inner_loader, loader_like, observed_settings
from autotune.config.training_config import TrainingConfig


class Numbers(Dataset[int]):
    """Its items are their indices."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Yields its numbers in order."""

    def __iter__(self) -> Any:
        return iter(range(20))


class Fives(BatchSampler):
    """A batch sampler that is not made as torch's is."""

    def __init__(self, length: int) -> None:
        super().__init__(range(length), 5, drop_last=False)


class Pairs:
    """What a framework puts around a loader."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)


def negative(items: list[int]) -> list[int]:
    return [-item for item in items]


SETTINGS = TrainingConfig().loader_settings


@given(
    batch_size=st.integers(1, 25),
    wanted=st.integers(1, 25),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_copy_with_another_batch_size(
    batch_size: int, wanted: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    def made(size: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(
            Numbers(),
            size,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=negative,
            generator=generator,
        )

    given_loader = made(batch_size)
    copied = loader_like(given_loader, SETTINGS, wanted)
    assert list(copied) == list(made(wanted))
    assert (copied.batch_size, given_loader.batch_size) == (wanted, batch_size)
    assert len(copied) == len(made(wanted))


def test_observed_settings() -> None:
    loader = DataLoader(
        Numbers(),
        4,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        in_order=False,
        multiprocessing_context="forkserver",
        timeout=7,
    )
    assert observed_settings(loader) == {
        "micro_batch_size": 4,
        "num_workers": 2,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "in_order": False,
        "multiprocessing_context": "forkserver",
        "pin_memory": False,
    }
    config = TrainingConfig(**observed_settings(loader))
    assert observed_settings(config.loader(loader)) == observed_settings(loader)
    assert config.loader(loader).timeout == 7
    plain = config.model_copy(update={"multiprocessing_context": None})
    # None keeps the loader's own
    assert observed_settings(plain.loader(loader)) == observed_settings(loader)
    spawning = config.model_copy(update={"multiprocessing_context": "spawn"})
    assert observed_settings(spawning.loader(loader))["multiprocessing_context"] == "spawn"
    alone = loader_like(loader, SETTINGS, 4)
    assert observed_settings(alone) == {
        "micro_batch_size": 4,
        "num_workers": 0,
        "pin_memory": False,
    }


def test_copy_of_a_running_loader_starts_again() -> None:
    loader = DataLoader(Numbers(), 5, num_workers=1, persistent_workers=True)
    running = iter(loader)
    assert next(running).tolist() == [0, 1, 2, 3, 4]
    copied = TrainingConfig(micro_batch_size=10, num_workers=1, persistent_workers=True).loader(
        loader
    )
    assert next(iter(copied)).tolist() == list(range(10))
    assert next(running).tolist() == [5, 6, 7, 8, 9]


def test_fixed_batches_keep_their_size() -> None:
    ready_made = DataLoader(Numbers(), batch_size=None)
    own = DataLoader(Numbers(), batch_sampler=Fives(20))
    for loader in (ready_made, own):
        assert fixed_batches(loader)
        assert "micro_batch_size" not in observed_settings(loader)
    assert [len(batch) for batch in loader_like(own, SETTINGS, 2)] == [5] * 4
    assert list(loader_like(ready_made, SETTINGS, 2)) == list(range(20))


def test_plain_batch_sampler_is_rebuilt() -> None:
    sampler = BatchSampler(RandomSampler(Numbers()), 3, drop_last=True)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    assert not fixed_batches(loader)
    assert [len(batch) for batch in loader_like(loader, SETTINGS, 8)] == [8, 8]


def test_stream_takes_another_batch_size() -> None:
    loader = DataLoader(Stream(), 3, drop_last=True)
    assert [batch.tolist() for batch in loader_like(loader, SETTINGS, 8)] == [
        list(range(8)),
        list(range(8, 16)),
    ]


def test_samplers_are_replaced() -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    assert [batch.tolist() for batch in loader_like(loader, SETTINGS, 2, sampler=[5, 4, 3])] == [
        [5, 4],
        [3],
    ]
    copied = loader_like(loader, SETTINGS, 2, batch_sampler=[[1], [2, 3, 4]])
    assert [batch.tolist() for batch in copied] == [[1], [2, 3, 4]]


def test_inner_loader() -> None:
    loader, dataset = DataLoader(Numbers()), Numbers()
    outer = DataLoader(Numbers())
    outer.base_dataloader = loader  # as accelerate's have
    assert inner_loader(outer) is loader
    assert inner_loader(Pairs(outer)) is loader
    assert inner_loader(dataset) is dataset
    with pytest.raises(ValueError, match=r"\(negative\)"):
        inner_loader(Pairs(loader, negative))
