"""Export to and read from DeepSpeed's configuration, as JSON.

Source: deepspeed/runtime/config.py, engine.py, constants.py, precision_config.py and
zero/config.py, 0.19. Its three batch sizes must agree: train_batch_size is the product of the micro
batch, the accumulation and the number of processes. Buckets are counted in elements, not bytes. An
optimizer without a type is ignored, with its learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.export.table import (
    CLIPS,
    Differing,
    Export,
    Reading,
    Table,
    Unread,
    Wanted,
    as_json,
    carried,
    dropped,
    nested,
    reading,
)

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
_LR = "optimizer.params.lr"
_FUSED = "optimizer.params.fused"
_BUCKET = "zero_optimization.reduce_bucket_size"
_HOOK = "communication_data_type"
_COMMUNICATED = {"fp16", "bf16"}
_MIB = 2**20
_OWN_OPTIMIZERS = {"Adam", "AdamW", "Adagrad", "Lamb", "Lion"}
"""DeepSpeed's own optimizers. Its MuAdam, MuAdamW and MuSGD need another package, and Muon needs to
know its parameters."""
_OWN_FUSED = {"Adam", "AdamW", "Lamb", "Lion"}
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
_FOREIGN = (
    "DeepSpeed's file knows no optimizer {}; make it in your script with lr={!r}, and hand it to "
    "deepspeed.initialize(optimizer=...)"
)


def to_deepspeed(found: Wanted) -> Export:
    """Return the configuration file."""
    flat: dict[str, Any] = {
        "train_batch_size": found["micro_batch_size"] * found["grad_accum_steps"] * found.processes,
        **carried(found, DEEPSPEED),
    }
    taken = ["world_size"]  # train_batch_size carries it
    if found.optimizer in OPTIMIZERS:
        flat |= {"optimizer.type": found.optimizer, _LR: found["lr"]}
        taken.append("lr")
    if found["fused"] and found.optimizer in _TORCH_FUSED:
        flat[_FUSED] = True
    if found["fused"] and found.optimizer in _TORCH_FUSED | _OWN_FUSED:
        taken.append("fused")
    if found.is_ddp and found["ddp.bucket_cap_mb"] is not None:
        flat[_BUCKET] = max(1, round(found["ddp.bucket_cap_mb"] * _MIB / _element_bytes(flat)))
        taken.append("ddp.bucket_cap_mb")
    if found.is_ddp and found["ddp.comm_hook"] in _COMMUNICATED:
        flat[_HOOK] = found["ddp.comm_hook"]
        taken.append("ddp.comm_hook")
    settings = nested(flat)
    is_foreign = found.optimizer is not None and found.optimizer not in OPTIMIZERS
    foreign = {"lr": _FOREIGN.format(found.optimizer, found["lr"])} if is_foreign else {}
    lost = dropped(found, DEEPSPEED, also=foreign, but=taken)
    defaults = (*_defaults(found),)
    return Export(
        target="deepspeed",
        text=as_json(settings),
        settings=settings,
        dropped=lost,
        defaults=defaults,
    )


def from_deepspeed(given: Mapping[str, Any]) -> Reading:
    """Read a configuration; two of the three batch sizes are enough, or one for a single process."""
    plain = dict(given)
    total = plain.pop("train_batch_size", None)
    lr = plain.pop(_LR, None)
    bucket = plain.pop(_BUCKET, None)
    hook = plain.pop(_HOOK, None)
    fused = plain.pop(_FUSED, None)
    autocast = plain.pop("torch_autocast.enabled", None), plain.pop("torch_autocast.dtype", None)
    if autocast[0] is True and isinstance(autocast[1], str):
        dtype = autocast[1].removeprefix("torch.")
        section = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")
        plain[f"{section}.enabled"] = True
    found = reading(plain, DEEPSPEED)
    baseline = dict(found.baseline)
    origins = dict(found.origins)
    unread = list(found.unread)
    for setting, name, value in (
        ("lr", _LR, lr),
        ("fused", _FUSED, fused),
        ("ddp.bucket_cap_mb", _BUCKET, bucket),
        ("ddp.comm_hook", _HOOK, hook),
    ):
        if value == "auto":
            unread.append(
                Unread(name, f"auto is decided when training starts; set baseline.{setting}")
            )
        elif value is not None and not (
            setting == "ddp.comm_hook" and str(value) not in _COMMUNICATED
        ):
            baseline[setting] = value
            origins[setting] = name
    if isinstance(bucket, int | float) and not isinstance(bucket, bool):
        baseline["ddp.bucket_cap_mb"] = bucket * _element_bytes(plain) / _MIB
    unread += _batches(baseline, origins, total)
    others = tuple(
        name for name in found.others if not name.startswith(("optimizer.", "scheduler."))
    )
    hidden = tuple(name for name in found.others if name not in others)
    others = (*others, *hidden)
    kind = given.get("optimizer.type")
    optimizer = None if kind is None else str(kind)
    return Reading(
        baseline=baseline, origins=origins, unread=tuple(unread), others=others, optimizer=optimizer
    )


def _batches(baseline: dict[str, Any], origins: dict[str, str], total: object) -> Iterator[Unread]:
    """Compute the batch sizes as DeepSpeed does, for the number of processes that they imply."""
    name = "train_batch_size"
    micro = baseline.get("micro_batch_size")
    steps = baseline.get("grad_accum_steps")
    if total == "auto":
        yield Unread(name, "auto is decided when training starts; set baseline.micro_batch_size")
    elif (
        isinstance(total, int)
        and isinstance(micro, int)
        and isinstance(steps, int)
        and micro * steps > 0
    ):
        ranks, rest = divmod(total, micro * steps)
        if rest == 0 and ranks > 1:
            baseline |= {"world_size": ranks, "strategy": "ddp"}
            origins |= {"world_size": name, "strategy": name}
        elif rest or not ranks:
            yield Unread(
                name,
                f"{total} is no multiple of {micro} samples x {steps} steps, as DeepSpeed demands",
            )
    elif total is not None and micro is None and steps is None:
        baseline["micro_batch_size"] = total
        origins["micro_batch_size"] = name
        yield Unread(
            name, "is taken for the batch of one process; of several, set baseline.micro_batch_size"
        )
    elif total is not None:
        yield Unread(
            name,
            "depends on the number of processes; set baseline.micro_batch_size and grad_accum_steps",
        )


def _element_bytes(flat: Mapping[str, Any]) -> int:
    """Return the bytes of a gradient's element; DeepSpeed keeps the model in the computing precision."""
    return 2 if flat.get("bf16.enabled") is True or flat.get("fp16.enabled") is True else 4


