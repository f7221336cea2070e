"""Unions of intervals: each instant counts once, whatever overlaps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records.breakdown import DeviceEvent, EventKind, device_time, kind_of, length, union

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
