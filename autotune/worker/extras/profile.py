"""Find where a step's time goes, from a few extra steps under torch's profiler.

In: a trainer, batches and the window's figures. Out: a TimeBreakdown and, on an accelerator, its
busy fraction. A profiled step is slower than others, so no throughput is taken from it: the work is
compared to the window's step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import ceil
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from autotune.models.statistics import window_rate
from autotune.records.breakdown import (
    DeviceEvent,
    StepTimes,
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

# The profiler's trace
#
# Kineto converts the times of a device's events from the device's clock to the host's, with errors
# of microseconds, now and then milliseconds. The call that launched an event therefore decides if
# it belongs to the marked steps.


MARK = "autotune: profiled steps"
"""Name of the host's span around the profiled steps. The device is idle at both of its ends."""
_WORK = ("kernel", "memcpy", "memset")
"""Kineto's activity types of work on a device; gpu_user_annotation is not one."""
_CALLS = ("_runtime", "_driver")
"""Ends of Kineto's activity types of launches on the host (cuda_runtime, xpu_driver). Source:
kineto, ActivityType.h."""
_CALL = re.compile(r"(cu|cuda|hip)[A-Z]\w*")
"""Names of such calls (cudaLaunchKernel, cuLaunchKernelEx, hipMemcpyAsync), for torch versions that
give no activity types: 2.11 on an H200 did not."""
_WAIT = re.compile(r"(cuda|hip)\w*Synchronize")
_COMPILED = "## Call CompiledFxGraph"
"""Name of the call of a compiled graph, whose kernels belong to no operator."""
_WRAPPERS = (
    "autograd::engine::",
    "TorchDynamo",
    "Torch-Compiled Region",
    "AOTDispatcher",
    "Pregraph",
)
"""Starts of the names of host events that contain operators: nodes of the autograd engine, and
entries to compiled graphs."""
_USER_SCOPE = 7
"""Number of RecordScope::USER_SCOPE, of torch.profiler.record_function. Source:
ATen/record_function.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """An event of a trace; times in nanoseconds, on a device by the device's own clock."""

    name: str
    activity: str = ""
    """Kineto's activity type, such as "kernel"; empty if torch does not give it."""
    start_ns: int
    end_ns: int
    is_on_device: bool
    is_annotation: bool
    """True for a span that somebody has marked; it contains both work and gaps."""
    device_index: int = 0
    correlation_id: int = 0
    """Number shared by a device event and the runtime call that launched it; operators are numbered
    separately. 0 if there is none."""
    linked_id: int = 0
    """`correlation_id` of the operator that launched a device event; 0 if there is none."""


def read_kineto(events: Iterable[Any]) -> list[TraceEvent]:
    """Convert the events of `profiler.kineto_results.events()`.

    Source: torch/csrc/autograd/profiler_kineto.cpp, KinetoEvent::correlationId and
    linkedCorrelationId.
    """
    on_host = torch.autograd.DeviceType.CPU  # type: ignore[attr-defined] # torch does not list it
    return [
        TraceEvent(
            name=event.name(),
            # torch 2.11 lacks this method
            activity=event.activity_type() if hasattr(event, "activity_type") else "",
            start_ns=event.start_ns(),
            end_ns=event.start_ns() + event.duration_ns(),
            is_on_device=event.device_type() != on_host,
            is_annotation=event.is_user_annotation() or event.scope() == _USER_SCOPE,
            device_index=event.device_index(),
            correlation_id=event.correlation_id(),
            linked_id=event.linked_correlation_id(),
        )
        for event in events
    ]


def device_events(traces: Sequence[TraceEvent], device_index: int) -> list[DeviceEvent]:
    """Return the kernels, copies and memsets of a device, without spans marked on its timeline."""
    marked = {trace.name for trace in traces if trace.is_annotation}
    return [
        DeviceEvent(kind_of(trace.name), trace.start_ns, trace.end_ns)
        for trace in traces
        if trace.is_on_device and trace.device_index == device_index and _is_work(trace, marked)
    ]


def host_waits(traces: Iterable[TraceEvent]) -> list[tuple[int, int]]:
    """Return the host's waits for a device (cudaStreamSynchronize and others), in nanoseconds."""
    return [
        (trace.start_ns, trace.end_ns)
        for trace in traces
        if not trace.is_on_device and _WAIT.fullmatch(trace.name)
    ]


class Gaps(NamedTuple):
    """Shares of a span in which no operator ran on any thread of the CPU."""

    fraction: float
    """All gaps."""
    long_fraction: float
    """Gaps longer than any launch."""


_LONG_GAP_NS = 100_000
"""Length of a gap from which the script's own code fills it: ten times PyTorch's time for an operator
on the host. Source: pytorch.org, "PyTorch profiler"; the factor is our convention."""


