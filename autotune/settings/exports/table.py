"""One target's table: its names for our settings, by which a configuration is written and its own file read.

Comes in: a Wanted. Goes out: the target's settings, and what is dropped. What a table leaves out is dropped by name, so
that a setting that comes later can't be lost in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.settings.exports.export import LOADER, Dropped, Wanted

__all__ = ["Name", "Table", "carried", "dropped"]

_DDP = "ddp."
_ALWAYS = frozenset({"micro_batch_size", "lr"})
"""Settings that have no value of torch's own: they must be told wherever a target can't take them."""
_MEAN = "{value} is no size of a batch, but what one of max_tokens={budget} holds on average"
_IN_YOUR_CODE = {
    "micro_batch_size": "your DataLoader takes it: batch_size={value!r}",
    "max_tokens": "your own batch sampler takes it: max_tokens={value!r}",
    "grad_accum_steps": "your loop makes {value} backward passes for one optimizer step",
    "lr": "your optimizer takes it: lr={value!r}",
    "channels_last": "in your script: model = model.to(memory_format=torch.channels_last)",
    "compile": "in your script: model = torch.compile(model)",
    "compile_mode": "in your script: torch.compile(model, mode={value!r})",
    "cudnn_benchmark": "in your script: torch.backends.cudnn.benchmark = True",
    "fused": "your optimizer takes it: fused=True",
    "worker_threads": "your DataLoader takes it: worker_init_fn=config.dataloader_kwargs()['worker_init_fn']",
    "numa_binding": "config.prepare binds in your own loop; beside NVIDIA's and AMD's GPUs: torchrun --numa-binding "
    "{value}",
    "intra_op_threads": "in your script: torch.set_num_threads({value}), or OMP_NUM_THREADS={value} before the command",
    "world_size": "start {value} processes: torchrun --nproc-per-node {value}",
    "strategy": "it has no DataParallel; search again with strategy ddp",
    "ddp.bucket_cap_mb": "DistributedDataParallel takes it: bucket_cap_mb={value!r}",
    "ddp.first_bucket_mb": "DistributedDataParallel takes it where torch has bucket_cap_mb_list=[{value!r}, ...]",
    "ddp.comm_hook": "DistributedDataParallel takes it: register_comm_hook, for {value}",
}
"""Where a setting goes that a target can't take."""
_OF_DDP = "DistributedDataParallel takes it: {name}={value!r}"
_OF_THE_LOADER = "your DataLoader takes it: {name}={value!r}"
_ELSEWHERE = "your own loop takes it: {name}={value!r}"
_PRECISIONS_IN_YOUR_CODE = {
    "tf32": 'in your script: torch.set_float32_matmul_precision("high")',
    "bfloat16": "in your script: torch.autocast around forward pass and loss, dtype=torch.bfloat16",
    "float16": "in your script: torch.autocast around forward pass and loss, dtype=torch.float16, and a GradScaler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """What a target calls a setting."""

    setting: str
    name: str
    """With dots where it lies deeper."""
    kind: Literal["count", "number", "flag"] = "count"
    own: object = None
    """The target's value where its file leaves the name out; None: as ours, or not known."""
    is_rare: bool = False
    """Written only where it is not torch's own value: releases of the target that are in use lack the name."""
    is_whole: bool = False
    """The target takes whole numbers alone."""
    among: tuple[object, ...] = ()
    """The values that the target takes; (): all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A target's names, both ways."""

    title: str
    """What people call it, such as "transformers' TrainingArguments"."""
    names: tuple[Name, ...] = ()
    precisions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it takes for each amp_dtype, by its own names."""
    cpu_precisions: frozenset[str] = frozenset({"float32", "bfloat16"})
    """Those that it trains in on a CPU."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Where a setting goes that it can't take, if elsewhere than into your own loop."""
    needs_batch_size: bool = False
    """It demands a number of samples, so that with a token budget it is given their mean."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Names of its file that change how fast it trains, or what, and have no setting here, each with what to do."""
    is_silent_on: frozenset[str] = frozenset()
    """Names of its file that change neither."""


def carried(found: Wanted, table: Table) -> dict[str, Any]:
    """The target's settings, by its own names; flat, whatever dots they have."""
    result = {
        name.name: int(found[name.setting]) if name.is_whole else found[name.setting]
        for name in table.names
        if _is_carried(found, table, name) and (name.setting in found.changed or not name.is_rare)
    }
    return result | dict(table.precisions.get(_precision(found, table), {}))


def dropped(
    found: Wanted, table: Table, *, also: Mapping[str, str] | None = None, but: str = ""
) -> tuple[Dropped, ...]:
    """The settings that the target can't take, in our own order.

    Args:
        found: The configuration.
        table: The target's.
        also: Settings that are dropped all the same, with the reason.
        but: Names that the target's module writes itself, with blanks between them.
    """
    taken = {*but.split(), *(name.setting for name in table.names if _is_carried(found, table, name))}
    taken -= {"micro_batch_size"} if found.has_budget and not table.needs_batch_size else set()
    taken |= {"amp_dtype"} if _precision(found, table) == found["amp_dtype"] and table.precisions else set()
    reasons = {
        name: _reason(found, table, name) for name in found.values if _is_lost(found, name) and name not in taken
    }
    return tuple(
        Dropped(name, {**reasons, **(also or {})}[name]) for name in found.values if name in {*reasons, *(also or ())}
    )


def _is_carried(found: Wanted, table: Table, name: Name) -> bool:
    value = found[name.setting]
    if name.setting == "micro_batch_size" and found.has_budget:
        return table.needs_batch_size
    if value is None or (name.setting.startswith(_DDP) and not found.is_ddp):
        return False
    if name.among and value not in name.among:
        return False
    return not name.is_whole or value == int(value)


def _is_lost(found: Wanted, name: str) -> bool:
    """Whether something would be lost with a setting, where the target can't take it."""
    if name == "strategy":
        return bool(found["strategy"] == "dp")
    if name == "world_size":
        return found.processes > 1
    return name in found.changed or name in _ALWAYS


def _precision(found: Wanted, table: Table) -> str:
    """The amp_dtype that the target is given: float32 where it can't take the wanted one."""
    wanted_dtype = str(found["amp_dtype"])
    on_cpu = found.device == "cpu" and wanted_dtype not in table.cpu_precisions
    return "float32" if on_cpu or wanted_dtype not in table.precisions else wanted_dtype


def _reason(found: Wanted, table: Table, name: str) -> str:
    value, bare = found[name], name.removeprefix(_DDP)
    if name == "micro_batch_size" and found.has_budget:
        return _MEAN.format(value=value, budget=found["max_tokens"])
    if name == "amp_dtype" and value in table.precisions:
        return f"{table.title} trains in {value} on no CPU; float32 is written"
    if any(own.setting == name and own.is_whole for own in table.names):
        return f"{table.title} takes whole numbers alone, but it is {value!r}"
    few = next((own.among for own in table.names if own.setting == name and own.among), ())
    if few:
        return f"{table.title} takes {', '.join(map(str, few))} alone, but it is {value!r}"
    own = table.reasons.get(name) or table.reasons.get(_DDP if name.startswith(_DDP) else "")
    general = _PRECISIONS_IN_YOUR_CODE[value] if name == "amp_dtype" else _IN_YOUR_CODE.get(name)
    if general is None:
        general = _OF_DDP if name.startswith(_DDP) else _OF_THE_LOADER if name in LOADER else _ELSEWHERE
    return f"{table.title} can't take it; {(own or general).format(value=value, name=bare)}"
