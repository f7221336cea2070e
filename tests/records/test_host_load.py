"""What others took of a host's cores, and when it counts."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.messages.trials import cores_taken
from autotune.records.measurement import HostLoad, join_loads, note_on_load


def make(**given: Any) -> HostLoad:
    """Ten seconds in which the trial had one core of two, and others nothing."""
    values = {
        "seconds": 10.0,
        "cores": 2,
        "reachable_cores": 2,
        "busy_s": 10.0,
        "own_s": 10.0,
        "stolen_s": 0.0,
    }
    return HostLoad.model_validate(values | given)


@pytest.mark.parametrize(
    ("given", "cores"),
    [
        ({}, 0.0),
        ({"busy_s": 15.0}, 0.5),
        ({"busy_s": 9.9}, 0.0),  # the kernel rounds either
        (
            {"cores": 2, "reachable_cores": 8, "busy_s": 40.0},
            0.0,
        ),  # 3 cores, of 6 that the quota leaves free
        ({"cores": 2, "reachable_cores": 8, "busy_s": 75.0}, 0.5),
        (
            {"cores": 2, "reachable_cores": 8, "busy_s": 40.0, "group_s": 17.0},
            0.7,
        ),  # under the same quota
        (
            {"cores": 1, "reachable_cores": 4, "own_s": 0.0, "busy_s": 60.0},
            1.0,
        ),  # never more than there are
    ],
)
def test_others_take_what_they_leave_the_trial_without(given: dict[str, Any], cores: float) -> None:
    assert make(**given).others_cores == pytest.approx(cores)


@pytest.mark.parametrize(
    ("given", "is_loaded"),
    [
        ({}, False),
        ({"busy_s": 11.9}, False),
        ({"busy_s": 12.1}, True),
        (
            {"cores": 64, "reachable_cores": 64, "busy_s": 10.0 + 200},
            False,
        ),  # 20 of 64 cores, but 43 are idle
        ({"cores": 64, "reachable_cores": 64, "busy_s": 10.0 + 320}, True),
        (
            {"seconds": 0.1, "own_s": 0.1, "busy_s": 0.13},
            False,
        ),  # three ticks of the kernel's clock
        ({"seconds": 0.1, "own_s": 0.1, "busy_s": 0.16}, True),
        ({"busy_s": 20.0, "stolen_s": 10.0}, True),
        ({"pressure_s": 10.0}, False),  # the trial's own workers wait for each other
    ],
)
def test_a_window_was_loaded_where_others_took_a_tenth_of_cores_in_use(
    given: dict[str, Any], is_loaded: bool
) -> None:
    load = make(**given)
    assert load.is_loaded == is_loaded
    told = cores_taken(others_cores=load.others_cores, cores=load.cores)
    assert note_on_load(load) == (told if is_loaded else None)


def test_windows_are_joined_by_their_seconds() -> None:
    short = make(seconds=5.0, own_s=5.0, busy_s=10.0, pressure_s=1.0, stolen_s=1.0)
    joined = join_loads([make(pressure_s=2.0), None, short])
    assert joined is not None
    assert (joined.seconds, joined.pressure_s, joined.stolen_s) == (15.0, 3.0, 1.0)
    assert joined.others_cores == pytest.approx(1 / 3)
    unknown = join_loads([make(pressure_s=2.0), make()])
    assert unknown is not None
    assert unknown.pressure_s is None
    assert join_loads([None]) is None
    assert note_on_load(None) is None
