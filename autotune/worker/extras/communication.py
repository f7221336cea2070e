"""What exchanging gradients takes of a step: the step with and without exchange, and the exchange alone.

Takes a Trainer whose model is a DistributedDataParallel, and batches that lie on the device; hands
on a Communication. All ranks come here together and take the same number of steps. Nothing here
changes what a window has measured.
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

# Of both kinds of step in turns, so that a drift hits both; the fastest counts: our own convention.
_ROUNDS = 3
_FEWEST_STEPS = 3  # our own convention: as many as peaks of memory cover
_HALVED = frozenset({"fp16", "bf16"})


def measure_communication(
    trainer: Trainer, held: Sequence[Any], group: Group, *, seconds: float
) -> Communication:
    """Time whole optimizer steps in turns, with the exchange and without, and all-reduces of the gradients' bytes.

    Args:
        trainer: Where training stands; its ranks' weights differ afterwards.
        held: Batches on the device.
        group: All ranks; each must call this.
        seconds: Length of each of the three stretches.

    Raises:
        RuntimeError: there are no batches on some rank, or its model has no no_sync.
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
    """How often something is done in so many seconds; within bounds."""
    # bounds a stretch whose first, timed step was a fluke
    return max(_FEWEST_STEPS, min(200, ceil(seconds / max(once_s, 1e-6))))


def _mean_s(work: Callable[[], None], repeats: int, trainer: Trainer, group: Group) -> float:
    """Mean seconds of some work on the slowest rank, and so the same on all ranks; all begin together."""
    group.wait()
    trainer.device.synchronize()
    begun = perf_counter()
    for _ in range(repeats):
        work()
    trainer.device.synchronize()
    return group.most((perf_counter() - begun) / repeats)


def _bucket_bytes(trainer: Trainer) -> list[int]:
    """Bytes of each bucket on its way: gradients in the order of the backward pass, as DDP joins them."""
    wanted = trainer.config.ddp or DdpConfig()
    cap = wanted.first_bucket_mb or wanted.bucket_cap_mb or TORCH_FIRST_BUCKET_MB
    share = 0.5 if wanted.comm_hook in _HALVED else 1.0
    buckets = list[int]()
    filled = 0.0
    for parameter in reversed(
        [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    ):
        filled += parameter.nbytes * share
        if filled >= cap * 2**20 * share:
            buckets.append(int(filled))
            filled = 0.0
            cap = wanted.bucket_cap_mb or TORCH_BUCKET_CAP_MB
    return [*buckets, int(filled)] if filled else buckets


def _exchange_s(sizes: Sequence[int], trainer: Trainer, group: Group, seconds: float) -> float:
    """Seconds of all-reducing buckets of these sizes one after the other, with nothing beside it.

    Raises:
        RuntimeError: some rank has no memory for them.
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

    They take as much memory as all gradients. A rank that alone ran out of it would leave the
    others waiting in the first all-reduce, so they agree before it.
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
