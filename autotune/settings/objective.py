"""What is searched for: what counts as better, and under which limits."""

from __future__ import annotations

from contextlib import suppress
from math import inf, nan
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError, WithJsonSchema

from autotune.frozen import FrozenModel

__all__ = ["LrRule", "MemoryLimit", "MemoryReserve", "Objective"]

LrRule = Literal["auto", "linear", "sqrt", "none"]
"""How the learning rate follows the global batch; auto: by the optimizer."""

_BYTE_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)


def _parse_memory_limit(value: object) -> int | float:
    number = _number_of(value)
    if 0 < number <= 1:
        return number
    if 1 < number < inf and number == int(number):
        return int(number)
    rule = 'memory_limit must be bytes, a size such as "20GiB", or a fraction of the device in (0, 1]'
    raise ValueError(f"{rule}, but got {value!r}")


def _parse_reserve(value: object) -> int | float:
    number = _number_of(value)
    if 0 < number < 1:
        return number
    if 0 <= number < inf and number == int(number) != 1:
        return int(number)
    rule = 'reserve must be 0, bytes, a size such as "4GiB", or a fraction of the device in (0, 1)'
    raise ValueError(f"{rule}, but got {value!r}")


def _number_of(value: object) -> float:
    """A number, also as text, or the bytes of a size; not a number for all else, and for a size of one byte or less."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return nan
    with suppress(ValueError):
        return float(value)
    with suppress(ValidationError):
        size = _BYTE_SIZE.validate_python(value)
        return size if size > 1 else nan
    return nan


_SIZE_SCHEMA = WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]})
MemoryLimit = Annotated[
    int | float,
    BeforeValidator(_parse_memory_limit),
    _SIZE_SCHEMA,
]
"""A fraction of the device's memory where at most 1, bytes otherwise."""
MemoryReserve = Annotated[
    int | float,
    BeforeValidator(_parse_reserve),
    _SIZE_SCHEMA,
]
"""A fraction of the device's memory where below 1, bytes otherwise."""


class Objective(FrozenModel):
    """What counts as better, and under which limits."""

    memory_limit: MemoryLimit = 0.9
    """Bytes, a size such as "20GiB", or a fraction of the device's memory."""
    reserve: MemoryReserve = 0
    """Of it, what trials leave free for what training does beside steps, such as validation and checkpoints: bytes, a
    size such as "4GiB", or a fraction of the device's memory."""
    busy_weight: Annotated[float, Field(ge=0, le=1)] = 0.02
    """How much an idle device lowers the score: enough to choose between equals."""
    global_batch: Literal["scale", "keep"] = "scale"
    """`scale`: the global batch may grow, and the learning rate with it; `keep`: it stays, split differently."""
    max_batch_scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 8
    """How far the global batch may grow beyond the baseline's."""
    larger_batch_gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    """By how much, as measured, a larger global batch must beat the fastest at the baseline's own to be recommended,
    beside being faster beyond noise."""
    lr_rule: LrRule = "auto"
    """How the learning rate follows the global batch."""

    def limit_bytes(self, device_memory_bytes: int) -> int:
        """What a trial may take on a device with so many bytes, the limit less the reserve; not above 0: nothing."""
        return _bytes_of(self.memory_limit, device_memory_bytes) - self.reserve_bytes(device_memory_bytes)

    def reserve_bytes(self, device_memory_bytes: int) -> int:
        """What trials leave free below the memory limit."""
        return _bytes_of(self.reserve, device_memory_bytes)


def _bytes_of(size: float, device_memory_bytes: int) -> int:
    return int(size * device_memory_bytes) if isinstance(size, float) else size
