"""Measurements and their parts: windows, breakdowns, loader costs, ranks, device conditions, checks of precision."""

from __future__ import annotations

from math import isfinite, nan
from typing import Any

from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
from autotune.records.measurement import (
    Block,
    Communication,
    DeviceConditions,
    Measurement,
    MemorySample,
    RankFigures,
    Window,
)
from autotune.records.trial import PrecisionFigures

TALK = Communication(step_s=0.0125, step_alone_s=0.01, exchange_s=0.008, bytes_exchanged=22 * 2**20)
"""Of 256 samples: a fifth of a step is exposed."""
HOT: dict[str, Any] = {
    "sm_clock_mhz": (1980, 1755),
    "temperature_c": (60, 87),
    "throttle_reasons": ("power_cap", "thermal"),
    "others_memory_bytes": 3 * 2**30,
    "others_busy_fraction": 0.2,
    "persistence_mode": False,
    "tf32_overrides": ("NVIDIA_TF32_OVERRIDE=0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"),
}
"""All at once that a device can say against a window."""


def make_window(rate: float = 100.0, **changes: Any) -> Window:
    """Ten blocks of 1 s at a rate in samples/s; keywords change fields."""
    values = {
        "blocks": (Block(samples=int(rate), batches=10, seconds=1.0, data_wait_s=0.1),) * 10,
        "whole_epochs": False,
        "epoch_samples": None,
        "queue_capacity": 0,
        "queue_at_start": 0,
        "queue_at_end": 0,
        "warm_up_batches": 5,
        "warm_up_s": 0.5,
        "is_drained": True,
        "is_steady": True,
        "stopped_by": "precision",
    }
    return Window.model_validate(values | changes)


def make_measurement(
    rate: float = 100.0,
    noise: float = 0.01,
    *,
    gib: float = 1.0,
    busy: float | None = 0.9,
    **changes: Any,
) -> Measurement:
    """Return a throughput, give or take `noise` of it, with `gib` of peak memory; keywords change fields.

    The window's blocks are all alike; where `noise` is infinite there is a single one.
    """
    values = {
        "samples_per_s": rate,
        "samples_per_s_ci": (rate * (1 - noise), rate * (1 + noise)),
        "busy_fraction": busy,
        "busy_source": None if busy is None else "share of time with a kernel running (NVML)",
        "data_wait_fraction": 0.034,
        "peak_memory_bytes": int(gib * 2**30),
        "startup_s": 1.0,
        "build_s": 0.2,
        "memory": MemorySample(peak_bytes=int(gib * 2**30), source="max reserved + outside torch"),
        "window": make_window(rate)
        if isfinite(noise)
        else make_window(rate, blocks=make_window(rate).blocks[:1]),
        "loss": 0.7,
    }
    return Measurement.model_validate(values | changes)


def make_breakdown(
    *,
    wait: float = 0.0,
    copy: float = 0.0,
    synchronise: float = 0.0,
    idle: float = 0.0,
    restart: float = 0.0,
) -> TimeBreakdown:
    """Shares of a step's time; the rest is computing. `restart` is part of the waiting."""
    profiler = "profiler, 5 extra steps"
    return TimeBreakdown(
        data_wait=Share(fraction=wait, source="clock around the loader"),
        device_copy=Share(fraction=copy, source=profiler),
        compute=Share(fraction=max(0.0, 1 - wait - copy - synchronise - idle), source=profiler),
        synchronise=Share(fraction=synchronise, source=profiler),
        idle=Share(fraction=idle, source="the rest of the step"),
        restart_fraction=restart,
    )


def make_loader_costs(item_s: float = 1e-3, **changes: Any) -> LoaderCosts:
    """Items that all take the same time of a core; keywords change fields."""
    values = {
        "items": 100,
        "item_s": item_s,
        "item_cpu_s": item_s,
        "item_median_s": item_s,
        "item_p99_s": item_s,
        "item_slowest_s": item_s,
        "slow_tail_fraction": 0.0,
        "disk_bytes_per_item": 0.0,
        "item_bytes": 1024.0,
        "collate_s": 0.0,
    }
    return LoaderCosts.model_validate(values | changes)


def make_guard(*, is_good: bool = True) -> PrecisionFigures:
    """Twenty steps beside the reference's; not good: the last loss is nan."""
    losses = tuple(2.3 / (step + 1) for step in range(20))
    return PrecisionFigures(
        steps=20,
        micro_batch_size=32,
        reference_losses=losses,
        losses=losses if is_good else (*losses[:-1], nan),
        gradient_cosine=0.9991 if is_good else None,
        repeat_cosine=1.0,
        repeat_deviation=0.0,
        skipped_steps=(True, *[False] * 19),
    )


def make_rank(number: int, **changes: Any) -> RankFigures:
    """Return a rank that computes nearly all of the time; keywords change fields."""
    values = {
        "rank": number,
        "device": f"cuda:{number}",
        "samples_per_s": 10_240.0,
        "data_wait_fraction": 0.034,
        "busy_fraction": 0.97,
        "peak_memory_bytes": int(9.6 * 2**30),
        "loader_ceiling": 30_000.0,
        "device_ceiling": 12_800.0,
    }
    return RankFigures.model_validate(values | changes)


def make_conditions(**changes: Any) -> DeviceConditions:
    """Return the conditions of a GPU by itself, at its highest clock; keywords change fields."""
    values = {
        "sm_clock_mhz": (1980, 1980),
        "max_sm_clock_mhz": 1980,
        "memory_clock_mhz": (2619, 2619),
        "temperature_c": (41, 55),
        "power_w": 410.0,
        "energy_j": 1230.0,
        "others_memory_bytes": 480 * 2**20,
        "others_busy_fraction": 0.0,
        "persistence_mode": True,
    }
    return DeviceConditions.model_validate(values | changes)
