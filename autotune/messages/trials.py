"""Write the notes of trials: how they start, what disturbed a window, what was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.messages import message
from autotune.messages.units import (
    MODES,
    THROTTLE_REASONS,
    format_bytes,
    format_count,
    format_fraction,
    format_short_time,
)
from autotune.note import Note


def on_ranks(note: Note, ranks: list[int]) -> Note:
    """Return the note restricted to these ranks, not all of a trial's."""
    figures = {**note.figures, "on_ranks": [*ranks]}
    return Note(code=note.code, figures=figures, text=f"rank {', '.join(map(str, ranks))}: {note}")


# How trials start.


@message
def trials_cannot_share(log: str) -> str:
    return (
        "Each trial builds the workload again, so it starts more slowly: a configuration failed in "
        "a reused process, but ran in a process of its own. A dataset that can be read only once "
        f"causes this. Log of the failure: {log}."
    )


@message
def not_preloaded(
    packages: Sequence[str],
    culprit: str | None,
    reason: str,
) -> str:
    why = {
        "threads": "starts threads when it is imported, and a process with threads can't be forked safely",
        "device": "opens a device when it is imported, which a fork can't use",
        "processes": "starts processes when it is imported, which would end with the first trial",
        "hang": "could not be imported in advance within two minutes",
    }.get(reason, "ended the process that imported it in advance")
    return (
        f"Each trial re-imports {', '.join(packages)}, so it starts more slowly: "
        f"{culprit or 'what the script imports'} {why}."
    )


@message
def forks_cannot_open_device(devices: str) -> str:
    return (
        "Each trial starts its own interpreter, which takes some seconds: a package that torch "
        f"loads automatically opened {devices}, which a fork then can't open. Set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 if you don't need that package."
    )


@message
def another_search(pid: int, user: str, command: str) -> str:
    return (
        f"Another search runs on this machine: process {pid} of {user} ({command}). The two "
        "compete for cores, memory and devices: throughput is lower than alone, and another "
        "setting may be the best."
    )


@message
def host_not_used(host: str, reason: str) -> str:
    return f"{host} is not used: {reason}."


@message
def torch_without_cuda(gpu: str, torch: str) -> str:
    return (
        f"Training runs on the CPU: there is an {gpu} GPU, but torch {torch} is built without "
        "CUDA. Install a torch with CUDA to train on the GPU."
    )


@message
def launches_wait(variable: str) -> str:
    return f"Unset {variable}: it makes each launch wait for its kernel, which slows training."


# What disturbed a trial.


@message
def window_stopped() -> str:
    return (
        "A process of the trial was paused during the window (SIGSTOP, a debugger, a batch "
        "system): the throughput is too low by that share."
    )


@message
def rerun_after_signal(why: Literal["killed", "stopped"]) -> str:
    if why == "stopped":
        return "The trial was run again: one of its processes was paused."
    return "The trial was run again: one of its processes was killed, but not by autotune or for its memory."


@message
def trial_disturbed(number: int, note: Note) -> str:
    return f"Trial {number}: {note}"


@message
def stopped_early(
    samples_per_s: float, half_width: float, threshold_number: int, threshold_samples_per_s: float
) -> str:
    interval = f" ± {half_width:,.0f}" if half_width else ""
    return (
        f"stopped early: {samples_per_s:,.0f}{interval} samples/s is below the "
        f"{threshold_samples_per_s:,.0f} needed to compete with trial {threshold_number}"
    )


# What was not measured after a window.

_STAGES = {
    "loader_rate": "the throughput of the loader alone",
    "batches": "batches to train on without the loader",
    "device_rate": "the throughput of the device alone",
    "copy_rate": "the throughput of copying batches alone",
    "communication": "the time to exchange gradients",
    "what_if": "steps without the debugging modes that are on",
    "time_breakdown": "where the time goes",
    "item_costs": "the cost of an item",
    "lengths": "the gain of batches of similar lengths",
    "activations": "the memory kept for the backward pass",
    "collate_again": "collating a batch again",
    "transfer": "the transfer of a batch from a worker",
    "pinning": "pinning a batch",
    "copy": "copying a batch",
    "pinned_copy": "copying a pinned batch",
}
"""Measurements after a window, by their codes in records."""


