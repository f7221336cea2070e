"""Make the user's batch sampler for each batch size or token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.worker.build import WorkloadFault
from autotune.worker.group import Group
from autotune.worker.loader import (
    build_loader,
    is_factory,
    made_batches,
    mean_samples,
    takes_batch_size,
    takes_budget,
)
from tests.factories.lengths import ByBudget, ByLength, Sequences, padded_rows

DATA = Sequences([1 + number % 32 for number in range(640)])
BUDGET = TrainingConfig(max_tokens=64)


def of_both(dataset: Sequences, batch_size: int, max_tokens: int) -> list[list[int]]:
    return [batch[:batch_size] for batch in ByBudget(dataset, max_tokens)]


def loaded(
    sampler: Any, config: TrainingConfig, folder: Path, group: Group | None = None
) -> list[Tensor]:
    workload = Workload(model=None, dataset=None, batch_sampler=sampler, collate_fn=padded_rows)
    groups = () if group is None else (group,)
    return [batch["input_ids"] for batch in build_loader(workload, DATA, config, folder, *groups)]


@pytest.mark.parametrize("size", [7, 256])
def test_batch_sizes(size: int, tmp_path: Path) -> None:
    batches = loaded(ByLength, TrainingConfig(micro_batch_size=size), tmp_path)
    assert {len(batch) for batch in batches} == {size}
    assert len(batches) == len(DATA) // size


@pytest.mark.parametrize("budget", [32, 500])
def test_budgets_are_filled(budget: int, tmp_path: Path) -> None:
    sizes = [
        batch.numel() for batch in loaded(ByBudget, TrainingConfig(max_tokens=budget), tmp_path)
    ]
    assert max(sizes) <= budget
    assert max(sizes) > budget / 2


def test_ranks_share_the_batches_of_a_budget(tmp_path: Path) -> None:
    class Ordered(ByBudget):
        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batches)

    config = BUDGET.model_copy(update={"strategy": "ddp", "world_size": 2})
    shares = [loaded(Ordered, config, tmp_path, Group(size=2, rank=rank)) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == len(Ordered(DATA, 64)) // 2
    assert max(batch.numel() for share in shares for batch in share) <= 64


def test_batch_size_next_to_a_budget(tmp_path: Path) -> None:
    config = BUDGET.model_copy(update={"micro_batch_size": 3})
    assert max(map(len, loaded(of_both, config, tmp_path))) == 3
    two_devices = config.model_copy(update={"strategy": "dp", "world_size": 2})
    assert two_devices.loader_max_tokens == 128


@pytest.mark.parametrize(
    ("sampler", "budget", "size"),
    [
        (ByBudget, True, False),
        (of_both, True, True),
        (lambda data, *, max_tokens: ByBudget(data, max_tokens), True, False),
        (
            lambda data, max_tokens, batch_size=8: ByBudget(data, max_tokens * batch_size),
            True,
            False,
        ),
        (ByLength, False, True),
        (ByBudget(DATA, 64), False, False),
        ([[0, 1]], False, False),
        (None, False, False),
    ],
)
def test_parameters_of_a_factory(sampler: Any, budget: bool, size: bool) -> None:
    assert (takes_budget(sampler), takes_batch_size(sampler)) == (budget, size)
    assert is_factory(sampler) == (budget or size)


@pytest.mark.parametrize(
    ("sampler", "config"),
    [(ByBudget, TrainingConfig()), (ByLength, BUDGET), ([[0]], BUDGET), (None, BUDGET)],
)
def test_budget_needs_its_sampler(
    sampler: Callable[..., Any] | None, config: TrainingConfig, tmp_path: Path
) -> None:
    with pytest.raises(WorkloadFault, match=r"baseline\.max_tokens"):
        loaded(sampler, config, tmp_path)


def test_mean_samples() -> None:
    assert mean_samples([[1], [2, 3, 4]], 4) == 2
    assert mean_samples([], 4) is None
    shortest_first = [[1]] * 1500 + [[1] * 9] * 500
    assert mean_samples(shortest_first, 6000) == 3
    assert mean_samples(made_batches(ByBudget, DATA, BUDGET), len(DATA)) == pytest.approx(
        640 / len(ByBudget(DATA, 64))
    )
