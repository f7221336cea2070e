"""Share data out among ranks: disjoint, equally long, in the same order on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.worker.group import Group
from autotune.worker.loader import EachNth, build_loader


@given(length=st.integers(0, 50), size=st.integers(1, 5))
def test_each_nth(length: int, size: int) -> None:
    shares = [list(EachNth(range(length), Group(rank, size))) for rank in range(size)]
    assert {len(share) for share in shares} == {length // size}
    assert sorted(item for share in shares for item in share) == list(range(length // size * size))
    assert len(EachNth(range(length), Group(0, size))) == length // size


def test_set_epoch() -> None:
    class Told(SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = Told(range(4))
    EachNth(sampler, Group(0, 2)).set_epoch(3)
    assert sampler.epoch == 3
    EachNth(SequentialSampler(range(4)), Group(0, 2)).set_epoch(3)


DATA = TensorDataset(torch.arange(12))


def items(workload: Workload, rank: int, config: TrainingConfig) -> list[list[int]]:
    loader = build_loader(workload, DATA, config, Path("/nowhere"), Group(rank, 2))
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"shuffle": False}, [[0, 2, 4], [6, 8, 10]]),
        ({"sampler": SequentialSampler(range(12))}, [[0, 2, 4], [6, 8, 10]]),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(range(12)), 3, drop_last=True)},
            [[0, 1, 2], [6, 7, 8]],
        ),
    ],
)
def test_share_of_a_rank(parts: dict[str, Any], expected: list[list[int]]) -> None:
    workload = replace(Workload(model=None, dataset=DATA), **parts)
    assert items(workload, 0, TrainingConfig(micro_batch_size=3)) == expected


def test_dataparallel_loads_for_all_devices() -> None:
    config = TrainingConfig(micro_batch_size=3, world_size=2, strategy="dp")
    loader = build_loader(
        Workload(model=None, dataset=DATA, shuffle=False), DATA, config, Path("/nowhere")
    )
    assert [len(batch[0]) for batch in loader] == [6, 6]
