"""Fill the sections of a report: result, trials, time, memory, several devices, and facts."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from statistics import fmean

from autotune.config.environment import Environment
from autotune.config.plan import ScriptFacts, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.scaling import (
    LEAST_SHARE,
    Helps,
    StrategyComparison,
    StrategyEntry,
    compare_strategies,
)
from autotune.messages.search import describe_group_peak
from autotune.messages.units import (
    NO_VALUE,
    OUTCOMES,
    Unit,
    format_bytes_of,
    format_count,
    format_times,
    show,
    show_gain_interval,
    show_interval,
)
from autotune.models.evidence import rate_of_runs
from autotune.models.memory import MemoryLine, kinds_not_excluded, memory_lines
from autotune.records.breakdown import PARTS, LoaderCosts
from autotune.records.measurement import (
    BucketForecast,
    Fullness,
    Measurement,
    MemoryLimits,
    PackForecast,
    RankFigures,
    name_devices,
    uneven_ranks,
)
from autotune.records.result import Advice, RunSummary, RunVariation, changed_settings
from autotune.records.trial import (
    Outcome,
    PrecisionFigures,
    TrialRecord,
    load_of,
    objection,
    runs_of,
    score_value,
    shortfall,
)
from autotune.report.blocks import (
    Block,
    Bullets,
    Paragraph,
    Section,
    Table,
    TimeBar,
    TimeBars,
    Trace,
    facts_with_values,
    filled,
    footnotes,
    side_by_side,
    tabulate,
)
from autotune.report.figures import (
    Column,
    drop_none,
    headroom_in,
    list_busy,
    list_waits,
    recommended_figures,
    role_of,
)
from autotune.report.sentences import (
    conditions_of,
    describe_windows_at_limit,
    describe_windows_throttled,
)
from autotune.report.words import (
    CAUSES,
    INTERVAL,
    PART_NAMES,
    cut_middle,
    describe_settings,
    format_setting,
    one_line,
    shorten,
    without_controls,
)

# Bottlenecks and advice.


def advice_table(advice: Iterable[Advice], *, is_loaded: bool = False) -> Table:
    """Tabulate advice: its gain with interval, the expected throughput, the advice with its place and basis.

    Args:
        advice: The rows.
        is_loaded: Other programs slowed the measurements: gains and throughput are left out, since
            they may be an effect of that.
    """
    rows = []
    for piece in advice:
        ends = piece.gain_interval
        interval = "" if ends is None else show_gain_interval(ends.low, ends.high)
        place = f" ({piece.place})" if piece.place and piece.place not in piece.text else ""
        rows.append(
            {
                "gain": show(piece.expected_gain, "gain"),
                INTERVAL: interval or NO_VALUE,
                "samples/s": show(piece.expected_samples_per_s, "plain_rate"),
                "advice": f"{piece.text}{place}. Basis: {piece.basis}.",
            }
        )
    return tabulate(rows, ["advice"] if is_loaded else [])


def bottleneck_table(found: Iterable[tuple[float, str, str]]) -> Table:
    """Tabulate bottlenecks: (share of the time, name, evidence)."""
    rows = tuple((show(share, "share"), name, evidence) for share, name, evidence in found)
    return Table(heads=("share", "what", "evidence"), rows=rows)


# Sequences of different lengths: tokens, padding, and the device time without padding.

_LENGTHS_FOOTNOTE = (
    "Padding of other batches: computed from the lengths of items, for this batch size. Device "
    "time: from timed batches of several lengths; it matters only if the loader is not the "
    "bottleneck."
)


def padding_of(figures: Measurement) -> float | None:
    """Return the share of padding by the batches' masks, else by items' lengths; None if unknown."""
    if figures.tokens is not None and figures.tokens.padding is not None:
        return figures.tokens.padding
    return None if figures.lengths is None else figures.lengths.padding


def length_section(measured: Mapping[str, Measurement]) -> Section:
    """Return the section on tokens and lengths; empty if batches have no lengths."""
    known = {
        title: facts for title, figures in measured.items() if (facts := length_facts(figures))
    }
    notes = [_LENGTHS_FOOTNOTE] if any(run.lengths for run in measured.values()) else []
    return Section(
        title="Lengths: tokens and padding", blocks=(side_by_side(known), footnotes(notes))
    )


def length_facts(figures: Measurement) -> dict[str, str]:
    """Return tokens and lengths of one configuration by name; empty if its batches have none."""
    tokens = figures.tokens
    lengths = figures.lengths
    if tokens is None:
        return {}
    facts = {
        "tokens/s": show(figures.tokens_per_s, "plain_rate"),
        "tokens a sample": f"{tokens.per_sample:,.4g}{_error(tokens.relative_sd)}, padding included",
        "batches are padded to": f"{tokens.shortest:,} to {tokens.longest:,}",
        "padding": show(padding_of(figures), "share"),
    }
    if lengths is None:
        return facts
    packed = lengths.packed
    return facts | {
        "an item": f"{lengths.mean:,.4g} tokens, median {lengths.median:,.4g}, longest {lengths.longest:,}",
        "padding, random batches": show(lengths.buckets.random_padding, "share"),
        "padding, similar lengths": show(lengths.buckets.bucket_padding, "share"),
        "device time, similar lengths": _device_time(lengths.buckets),
        "padding, packed rows": show(packed and packed.padding, "share"),
        "device time, packed rows": _device_time(packed),
    }


def _error(relative_sd: float | None) -> str:
    return "" if relative_sd is None else f" (± {show(relative_sd, 'share')})"


def _device_time(forecast: BucketForecast | PackForecast | None) -> str:
    if forecast is None or forecast.device_time_ci is None:
        return NO_VALUE
    interval = show_interval(*forecast.device_time_ci, "share")
    return f"{show(forecast.device_time, 'share')} of the present ({interval})"


# Conditions of the device during the windows.


def device_section(summary: RunSummary, runs: Mapping[str, Sequence[Measurement]]) -> Section:
    """Return the section on the device during each configuration's windows, with throttled trials."""
    table = side_by_side({title: device_facts(own) for title, own in runs.items()})
    throttled = ", ".join(
        str(trial.number)
        for trial in summary.trials
        if trial.measurement is not None
        and trial.measurement.conditions is not None
        and trial.measurement.conditions.disturbances
    )
    notes = footnotes([f"Trials that were throttled: {throttled}."] if throttled else [])
    return Section(title="Device during the windows", blocks=(table, notes))


