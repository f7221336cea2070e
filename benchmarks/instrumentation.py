"""What measuring costs: the product's window loop against a bare one over the same objects, for benchmarks/fidelity.py.

Both run in this process, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import ceil, inf
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune import TrainingConfig
from autotune.config.plan import Workload
from autotune.worker.device import open_device
from autotune.worker.feed import Feed
from autotune.worker.step import Trainer, infer_step, make_trainer
from autotune.worker.window import Run, train_block

__all__ = ["measure_instrumentation"]

_STRETCH_S = 0.1
_WARM_UP_BATCHES = 500
_CHEAP_CLASSES = 10
_CHEAP_ITEMS = 1 << 18


def measure_instrumentation(*, rounds: int) -> dict[str, Any]:
    """Blocks of the window's loop and stretches of a bare one over the same loader, model and optimizer, in turns.

    On two jobs with data in memory: the MLP of configs/digits.yaml at its batch of 32, whose steps are the cheapest
    that an example has, and a linear layer on 16 numbers at a batch of 16, as cheap as a step can be made. What is
    derived between blocks is outside of a window's clock, and so outside of this one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            name: _compare(*_job(model(), batch), rounds)
            for name, (model, batch) in _CHEAP_JOBS.items()
        }
    finally:
        torch.set_num_threads(threads)


def _compare(loader: DataLoader[Any], trainer: Trainer, rounds: int) -> dict[str, Any]:
    feed, batches = Feed(loader), _endless(loader)
    feed.start()
    feed.watches_queue = False
    run = Run(feed, trainer, 0, ends_at=inf)
    count = max(1, ceil(_STRETCH_S / _bare(trainer, batches, _WARM_UP_BATCHES)))
    block_s, bare_s = list[float](), list[float]()
    for number in range(rounds):
        for side in ("block", "bare") if number % 2 == 0 else ("bare", "block"):
            if side == "block":
                block_s.append(train_block(run, count).block.seconds / count)
            else:
                bare_s.append(_bare(trainer, batches, count))
    cost_s = median(block - bare for block, bare in zip(block_s, bare_s, strict=True))
    return {
        "cost_fraction": cost_s / median(bare_s),
        "cost_per_batch_s": cost_s,
        "bare_batch_s": median(bare_s),
        "batches_of_a_stretch": count,
        "block_s": [round(one, 8) for one in block_s],
        "bare_s": [round(one, 8) for one in bare_s],
    }


def _bare(trainer: Trainer, batches: Iterator[Any], count: int) -> float:
    """Seconds of a batch in a loop that only trains."""
    begun = perf_counter()
    for batch in islice(batches, count):
        trainer.train(batch)
    return (perf_counter() - begun) / count


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, _CHEAP_CLASSES),
    )


_CHEAP_JOBS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP, batch 32": (_mlp, 32),
    "linear layer, batch 16": (lambda: nn.Linear(16, _CHEAP_CLASSES), 16),
}


def _job(model: nn.Module, batch_size: int) -> tuple[DataLoader[Any], Trainer]:
    features = next(model.parameters()).shape[1]
    data = TensorDataset(
        torch.randn(_CHEAP_ITEMS, features), torch.randint(_CHEAP_CLASSES, (_CHEAP_ITEMS,))
    )
    config = TrainingConfig(micro_batch_size=batch_size)
    loader: DataLoader[Any] = DataLoader(data, drop_last=True, **config.dataloader_kwargs())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = infer_step(Workload(model=model, dataset=data), next(iter(loader)))
    return loader, make_trainer(model, optimizer, step, config, open_device("cpu"))


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader
