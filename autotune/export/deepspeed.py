"""Export to and read from DeepSpeed's configuration, as JSON.

Source: deepspeed/runtime/config.py, engine.py, constants.py, precision_config.py and
zero/config.py, 0.19. Its three batch sizes must agree: train_batch_size is the product of the micro
batch, the accumulation and the number of processes. Buckets are counted in elements, not bytes. An
optimizer without a type is ignored, with its learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.export.table import (
    CLIPS,
    Defaults,
    Export,
    Reading,
    Table,
    Wanted,
    as_json,
    carried,
    export,
    flattened,
    nested,
    reading,
)

_TOTAL = "train_batch_size"
DEEPSPEED = Table(
    target="deepspeed",
    title="DeepSpeed's file",
    precisions={
        "float32": {"bf16.enabled": False, "fp16.enabled": False},
        "bfloat16": {"bf16.enabled": True, "fp16.enabled": False},
        "float16": {"bf16.enabled": False, "fp16.enabled": True},
    },
    needs_batch_size=True,
    ddp_reason="its engine takes the place of DistributedDataParallel",
    unread={
        "optimizer.type": "trials train with SGD unless you give workload.optimizer",
        "scheduler.type": "trials keep the learning rate as it is",
        "zero_optimization.stage": "ZeRO does not run in trials: they take DistributedDataParallel",
        "gradient_clipping": "gradients are clipped only where your own workload.step does",
        "activation_checkpointing": "make the model so in workload.model",
    },
)
_BUCKET = DEEPSPEED.names["ddp.bucket_cap_mb"].name
_HOOK = DEEPSPEED.names["ddp.comm_hook"].name
_COMMUNICATED = {"fp16", "bf16"}
_MIB = 2**20
_OWN_OPTIMIZERS = {"Adam", "AdamW", "Adagrad", "Lamb", "Lion"}
"""DeepSpeed's own optimizers. Its MuAdam, MuAdamW and MuSGD need another package, and Muon needs to
know its parameters."""
_OWN_FUSED = _OWN_OPTIMIZERS - {"Adagrad"}
"""Own optimizers that are always fused. Source: runtime/engine.py, _configure_basic_optimizer."""
_TORCH_FUSED = {"Adagrad", "SGD"}
"""Optimizers from torch.optim that have the argument `fused`."""
_TORCH_OPTIMIZERS = {
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
}
"""Other optimizers from torch.optim, without those that need a closure or a kind of parameters."""
OPTIMIZERS = _OWN_OPTIMIZERS | _TORCH_OPTIMIZERS
"""Classes that optimizer.type can be."""


def to_deepspeed(found: Wanted) -> Export:
    """Return the configuration file."""
    config = found.config
    ddp = config.ddp_settings
    flat: dict[str, Any] = {
        # It carries the processes; under dp one process trains all devices.
        _TOTAL: config.global_batch_size // config.devices_per_process,
        **carried(found, DEEPSPEED),
    }
    if found.optimizer in OPTIMIZERS:
        flat["optimizer.type"] = found.optimizer
        flat[DEEPSPEED.names["lr"].name] = config.lr
    if config.fused and found.optimizer in _TORCH_FUSED:
        flat[DEEPSPEED.names["fused"].name] = True
    if ddp.bucket_cap_mb is not None:
        elements = round(ddp.bucket_cap_mb * _MIB / _element_bytes(flat))
        flat[_BUCKET] = max(1, elements)
    if ddp.comm_hook in _COMMUNICATED:
        flat[_HOOK] = ddp.comm_hook
    settings = nested(flat)
    return export(
        found,
        DEEPSPEED,
        text=as_json(settings),
        settings=settings,
        defaults=_defaults(found),
        but={"fused"} if found.optimizer in _OWN_FUSED else (),
    )


def from_deepspeed(given: Mapping[str, Any]) -> Reading:
    """Read a configuration; two of the three batch sizes are enough, or one for a single process."""
    plain = flattened(given)
    total = plain.pop(_TOTAL, None)
    dtype = plain.pop("torch_autocast.dtype", None)
    if plain.pop("torch_autocast.enabled", None) is True and isinstance(dtype, str):
        kind = dtype.removeprefix("torch.")
        section = {"bfloat16": "bf16", "float16": "fp16"}.get(kind, "fp32")
        plain[f"{section}.enabled"] = True
    bucket = plain.get(_BUCKET)
    if isinstance(bucket, int | float) and not isinstance(bucket, bool):
        plain[_BUCKET] = bucket * _element_bytes(plain) / _MIB
    if str(plain.get(_HOOK)) not in {*_COMMUNICATED, "auto"}:
        plain.pop(_HOOK, None)  # such as fp32, which is no hook
    found = reading(plain, DEEPSPEED)
    if total == "auto":
        found.take("micro_batch_size", _TOTAL, total)
    elif total is not None:
        _take_total(found, total)
    found.others = tuple(
        sorted(found.others, key=lambda name: name.startswith(("optimizer.", "scheduler.")))
    )
    own = plain.get("optimizer.type")
    if own is not None:
        found.optimizer = str(own)
    return found


def _take_total(found: Reading, total: object) -> None:
    """Read the total batch size as DeepSpeed does, for the number of processes that it implies."""
    micro = found.baseline.get("micro_batch_size")
    steps = found.baseline.get("grad_accum_steps")
    if micro is None and steps is None:
        found.take("micro_batch_size", _TOTAL, total)
        found.unread[_TOTAL] = (
            "is taken for the batch of one process; of several, set baseline.micro_batch_size"
        )
        return
    if not (isinstance(total, int) and isinstance(micro, int) and isinstance(steps, int)):
        found.unread[_TOTAL] = (
            "depends on the number of processes; set baseline.micro_batch_size and grad_accum_steps"
        )
        return
    ranks = total // max(1, micro * steps)
    if ranks < 1 or ranks * micro * steps != total:
        found.unread[_TOTAL] = (
            f"{total} is no multiple of {micro} samples x {steps} steps, as DeepSpeed demands"
        )
    elif ranks > 1:
        found.take_ranks(_TOTAL, ranks, launcher=_TOTAL)


def _element_bytes(flat: Mapping[str, Any]) -> int:
    """Return the bytes of a gradient's element; DeepSpeed keeps the model in the computing precision."""
    return 2 if flat.get("bf16.enabled") is True or flat.get("fp16.enabled") is True else 4


