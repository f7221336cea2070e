"""The parts of the wall time: they add up to 1, and idle time is not called waiting twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.records.breakdown import (
    DeviceTime,
    LoaderCosts,
    Share,
    TimeBreakdown,
    breakdown_on_cpu,
    breakdown_on_device,
)

seconds = st.floats(0, 10, allow_nan=False)
positive = st.floats(1e-6, 10, allow_nan=False)


def device_time(
    compute_s: float = 0.0,
    copy_s: float = 0.0,
    communication_s: float = 0.0,
    after_waits_s: float = 0.0,
) -> DeviceTime:
    """A device's time in some steps, without anything hidden."""
    busy_s = compute_s + copy_s + communication_s
    return DeviceTime(
        busy_s=busy_s,
        compute_s=compute_s,
        copy_s=copy_s,
        communication_s=communication_s,
        after_waits_s=after_waits_s,
    )


def fractions(breakdown: TimeBreakdown) -> dict[str, float]:
    return {name: share.fraction for name, share in breakdown.shares().items()}


@given(seconds, seconds, seconds, seconds, positive, seconds, seconds)
def test_shares_on_a_device_add_up_whatever_was_measured(
    compute_s: float,
    copy_s: float,
    communication_s: float,
    after_waits_s: float,
    step_s: float,
    wait_s: float,
    restart_s: float,
) -> None:
    worked = device_time(compute_s, copy_s, communication_s, after_waits_s)
    breakdown = breakdown_on_device(
        worked, profiled_steps=5, step_s=step_s, data_wait_s=wait_s, restart_s=restart_s
    )
    assert sum(fractions(breakdown).values()) == pytest.approx(1)
    assert breakdown.restart_fraction <= breakdown.data_wait.fraction + 1e-9


@given(positive, seconds, seconds, st.floats(-0.5, 1.5), seconds)
def test_shares_on_the_cpu_add_up_whatever_was_measured(
    step_s: float, wait_s: float, copy_s: float, gap_fraction: float, restart_s: float
) -> None:
    breakdown = breakdown_on_cpu(
        step_s=step_s,
        data_wait_s=wait_s,
        copy_s=copy_s,
        gap_fraction=gap_fraction,
        restart_s=restart_s,
        profiled_steps=5,
    )
    assert sum(fractions(breakdown).values()) == pytest.approx(1)


def test_waiting_that_queued_work_hides_is_not_counted() -> None:
    worked = device_time(compute_s=5 * 0.9)
    breakdown = breakdown_on_device(
        worked, profiled_steps=5, step_s=1.0, data_wait_s=0.5, restart_s=0.0
    )
    assert fractions(breakdown) == pytest.approx(
        {"data_wait": 0.1, "device_copy": 0, "compute": 0.9, "synchronise": 0, "idle": 0}, abs=1e-9
    )


def test_what_neither_work_nor_waits_explain_is_idle() -> None:
    worked = device_time(compute_s=5 * 0.3, copy_s=5 * 0.1, communication_s=5 * 0.1)
    breakdown = breakdown_on_device(
        worked, profiled_steps=5, step_s=1.0, data_wait_s=0.2, restart_s=1.0
    )
    assert fractions(breakdown) == pytest.approx(
        {"data_wait": 0.6, "device_copy": 0.05, "compute": 0.15, "synchronise": 0.05, "idle": 0.15}
    )
    assert breakdown.restart_fraction == pytest.approx(0.5)


def test_kernels_that_the_profiler_has_slowed_down_are_scaled_to_the_step() -> None:
    worked = device_time(compute_s=5 * 1.5, copy_s=5 * 0.5)
    breakdown = breakdown_on_device(
        worked, profiled_steps=5, step_s=1.0, data_wait_s=0.0, restart_s=0.0
    )
    assert breakdown.compute.fraction == pytest.approx(0.75)
    assert breakdown.device_copy.fraction == pytest.approx(0.25)


def test_a_restart_that_queued_work_hides_costs_what_the_work_leaves() -> None:
    worked = device_time(compute_s=5 * 0.9)
    breakdown = breakdown_on_device(
        worked, profiled_steps=5, step_s=0.6, data_wait_s=0.0, restart_s=0.4
    )
    assert breakdown.compute.fraction == pytest.approx(0.9)
    assert breakdown.restart_fraction == pytest.approx(0.1)


def test_idle_time_after_the_hosts_waits_is_synchronizing() -> None:
    worked = device_time(compute_s=5 * 0.5, after_waits_s=5 * 0.2)
    breakdown = breakdown_on_device(
        worked, profiled_steps=5, step_s=1.0, data_wait_s=0.1, restart_s=0.0
    )
    assert fractions(breakdown) == pytest.approx(
        {"data_wait": 0.1, "device_copy": 0, "compute": 0.5, "synchronise": 0.2, "idle": 0.2}
    )
    slowed_down = device_time(compute_s=5 * 0.5, after_waits_s=5 * 7.0)
    breakdown = breakdown_on_device(
        slowed_down, profiled_steps=5, step_s=1.0, data_wait_s=0.1, restart_s=0.0
    )
    assert (breakdown.synchronise.fraction, breakdown.idle.fraction) == pytest.approx((0.4, 0.0))


@pytest.mark.parametrize(("exchange_s", "communication_s"), [(0.0, 0.1), (0.1, 0.0), (0.1, 0.1)])
def test_communication_is_told_with_what_has_measured_it(
    exchange_s: float, communication_s: float
) -> None:
    worked = device_time(1.0, communication_s=communication_s)
    source = breakdown_on_device(
        worked, profiled_steps=5, step_s=1.0, data_wait_s=0.0, restart_s=0.0, exchange_s=exchange_s
    ).synchronise.source
    assert "profiler in 5" in source
    assert ("exchange" in source) == (exchange_s > 0)
    assert ("communication" in source) == (communication_s > 0)


def test_fractions_that_do_not_add_up_are_refused() -> None:
    half, nothing = Share(fraction=0.5, source="made up"), Share(fraction=0, source="made up")
    with pytest.raises(ValidationError, match=r"1, .* 0\.5"):
        TimeBreakdown(
            data_wait=half, device_copy=nothing, compute=nothing, synchronise=nothing, idle=nothing
        )


@pytest.mark.parametrize(("cpu_s", "share"), [(0.5, 0.25), (2.0, 1.0), (6.0, 3.0)])
def test_the_cpus_share_of_an_item_tells_waiting_from_working(cpu_s: float, share: float) -> None:
    costs = LoaderCosts(
        items=1,
        item_s=2.0,
        item_cpu_s=cpu_s,
        item_median_s=2.0,
        item_p99_s=2.0,
        item_slowest_s=2.0,
        slow_tail_fraction=0.0,
        disk_bytes_per_item=0.0,
        item_bytes=0.0,
        collate_s=0.0,
    )
    assert costs.cpu_fraction == share
