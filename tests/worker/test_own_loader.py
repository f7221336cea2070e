"""Load by copies of the user's DataLoader, and train with an optimizer like the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import threadpoolctl
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from autotune.config.plan import ObjectFacts, Workload, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.protocol.payload import read_payload, write_payload
from autotune.worker.build import WorkloadFault, build_dataset, build_optimizer
from autotune.worker.device import open_device
from autotune.worker.feed import Feed
from autotune.worker.group import Group
from autotune.worker.jobs.probe import probe
from autotune.worker.jobs.stress import largest_batch
from autotune.worker.loader import build_loader

LENGTH = 24


class Pairs(Dataset[tuple[torch.Tensor, int]]):
    """An input and its number."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index)), index


class ReadyMade(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Makes batches of six itself."""

    def __iter__(self) -> Any:
        return iter([(torch.randn(6, 4), torch.arange(6)) for _ in range(4)])


class Sixes(BatchSampler):
    """A batch sampler that is not made as torch's is."""

    def __init__(self) -> None:
        super().__init__(range(LENGTH), 6, drop_last=False)


def numbers(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch[1].tolist() for batch in loader]


def items(loader: DataLoader[Any]) -> list[int]:
    return [number for batch in numbers(loader) for number in batch]


def built(
    workload: Workload, config: TrainingConfig, folder: Path, rank: int = 0, ranks: int = 1
) -> DataLoader[Any]:
    group = Group(rank=rank, size=ranks)
    loader = build_loader(workload, build_dataset(workload), config, folder, group)
    assert isinstance(loader, DataLoader)
    return loader


def probed(workload: Workload, folder: Path) -> WorkloadFacts:
    return probe(workload, TrainingConfig(), open_device("cpu"), folder)


@pytest.mark.parametrize("is_factory", [False, True])
def test_probe_reads_loader_and_optimizer(is_factory: bool, tmp_path: Path) -> None:
    loader = DataLoader(Pairs(), 6, shuffle=True, num_workers=1, prefetch_factor=3)
    model = nn.Linear(4, LENGTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    dataset: Any = (lambda: loader) if is_factory else loader
    write_payload(Workload(model=model, dataset=dataset, optimizer=optimizer), tmp_path / "payload")
    facts = probed(read_payload(tmp_path / "payload"), tmp_path)
    objects = facts.objects
    read = objects.observed.model_dump(include={*objects.names})
    assert read == {
        "micro_batch_size": 6,
        "num_workers": 1,
        "prefetch_factor": 3,
        "persistent_workers": False,
        "in_order": True,
        "multiprocessing_context": None,
        "pin_memory": False,
        "lr": 0.02,
    }
    assert (objects.has_loader, objects.drop_last, facts.dataset_length) == (True, False, LENGTH)
    assert objects.replaced_arguments == ()
    assert (facts.optimizer.name, facts.optimizer.betas) == ("Adam", (0.8, 0.9))
    assert facts.fixed_batch_size is None


@pytest.mark.parametrize("has_loader", [True, False])
def test_parts_next_to_a_loader(has_loader: bool, tmp_path: Path) -> None:
    workload = Workload(
        model=nn.Linear(4, LENGTH),
        dataset=DataLoader(Pairs(), batch_size=6) if has_loader else Pairs(),
        sampler=SequentialSampler,
        collate_fn=torch.utils.data.default_collate,
    )
    found = probed(workload, tmp_path).objects
    assert found.has_loader == has_loader
    assert found.replaced_arguments == (("collate_fn", "sampler") if has_loader else ())


@pytest.mark.parametrize(
    "loader",
    [DataLoader(ReadyMade(), batch_size=None), DataLoader(Pairs(), batch_sampler=Sixes())],
)
def test_fixed_batches(loader: DataLoader[Any], tmp_path: Path) -> None:
    workload = Workload(model=nn.Linear(4, LENGTH), dataset=loader)
    facts = probed(workload, tmp_path)
    assert (facts.fixed_batch_size, facts.objects.observed.micro_batch_size) == (6, 6)
    feed = Feed(built(workload, TrainingConfig(micro_batch_size=6), tmp_path))
    assert [feed.start().samples, *(feed.take().samples for _ in range(5))] == [6] * 6
    copied = built(workload, TrainingConfig(micro_batch_size=6), tmp_path)
    largest = largest_batch(workload, copied, 6, float("inf"))
    assert largest.note is None
    assert largest.batch[1].shape == (6,)


class Threads(Dataset[tuple[torch.Tensor, list[int]]]):
    """An item is what its process has: threads of BLAS, and whether the user's own function ran in it."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, list[int]]:
        pools = threadpoolctl.threadpool_info()
        most = max(pool["num_threads"] for pool in pools if pool["user_api"] == "blas")
        return torch.zeros(4), [most, int(os.environ.get("TEST_OWN_INIT", "0"))]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_threads(start: Any, tmp_path: Path) -> None:
    def own(worker_id: int) -> None:  # goes by a payload to workers that are not forked
        os.environ["TEST_OWN_INIT"] = str(worker_id + 7)

    workload = Workload(
        model=None, dataset=Threads(), worker_init_fn=own, multiprocessing_context=start
    )
    config = TrainingConfig(micro_batch_size=1, num_workers=1, worker_threads=1)
    # all batches: a worker that is ended amid its sending aborts now and then
    seen = [[int(one) for one in found] for _, found in built(workload, config, tmp_path)]
    assert seen == [[1, 7]] * LENGTH
    plain = config.model_copy(update={"worker_threads": None})
    assert built(workload, plain, tmp_path).worker_init_fn is own or start == "spawn"


def test_start_method(tmp_path: Path) -> None:
    def method(**settings: Any) -> str:
        workload = Workload(model=None, dataset=Pairs(), multiprocessing_context="spawn")
        config = TrainingConfig(num_workers=1, **settings)
        return str(built(workload, config, tmp_path).multiprocessing_context.get_start_method())

    assert method() == "spawn"
    assert method(multiprocessing_context="forkserver") == "forkserver"


def test_ranks_share_a_loader(tmp_path: Path) -> None:
    config = TrainingConfig(micro_batch_size=4, world_size=2, strategy="ddp")
    shuffled_batches = BatchSampler(RandomSampler(Pairs()), 6, drop_last=True)

    def share(
        rank: int, config: TrainingConfig = config, ranks: int = 2, **parts: Any
    ) -> DataLoader[Any]:
        loader = DataLoader(Pairs(), **parts)
        return built(Workload(model=None, dataset=loader), config, tmp_path, rank, ranks)

    parts: dict[str, dict[str, Any]] = {
        "random": {"shuffle": True},
        "in order": {},
        "of a group": {"sampler": DistributedSampler(Pairs(), 3, 1)},
        "own": {"sampler": range(LENGTH)},
        "random batches": {"batch_sampler": shuffled_batches},
        "own batches": {"batch_sampler": Sixes()},
    }
    for name, own in parts.items():
        first, second = (items(share(rank, **own)) for rank in (0, 1))
        assert not set(first) & set(second), name
        assert len(first) == len(second) == LENGTH // 2, name
    assert [0, 2, 4, 6] not in numbers(share(0, batch_sampler=shuffled_batches))
    assert numbers(share(1))[0] == [1, 3, 5, 7]
    few = RandomSampler(Pairs(), replacement=True, num_samples=16)
    assert len(share(0, sampler=few)) == 2
    alone = share(0, TrainingConfig(), 1, sampler=DistributedSampler(Pairs(), 3, 1))
    assert sorted(items(alone)) == list(range(LENGTH))


def test_workload_overrides_the_loader(tmp_path: Path) -> None:
    loader = DataLoader(Pairs(), 6, shuffle=True)
    by_budget = Workload(
        model=None,
        dataset=loader,
        batch_sampler=lambda dataset, size: [[0] * size, [len(dataset) - 1] * size],
    )
    assert numbers(built(by_budget, TrainingConfig(micro_batch_size=3), tmp_path)) == [
        [0] * 3,
        [LENGTH - 1] * 3,
    ]
    collated = Workload(
        model=None, dataset=loader, sampler=[1, 2], collate_fn=lambda items: (0, torch.tensor([7]))
    )
    assert numbers(built(collated, TrainingConfig(), tmp_path)) == [[7]]
    without_batches = Workload(
        model=None,
        dataset=DataLoader(Pairs(), batch_size=None),
        batch_sampler=lambda dataset, size: [[1, 2], [3]],
    )
    assert numbers(built(without_batches, TrainingConfig(), tmp_path)) == [[1, 2], [3]]


@pytest.mark.slow
def test_functions_of_spawned_workers(tmp_path: Path) -> None:
    def collate(items: list[Any]) -> Any:  # pickled by name, it would not reach a worker
        return None, torch.tensor([number for _, number in items])

    loader = DataLoader(
        Pairs(), 12, num_workers=1, multiprocessing_context="spawn", collate_fn=collate
    )
    copied = built(
        Workload(model=None, dataset=loader),
        TrainingConfig(micro_batch_size=8, num_workers=1),
        tmp_path,
    )
    assert numbers(copied) == [list(range(start, start + 8)) for start in (0, 8, 16)]


def test_optimizer_is_made_without_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": [model[1].weight], "weight_decay": 0.0},
    ]
    given = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5)
    model(torch.randn(3, 4)).sum().backward()
    given.step()
    write_payload(Workload(model=model, dataset=[1], optimizer=given), tmp_path)
    workload = read_payload(tmp_path)
    assert not workload.optimizer.state
    made = build_optimizer(workload, workload.model, 0.2)
    assert isinstance(made, torch.optim.AdamW)
    assert [(group["lr"], group["weight_decay"]) for group in made.param_groups] == [
        (0.2, 0.5),
        (0.02, 0.0),
    ]
    assert made.param_groups[0]["params"][0] is workload.model[0].weight
    before = workload.model[1].weight.clone()
    workload.model(torch.randn(3, 4)).sum().backward()
    made.step()
    assert not torch.equal(before, workload.model[1].weight)
    assert [len(each.state) for each in (given, workload.optimizer, made)] == [3, 0, 3]


def test_optimizer_of_another_model() -> None:
    given = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    workload = Workload(model=None, dataset=[1], optimizer=given)
    with pytest.raises(WorkloadFault, match=r"\b2\b.*model"):
        build_optimizer(workload, nn.Linear(2, 2), 0.1)


class Scaled(torch.optim.SGD):
    """Has an attribute of its own, and a constructor that asks for it."""

    def __init__(self, parameters: Any, scale: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.scale = scale

    def step(self, closure: Any = None) -> Any:
        assert self.scale == 3.0
        return super().step(closure)


def test_optimizer_keeps_attributes_and_hooks(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    given = Scaled(model.parameters(), scale=3.0)
    given.register_step_post_hook(called)
    torch.optim.lr_scheduler.LambdaLR(
        given, lambda step: 0.0
    )  # puts its own around step, and the rate to 0
    write_payload(Workload(model=model, dataset=[1], optimizer=given), tmp_path)
    workload = read_payload(tmp_path)
    made = build_optimizer(workload, workload.model, 0.2)
    CALLS.clear()
    workload.model(torch.randn(3, 2)).sum().backward()
    made.step()
    assert CALLS
    assert made.param_groups[0]["lr"] == 0.2
    made.register_step_post_hook(called)
    assert len(workload.optimizer._optimizer_step_post_hooks) == 1
    assert given.param_groups[0]["lr"] == 0.0


CALLS: list[Any] = []


def called(*arguments: Any) -> None:
    CALLS.append(arguments)


def test_learning_rate_before_a_schedule(tmp_path: Path) -> None:
    def probed_with(lr: float) -> ObjectFacts:
        model = nn.Linear(4, LENGTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
        loader = DataLoader(Pairs(), 6)
        workload = Workload(model=model, dataset=loader, optimizer=optimizer)
        assert build_optimizer(workload, model, 0.5).param_groups[0]["lr"] == 0.5
        return probed(workload, tmp_path).objects

    assert probed_with(0.3).observed.lr == 0.3
    assert "lr" not in probed_with(0.0).names
