"""A model on several devices: DataParallel in one process, or DistributedDataParallel among the ranks of a group.

Takes a built model; hands on what the training loop calls in its place. Arguments that the
installed torch lacks are left out, found by DDP's own signature.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import ConfigError
from autotune.messages.space import first_bucket_without_effect
from autotune.note import Note
from autotune.settings.ddp_config import TORCH_BUCKET_CAP_MB, DdpConfig

__all__ = ["check_group", "comm_hook", "ddp_arguments", "distributed", "replicated", "without_effect_here"]

_AS_TORCH_HAS_THEM = {"gradient_as_bucket_view", "static_graph", "find_unused_parameters", "bucket_cap_mb"}


def replicated(model: nn.Module, device: torch.device, count: int) -> nn.Module:
    """The model in DataParallel, over so many devices from this one on."""
    first = device.index or 0
    return _DataParallel(model, device_ids=list(range(first, first + count)))


def check_group(process_count: int) -> None:
    """See that a process group, where one is open, is of the size that a configuration was measured with.

    Raises:
        ConfigError: it is of another.
    """
    group: Any = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() != process_count:
        raise ConfigError(
            f"a process group must be as large as the configuration's, {process_count}, since its global batch and "
            f"learning rate rest on that, but it has {group.get_world_size()}; start training with {process_count} "
            f"processes (on one machine: torchrun --nproc-per-node {process_count}), or search with `world_size` as "
            "you train"
        )


def distributed(model: nn.Module, device: torch.device, wanted: DdpConfig, *, is_trial: bool = False) -> nn.Module:
    """The model in DistributedDataParallel, with its hook for the exchange. The process group must be open."""
    if not is_trial and without_effect_here(wanted):  # a trial notes it
        warnings.warn(f"ddp.first_bucket_mb has no effect with torch {torch.__version__}", stacklevel=4)
    ids = None if device.index is None else [device.index]
    parallel = DistributedDataParallel(model, device_ids=ids, **ddp_arguments(wanted))
    if wanted.comm_hook is not None:
        parallel.register_comm_hook(*comm_hook(wanted.comm_hook, is_trial=is_trial))
    return parallel


def ddp_arguments(wanted: DdpConfig) -> dict[str, Any]:
    """Arguments of DistributedDataParallel for these settings, as far as the installed torch has them."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    arguments = wanted.model_dump(include=_AS_TORCH_HAS_THEM, exclude_none=True)
    if wanted.first_bucket_mb is not None and "bucket_cap_mb_list" in known:
        arguments["bucket_cap_mb_list"] = [wanted.first_bucket_mb, wanted.bucket_cap_mb or TORCH_BUCKET_CAP_MB]
        arguments.pop("bucket_cap_mb", None)
    if not wanted.broadcast_buffers:  # true is torch's own, and to name the old argument makes a newer torch warn
        newer = "forward_sync_buffers"
        arguments[newer if newer in known else "broadcast_buffers"] = False
    return {name: value for name, value in arguments.items() if name in known}


def without_effect_here(wanted: DdpConfig) -> tuple[Note, ...]:
    """Settings that the installed torch can't follow."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if wanted.first_bucket_mb is not None and "bucket_cap_mb_list" not in known:
        return (first_bucket_without_effect(torch.__version__),)
    return ()


class _DataParallel(nn.DataParallel[nn.Module]):
    """DataParallel whose replicas compute in the precision of the autocast that the model is called under.

    Each replica runs in a thread of its own, and what a thread casts to is its own. torch enters autocast there again,
    but without the dtype: in CUDA's default, float16, and so without the GradScaler that float16 needs. Source:
    torch/nn/parallel/parallel_apply.py, torch 2.9 to 2.13.

    These threads launch all devices' kernels under one GIL, and each step copies the model to the devices: where
    launching holds a step, several devices are slower than one. Searches begin with DistributedDataParallel, which has
    neither (first_guesses in study/proposals.py), and one trial then shows what DataParallel reaches.
    Source: pytorch.org, "CUDA semantics", "Use nn.parallel.DistributedDataParallel instead of multiprocessing or
    nn.DataParallel".
    """

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run each replica on its share of the batch."""
        kind = self.src_device_obj.type
        dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

        def in_precision(replica: nn.Module) -> Callable[..., Any]:
            def run(*args: Any, **named: Any) -> Any:  # autocast's own decorator would copy the replica's attributes
                with torch.autocast(kind, dtype=dtype, enabled=is_on):
                    return replica(*args, **named)

            return run

        cast: Any = [in_precision(replica) for replica in replicas]  # torch only calls them
        return super().parallel_apply(cast, inputs, kwargs)


def comm_hook(name: str, *, is_trial: bool) -> tuple[Any, Any]:
    """State and hook. Source: torch.distributed.algorithms.ddp_comm_hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None)
        if is_trial:
            state.start_powerSGD_iter = 2  # torch's own is 1000 iterations, far beyond a trial
        return state, powerSGD_hook.powerSGD_hook
    return None, {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]