def gap_fractions(traces: Iterable[TraceEvent], span_s: float) -> Gaps:
    """Return the shares of a span in which no operator ran.

    Args:
        traces: The events of the span.
        span_s: Its length in seconds.
    """
    if span_s <= 0:
        return Gaps(0.0, 0.0)
    operators = (trace for trace in traces if not trace.is_on_device and _is_operator(trace))
    busy = union((operator.start_ns, operator.end_ns) for operator in operators)
    gaps_ns = [after[0] - before[1] for before, after in pairwise(busy)]
    long_ns = sum(gap for gap in gaps_ns if gap >= _LONG_GAP_NS)
    whole = min(1.0, max(0.0, 1.0 - length(busy) * 1e-9 / span_s))
    return Gaps(whole, min(whole, long_ns * 1e-9 / span_s))


def marked_part(traces: Sequence[TraceEvent]) -> tuple[list[TraceEvent], float]:
    """Return the events of the marked steps, and their length in seconds by the host's clock.

    A device event belongs to them if its operator, or the call that launched it, began within the
    mark, whatever the device's clock says. Its own time counts only if neither is known. The times
    of device events are converted to the host's clock, as far as cause and effect determine it.
    Without the mark there are no events, and the length is 0.
    """
    mark = next((trace for trace in traces if trace.name == MARK and not trace.is_on_device), None)
    if mark is None:
        return [], 0.0

    # Find the device events that were launched within the mark.
    on_host = [trace for trace in traces if not trace.is_on_device]
    operators = {trace.correlation_id: trace.start_ns for trace in on_host if not _is_call(trace)}
    calls = {trace.correlation_id: trace.start_ns for trace in on_host if _is_call(trace)}
    inside = [trace for trace in on_host if _holds(mark, trace.start_ns, trace.end_ns)]
    unknown = []
    launched = []
    for trace in traces:
        if not trace.is_on_device:
            continue
        operator_ns = operators.get(trace.linked_id or -1, 0)
        call_ns = calls.get(trace.correlation_id or -1, 0)
        launch_ns = max(operator_ns, call_ns)
        if launch_ns and _holds(mark, launch_ns, launch_ns):
            launched.append((trace, launch_ns))
        elif not launch_ns and _holds(mark, trace.start_ns, trace.end_ns):
            unknown.append(trace)

    # All of them have ended by the host's last wait.
    waits_ns = [end for start, end in host_waits(traces) if _holds(mark, start, start)]
    waited_ns = max(waits_ns, default=mark.end_ns)
    events = [*inside, *unknown, *_in_host_time(launched, waited_ns)]
    return events, (mark.end_ns - mark.start_ns) * 1e-9


def _holds(span: TraceEvent, start_ns: int, end_ns: int) -> bool:
    return span.start_ns <= start_ns and end_ns <= span.end_ns


def _is_call(event: TraceEvent) -> bool:
    """Return whether an event is a call of the device's runtime, numbered apart from operators."""
    if event.activity:
        return event.activity.endswith(_CALLS)
    return _CALL.fullmatch(event.name) is not None


def _in_host_time(launched: Sequence[tuple[TraceEvent, int]], waited_ns: int) -> list[TraceEvent]:
    """Shift each device's events to the host's clock, so that causes precede effects.

    No event may begin before its launch, and none may end after the host's last wait. If the
    recorded times violate this, the shift lies between these two bounds; both are some microseconds
    off, so the middle is taken, as in the Network Time Protocol (RFC 5905, section 8).

    Args:
        launched: Device events, each with the time of its launch.
        waited_ns: End of the host's last wait.
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
    # In an older torch a device's span has the name of the host's span.
    return event.name not in marked


def _is_operator(event: TraceEvent) -> bool:
    if event.is_annotation:
        return event.name.startswith(_COMPILED)
    return event.activity in {"", "cpu_op"} and not event.name.startswith(_WRAPPERS)


# The profiled steps


_STEPS = 5
"""Number of steps: enough for a mean, few enough for a small trace. Source: our convention."""
_LONGEST_S = 1.0
"""Seconds of all steps, as they take without the profiler. Source: our convention."""
_CUPTI_DETACHES_FROM = (12, 6)
"""Version of CUDA from which CUPTI can be detached and attached again next to CUDA graphs; it
crashes before. Source: torch/profiler/profiler.py, start_trace; pytorch #112507, #151124."""


