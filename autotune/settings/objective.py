"""What is searched for: the objective's settings, and the score of a measurement.

`evaluate` takes a measurement and the baseline's and hands on a Score; nothing here knows how either came about.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from autotune.phrasing import say_beside
from autotune.records.measurement import Measurement
from autotune.space.learning_rate import LrRule

__all__ = ["MemoryLimit", "Objective", "Score", "evaluate", "memory_fault"]

_BYTE_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)
_LEAST_VIOLATION = 0.01
"""Of a run that thrashes below the limit: what it would take is not known; as for what was ended for its memory."""


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


class Score(BaseModel):
    """What a trial is worth. Higher is better; the baseline's own is close to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    value: float
    feasible: bool
    violation: float = 0.0
    """Share by which the memory limit is passed; negative: room left. Of what ran short of memory below the limit, the
    least that tells so."""
    reason: str = ""
    """Why it is not feasible; "" where it is."""


def evaluate(measurement: Measurement, baseline: Measurement, objective: Objective, limit_bytes: int) -> Score:
    """Score a measurement against the baseline's, under a memory limit in bytes.

    score = rate / baseline rate * (1 - w * (1 - busy_fraction)). Busy fractions of different sources don't compare, and
    GPM or NVML may refuse a single trial: one of which the baseline's source does not tell is scored with the
    baseline's fraction, as if it were as busy.
    """
    told = measurement.busy_by(baseline.busy_source)
    busy = baseline.busy_fraction if told is None else told
    idle = 0.0 if busy is None else 1.0 - busy
    value = measurement.samples_per_s / baseline.samples_per_s * (1.0 - objective.busy_weight * idle)
    violation, reason = measurement.peak_memory_bytes / limit_bytes - 1.0, memory_fault(measurement, limit_bytes)
    if reason is None:
        return Score(value=value, feasible=True, violation=violation)
    passed = violation if violation > 0 else _LEAST_VIOLATION
    return Score(value=value, feasible=False, violation=passed, reason=reason)


def memory_fault(measurement: Measurement, limit_bytes: int) -> str | None:
    """Why a run's memory does not suffice under a limit, or None.

    A run that thrashes within the limit is none that fits, see `MemorySample.is_thrashing`.
    """
    peak, limit = say_beside(measurement.peak_memory_bytes, limit_bytes)
    if measurement.peak_memory_bytes > limit_bytes:
        return f"peak memory must stay within {limit}, but was {peak}"
    if measurement.memory.is_thrashing:
        return (
            f"training must find room within {limit}, but at {peak} the allocator gave back what it held, and asked "
            f"again, {measurement.memory.alloc_retries} times in the window; take a smaller micro batch, or raise "
            "memory_limit"
        )
    return None