def device_facts(runs: Sequence[Measurement]) -> dict[str, str]:
    """Return what the device reported during one configuration's windows, by name."""
    windows = conditions_of(runs)
    no = "no" if windows else NO_VALUE
    powers = drop_none(window.power_w for window in windows)
    return {
        "power": f"{fmean(powers):,.0f} W" if powers else NO_VALUE,
        "clock": _span((window.sm_clock_mhz for window in windows), "MHz"),
        "highest clock": _span([(window.max_sm_clock_mhz,) for window in windows], "MHz"),
        "temperature": _span((window.temperature_c for window in windows), "°C"),
        "at its power limit": describe_windows_at_limit(windows) or no,
        "throttled": describe_windows_throttled(windows) or no,
    }


def _span(edges: Iterable[tuple[int | None, ...] | None], unit: str) -> str:
    """Return the lowest and the highest value at any window's edge: "1,755 to 1,980 MHz"."""
    values = drop_none(value for edge in edges for value in edge or ())
    if not values:
        return NO_VALUE
    low = min(values)
    high = max(values)
    return f"{low:,} {unit}" if low == high else f"{low:,} to {high:,} {unit}"


# Time: its parts, how busy the device was, ceilings, and the loader's costs, by configuration.

_SAMPLES_OF_A_BAR = 1000
"""Samples whose time is shown next to a bar. Source: our convention."""
_ALONE = {
    "loader alone": "Loader alone: read without training.",
    "device alone": "Device alone: trained on batches that it already holds.",
    "copying alone": "Copying alone: batches moved to the device without training.",
    "host alone": (
        "Host alone: prefetched batches fetched and launched, without waiting for the device."
    ),
}
_HELD_ALONE = (
    "Launching limited the device alone as well, so the device's ceiling is calculated from its "
    "busy time."
)
_FULLNESS = {
    "sm_fraction": "multiprocessors in use (GPM)",
    "sm_occupancy": "warps resident (GPM)",
    "tensor_fraction": "tensor pipes in use (GPM)",
    "dram_fraction": "memory bandwidth used (GPM)",
}
_COSTS: dict[str, tuple[str, Unit]] = {
    "one item": ("item_s", "seconds"),
    "of it CPU work": ("cpu_fraction", "share"),
    "its median": ("item_median_s", "seconds"),
    "its 99th percentile": ("item_p99_s", "seconds"),
    "its slowest": ("item_slowest_s", "seconds"),
    "time in slow items": ("slow_tail_fraction", "share"),
    "read from disk per item": ("disk_bytes_per_item", "bytes"),
    "size of an item": ("item_bytes", "bytes"),
    "collate a batch": ("collate_s", "seconds"),
    "batch from worker to trainer": ("transfer_s", "seconds"),
    "pin a batch": ("pin_s", "seconds"),
    "copy a batch to the device": ("copy_s", "seconds"),
    "the same from pinned memory": ("pinned_copy_s", "seconds"),
    "batches per worker and second": ("batches_per_worker_per_s", "plain_rate"),
    "batches per core and second": ("batches_per_core_per_s", "plain_rate"),
}


def time_section(measured: Mapping[str, Measurement]) -> Section:
    """Return the section on the time breakdown and on how busy the device was by each source."""
    sources = dict.fromkeys(
        reading.source for figures in measured.values() for reading in figures.busy_readings
    )
    busy = side_by_side(
        {title: _busy_facts(figures, sources) for title, figures in measured.items()}
    )
    return Section(title="Where the time goes", blocks=(_bars(measured), busy))


def ceiling_section(measured: Mapping[str, Measurement]) -> Section:
    """Return the section on ceilings: loader, device, copying and host, each alone."""
    facts = {}
    is_held_alone = False
    for title, known in measured.items():
        room = headroom_in(known)
        if room is not None and room.device_ceiling > (known.device_ceiling or 0.0):
            is_held_alone = True
        facts[title] = {
            "loader alone": show(known.loader_ceiling, "plain_rate"),
            "device alone": show(known.device_ceiling, "plain_rate"),
            "copying alone": show(known.copy_ceiling, "plain_rate"),
            "host alone": show(known.host_ceiling, "plain_rate"),
            "share of the device's": show(room and room.share_of_device, "share"),
            "share of the lowest": show(room and room.share_of_lower, "share"),
        }
    table = side_by_side(facts)
    shown = [note for name, *_ in table.rows if (note := _ALONE.get(name))]
    if is_held_alone:
        shown.append(_HELD_ALONE)
    blocks = (table, footnotes([" ".join(shown)] if shown else []))
    return Section(title="Ceilings: samples/s of loader and device alone", blocks=blocks)


