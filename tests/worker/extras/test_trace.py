"""What is read from the profiler's events, over traces written by hand and recorded (see data/traces/README.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from autotune.records.breakdown import DeviceTime, device_time
from autotune.worker.extras.profile import (
    MARK,
    TraceEvent,
    device_events,
    gap_fraction,
    host_waits,
    marked_part,
    read_kineto,
)

TRACES = Path(__file__).with_name("data") / "traces"
MICROSECOND = 1000
MILLISECOND = 1000 * MICROSECOND


def read_trace(path: Path) -> list[TraceEvent]:
    """The events of a file; what an event has beyond TraceEvent's fields is left out."""
    known = {field.name for field in fields(TraceEvent)}
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [
        TraceEvent(**{name: value for name, value in line.items() if name in known})
        for line in lines
    ]


def by_hand(name: str) -> list[TraceEvent]:
    return read_trace(TRACES / f"by_hand-{name}.jsonl")


def skewed(traces: Sequence[TraceEvent], skew_ns: int) -> list[TraceEvent]:
    """The same with the devices' clocks ahead of the host's."""
    return [
        replace(event, start_ns=event.start_ns + skew_ns, end_ns=event.end_ns + skew_ns)
        if event.is_on_device
        else event
        for event in traces
    ]


def without_ids(traces: Sequence[TraceEvent]) -> list[TraceEvent]:
    return [replace(event, correlation_id=0, linked_id=0) for event in traces]


def worked(traces: Sequence[TraceEvent], device_index: int = 0) -> DeviceTime:
    """What a device did in the marked part."""
    inside, _ = marked_part(traces)
    return device_time(device_events(inside, device_index), host_waits(inside))


ALL = sorted(TRACES.glob("*.jsonl*"))
ON_DEVICE = [path for path in ALL if any(event.is_on_device for event in read_trace(path))]


EACH_ON_DEVICE = pytest.mark.parametrize("path", ON_DEVICE, ids=lambda path: path.name)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_trace_has_our_mark_and_gaps_that_are_a_share(path: Path) -> None:
    inside, span_s = marked_part(read_trace(path))
    assert span_s > 0
    assert 0 <= gap_fraction(inside, span_s) < 1


@EACH_ON_DEVICE
def test_what_a_device_did_adds_up_and_lies_in_the_marked_span(path: Path) -> None:
    traces = read_trace(path)
    inside, span_s = marked_part(traces)
    time = worked(traces)
    assert 0 < time.busy_s <= span_s
    assert time.compute_s + time.copy_s + time.communication_s == pytest.approx(time.busy_s)
    assert 0 <= time.after_waits_s <= span_s - time.busy_s
    last_ns = max(end for _, end in host_waits(inside))
    assert last_ns >= max(event.end_ns for event in device_events(inside, 0))


@EACH_ON_DEVICE
def test_the_launch_of_nearly_all_that_a_device_did_is_known(path: Path) -> None:
    traces = read_trace(path)
    hour_ahead = skewed(traces, 3600 * 1000 * MILLISECOND)
    inside, _ = marked_part(traces)
    blind, _ = marked_part(without_ids(hour_ahead))
    assert device_events(inside, 0)
    assert not device_events(blind, 0), "without ids, a clock an hour ahead leaves nothing"
    known, _ = marked_part(hour_ahead)
    assert len(device_events(known, 0)) >= 0.99 * len(device_events(inside, 0))


@EACH_ON_DEVICE
@pytest.mark.parametrize(
    "skew_ns", [-5 * MILLISECOND, -30 * MICROSECOND, 30 * MICROSECOND, 5 * MILLISECOND]
)
def test_a_device_whose_clock_differs_has_done_the_same(path: Path, skew_ns: int) -> None:
    traces = read_trace(path)
    true, told = worked(traces), worked(skewed(traces, skew_ns))
    assert replace(told, after_waits_s=0) == replace(true, after_waits_s=0)


@pytest.mark.parametrize(
    "skew_ns", [0, -5 * MILLISECOND, -30 * MICROSECOND, 30 * MICROSECOND, 5 * MILLISECOND]
)
def test_a_gap_after_a_wait_of_the_host_is_told_whatever_the_clocks_and_the_last_wait_has_none(
    skew_ns: int,
) -> None:
    traces = skewed(by_hand("host_waits"), skew_ns)
    inside, _ = marked_part(traces)
    assert len(host_waits(inside)) == 3, (
        "streams, devices and events; launches and operators are none"
    )
    assert worked(traces).after_waits_s == pytest.approx(80e-6)
    assert worked(traces).busy_s == pytest.approx(310e-6)


