"""What is searched for: what counts as better, and under which limits."""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

__all__ = ["LrRule", "MemoryLimit", "Objective"]

LrRule = Literal["auto", "linear", "sqrt", "none"]
"""How the learning rate follows the global batch; auto: by the optimizer."""

_BYTE_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)


def _parse_memory_limit(value: object) -> int | float:
    limit = _limit_of_text(value) if isinstance(value, str) else _limit_of_number(value)
    if limit is None:
        rule = 'memory_limit must be bytes, a size such as "20GiB", or a fraction of the device in (0, 1]'
        raise ValueError(f"{rule}, but got {value!r}")
    return limit


def _limit_of_text(text: str) -> int | float | None:
    try:
        return _limit_of_number(float(text))
    except ValueError:
        pass
    try:
        size = int(_BYTE_SIZE.validate_python(text))
    except ValidationError:
        return None
    return size if size > 1 else None


def _limit_of_number(number: object) -> int | float | None:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if 0 < number <= 1:
        return float(number)
    return int(number) if 1 < number < inf and number == int(number) else None


MemoryLimit = Annotated[int | float, BeforeValidator(_parse_memory_limit)]
"""A fraction of the device's memory where at most 1, bytes otherwise."""


class Objective(BaseModel):
    """What counts as better, and under which limits."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    memory_limit: MemoryLimit = 0.9
    """Bytes, a size such as "20GiB", or a fraction of the device's memory."""
    busy_weight: Annotated[float, Field(ge=0, le=1)] = 0.02
    """How much an idle device lowers the score: enough to choose between equals."""
    global_batch: Literal["scale", "keep"] = "scale"
    """Whether the global batch may grow (with the learning rate), or stays and is split anew."""
    max_batch_scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 8
    """How far the global batch may grow beyond the baseline's."""
    lr_rule: LrRule = "auto"
    """How the learning rate follows the global batch."""

    def limit_bytes(self, device_memory_bytes: int) -> int:
        """The memory limit on a device with so many bytes."""
        if isinstance(self.memory_limit, float):
            return int(self.memory_limit * device_memory_bytes)
        return self.memory_limit