def loader_section(measured: Mapping[str, Measurement]) -> Section:
    """Return the section on the cost of an item inside the loader."""
    known = {
        title: figures.loader_costs
        for title, figures in measured.items()
        if figures.loader_costs is not None
    }
    table = side_by_side({title: loader_facts(costs) for title, costs in known.items()})
    timed = "; ".join(f"{title}: {costs.items:,} items" for title, costs in known.items())
    note = f"Timed outside the window, item by item, in one process ({timed})."
    blocks = (table, footnotes([note] if known else []))
    return Section(title="Inside the loader: what an item costs", blocks=blocks)


def loader_facts(costs: LoaderCosts) -> dict[str, str]:
    """Return the loader's costs of one configuration by name."""
    return {name: show(getattr(costs, field), unit) for name, (field, unit) in _COSTS.items()}


def fullness_facts(fullness: Fullness | None) -> dict[str, str]:
    """Return how full the device's busy time was, by name."""
    return {
        name: show(getattr(fullness, field, None), "share") for field, name in _FULLNESS.items()
    }


def _bars(measured: Mapping[str, Measurement]) -> TimeBars:
    slowest = min(
        (run.samples_per_s for run in measured.values() if run.breakdown is not None), default=0.0
    )
    bars = []
    for title, run in measured.items():
        if run.breakdown is None:
            continue
        time = show(_SAMPLES_OF_A_BAR / run.samples_per_s, "seconds")
        parts = ((part, share.fraction) for part, share in run.breakdown.shares().items())
        bars.append(
            TimeBar(
                title=title,
                caption=f"{time} for {_SAMPLES_OF_A_BAR:,} samples",
                length=slowest / run.samples_per_s,
                parts=tuple(parts),
            )
        )
    return TimeBars(bars=tuple(bars))


def _busy_facts(figures: Measurement, sources: Iterable[str]) -> dict[str, str]:
    """Return how busy the device was by each source, and how full that time was."""
    fractions = {reading.source: reading.fraction for reading in figures.busy_readings}
    busy = {f"busy: {one_line(source)}": show(fractions.get(source), "share") for source in sources}
    return busy | fullness_facts(figures.fullness)


# Memory: fitted lines and the stress run.

_MEMORY_FOOTNOTE = (
    "Lines fitted to the trials' peak memory; the error is half of the 95 % prediction interval. "
    "Last column: the largest batch that is sure to fit the limit; only batches that ran are "
    "recommended."
)


def list_memory_lines(summary: RunSummary) -> tuple[MemoryLine, ...]:
    """Return a line for each kind of memory use, with the recommended number of loader workers."""
    only_ram = summary.environment.has_only_ram
    return memory_lines(
        summary.trials, _settings(summary), summary.limit_bytes, limit_is_ram=only_ram
    )


def lines_of_group(summary: RunSummary, lines: Sequence[MemoryLine]) -> tuple[MemoryLine, ...]:
    """Return the lines of all precisions on the recommended strategy and number of devices."""
    own = _settings(summary).group_name
    return tuple(line for line in lines if line.config.group_name == own)


def describe_group(own: Sequence[MemoryLine], lines: Sequence[MemoryLine]) -> str:
    """Return which devices and workers the lines `own` hold for; "" or with a leading space."""
    has_others = 0 < len(own) < len(lines)
    whose = f" They are for {own[0].config.group_name} only." if has_others else ""
    return whose + "".join(f" {note}" for note in _workers(own))


def memory_table(summary: RunSummary, lines: Sequence[MemoryLine]) -> tuple[Table, Bullets]:
    """Return the fitted memory lines as a table, with footnotes."""
    notes = [_MEMORY_FOOTNOTE, *_workers(lines)] if lines else []
    # the windows were short: which memory might still grow to the limit within a day?
    chosen = summary.recommendation
    runs = runs_of(summary.trials, 0 if chosen is None else chosen.number)
    kinds = kinds_not_excluded(runs, MemoryLimits.on(summary.environment, summary.limit_bytes))
    if kinds:
        memory = " or ".join(
            "the device's memory" if kind == "device" else "host memory" for kind in kinds
        )
        notes.append(
            f"The windows were too short to exclude that {memory} grows to the limit within a day "
            "of training."
        )
    table = tabulate(_memory_row(line, lines, summary.limit_bytes) for line in lines)
    return table, footnotes(notes)


def stress_section(summary: RunSummary) -> Section:
    """Return the section on the stress run: the recommended configuration on the largest samples."""
    steps = Bullets(sentences=tuple(_describe_stress(summary)))
    return Section(
        title="Stress run: do the largest samples fit?", blocks=(steps,), is_short_search=True
    )


