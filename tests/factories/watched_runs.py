"""Runs of a script as they are watched before it is measured."""

from __future__ import annotations

from typing import Any

from autotune.records.watched_run import MemoryReading, MemoryUse, Startup, WatchedRun, WorkerStart

MIB = 2**20


def make_watched(**changes: Any) -> WatchedRun:
    """Return a run of 10 s with 100 batches, all of it computing; keywords change fields."""
    values: dict[str, Any] = {
        "startup": Startup(before_loader_s=1.0, first_batch_s=0.5, first_step_s=0.1),
        "steps": 100,
        "watched_s": 10.0,
        "parts_s": {"forward": 10.0},
        "batches": 100,
        "epoch_batches": 50,
    }
    return WatchedRun(**values | changes)


def make_start(first_batch_s: float, **changes: Any) -> WorkerStart:
    """Return two forked workers that start at once; keywords change fields."""
    values: dict[str, Any] = {"method": "fork", "workers": 2, "start_s": 0.05}
    return WorkerStart(first_batch_s=first_batch_s, **values | changes)


def make_copying(
    *, mib_per_reading: float = 10.0, shared_mib: float = 400.0, readings: int = 9
) -> MemoryUse:
    """Return two workers that copy from their parent, over 10,000 samples from reading to reading."""
    return MemoryUse(
        readings=tuple(
            MemoryReading(
                steps=100 * number,
                samples=10_000 * number,
                process_bytes=500 * MIB,
                worker_private_bytes=(round((20 + mib_per_reading * number) * MIB),) * 2,
                worker_shared_bytes=(round((shared_mib - mib_per_reading * number) * MIB),) * 2,
            )
            for number in range(readings)
        )
    )
