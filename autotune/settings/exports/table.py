"""What a target takes beyond the names of settings, and how a configuration is written by both.

Comes in: a Wanted. Goes out: the target's settings, and what is dropped. What has no name in a target is dropped by
name, so that a setting that comes later can't be lost in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.settings.exports.export import Dropped, Wanted
from autotune.settings_table import BY_NAME, DDP_PREFIX, SETTINGS, Name, Setting

__all__ = ["Table", "carried", "dropped"]

_ALWAYS = frozenset({"micro_batch_size", "lr"})
"""Settings that have no value of torch's own: they must be told wherever a target can't take them."""
_MEAN = "{value} is no size of a batch, but what one of max_tokens={budget} holds on average"
_OF_DDP = "DistributedDataParallel takes it: {name}={value!r}"
_OF_THE_LOADER = "your DataLoader takes it: {name}={value!r}"
_ELSEWHERE = "your own loop takes it: {name}={value!r}"
_PRECISIONS_IN_YOUR_CODE = {
    "tf32": 'in your script: torch.set_float32_matmul_precision("high")',
    "bfloat16": "in your script: torch.autocast around forward pass and loss, dtype=torch.bfloat16",
    "float16": "in your script: torch.autocast around forward pass and loss, dtype=torch.float16, and a GradScaler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a target takes, both ways."""

    target: str
    """By which settings have a name and a reason in settings_table."""
    title: str
    """What people call it, such as "transformers' TrainingArguments"."""
    precisions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it takes for each amp_dtype, by its own names."""
    cpu_precisions: frozenset[str] = frozenset({"float32", "bfloat16"})
    """Those that it trains in on a CPU."""
    ddp_reason: str | None = None
    """Where an argument of DistributedDataParallel goes that has no reason of its own; None: as elsewhere."""
    needs_batch_size: bool = False
    """It demands a number of samples, so that with a token budget it is given their mean."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Names of its file that change how fast it trains, or what, and have no setting here, each with what to do."""
    is_silent_on: frozenset[str] = frozenset()
    """Names of its file that change neither."""

    @property
    def names(self) -> dict[str, Name]:
        """Return its names for settings, by setting."""
        return {setting.name: setting.names[self.target] for setting in SETTINGS if self.target in setting.names}


def carried(found: Wanted, table: Table) -> dict[str, Any]:
    """The target's settings, by its own names; flat, whatever dots they have."""
    names = table.names
    result = {
        names[setting].name: int(found[setting]) if names[setting].is_whole else found[setting]
        for setting in found.values
        if _is_carried(found, table, setting) and (setting in found.changed or not names[setting].is_rare)
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
    taken = {*but.split(), *(setting for setting in found.values if _is_carried(found, table, setting))}
    taken -= {"micro_batch_size"} if found.has_budget and not table.needs_batch_size else set()
    taken |= {"amp_dtype"} if _precision(found, table) == found["amp_dtype"] and table.precisions else set()
    reasons = {
        name: _reason(found, table, name) for name in found.values if _is_lost(found, name) and name not in taken
    }
    return tuple(
        Dropped(name, {**reasons, **(also or {})}[name]) for name in found.values if name in {*reasons, *(also or ())}
    )


def _is_carried(found: Wanted, table: Table, setting: str) -> bool:
    name, value = table.names.get(setting), found[setting]
    if name is None:
        return False
    if setting == "micro_batch_size" and found.has_budget:
        return table.needs_batch_size
    if value is None or (setting.startswith(DDP_PREFIX) and not found.is_ddp):
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
    value, known, setting = found[name], table.names.get(name), BY_NAME.get(name)
    if name == "micro_batch_size" and found.has_budget:
        return _MEAN.format(value=value, budget=found["max_tokens"])
    if name == "amp_dtype" and value in table.precisions:
        return f"{table.title} trains in {value} on no CPU; float32 is written"
    if known is not None and known.is_whole:
        return f"{table.title} takes whole numbers alone, but it is {value!r}"
    if known is not None and known.among:
        return f"{table.title} takes {', '.join(map(str, known.among))} alone, but it is {value!r}"
    if name == "amp_dtype":
        reason = _PRECISIONS_IN_YOUR_CODE[value]
    elif setting is None:
        reason = _ELSEWHERE
    else:
        reason = _reason_of(setting, table)
    return f"{table.title} can't take it; {reason.format(value=value, name=name.removeprefix(DDP_PREFIX))}"


def _reason_of(setting: Setting, table: Table) -> str:
    if table.target in setting.reasons:
        return setting.reasons[table.target]
    if setting.is_of_ddp and table.ddp_reason is not None:
        return table.ddp_reason
    if setting.elsewhere is not None:
        return setting.elsewhere
    if setting.is_of_ddp:
        return _OF_DDP
    return _OF_THE_LOADER if setting.is_loader_argument else _ELSEWHERE
