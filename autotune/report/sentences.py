"""Write the sentences of a report: the headline, headroom, reasons, advice, and footnotes of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isinf

from autotune.config.training_config import TrainingConfig
from autotune.messages.units import (
    OUTCOMES,
    THROTTLE_REASONS,
    format_bytes,
    format_bytes_of,
    format_count,
    format_duration,
    format_fraction,
    format_mean_count,
    format_short_time,
    format_times,
    show_interval,
)
from autotune.models.time_estimate import payback_s
from autotune.records.ceilings import Headroom, overlaps
from autotune.records.measurement import (
    OTHERS_LEAST_BUSY,
    OTHERS_LEAST_BYTES,
    Communication,
    DeviceConditions,
    Interval,
    Measurement,
    disagreement,
    join_loads,
)
from autotune.records.result import (
    LargerBatch,
    Recommendation,
    RunSummary,
    RunVariation,
    changed_settings,
)
from autotune.records.trial import TrialRecord
from autotune.report.figures import (
    Column,
    drop_none,
    find_trial,
    headroom_in,
    list_busy,
    recommended_figures,
)
from autotune.report.words import describe_settings, format_setting, one_line

# Footnotes: sources of figures, numbers of runs, and disturbances of the windows.


def describe_busy(columns: Sequence[Column]) -> Iterator[str]:
    """Yield the sources of the busy fractions, and any two sources that disagree."""
    shown = zip(columns, list_busy(columns), strict=True)
    sources = {
        column.title: one_line(reading.source) for column, reading in shown if reading is not None
    }
    if len(set(sources.values())) > 1:
        yield f"Busy fractions of different sources can't be compared ({_by_title(sources, '; ', ': ')})."
    elif sources:
        yield f"Busy: {next(iter(sources.values()))}."
    for column in columns:
        pair = None if column.figures is None else disagreement(column.figures.busy_readings)
        if pair is not None:
            low, high = pair
            yield (
                f"{column.title}: two sources disagree by "
                f"{100 * (high.fraction - low.fraction):.0f} points: {one_line(high.source)} "
                f"{format_fraction(high.fraction)}, {one_line(low.source)} "
                f"{format_fraction(low.fraction)}."
            )


def _by_title(values: Mapping[str, str], separator: str = ", ", between: str = " ") -> str:
    return separator.join(f"{title}{between}{value}" for title, value in values.items())


def describe_throughputs(
    runs: Mapping[str, Sequence[Measurement]], spread: RunVariation
) -> Iterator[str]:
    """Yield footnotes on energy, on the number of runs, and on the intervals of throughput."""
    if any(run.joules_per_sample is not None for own in runs.values() for run in own):
        yield "Energy: of the whole device, including idle power."
    counts = {title: format_count(len(own), "run") for title, own in runs.items()}
    if len(set(counts.values())) > 1:
        yield f"Throughput: {_by_title(counts)}."
    elif counts:
        yield f"Throughput: {next(iter(counts.values()))} each."
    yield from describe_run_variation(spread, runs.values())


def describe_run_variation(
    spread: RunVariation, configurations: Iterable[Iterable[Measurement]]
) -> Iterator[str]:
    """Yield the run-to-run variation of each kind of runs: limited by the host, by the device."""
    kinds = {all(run.window.is_held_by_device for run in runs) for runs in configurations}
    for is_held_by_device in sorted(kinds):
        known = spread.of([is_held_by_device])
        where = ""
        if spread.device is not None:
            does = "sets" if is_held_by_device else "does not set"
            where = f" where the device {does} the pace"
        assumed = ", assumed as usual for such a device" if known.source == "assumed" else ""
        yield (
            f"Run-to-run variation{where}: {format_fraction(known.sd)} (standard deviation)"
            f"{assumed}; every interval includes it."
        )


def describe_exchange(exchange: Communication) -> str:
    """Return the cost of exchanging gradients in a few words."""
    return (
        f"adds {format_short_time(exchange.exposed_s)} to a step "
        f"({format_fraction(exchange.exposed_fraction)} of it); "
        f"{format_fraction(exchange.hidden_fraction)} of its "
        f"{format_short_time(exchange.exchange_s)} are hidden"
    )


def list_doubts(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """Yield reasons to doubt the comparison: busy cores, throttling, changed clocks."""
    loads = {
        title: load
        for title, own in runs.items()
        if (load := join_loads(run.host_load for run in own))
    }
    if any(load.is_loaded for load in loads.values()):
        cores = {title: f"{load.others_cores:.1f} of {load.cores}" for title, load in loads.items()}
        yield (
            f"Other programs used cores during these measurements: {_by_title(cores)}. They slow "
            "some settings more than others, which may explain the ratio: measure again on a quiet "
            "machine."
        )
    conditions = {title: conditions_of(own) for title, own in runs.items()}
    throttled = {
        title: f"({reasons})"
        for title, windows in conditions.items()
        if (reasons := describe_windows_throttled(windows))
    }
    if throttled:
        yield (
            f"The device was throttled during these measurements: {_by_title(throttled)}. "
            "Comparisons are less certain than the intervals suggest."
        )
    changes = {
        title: f"({100 * max(moves, key=abs):+.0f} %)"
        for title, windows in conditions.items()
        if (moves := [window.clock_moved_by or 0.0 for window in windows if window.has_moved])
    }
    if changes:
        yield f"The device's clock, and the throughput with it, changed within a window: {_by_title(changes)}."


def list_conditions(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """Yield other influences on throughput: the power limit, other processes, memory, environment.

    Windows at the power limit are no reason for doubt: a loop that no longer waits for data may
    reach the limit because it became faster. Other processes matter only if they started or ended
    between the configurations; if they ran all along, a note reports it.
    """
    conditions = {title: windows for title, own in runs.items() if (windows := conditions_of(own))}
    if len({window.is_at_power_limit for windows in conditions.values() for window in windows}) > 1:
        limited = {
            title: count
            for title, windows in conditions.items()
            if (count := describe_windows_at_limit(windows))
        }
        yield f"Only some windows ran at the device's power limit, which affects the comparison: {_by_title(limited)}."
    others = {
        "memory in use": _of_others(
            conditions, lambda window: window.others_memory_bytes, OTHERS_LEAST_BYTES, format_bytes
        ),
        "device busy": _of_others(
            conditions,
            lambda window: window.others_busy_fraction,
            OTHERS_LEAST_BUSY,
            format_fraction,
        ),
    }
    used = [f"{what} before each: {_by_title(use)}" for what, use in others.items() if use]
    if used:
        yield f"Other processes started or ended on the device between these; {'; '.join(used)}."
    yield from describe_setup(runs)


def describe_setup(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    """Yield conditions that the user can change: memory pressure, environment variables, driver mode."""
    windows = [window for own in runs.values() for window in conditions_of(own)]
    counts = {
        title: f"({sum_retries(own):,} times)"
        for title, own in runs.items()
        if any(run.memory.is_thrashing for run in own)
    }
    if counts:
        stalled = f"torch's allocator ran out of memory and stalled the device: {_by_title(counts)}"
        yield f"{stalled}. Use a smaller micro batch."
    names = sorted({one_line(name) for window in windows for name in window.tf32_overrides})
    if names:
        are, them = ("is", "it") if len(names) == 1 else ("are", "them")
        yield (
            f"{' and '.join(names)} {are} set, so float32 and tf32 may not compute what their "
            f"names say; unset {them} unless that is intended."
        )
    if any(window.persistence_mode is False for window in windows):
        yield "Persistence mode is off, so the first process waits for the driver: turn it on with nvidia-smi -pm 1."


def conditions_of(runs: Iterable[Measurement]) -> list[DeviceConditions]:
    """Return the device's conditions during each run's window, where reported."""
    return drop_none(run.conditions for run in runs)


def sum_retries(runs: Iterable[Measurement]) -> int | None:
    """Return the number of allocation retries in all windows; None if the device does not count them."""
    known = drop_none(run.memory.alloc_retries for run in runs)
    return sum(known) if known else None


def describe_windows_throttled(windows: Sequence[DeviceConditions]) -> str:
    """Return the number of throttled windows and the reasons: "2 of 3 windows: heat"; "" for none."""
    reasons = {THROTTLE_REASONS[reason] for window in windows for reason in window.disturbances}
    count = _count_windows(bool(window.disturbances) for window in windows)
    return count and f"{count}: {', '.join(sorted(reasons))}"


def describe_windows_at_limit(windows: Iterable[DeviceConditions]) -> str:
    """Return the number of windows at the power limit: "2 of 3 windows"; "" for none."""
    return _count_windows(window.is_at_power_limit for window in windows)


def _count_windows(are_so: Iterable[bool]) -> str:
    every = list(are_so)
    return f"{sum(every)} of {format_count(len(every), 'window')}" if any(every) else ""


def _of_others(
    conditions: Mapping[str, Sequence[DeviceConditions]],
    figure: Callable[[DeviceConditions], float | None],
    least: float,
    unit: Callable[[float], str],
) -> dict[str, str]:
    """Return other processes' use before each configuration; empty if it differs by less than `least`."""
    known = {
        title: max(values)
        for title, windows in conditions.items()
        if (values := drop_none(map(figure, windows)))
    }
    if not known or max(known.values()) - min(known.values()) < least:
        return {}
    return {title: unit(value) for title, value in known.items()}


