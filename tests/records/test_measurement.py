"""Derive a run's figures: host load, conditions, busy sources, ranks, the share of the host."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.messages.trials import clock_lowered, clock_moved, cores_taken, others_on_device
from autotune.records.measurement import (
    GPM_SOURCE,
    NVML_SOURCE,
    PROFILER_SOURCE,
    WAIT_SOURCE,
    BusyReading,
    Communication,
    DeviceConditions,
    HostLoad,
    RankFigures,
    best_common_source,
    disagreement,
    join_loads,
    note_on_load,
    note_on_others,
    notes_on,
    uneven_ranks,
)
from tests.factories import make_breakdown, make_measurement, make_rank, make_window


@pytest.mark.parametrize(
    ("ahead_s", "changes", "fraction"),
    [
        (None, {"breakdown": make_breakdown(idle=0.4)}, None),
        (0.05, {"breakdown": make_breakdown(idle=0.4)}, 0.0),
        (0.02, {"breakdown": make_breakdown(idle=0.4)}, 0.4),
        (0.02, {"device_ceiling": 200.0}, 0.4),
        (0.02, {"device_ceiling": 90.0}, 0.0),
        (0.02, {"device_ceiling": None}, None),
        (0.02, {"device_ceiling": None, "busy_fraction": 0.7, "busy_source": WAIT_SOURCE}, None),
        (0.02, {"device_ceiling": 110.0, "busy_fraction": 0.6, "busy_source": GPM_SOURCE}, 0.3),
        (0.02, {"device_ceiling": 200.0, "data_wait_fraction": None}, None),
    ],
)
def test_the_host_has_what_waits_and_the_devices_work_leave_unless_the_device_is_always_behind(
    ahead_s: float | None, changes: dict[str, Any], fraction: float | None
) -> None:
    # 100 samples/s in batches of 0.1 s, of which the loop waits for data a tenth
    window = make_window(100.0, host_ahead_s=ahead_s)
    usual = {
        "data_wait_fraction": 0.1,
        "breakdown": None,
        "busy_fraction": None,
        "busy_source": None,
    }
    measured = make_measurement(100.0, window=window, **usual | changes)
    assert measured.host_fraction == (None if fraction is None else pytest.approx(fraction))


def load_of(**given: Any) -> HostLoad:
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
    assert load_of(**given).others_cores == pytest.approx(cores)


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
    load = load_of(**given)
    assert load.is_loaded == is_loaded
    told = cores_taken(others_cores=load.others_cores, cores=load.cores)
    assert note_on_load(load) == (told if is_loaded else None)


def test_windows_are_joined_by_their_seconds() -> None:
    short = load_of(seconds=5.0, own_s=5.0, busy_s=10.0, pressure_s=1.0, stolen_s=1.0)
    joined = join_loads([load_of(pressure_s=2.0), None, short])
    assert joined is not None
    assert (joined.seconds, joined.pressure_s, joined.stolen_s) == (15.0, 3.0, 1.0)
    assert joined.others_cores == pytest.approx(1 / 3)
    unknown = join_loads([load_of(pressure_s=2.0), load_of()])
    assert unknown is not None
    assert unknown.pressure_s is None
    assert join_loads([None]) is None
    assert note_on_load(None) is None


GIB = 2**30


def conditions_of(**given: Any) -> DeviceConditions:
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
    found = list(notes_on(conditions_of(sm_clock_mhz=clocks)))
    assert found == [clock_moved(first_mhz=clocks[0], last_mhz=clocks[1])] * moves


def test_a_clock_that_was_held_down_is_remarked_with_its_reasons() -> None:
    assert list(
        notes_on(conditions_of(throttle_reasons=("power_brake", "power_cap", "thermal")))
    ) == [clock_lowered(reasons=("power_brake", "thermal"))]


def test_a_gpu_at_its_power_limit_is_a_fact_and_no_disturbance() -> None:
    seen = conditions_of(throttle_reasons=("power_cap",), power_w=700.0)
    assert list(notes_on(seen)) == []
    assert (seen.is_at_power_limit, seen.disturbances) == (True, ())


def test_a_quiet_window_needs_no_remark() -> None:
    assert list(notes_on(conditions_of(sm_clock_mhz=(1980, 1980), temperature_c=(60, 80)))) == []


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
    assert (
        note_on_others(conditions_of(others_memory_bytes=memory, others_busy_fraction=busy)) is None
    )


@pytest.mark.parametrize(("busy", "noted"), [(None, None), (0.04, None), (0.62, 0.62)])
def test_others_on_the_device_are_noted_with_their_figures(
    busy: float | None, noted: float | None
) -> None:
    found = note_on_others(conditions_of(others_memory_bytes=3 * GIB, others_busy_fraction=busy))
    assert found == others_on_device(held_bytes=3 * GIB, busy_fraction=noted)


def test_a_device_that_does_not_tell_needs_no_note() -> None:
    assert note_on_others(None) is None


def readings(*given: tuple[str, float]) -> list[BusyReading]:
    return [BusyReading(source=source, fraction=fraction) for source, fraction in given]


@pytest.mark.parametrize(("nvml", "differs"), [(0.60, True), (0.85, False), (1.0, True)])
def test_sources_over_ten_points_apart_disagree(nvml: float, differs: bool) -> None:
    found = disagreement(readings((PROFILER_SOURCE, 0.80), (NVML_SOURCE, nvml)))
    assert (found is not None) == differs
    if found is not None:
        assert found[0].fraction < found[1].fraction


def test_the_loops_waits_are_no_rival_to_what_a_device_tells() -> None:
    assert disagreement(readings((NVML_SOURCE, 0.9), (WAIT_SOURCE, 0.2))) is None


@pytest.mark.parametrize(
    ("told", "best"),
    [
        (
            [{WAIT_SOURCE, NVML_SOURCE, PROFILER_SOURCE}, {PROFILER_SOURCE, NVML_SOURCE}],
            PROFILER_SOURCE,
        ),
        ([{WAIT_SOURCE, NVML_SOURCE, PROFILER_SOURCE}, {WAIT_SOURCE, NVML_SOURCE}], NVML_SOURCE),
        ([{WAIT_SOURCE, NVML_SOURCE, GPM_SOURCE}, {NVML_SOURCE, GPM_SOURCE}], GPM_SOURCE),
        ([{PROFILER_SOURCE, GPM_SOURCE}, {GPM_SOURCE, PROFILER_SOURCE}], PROFILER_SOURCE),
        ([{WAIT_SOURCE, NVML_SOURCE}, {WAIT_SOURCE}], WAIT_SOURCE),
        ([{WAIT_SOURCE, "a counter of its own"}], "a counter of its own"),
        ([{NVML_SOURCE, "a counter of its own"}], NVML_SOURCE),
        ([{NVML_SOURCE}, {PROFILER_SOURCE}], None),
        ([], None),
    ],
)
def test_the_best_source_is_one_that_told_of_all(told: list[set[str]], best: str | None) -> None:
    assert best_common_source(told) == best


seconds = st.floats(0, 100, allow_nan=False)
rates = st.floats(1e-3, 1e9, allow_nan=False)


def rank(number: int, loader: float | None = None, device: float | None = None) -> RankFigures:
    return make_rank(number, loader_ceiling=loader, device_ceiling=device)


def exchange_of(step_s: float, step_alone_s: float, exchange_s: float) -> Communication:
    return Communication(
        step_s=step_s, step_alone_s=step_alone_s, exchange_s=exchange_s, bytes_exchanged=2**20
    )


@pytest.mark.parametrize(
    ("exchange", "exposed_s", "exposed", "hidden"),
    [
        (exchange_of(0.10, 0.08, 0.05), 0.02, 0.2, 0.6),
        (exchange_of(0.079, 0.08, 0.05), 0, 0, 1),  # a step that noise made shorter
        (exchange_of(0.2, 0.1, 0.05), 0.1, 0.5, 0),  # more than the exchange itself
        (exchange_of(0.1, 0.1, 0.0), 0, 0, 0),  # without an exchange
    ],
)
def test_what_the_exchange_adds_is_exposed_and_the_rest_hidden(
    exchange: Communication, exposed_s: float, exposed: float, hidden: float
) -> None:
    assert exchange.exposed_s == pytest.approx(exposed_s)
    assert exchange.exposed_fraction == pytest.approx(exposed)
    assert exchange.hidden_fraction == pytest.approx(hidden)


@given(seconds, seconds, seconds)
def test_shares_of_the_exchange_stay_within_the_whole(
    step_s: float, step_alone_s: float, exchange_s: float
) -> None:
    exchange = exchange_of(step_s, step_alone_s, exchange_s)
    assert 0 <= exchange.exposed_fraction <= 1
    assert 0 <= exchange.hidden_fraction <= 1


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([rank(0, 100.0), rank(1, 60.0), rank(2, 100.0)], {1: ("loader", 0.6)}),
        ([rank(0, device=50.0), rank(1, device=100.0)], {0: ("device", 0.5)}),
        ([rank(0, device=89.0), rank(1, device=100.0)], {0: ("device", 0.89)}),
        ([rank(0, device=91.0), rank(1, device=100.0)], {}),
        ([rank(0, 10.0, 10.0), rank(1, 100.0, 100.0)], {0: ("loader", 0.1)}),  # named once
        ([], {}),
        ([rank(0), rank(1)], {}),
        ([rank(0, device=10.0), rank(1)], {}),
    ],
)
def test_a_rank_far_below_the_others_is_uneven(ranks: list[RankFigures], found: Any) -> None:
    assert uneven_ranks(ranks) == found


@given(st.lists(rates, min_size=1, max_size=8))
def test_the_fastest_rank_is_never_uneven(devices: list[float]) -> None:
    found = uneven_ranks([rank(number, device=rate) for number, rate in enumerate(devices)])
    assert devices.index(max(devices)) not in found


@given(st.lists(rates, min_size=2, max_size=8))
def test_who_is_uneven_does_not_depend_on_the_order(devices: list[float]) -> None:
    ranks = [rank(number, device=rate) for number, rate in enumerate(devices)]
    assert uneven_ranks(ranks) == uneven_ranks(ranks[::-1])
