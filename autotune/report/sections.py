"""The sections of a report, each from its figures: result, trials, times, memory, ranks, devices, facts."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from math import isfinite
from pathlib import Path
from statistics import fmean, geometric_mean

from autotune.config.environment import Environment
from autotune.config.plan import ScriptFacts, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.scaling import (
    LEAST_SHARE,
    StrategyBest,
    StrategyComparison,
    StrategyEntry,
    compare_strategies,
)
from autotune.messages.units import (
    NO_VALUE,
    OUTCOMES,
    Unit,
    format_bytes_beside,
    format_count,
    format_interval,
    format_times,
    show,
    show_interval,
)
from autotune.models.evidence import rate_of_runs
from autotune.models.memory import MemoryLine, kinds_not_excluded, memory_kind, memory_lines
from autotune.records.breakdown import PARTS, LoaderCosts, TimeBreakdown
from autotune.records.measurement import (
    BucketForecast,
    Fullness,
    Interval,
    Measurement,
    MemoryLimits,
    PackForecast,
    RankFigures,
    name_devices,
    uneven_ranks,
)
from autotune.records.result import Advice, RunSpread, RunSummary, changed_settings
from autotune.records.trial import (
    Load,
    Outcome,
    PrecisionFigures,
    TrialRecord,
    TrialResult,
    load_of,
    objection,
    runs_of,
    score_value,
    shortfall,
)
from autotune.report.blocks import (
    MEASURED_BY,
    Bullets,
    Paragraph,
    Section,
    Table,
    TimeBar,
    TimeBars,
    Trace,
    filled,
    known_facts,
    side_by_side,
    tabulate,
)
from autotune.report.figures import (
    Column,
    has_parts,
    headroom_in,
    list_busy,
    list_known,
    list_waits,
    role_of,
)
from autotune.report.sentences import (
    conditions_of,
    describe_exchange,
    is_held_in,
    say_windows_at_limit,
    say_windows_throttled,
    sum_retries,
)
from autotune.report.words import (
    CAUSES,
    PART_NAMES,
    cut_middle,
    describe_settings,
    format_setting,
    name_interval,
    one_line,
    shorten,
    without_controls,
)
from autotune.settings_table import name_group

# Bottlenecks and advice as tables.


def advice_table(advice: Iterable[Advice], *, is_loaded: bool = False) -> Table:
    """Lay out advice: its gain, the rate that it should reach, what to do and the basis.

    Args:
        advice: The rows.
        is_loaded: Other programs slowed the measurements: gains and rates are left out, which may
            be their doing.
    """
    rows = (
        {
            "gain": show(piece.expected_gain, "gain"),
            "samples/s": show(piece.expected_samples_per_s, "plain_rate"),
            "advice": f"{piece.text}. Basis: {piece.basis}.",
        }
        for piece in advice
    )
    return tabulate(rows, heads=("advice",) if is_loaded else ())


def bottleneck_table(found: Iterable[tuple[float, str, str]]) -> Table:
    """Lay out bottlenecks: the share of the time that each takes, its name, and its evidence."""
    rows = tuple((show(share, "share"), name, evidence) for share, name, evidence in found)
    return Table(heads=("share", "what", "evidence"), rows=rows)


# Sequences of many lengths: tokens, padding, and what batches without it would change on the
# device.
#
# Comes in: the figures of one or more configurations. Goes out: facts, or a Section that is empty
# where batches have no lengths.


_LENGTHS_REMARK = (
    "Padding at random and of like lengths: computed from the lengths of items, for batches of "
    "this size. Device time: from timed batches of several lengths; it shows only where the loader "
    "is not the bottleneck."
)


def padding_of(figures: Measurement) -> float | None:
    """The share of padding in the batches: by their masks, else by the lengths of items; None where nothing tells."""
    if figures.tokens is not None and figures.tokens.padding is not None:
        return figures.tokens.padding
    return None if figures.lengths is None else figures.lengths.padding


def length_section(measured: Mapping[str, Measurement]) -> Section:
    """Tokens and lengths of each configuration whose batches have some."""
    known = {
        title: facts for title, figures in measured.items() if (facts := length_facts(figures))
    }
    has_lengths = any(figures.lengths is not None for figures in measured.values())
    remarks = Bullets(sentences=(_LENGTHS_REMARK,) if has_lengths else (), is_remark=True)
    return Section(title="Lengths: tokens and padding", blocks=(side_by_side(known), remarks))


def length_facts(figures: Measurement) -> dict[str, str]:
    """The same of one configuration, by name; empty where its batches have no lengths."""
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
        "padding at random": show(lengths.buckets.random_padding, "share"),
        "padding of like lengths": show(lengths.buckets.bucket_padding, "share"),
        "device time of like lengths": _device_time(lengths.buckets),
        "padding of full rows": show(packed and packed.padding, "share"),
        "device time of full rows": NO_VALUE if packed is None else _device_time(packed),
    }


def _error(relative_sd: float | None) -> str:
    return "" if relative_sd is None else f" (± {show(relative_sd, 'share')})"


def _device_time(forecast: BucketForecast | PackForecast) -> str:
    if forecast.device_time is None or forecast.device_time_ci is None:
        return ""
    low, high = (show(share, "share") for share in forecast.device_time_ci)
    return f"{show(forecast.device_time, 'share')} of today's ({low} to {high})"


# What the device did while its windows ran.
#
# Comes in: figures of one or more configurations, by their titles. Goes out: a Section, and facts
# for a diagnosis. What makes rates doubtful stands in wording.remarks.


def device_section(summary: RunSummary, runs: Mapping[str, Sequence[Measurement]]) -> Section:
    """The device during the windows of each configuration, and the further trials that were throttled."""
    table = side_by_side({title: device_facts(own) for title, own in runs.items()})
    first = {
        trial.number: trial.measurement for trial in summary.trials if trial.measurement is not None
    }
    numbers = [
        str(number)
        for number, run in first.items()
        if run.conditions and run.conditions.disturbances
    ]
    remarks = (f"Trials that were throttled: {', '.join(numbers)}.",) if numbers else ()
    return Section(
        title="Device during the windows",
        blocks=(table, Bullets(sentences=remarks, is_remark=True)),
    )


def device_facts(runs: Sequence[Measurement]) -> dict[str, str]:
    """What the device reported during one configuration's windows, by name."""
    windows = conditions_of(runs)
    powers = list_known(window.power_w for window in windows)
    highest = tuple(list_known(window.max_sm_clock_mhz for window in windows))
    sizes = list_known(window.others_memory_bytes for window in windows)
    loads = list_known(window.others_busy_fraction for window in windows)
    is_limited = any(window.is_at_power_limit for window in windows)
    retries = sum_retries(runs)
    tensors = list_known(run.memory.allocated_bytes for run in runs)
    return {
        "power": f"{fmean(powers):,.0f} W" if powers else NO_VALUE,
        "clock": _span((window.sm_clock_mhz for window in windows), "MHz"),
        "highest clock": _span([highest], "MHz"),
        "memory clock": _span((window.memory_clock_mhz for window in windows), "MHz"),
        "temperature": _span((window.temperature_c for window in windows), "°C"),
        "at its power limit": say_windows_at_limit(windows)
        if is_limited
        else "no"
        if windows
        else NO_VALUE,
        "throttled": say_windows_throttled(windows) or ("no" if windows else NO_VALUE),
        "memory in use before": show(max(sizes, default=None), "bytes"),
        "time in use before": show(max(loads, default=None), "share"),
        "tensors at their peak": show(max(tensors, default=None), "bytes"),
        "allocator's retries": NO_VALUE if retries is None else f"{retries:,}",
    }