# The whole search: headline, headroom, reasons, advice, and course.

_NOTHING_LEFT = 0.005
"""Headroom below which it counts as none. Source: our convention."""
_SMALL_HEADROOM = 0.5
"""Headroom up to which it is worded as "at most". Source: our convention."""
_NO_ROOM = "Raise memory_limit or allow smaller batches."


def describe_headline(summary: RunSummary, columns: Sequence[Column]) -> str:
    """Return the headline: the verdict, a larger batch's gain if it is real, and disturbances."""
    found = summary.recommendation
    if found is None:
        return describe_nothing_feasible(summary)
    is_change = len(columns) > 1 and columns[1].title == "recommended"
    return " ".join(
        [
            _describe_verdict(summary, found, is_change=is_change),
            *(() if _is_batch_unsettled(found) else _describe_batches(summary, found)),
            *_describe_load(columns),
        ]
    )


def _describe_verdict(summary: RunSummary, found: Recommendation, *, is_change: bool) -> str:
    if found.verdict == "already_best" and found.overloaded:
        return "Keep your configuration: no faster one is known to fit the memory limit on the largest samples."
    if found.verdict == "already_best":
        best = "the best usable one" if found.is_outrun else "already the best"
        is_larger_faster = found.larger_batch is not None and found.larger_batch.is_faster
        where = " at its global batch" if is_larger_faster else ""
        return f"Your configuration is {best} found{where}: no measurable gain."
    if found.verdict == "baseline_infeasible":
        fault = _describe_fault(find_trial(summary, 0), summary.limit_bytes)
        return f"The recommended configuration works; yours {fault}, so there is no speed-up to report."
    speedup = found.speedup
    if found.verdict == "unconfirmed" and (not is_change or speedup is None):
        return "Not decided: nothing faster than your configuration was found so far."
    assert speedup is not None, "a baseline that ran is a reference"  # noqa: S101 - our own bug
    if found.verdict == "unconfirmed":
        more = f"; about {format_duration(found.more_s)} more should decide" if found.more_s else ""
        between = f"{_interval(speedup)} times as fast as your configuration"
        return f"Not decided: {between}, most likely {format_times(speedup.value)}{more}."
    return f"Proven: {format_times(speedup.value)} times as fast as your configuration (95 %: {_interval(speedup)})."


