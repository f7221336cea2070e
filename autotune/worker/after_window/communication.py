"""What exchanging gradients takes of a step: the step with and without exchange, and the exchange alone.

Takes a Trainer whose model is a DistributedDataParallel, and batches that lie on the device; hands on a Communication.
All ranks come here together and take the same number of steps. Nothing here changes what a window has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch import distributed

from autotune.records.ranks import Communication
from autotune.settings.ddp_config import TORCH_BUCKET_CAP_MB, TORCH_FIRST_BUCKET_MB, DdpConfig
from autotune.settings.training_config import TrainingConfig
from autotune.worker.measure.step import Trainer
from autotune.worker.setup.process_group import Group

__all__ = ["measure_communication"]

_ROUNDS = 3  # of both kinds of step in turns, so that a drift hits both
_FEWEST_STEPS = 3
_MOST_STEPS = 200
_MIB = 2**20
_HALVED = frozenset({"fp16", "bf16"})


def measure_communication(trainer: Trainer, held: Sequence[Any], group: Group, *, seconds: float) -> Communication:
    """Time whole optimizer steps in turns, with the exchange and without, and all-reduces of the gradients' bytes.

    Args:
        trainer: Where training stands; its ranks' weights differ afterwards.
        held: Batches on the device.
        group: All ranks; each must call this.
        seconds: Length of each of the three stretches.

    Raises:
        RuntimeError: there are no batches on some rank, or the exchange can't be held back.
    """
    if not group.all(bool(held) and trainer.hold_back is not None):
        raise RuntimeError("each rank must hold batches, and its model must have no_sync")
    exchanged = _stretch(trainer, held, group, seconds / _ROUNDS)
    steps = exchanged.steps
    together, alone = [], []
    for _ in range(_ROUNDS):
        together.append(exchanged.run(steps, is_alone=False))
        alone.append(exchanged.run(steps, is_alone=True))
    sizes = _bucket_bytes(trainer, trainer.config)
    return Communication(
        step_s=min(together),
        step_alone_s=min(alone),
        exchange_s=_exchange_s(sizes, trainer, group, seconds),
        bytes_exchanged=sum(sizes),
    )


class _Stretch:
    """Optimizer steps on batches in turns."""

    def __init__(self, trainer: Trainer, held: Sequence[Any], group: Group) -> None:
        self.trainer, self.group = trainer, group
        self.supply = cycle(held)
        self.steps = _FEWEST_STEPS

    def run(self, steps: int, *, is_alone: bool) -> float:
        """Seconds of an optimizer step of the slowest rank; all begin together."""
        trainer = self.trainer
        trainer.is_alone = is_alone
        self.group.wait()
        trainer.device.synchronize()
        begun = perf_counter()
        for batch in islice(self.supply, steps * trainer.config.grad_accum_steps):
            trainer.train(batch)
        trainer.device.synchronize()
        own_s = (perf_counter() - begun) / steps
        trainer.is_alone = False
        return self.group.most(own_s)


def _stretch(trainer: Trainer, held: Sequence[Any], group: Group, seconds: float) -> _Stretch:
    """Warmed up, with as many steps a round as the time holds; the same on all ranks."""
    stretch = _Stretch(trainer, held, group)
    step_s = stretch.run(_FEWEST_STEPS, is_alone=False)  # the slowest rank's, and so the same on all
    stretch.steps = max(_FEWEST_STEPS, min(_MOST_STEPS, ceil(seconds / max(step_s, 1e-6))))
    return stretch


def _bucket_bytes(trainer: Trainer, config: TrainingConfig) -> list[int]:
    """Bytes of each bucket on its way: gradients in the order of the backward pass, as DDP joins them."""
    wanted = config.ddp or DdpConfig()
    first = wanted.first_bucket_mb or wanted.bucket_cap_mb or TORCH_FIRST_BUCKET_MB
    share = 0.5 if wanted.comm_hook in _HALVED else 1.0
    buckets, filled, cap = list[int](), 0.0, first
    for parameter in reversed([one for one in trainer.model.parameters() if one.requires_grad]):
        filled += parameter.numel() * parameter.element_size() * share
        if filled >= cap * _MIB * share:
            buckets.append(int(filled))
            filled, cap = 0.0, wanted.bucket_cap_mb or TORCH_BUCKET_CAP_MB
    return [*buckets, int(filled)] if filled else buckets


def _exchange_s(sizes: Sequence[int], trainer: Trainer, group: Group, seconds: float) -> float:
    """Seconds of all-reducing buckets of these sizes one after the other, with nothing beside it."""
    device = trainer.device.torch_device
    tensors = [torch.ones(max(1, size // 4), dtype=torch.float32, device=device) for size in sizes]

    def exchange() -> None:
        works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            if work is not None:
                work.wait()

    once_s = _timed(exchange, 1, trainer, group)
    rounds = max(_FEWEST_STEPS, min(_MOST_STEPS, ceil(seconds / max(once_s, 1e-6))))
    return _timed(exchange, rounds, trainer, group)


def _timed(exchange: Callable[[], None], rounds: int, trainer: Trainer, group: Group) -> float:
    group.wait()
    trainer.device.synchronize()
    begun = perf_counter()
    for _ in range(rounds):
        exchange()
    trainer.device.synchronize()
    return group.most((perf_counter() - begun) / rounds)
