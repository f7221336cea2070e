"""The English of a search: why it ended, what was left out, how it was confirmed and why something is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.report.wording.template import Wording
from autotune.report.wording.units import show
from autotune.settings.environment import COMPARED

__all__ = ["TUNING"]


def _warm_start(figures: Mapping[str, Any]) -> str:
    count, source = figures["configurations"], figures["source"]
    begin = f"Warm start: {count} configurations of {source} are tried before others"
    if count == 1:
        begin = f"Warm start: one configuration of {source} is tried before others"
    if count == 0:
        begin = f"Warm start: {source} holds nothing that this space allows beside your own settings"
    differences = figures["differences"]
    return f"{begin}." if differences is None else f"{begin}; its rates are stale here ({_differences(differences)})."


def _stale(figures: Mapping[str, Any]) -> str:
    return f"{figures['path']} is stale: {_differences(figures['differences'])}; run again with --fresh."


def _differences(differences: list[dict[str, str]]) -> str:
    clauses = [f"{COMPARED[one['name']]} {one['there']} there, {one['here']} here" for one in differences]
    return "; ".join(clauses) or "devices or their runtime differ"


def _no_recent_gain(figures: Mapping[str, Any]) -> str:
    whose = "of those that promised most" if figures["is_promising"] else "trials"
    return f"the last {figures['trials']} {whose} brought less than 1 %"


def _precision_left_out(figures: Mapping[str, Any]) -> str:
    compiled = " with compile" if figures["is_compiled"] else ""
    return f"{figures['amp_dtype']}{compiled} was left out: {figures['reason']}"


def _setting_left_out(figures: Mapping[str, Any]) -> str:
    values = ", ".join(figures["values"])
    return f"{figures['setting']} {values} was left out after {figures['failures']} failures: {figures['reason']}"


def _stress_not_tried(figures: Mapping[str, Any]) -> str:
    rejected = "" if figures["is_recommended"] else "is not recommended, since it "
    return f"Trial {figures['trial']} {rejected}was not run on the largest samples: others failed there before it."


def _stress_over_limit(figures: Mapping[str, Any]) -> str:
    place = _PLACES.get(figures["strategy"], "")
    more = figures["peak_bytes"] > figures["own_bytes"]
    whole = f" {place}, that is up to {show(figures['peak_bytes'], 'bytes')} for {_bearer(figures)}," if more else ""
    return (
        f"Trial {figures['trial']} is not recommended, since it failed on the largest samples: peak memory must stay "
        f"within {show(figures['limit_bytes'], 'bytes')}, but was {show(figures['own_bytes'], 'bytes')}{whole} in "
        f"{figures['steps']} steps with samples of up to {figures['largest_item_bytes']:,} bytes "
        f"(median {figures['median_item_bytes']:,.0f}, of {figures['items_seen']:,} measured)"
    )


_PLACES = {"ddp": "in one process", "dp": "on one device"}
"""How the process of a stress run differs from what its strategy says."""


def _bearer(figures: Mapping[str, Any]) -> str:
    """Which ranks take the memory: "2 ranks with 64 MiB of gradient buckets each"."""
    ranks, buckets = figures["ranks"], figures["bucket_bytes"]
    who, each = ("a rank", "") if ranks == 1 else (f"{ranks} ranks", " each")
    return f"{who} with {show(buckets, 'bytes')} of gradient buckets{each}" if buckets else who


def _confirmed(figures: Mapping[str, Any]) -> str:
    rounds, count = figures["rounds"], figures["configurations"]
    measured = f"{count} configurations" if count > 1 else "one configuration"
    return f"Confirmed in {rounds} round{'s'[: rounds > 1]} of {measured} measured in turns."


def _faster_ones_overloaded(figures: Mapping[str, Any]) -> str:
    untried = ", or was not run on them" if figures["has_untried"] else ""
    return f"What is faster failed on the largest samples{untried}."


def _nothing_beats_baseline(figures: Mapping[str, Any]) -> str:
    measured = f"the {figures['configurations']} configurations measured"
    return f"None of {'those that may be used' if figures['is_outrun'] else measured} beats yours beyond the noise."


def _fastest(figures: Mapping[str, Any]) -> str:
    usable = "those that may be used, of " if figures["is_outrun"] else ""
    return f"Fastest of {usable}the {figures['configurations']} configurations measured."


def _changed_settings(figures: Mapping[str, Any]) -> str:
    return f"Changed: {', '.join(figures['settings'])}."


TUNING: dict[str, Wording] = {
    # Why no further trial ran, as a clause
    "trials_asked_for": "{trials} trials were asked for",
    "most_trials": "{trials} trials are the most",
    "no_time_for_a_trial": "the time-out of {timeout_s:g} s leaves no room for another trial",
    "space_exhausted": "every configuration of the space was measured",
    "nothing_new_drawn": "nothing new was found among {draws} configurations drawn from the space",
    "no_recent_gain": _no_recent_gain,
    "near_ceiling": "the best found reaches {ceiling_fraction:.0%} of the lower ceiling of loader and device",
    "nothing_left_to_learn": "no configuration is left that could tell more",
    "little_expected": "another trial is expected to bring {gain_fraction:.1%}",
    "interrupted": "it was ended by {by}",
    # Why a sample is not run
    "would_not_fit": "would not fit: a chance of {chance_fraction:share}",
    "would_tell_nothing": "would tell nothing new",
    # Notes of a search
    "warm_start": _warm_start,
    "stale": _stale,
    "sides_not_measured": "Loader and device were not measured alone: {reason}.",
    "precision_left_out": _precision_left_out,
    "setting_left_out": _setting_left_out,
    # Notes of a confirmation
    "finalist_left_out": "Trial {trial} was not measured again: that would have taken too long.",
    "stress_no_time": "Trial {trial} was not run on the largest samples: no time was left.",
    "stress_failed": "Trial {trial} could not be run on the largest samples: {reason}",
    "stress_out_of_memory": "Trial {trial} is not recommended, since it failed on the largest samples: {reason}",
    "stress_over_limit": _stress_over_limit,
    "stress_not_tried": _stress_not_tried,
    "stress_remark": "Trial {trial}, run once more: {remark}",
    "stress_thrashing": (
        "Trial {trial} fits on the largest samples, but barely: the allocator had to give back what it held "
        "{alloc_retries} times in {later_steps} steps after the first, and waits for the device each time; a smaller "
        "micro batch would spare that."
    ),
    "stress_near_limit": (
        "Trial {trial} may take up to {peak_bytes:mib} of {limit_bytes:mib} on the largest samples, less where its "
        "{ranks} ranks share memory: watch it in its first epoch."
    ),
    # Why something is recommended
    "baseline_is_no_reference": (
        "The baseline is no reference: it does not run within the limits. The first feasible trial is."
    ),
    "faster_ones_overloaded": _faster_ones_overloaded,
    "nothing_beats_baseline": _nothing_beats_baseline,
    "simplest_of_the_fastest": (
        "Simplest of those as fast as the fastest (trial {fastest_trial}; {rate_fraction:.1%} of its rate)."
    ),
    "fastest_beyond_noise": (
        "Fastest of those that beat yours beyond the noise; trial {other_trial} may be faster still."
    ),
    "fastest": _fastest,
    "confirmed": _confirmed,
    "not_confirmed": "Not confirmed: it was not measured again in turns with the baseline.",
    "changed_settings": _changed_settings,
}
"""Sentences by code."""