def _interval(ratio: Interval) -> str:
    return show_interval(ratio.low, ratio.high, "times")


def _describe_fault(baseline: TrialRecord | None, limit_bytes: int) -> str:
    """Return why the baseline is no reference, as a predicate: "failed when run again"."""
    limit = format_bytes(limit_bytes)
    if baseline is None:
        return "could not be measured"
    run = baseline.measurement
    if run is not None and run.memory.is_thrashing:
        return f"has no room to train within the memory limit of {limit}"
    if run is not None and baseline.outcome == "over_memory":
        return f"takes {format_bytes_of(run.peak_memory_bytes, limit_bytes)}, above the memory limit of {limit}"
    if baseline.outcome in {"over_memory", "oom", "host_oom"}:
        return f"runs out of memory (limit: {limit})"
    if baseline.outcome == "timeout":
        return "does not finish in time"
    return "failed when run again" if baseline.outcome == "ok" else "could not be measured"


def _is_batch_unsettled(found: Recommendation) -> bool:
    """Return True if a larger batch is not recommended, and what it seems to gain may be noise."""
    larger = found.larger_batch
    return larger is not None and found.number != larger.number and not larger.is_faster


def _describe_batches(summary: RunSummary, found: Recommendation) -> Iterator[str]:
    """Yield the comparison of the best at a larger global batch with the best at the baseline's."""
    larger = found.larger_batch
    if (
        larger is None
        or found.same_batch is None
        or larger.over_same_batch is None
        or larger.break_even is None
    ):
        return
    own = found.same_batch.global_batch_size
    ratio = larger.over_same_batch
    more = f"{format_times(ratio.value)} times the samples/s"
    same = found.same_batch_speedup
    if found.number != larger.number:
        doubt = _doubt_on(larger, summary.objective.larger_batch_gain)
        batch = f"A global batch of {larger.config.global_batch_size} instead of {own}"
        yield f"{batch} gives {more} ({_interval(ratio)}){doubt}."
    else:
        batch = f"Its global batch is {larger.config.global_batch_size}"
        if found.same_batch_number == 0:
            yield f"{batch}; at yours, {own}, nothing faster was found."
        elif same is None:
            yield f"{batch}: {more} of the best at yours, {own} ({_interval(ratio)})."
        else:
            times = f"{format_times(same.value)} times as fast ({_interval(same)})"
            yield f"{batch}; at yours, {own}, the best is {times}."
    if larger.is_faster:
        yield _describe_break_even(larger.break_even)