def _span(edges: Iterable[tuple[int, ...] | None], unit: str) -> str:
    """From the lowest to the highest value at any window's edge."""
    values = [value for edge in list_known(edges) for value in edge]
    if not values:
        return NO_VALUE
    low = f"{min(values):,}"
    high = f"{max(values):,}"
    return f"{low if low == high else f'{low} to {high}'} {unit}"


# Time: its parts before and after, how busy the device was, ceilings, the loader's costs.
#
# Comes in: the figures of one or more configurations, by their titles. Goes out: Sections whose
# blocks are empty where nothing was measured.


_SAMPLES_OF_A_BAR = 1000
"""Samples whose time is told beside a bar: our convention."""
_CEILINGS = (
    "Loader alone: read without training. Device alone: trained on batches that it already holds. "
    "Both use the column's own settings."
)
_COPYING = "copying alone"
"""A column that is left out where nothing is copied."""
_COPIES = "Copying alone: batches moved to the device, and not trained on."
_HOST = "host alone"
_LAUNCHING = "Host alone: prefetched batches fetched and their work launched, without waiting for the device."
_HELD_ALONE = (
    "Launching held up the device alone as well: the share of the device's is that of the time in "
    "which it is busy."
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
    """Where the wall time goes, before and after, and how busy the device was by each source."""
    parts = {
        title: figures.breakdown
        for title, figures in measured.items()
        if figures.breakdown is not None
    }
    remarks = tuple(
        f"{title}: {describe_exchange(figures.communication)}{', counted as synchronising' if title in parts else ''}."
        for title, figures in measured.items()
        if figures.communication is not None
    )
    sources = dict.fromkeys(
        reading.source for figures in measured.values() for reading in figures.busy_readings
    )
    busy = side_by_side(
        {title: _busy_facts(figures, sources) for title, figures in measured.items()}
    )
    blocks = (
        _bars(measured, parts),
        _table(parts),
        busy,
        Bullets(sentences=remarks, is_remark=True),
    )
    return Section(title="Where the time goes", blocks=blocks)


def ceiling_section(measured: Mapping[str, Measurement]) -> Section:
    """What the loader and the device reach alone, and copying between them where anything is copied."""
    headrooms = {title: headroom_in(known) for title, known in measured.items()}
    rows = [
        {
            "": title,
            "samples/s": show(known.samples_per_s, "plain_rate"),
            "loader alone": show(known.loader_ceiling, "plain_rate"),
            "device alone": show(known.device_ceiling, "plain_rate"),
            _COPYING: show(known.copy_ceiling, "plain_rate"),
            _HOST: show(known.host_ceiling, "plain_rate"),
            "share of the device's": show(
                (room := headrooms[title]) and room.share_of_device, "share"
            ),
            "share of the lowest": show(room and room.share_of_lower, "share"),
        }
        for title, known in measured.items()
        if any(
            rate is not None
            for rate in (known.loader_ceiling, known.device_ceiling, known.copy_ceiling)
        )
    ]
    remarks = [_CEILINGS] if rows else []
    remarks += (
        [_COPIES] if any(known.copy_ceiling is not None for known in measured.values()) else []
    )
    remarks += (
        [_LAUNCHING] if any(known.host_ceiling is not None for known in measured.values()) else []
    )
    is_held_alone = any(
        room is not None and room.device_ceiling > (measured[title].device_ceiling or 0.0)
        for title, room in headrooms.items()
    )
    remarks += [_HELD_ALONE] if is_held_alone else []
    sentences = (" ".join(remarks),) if remarks else ()
    blocks = (
        tabulate(rows, optional=(_COPYING, _HOST)),
        Bullets(sentences=sentences, is_remark=True),
    )
    return Section(title="Ceilings: what loader and device reach alone", blocks=blocks)


def loader_section(measured: Mapping[str, Measurement]) -> Section:
    """What data costs inside the loader."""
    known = {
        title: figures.loader_costs
        for title, figures in measured.items()
        if figures.loader_costs is not None
    }
    table = side_by_side({title: loader_facts(costs) for title, costs in known.items()})
    timed = "; ".join(f"{title}: {costs.items:,} items" for title, costs in known.items())
    remarks = (
        (f"Timed outside the window, item by item, in one process ({timed}).",) if known else ()
    )
    blocks = (table, Bullets(sentences=remarks, is_remark=True))
    return Section(title="Inside the loader: what an item costs", blocks=blocks)


def loader_facts(costs: LoaderCosts) -> dict[str, str]:
    """The same of one configuration, by name."""
    return {name: show(getattr(costs, field), unit) for name, (field, unit) in _COSTS.items()}


def fullness_facts(fullness: Fullness | None) -> dict[str, str]:
    """How full the device's busy time was, by name."""
    return {
        name: show(getattr(fullness, field, None), "share") for field, name in _FULLNESS.items()
    }


def _bars(measured: Mapping[str, Measurement], parts: Mapping[str, TimeBreakdown]) -> TimeBars:
    rates = {title: measured[title].samples_per_s for title in parts}
    bars = (
        TimeBar(
            title=title,
            caption=f"{show(_SAMPLES_OF_A_BAR / rates[title], 'seconds')} for {_SAMPLES_OF_A_BAR:,} samples",
            length=min(rates.values()) / rates[title],
            parts=tuple((part, share.fraction) for part, share in breakdown.shares().items()),
        )
        for title, breakdown in parts.items()
    )
    return TimeBars(bars=tuple(bars))


def _table(parts: Mapping[str, TimeBreakdown]) -> Table:
    rows = []
    for part in PARTS if parts else ():
        shares = [breakdown.shares()[part] for breakdown in parts.values()]
        sources = "; ".join(dict.fromkeys(one_line(share.source) for share in shares))
        rows.append(
            (PART_NAMES[part], *(show(share.fraction, "share") for share in shares), sources)
        )
        restarts = [breakdown.restart_fraction for breakdown in parts.values()]
        if part == "data_wait" and any(restarts):
            rows.append(
                (
                    "of it at restarts of epochs",
                    *(show(restart, "share") for restart in restarts),
                    sources,
                )
            )
    return Table(heads=("", *parts, MEASURED_BY), rows=tuple(rows))


def _busy_facts(figures: Measurement, sources: Iterable[str]) -> dict[str, str]:
    """How busy the device was by each of the sources, and how full that time was."""
    fractions = {reading.source: reading.fraction for reading in figures.busy_readings}
    busy = {f"busy: {one_line(source)}": show(fractions.get(source), "share") for source in sources}
    return busy | fullness_facts(figures.fullness)


# Memory: the fitted lines, of which settings they are and for how many loader workers, and the
# stress run.
#
# Comes in: a RunSummary. Goes out: MemoryLines for the plots, notes, and Sections without markup.


_MEMORY_REMARK = (
    "Lines fitted to the trials' peak memory; the error is half of the 95 % prediction interval. "
    "The last column is the largest batch that is sure to fit the limit; only batches that were "
    "run are recommended."
)


def list_memory_lines(summary: RunSummary) -> tuple[MemoryLine, ...]:
    """Every kind's line, as it holds with the recommended settings otherwise, their loader workers among them."""
    only_ram = summary.environment.has_only_ram
    return memory_lines(
        summary.trials, _settings(summary), summary.limit_bytes, limit_is_ram=only_ram
    )


def lines_of_group(summary: RunSummary, lines: Sequence[MemoryLine]) -> tuple[MemoryLine, ...]:
    """The lines of all precisions on the devices that the recommended settings run on."""
    own = _group(_settings(summary))
    return tuple(line for line in lines if _group(line.config) == own)


def say_memory_line(summary: RunSummary, lines: Sequence[MemoryLine]) -> tuple[str, ...]:
    """The line of the recommended settings' kind, in a sentence; () where there is none."""
    kind = memory_kind(_settings(summary))
    return tuple(
        f"Memory of {_name_line(line, lines)}: {_base(line)} + "
        f"{show(line.bytes_per_sample, 'bytes')} a sample, ± {show(line.error_bytes, 'bytes')}."
        for line in lines
        if memory_kind(line.config) == kind
    )


def describe_group(own: Sequence[MemoryLine], lines: Sequence[MemoryLine]) -> str:
    """Whose lines `own` are, where there are others, and for how many workers; "" or with a space before."""
    has_others = 0 < len(own) < len(lines)
    whose = f" They are for {name_group(*_group(own[0].config))} only." if has_others else ""
    return whose + "".join(f" {remark}" for remark in _workers(own))


def memory_table(summary: RunSummary, lines: Sequence[MemoryLine]) -> tuple[Table, Bullets]:
    """Each line in a row, and what is to know of them."""
    remarks = (_MEMORY_REMARK, *_workers(lines)) if lines else ()
    remarks += tuple(_describe_not_excluded(summary))
    table = tabulate(_row(line, lines, summary.limit_bytes) for line in lines)
    return table, Bullets(sentences=remarks, is_remark=True)


def _describe_not_excluded(summary: RunSummary) -> Iterator[str]:
    """Yield which memory may grow to the limit within a day, as far as the short windows show."""
    chosen = summary.recommendation
    runs = runs_of(summary.trials, 0 if chosen is None else chosen.number)
    if kinds := kinds_not_excluded(runs, MemoryLimits.on(summary.environment, summary.limit_bytes)):
        memory = " or ".join(
            "the device's memory" if kind == "device" else "host memory" for kind in kinds
        )
        yield f"The windows were too short to exclude that {memory} grows to the limit within a day of training."


def stress_section(summary: RunSummary) -> Section:
    """The recommended configuration on the largest samples."""
    steps = Bullets(sentences=tuple(_describe_stress(summary)))
    return Section(title="Stress run: do the largest samples fit?", blocks=(steps,), is_brief=True)


def _describe_stress(summary: RunSummary) -> Iterator[str]:
    found = summary.recommendation
    if found is None or found.stress is None:
        return
    stress = found.stress
    load = load_of(found.stress, found.config, summary.environment, summary.facts)
    count = format_count(stress.steps, "step")
    took = show(stress.seconds, "duration")
    batches = "" if stress.remark else ", ordinary batches and the largest samples in turns"
    yield f"The recommended settings trained for {count} ({took}){f' {load.where}' * bool(load.where)}{batches}."
    if stress.remark:
        yield str(stress.remark)
    limit = summary.limit_bytes
    own = format_bytes_beside(load.own_bytes, limit)
    whole = format_bytes_beside(load.peak_bytes, limit)
    kept = (
        f"{'within' if load.peak_bytes <= limit else 'above'} the limit of {show(limit, 'bytes')}"
    )
    group = f", that is up to {whole} for {_bearer(load)}" if load.is_more else ""
    yield f"Peak memory: {own}{group}, {kept} ({stress.memory.source})."
    largest = show(stress.largest_item_bytes, "bytes")
    median = show(stress.median_item_bytes, "bytes")
    sizes = (
        f"all have {largest}"
        if largest == median
        else f"the largest has {largest}, the median {median}"
    )
    yield f"Sizes of {format_count(stress.items_seen, 'item')} were read: {sizes}."


def _bearer(load: Load) -> str:
    """Whose memory counts together: "2 ranks with 64.0 MiB of gradient buckets each"."""
    who, each = ("a rank", "") if load.ranks == 1 else (f"{load.ranks} ranks", " each")
    return (
        f"{who} with {show(load.bucket_bytes, 'bytes')} of gradient buckets{each}"
        if load.bucket_bytes
        else who
    )


def _row(line: MemoryLine, lines: Sequence[MemoryLine], limit_bytes: int) -> dict[str, str]:
    farthest = 4 * line.batches[-1]
    largest = line.largest_batch(limit_bytes, farthest + 1)
    return {
        "precision": _name_line(line, lines),
        "trials": str(len(line.batches)),
        "at batch 0": _base(line),
        "a sample": show(line.bytes_per_sample, "bytes"),
        "± error": show(line.error_bytes, "bytes"),
        "batch at the limit": f"over {farthest:,}"
        if largest > farthest
        else f"{largest:,}"
        if largest
        else NO_VALUE,
    }


def _name_line(line: MemoryLine, lines: Sequence[MemoryLine]) -> str:
    """Its precision, and its devices where the lines are of several groups: "float32, ddp × 2"."""  # noqa: RUF002 - a times sign
    has_others = len({_group(other.config) for other in lines}) > 1
    return (
        f"{line.config.amp_dtype}, {name_group(*_group(line.config))}"
        if has_others
        else line.config.amp_dtype
    )


def _base(line: MemoryLine) -> str:
    """What a batch comes on top of: "199 MiB", or "141 MiB + 58.0 MiB for 2 loader workers"."""
    workers = line.workers_bytes
    alone = show(line.intercept_bytes - workers, "bytes")
    whose = format_count(line.config.num_workers, "loader worker")
    return f"{alone} + {show(workers, 'bytes')} for {whose}" if workers else alone


def _workers(lines: Sequence[MemoryLine]) -> tuple[str, ...]:
    """For how many loader workers lines hold, where that makes a difference."""
    counts = [line.config.num_workers for line in lines if line.workers_bytes]
    return (f"The lines hold for {format_count(counts[0], 'loader worker')}.",) if counts else ()


def _settings(summary: RunSummary) -> TrainingConfig:
    return summary.baseline if summary.recommendation is None else summary.recommendation.config


def _group(config: TrainingConfig) -> tuple[str, int]:
    return config.strategy, config.world_size


# Several devices: whether they help, what limits them, what would help, each rank's figures.
#
# Comes in: the comparison of a search's strategies, or the ranks of a measurement. Goes out:
# Sections without markup.


_STRATEGY_HEADS = ("", "samples/s", "interval", "efficiency", "exposed", "hidden")


def scaling_sections(summary: RunSummary, columns: Sequence[Column]) -> tuple[Section, ...]:
    """Return whether more devices help, and why; () where no trial had more than one."""
    comparison = _compare(summary)
    if comparison is None:
        return ()
    group = "" if comparison.fastest is None else _name(comparison.fastest)
    bests = [entry.best for entry in comparison.entries]
    kinds = ["failed" if best is None else role_of(best.number, summary) for best in bests]
    answer = Paragraph(text=_describe_answer(comparison))
    remarks = Bullets(sentences=tuple(_remarks(comparison)), is_remark=True)
    table = tabulate(map(_strategy_row, comparison.entries), _STRATEGY_HEADS, kinds=kinds)
    advice = advice_table(comparison.advice)
    found = (
        (limit.share, CAUSES[limit.cause], f"{limit.evidence}.") for limit in comparison.bottlenecks
    )
    return (
        Section(title="Do more devices help?", blocks=(answer, table, remarks), is_brief=True),
        Section(title=f"Bottlenecks of {group}", blocks=(bottleneck_table(found),), is_brief=True),
        Section(title=f"What would help {group}", blocks=(advice,), is_brief=True),
        *_ranks_of(comparison, summary, columns),
    )


def rank_section(
    ranks: Sequence[RankFigures], whose: str = "", remarks: Sequence[str] = ()
) -> tuple[Section, ...]:
    """Each rank's own figures, the uneven ones named, and further remarks; () for a single process."""
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
    blocks = (table, Bullets(sentences=(*uneven, *remarks), is_remark=True))
    return filled(Section(title=title, blocks=blocks, is_brief=True))


def _compare(summary: RunSummary) -> StrategyComparison | None:
    """The strategies of a search; None where every trial had one device.

    What a further run or a stress run has refuted counts as tried, and may not be the best of its
    strategy.
    """
    found = summary.recommendation
    if found is None:
        return compare_strategies(summary.trials, summary.environment, summary.run_spread)
    trials = [
        trial.model_copy(update={"score": None}) if trial.number in found.overloaded else trial
        for trial in summary.trials
    ]
    return compare_strategies(trials, summary.environment, summary.run_spread)


def _name(best: StrategyBest) -> str:
    return name_group(best.config.strategy, best.config.world_size)


def _describe_answer(comparison: StrategyComparison) -> str:
    fastest = comparison.fastest
    if fastest is None:
        tried = format_count(
            sum(entry.tried for entry in comparison.entries if entry.world_size > 1), "trial"
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
    elif efficiency.value < 1 - LEAST_SHARE:
        reason = " None of the measured figures explains what limits it."
    return _describe_verdict(comparison, fastest, ratio) + reason


def _describe_verdict(
    comparison: StrategyComparison, fastest: StrategyBest, ratio: Interval
) -> str:
    count = fastest.config.world_size
    interval = show_interval(ratio.low, ratio.high, "times")
    rate = f"{_name(fastest)} trains {show(ratio.value, 'times')} times as fast as one device ({interval}"
    if comparison.helps == "yes":
        who = "the second device helps" if count == 2 else f"{count} devices help"
        return f"Yes, {who}: {rate}), an efficiency of {show(ratio.value / count, 'share')}."
    if comparison.helps == "no":
        who = "the second device does" if count == 2 else f"{count} devices do"
        return f"No, {who} not help: {rate})."
    return f"Not measurably: {rate}{', which includes 1' * (interval != 'unknown')})."


def _strategy_row(entry: StrategyEntry) -> dict[str, str]:
    best = entry.best
    name = {"": name_group(entry.strategy, entry.world_size)}
    if best is None:
        return name
    rate = best.samples_per_s
    talk = best.communication
    return name | {
        "samples/s": show(rate.value, "plain_rate"),
        "interval": show_interval(rate.low, rate.high, "plain_rate"),
        "efficiency": NO_VALUE if best.efficiency is None else _format_efficiency(best.efficiency),
        "exposed": show(talk and talk.exposed_fraction, "share"),
        "hidden": show(talk and talk.hidden_fraction, "share"),
    }


def _format_efficiency(efficiency: Interval) -> str:
    """With its interval beside it: "91 % (87 to 95)"."""
    low, high = (
        f"{100 * end:.0f}" if isfinite(end) else "unknown"
        for end in (efficiency.low, efficiency.high)
    )
    return f"{show(efficiency.value, 'share')} ({format_interval(low, high)})"


def _remarks(comparison: StrategyComparison) -> Iterator[str]:
    """Yield what must be known to read the table."""
    yield f"Shown: {'; '.join(map(_describe_choice, comparison.entries))}."
    if comparison.other_changes:
        names = ", ".join(comparison.other_changes)
        yield f"Part of the difference may come from other settings: {names}."
    yield "Efficiency: throughput for each device, relative to one device alone."
    if any(
        entry.best is not None and entry.best.communication is not None
        for entry in comparison.entries
    ):
        yield (
            "Exposed: share of a step that exchanging gradients adds. Hidden: share of the "
            "exchange that overlaps with the backward pass."
        )


def _describe_choice(entry: StrategyEntry) -> str:
    name = name_group(entry.strategy, entry.world_size)
    if entry.best is None:
        return f"{name}: none of {entry.tried} ran well"
    again = f" ({format_count(entry.best.runs, 'run')})" if entry.best.runs > 1 else ""
    return f"{name}: trial {entry.best.number}, best of {entry.feasible}{again}"


def _ranks_of(
    comparison: StrategyComparison, summary: RunSummary, columns: Sequence[Column]
) -> tuple[Section, ...]:
    """The recommended group's ranks; where one device is recommended, the fastest group's."""
    found = summary.recommendation
    fastest = comparison.fastest
    if found is not None and (fastest is None or found.number != fastest.number):
        figures = next(
            (column.figures for column in columns if column.number == found.number), None
        )
        if figures is not None and figures.ranks:
            return rank_section(
                figures.ranks, name_group(found.config.strategy, found.config.world_size)
            )
    if fastest is None:
        return ()
    is_limiting = any(bottleneck.cause == "uneven_rank" for bottleneck in comparison.bottlenecks)
    remarks = (
        ()
        if is_limiting or not uneven_ranks(fastest.ranks)
        else ("That does not limit the group here.",)
    )
    return rank_section(fastest.ranks, _name(fastest), remarks)


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


# What was run: trials, repeats, failures, and the precision check.
#
# Comes in: a RunSummary. Goes out: Sections whose blocks are empty where there is nothing to show.


_LONGEST_REASON = 160  # cells of a table, our convention; "Failures" has the whole
_LONGEST_MESSAGE = (
    2000  # characters, our convention: an exception's message may hold a whole tensor
)
# Rows of the table of trials, our convention: some four pages; five times what a search runs by
# itself.
_MOST_SHOWN = 200
_NUMBERS_SHOWN = 3  # trials of a failure that are named: our convention
_OWN_REASON_EACH: frozenset[Outcome] = frozenset({"crashed", "invalid"})
"""Outcomes whose reasons name different faults; elsewhere reasons differ in their figures alone."""
_ENERGY = "energy a sample"
"""A column that is left out where no device reports it."""
_INTERVAL = "interval"
_HEADS = (
    "#",
    "settings",
    "outcome",
    "samples/s",
    _INTERVAL,
    "score",
    "busy",
    "peak memory",
    _ENERGY,
    "reason",
)
_PRECISION_REMARK = (
    "The same weights and batches, trained in float32 and with the trial's settings; the result is "
    "for that precision."
)


def trial_section(summary: RunSummary, table: Table) -> Section:
    """The trials of the table, how many it leaves out, and where the column "busy" comes from."""
    sources = _busy_sources((trial.number, trial.measurement) for trial in _shown(summary))
    left_out: tuple[str, ...] = ()
    if len(table.rows) < len(summary.trials):
        count = f"{len(table.rows)} of {format_count(len(summary.trials), 'trial')}"
        left_out = (
            (
                f"{count} are shown: the baseline, what ran more than once, the best, and "
                "failures; trials.jsonl has all."
            ),
        )
    blocks = (table, Bullets(sentences=left_out, is_remark=True), sources)
    return Section(title="Trials, each by its first run", blocks=blocks)


def trial_table(summary: RunSummary) -> Table:
    """Every trial in a row; of many those that tell most."""
    trials = _shown(summary)
    kinds = [
        role_of(trial.number, summary) or ("" if trial.is_feasible else "failed")
        for trial in trials
    ]
    rows = (_trial(trial, summary) for trial in trials)
    return _with_interval_named(
        tabulate(rows, _HEADS, kinds=kinds, optional=(_ENERGY,)),
        summary,
        (trial.measurement for trial in trials),
    )


def _shown(summary: RunSummary) -> list[TrialRecord]:
    """All trials, or of many those with a role, those that ran more than once, the best, and the first that failed."""
    trials = summary.trials
    found = summary.recommendation
    if len(trials) <= _MOST_SHOWN:
        return list(trials)
    named = {0, *(trial.number for trial in trials if trial.repeats)} | (
        {found.number} if found is not None else set()
    )
    best = sorted((trial for trial in trials if trial.is_feasible), key=score_value, reverse=True)
    failed = [trial for trial in trials if not trial.is_feasible]
    first = [trial for trial in trials if trial.number in named]
    fewest_best = _MOST_SHOWN - _MOST_SHOWN // 4
    telling = [*first, *best[:fewest_best], *failed, *best[fewest_best:]]
    numbers = set([*dict.fromkeys(trial.number for trial in telling)][:_MOST_SHOWN])
    return [trial for trial in trials if trial.number in numbers]


def repeat_section(summary: RunSummary) -> Section:
    """Every run of what ran more than once, in the order in which they ended."""
    runs = [
        (result.at_s, trial, place, result)
        for trial in summary.trials
        if trial.repeats
        for place, result in enumerate(trial.results, 1)
    ]
    in_order = sorted(runs, key=lambda run: run[0])
    table = _with_interval_named(
        tabulate(
            (
                _repeat(summary.run_spread, trial, place, result)
                for _, trial, place, result in in_order
            ),
            optional=(_ENERGY,),
        ),
        summary,
        (result.measurement for *_, result in runs),
    )
    sources = _busy_sources((trial.number, result.measurement) for _, trial, _, result in runs)
    claims = Bullets(sentences=_claims(summary) if runs else (), is_remark=True)
    return Section(title="Settings that ran more than once", blocks=(table, sources, claims))


def _with_interval_named(
    table: Table, summary: RunSummary, runs: Iterable[Measurement | None]
) -> Table:
    name = name_interval(
        summary.run_spread, (run.window.is_held_by_device for run in runs if run is not None)
    )
    return replace(table, heads=tuple(name if head == _INTERVAL else head for head in table.heads))


def _claims(summary: RunSummary) -> tuple[str, ...]:
    """What was measured beside what is claimed."""
    found = summary.recommendation
    if found is None or found.speedup is None or found.measured_speedup is None:
        return ()
    measured = (
        f"Measured over all runs: {format_times(found.measured_speedup.value)} times the baseline"
    )
    claimed = f"claimed: {format_times(found.speedup.value)} times, because the best of several trials is partly luck"
    return (f"{measured}; {claimed}.",)


def failure_section(summary: RunSummary) -> Section:
    """Trials that did not end well by what they have in common, the largest group first.

    Those that were stopped early as too slow are no failures.
    """
    groups: dict[tuple[Outcome, str], list[TrialRecord]] = {}
    for trial in summary.trials:
        if trial.outcome not in {"ok", "pruned"}:
            groups.setdefault((trial.outcome, _fault(trial)), []).append(trial)
    ordered = sorted(groups.values(), key=len, reverse=True)
    traces = tuple(_failure(trials, summary.limit_bytes) for trials in ordered)
    return Section(title="Failures, and where they came from", blocks=traces, is_brief=True)


def _fault(trial: TrialRecord) -> str:
    """What tells faults of one outcome apart; a refusal by the precision check is not the trial's own."""
    if trial.outcome not in _OWN_REASON_EACH and not trial.is_refused:
        return ""
    return trial.reason if trial.result.failure is None else trial.result.failure.signature


def _failure(trials: list[TrialRecord], limit_bytes: int) -> Trace:
    """Which trials, the first few by number, the first one's reason, and its traceback where there is one."""
    first = trials[0]
    more = len(trials) - _NUMBERS_SHOWN
    reason = one_line(cut_middle(_reason(first, limit_bytes), _LONGEST_MESSAGE))
    numbers = ", ".join(str(trial.number) for trial in trials[:_NUMBERS_SHOWN])
    # some 250 lines, more than a traceback without recursion has
    traceback = (
        "" if first.result.failure is None else cut_middle(first.result.failure.traceback, 20_000)
    )
    return Trace(
        count=f"{len(trials)} {OUTCOMES[first.outcome]}",
        text=f"trial{'s' if len(trials) > 1 else ''} {numbers}{f' and {more} more' * (more > 0)}: {reason}",
        traceback=without_controls(traceback).strip("\n"),
    )


def _reason(trial: TrialRecord, limit_bytes: int) -> str:
    """Why a trial is no candidate; memory in the same unit as everywhere else in the report."""
    again = trial.refuted_by
    if trial.outcome == "ok" and again is not None:
        return f"when it was run again: {again.reason or OUTCOMES[again.outcome]}"
    peak = 0 if trial.measurement is None else trial.measurement.peak_memory_bytes
    if trial.outcome != "over_memory" or peak <= limit_bytes:
        return trial.reason
    limit = show(limit_bytes, "bytes")
    return f"peak memory must stay within {limit}, but was {format_bytes_beside(peak, limit_bytes)}"


def precision_section(summary: RunSummary) -> Section:
    """What cheaper precisions and compiled models showed against float32."""
    checked = [
        (trial, trial.result.guard) for trial in summary.trials if trial.result.guard is not None
    ]
    more = dict.fromkeys(str(remark) for _, figures in checked for remark in figures.remarks)
    remarks = Bullets(sentences=(_PRECISION_REMARK, *more) if checked else (), is_remark=True)
    table = tabulate(starmap(_precision, checked))
    return Section(title="Precision check: does it train as float32 does?", blocks=(table, remarks))


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
    return _measured(trial.measurement, summary.run_spread) | {
        "#": str(trial.number),
        "settings": describe_settings(trial.config),
        "outcome": OUTCOMES[trial.outcome],
        "score": NO_VALUE if trial.score is None else f"{trial.score.value:.3f}",
        "reason": shorten(_reason(trial, summary.limit_bytes), _LONGEST_REASON),
    }


def _repeat(
    spread: RunSpread, trial: TrialRecord, place: int, result: TrialResult
) -> dict[str, str]:
    return {
        "run": str(place),
        "#": str(trial.number),
        "settings": describe_settings(trial.config),
        "outcome": OUTCOMES[result.outcome],
        **_measured(result.measurement, spread),
    }


def _measured(run: Measurement | None, spread: RunSpread) -> dict[str, str]:
    return {
        "samples/s": show(run and run.samples_per_s, "plain_rate"),
        _INTERVAL: NO_VALUE if run is None else _show_run_interval(run, spread),
        "busy": show(run and run.busy_fraction, "share"),
        "data wait": show(run and run.data_wait_fraction, "share"),
        "peak memory": show(run and run.peak_memory_bytes, "bytes"),
        _ENERGY: show(run and run.joules_per_sample, "energy"),
    }


def _show_run_interval(run: Measurement, spread: RunSpread) -> str:
    rate = rate_of_runs([run], spread)
    return show_interval(rate.low, rate.high, "plain_rate")


def _busy_sources(runs: Iterable[tuple[int, Measurement | None]]) -> Bullets:
    """Where the column "busy" comes from: the source that scores are made from, and the trials that used another."""
    numbers: dict[str, dict[int, None]] = {}
    for number, run in runs:
        if run is not None and run.busy_source is not None:
            numbers.setdefault(one_line(run.busy_source), {})[number] = None
    source, *others = sorted(numbers, key=lambda name: -len(numbers[name])) or [""]
    but = "".join(f"; # {', '.join(map(str, numbers[other]))}: {other}" for other in others)
    remarks = (f"Busy, as used in scores: {source}{but}.",) if source else ()
    return Bullets(sentences=remarks, is_remark=True)


# Names and values: the machine, the workload, the run's options, the files of the run folder.
#
# Comes in: an Environment, WorkloadFacts, a RunSummary, a folder. Goes out: dicts of short texts.


_FILES = {
    "recommended.yaml": "the settings to use; autotune.load() reads them",
    "recommended.patch": "the loader's settings as a change of the script",
    "report.html": "the report with its plots, for a browser",
    "report.md": "the same in Markdown, its plots as tables",
    "trials.jsonl": "every trial, raw",
    "study.db": "the Optuna study",
    "environment.json": "the machine and its versions",
    "logs": "what each trial printed",
}


def list_files(run_dir: Path, written: Container[str] = ()) -> dict[str, str]:
    """The run folder's files that are there, or will be: {name: what it holds}."""
    return {
        name: purpose
        for name, purpose in _FILES.items()
        if name in written or (run_dir / name).exists()
    }


def show_path(path: Path) -> str:
    """A path, relative where it lies below the working directory."""
    absolute = path.absolute()
    return (
        str(absolute.relative_to(Path.cwd()))
        if absolute.is_relative_to(Path.cwd())
        else str(absolute)
    )


def describe_environment(environment: Environment) -> dict[str, str]:
    """The machine, or each of several: {what: its value}."""
    memory = show(environment.device_memory_bytes, "bytes")
    ram = show(environment.ram_bytes, "bytes")
    each, on_each = (
        (f"{environment.hosts} hosts, each: ", " on each host")
        if environment.hosts > 1
        else ("", "")
    )
    unlike = f": {', '.join(environment.device_names)}" if environment.device_names else ""
    nodes = f" of {environment.numa_nodes} NUMA nodes" if environment.numa_nodes > 1 else ""
    facts = {
        "device": f"{each}{environment.device_name} ({environment.device}, {memory})",
        "devices": f"{environment.device_count}{on_each}{unlike}"
        if environment.device_count > 1
        else "",
        "driver": environment.driver or "",
        "precisions": ", ".join(environment.native_amp_dtypes),
        "TF32 switches": ", ".join(environment.tf32_overrides),
        "processor": f"{format_count(environment.cores, 'core')}{nodes}, {ram} of RAM{on_each}",
        "malloc": _describe_malloc(environment),
        "platform": environment.platform,
        "python": environment.python,
        "torch": environment.torch
        + (f", CUDA {environment.cuda}" if environment.cuda is not None else ""),
        "packages": ", ".join(
            f"{name} {version}" for name, version in sorted(environment.versions.items())
        ),
        "fingerprint": environment.fingerprint,
        "note": " ".join(map(str, environment.remarks)),
    }
    return known_facts(facts).facts


def _describe_malloc(environment: Environment) -> str:
    by = " (set for trials)" if environment.keeps_memory else ""
    return " ".join(environment.malloc) + by


def describe_workload(facts: WorkloadFacts) -> dict[str, str]:
    """What is trained: {what: its value}."""
    kind = "iterable dataset" if facts.is_iterable else "map-style dataset"
    kind = "tf.data pipeline" if facts.is_tf_data else kind
    length = (
        "unknown length"
        if facts.dataset_length is None
        else format_count(facts.dataset_length, "sample")
    )
    own = {
        "data": f"{kind}, {length}",
        "model": format_count(facts.parameter_count, "parameter"),
        "optimizer": facts.optimizer.name,
        "loss": facts.step_source,
    }
    return own if facts.script is None else own | _describe_script(facts.script)


def _describe_script(script: ScriptFacts) -> dict[str, str]:
    """Who runs a script's loop, and where its data comes from."""
    if not script.loaders:
        return {"data": "no DataLoader", "loop": script.framework}
    site = script.own_loader or script.loaders[-1]
    return {"loop": script.framework, "loader": f"made in {Path(site.file).name}, line {site.line}"}


def describe_run(summary: RunSummary) -> dict[str, str]:
    """What the search was asked for: {what: its value}."""
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
    return known_facts(facts).facts


# The result's table: what was measured of each configuration, and the settings in which they
# differ.
#
# Comes in: the columns. Goes out: a Table.


_WORTH_SHOWING = 0.005
"""Share of a rate by which corrections change it, from which on the rate as it was counted is shown
too: our own convention."""


def result_table(
    columns: Sequence[Column],
    limit_bytes: int | None,
    spread: RunSpread,
    *,
    reference: str = "baseline",
) -> Table:
    """What was measured, then each setting in which a column differs from the first, which is called the reference.

    Without a limit, memory has no share of one.
    """
    figures = [column.figures for column in columns]
    ratios = [column.speedup for column in columns[1:]]
    gains = [None if ratio is None else (ratio.low, ratio.high) for ratio in ratios]
    rates = [None if known is None else known.samples_per_s_ci for known in figures]
    interval = (
        f"  {name_interval(spread, (is_held_in(column.runs) for column in columns if column.runs))}"
    )
    energy = [known and known.joules_per_sample for known in figures]
    speedups = (
        (f"times {reference}", "1", *(show(ratio and ratio.value, "times") for ratio in ratios)),
        (interval, "", *(_show_interval(ends, "times") for ends in gains)),
    )
    rows = (
        ("samples/s", *(show(known and known.samples_per_s, "plain_rate") for known in figures)),
        (interval, *(_show_interval(ends, "plain_rate") for ends in rates)),
        *_raw_rows(columns),
        *_token_rows(figures),
        *(speedups if any(ratios) else ()),
        ("busy", *(show(reading and reading.fraction, "share") for reading in list_busy(columns))),
        *_time_rows(columns),
        *_memory_rows(
            [None if known is None else known.peak_memory_bytes for known in figures], limit_bytes
        ),
        *(
            [("energy a sample", *(show(joules, "energy") for joules in energy))]
            if list_known(energy)
            else []
        ),
    )
    settings = _setting_rows(columns)
    kinds = (*[""] * len(rows), *["setting"] * len(settings))
    return Table(
        heads=("", *(column.title for column in columns)), rows=(*rows, *settings), row_kinds=kinds
    )


def _show_interval(ends: tuple[float, float] | None, unit: Unit) -> str:
    return NO_VALUE if ends is None else show_interval(*ends, unit)


def _raw_rows(columns: Sequence[Column]) -> Iterator[tuple[str, ...]]:
    """Yield the throughput as it was counted, where a correction changes one of them noticeably."""
    counted = [
        geometric_mean(run.window.raw_samples_per_s for run in column.runs) if column.runs else None
        for column in columns
    ]
    known = [(column.figures, raw) for column, raw in zip(columns, counted, strict=True)]
    if any(
        run and raw and abs(run.samples_per_s / raw - 1) >= _WORTH_SHOWING for run, raw in known
    ):
        yield "  as counted", *(show(raw, "plain_rate") for raw in counted)


def _token_rows(figures: Sequence[Measurement | None]) -> Iterator[tuple[str, ...]]:
    """Rates in tokens, and the share of padding, where batches have lengths."""
    rates = [known and known.tokens_per_s for known in figures]
    if list_known(rates):
        yield "tokens/s", *(show(rate, "plain_rate") for rate in rates)
        padding = [known and padding_of(known) for known in figures]
        if list_known(padding):
            yield "  of them padding", *(show(share, "share") for share in padding)


def _time_rows(columns: Sequence[Column]) -> Iterator[tuple[str, ...]]:
    """The parts of the time that take some; the loop's waits where the parts are not known of all columns."""
    breakdowns = [
        None if column.figures is None else column.figures.breakdown for column in columns
    ]
    is_whole = has_parts(columns)
    if not is_whole:
        yield "data wait", *(show(wait, "share") for wait in list_waits(columns))
    for part in PARTS:
        shares = [
            None if breakdown is None else breakdown.shares()[part].fraction
            for breakdown in breakdowns
        ]
        if any(shares) and (is_whole or part != "data_wait"):
            yield PART_NAMES[part], *(show(share, "share") for share in shares)


def _memory_rows(peaks: Sequence[int | None], limit_bytes: int | None) -> Iterator[tuple[str, ...]]:
    if limit_bytes is None:
        yield "peak memory", *(show(peak, "bytes") for peak in peaks)
        return
    yield (
        "peak memory",
        *(NO_VALUE if peak is None else format_bytes_beside(peak, limit_bytes) for peak in peaks),
    )
    yield (
        f"  of {show(limit_bytes, 'bytes')}",
        *(show(peak and peak / limit_bytes, "share") for peak in peaks),
    )


def _setting_rows(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    baseline = columns[0].config
    configs = [column.config for column in columns]
    changed = {name for config in configs for name in changed_settings(config, baseline)}
    names = [name for name in TrainingConfig.model_fields if name in changed]
    rows = [(name, *(format_setting(name, config) for config in configs)) for name in names]
    if changed & {"grad_accum_steps", "world_size"}:
        rows.insert(0, ("global batch", *(str(config.global_batch_size) for config in configs)))
    return rows