def break_down(
    trainer: StepTrainer,
    *,
    host: Sequence[Any],
    held: Sequence[Any],
    window: Window,
    restarts: Sequence[Restart],
    exchange_s: float = 0.0,
) -> tuple[TimeBreakdown, BusyReading | None]:
    """Profile a few extra steps, and divide the window's step by its causes.

    Args:
        trainer: The trainer, whose training continues.
        host: Batches as the loader delivers them: on an accelerator their copies belong to the
            step.
        held: The same batches on the device.
        window: The trial's window.
        restarts: All restarts in the window, inside its blocks or between them.
        exchange_s: Seconds that exchanging gradients adds to a batch; the extra steps do not
            exchange them.

    Returns:
        The breakdown, and the busy fraction of an accelerator (None on a CPU).

    Raises:
        RuntimeError: torch's profiler records nothing of this device.
    """
    times = replace(step_times(window, restarts), exchange_s=exchange_s)

    # Profile five steps or fewer, rounded up to whole optimizer steps.
    wanted = min(_STEPS, max(1, round(_LONGEST_S / max(times.step_s, 1e-6))))
    unit = trainer.config.grad_accum_steps
    steps = ceil(wanted / unit) * unit
    if trainer.device.kind == "cpu":
        copy_s = _copy_s(trainer, host)
        traces, span_s = marked_part(profile_steps(trainer, held, steps))
        gaps = gap_fractions(traces, span_s)
        own = breakdown_on_cpu(
            times,
            copy_s=copy_s,
            gap_fraction=gaps.fraction,
            long_gap_fraction=gaps.long_fraction,
            profiled_steps=steps,
        )
        return own, None
    traces, _ = marked_part(profile_steps(trainer, host, steps))
    events = device_events(traces, trainer.device.torch_device.index or 0)
    if not events:
        raise RuntimeError(
            f"torch's profiler must record what {trainer.device.torch_device} does, but recorded "
            f"nothing"
        )
    worked = device_time(events, host_waits(traces))
    busy = min(1.0, worked.busy_s / steps / (times.step_s + times.restart_s))
    reading = BusyReading(fraction=busy, source=PROFILER_SOURCE)
    return breakdown_on_device(worked, times, profiled_steps=steps), reading


def profile_steps(trainer: StepTrainer, batches: Sequence[Any], steps: int) -> list[TraceEvent]:
    """Train under the profiler, and return its events; the steps after the first are marked.

    Args:
        trainer: The trainer.
        batches: Batches, used in turn.
        steps: Number of marked steps.
    """
    known: Callable[[], set[ProfilerActivity]] = supported_activities  # torch has not typed it
    wanted = {ProfilerActivity.CPU} if trainer.device.kind == "cpu" else known()
    supply = Reused(batches)
    _detach_cupti_afterwards(trainer.device)
    # There is one cycle; without acc_events torch 2.11 warns.
    with profile(activities=sorted(wanted, key=str), acc_events=True) as profiler:
        # The first step also does what happens only once.
        _train(trainer, islice(supply, trainer.config.grad_accum_steps))
        given = list(
            islice(supply, steps)
        )  # made now, since copies of batches are no part of a step
        with record_function(MARK):
            _train(trainer, given)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return [] if results is None else read_kineto(results.events())


def _detach_cupti_afterwards(device: Device) -> None:
    """Let Kineto detach CUPTI after a profile, unless the user's environment decides on that.

    CUPTI would stay attached, and make training 10 to 20 % slower as long as the process lives: the
    trials that share it would be compared to a baseline that was measured before its profile. The
    variable stays set, since Kineto reads it again when it has detached (at the next CUDA calls),
    and when it attaches for the next profile. Only our processes have it: `autotune apply` profiles
    nothing.

    Below `_CUPTI_DETACHES_FROM` CUPTI stays attached, which `compile_mode: reduce-overhead` needs:
    torch's own guard reads inductor's configuration, which a mode given to torch.compile does not
    change, but Kineto detaches only if this variable is 1. Source: pytorch #144455, #146604;
    kineto, CuptiActivityApi.cpp, teardownContext and cuptiTearDown_.
    """
    version = torch.version.cuda
    if device.kind != "cuda" or version is None:
        return
    if tuple(map(int, version.split(".")[:2])) >= _CUPTI_DETACHES_FROM:
        os.environ.setdefault("TEARDOWN_CUPTI", "1")


def step_times(window: Window, restarts: Sequence[Restart]) -> StepTimes:
    """Return a batch's times in a long run.

    Restarts inside the window's blocks are taken out of the step, less the time of the samples that
    came with them. Restarts between blocks are added in proportion, as in `window_rate`, whose
    correction for batches that lay ready counts as wait.

    Args:
        window: The trial's window.
        restarts: All restarts in the window, inside its blocks or between them.
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
    """Return the seconds of restarts inside blocks, less the time of the samples they came with.

    If all samples came with restarts, return all of their seconds.
    """
    apart_s = sum(restart.seconds for restart in restarts)
    came = sum(restart.samples for restart in restarts)
    if came >= samples or apart_s >= seconds:
        return apart_s
    return max(0.0, apart_s - came * (seconds - apart_s) / (samples - came))


def _train(trainer: StepTrainer, batches: Iterable[Any]) -> None:
    for batch in batches:
        trainer.train(batch)
    trainer.device.synchronize()


def _copy_s(trainer: StepTrainer, batches: Sequence[Any]) -> float:
    """Measure the seconds to move a batch; on the CPU nothing else runs meanwhile."""
    trainer.to_device(batches[0])
    begun = perf_counter()
    for batch in batches:
        trainer.to_device(batch)
    return (perf_counter() - begun) / len(batches)
