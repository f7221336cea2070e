"""Find where a step's time goes: a few extra steps under torch's profiler, read from its trace."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from autotune.models.statistics import window_rate
from autotune.records.breakdown import (
    DeviceEvent,
    TimeBreakdown,
    breakdown_on_cpu,
    breakdown_on_device,
    device_time,
    kind_of,
    length,
    union,
)
from autotune.records.measurement import PROFILER_SOURCE, BusyReading, Restart, Window
from autotune.worker.batch import Reused
from autotune.worker.device import Device
from autotune.worker.step import StepTrainer

# What torch's profiler has recorded: events of the host and of devices, and which of them belong to
# the marked steps.
#
# Takes Kineto's events; hands on TraceEvents, and from these what a device did, when the host
# waited for it, and how long no operator ran. Pure functions over nanoseconds; the profiler itself
# is started in profile.py.
#
# A device's events carry the time of the device's clock, which Kineto converts: some microseconds
# may be left between it and the host's clock, now and then milliseconds. What belongs to the marked
# steps is therefore decided by what launched it.


MARK = "autotune: profiled steps"
"""Name of the span on the host that holds the profiled steps. The device has nothing to do at both
of its ends."""
_WORK = (
    "kernel",
    "memcpy",
    "memset",
)  # of kineto's activity types on a device; gpu_user_annotation is none
_CALLS = (
    "_runtime",
    "_driver",
)  # ends of those on the host that launch: cuda_runtime, xpu_driver; ActivityType.h
_CALL = re.compile(r"(cu|cuda|hip)[A-Z]\w*")
"""Names of such calls, which have a number of their own: cudaLaunchKernel, cuLaunchKernelEx,
hipMemcpyAsync. torch 2.11 does not give the activity types of a trace (seen on an H200)."""
_WAIT = re.compile(r"(cuda|hip)\w*Synchronize")
# A compiled graph's own kernels are no operators, its call is marked so.
_COMPILED = "## Call CompiledFxGraph"
_WRAPPERS = (
    "autograd::engine::",
    "TorchDynamo",
    "Torch-Compiled Region",
    "AOTDispatcher",
    "Pregraph",
)
"""Events of the host's own doings around operators: the engine's nodes, and what enters a compiled
graph."""


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
    """Shared by an event on a device and the runtime's call that launched it; an operator has a
    number of its own among operators. 0 where there is none."""
    linked_id: int = 0
    """The operator within which a device's event was launched, by that operator's `correlation_id`;
    0 for none."""


def read_kineto(events: Iterable[Any]) -> list[TraceEvent]:
    """The events of `profiler.kineto_results.events()`; methods that other versions lack are tried, not assumed.

    Source: torch/csrc/autograd/profiler_kineto.cpp, KinetoEvent::correlationId and
    linkedCorrelationId.
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
            is_annotation=event.scope() == 7
            or (hasattr(event, "is_user_annotation") and event.is_user_annotation()),
            device_index=event.device_index(),
            correlation_id=event.correlation_id() if hasattr(event, "correlation_id") else 0,
            linked_id=event.linked_correlation_id()
            if hasattr(event, "linked_correlation_id")
            else 0,
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
        (trace.start_ns, trace.end_ns)
        for trace in traces
        if not trace.is_on_device and _WAIT.fullmatch(trace.name)
    ]


def gap_fraction(traces: Iterable[TraceEvent], span_s: float) -> float:
    """Share of a span on the CPU in which no operator ran on any thread: Python, and the engine between operators."""
    operators = (trace for trace in traces if not trace.is_on_device and _is_operator(trace))
    busy_s = length(union((operator.start_ns, operator.end_ns) for operator in operators)) * 1e-9
    return min(1.0, max(0.0, 1.0 - busy_s / span_s)) if span_s > 0 else 0.0


def marked_part(traces: Sequence[TraceEvent]) -> tuple[list[TraceEvent], float]:
    """The events of our own mark, and its length in seconds by the host's clock; none without the mark.

    An event on a device belongs to the mark when its operator, or the call that launched it, began
    within it, whatever the device's clock says. Its own time counts only where neither is known.
    Handed on are the device's events in the host's time, as far as cause and effect determine it.
    """
    mark = next((trace for trace in traces if trace.name == MARK and not trace.is_on_device), None)
    if mark is None:
        return [], 0.0
    on_host = [trace for trace in traces if not trace.is_on_device]
    operators = {trace.correlation_id: trace.start_ns for trace in on_host if not _is_call(trace)}
    calls = {trace.correlation_id: trace.start_ns for trace in on_host if _is_call(trace)}
    inside = [trace for trace in on_host if _holds(mark, trace.start_ns, trace.end_ns)]
    unknown = []
    launched = []
    for trace in traces:
        if trace.is_on_device:
            launch_ns = max(
                operators.get(trace.linked_id or -1, 0), calls.get(trace.correlation_id or -1, 0)
            )
            if launch_ns and _holds(mark, launch_ns, launch_ns):
                launched.append((trace, launch_ns))
            elif not launch_ns and _holds(mark, trace.start_ns, trace.end_ns):
                unknown.append(trace)
    waited_ns = max(
        (end for start, end in host_waits(traces) if _holds(mark, start, start)),
        default=mark.end_ns,
    )
    return [*inside, *unknown, *_in_host_time(launched, waited_ns)], (
        mark.end_ns - mark.start_ns
    ) * 1e-9


