"""Write the notes of a search: its end, candidates left out, the precision guard, recommendation, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.messages import message
from autotune.messages.units import (
    OUTCOMES,
    format_bytes,
    format_count,
    format_duration,
    format_fraction,
    format_short_time,
)
from autotune.note import Note

# Why no further trial ran, as clauses after "Stopped: ".


@message
def trials_asked_for(trials: int) -> str:
    return f"{trials} trials were asked for"


@message
def most_trials(trials: int) -> str:
    return f"the limit of {trials} trials was reached"


@message
def starts_are_slow(trials_s: float, build_s: float) -> str:
    return (
        f"building the workload takes {format_duration(build_s)}, so trials ran for "
        f"{format_duration(trials_s)}; set a number of trials or a time-out for more"
    )


@message
def costs_more_than_it_saves(trial_s: float, gain_s: float, training_s: float) -> str:
    return (
        f"another trial takes {format_duration(trial_s)}, but is expected to save only "
        f"{format_duration(gain_s)} of the {format_duration(training_s)} of training still to come"
    )


@message
def no_time_for_a_trial(timeout_s: float) -> str:
    return f"the time-out of {timeout_s:g} s leaves no room for another trial"


@message
def space_exhausted() -> str:
    return "every configuration of the space was measured"


@message
def nothing_new_drawn(draws: int) -> str:
    return f"{draws} random draws from the space contained no new configuration"


@message
def no_recent_gain(trials: int, is_promising: bool) -> str:
    return f"the last {trials} {'most promising trials' if is_promising else 'trials'} gained less than 1 %"


_CEILINGS = {
    "loader": "what the loader delivers at most with any of these settings",
    "device": "what the device trains at most with any of these settings",
    "host": "what the host launches at most with any of these settings",
    "copy": "the throughput of copying batches to the device",
    "cores": "what all CPU cores deliver at the lowest CPU time measured for a sample",
}


@message
def near_ceiling(bound: str, ceiling_fraction: float) -> str:
    return f"the best configuration reaches {100 * ceiling_fraction:.0f} % of {_CEILINGS[bound]}"


@message
def no_informative_candidate() -> str:
    return "no remaining configuration is expected to be faster or informative"


@message
def little_gain_expected(gain_fraction: float) -> str:
    return f"another trial is expected to gain only {100 * gain_fraction:.1f} %"


@message
def interrupted(by: str) -> str:
    return f"interrupted by {by}"


# Why a sample is not run.


@message
def would_not_fit(chance_fraction: float) -> str:
    return f"would not fit into memory: the probability that it does is {format_fraction(chance_fraction)}"


@message
def would_add_nothing() -> str:
    return "would repeat what earlier trials have shown"


# Notes on a search.


@message
def trials_shared(build_s: float, is_short_search: bool, assumed_hours: float | None) -> str:
    text = (
        f"Building the workload takes {format_duration(build_s)}: trials shared a process that "
        "built it once; repeated runs had processes of their own."
    )
    if is_short_search:
        text += " The search was kept short, with few trials and runs."
    if assumed_hours:
        hours = f"{assumed_hours:.0f}"
        text += f" It assumed {hours} more hours of training (budget: {{training_hours: {hours}}})."
    return text


@message
def training_hours_unused(training_hours: float) -> str:
    return (
        f"budget.training_hours ({training_hours}) was not used: it only ends a search that may "
        "stop by itself, with method model."
    )


@message
def host_bound(
    host_fraction: float,
    batch_s: float,
    launch_s: float | None,
    take_s: float | None,
    has_compiled: bool,
    is_pinned: bool,
) -> str:
    times = [f"A batch takes {format_short_time(batch_s)}"]
    if launch_s is not None:
        times.append(f"launching its work takes {format_short_time(launch_s)}")
    if take_s is not None:
        times.append(f"fetching it from the loader takes {format_short_time(take_s)}")
    pinned = "" if is_pinned else ", pinned memory"
    text = (
        "The host limits the recommended settings: the device waits for it "
        f"{format_fraction(host_fraction)} of the time. {'; '.join(times)}. Larger micro batches, "
        f"a fused optimizer{pinned} and CUDA graphs reduce the host's work."
    )
    if not has_compiled:
        text += " torch.compile was not tried: to try it, list compile: [false, true] in the space."
    return text


@message
def one_side_not_measured(side: str, reason: Note | str) -> str:
    return f"The {side} was not measured alone with any settings: {reason}."


@message
def sides_not_measured(reason: Note | str) -> str:
    return f"Loader and device were not measured alone: {reason}."


@message
def precision_left_out(amp_dtype: str, compile_mode: str, reason: str | None) -> str:
    name = amp_dtype
    if compile_mode:
        name += " with compile"
    if compile_mode not in {"", "default"}:
        name += f" in mode {compile_mode}"
    return f"{name} was left out: {reason}"


@message
def setting_left_out(setting: str, values: Sequence[str], failures: int, reason: str | None) -> str:
    return f"{setting} {', '.join(values)} was left out after {failures} failures: {reason}"


# A search that starts from an earlier one.


@message
def warm_start(source: str, configurations: int, differences: Sequence[str] | None) -> str:
    text = f"Warm start: {format_count(configurations, 'configuration')} of {source} ran first"
    if configurations == 0:
        text = f"Warm start: {source} has no configuration that this space allows, except yours"
    if differences is not None:
        text += f"; its throughputs do not apply here ({_list_differences(differences)})"
    return f"{text}."


@message
def found_elsewhere(path: str, differences: Sequence[str]) -> str:
    return (
        f"{path} was found on another machine ({_list_differences(differences)}) and may not be "
        "the fastest here: search again, or try it first with warm_start."
    )


@message
def stale(path: str, differences: Sequence[str]) -> str:
    return f"{path} is stale: {_list_differences(differences)}; run again with --fresh."


def _list_differences(differences: Sequence[str]) -> str:
    return "; ".join(differences) or "devices or their runtime differ"


@message
def search_resumed(has_command: bool) -> str:
    same = "workload, settings and machine are equal"
    unknown = "The content of the data, weights and installed packages were not compared"
    if has_command:
        same = "command, script, settings and machine are equal"
        unknown = "What the script imports and the content of the data were not compared"
    return (
        f"This search continues an earlier one in its folder: {same}. {unknown}; after a change "
        "there, start over with --fresh (fresh=True)."
    )


@message
def file_damaged(name: str, reason: str) -> str:
    return f"{name} in the run folder was damaged; its content is read from the study or measured again: {reason}"


# Why the precision guard refused a precision or could not compare it with float32: clauses.


@message
def precision_not_compared(reason: Note | str | None, log: str | None) -> str:
    where = "" if log is None else f" (log: {log})"
    return f"precision guard could not run: {reason or 'it returned no figures'}{where}"


@message
def precision_refused(reason: Note) -> str:
    return f"precision guard: {reason}"


@message
def too_few_steps_compared(steps: int, least_steps: int) -> str:
    return f"only {steps} of at least {least_steps} steps were compared before the deadline"


@message
def loss_not_finite(loss: str, step: int, steps: int) -> str:
    return f"the loss became {loss} at step {step} of {steps}; float32's stayed finite"


@message
def steps_skipped(last_skipped: int, last: int, skipped: int, attempts: int) -> str:
    return (
        f"the GradScaler still skipped {last_skipped} of the last {last} steps because gradients "
        f"were not finite ({skipped} of {attempts} in total)"
    )


@message
def losses_deviate(steps: int, deviation_fraction: float, allowed_fraction: float) -> str:
    return (
        f"over {steps} steps from the same weights and batches the losses deviate from float32's "
        f"by {100 * deviation_fraction:.1f} % of their mean; at most {100 * allowed_fraction:.1f} "
        "% is allowed"
    )


@message
def gradient_not_finite() -> str:
    return "the first step's gradient is not finite; float32's is"


@message
def gradients_differ(cosine: float, least_cosine: float) -> str:
    return (
        f"the first step's gradient has a cosine of {cosine:.3f} with float32's, but must have at "
        f"least {least_cosine:.2f}"
    )


# Why something is recommended.


@message
def baseline_is_no_reference() -> str:
    return "The first feasible trial is the reference: the baseline does not run within the limits."


@message
def faster_ones_overloaded(has_untried: bool) -> str:
    untried = ", or were not tested on them" if has_untried else ""
    return f"Faster configurations failed on the largest samples{untried}."


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
        f"Simplest configuration as good as the fastest (trial {best_trial}): over all runs it "
        f"reaches {100 * rate_fraction:.1f} % of its throughput."
    )


@message
def best_believed(configurations: int, is_outrun: bool, leaves_out_larger: bool) -> str:
    usable = "usable ones of the " if is_outrun else ""
    larger = " without a larger global batch" if leaves_out_larger else ""
    return (
        f"Fastest of the {usable}{configurations} configurations measured{larger}, over all runs."
    )


@message
def proven(least_fraction: float, runs: int, baseline_runs: int) -> str:
    text = f"Proven by {format_count(runs, 'run')} against {baseline_runs} of the baseline"
    if least_fraction >= 0.01:
        text += f": at least {format_fraction(least_fraction)} faster"
    return f"{text}."


@message
def not_proven(gain_fraction: float, runs: int, baseline_runs: int) -> str:
    return (
        "Not proven: faster than the baseline with a probability of "
        f"{format_fraction(min(gain_fraction, 0.99))}, by {format_count(runs, 'run')} against "
        f"{baseline_runs} of the baseline."
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
    # one process ran: the peak of all ranks is calculated from it
    group = ""
    if peak_bytes > own_bytes:
        group = f" {where}, that is {describe_group_peak(peak_bytes, ranks, bucket_bytes)},"
    return (
        f"Trial {trial} is not recommended, because it failed on the largest samples: peak memory "
        f"must stay within {format_bytes(limit_bytes)}, but was {format_bytes(own_bytes)}{group} "
        f"in {steps} steps with samples of up to {largest_item_bytes:,} bytes (median "
        f"{median_item_bytes:,.0f}, of {items_seen:,} measured)"
    )


def describe_group_peak(peak_bytes: int, ranks: int, bucket_bytes: int) -> str:
    """Return a group's peak: "up to 20.1 GiB for 2 ranks with 64.0 MiB of gradient buckets each"."""
    group = f"up to {format_bytes(peak_bytes)} for {'a rank' if ranks == 1 else f'{ranks} ranks'}"
    if bucket_bytes:
        group += f" with {format_bytes(bucket_bytes)} of gradient buckets"
        group += "" if ranks == 1 else " each"
    return group