def _describe_stress(summary: RunSummary) -> Iterator[str]:
    found = summary.recommendation
    if found is None or found.stress is None:
        return
    # What ran
    stress = found.stress
    load = load_of(stress, found.config, summary.environment, summary.facts)
    count = format_count(stress.steps, "step")
    ran = f"The recommended settings trained for {count} ({show(stress.seconds, 'duration')})"
    if load.where:
        ran += f" {load.where}"
    if stress.note:
        yield f"{ran}."
        yield str(stress.note)
    else:
        yield f"{ran}, ordinary batches interleaved with the largest samples."
    # Its memory: one process ran, and what all ranks need follows from it
    limit = summary.limit_bytes
    peak = f"Peak memory: {format_bytes_of(load.own_bytes, limit)}"
    if load.is_more:
        group = describe_group_peak(load.peak_bytes, load.ranks, load.bucket_bytes)
        peak += f", that is {group}"
    side = "within" if load.peak_bytes <= limit else "above"
    yield f"{peak}, {side} the limit of {show(limit, 'bytes')} ({stress.memory.source})."
    yield (
        f"The largest of {format_count(stress.items_seen, 'item')} has "
        f"{show(stress.largest_item_bytes, 'bytes')}, the median "
        f"{show(stress.median_item_bytes, 'bytes')}."
    )


def _memory_row(line: MemoryLine, lines: Sequence[MemoryLine], limit_bytes: int) -> dict[str, str]:
    farthest = 4 * line.batches[-1]
    largest = line.largest_batch(limit_bytes, farthest + 1)
    fitting = f"{largest:,}" if largest else NO_VALUE
    if largest > farthest:
        fitting = f"over {farthest:,}"
    # name the devices only if lines differ in them
    name: str = line.config.amp_dtype
    if len({other.config.group_name for other in lines}) > 1:
        name += f", {line.config.group_name}"
    # without a batch: "199 MiB", "141 MiB + 58.0 MiB for 2 loader workers"
    base = show(line.intercept_bytes - line.workers_bytes, "bytes")
    if line.workers_bytes:
        workers = format_count(line.config.num_workers, "loader worker")
        base += f" + {show(line.workers_bytes, 'bytes')} for {workers}"
    return {
        "precision": name,
        "trials": str(len(line.batches)),
        "at batch 0": base,
        "a sample": show(line.bytes_per_sample, "bytes"),
        "± error": show(line.error_bytes, "bytes"),
        "batch at the limit": fitting,
    }


def _workers(lines: Sequence[MemoryLine]) -> tuple[str, ...]:
    """Return for how many loader workers lines hold, if that makes a difference."""
    counts = [line.config.num_workers for line in lines if line.workers_bytes]
    return (f"The lines hold for {format_count(counts[0], 'loader worker')}.",) if counts else ()


def _settings(summary: RunSummary) -> TrainingConfig:
    return summary.baseline if summary.recommendation is None else summary.recommendation.config


# Several devices: whether they help, their bottlenecks, advice, and each rank's figures.


_HELPS: dict[Helps | None, str] = {
    "yes": "Yes",
    "no": "No",
    "not_measurably": "Not measurably",
    None: "Not known",
}


def scaling_sections(summary: RunSummary, columns: Sequence[Column]) -> tuple[Section, ...]:
    """Return the sections on several devices; () if no trial had more than one.

    A configuration that a further run or a stress run refuted counts as tried, but can't be the
    best of its strategy.
    """
    found = summary.recommendation
    trials = [
        trial.model_copy(update={"score": None})
        if found is not None and trial.number in found.overloaded
        else trial
        for trial in summary.trials
    ]
    comparison = compare_strategies(trials, summary.environment, summary.run_variation)
    if comparison is None:
        return ()
    group = "" if comparison.fastest is None else comparison.fastest.config.group_name
    kinds = [
        "failed" if entry.best is None else role_of(entry.best.number, summary)
        for entry in comparison.entries
    ]
    answer = Paragraph(text=_describe_answer(comparison))
    table = tabulate(map(_strategy_row, comparison.entries), kinds=kinds)
    limits = (
        (limit.share, CAUSES[limit.cause], f"{limit.evidence}.") for limit in comparison.bottlenecks
    )
    titled: dict[str, tuple[Block, ...]] = {
        "Do more devices help?": (answer, table, footnotes(_strategy_notes(comparison))),
        f"Bottlenecks of {group}": (bottleneck_table(limits),),
        f"What would help {group}": (advice_table(comparison.advice),),
    }
    return (
        *(
            Section(title=title, blocks=blocks, is_short_search=True)
            for title, blocks in titled.items()
        ),
        *_ranks_of(comparison, summary, columns),
    )


def rank_section(ranks: Sequence[RankFigures], whose: str = "") -> tuple[Section, ...]:
    """Return the section on each rank, naming uneven ones; () for a single process."""
    if not ranks:
        return ()
    devices = name_devices(ranks)
    uneven = [
        f"Rank {rank} ({devices[rank]}) is uneven: its {side} alone reaches {show(share, 'share')} "
        "of the others'."
        for rank, (side, share) in uneven_ranks(ranks).items()
    ]
    table = tabulate(_rank_row(rank, devices[rank.rank]) for rank in ranks)
    title = f"Each rank of {whose}" if whose else "Each rank"
    return filled(Section(title=title, blocks=(table, footnotes(uneven)), is_short_search=True))


