"""Where a step's time goes: a few extra steps under torch's profiler, joined with the times of the window.

Takes a Trainer, batches and the window; hands on a TimeBreakdown and, on an accelerator, how busy it was. A profiled
step is slower than another one: no rate is ever taken from here, the window's step is what the work is compared to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from autotune.analysis.rates import window_rate
from autotune.records.breakdown import TimeBreakdown, breakdown_on_cpu, breakdown_on_device
from autotune.records.measurement import Restart, Window
from autotune.records.trace_intervals import device_time
from autotune.records.utilization import PROFILER_SOURCE, BusyReading
from autotune.worker.after_window.trace import (
    MARK,
    TraceEvent,
    device_events,
    gap_fraction,
    host_waits,
    marked_part,
    read_kineto,
)
from autotune.worker.measure.batch import Reused
from autotune.worker.measure.step import StepTrainer
from autotune.worker.setup.device import Device

__all__ = ["StepTimes", "break_down", "profile_steps", "step_times"]

_STEPS = 5  # our own convention: enough for a mean, few enough that the trace stays small
_LONGEST_S = 1.0  # our own convention, as steps go without the profiler
_CUPTI_DETACHES_FROM = (12, 6)
"""Version of CUDA from which CUPTI can be detached and attached again next to CUDA graphs; it crashes before.
Source: torch/profiler/profiler.py, start_trace; pytorch #112507, #151124."""


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
        host: Batches as the loader delivers them: on an accelerator their copies belong to the step.
        held: The same on the device.
        window: The trial's window.
        restarts: The restarts that fell into it, also where its blocks hold them.
        exchange_s: By how many seconds the exchange of gradients makes a batch longer; the extra steps are without it.

    Raises:
        RuntimeError: torch's profiler records nothing of this device.
    """
    times = step_times(window, restarts)
    steps = _steps_to_profile(trainer, times.step_s)
    known = {"profiled_steps": steps, "exchange_s": exchange_s, **asdict(times)}
    if trainer.device.kind == "cpu":
        copy_s = _copy_s(trainer, host)
        traces, span_s = marked_part(profile_steps(trainer, held, steps))
        return breakdown_on_cpu(copy_s=copy_s, gap_fraction=gap_fraction(traces, span_s), **known), None
    traces, _ = marked_part(profile_steps(trainer, host, steps))
    events = device_events(traces, trainer.device.torch_device.index or 0)
    if not events:
        raise RuntimeError(
            f"torch's profiler must record what {trainer.device.torch_device} does, but recorded nothing"
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
    with profile(activities=sorted(wanted, key=str), acc_events=True) as profiler:  # one cycle; else torch 2.11 warns
        _train(trainer, islice(supply, trainer.config.grad_accum_steps))  # starts what is started once
        given = list(islice(supply, steps))  # copies, where there are any, are no part of a step
        with record_function(MARK):
            _train(trainer, given)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return [] if results is None else read_kineto(results.events())


def _detach_cupti_afterwards(device: Device) -> None:
    """Have Kineto detach CUPTI once a profile is over, unless the user has decided on that.

    CUPTI stays attached otherwise, and training is 10 to 20 % slower for as long as the process lives: the trials that
    share it would be held against a baseline that was measured before its profile. The variable stays set, since Kineto
    reads it again when it has detached, which takes until the next calls of CUDA, and when it attaches for the next
    profile. Our processes alone have it: `autotune apply` profiles nothing.

    Below that version CUPTI stays attached. That is the guard which `compile_mode: reduce-overhead` needs: torch's own
    goes by inductor's configuration, which a mode given to torch.compile does not change, but Kineto detaches nothing
    unless this variable is 1.
    Source: pytorch #144455, #146604; kineto, CuptiActivityApi.cpp, teardownContext and cuptiTearDown_.
    """
    version = torch.version.cuda
    if device.kind != "cuda" or version is None:
        return
    if tuple(map(int, version.split(".")[:2])) >= _CUPTI_DETACHES_FROM:
        os.environ.setdefault("TEARDOWN_CUPTI", "1")


def step_times(window: Window, restarts: Sequence[Restart]) -> StepTimes:
    """A batch's times in a long run, from a window and the restarts that fell into it.

    Where the blocks hold the restarts, what these cost beyond the samples that came with them is taken out. Otherwise
    they are added in proportion, as in `window_rate`, whose correction for the batches that lay ready is wait as well.
    """
    batches = sum(block.batches for block in window.blocks)
    samples = sum(block.samples for block in window.blocks)
    seconds = sum(block.seconds for block in window.blocks)
    wait_s = window.starved_s / batches
    if window.whole_epochs:
        restart_s = min(_restart_total_s(samples, seconds, restarts) / batches, wait_s)
        return StepTimes(step_s=seconds / batches - restart_s, data_wait_s=wait_s - restart_s, restart_s=restart_s)
    steady = window_rate(window.model_copy(update={"epoch_samples": None})).value
    per_batch = samples / batches
    step_s, whole_s = per_batch / steady, per_batch / window_rate(window).value
    long_run_wait_s = min(step_s, max(0.0, wait_s + step_s - seconds / batches))
    return StepTimes(step_s=step_s, data_wait_s=long_run_wait_s, restart_s=max(0.0, whole_s - step_s))


def _restart_total_s(samples: int, seconds: float, restarts: Sequence[Restart]) -> float:
    """What restarts inside some blocks cost beyond the samples that came with them; all their time where all did."""
    apart_s, came = sum(restart.seconds for restart in restarts), sum(restart.samples for restart in restarts)
    if came >= samples or apart_s >= seconds:
        return apart_s
    return max(0.0, apart_s - came * (seconds - apart_s) / (samples - came))


def _train(trainer: StepTrainer, batches: Iterable[Any]) -> None:
    for batch in batches:
        trainer.train(batch)
    trainer.device.synchronize()


def _steps_to_profile(trainer: StepTrainer, step_s: float) -> int:
    """Batches: five, fewer where they are long, in whole optimizer steps."""
    wanted, unit = min(_STEPS, max(1, round(_LONGEST_S / max(step_s, 1e-6)))), trainer.config.grad_accum_steps
    return ceil(wanted / unit) * unit


def _copy_s(trainer: StepTrainer, batches: Sequence[Any]) -> float:
    """Seconds of moving a batch, by the clock: on the CPU nothing else runs meanwhile."""
    trainer.to_device(batches[0])
    begun = perf_counter()
    for batch in batches:
        trainer.to_device(batch)
    return (perf_counter() - begun) / len(batches)