@message
def stress_not_tried(trial: int) -> str:
    return f"Trial {trial} is not recommended: it was not tested on the largest samples, on which others failed."


@message
def stress_note(trial: int, note: Note) -> str:
    return f"Trial {trial}, stress run: {note}"


@message
def stress_thrashing(trial: int, alloc_retries: int | None, later_steps: int) -> str:
    return (
        f"Trial {trial} barely fits on the largest samples: the allocator released its cache "
        f"{alloc_retries} times in {later_steps} steps after the first, and waits for the device "
        "each time. A smaller micro batch avoids that."
    )


@message
def stress_near_limit(trial: int, ranks: int, peak_bytes: int, limit_bytes: int) -> str:
    return (
        f"Trial {trial} may use up to {format_bytes(peak_bytes)} of {format_bytes(limit_bytes)} on "
        f"the largest samples, less if its {ranks} ranks share memory: watch the memory in its "
        "first epoch."
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
        f"{format_bytes(half_width_bytes)}, over {format_duration(seconds)}). At this pace it "
        f"reaches the limit after {batches_to_limit:,} batches, or "
        f"{format_duration(limit_within_s)} of training."
    )
    if is_first_epoch:
        text += " The window lay in the first epoch: if the dataset caches what it reads, the growth ends with it."
    return text
