"""The report's sections on several devices: whether they help, what holds them, what would help, each rank's figures.

Comes in: a RunSummary, or the ranks of a measurement. Goes out: Sections without markup, none where every trial had one
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from autotune.diagnosis.scaling import StrategyComparison, compare_strategies
from autotune.diagnosis.scaling_bottlenecks import CAUSES, Brake
from autotune.diagnosis.strategies import StrategyBest, StrategyEntry
from autotune.phrasing import say_gain
from autotune.records.diagnosis import Advice
from autotune.records.ranks import Communication, RankFigures, name_devices, uneven_ranks
from autotune.records.recommendation import Ratio
from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Bullets, Paragraph, Section, Table
from autotune.report.figures import summarise
from autotune.report.formatting import (
    NO_VALUE,
    format_bytes,
    format_count,
    format_fraction,
    format_interval,
    format_rate,
    format_short_time,
    format_times,
    name_group,
)

__all__ = ["describe_exchange", "rank_section", "scaling_sections"]

_STRATEGY_HEADS = ("", "samples/s", "95 % interval", "efficiency", "exposed", "hidden")
_RANK_HEADS = ("rank", "device", "loader alone", "device alone", "data wait", "busy", "peak memory")
_TEXTS = frozenset({"", "what", "evidence", "advice", "device"})
_NEAR_IDEAL = 0.95
"""Efficiency from which on nothing is left to explain: the share below which nothing is a brake either."""


def scaling_sections(summary: RunSummary) -> tuple[Section, ...]:
    """Whether more devices help, and why; () where no trial had more than one."""
    comparison = _compare(summary)
    if comparison is None:
        return ()
    group = "" if comparison.fastest is None else _name(comparison.fastest)
    sections = [_answer_section(comparison, summary)]
    if comparison.brakes:
        sections.append(Section(title=f"What holds {group}", blocks=(_brake_table(comparison.brakes),)))
    if comparison.advice:
        sections.append(Section(title=f"What would help {group}", blocks=(_advice_table(comparison.advice),)))
    return (*sections, *_ranks_of(comparison, summary))


def rank_section(ranks: Sequence[RankFigures], whose: str = "", remarks: Sequence[str] = ()) -> tuple[Section, ...]:
    """Each rank's own figures, the uneven ones named, and further remarks; () for a single process."""
    if not ranks:
        return ()
    devices = name_devices(ranks)
    uneven = [
        f"Rank {rank} ({devices[rank]}) is uneven: its {side} alone gives {share:.0%} of what the others' do."
        for rank, (side, share) in uneven_ranks(ranks).items()
    ]
    table = Table(heads=_RANK_HEADS, rows=tuple(_rank_row(one, devices[one.rank]) for one in ranks), texts=_TEXTS)
    said = (Bullets(sentences=(*uneven, *remarks)),) if uneven or remarks else ()
    return (Section(title=f"Each rank of {whose}" if whose else "Each rank", blocks=(table, *said)),)


def describe_exchange(talk: Communication) -> str:
    """What exchanging gradients takes of a step, in a few words."""
    longer, alone = format_short_time(talk.exposed_s), format_short_time(talk.exchange_s)
    return (
        f"talking to the other ranks makes a step {longer} longer ({format_fraction(talk.exposed_fraction)} of it); "
        f"{format_fraction(talk.hidden_fraction)} of an exchange ({alone} by itself) is hidden"
    )


def _answer_section(comparison: StrategyComparison, summary: RunSummary) -> Section:
    table, remarks = _strategy_table(comparison, summary), Bullets(sentences=_remarks(comparison))
    return Section(title="Do more devices help?", blocks=(Paragraph(text=_say_answer(comparison)), table, remarks))


def _compare(summary: RunSummary) -> StrategyComparison | None:
    """What the confirmation or a stress run has refuted counts as tried, and may not be the best of its strategy."""
    found = summary.recommendation
    if found is None:
        return compare_strategies(summary.trials, summary.environment)
    refuted = {one.number for one in found.confirmations if not one.is_feasible}.union(found.overloaded)
    trials = [
        trial.model_copy(update={"score": None}) if trial.number in refuted else trial for trial in summary.trials
    ]
    return compare_strategies(trials, summary.environment, found.confirmations)


def _name(best: StrategyBest) -> str:
    return name_group(best.config.strategy, best.config.world_size)


def _say_answer(comparison: StrategyComparison) -> str:
    fastest = comparison.fastest
    if fastest is None:
        tried = format_count(sum(one.tried for one in comparison.entries if one.world_size > 1), "trial")
        return f"Not known: with more than one device no trial ran well ({tried})."
    ratio, efficiency = fastest.speedup, fastest.efficiency
    if ratio is None or efficiency is None:
        return "Not known: on one device no trial ran well, so that there is nothing to compare with."
    return f"{_say_verdict(comparison, fastest, ratio)} {_say_reason(comparison.brakes, efficiency)}".strip()


def _say_verdict(comparison: StrategyComparison, fastest: StrategyBest, ratio: Ratio) -> str:
    count = fastest.config.world_size
    interval = format_interval(format_times(ratio.low), format_times(ratio.high))
    told = f"{_name(fastest)} trains {format_times(ratio.value)} times as fast as one device (95 %: {interval})"
    if comparison.helps == "yes":
        who = "the second device helps" if count == 2 else f"{count} devices help"
        return f"Yes, {who}: {told}, {format_fraction(ratio.value / count)} of {count} times."
    if comparison.helps == "no":
        who = "the second device does not help" if count == 2 else f"{count} devices do not help"
        return f"No, {who}: {told}."
    return f"Not measurably: {told}, an interval that holds 1."


