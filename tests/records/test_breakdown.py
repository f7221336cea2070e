"""Break down the wall time: unions of intervals, and shares that add up to 1."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.records.breakdown import (
    DeviceEvent,
    DeviceTime,
    EventKind,
    Share,
    StepTimes,
    TimeBreakdown,
    breakdown_on_cpu,
    breakdown_on_device,
    device_time,
    kind_of,
    length,
    union,
)
from tests.factories import make_loader_costs

seconds = st.floats(0, 10, allow_nan=False)
positive = st.floats(1e-6, 10, allow_nan=False)


def on_device(
    compute_s: float,
    copy_s: float = 0.0,
    communication_s: float = 0.0,
    after_waits_s: float = 0.0,
    *,
    step_s: float = 1.0,
    data_wait_s: float = 0.0,
    restart_s: float = 0.0,
    exchange_s: float = 0.0,
) -> TimeBreakdown:
    """Return the shares of a step, from a device's seconds in each of five, none of them hidden."""
    device = DeviceTime(
        busy_s=5 * (compute_s + copy_s + communication_s),
        compute_s=5 * compute_s,
        copy_s=5 * copy_s,
        communication_s=5 * communication_s,
        after_waits_s=5 * after_waits_s,
    )
    times = StepTimes(
        step_s=step_s, data_wait_s=data_wait_s, restart_s=restart_s, exchange_s=exchange_s
    )
    return breakdown_on_device(device, times, profiled_steps=5)


def fractions(breakdown: TimeBreakdown) -> list[float]:
    """Return the shares of data, copies, computing, synchronizing and idling."""
    return [share.fraction for share in breakdown.shares().values()]


@given(seconds, seconds, seconds, seconds, positive, seconds, seconds)
def test_shares_on_a_device_add_up_whatever_was_measured(
    compute_s: float,
    copy_s: float,
    communication_s: float,
    after_waits_s: float,
    step_s: float,
    data_wait_s: float,
    restart_s: float,
) -> None:
    times = {"step_s": step_s, "data_wait_s": data_wait_s, "restart_s": restart_s}
    breakdown = on_device(compute_s, copy_s, communication_s, after_waits_s, **times)
    assert sum(fractions(breakdown)) == pytest.approx(1)
    assert breakdown.restart_fraction <= breakdown.data_wait.fraction + 1e-9


@given(positive, seconds, seconds, st.floats(-0.5, 1.5), st.floats(0, 1), seconds)
def test_shares_on_the_cpu_add_up_whatever_was_measured(
    step_s: float,
    wait_s: float,
    copy_s: float,
    gap_fraction: float,
    long_gap_fraction: float,
    restart_s: float,
) -> None:
    times = StepTimes(step_s=step_s, data_wait_s=wait_s, restart_s=restart_s)
    breakdown = breakdown_on_cpu(
        times,
        copy_s=copy_s,
        gap_fraction=gap_fraction,
        long_gap_fraction=long_gap_fraction,
        profiled_steps=5,
    )
    assert sum(fractions(breakdown)) == pytest.approx(1)
    assert breakdown.long_gap_fraction is not None
    assert breakdown.long_gap_fraction <= breakdown.idle.fraction + 1e-9


@pytest.mark.parametrize(
    ("breakdown", "expected"),
    [
        (on_device(0.9, data_wait_s=0.5), [0.1, 0, 0.9, 0, 0]),  # work hides waiting
        (
            on_device(0.3, 0.1, 0.1, data_wait_s=0.2, restart_s=1.0),
            [0.6, 0.05, 0.15, 0.05, 0.15],
        ),  # the rest is idle
        (on_device(1.5, 0.5), [0, 0.25, 0.75, 0, 0]),  # scaled to the step
        (on_device(0.9, step_s=0.6, restart_s=0.4), [0.1, 0, 0.9, 0, 0]),  # hides a restart
        (
            on_device(0.5, after_waits_s=0.2, data_wait_s=0.1),
            [0.1, 0, 0.5, 0.2, 0.2],
        ),  # idle after the host's waits
        (
            on_device(0.5, after_waits_s=7.0, data_wait_s=0.1),
            [0.1, 0, 0.5, 0.4, 0],
        ),  # no more than is idle
    ],
)
def test_shares_on_a_device(breakdown: TimeBreakdown, expected: list[float]) -> None:
    assert fractions(breakdown) == pytest.approx(expected, abs=1e-9)


def test_the_restart_is_part_of_waiting_for_data() -> None:
    breakdown = on_device(0.3, data_wait_s=0.2, restart_s=1.0)
    assert breakdown.restart_fraction == pytest.approx(0.5)


