"""The space as a user writes it: for each setting a list of choices, {low, high[, log]}, or one value.

Comes in: such values, from the YAML border or a Python call. Goes out: a SearchSpace of Choices and IntRanges, whose
values the field of the same name of a TrainingConfig (or DdpConfig) takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo

from autotune.frozen import FrozenModel
from autotune.settings.ddp_config import DdpConfig
from autotune.settings.training_config import TrainingConfig
from autotune.settings_table import DDP_PREFIX

__all__ = ["DDP_PREFIX", "Choices", "DdpSpace", "Domain", "IntRange", "SearchSpace", "SettingValue"]

SettingValue = bool | int | float | str | None


class Choices(FrozenModel):
    """A list of values to choose from; one value fixes the setting."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # an error says what is missing

    values: tuple[SettingValue, ...] = Field(min_length=1)
    """Each at most once."""

    def __contains__(self, value: object) -> bool:
        return any(value == own and type(value) is type(own) for own in self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[SettingValue]:  # type: ignore[override] # values, not the model's fields
        return iter(self.values)


class IntRange(FrozenModel):
    """Whole numbers from low to high, both included; log: tried evenly on a logarithmic scale."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # an error says what is missing

    low: Annotated[int, Field(strict=True)]
    """The smallest value."""
    high: Annotated[int, Field(strict=True)]
    """The largest value."""
    log: Annotated[bool, Field(strict=True)] = False
    """Small values are tried as densely as large ones, by their logarithms."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def __len__(self) -> int:
        return self.high - self.low + 1

    def __iter__(self) -> Iterator[int]:  # type: ignore[override] # values, not the model's fields
        return iter(range(self.low, self.high + 1))


Domain = Choices | IntRange


def _parse_domain(model: type[BaseModel], value: object, info: ValidationInfo) -> Domain:
    """The domain that the user has written for the field of the same name of a model."""
    name = str(info.field_name)
    if isinstance(value, IntRange):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return _parse_range(model, name, value)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    values = value if isinstance(value, Choices | list | tuple | range) else (value,)
    if not values:
        raise ValueError("a list of choices must have at least one value, but got []")
    return Choices(values=tuple(dict.fromkeys(_checked(model, name, choice) for choice in values)))


def _parse_range(model: type[BaseModel], name: str, value: Mapping[Any, Any]) -> IntRange:
    try:
        domain = IntRange.model_validate(dict(value))
    except ValidationError as error:
        detail = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        rule = "a range is {low: int, high: int[, log: bool]}"
        raise ValueError(f"{rule}, but got {dict(value)!r} ({detail})") from None
    if domain.low > domain.high:
        raise ValueError(f"`low <= high` must hold, but got (low={domain.low}, high={domain.high})")
    if domain.log and domain.low < 1:
        raise ValueError(f"a logarithmic range must start at 1 or more, but got low={domain.low}")
    for end in (domain.low, domain.high):
        _checked(model, name, end)
    return domain


def _checked(model: type[BaseModel], name: str, value: object) -> Any:
    info = model.model_fields[name]
    annotation: Any = Annotated[info.annotation, info]
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{value!r} can't be a value of {name}: {error.errors()[0]['msg']}") from None


_Setting = Annotated[Domain | None, BeforeValidator(partial(_parse_domain, TrainingConfig))]
_DdpSetting = Annotated[Domain | None, BeforeValidator(partial(_parse_domain, DdpConfig))]


class DdpSpace(FrozenModel):
    """DistributedDataParallel's part of the space, written as the other settings are."""

    bucket_cap_mb: _DdpSetting = None
    first_bucket_mb: _DdpSetting = None
    gradient_as_bucket_view: _DdpSetting = None
    static_graph: _DdpSetting = None
    find_unused_parameters: _DdpSetting = None
    broadcast_buffers: _DdpSetting = None
    comm_hook: _DdpSetting = None


class SearchSpace(FrozenModel):
    """The user's part of the space: a setting left out takes its default range, a single value fixes it.

    Each setting takes a list of choices, {low, high[, log]}, or one value. The learning rate is not searched: it
    follows the global batch by `objective.lr_rule`.
    """

    micro_batch_size: _Setting = None
    max_tokens: _Setting = None
    grad_accum_steps: _Setting = None
    amp_dtype: _Setting = None
    num_workers: _Setting = None
    prefetch_factor: _Setting = None
    persistent_workers: _Setting = None
    pin_memory: _Setting = None
    in_order: _Setting = None
    multiprocessing_context: _Setting = None
    worker_threads: _Setting = None
    channels_last: _Setting = None
    compile: _Setting = None
    compile_mode: _Setting = None
    cudnn_benchmark: _Setting = None
    fused: _Setting = None
    intra_op_threads: _Setting = None
    world_size: _Setting = None
    strategy: _Setting = None
    ddp: DdpSpace | None = None
    numa_binding: _Setting = None

    def given(self) -> dict[str, Domain]:
        """The settings that the user has given, by name; those of `ddp` by names such as "ddp.bucket_cap_mb"."""
        found = {name: getattr(self, name) for name in self.model_fields_set - {"ddp"}}
        if self.ddp is not None:
            found |= {f"{DDP_PREFIX}{name}": getattr(self.ddp, name) for name in self.ddp.model_fields_set}
        return dict(sorted(found.items()))