def _doubt_on(larger: LargerBatch, least_gain: float) -> str:
    if not larger.is_faster:
        return ", which may be noise"
    if larger.is_worth_it:
        return ""
    return f", less than the {100 * least_gain:g} % required of a larger batch"


def _describe_break_even(scale: Interval) -> str:
    if scale.value == 0:
        return "The larger batch trains sooner at any gradient noise scale."
    end = "or more" if isinf(scale.high) else f"to {format_mean_count(scale.high)}"
    interval = f"{format_mean_count(scale.low)} {end}"
    return (
        "The larger batch trains sooner if your gradient noise scale is above "
        f"{format_mean_count(scale.value)} samples ({interval})."
    )


def _describe_load(columns: Sequence[Column]) -> Iterator[str]:
    """Yield the cores that other programs used while one side of the speed-up was measured."""
    sides = [column.figures for column in columns if column.title in {"baseline", "recommended"}]
    loads = drop_none(figures.host_load for figures in drop_none(sides))
    loaded = [load for load in loads if load.is_loaded]
    if loaded:
        worst = max(loaded, key=lambda load: load.others_cores / load.cores)
        yield f"Other programs used {worst.others_cores:.1f} of the {format_count(worst.cores, 'core')} meanwhile."


def describe_nothing_feasible(summary: RunSummary) -> str:
    """Return why nothing is recommended, with the trial that missed the memory limit least."""
    trials = summary.trials
    limit = format_bytes(summary.limit_bytes)
    over = [trial for trial in trials if trial.outcome == "over_memory" and trial.score is not None]
    ended = [
        trial
        for trial in trials
        if trial.outcome in {"oom", "host_oom"} and trial.result.violation is not None
    ]
    nearest = min(over or ended, key=_violation, default=None)
    if nearest is not None:
        which = f"trial {nearest.number} ({describe_settings(nearest.config)})"
        least = "" if over else "at least "
        took = format_bytes_of(summary.limit_bytes * (1 + _violation(nearest)), summary.limit_bytes)
        miss = f"took {least}{took}"
        if nearest.measurement is not None and nearest.measurement.memory.is_thrashing:
            miss = "had no room: memory was released and requested again during training"
        return f"Nothing fits the memory limit of {limit}. Nearest: {which} {miss}. {_NO_ROOM}"
    if not trials:
        return "Nothing was measured."
    outcome, count = Counter(trial.outcome for trial in trials).most_common(1)[0]
    first = next(trial for trial in trials if trial.outcome == outcome)
    again = first.refuted_by
    how = "failed when run again" if again else OUTCOMES[outcome]
    nothing = f"Nothing to recommend: {count} of {format_count(len(trials), 'trial')} {how}"
    if outcome in {"oom", "host_oom"}:
        return f"{nothing}. The memory limit is {limit}. {_NO_ROOM}"
    return f"{nothing}: {one_line((again or first).reason)}"


def _violation(trial: TrialRecord) -> float:
    return trial.score.violation if trial.score is not None else trial.result.violation or 0.0


def describe_headroom(summary: RunSummary, columns: Sequence[Column]) -> str:
    """Return how much of the device is used, the bottleneck, and the headroom; "" if unknown."""
    found = summary.recommendation
    if found is None:
        return ""
    sentence = _describe_best(recommended_figures(summary, columns), is_own=found.number == 0)
    if found.verdict == "baseline_infeasible":
        return sentence
    figures = columns[0].figures
    present = ""
    if figures is not None:
        present = _describe_present(figures, summary.baseline, summary.environment.device_kind)
    return f"{present} {sentence}".strip()


def _describe_present(figures: Measurement, config: TrainingConfig, device_kind: str) -> str:
    headroom = headroom_in(figures)
    devices = f"these {config.world_size} devices" if config.is_group else "this device"
    if headroom is not None:
        share = show_share(headroom.share_of_device)
        limit = describe_limit(headroom, config, device_kind)
        return f"You run at {share} of what {devices} can do; {limit}."
    if figures.device_ceiling:
        share = show_share(figures.samples_per_s / figures.device_ceiling)
        return f"You run at {share} of what {devices} can do; the loader alone was not measured."
    if figures.loader_ceiling:
        share = show_share(figures.samples_per_s / figures.loader_ceiling)
        return f"You run at {share} of what the loader alone reaches; the device alone was not measured."
    return ""