def _defaults(found: Wanted) -> Defaults:
    yield "gradient_clipping", f"1.0: {CLIPS}"
    if found.optimizer in OPTIMIZERS:
        its_adam = (
            "; its Adam is AdamW unless adam_w_mode is false" if found.optimizer == "Adam" else ""
        )
        own = (
            f"all but lr are {found.optimizer}'s own defaults (momentum, betas, eps, weight decay)"
        )
        yield (
            "optimizer.params",
            f"{own}; trials trained with those of your optimizer: add them{its_adam}",
        )
    if found.optimizer in _OWN_FUSED and not found.config.fused:
        reason = f"its {found.optimizer} is a fused kernel of its own; trials had torch's as it is by itself"
        yield "optimizer.type", reason
    if found.has_budget:
        mean = f"{found.config.micro_batch_size} is the mean of your batch sampler's batches"
        yield (
            "train_micro_batch_size_per_gpu",
            f"must be a number of samples: {mean}; give DeepSpeed no training_data, which it would batch by it",
        )
    if found.config.is_half:
        short = "bf16" if found.config.amp_dtype == "bfloat16" else "fp16"
        yield (
            f"{short}.enabled",
            "keeps the model itself in that precision; trials kept it in float32 under autocast",
        )
    if found.config.ddp_settings.bucket_cap_mb is not None:
        yield (
            "zero_optimization.stage",
            "0, under which reduce_bucket_size has no effect; set 1 or more",
        )