@pytest.mark.parametrize("exchange_s", [0.0, 0.1])
@pytest.mark.parametrize("communication_s", [0.0, 0.02])
def test_synchronizing_names_its_sources(exchange_s: float, communication_s: float) -> None:
    breakdown = on_device(0.2, communication_s=communication_s, exchange_s=exchange_s)
    source = breakdown.synchronise.source
    assert "profiler in 5" in source
    assert ("communication" in source) == (communication_s > 0)
    assert ("exchange" in source) == (exchange_s > 0)


def test_fractions_that_do_not_add_up_are_refused() -> None:
    half, nothing = Share(fraction=0.5, source="made up"), Share(fraction=0, source="made up")
    with pytest.raises(ValidationError, match=r"1, .* 0\.5"):
        TimeBreakdown(
            data_wait=half, device_copy=nothing, compute=nothing, synchronise=nothing, idle=nothing
        )


@pytest.mark.parametrize(("cpu_s", "share"), [(0.5, 0.25), (2.0, 1.0), (6.0, 3.0)])
def test_the_cpus_share_of_an_item_tells_waiting_from_working(cpu_s: float, share: float) -> None:
    assert make_loader_costs(2.0, item_cpu_s=cpu_s).cpu_fraction == share


moments = st.integers(0, 60)
intervals = st.lists(st.tuples(moments, moments), max_size=12)
kinds: st.SearchStrategy[EventKind] = st.sampled_from(["compute", "copy", "communication"])
events = st.lists(
    st.builds(DeviceEvent, kinds, moments, moments),
    max_size=12,
)


def covered(pairs: list[tuple[int, int]]) -> set[int]:
    """The instants that some intervals cover, one by one."""
    return {instant for start, end in pairs for instant in range(start, end)}


@given(intervals)
def test_a_union_covers_what_its_intervals_cover_and_is_disjoint_and_ordered(
    pairs: list[tuple[int, int]],
) -> None:
    merged = union(pairs)
    assert covered(merged) == covered(pairs)
    assert length(merged) == len(covered(pairs))
    assert all(before[1] < after[0] for before, after in pairwise(merged))


@given(events)
def test_the_parts_of_a_devices_time_add_up_to_its_busy_time(worked: list[DeviceEvent]) -> None:
    time = device_time(worked)
    assert time.compute_s + time.copy_s + time.communication_s == pytest.approx(
        time.busy_s, abs=1e-15
    )


@given(events)
def test_computing_hides_copies_and_both_hide_communication(worked: list[DeviceEvent]) -> None:
    def instants(*wanted: EventKind) -> set[int]:
        return covered([(event.start_ns, event.end_ns) for event in worked if event.kind in wanted])

    time = device_time(worked)
    assert round(time.copy_s * 1e9) == len(instants("copy") - instants("compute"))
    assert round(time.communication_s * 1e9) == len(
        instants("communication") - instants("compute", "copy")
    )


def test_a_device_without_events_has_done_nothing() -> None:
    assert device_time([]).busy_s == 0
    assert device_time([], [(0, 10)]).after_waits_s == 0


@given(events, intervals)
def test_idle_time_after_waits_lies_outside_all_work_and_within_its_ends(
    worked: list[DeviceEvent], waits: list[tuple[int, int]]
) -> None:
    whole = [(event.start_ns, event.end_ns) for event in worked]
    busy = covered(whole)
    idle = set(range(min(busy), max(busy))) - busy if busy else set[int]()
    assert 0 <= round(device_time(worked, waits).after_waits_s * 1e9) <= len(idle)
    everywhere = device_time(worked, [(0, 60)])
    assert round(everywhere.after_waits_s * 1e9) == len(idle)
    assert device_time(worked).after_waits_s == 0


@pytest.mark.parametrize(
    ("wait", "idle_ns"),
    [((5, 10), 20), ((2, 14), 20), ((10, 10), 20), ((2, 9), 0), ((12, 14), 0), ((31, 40), 0)],
)
def test_a_gap_follows_a_wait_that_saw_the_work_before_it_end(
    wait: tuple[int, int], idle_ns: int
) -> None:
    worked = [DeviceEvent("compute", start, start + 10) for start in (0, 30)]
    assert round(device_time(worked, [wait]).after_waits_s * 1e9) == idle_ns


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void rcclGenericKernel<1>", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memcpy DtoH (Device -> Pageable)", "copy"),
        ("Memcpy PtoP (Device -> Device)", "copy"),
        ("Memcpy DtoD (Device -> Device)", "compute"),
        ("Memset (Device)", "compute"),
        ("void at::native::vectorized_elementwise_kernel<4>", "compute"),
        ("my_memcpy_like_kernel", "compute"),
    ],
)
def test_only_copies_that_reach_or_leave_the_device_are_copies(name: str, kind: str) -> None:
    assert kind_of(name) == kind