@pytest.mark.parametrize("skew_ns", [0, -150 * MICROSECOND, 150 * MICROSECOND])
def test_a_kernel_of_the_step_before_is_none_of_ours_and_one_at_the_edge_is(skew_ns: int) -> None:
    traces = skewed(by_hand("overlapping_streams"), skew_ns)
    inside, _ = marked_part(traces)
    assert len(device_events(inside, 0)) == 6
    names = [event.name for event in inside]
    assert "void at::native::vectorized_elementwise_kernel<4>" not in names


def test_clocks_that_agree_are_left_alone() -> None:
    traces = by_hand("host_waits")
    inside, _ = marked_part(traces)
    assert {event.start_ns for event in inside if event.is_on_device} == {
        event.start_ns for event in traces if event.is_on_device
    }


def test_a_call_of_the_runtime_is_not_taken_for_the_operator_of_the_same_number() -> None:
    call = TraceEvent(
        name="cudaLaunchKernel",
        activity="cuda_runtime",
        start_ns=1100,
        end_ns=1110,
        is_on_device=False,
        is_annotation=False,
        correlation_id=7,
    )
    mark = replace(call, name=MARK, activity="", start_ns=1000, end_ns=2000, correlation_id=0)
    early = replace(call, name="aten::mul", activity="cpu_op", start_ns=100, end_ns=200)
    kernel = replace(call, name="gemm", activity="kernel", start_ns=1200, is_on_device=True)
    assert kernel in marked_part([mark, early, call, kernel])[0], (
        "launched by the call 7, not within the operator 7"
    )
    within = replace(kernel, correlation_id=8, linked_id=7)
    assert within not in marked_part([mark, early, call, within])[0], (
        "launched within the operator 7, by a call unseen"
    )


def kineto_event(entry: TraceEvent, *, has_activity: bool) -> Mock:
    """Return an event as torch gives it; 2.11 lacks its activity type."""
    kinds: Any = torch.autograd.DeviceType  # type: ignore[attr-defined] # torch does not list it
    answers: dict[str, Any] = {
        "name": entry.name,
        "start_ns": entry.start_ns,
        "duration_ns": entry.end_ns - entry.start_ns,
        "device_type": kinds.CUDA if entry.is_on_device else kinds.CPU,
        "device_index": entry.device_index,
        "scope": 7 if entry.is_annotation and not entry.is_on_device else 0,
        "is_user_annotation": entry.is_annotation,
        "correlation_id": entry.correlation_id,
        "linked_correlation_id": entry.linked_id,
    }
    if has_activity:
        answers["activity_type"] = entry.activity
    event = Mock(spec=list(answers))
    event.configure_mock(**{f"{name}.return_value": value for name, value in answers.items()})
    return event


ANY_TORCH = pytest.mark.parametrize("has_activity", [False, True])


def kineto(name: str, has_activity: bool = True) -> list[TraceEvent]:
    return read_kineto(kineto_event(entry, has_activity=has_activity) for entry in by_hand(name))


def test_what_torch_tells_today_is_read_whole() -> None:
    assert kineto("overlapping_streams") == by_hand("overlapping_streams")


@ANY_TORCH
def test_overlapping_streams_count_once_and_marks_and_other_devices_not_at_all(
    has_activity: bool,
) -> None:
    traces = kineto("overlapping_streams", has_activity)
    assert marked_part(traces)[1] == pytest.approx(1000e-6)
    time = worked(traces)
    assert time.busy_s == pytest.approx(600e-6)
    assert time.compute_s == pytest.approx(360e-6), "the memset among it"
    assert time.copy_s == pytest.approx(50e-6)
    assert time.communication_s == pytest.approx(190e-6)
    assert worked(traces, 1).busy_s == pytest.approx(800e-6), "another device is told by its index"


@ANY_TORCH
def test_a_gap_after_a_wait_is_told_by_every_torch(has_activity: bool) -> None:
    time = worked(kineto("host_waits", has_activity))
    assert time.after_waits_s == pytest.approx(80e-6)
    assert time.busy_s == pytest.approx(310e-6)


def test_gaps_on_the_cpu_lie_outside_operators_wrappers_and_marks_left_out() -> None:
    inside, span_s = marked_part(by_hand("cpu_operators"))
    assert gap_fraction(inside, span_s) == pytest.approx(0.5)


def test_without_our_mark_nothing_is_read() -> None:
    traces = [event for event in by_hand("cpu_operators") if event.name != MARK]
    assert marked_part(traces) == ([], 0.0)
    assert gap_fraction([], 0.0) == 0