def show_share(share: float) -> str:
    """Return a share of a ceiling, at most 100 %: noise may exceed that."""
    return format_fraction(min(1.0, share))


def describe_limit(headroom: Headroom, config: TrainingConfig, device_kind: str) -> str:
    """Return the side that limits the loop, as the end of a sentence."""
    match headroom.limit:
        case "loader":
            return "the loader is the bottleneck"
        case "copy":
            return "copying batches to it is the bottleneck"
        case "host":
            return f"the host that launches {'their' if config.is_group else 'its'} work is the bottleneck"
        case "device":
            return f"{'the devices themselves are' if config.is_group else 'the device itself is'} the bottleneck"
    if not overlaps(config, device_kind):
        return "without workers, loading and computing alternate"
    reached = show_share(headroom.share_of_lower)
    return f"no side alone limits it: it reaches {reached} of the lowest ceiling"


def _describe_best(figures: Measurement | None, *, is_own: bool) -> str:
    headroom = None if figures is None else headroom_in(figures)
    if headroom is None:
        return ""
    side = "copies'" if headroom.lower == "copy" else f"{headroom.lower}'s"
    which = "Your configuration" if is_own else "The best configuration"
    room = f"its headroom is {format_fraction(headroom.room)}"
    if headroom.room < _NOTHING_LEFT:
        room = "tuning can gain nothing more"
    elif headroom.room <= _SMALL_HEADROOM:
        room = f"tuning can gain at most {format_fraction(headroom.room)} more"
    reached = show_share(headroom.share_of_lower)
    return f"{which} reaches {reached} of the lowest ceiling, the {side}: {room}."


def list_changes(summary: RunSummary) -> Iterator[tuple[str, str, str]]:
    """Yield the settings to change: name, baseline's value, recommended value."""
    if summary.recommendation is None:
        return
    config = summary.recommendation.config
    for name in changed_settings(config, summary.baseline):
        yield name, format_setting(name, summary.baseline), format_setting(name, config)


def list_reasons(summary: RunSummary) -> Iterator[str]:
    """Yield the reasons for this recommendation."""
    found = summary.recommendation
    if found is None:
        return
    yield from map(str, found.reasons)
    if _is_batch_unsettled(found):
        yield from _describe_batches(summary, found)
    if found.number == 0:
        return
    if found.same_batch_number == 0:
        how = "was found"
        if found.overloaded:
            how = "is known to fit the memory limit on the largest samples"
        yield f"At the baseline's global batch, nothing faster {how}."


def list_advice(summary: RunSummary) -> Iterator[str]:
    """Yield changes of the learning rate, betas and eps at another global batch."""
    if summary.recommendation is None:
        return
    advice = summary.recommendation.lr_advice
    if advice.rule != "none":
        change = f"Change lr from {summary.baseline.lr:.4g} to {advice.lr:.4g}"
        yield f"{change}: the global batch is {advice.batch_ratio:.4g} times the baseline's ({advice.rule} rule)."
    if advice.betas is not None:
        first, second = advice.betas
        yield f"Set the optimizer's betas to ({first:.4g}, {second:.4g})."
    if advice.eps is not None:
        yield f"Set the optimizer's eps to {advice.eps:.3g}."
    yield from map(str, advice.notes)


def describe_course(summary: RunSummary) -> str:
    """Return a summary of the search: trials, outcomes, time, why it ended, when it breaks even."""
    found = summary.recommendation
    ended = Counter(trial.outcome for trial in summary.trials).most_common()
    outcomes = ", ".join(f"{count} {OUTCOMES[outcome]}" for outcome, count in ended)
    course = f"{format_count(len(summary.trials), 'trial')} in {format_duration(summary.wall_s)}"
    if outcomes:
        course += f" ({outcomes})"
    course += f". Stopped: {one_line(str(summary.stopped_because)).rstrip('.')}."
    # the time before an interruption is not known, so neither is the break-even point
    is_whole = summary.promised_s is not None
    if is_whole and found is not None and found.verdict == "faster" and found.speedup is not None:
        paid_s = payback_s(summary.wall_s, found.speedup.value)
        if paid_s:
            course += f" Breaks even after {format_duration(paid_s)} of training at the old speed."
    return course