def _describe_answer(comparison: StrategyComparison) -> str:
    fastest = comparison.fastest
    if fastest is None:
        tried = format_count(
            sum(entry.tried for entry in comparison.entries if entry.is_group), "trial"
        )
        return f"Not known: no trial with more than one device ran well ({tried})."
    ratio = fastest.speedup
    efficiency = fastest.efficiency
    if ratio is None or efficiency is None:
        return "Not known: no trial on one device ran well, so there is nothing to compare with."
    reason = ""
    if comparison.bottlenecks:
        cause = CAUSES[comparison.bottlenecks[0].cause]
        share = show(comparison.bottlenecks[0].share, "share")
        reason = f" Main bottleneck: {cause}, {share} of its time."
    elif efficiency < 1 - LEAST_SHARE:
        reason = " No measurement explains what limits it."
    return (
        f"{_HELPS[comparison.helps]}: {fastest.config.group_name} trains {show(ratio.value, 'times')} "
        f"times as fast as one device ({show_interval(ratio.low, ratio.high, 'times')}), an "
        f"efficiency of {show(efficiency, 'share')}.{reason}"
    )


def _strategy_row(entry: StrategyEntry) -> dict[str, str]:
    row = {"": entry.group}
    best = entry.best
    if best is None:
        return row
    rate = best.samples_per_s
    exchange = best.communication
    return row | {
        "#": str(best.number),
        "samples/s": show(rate.value, "plain_rate"),
        INTERVAL: show_interval(rate.low, rate.high, "plain_rate"),
        "efficiency": show(best.efficiency, "share"),
        "exposed": show(exchange and exchange.exposed_fraction, "share"),
        "hidden": show(exchange and exchange.hidden_fraction, "share"),
    }


def _strategy_notes(comparison: StrategyComparison) -> Iterator[str]:
    """Yield the footnotes of the table of strategies."""
    if comparison.other_changes:
        names = ", ".join(comparison.other_changes)
        yield f"Part of the difference may come from other settings: {names}."
    yield "Efficiency: throughput for each device, relative to one device alone."
    if any(entry.best and entry.best.communication for entry in comparison.entries):
        yield (
            "Exposed: share of a step that exchanging gradients adds. Hidden: share of the "
            "exchange that overlaps with the backward pass."
        )


def _ranks_of(
    comparison: StrategyComparison, summary: RunSummary, columns: Sequence[Column]
) -> tuple[Section, ...]:
    """Return the section on the recommended group's ranks, or the fastest group's for one device."""
    figures = recommended_figures(summary, columns)
    if summary.recommendation is not None and figures is not None and figures.ranks:
        return rank_section(figures.ranks, summary.recommendation.config.group_name)
    if comparison.fastest is None:
        return ()
    return rank_section(comparison.fastest.ranks, comparison.fastest.config.group_name)


def _rank_row(rank: RankFigures, device: str) -> dict[str, str]:
    return {
        "rank": str(rank.rank),
        "device": device,
        "loader alone": show(rank.loader_ceiling, "plain_rate"),
        "device alone": show(rank.device_ceiling, "plain_rate"),
        "data wait": show(rank.data_wait_fraction, "share"),
        "busy": show(rank.busy_fraction, "share"),
        "peak memory": show(rank.peak_memory_bytes, "bytes"),
    }


# Trials: their table, repeated runs, failures, and the precision check.

_LONGEST_REASON = 160
"""Terminal cells of a reason in the table; "Failures" has the whole. Source: our convention."""
_LONGEST_MESSAGE = 2000
"""Characters of a message, which may hold a whole tensor. Source: our convention."""
_LONGEST_TRACEBACK = 20_000
"""Characters of a traceback: some 250 lines, more than one without recursion has."""
_MOST_SHOWN = 200
"""Rows of the table of trials: some four pages. Source: our convention."""
_NUMBERS_SHOWN = 3
"""Trials named for each kind of failure. Source: our convention."""
_OWN_REASON_EACH: frozenset[Outcome] = frozenset({"crashed", "invalid"})
"""Outcomes whose reasons name different faults; reasons of the others differ only in figures."""
_HEADS = (
    "#",
    "settings",
    "outcome",
    "samples/s",
    INTERVAL,
    "score",
    "busy",
    "peak memory",
    "energy a sample",
    "reason",
)
_PRECISION_FOOTNOTE = (
    "The same weights and batches, trained in float32 and with the trial's settings; the result "
    "applies to that precision."
)


def trial_section(summary: RunSummary, table: Table) -> Section:
    """Return the section with the table of trials and its footnotes."""
    notes = []
    if len(table.rows) < len(summary.trials):
        notes.append(
            f"{len(table.rows)} of {format_count(len(summary.trials), 'trial')} are shown: the "
            "baseline, what ran more than once, the best, and failures; trials.jsonl has all."
        )
    return Section(title="Trials, each by its first run", blocks=(table, footnotes(notes)))


def trial_table(summary: RunSummary) -> Table:
    """Tabulate every trial; if there are many, the most informative ones."""
    trials = _shown(summary)
    kinds = [
        role_of(trial.number, summary) or ("" if trial.is_feasible else "failed")
        for trial in trials
    ]
    return tabulate((_trial(trial, summary) for trial in trials), _HEADS, kinds=kinds)


