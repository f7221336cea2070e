"""What is said of a device's conditions, and how those of several devices become one."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.note import note
from autotune.records.conditions import DeviceConditions, merged, note_on_others, remarks_on

GIB = 2**30


def make(**given: Any) -> DeviceConditions:
    return DeviceConditions.model_validate(given)


@pytest.mark.parametrize(
    ("clocks", "moves"),
    [((1980, 1980), False), ((1980, 1925), False), ((1980, 1920), True), ((1900, 1960), True), ((0, 1980), False)],
)
def test_a_clock_that_moves_by_three_per_cent_is_remarked(clocks: tuple[int, int], moves: bool) -> None:
    found = list(remarks_on(make(sm_clock_mhz=clocks)))
    assert found == [note("clock_moved", first_mhz=clocks[0], last_mhz=clocks[1])] * moves


def test_a_clock_that_was_held_down_is_remarked_with_its_reasons() -> None:
    assert list(remarks_on(make(throttle_reasons=("power_brake", "power_cap", "thermal")))) == [
        note("clock_held_down", reasons=["power_brake", "thermal"])
    ]


def test_a_gpu_at_its_power_limit_is_a_fact_and_no_disturbance() -> None:
    seen = make(throttle_reasons=("power_cap",), power_w=700.0)
    assert list(remarks_on(seen)) == []
    assert (seen.is_at_power_limit, seen.disturbances) == (True, ())


def test_a_quiet_window_needs_no_remark() -> None:
    assert list(remarks_on(make(sm_clock_mhz=(1980, 1980), temperature_c=(60, 80)))) == []


@pytest.mark.parametrize(
    ("memory", "busy", "said"),
    [
        (None, 0.9, None),
        (0, 0.9, None),  # nobody has it open: the kernels were of a process that has ended
        (200 * 2**20, None, None),
        (3 * GIB, None, "held 3.0 GiB of the device's memory, which counts in every peak."),
        (3 * GIB, 0.04, "which counts in every peak."),
        (3 * GIB, 0.62, "and kept it busy for 62 % of the time: rates are lower than on a device of its own."),
    ],
)
def test_others_on_the_device_are_noted_with_their_figures(
    memory: int | None, busy: float | None, said: str | None
) -> None:
    found = note_on_others(make(others_memory_bytes=memory, others_busy_fraction=busy))
    assert (found is None) == (said is None)
    if found is not None and said is not None:
        assert found.startswith("Before the first trial other processes held 3.0 GiB")
        assert found.endswith(said)


def test_a_device_that_does_not_tell_needs_no_note() -> None:
    assert note_on_others(None) is None


def test_several_devices_are_told_by_their_sums_and_by_the_worst_of_them() -> None:
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
    assert merged([cool, hot]) == make(
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
    found = merged([make(power_w=300.0, energy_j=600.0, max_sm_clock_mhz=1980), other])
    assert found is not None
    assert found.power_w is None
    assert found.energy_j == (605.0 if other is not None and other.energy_j else None)
    assert found.max_sm_clock_mhz == 1980


def test_one_device_stays_as_it_is_and_none_is_none() -> None:
    one = make(power_w=1.0)
    assert merged([one]) is one
    assert merged([]) is None
    assert merged([None, None]) is None


def test_an_energy_of_nothing_is_an_energy() -> None:
    found = merged([make(energy_j=0.0), make(energy_j=0.0)])
    assert found is not None
    assert found.energy_j == 0.0
