"""Merge the conditions of several devices."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.models.group import merged_conditions
from autotune.records.measurement import DeviceConditions


def make(**given: Any) -> DeviceConditions:
    return DeviceConditions.model_validate(given)


def test_sums_and_worst_of_several_devices() -> None:
    cool = make(
        sm_clock_mhz=(1980, 1980),
        max_sm_clock_mhz=1980,
        memory_clock_mhz=(2600, 2600),
        temperature_c=(50, 55),
        power_w=300.0,
        energy_j=600.0,
        throttle_reasons=("power_cap",),
        others_memory_bytes=1,
        persistence_mode=True,
        tf32_overrides=("NVIDIA_TF32_OVERRIDE=0",),
    )
    hot = make(
        sm_clock_mhz=(1995, 1500),
        max_sm_clock_mhz=2100,
        memory_clock_mhz=(2500, 2600),
        temperature_c=(80, 84),
        power_w=500.0,
        energy_j=1000.0,
        throttle_reasons=("power_cap", "thermal"),
        others_memory_bytes=9,
        others_busy_fraction=0.5,
        persistence_mode=False,
    )
    assert merged_conditions([cool, hot]) == make(
        sm_clock_mhz=(1995, 1500),
        max_sm_clock_mhz=1980,
        memory_clock_mhz=(2500, 2600),
        temperature_c=(80, 84),
        power_w=800.0,
        energy_j=1600.0,
        throttle_reasons=("power_cap", "thermal"),
        others_memory_bytes=9,
        others_busy_fraction=0.5,
        persistence_mode=False,
        tf32_overrides=("NVIDIA_TF32_OVERRIDE=0",),
    )


@pytest.mark.parametrize("other", [None, make(energy_j=None), make(energy_j=5.0)])
def test_a_sum_that_lacks_a_part_is_not_told(other: DeviceConditions | None) -> None:
    found = merged_conditions([make(power_w=300.0, energy_j=600.0, max_sm_clock_mhz=1980), other])
    assert found is not None
    assert found.power_w is None
    assert found.energy_j == (605.0 if other is not None and other.energy_j else None)
    assert found.max_sm_clock_mhz == 1980


def test_one_device_stays_as_it_is_and_none_is_none() -> None:
    one = make(power_w=1.0)
    assert merged_conditions([one]) is one
    assert merged_conditions([]) is None
    assert merged_conditions([None, None]) is None


def test_an_energy_of_nothing_is_an_energy() -> None:
    found = merged_conditions([make(energy_j=0.0), make(energy_j=0.0)])
    assert found is not None
    assert found.energy_j == 0.0