def _shown(summary: RunSummary) -> list[TrialRecord]:
    """Return all trials, or of many those with a role, repeated ones, the best, and the first failures."""
    trials = summary.trials
    if len(trials) <= _MOST_SHOWN:
        return list(trials)
    named = {0, *(trial.number for trial in trials if trial.repeats)}
    if summary.recommendation is not None:
        named.add(summary.recommendation.number)
    first = [trial for trial in trials if trial.number in named]
    best = sorted((trial for trial in trials if trial.is_feasible), key=score_value, reverse=True)
    failed = [trial for trial in trials if not trial.is_feasible]
    # failures get at least a quarter of the rows, less the named ones
    most_best = _MOST_SHOWN - _MOST_SHOWN // 4
    by_interest = [*first, *best[:most_best], *failed, *best[most_best:]]
    numbers = list(dict.fromkeys(trial.number for trial in by_interest))
    shown = set(numbers[:_MOST_SHOWN])
    return [trial for trial in trials if trial.number in shown]


def repeat_section(summary: RunSummary) -> Section:
    """Return the section on repeated runs, in the order in which they ended."""
    runs = [
        (result.at_s, trial, place, result)
        for trial in summary.trials
        if trial.repeats
        for place, result in enumerate(trial.results, 1)
    ]
    rows = (
        {
            "run": str(place),
            "#": str(trial.number),
            "settings": describe_settings(trial.config),
            "outcome": OUTCOMES[result.outcome],
            **_measured(result.measurement, summary.run_variation),
        }
        for _, trial, place, result in sorted(runs, key=lambda run: run[0])
    )
    speedups = footnotes(_compare_with_measured(summary) if runs else ())
    return Section(title="Settings that ran more than once", blocks=(tabulate(rows), speedups))


def _compare_with_measured(summary: RunSummary) -> tuple[str, ...]:
    """Return the footnote that compares the measured with the reported speed-up."""
    found = summary.recommendation
    if found is None or found.speedup is None or found.measured_speedup is None:
        return ()
    measured = (
        f"Measured over all runs: {format_times(found.measured_speedup.value)} times the baseline"
    )
    claimed = f"reported: {format_times(found.speedup.value)} times, because the best of several trials is partly luck"
    return (f"{measured}; {claimed}.",)


def failure_section(summary: RunSummary) -> Section:
    """Return the section on failed trials, grouped by fault, the largest group first.

    Trials stopped early for being too slow are not failures.
    """
    groups: dict[tuple[Outcome, str], list[TrialRecord]] = {}
    for trial in summary.trials:
        if trial.outcome not in {"ok", "pruned"}:
            groups.setdefault((trial.outcome, _fault(trial)), []).append(trial)
    ordered = sorted(groups.values(), key=len, reverse=True)
    traces = tuple(_failure(trials, summary.limit_bytes) for trials in ordered)
    return Section(title="Failures, and where they came from", blocks=traces, is_short_search=True)


def _fault(trial: TrialRecord) -> str:
    """Return the key that groups failures of one outcome."""
    if trial.outcome not in _OWN_REASON_EACH and not trial.is_refused:
        return ""
    return trial.reason if trial.result.failure is None else trial.result.failure.signature


def _failure(trials: list[TrialRecord], limit_bytes: int) -> Trace:
    """Describe a group of failures: its trials, and the first one's reason and traceback."""
    first = trials[0]
    which = "trials" if len(trials) > 1 else "trial"
    which += " " + ", ".join(str(trial.number) for trial in trials[:_NUMBERS_SHOWN])
    more = len(trials) - _NUMBERS_SHOWN
    if more > 0:
        which += f" and {more} more"
    reason = one_line(cut_middle(_reason(first, limit_bytes), _LONGEST_MESSAGE))
    traceback = ""
    if first.result.failure is not None:
        traceback = cut_middle(first.result.failure.traceback, _LONGEST_TRACEBACK)
    return Trace(
        count=f"{len(trials)} {OUTCOMES[first.outcome]}",
        text=f"{which}: {reason}",
        traceback=without_controls(traceback).strip("\n"),
    )


def _reason(trial: TrialRecord, limit_bytes: int) -> str:
    """Return why a trial failed, with memory in the units of the report."""
    again = trial.refuted_by
    if trial.outcome == "ok" and again is not None:
        return f"when it was run again: {again.reason or OUTCOMES[again.outcome]}"
    peak = 0 if trial.measurement is None else trial.measurement.peak_memory_bytes
    if trial.outcome != "over_memory" or peak <= limit_bytes:
        return trial.reason
    limit = show(limit_bytes, "bytes")
    return f"peak memory must stay within {limit}, but was {format_bytes_of(peak, limit_bytes)}"


def precision_section(summary: RunSummary) -> Section:
    """Return the section on precisions and compiled models compared with float32."""
    checked = [
        (trial, trial.result.guard) for trial in summary.trials if trial.result.guard is not None
    ]
    more = dict.fromkeys(str(note) for _, figures in checked for note in figures.notes)
    notes = footnotes([_PRECISION_FOOTNOTE, *more] if checked else [])
    table = tabulate(starmap(_precision, checked))
    return Section(title="Precision check: does it train as float32 does?", blocks=(table, notes))


