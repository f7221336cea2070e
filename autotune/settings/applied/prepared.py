"""A model as trials train it, and the process set up as theirs: what TrainingConfig.prepare and arrange do.

Comes in: a configuration, and a built model. Goes out: what the training loop calls in its place.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from autotune.settings.applied.compile_cache import compile_cache_variables
from autotune.settings.applied.cores.numa import addresses_of_ranks, bind_rank, can_bind, is_bound_by_launcher
from autotune.settings.applied.cores.processor import usable_cores
from autotune.settings.applied.float32_precision import tf32_products
from autotune.settings.applied.parallel import check_group, distributed, replicated
from autotune.settings.applied.process import (
    local_rank,
    local_ranks,
    own_device,
    set_cudnn_benchmark,
    set_current,
    set_threads,
)
from autotune.settings.ddp_config import DdpConfig

if TYPE_CHECKING:
    from autotune.settings.training_config import TrainingConfig

__all__ = ["arranged", "prepared"]


def prepared(config: TrainingConfig, model: nn.Module, device: str | torch.device | None) -> nn.Module:
    """See TrainingConfig.prepare."""
    check_group(config.process_count)
    if config.cudnn_benchmark:  # off leaves the user's own: a configuration that nobody has searched is off by default
        set_cudnn_benchmark(is_on=True)
    place = own_device(is_rank=config.process_count > 1) if device is None else torch.device(device)
    set_current(place)
    binding = config.numa_binding
    if binding is not None and not can_bind(place):
        warnings.warn(
            "numa_binding has no effect: processes are bound to cores on Linux alone, beside CUDA and ROCm devices or "
            "on the CPU",
            stacklevel=3,
        )
        binding = None
    if binding is None:
        set_threads(config.intra_op_threads, local_ranks(config.process_count) if config.process_count > 1 else None)
    else:
        _bind(config, binding, place)
    if config.amp_dtype == "tf32":
        tf32_products().__enter__()
    if config.compile:
        os.environ.update(compile_cache_variables())
    return arranged(config, model, place)


def _bind(config: TrainingConfig, binding: str, device: torch.device) -> None:
    """Bind this process as a trial's rank is bound, and set its threads; what a launcher has bound stays so.

    Raises:
        ConfigError: it can't be bound.
    """
    ranks = local_ranks(config.process_count) if config.process_count > 1 else 1
    threads = usable_cores()
    if binding != "exclusive" or ranks == 1 or not is_bound_by_launcher():
        rank, count = local_rank() if ranks > 1 else 0, config.world_size if config.strategy == "dp" else 1
        threads = bind_rank(
            binding,
            rank,
            addresses_of_ranks(device, rank, ranks, count),
            is_alone=config.process_count == 1,
        )
    set_threads(config.intra_op_threads or max(1, threads), None)


def arranged(config: TrainingConfig, model: nn.Module, device: torch.device, *, is_trial: bool = False) -> nn.Module:
    """See TrainingConfig.arrange."""
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack the keyword alone
    if config.strategy == "dp":
        model = replicated(model, device, config.world_size)
    elif config.strategy == "ddp":
        model = distributed(model, device, config.ddp or DdpConfig(), is_trial=is_trial)
    if not config.compile:
        return model
    return torch.compile(model, mode=config.compile_mode)  # type: ignore[return-value] # an OptimizedModule is a Module