def _holds(span: TraceEvent, start_ns: int, end_ns: int) -> bool:
    return span.start_ns <= start_ns and end_ns <= span.end_ns


def _is_call(event: TraceEvent) -> bool:
    """Whether it is a call of the device's runtime, whose correlation ids are others than the operators'."""
    return (
        event.activity.endswith(_CALLS)
        if event.activity
        else _CALL.fullmatch(event.name) is not None
    )


def _in_host_time(launched: Sequence[tuple[TraceEvent, int]], waited_ns: int) -> list[TraceEvent]:
    """Events on devices with the times of their launches, each device's moved together to where they are possible.

    None begins before its launch, and none ends after the host's last wait for all of them. Where
    that does not hold as it is, the clocks differ by something between the two bounds; both are
    some microseconds off, and so the middle is taken, as in the Network Time Protocol (RFC 5905,
    section 8).
    """
    moved = []
    for index in {event.device_index for event, _ in launched}:
        here = [(event, launch_ns) for event, launch_ns in launched if event.device_index == index]
        least_ns = max(launch_ns - event.start_ns for event, launch_ns in here)
        most_ns = waited_ns - max(event.end_ns for event, _ in here)
        shift_ns = 0 if least_ns <= 0 <= most_ns else (least_ns + most_ns) // 2
        moved += [
            replace(own, start_ns=own.start_ns + shift_ns, end_ns=own.end_ns + shift_ns)
            for own, _ in here
        ]
    return moved


def _is_work(event: TraceEvent, marked: set[str]) -> bool:
    if event.is_annotation:
        return False
    if event.activity:
        return any(word in event.activity for word in _WORK)
    return (
        event.name not in marked
    )  # an older torch: the span on the device bears the name of that on the host


def _is_operator(event: TraceEvent) -> bool:
    if event.is_annotation:
        return event.name.startswith(_COMPILED)
    return event.activity in {"", "cpu_op"} and not event.name.startswith(_WRAPPERS)


# Where a step's time goes: a few extra steps under torch's profiler, joined with the times of the
# window.
#
# Takes a Trainer, batches and the window; hands on a TimeBreakdown and, on an accelerator, how busy
# it was. A profiled step is slower than another one: no rate is ever taken from here, the window's
# step is what the work is compared to.


_STEPS = 5  # our own convention: enough for a mean, few enough that the trace stays small
_LONGEST_S = 1.0  # our own convention, as steps go without the profiler
_CUPTI_DETACHES_FROM = (12, 6)
"""Version of CUDA from which CUPTI can be detached and attached again next to CUDA graphs; it
crashes before. Source: torch/profiler/profiler.py, start_trace; pytorch #112507, #151124."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What a batch of a long run takes, in seconds; a run takes `step_s + restart_s` for each."""

    step_s: float
    """Without the restarts of epochs."""
    data_wait_s: float
    """The part of it in which the loop waits for the loader."""
    restart_s: float
    """A batch's share of its epoch's restart."""


def break_down(
    trainer: StepTrainer,
    *,
    host: Sequence[Any],
    held: Sequence[Any],
    window: Window,
    restarts: Sequence[Restart],
    exchange_s: float = 0.0,
) -> tuple[TimeBreakdown, BusyReading | None]:
    """Profile a few extra steps and say where the time goes, and how busy an accelerator was (None: it is the CPU).

    Args:
        trainer: Where training stands.
        host: Batches as the loader delivers them: on an accelerator their copies belong to the
            step.
        held: The same on the device.
        window: The trial's window.
        restarts: The restarts that fell into it, also where its blocks hold them.
        exchange_s: By how many seconds the exchange of gradients makes a batch longer; the extra
            steps are without it.

    Raises:
        RuntimeError: torch's profiler records nothing of this device.
    """
    times = step_times(window, restarts)
    steps = _steps_to_profile(trainer, times.step_s)
    known = {"profiled_steps": steps, "exchange_s": exchange_s, **asdict(times)}
    if trainer.device.kind == "cpu":
        copy_s = _copy_s(trainer, host)
        traces, span_s = marked_part(profile_steps(trainer, held, steps))
        return breakdown_on_cpu(
            copy_s=copy_s, gap_fraction=gap_fraction(traces, span_s), **known
        ), None
    traces, _ = marked_part(profile_steps(trainer, host, steps))
    events = device_events(traces, trainer.device.torch_device.index or 0)
    if not events:
        raise RuntimeError(
            f"torch's profiler must record what {trainer.device.torch_device} does, but recorded "
            f"nothing"
        )
    worked = device_time(events, host_waits(traces))
    busy = min(1.0, worked.busy_s / steps / (times.step_s + times.restart_s))
    return breakdown_on_device(worked, **known), BusyReading(fraction=busy, source=PROFILER_SOURCE)