def _precision(trial: TrialRecord, figures: PrecisionFigures) -> dict[str, str]:
    deviation = figures.loss_deviation
    cosine = figures.gradient_cosine
    refusal = shortfall(figures) or objection(figures)
    return {
        "#": str(trial.number),
        "precision": trial.config.amp_dtype + (", compiled" if trial.config.compile else ""),
        "steps": str(figures.steps),
        "batch": str(figures.micro_batch_size),
        "losses deviate": "not finite" if deviation is None else show(deviation, "share"),
        "gradients' cosine": "not finite" if cosine is None else f"{cosine:.4f}",
        "steps skipped": f"{sum(figures.skipped_steps)}" if figures.skipped_steps else NO_VALUE,
        "result": "passed" if refusal is None else str(refusal),
    }


def _trial(trial: TrialRecord, summary: RunSummary) -> dict[str, str]:
    return _measured(trial.measurement, summary.run_variation) | {
        "#": str(trial.number),
        "settings": describe_settings(trial.config),
        "outcome": OUTCOMES[trial.outcome],
        "score": NO_VALUE if trial.score is None else f"{trial.score.value:.3f}",
        "reason": shorten(_reason(trial, summary.limit_bytes), _LONGEST_REASON),
    }


def _measured(run: Measurement | None, spread: RunVariation) -> dict[str, str]:
    interval = NO_VALUE
    if run is not None:
        rate = rate_of_runs([run], spread)
        interval = show_interval(rate.low, rate.high, "plain_rate")
    return {
        "samples/s": show(run and run.samples_per_s, "plain_rate"),
        INTERVAL: interval,
        "busy": show(run and run.busy_fraction, "share"),
        "data wait": show(run and run.data_wait_fraction, "share"),
        "peak memory": show(run and run.peak_memory_bytes, "bytes"),
        "energy a sample": show(run and run.joules_per_sample, "energy"),
    }


# Facts: the machine, the workload, the run's options, the files of the run folder.

_FILES = {
    "recommended.yaml": "the settings to use; autotune.load() reads them",
    "recommended.patch": "the loader's settings as a change of the script",
    "report.html": "the report with its plots, for a browser",
    "report.md": "the same in Markdown, without its plots",
    "trials.jsonl": "every trial, raw",
    "study.db": "the Optuna study",
    "environment.json": "the machine and its versions",
    "logs": "what each trial printed",
}


def list_files(run_dir: Path, written: Container[str] = ()) -> dict[str, str]:
    """Return the run folder's files that exist or will be written: {name: content}."""
    return {
        name: purpose
        for name, purpose in _FILES.items()
        if name in written or (run_dir / name).exists()
    }


def show_path(path: Path) -> str:
    """Return a path, relative if it is below the working directory."""
    absolute = path.absolute()
    if absolute.is_relative_to(Path.cwd()):
        return str(absolute.relative_to(Path.cwd()))
    return str(absolute)


def describe_environment(environment: Environment) -> dict[str, str]:
    """Return the machine's facts by name."""
    memory = show(environment.device_memory_bytes, "bytes")
    ram = show(environment.ram_bytes, "bytes")
    each = ""
    on_each = ""
    if environment.hosts > 1:
        each = f"{environment.hosts} hosts, each: "
        on_each = " on each host"
    devices = ""
    if environment.device_count > 1:
        devices = f"{environment.device_count}{on_each}"
        if environment.device_names:
            devices += f": {', '.join(environment.device_names)}"
    nodes = ""
    if environment.numa_nodes > 1:
        nodes = f" of {environment.numa_nodes} NUMA nodes"
    torch = environment.torch
    if environment.cuda is not None:
        torch += f", CUDA {environment.cuda}"
    malloc = " ".join(environment.malloc)
    if environment.keeps_memory:
        malloc += " (set for trials)"
    versions = [f"{name} {version}" for name, version in sorted(environment.versions.items())]
    facts = {
        "device": f"{each}{environment.device_name} ({environment.device}, {memory})",
        "devices": devices,
        "driver": environment.driver or "",
        "precisions": ", ".join(environment.native_amp_dtypes),
        "TF32 switches": ", ".join(environment.tf32_overrides),
        "processor": f"{format_count(environment.cores, 'core')}{nodes}, {ram} of RAM{on_each}",
        "malloc": malloc,
        "platform": environment.platform,
        "python": environment.python,
        "torch": torch,
        "packages": ", ".join(versions),
        "fingerprint": environment.fingerprint,
        "note": " ".join(map(str, environment.notes)),
    }
    return facts_with_values(facts).facts


def describe_workload(facts: WorkloadFacts) -> dict[str, str]:
    """Return the workload's facts by name."""
    kind = "map-style dataset"
    if facts.is_tf_data:
        kind = "tf.data pipeline"
    elif facts.is_iterable:
        kind = "iterable dataset"
    length = "unknown length"
    if facts.dataset_length is not None:
        length = format_count(facts.dataset_length, "sample")
    own = {
        "data": f"{kind}, {length}",
        "model": format_count(facts.parameter_count, "parameter"),
        "optimizer": facts.optimizer.name,
        "loss": facts.step_source,
    }
    return own if facts.script is None else own | _describe_script(facts.script)


def _describe_script(script: ScriptFacts) -> dict[str, str]:
    """Return the framework of a script's loop, and the place of its loader."""
    if not script.loaders:
        return {"data": "no DataLoader", "loop": script.framework}
    site = script.own_loader or script.loaders[-1]
    return {"loop": script.framework, "loader": f"made in {Path(site.file).name}, line {site.line}"}


