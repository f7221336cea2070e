"""Measure the exchange of gradients: steps with it, steps without it, and the exchange alone.

In: a trainer whose model is a DistributedDataParallel, and batches on the device. Out: a
Communication. All ranks come here together and take the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed

from autotune.config.training_config import TORCH_BUCKET_CAP_MB, TORCH_FIRST_BUCKET_MB, DdpConfig
from autotune.records.measurement import Communication
from autotune.worker.group import Group
from autotune.worker.step import Trainer

_ROUNDS = 3
"""Rounds of both kinds of step in turn, so that a drift affects both; the fastest counts. Source:
our convention."""
_FEWEST_STEPS = 3
"""Steps of a round at least, as for peaks of memory. Source: our convention."""
_HALVED = frozenset({"fp16", "bf16"})


def measure_communication(
    trainer: Trainer, held: Sequence[Any], group: Group, *, seconds: float
) -> Communication:
    """Time optimizer steps with and without the exchange, in turn, and the all-reduces alone.

    Args:
        trainer: The trainer; its ranks' weights differ afterwards.
        held: Batches on the device.
        group: All ranks; each must call this function.
        seconds: Seconds of each of the three measurements.

    Raises:
        RuntimeError: Some rank has no batches, its model has no no_sync, or it has no memory for
            the all-reduces.
    """
    if not group.all(bool(held) and trainer.accumulator.no_sync is not None):
        raise RuntimeError("each rank must hold batches, and its model must have no_sync")
    batches = cycle(held)

    def train() -> None:
        for batch in islice(batches, trainer.config.grad_accum_steps):
            trainer.train(batch)

    steps = _repeats(_mean_s(train, _FEWEST_STEPS, trainer, group), seconds / _ROUNDS)
    with_exchange = []
    without = []
    for _ in range(_ROUNDS):
        with_exchange.append(_mean_s(train, steps, trainer, group))
        with trainer.without_exchange():
            without.append(_mean_s(train, steps, trainer, group))
    sizes = _bucket_bytes(trainer)
    return Communication(
        step_s=min(with_exchange),
        step_alone_s=min(without),
        exchange_s=_exchange_s(sizes, trainer, group, seconds),
        bytes_exchanged=sum(sizes),
    )


def _repeats(once_s: float, seconds: float) -> int:
    """Return the number of repeats that fill some seconds, within bounds."""
    # The upper bound limits a measurement whose first, timed step was too fast by chance.
    return max(_FEWEST_STEPS, min(200, ceil(seconds / max(once_s, 1e-6))))


def _mean_s(work: Callable[[], None], repeats: int, trainer: Trainer, group: Group) -> float:
    """Measure the mean seconds of some work on the slowest rank; all ranks begin together."""
    group.wait()
    trainer.device.synchronize()
    begun = perf_counter()
    for _ in range(repeats):
        work()
    trainer.device.synchronize()
    return group.most((perf_counter() - begun) / repeats)


def _bucket_bytes(trainer: Trainer) -> list[int]:
    """Return the bytes of each bucket that is sent: gradients in backward order, as DDP joins them."""
    wanted = trainer.config.ddp or DdpConfig()
    cap = wanted.first_bucket_mb or wanted.bucket_cap_mb or TORCH_FIRST_BUCKET_MB
    share = 0.5 if wanted.comm_hook in _HALVED else 1.0
    buckets = list[int]()
    filled = 0.0
    for parameter in reversed(list(trainer.model.parameters())):
        if not parameter.requires_grad:
            continue
        filled += parameter.nbytes * share
        if filled >= cap * 2**20 * share:
            buckets.append(int(filled))
            filled = 0.0
            cap = wanted.bucket_cap_mb or TORCH_BUCKET_CAP_MB
    return [*buckets, int(filled)] if filled else buckets


def _exchange_s(sizes: Sequence[int], trainer: Trainer, group: Group, seconds: float) -> float:
    """Measure the seconds of all-reducing buckets of these sizes, with nothing else running.

    Raises:
        RuntimeError: Some rank has no memory for them.
    """
    tensors = _alike(sizes, trainer.device.torch_device, group)

    def exchange() -> None:
        for work in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
            if work is not None:
                work.wait()

    once_s = _mean_s(exchange, 1, trainer, group)
    return _mean_s(exchange, _repeats(once_s, seconds), trainer, group)


def _alike(sizes: Sequence[int], device: torch.device, group: Group) -> list[Tensor]:
    """Allocate tensors of these sizes on all ranks, or on none.

    They take as much memory as all gradients. If only one rank ran out of memory, the others would
    wait in the first all-reduce, so all agree before it.
    """
    tensors = list[Tensor]()
    refusal = None
    try:
        tensors.extend(
            torch.ones(max(1, size // 4), dtype=torch.float32, device=device) for size in sizes
        )
    except RuntimeError as error:  # out of memory, of whatever kind of device
        refusal = error
    if not group.all(refusal is None):
        raise RuntimeError(
            "each rank must have memory for a second copy of its gradients"
        ) from refusal
    return tensors