def profile_steps(trainer: StepTrainer, batches: Sequence[Any], steps: int) -> list[TraceEvent]:
    """All that the profiler records of training on so many batches, in turns; those after the first step are marked."""
    known: Callable[[], set[ProfilerActivity]] = supported_activities  # torch has not typed it
    wanted = {ProfilerActivity.CPU} if trainer.device.kind == "cpu" else known()
    supply = Reused(batches)
    _detach_cupti_afterwards(trainer.device)
    with profile(
        activities=sorted(wanted, key=str), acc_events=True
    ) as profiler:  # one cycle; else torch 2.11 warns
        _train(
            trainer, islice(supply, trainer.config.grad_accum_steps)
        )  # starts what is started once
        given = list(islice(supply, steps))  # copies, where there are any, are no part of a step
        with record_function(MARK):
            _train(trainer, given)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return [] if results is None else read_kineto(results.events())


def _detach_cupti_afterwards(device: Device) -> None:
    """Have Kineto detach CUPTI once a profile is over, unless the user has decided on that.

    CUPTI stays attached otherwise, and training is 10 to 20 % slower for as long as the process
    lives: the trials that share it would be held against a baseline that was measured before its
    profile. The variable stays set, since Kineto reads it again when it has detached, which takes
    until the next calls of CUDA, and when it attaches for the next profile. Our processes alone
    have it: `autotune apply` profiles nothing.

    Below that version CUPTI stays attached. That is the guard which `compile_mode: reduce-overhead`
    needs: torch's own goes by inductor's configuration, which a mode given to torch.compile does
    not change, but Kineto detaches nothing unless this variable is 1. Source: pytorch #144455,
    #146604; kineto, CuptiActivityApi.cpp, teardownContext and cuptiTearDown_.
    """
    version = torch.version.cuda
    if device.kind != "cuda" or version is None:
        return
    if tuple(map(int, version.split(".")[:2])) >= _CUPTI_DETACHES_FROM:
        os.environ.setdefault("TEARDOWN_CUPTI", "1")


def step_times(window: Window, restarts: Sequence[Restart]) -> StepTimes:
    """A batch's times in a long run, from a window and the restarts that fell into it.

    Where the blocks hold the restarts, what these cost beyond the samples that came with them is
    taken out. Otherwise they are added in proportion, as in `window_rate`, whose correction for the
    batches that lay ready is wait as well.
    """
    batches = sum(block.batches for block in window.blocks)
    samples = sum(block.samples for block in window.blocks)
    seconds = sum(block.seconds for block in window.blocks)
    wait_s = window.starved_s / batches
    if window.whole_epochs:
        restart_s = min(_restart_total_s(samples, seconds, restarts) / batches, wait_s)
        return StepTimes(
            step_s=seconds / batches - restart_s,
            data_wait_s=wait_s - restart_s,
            restart_s=restart_s,
        )
    steady = window_rate(window.model_copy(update={"epoch_samples": None})).value
    per_batch = samples / batches
    step_s = per_batch / steady
    whole_s = per_batch / window_rate(window).value
    long_run_wait_s = min(step_s, max(0.0, wait_s + step_s - seconds / batches))
    return StepTimes(
        step_s=step_s, data_wait_s=long_run_wait_s, restart_s=max(0.0, whole_s - step_s)
    )


def _restart_total_s(samples: int, seconds: float, restarts: Sequence[Restart]) -> float:
    """What restarts inside some blocks cost beyond the samples that came with them; all their time where all did."""
    apart_s = sum(restart.seconds for restart in restarts)
    came = sum(restart.samples for restart in restarts)
    if came >= samples or apart_s >= seconds:
        return apart_s
    return max(0.0, apart_s - came * (seconds - apart_s) / (samples - came))


def _train(trainer: StepTrainer, batches: Iterable[Any]) -> None:
    for batch in batches:
        trainer.train(batch)
    trainer.device.synchronize()


def _steps_to_profile(trainer: StepTrainer, step_s: float) -> int:
    """Batches: five, fewer where they are long, in whole optimizer steps."""
    wanted = min(_STEPS, max(1, round(_LONGEST_S / max(step_s, 1e-6))))
    unit = trainer.config.grad_accum_steps
    return ceil(wanted / unit) * unit


def _copy_s(trainer: StepTrainer, batches: Sequence[Any]) -> float:
    """Seconds of moving a batch, by the clock: on the CPU nothing else runs meanwhile."""
    trainer.to_device(batches[0])
    begun = perf_counter()
    for batch in batches:
        trainer.to_device(batch)
    return (perf_counter() - begun) / len(batches)