def describe_run(summary: RunSummary) -> dict[str, str]:
    """Return the options of the search by name."""
    objective = summary.objective
    budget = summary.budget
    timeout = "none" if budget.timeout_s is None else show(budget.timeout_s, "duration")
    facts = {
        "command": shlex.join(summary.command),
        "autotune": summary.autotune_version,
        "seed": str(summary.seed),
        "baseline": describe_settings(summary.baseline),
        "memory limit": f"{show(summary.limit_bytes, 'bytes')}, {summary.memory_source}",
        "busy weight": f"{objective.busy_weight:g}",
        "global batch": f"{objective.global_batch}, at most {objective.max_batch_scale:g} times the baseline's",
        "larger batch gain": show(objective.larger_batch_gain, "share"),
        "lr rule": objective.lr_rule,
        "budget": f"at most {budget.max_trials} trials, time-out: {timeout}",
    }
    return facts_with_values(facts).facts


# The table of results: figures of each configuration, and the settings in which they differ.


def result_table(columns: Sequence[Column], limit_bytes: int | None = None) -> Table:
    """Tabulate the figures of configurations, then the settings in which they differ.

    Args:
        columns: The configurations; the first is the reference.
        limit_bytes: The memory limit, to show memory as a share of it too; None leaves that out.
    """
    figures = [column.figures for column in columns]
    ratios = [column.speedup for column in columns[1:]]
    interval = f"  {INTERVAL}"
    # Throughput and speed-up
    rates = [known and known.samples_per_s for known in figures]
    rate_intervals = [None if known is None else known.samples_per_s_ci for known in figures]
    rows: list[tuple[str, ...]] = [
        ("samples/s", *(show(rate, "plain_rate") for rate in rates)),
        (interval, *(_show_interval(ends, "plain_rate") for ends in rate_intervals)),
        *_token_rows(figures),
    ]
    if any(ratios):
        gains = [ratio and ratio.value for ratio in ratios]
        gain_intervals = [None if ratio is None else (ratio.low, ratio.high) for ratio in ratios]
        rows += [
            (f"times {columns[0].title}", "1", *(show(gain, "times") for gain in gains)),
            (interval, "", *(_show_interval(ends, "times") for ends in gain_intervals)),
        ]
    # The device, the time, memory and energy
    busy = [reading and reading.fraction for reading in list_busy(columns)]
    peaks = [None if known is None else known.peak_memory_bytes for known in figures]
    energy = [known and known.joules_per_sample for known in figures]
    rows += [
        ("busy", *(show(fraction, "share") for fraction in busy)),
        *_time_rows(columns),
        *_memory_rows(peaks, limit_bytes),
    ]
    if drop_none(energy):
        rows.append(("energy a sample", *(show(joules, "energy") for joules in energy)))
    # Settings
    settings = _setting_rows(columns)
    kinds = (*[""] * len(rows), *["setting"] * len(settings))
    heads = ("", *(column.title for column in columns))
    return Table(heads=heads, rows=(*rows, *settings), row_kinds=kinds)


def _show_interval(ends: tuple[float, float] | None, unit: Unit) -> str:
    return NO_VALUE if ends is None else show_interval(*ends, unit)


def _token_rows(figures: Sequence[Measurement | None]) -> Iterator[tuple[str, ...]]:
    """Yield tokens/s and the share of padding, if batches have lengths."""
    rates = [known and known.tokens_per_s for known in figures]
    if drop_none(rates):
        padding = [known and padding_of(known) for known in figures]
        yield "tokens/s", *(show(rate, "plain_rate") for rate in rates)
        yield "  of them padding", *(show(share, "share") for share in padding)


def _time_rows(columns: Sequence[Column]) -> Iterator[tuple[str, ...]]:
    """Yield the waits for data, and the parts of the time that are known."""
    yield PART_NAMES["data_wait"], *(show(wait, "share") for wait in list_waits(columns))
    breakdowns = [column.figures and column.figures.breakdown for column in columns]
    rows = {"  at epoch ends": [parts and parts.restart_fraction for parts in breakdowns]}
    for part in PARTS[1:]:
        shares = [parts and parts.shares()[part].fraction for parts in breakdowns]
        rows[PART_NAMES[part]] = shares
    for name, fractions in rows.items():
        if any(fractions):
            yield name, *(show(fraction, "share") for fraction in fractions)


def _memory_rows(peaks: Sequence[int | None], limit_bytes: int | None) -> Iterator[tuple[str, ...]]:
    if limit_bytes is None:
        yield "peak memory", *(show(peak, "bytes") for peak in peaks)
        return
    known = [NO_VALUE if peak is None else format_bytes_of(peak, limit_bytes) for peak in peaks]
    shares = [None if peak is None else peak / limit_bytes for peak in peaks]
    yield "peak memory", *known
    yield f"  of {show(limit_bytes, 'bytes')}", *(show(share, "share") for share in shares)


def _setting_rows(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    baseline = columns[0].config
    configs = [column.config for column in columns]
    changed = {name for config in configs for name in changed_settings(config, baseline)}
    names = [name for name in TrainingConfig.model_fields if name in changed]
    rows = [(name, *(format_setting(name, config) for config in configs)) for name in names]
    if changed & {"grad_accum_steps", "world_size"}:
        rows.insert(0, ("global batch", *(str(config.global_batch_size) for config in configs)))
    return rows