@message
def extra_failed(stage: str, cause: str) -> str:
    return f"{_STAGES[stage]} could not be measured ({cause})"


@message
def switch_failed(mode: str, cause: str) -> str:
    return f"steps without {MODES[mode]} could not be measured ({cause})"


@message
def steps_too_long_to_switch(mode: str, step_s: float) -> str:
    return (
        f"steps without {MODES[mode]} were not measured: a step takes {format_short_time(step_s)}"
    )


@message
def rank_gone_before_extras(stages: Sequence[str]) -> str:
    return f"another rank ended before measuring {_list_stages(stages)}"


@message
def no_time_for_extras(stages: Sequence[str]) -> str:
    return f"the deadline was too near to measure {_list_stages(stages)}"


@message
def trial_ended_before_extras(stages: Sequence[str]) -> str:
    return f"the trial ended before measuring {_list_stages(stages)}"


def _list_stages(stages: Sequence[str]) -> str:
    *names, last = [_STAGES[stage] for stage in stages]
    return f"{', '.join(names)} and {last}" if names else last


# Points that were not measured.


@message
def curves_cut() -> str:
    return "The job ended before the rest was measured."


@message
def curves_ended(reason: str) -> str:
    return f"The job ended before the rest was measured: {reason}."


@message
def process_ended_at_point() -> str:
    return "the process ended while it was measured"


@message
def no_time_left() -> str:
    return "no time was left"


@message
def left_to_smaller_batches() -> str:
    return "its steps take long, and smaller batches show its throughput"


@message
def batch_too_large(expected_bytes: float, limit_bytes: int) -> str:
    return f"it might need {format_bytes(expected_bytes)}, over the limit of {format_bytes(limit_bytes)}"


@message
def queue_too_large(expected_bytes: float, free_bytes: float) -> str:
    needed = format_bytes(expected_bytes)
    return f"prefetched batches might need {needed} of the {format_bytes(free_bytes)} that are free"


@message
def operators_not_counted(reason: Note | str) -> str:
    return f"Operators were not counted: {reason}."


@message
def largest_samples_not_batched(cause: str) -> str:
    return f"The largest samples can't be put into one batch ({cause})."


# Environment variables that change precision.


@message
def tf32_forbidden(variable: str) -> str:
    return f"Unset {variable}=0 to use TF32: with it NVIDIA's libraries computed tf32 in float32."


@message
def float32_unknown(variable: str) -> str:
    return (
        f"Unset {variable}=1 to compare precisions with float32: NVIDIA documents only 0, so the "
        "precision in which its libraries compute float32, the reference included, is unknown."
    )


# Conditions of the host and the device during a window.


@message
def cores_taken(others_cores: float, cores: int) -> str:
    return (
        f"Other programs used {others_cores:.1f} of the {format_count(cores, 'core')} during the "
        "window, which lowers the throughput, most of all where threads wait for each other."
    )


@message
def clock_lowered(reasons: Sequence[str]) -> str:
    named = " and ".join(THROTTLE_REASONS[reason] for reason in reasons)
    return f"The device's clock was lowered during the window: {named}."


@message
def clock_moved(first_mhz: int, last_mhz: int) -> str:
    return f"The device's clock changed from {first_mhz} to {last_mhz} MHz during the window."


@message
def others_on_device(held_bytes: int, busy_fraction: float | None) -> str:
    text = (
        f"Before the first trial, other processes held {format_bytes(held_bytes)} of the device's "
        "memory, which counts in every peak"
    )
    if busy_fraction is not None:
        share = format_fraction(busy_fraction)
        text += f", and kept it busy for {share} of the time, which lowers the throughput"
    return f"{text}."


# Reasons why a watched run lacks readings of memory


@message
def worker_memory_unreadable() -> str:
    return "the system does not let autotune read the workers' memory"


@message
def memory_unreported() -> str:
    return "the system does not report the memory of processes"
