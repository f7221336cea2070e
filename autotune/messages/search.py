"""Messages of a search: why it ended, what it left out, and where its first trials came from."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.messages import message
from autotune.messages.units import format_count, format_duration, format_fraction, format_short_time
from autotune.note import Note

__all__ = [
    "costs_more_than_it_saves",
    "file_damaged",
    "found_elsewhere",
    "host_bound",
    "interrupted",
    "little_gain_expected",
    "most_trials",
    "near_ceiling",
    "no_informative_candidate",
    "no_recent_gain",
    "no_time_for_a_trial",
    "nothing_new_drawn",
    "one_side_not_measured",
    "precision_left_out",
    "search_resumed",
    "setting_left_out",
    "sides_not_measured",
    "space_exhausted",
    "stale",
    "starts_are_slow",
    "training_hours_unused",
    "trials_asked_for",
    "trials_shared",
    "warm_start",
    "would_not_fit",
    "would_tell_nothing",
]

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
        f"building the workload takes {format_duration(build_s)}, so trials ran for {format_duration(trials_s)}; "
        "set a number of trials or a time-out for more"
    )


@message
def costs_more_than_it_saves(trial_s: float, gain_s: float, training_s: float) -> str:
    return (
        f"another trial takes {format_duration(trial_s)}, but is expected to save only {format_duration(gain_s)} of "
        f"the {format_duration(training_s)} of training still to come"
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
def would_tell_nothing() -> str:
    return "would repeat what earlier trials have shown"


# Notes on a search.


@message
def trials_shared(build_s: float, is_brief: bool, assumed_hours: float | None) -> str:
    text = (
        f"Building the workload takes {format_duration(build_s)}: trials shared a process that built it once; "
        "repeated runs had processes of their own."
    )
    if is_brief:
        text += " The search was kept short, with few trials and runs."
    if assumed_hours:
        text += (
            f" It assumed {assumed_hours:.0f} more hours of training (budget: {{training_hours: {assumed_hours:.0f}}})."
        )
    return text


@message
def training_hours_unused(training_hours: float) -> str:
    return (
        f"budget.training_hours ({training_hours}) was not used: it only ends a search that may stop by itself, "
        "with method model."
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
        f"The host limits the recommended settings: the device waits for it {format_fraction(host_fraction)} of "
        f"the time. {'; '.join(times)}. Larger micro batches, a fused optimizer{pinned} and CUDA graphs reduce the "
        "host's work."
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
        text = f"Warm start: {source} has nothing that this space allows besides your own settings"
    if differences is not None:
        text += f"; its throughputs do not apply here ({_list_differences(differences)})"
    return f"{text}."


@message
def found_elsewhere(path: str, differences: Sequence[str]) -> str:
    return (
        f"{path} was found on another machine ({_list_differences(differences)}) and may not be the fastest here: "
        "search again, or try it first with warm_start."
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
        f"This search continues an earlier one in its folder: {same}. {unknown}; after a change there, start over with "
        "--fresh (fresh=True)."
    )


@message
def file_damaged(name: str, reason: str) -> str:
    return f"{name} in the run folder was damaged; its content is read from the study or measured again: {reason}"