def _say_reason(brakes: Sequence[Brake], efficiency: Ratio) -> str:
    if brakes:
        return f"What holds it most: {CAUSES[brakes[0].cause]}, {format_fraction(brakes[0].share)} of its time."
    return "None of the figures measured tells what holds it." if efficiency.value < _NEAR_IDEAL else ""


def _strategy_table(comparison: StrategyComparison, summary: RunSummary) -> Table:
    return Table(
        heads=_STRATEGY_HEADS,
        rows=tuple(map(_strategy_row, comparison.entries)),
        texts=_TEXTS,
        row_kinds=tuple(_kind(entry, summary) for entry in comparison.entries),
    )


def _strategy_row(entry: StrategyEntry) -> tuple[str, ...]:
    name, best = name_group(entry.strategy, entry.world_size), entry.best
    if best is None:
        return (name, *[NO_VALUE] * (len(_STRATEGY_HEADS) - 1))
    rate, talk = best.samples_per_s, best.communication
    return (
        name,
        format_rate(rate.value),
        format_interval(format_rate(rate.low), format_rate(rate.high)),
        NO_VALUE if best.efficiency is None else _format_efficiency(best.efficiency),
        NO_VALUE if talk is None else format_fraction(talk.exposed_fraction),
        NO_VALUE if talk is None else format_fraction(talk.hidden_fraction),
    )


def _format_efficiency(efficiency: Ratio) -> str:
    """With its interval beside it: "91 % (87 to 95)"."""
    low, high = (f"{100 * end:.0f}" if isfinite(end) else "unknown" for end in (efficiency.low, efficiency.high))
    return f"{format_fraction(efficiency.value)} ({format_interval(low, high)})"


def _kind(entry: StrategyEntry, summary: RunSummary) -> str:
    if entry.best is None:
        return "failed"
    found = summary.recommendation
    if found is not None and entry.best.number == found.number:
        return "recommended"
    return "baseline" if entry.best.number == 0 else ""


def _remarks(comparison: StrategyComparison) -> tuple[str, ...]:
    """What must be known to read the table."""
    remarks = [f"Each is the best of its trials: {'; '.join(map(_say_choice, comparison.entries))}."]
    if comparison.other_changes:
        names = ", ".join(comparison.other_changes)
        remarks.append(
            f"The fastest group differs from the best single device in {names} as well: part of what it gains or loses "
            "may be theirs."
        )
    remarks.append("Efficiency: the rate over as many times the best of one device, with its 95 % interval.")
    if any(one.best is not None and one.best.communication is not None for one in comparison.entries):
        remarks.append(
            "Exposed: the share of a step that exchanging gradients adds, on batches that the devices hold. Hidden: "
            "the share of the exchange that lies behind the backward pass."
        )
    return tuple(remarks)


def _say_choice(entry: StrategyEntry) -> str:
    name = name_group(entry.strategy, entry.world_size)
    if entry.best is None:
        return f"{name}: none of {entry.tried} ran well"
    again = f", {format_count(entry.best.runs, 'run')} in turns" if entry.best.runs else ""
    return f"{name}: trial {entry.best.number}, chosen from {entry.feasible}{again}"


def _brake_table(brakes: Sequence[Brake]) -> Table:
    rows = tuple((format_fraction(one.share), CAUSES[one.cause], f"{one.evidence}.") for one in brakes)
    return Table(heads=("share", "what", "evidence"), rows=rows, texts=_TEXTS)


def _advice_table(advice: Sequence[Advice]) -> Table:
    rows = []
    for one in advice:
        gain = NO_VALUE if one.expected_gain is None else say_gain(one.expected_gain)
        rate = NO_VALUE if one.expected_samples_per_s is None else format_rate(one.expected_samples_per_s)
        rows.append((gain, rate, f"{one.text}. Basis: {one.basis}."))
    return Table(heads=("gain", "samples/s", "advice"), rows=tuple(rows), texts=_TEXTS)


def _ranks_of(comparison: StrategyComparison, summary: RunSummary) -> tuple[Section, ...]:
    """The recommended group's ranks; where one device is recommended, the fastest group's."""
    found, fastest = summary.recommendation, comparison.fastest
    if found is not None and (fastest is None or found.number != fastest.number):
        figures = summarise(summary, found.number)
        if figures is not None and figures.ranks:
            return rank_section(figures.ranks, name_group(found.config.strategy, found.config.world_size))
    if fastest is None:
        return ()
    is_pace_set = any(one.cause == "uneven_rank" for one in comparison.brakes)
    remarks = () if is_pace_set or not uneven_ranks(fastest.ranks) else ("That does not set the pace here.",)
    return rank_section(fastest.ranks, _name(fastest), remarks)


def _rank_row(one: RankFigures, device: str) -> tuple[str, ...]:
    return (
        str(one.rank),
        device,
        NO_VALUE if one.loader_ceiling is None else format_rate(one.loader_ceiling),
        NO_VALUE if one.device_ceiling is None else format_rate(one.device_ceiling),
        format_fraction(one.data_wait_fraction),
        NO_VALUE if one.busy_fraction is None else format_fraction(one.busy_fraction),
        format_bytes(one.peak_memory_bytes),
    )
