"""Which conditions of a device are worth a note."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.messages.trials import clock_lowered, clock_moved, others_on_device
from autotune.records.measurement import DeviceConditions, note_on_others, notes_on

GIB = 2**30


def make(**given: Any) -> DeviceConditions:
    return DeviceConditions.model_validate(given)


@pytest.mark.parametrize(
    ("clocks", "moves"),
    [
        ((1980, 1980), False),
        ((1980, 1925), False),
        ((1980, 1920), True),
        ((1900, 1960), True),
        ((0, 1980), False),
    ],
)
def test_a_clock_that_moves_by_three_per_cent_is_remarked(
    clocks: tuple[int, int], moves: bool
) -> None:
    found = list(notes_on(make(sm_clock_mhz=clocks)))
    assert found == [clock_moved(first_mhz=clocks[0], last_mhz=clocks[1])] * moves


def test_a_clock_that_was_held_down_is_remarked_with_its_reasons() -> None:
    assert list(notes_on(make(throttle_reasons=("power_brake", "power_cap", "thermal")))) == [
        clock_lowered(reasons=("power_brake", "thermal"))
    ]


def test_a_gpu_at_its_power_limit_is_a_fact_and_no_disturbance() -> None:
    seen = make(throttle_reasons=("power_cap",), power_w=700.0)
    assert list(notes_on(seen)) == []
    assert (seen.is_at_power_limit, seen.disturbances) == (True, ())


def test_a_quiet_window_needs_no_remark() -> None:
    assert list(notes_on(make(sm_clock_mhz=(1980, 1980), temperature_c=(60, 80)))) == []


@pytest.mark.parametrize(
    ("memory", "busy"),
    [
        (None, 0.9),
        (0, 0.9),  # nobody has it open: the kernels were of a process that has ended
        (200 * 2**20, None),
    ],
)
def test_a_device_that_nobody_else_has_open_needs_no_note(
    memory: int | None, busy: float | None
) -> None:
    assert note_on_others(make(others_memory_bytes=memory, others_busy_fraction=busy)) is None


@pytest.mark.parametrize(("busy", "noted"), [(None, None), (0.04, None), (0.62, 0.62)])
def test_others_on_the_device_are_noted_with_their_figures(
    busy: float | None, noted: float | None
) -> None:
    found = note_on_others(make(others_memory_bytes=3 * GIB, others_busy_fraction=busy))
    assert found == others_on_device(held_bytes=3 * GIB, busy_fraction=noted)


def test_a_device_that_does_not_tell_needs_no_note() -> None:
    assert note_on_others(None) is None
