"""Report leaks, but no heap that fills, steps of an allocator, or noise."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from autotune.models.memory import growth_notes, growth_of, kinds_not_excluded
from autotune.records.measurement import Measurement, MemoryGrowth, MemoryLimits
from tests.factories import make_measurement

GIB, MIB = 2**30, 2**20
LIMITS = MemoryLimits(limit_bytes=16 * GIB, ram_bytes=64 * GIB, limit_is_ram=False)
LEAK = [(10 * place, GIB + 10 * MIB * place) for place in range(1, 41)]


def grown(*held_bytes: float) -> MemoryGrowth:
    found = growth_of(
        "host", [(10 * place, round(held)) for place, held in enumerate(held_bytes, 1)], 8.0
    )
    assert found is not None
    return found


def run_with(**changes: Any) -> Measurement:
    values = {
        "kind": "device",
        "bytes_per_batch": 1e6,
        "half_width": 1e5,
        "batches": 200,
        "seconds": 4.0,
    }
    return make_measurement(
        growth=(MemoryGrowth.model_validate({**values, "last_bytes": GIB, **changes}),)
    )


def test_steady_growth_has_its_slope() -> None:
    chance = random.Random(0)
    found = grown(*(GIB + MIB * (10 * place + chance.gauss(0, 2)) for place in range(40)))
    assert found.low < MIB < found.high
    assert found.low > 0.8 * MIB


@pytest.mark.parametrize(
    "held",
    [
        [GIB] * 40,
        [GIB + 64 * MIB * min(place, 10) for place in range(40)],
        [GIB + (512 * MIB if place > 25 else 0) for place in range(40)],
        [GIB + 64 * MIB * (place % 3) for place in range(40)],
        [GIB + 512 * MIB * (1 - 0.8**place) for place in range(40)],
    ],
    ids=["constant", "fills in the beginning", "a single step", "sawtooth", "levels off"],
)
def test_what_ends_is_no_creep(held: list[float]) -> None:
    assert grown(*held).low <= 0


def test_a_window_of_few_blocks_tells_nothing() -> None:
    assert growth_of("host", LEAK[:5], 1.0) is None
    assert growth_of("host", (), 0.0) is None


def test_a_creep_says_when_it_would_reach_the_limit() -> None:
    (told,) = growth_notes([run_with()] * 3, LIMITS, "baseline")
    room = 16 * GIB - make_measurement().peak_memory_bytes
    assert told.code == "memory_growth"
    assert told.figures["batches_to_limit"] == round(room / 1e6)
    assert told.figures["limit_within_s"] == round(room / 1e6 / 50)


def test_a_creep_counts_once_most_runs_show_it() -> None:
    flat = run_with(bytes_per_batch=0.0)
    assert growth_notes([run_with(), flat, flat], LIMITS, "baseline") == ()
    assert len(growth_notes([run_with(), run_with(), flat], LIMITS, "baseline")) == 1


def test_slow_growth_has_no_note() -> None:
    assert growth_notes([run_with(bytes_per_batch=20.0, half_width=1.0)], LIMITS, "baseline") == ()


def test_unsure_growth_is_not_excluded() -> None:
    unsure, constant = (
        run_with(bytes_per_batch=0.0, half_width=1e5),
        run_with(bytes_per_batch=0.0, half_width=0.0),
    )
    assert kinds_not_excluded([unsure], LIMITS) == ("host", "device")
    assert kinds_not_excluded([constant], LIMITS) == ("host",)
    assert kinds_not_excluded([run_with()], LIMITS) == ("host",)  # the device's is told
    assert kinds_not_excluded([constant], replace(LIMITS, limit_is_ram=True)) == ("host",)


def test_windows_of_too_few_blocks_exclude_nothing() -> None:
    assert kinds_not_excluded([make_measurement()], LIMITS) == ("host", "device")
    assert kinds_not_excluded([make_measurement()], replace(LIMITS, limit_is_ram=True)) == ("host",)


def test_host_memory_against_ram() -> None:
    host = run_with(kind="host", last_bytes=63 * GIB)
    (told,) = growth_notes([host], LIMITS, "recommended")
    assert told.figures["batches_to_limit"] == round(GIB / 1e6)
