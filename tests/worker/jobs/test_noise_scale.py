"""Norms of gradients at a checkpoint: of a quadratic whose noise is known, and of models with odd gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from autotune.analysis.noise_scale import FEWEST_GROUPS, noise_scale_of
from autotune.protocol.jobs import NoiseScaleJob
from autotune.records.noise_scale import GradientNorms
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from autotune.worker.jobs.noise_scale import measure_gradients
from autotune.worker.setup.device import open_device
from tests.factories import make_process

SIZE = 20


class Point(nn.Module):
    """A point, and what has no gradient beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(SIZE))
        self.unused, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, targets: Tensor) -> Tensor:
        return ((self.at - targets) ** 2).sum(dim=1).mean() / 2


class Lookup(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 4, sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.table(index).sum(dim=1).mean()
        return out


def targets(noise: float) -> TensorDataset:
    """Points around (1, 0, 0, ...), the trace of whose covariance is `noise`."""
    draw = torch.Generator().manual_seed(1)
    mean = torch.zeros(SIZE)
    mean[0] = 1.0
    return TensorDataset(mean + torch.randn(20_000, SIZE, generator=draw) * (noise / SIZE) ** 0.5)


def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loss: Tensor = model(batch[0])
    return loss


def beyond(model: nn.Module) -> None:
    """Put the point at distance 2 from its target."""
    with torch.no_grad():
        model.get_parameter("at").fill_(0.0)[0] = 3.0


def measured(
    tmp_path: Path, seconds: float = 1.0, settings: Mapping[str, Any] | None = None, **parts: Any
) -> GradientNorms:
    given = {"model": Point, "dataset": targets(32.0), "step": step, **parts}
    config = TrainingConfig.model_validate({"micro_batch_size": 8, **(settings or {})})
    job = NoiseScaleJob(payload=tmp_path, process=make_process(tmp_path), config=config, seconds=seconds)
    return measure_gradients(Workload(**given), job, open_device("cpu"), tmp_path, perf_counter() + 60.0)


@pytest.mark.parametrize("noise", [8.0, 32.0, 128.0])
def test_the_noise_scale_of_a_quadratic_is_its_covariance_over_its_gradient(tmp_path: Path, noise: float) -> None:
    norms = measured(tmp_path, dataset=targets(noise))
    assert norms.micro_batch_samples == 8
    found = noise_scale_of(norms)
    assert found is not None
    assert found.low * 0.9 <= noise <= found.high * 1.1
    assert found.value == pytest.approx(noise, rel=0.5)
    assert not found.has_checkpoint


def test_gradients_are_those_at_the_checkpoint(tmp_path: Path) -> None:
    far = measured(tmp_path, dataset=targets(0.0), checkpoint=beyond)
    assert far.has_checkpoint
    assert far.groups[0] == pytest.approx((4.0, 4.0))
    file = tmp_path / "half.pt"
    point = Point()
    with torch.no_grad():
        point.at[0] = 0.5
    torch.save(point.state_dict(), file)
    assert measured(tmp_path, dataset=targets(0.0), checkpoint=str(file)).groups[0] == pytest.approx((0.25, 0.25))


def test_weights_stay_as_they_are_and_sparse_gradients_count(tmp_path: Path) -> None:
    model = Lookup()
    before = model.table.weight.detach().clone()
    index = torch.arange(400).reshape(100, 4) % 50
    norms = measured(tmp_path, 0.1, model=model, dataset=TensorDataset(index))
    assert torch.equal(before, model.table.weight)
    assert all(one > 0 and mean > 0 for one, mean in norms.groups)
    assert all(mean <= one * (1 + 1e-6) for one, mean in norms.groups)


class Own(Sampler[int]):
    """Nobody knows what it draws."""

    def __init__(self, drawn: Sequence[int]) -> None:
        self.drawn = drawn

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn)

    def __len__(self) -> int:
        return len(self.drawn)


class Slow(TensorDataset):
    """Each item takes a while."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)  # type: ignore[no-untyped-call] # torch


def test_a_loader_that_is_slower_than_the_device_gets_groups_that_fit_into_the_time(tmp_path: Path) -> None:
    norms = measured(
        tmp_path, 1.6, dataset=Slow(*targets(32.0).tensors), settings={"num_workers": 1, "prefetch_factor": 8}
    )
    assert len(norms.groups) >= FEWEST_GROUPS
    assert norms.micro_batches <= 20, "a batch takes 16 ms, and a group 100"


@pytest.mark.parametrize(
    ("sampler", "epoch_samples"),
    [
        (None, 100),
        (lambda data: SubsetRandomSampler(range(40)), 40),
        (lambda data: WeightedRandomSampler(torch.ones(100).tolist(), 100), None),
        (lambda data: RandomSampler(data, num_samples=300), None),
        (lambda data: Own(range(100)), None),
    ],
    ids=["all", "some", "with replacement", "three times", "own sampler"],
)
def test_an_epoch_has_as_many_samples_as_are_drawn_once(
    tmp_path: Path, sampler: Any, epoch_samples: int | None
) -> None:
    norms = measured(tmp_path, 0.05, dataset=TensorDataset(targets(32.0).tensors[0][:100]), sampler=sampler)
    assert norms.epoch_samples == epoch_samples
