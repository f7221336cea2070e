"""What torch's profiler has recorded: events of the host and of devices, and which of them belong to the marked steps.

Takes Kineto's events; hands on TraceEvents, and from these what a device did, when the host waited for it, and how long
no operator ran. Pure functions over nanoseconds; the profiler itself is started in profile.py.

A device's events carry the time of the device's clock, which Kineto converts: some microseconds may be left between it
and the host's clock, now and then milliseconds. What belongs to the marked steps is therefore decided by what launched
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune.records.trace_intervals import DeviceEvent, kind_of, length, union

__all__ = ["MARK", "TraceEvent", "device_events", "gap_fraction", "host_waits", "marked_part", "read_kineto"]

MARK = "autotune: profiled steps"
"""Name of the span on the host that holds the profiled steps. The device has nothing to do at both of its ends."""
_WORK = ("kernel", "memcpy", "memset")  # of kineto's activity types on a device; gpu_user_annotation is none
_CALLS = ("_runtime", "_driver")  # ends of those on the host that launch: cuda_runtime, xpu_driver; ActivityType.h
_CALL = re.compile(r"(cu|cuda|hip)[A-Z]\w*")
"""Names of such calls, which have a number of their own: cudaLaunchKernel, cuLaunchKernelEx, hipMemcpyAsync. torch 2.11
does not give the activity types of a trace (seen on an H200)."""
_WAIT = re.compile(r"(cuda|hip)\w*Synchronize")
_COMPILED = "## Call CompiledFxGraph"  # a compiled graph's own kernels are no operators, its call is marked so
_WRAPPERS = ("autograd::engine::", "TorchDynamo", "Torch-Compiled Region", "AOTDispatcher", "Pregraph")
"""Events of the host's own doings around operators: the engine's nodes, and what enters a compiled graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """An event of a trace, as far as it matters here; times in nanoseconds, on the device on a clock of its own."""

    name: str
    activity: str = ""
    """Kineto's activity type, such as "kernel"; empty where torch does not give it."""
    start_ns: int
    end_ns: int
    is_on_device: bool
    is_annotation: bool
    """A span that somebody has marked: it holds work and gaps alike."""
    device_index: int = 0
    correlation_id: int = 0
    """Shared by an event on a device and the runtime's call that launched it; an operator has a number of its own among
    operators. 0 where there is none."""
    linked_id: int = 0
    """The operator within which a device's event was launched, by that operator's `correlation_id`; 0 for none."""


def read_kineto(events: Iterable[Any]) -> list[TraceEvent]:
    """The events of `profiler.kineto_results.events()`; methods that other versions lack are tried, not assumed.

    Source: torch/csrc/autograd/profiler_kineto.cpp, KinetoEvent::correlationId and linkedCorrelationId.
    """
    on_host = torch.autograd.DeviceType.CPU  # type: ignore[attr-defined] # torch does not list it
    return [
        TraceEvent(
            name=event.name(),
            activity=event.activity_type() if hasattr(event, "activity_type") else "",
            start_ns=event.start_ns(),
            end_ns=event.start_ns() + event.duration_ns(),
            is_on_device=event.device_type() != on_host,
            # RecordScope::USER_SCOPE, ATen/record_function.h: torch.profiler.record_function
            is_annotation=event.scope() == 7 or (hasattr(event, "is_user_annotation") and event.is_user_annotation()),
            device_index=event.device_index(),
            correlation_id=event.correlation_id() if hasattr(event, "correlation_id") else 0,
            linked_id=event.linked_correlation_id() if hasattr(event, "linked_correlation_id") else 0,
        )
        for event in events
    ]


def device_events(traces: Sequence[TraceEvent], device_index: int) -> list[DeviceEvent]:
    """What a device did: kernels, copies and memsets; spans that are marked on its timeline are none."""
    marked = {trace.name for trace in traces if trace.is_annotation}
    return [
        DeviceEvent(
            name=trace.name,
            kind=kind_of(trace.name),
            start_ns=trace.start_ns,
            end_ns=trace.end_ns,
            device_index=trace.device_index,
        )
        for trace in traces
        if trace.is_on_device and trace.device_index == device_index and _is_work(trace, marked)
    ]


def host_waits(traces: Iterable[TraceEvent]) -> list[tuple[int, int]]:
    """When the host waited for a device, in nanoseconds: cudaStreamSynchronize and its kin, hip's too."""
    return [
        (trace.start_ns, trace.end_ns) for trace in traces if not trace.is_on_device and _WAIT.fullmatch(trace.name)
    ]


def gap_fraction(traces: Iterable[TraceEvent], span_s: float) -> float:
    """Share of a span on the CPU in which no operator ran on any thread: Python, and the engine between operators."""
    operators = (trace for trace in traces if not trace.is_on_device and _is_operator(trace))
    busy_s = length(union((operator.start_ns, operator.end_ns) for operator in operators)) * 1e-9
    return min(1.0, max(0.0, 1.0 - busy_s / span_s)) if span_s > 0 else 0.0


def marked_part(traces: Sequence[TraceEvent]) -> tuple[list[TraceEvent], float]:
    """The events of our own mark, and its length in seconds by the host's clock; none without the mark.

    An event on a device belongs to the mark when its operator, or the call that launched it, began within it, whatever
    the device's clock says. Its own time counts only where neither is known. Handed on are the device's events in the
    host's time, as far as cause and effect determine it.
    """
    mark = next((trace for trace in traces if trace.name == MARK and not trace.is_on_device), None)
    if mark is None:
        return [], 0.0
    on_host = [trace for trace in traces if not trace.is_on_device]
    operators = {trace.correlation_id: trace.start_ns for trace in on_host if not _is_call(trace)}
    calls = {trace.correlation_id: trace.start_ns for trace in on_host if _is_call(trace)}
    inside = [trace for trace in on_host if _holds(mark, trace.start_ns, trace.end_ns)]
    unknown, launched = [], []
    for trace in traces:
        if trace.is_on_device:
            launch_ns = max(operators.get(trace.linked_id or -1, 0), calls.get(trace.correlation_id or -1, 0))
            if launch_ns and _holds(mark, launch_ns, launch_ns):
                launched.append((trace, launch_ns))
            elif not launch_ns and _holds(mark, trace.start_ns, trace.end_ns):
                unknown.append(trace)
    waited_ns = max((end for start, end in host_waits(traces) if _holds(mark, start, start)), default=mark.end_ns)
    return [*inside, *unknown, *_in_host_time(launched, waited_ns)], (mark.end_ns - mark.start_ns) * 1e-9


def _holds(span: TraceEvent, start_ns: int, end_ns: int) -> bool:
    return span.start_ns <= start_ns and end_ns <= span.end_ns


def _is_call(event: TraceEvent) -> bool:
    """Whether it is a call of the device's runtime, whose correlation ids are others than the operators'."""
    return event.activity.endswith(_CALLS) if event.activity else _CALL.fullmatch(event.name) is not None


def _in_host_time(launched: Sequence[tuple[TraceEvent, int]], waited_ns: int) -> list[TraceEvent]:
    """Events on devices with the times of their launches, each device's moved together to where they are possible.

    None begins before its launch, and none ends after the host's last wait for all of them. Where that does not hold as
    it is, the clocks differ by something between the two bounds; both are some microseconds off, and so the middle is
    taken, as in the Network Time Protocol (RFC 5905, section 8).
    """
    moved = []
    for index in {event.device_index for event, _ in launched}:
        here = [(event, launch_ns) for event, launch_ns in launched if event.device_index == index]
        least_ns = max(launch_ns - event.start_ns for event, launch_ns in here)
        most_ns = waited_ns - max(event.end_ns for event, _ in here)
        shift_ns = 0 if least_ns <= 0 <= most_ns else (least_ns + most_ns) // 2
        moved += [replace(own, start_ns=own.start_ns + shift_ns, end_ns=own.end_ns + shift_ns) for own, _ in here]
    return moved


def _is_work(event: TraceEvent, marked: set[str]) -> bool:
    if event.is_annotation:
        return False
    if event.activity:
        return any(word in event.activity for word in _WORK)
    return event.name not in marked  # an older torch: the span on the device bears the name of that on the host


def _is_operator(event: TraceEvent) -> bool:
    if event.is_annotation:
        return event.name.startswith(_COMPILED)
    return event.activity in {"", "cpu_op"} and not event.name.startswith(_WRAPPERS)