def _defaults(found: Wanted) -> Iterator[Differing]:
    yield Differing("gradient_clipping", f"1.0: {CLIPS}")
    if found.optimizer in OPTIMIZERS:
        its_adam = (
            "; its Adam is AdamW unless adam_w_mode is false" if found.optimizer == "Adam" else ""
        )
        yield Differing(
            "optimizer.params",
            f"all but lr are {found.optimizer}'s own defaults (momentum, betas, eps, weight "
            f"decay); trials trained "
            f"with those of your optimizer: add them{its_adam}",
        )
    if found.optimizer in _OWN_FUSED and not found["fused"]:
        reason = f"its {found.optimizer} is a fused kernel of its own; trials had torch's as it is by itself"
        yield Differing("optimizer.type", reason)
    if found.has_budget:
        yield Differing(
            "train_micro_batch_size_per_gpu",
            f"a number of samples, which DeepSpeed demands: {found['micro_batch_size']} is the "
            f"mean of your batch "
            "sampler's batches; give it no training_data, of which it would make batches of that "
            "size",
        )
    if found["amp_dtype"] in {"bfloat16", "float16"}:
        short = "bf16" if found["amp_dtype"] == "bfloat16" else "fp16"
        yield Differing(
            f"{short}.enabled",
            "keeps the model itself in that precision; trials kept it in float32 under autocast",
        )
    if found.is_ddp and found["ddp.bucket_cap_mb"] is not None:
        yield Differing(
            "zero_optimization.stage",
            "0, under which reduce_bucket_size has no effect; set 1 or more",
        )
