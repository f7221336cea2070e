"""What a measurement is worth: its rate over the baseline's, less a little for an idle device, under the memory limit.

Comes in: a Measurement, the baseline's, the Objective and the limit in bytes. Goes out: a Score. Pure.
"""

from __future__ import annotations

from autotune.records.measurement import Measurement
from autotune.records.trial import Score
from autotune.settings.objective import Objective

__all__ = ["LEAST_VIOLATION", "evaluate", "memory_fault"]

LEAST_VIOLATION = 0.01
"""Share by which a run that thrashes, or was ended for its memory, counts as over the limit; its need is not known."""


def evaluate(measurement: Measurement, baseline: Measurement, objective: Objective, limit_bytes: int) -> Score:
    """Score a measurement against the baseline's, under a memory limit in bytes.

    score = throughput / baseline throughput * (1 - w * (1 - busy_fraction)). Busy fractions of different sources don't
    compare, and GPM or NVML may refuse a single trial: one that the baseline's source did not measure is scored with
    the baseline's fraction, as if it were as busy.
    """
    told = measurement.busy_by(baseline.busy_source)
    busy = baseline.busy_fraction if told is None else told
    idle = 0.0 if busy is None else 1.0 - busy
    value = measurement.samples_per_s / baseline.samples_per_s * (1.0 - objective.busy_weight * idle)
    violation, reason = measurement.peak_memory_bytes / limit_bytes - 1.0, memory_fault(measurement, limit_bytes)
    if reason is not None and violation <= 0:
        violation = LEAST_VIOLATION
    return Score(value=value, feasible=reason is None, violation=violation, reason=reason or "")


def memory_fault(measurement: Measurement, limit_bytes: int) -> str | None:
    """Why a run's memory does not suffice under a limit, or None.

    A run that thrashes within the limit is none that fits, see `MemorySample.is_thrashing`.
    """
    limit, peak = _mib(limit_bytes), _mib(measurement.peak_memory_bytes)
    if measurement.peak_memory_bytes > limit_bytes:
        return f"peak memory must stay within {limit}, but was {peak}"
    if measurement.memory.is_thrashing:
        return (
            f"training must find room within {limit}, but at {peak} the allocator gave back what it held, and asked "
            f"again, {measurement.memory.alloc_retries} times in the window; take a smaller micro batch, or raise "
            "memory_limit"
        )
    return None


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
