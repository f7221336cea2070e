"""Messages on a recommendation: why it was chosen, what its stress run showed, and how much memory it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.messages import message
from autotune.messages.units import format_bytes, format_count, format_duration, format_fraction
from autotune.messages.words import OUTCOMES
from autotune.note import Note

__all__ = [
    "baseline_is_no_reference",
    "best_believed",
    "changed_settings",
    "faster_ones_overloaded",
    "finalist_failed",
    "largest_batch",
    "memory_growth",
    "not_proven",
    "nothing_beats_baseline",
    "precision_unchecked",
    "proven",
    "simplest_of_the_best",
    "stress_failed",
    "stress_near_limit",
    "stress_no_time",
    "stress_not_tried",
    "stress_out_of_memory",
    "stress_over_limit",
    "stress_remark",
    "stress_thrashing",
]

# Why something is recommended.


@message
def baseline_is_no_reference() -> str:
    return "The first feasible trial is the reference: the baseline does not run within the limits."


@message
def faster_ones_overloaded(has_untried: bool) -> str:
    return (
        f"Faster configurations failed on the largest samples{', or were not tested on them' if has_untried else ''}."
    )


@message
def nothing_beats_baseline(
    configurations: int, is_outrun: bool, leaves_out_larger: bool, most_fraction: float | None
) -> str:
    which = "usable configurations" if is_outrun else f"{configurations} configurations measured"
    larger = " without a larger global batch" if leaves_out_larger else ""
    text = f"None of the {which}{larger} is expected to beat yours by 2 % or more"
    if most_fraction is not None and most_fraction > 0.02:
        text += f"; the measurements allow up to {format_fraction(most_fraction)}"
    return f"{text}."


@message
def simplest_of_the_best(best_trial: int, rate_fraction: float) -> str:
    return (
        f"Simplest of the configurations that are as good as the fastest (trial {best_trial}): over all runs it "
        f"reaches {100 * rate_fraction:.1f} % of its throughput."
    )


@message
def best_believed(configurations: int, is_outrun: bool, leaves_out_larger: bool) -> str:
    usable = "usable ones of the " if is_outrun else ""
    larger = " without a larger global batch" if leaves_out_larger else ""
    return f"Fastest over all runs of the {usable}{configurations} configurations measured{larger}."


@message
def proven(least_fraction: float, runs: int, baseline_runs: int) -> str:
    text = f"Proven by {format_count(runs, 'run')} of it and {baseline_runs} of the baseline"
    if least_fraction >= 0.01:
        text += f": at least {format_fraction(least_fraction)} faster"
    return f"{text}."


@message
def not_proven(gain_fraction: float, runs: int, baseline_runs: int) -> str:
    return (
        f"Not proven: after {format_count(runs, 'run')} of it and {baseline_runs} of the baseline, it is faster than "
        f"the baseline with a probability of {format_fraction(min(gain_fraction, 0.99))}."
    )


@message
def precision_unchecked(amp_dtype: str) -> str:
    return f"{amp_dtype} was not compared with float32: check the loss before you rely on it."


@message
def changed_settings(settings: Sequence[str]) -> str:
    return f"Changed: {', '.join(settings)}."


# Further runs of a trial.


@message
def finalist_failed(trial: int, outcome: str, reason: str | None, log: str | None) -> str:
    who = "Your configuration" if trial == 0 else f"Trial {trial}"
    where = "" if log is None else f" (log: {log})"
    return f"{who} failed when it was measured again: {reason or OUTCOMES[outcome]}{where}"


@message
def stress_no_time(trial: int) -> str:
    return f"Trial {trial} was not tested on the largest samples: no time was left."


@message
def stress_failed(trial: int, reason: str | None) -> str:
    return f"Trial {trial} could not be tested on the largest samples: {reason}"


@message
def stress_out_of_memory(trial: int, reason: str | None) -> str:
    return f"Trial {trial} is not recommended, because it failed on the largest samples: {reason}"


@message
def stress_over_limit(
    trial: int,
    *,
    limit_bytes: int,
    own_bytes: int,
    peak_bytes: int,
    bucket_bytes: int,
    ranks: int,
    where: str,
    steps: int,
    largest_item_bytes: int,
    median_item_bytes: float,
    items_seen: int,
) -> str:
    # One process ran; what all ranks take together follows from it.
    group = ""
    if peak_bytes > own_bytes:
        of_whom = "a rank" if ranks == 1 else f"{ranks} ranks"
        group = f" {where}, that is up to {format_bytes(peak_bytes)} for {of_whom}"
        if bucket_bytes:
            group += f" with {format_bytes(bucket_bytes)} of gradient buckets{'' if ranks == 1 else ' each'}"
        group += ","
    return (
        f"Trial {trial} is not recommended, because it failed on the largest samples: peak memory must stay within "
        f"{format_bytes(limit_bytes)}, but was {format_bytes(own_bytes)}{group} in {steps} steps with samples of up to "
        f"{largest_item_bytes:,} bytes (median {median_item_bytes:,.0f}, of {items_seen:,} measured)"
    )


@message
def stress_not_tried(trial: int) -> str:
    return f"Trial {trial} is not recommended: it was not tested on the largest samples, on which others have failed."


@message
def stress_remark(trial: int, remark: Note) -> str:
    return f"Trial {trial}, stress run: {remark}"


@message
def stress_thrashing(trial: int, alloc_retries: int | None, later_steps: int) -> str:
    return (
        f"Trial {trial} barely fits on the largest samples: the allocator released its cache {alloc_retries} times in "
        f"{later_steps} steps after the first, and waits for the device each time. A smaller micro batch avoids that."
    )


@message
def stress_near_limit(trial: int, ranks: int, peak_bytes: int, limit_bytes: int) -> str:
    return (
        f"Trial {trial} may use up to {format_bytes(peak_bytes)} of {format_bytes(limit_bytes)} on the largest "
        f"samples, less if its {ranks} ranks share memory: watch the memory in its first epoch."
    )


# Memory.


@message
def largest_batch(
    bounded_by: Literal["limit", "space", "trials"],
    micro_batch_size: int,
    limit_bytes: int,
    peak_bytes: int,
    predicted_bytes: float | None,
    error_bytes: float | None,
) -> str:
    limit = format_bytes(limit_bytes)
    text = {
        "limit": f"The largest micro batch that the limit of {limit} allows is {micro_batch_size}",
        "space": f"The largest micro batch of the space, {micro_batch_size}, stays within {limit}",
        "trials": f"The largest micro batch that ran within {limit} is {micro_batch_size}",
    }[bounded_by]
    text += f" (measured peak: {format_bytes(peak_bytes)}"
    if predicted_bytes is not None and error_bytes is not None:
        text += f"; predicted from other batches: {format_bytes(predicted_bytes)} ± {format_bytes(error_bytes)}"
    return f"{text})."


@message
def memory_growth(
    kind: Literal["host", "device"],
    whose: Literal["recommended", "baseline"],
    bytes_per_batch: int,
    half_width_bytes: int,
    seconds: float,
    batches_to_limit: int,
    limit_within_s: float,
    is_first_epoch: bool,
) -> str:
    memory = "Host memory" if kind == "host" else "The device's memory"
    settings = "recommended settings" if whose == "recommended" else "baseline"
    text = (
        f"{memory} grew in the {settings}: by {format_bytes(bytes_per_batch)} a batch (± "
        f"{format_bytes(half_width_bytes)}, over {format_duration(seconds)}). At this pace it reaches the limit after "
        f"{batches_to_limit:,} batches, or {format_duration(limit_within_s)} of training."
    )
    if is_first_epoch:
        text += " The window lay in the first epoch: if the dataset caches what it reads, the growth ends with it."
    return text
