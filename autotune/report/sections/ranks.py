"""Several devices: whether they help, what limits them, what would help, each rank's figures.

Comes in: the comparison of a search's strategies, or the ranks of a measurement. Goes out: Sections without markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from autotune.diagnosis.scaling import StrategyComparison, compare_strategies
from autotune.diagnosis.scaling_bottlenecks import LEAST_SHARE
from autotune.diagnosis.strategies import StrategyBest, StrategyEntry
from autotune.messages.units import NO_VALUE, format_count, format_interval, show, show_interval
from autotune.records.measurement import Interval
from autotune.records.ranks import RankFigures, name_devices, uneven_ranks
from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Bullets, Paragraph, Section, filled, tabulate
from autotune.report.figures import Column, role_of
from autotune.report.sections.advice import advice_table, bottleneck_table
from autotune.report.wording.names import CAUSES, name_group

__all__ = ["rank_section", "scaling_sections"]

_STRATEGY_HEADS = ("", "samples/s", "interval", "efficiency", "exposed", "hidden")


def scaling_sections(summary: RunSummary, columns: Sequence[Column]) -> tuple[Section, ...]:
    """Return whether more devices help, and why; () where no trial had more than one."""
    comparison = _compare(summary)
    if comparison is None:
        return ()
    group = "" if comparison.fastest is None else _name(comparison.fastest)
    bests = [entry.best for entry in comparison.entries]
    kinds = ["failed" if best is None else role_of(best.number, summary) for best in bests]
    answer = Paragraph(text=_say_answer(comparison))
    remarks = Bullets(sentences=tuple(_remarks(comparison)), is_remark=True)
    table = tabulate(map(_strategy_row, comparison.entries), _STRATEGY_HEADS, kinds=kinds)
    advice = advice_table(comparison.advice)
    found = ((limit.share, CAUSES[limit.cause], f"{limit.evidence}.") for limit in comparison.bottlenecks)
    return (
        Section(title="Do more devices help?", blocks=(answer, table, remarks), is_brief=True),
        Section(title=f"Bottlenecks of {group}", blocks=(bottleneck_table(found),), is_brief=True),
        Section(title=f"What would help {group}", blocks=(advice,), is_brief=True),
        *_ranks_of(comparison, summary, columns),
    )


def rank_section(ranks: Sequence[RankFigures], whose: str = "", remarks: Sequence[str] = ()) -> tuple[Section, ...]:
    """Each rank's own figures, the uneven ones named, and further remarks; () for a single process."""
    if not ranks:
        return ()
    devices = name_devices(ranks)
    uneven = [
        f"Rank {rank} ({devices[rank]}) is uneven: its {side} alone reaches {show(share, 'share')} of the others'."
        for rank, (side, share) in uneven_ranks(ranks).items()
    ]
    table = tabulate(_rank_row(rank, devices[rank.rank]) for rank in ranks)
    title = f"Each rank of {whose}" if whose else "Each rank"
    blocks = (table, Bullets(sentences=(*uneven, *remarks), is_remark=True))
    return filled(Section(title=title, blocks=blocks, is_brief=True))


def _compare(summary: RunSummary) -> StrategyComparison | None:
    """The strategies of a search; None where every trial had one device.

    What a further run or a stress run has refuted counts as tried, and may not be the best of its strategy.
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


def _say_answer(comparison: StrategyComparison) -> str:
    fastest = comparison.fastest
    if fastest is None:
        tried = format_count(sum(entry.tried for entry in comparison.entries if entry.world_size > 1), "trial")
        return f"Not known: no trial with more than one device ran well ({tried})."
    ratio, efficiency = fastest.speedup, fastest.efficiency
    if ratio is None or efficiency is None:
        return "Not known: no trial on one device ran well, so there is nothing to compare with."
    reason = ""
    if comparison.bottlenecks:
        cause, share = CAUSES[comparison.bottlenecks[0].cause], show(comparison.bottlenecks[0].share, "share")
        reason = f" Main bottleneck: {cause}, {share} of its time."
    elif efficiency.value < 1 - LEAST_SHARE:
        reason = " None of the measured figures explains what limits it."
    return _say_verdict(comparison, fastest, ratio) + reason


def _say_verdict(comparison: StrategyComparison, fastest: StrategyBest, ratio: Interval) -> str:
    count, interval = fastest.config.world_size, show_interval(ratio.low, ratio.high, "times")
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
    rate, talk = best.samples_per_s, best.communication
    return name | {
        "samples/s": show(rate.value, "plain_rate"),
        "interval": show_interval(rate.low, rate.high, "plain_rate"),
        "efficiency": NO_VALUE if best.efficiency is None else _format_efficiency(best.efficiency),
        "exposed": show(talk and talk.exposed_fraction, "share"),
        "hidden": show(talk and talk.hidden_fraction, "share"),
    }


def _format_efficiency(efficiency: Interval) -> str:
    """With its interval beside it: "91 % (87 to 95)"."""
    low, high = (f"{100 * end:.0f}" if isfinite(end) else "unknown" for end in (efficiency.low, efficiency.high))
    return f"{show(efficiency.value, 'share')} ({format_interval(low, high)})"


def _remarks(comparison: StrategyComparison) -> Iterator[str]:
    """Yield what must be known to read the table."""
    yield f"Shown: {'; '.join(map(_describe_choice, comparison.entries))}."
    if comparison.other_changes:
        names = ", ".join(comparison.other_changes)
        yield f"Part of the difference may come from other settings: {names}."
    yield "Efficiency: throughput for each device, relative to one device alone."
    if any(entry.best is not None and entry.best.communication is not None for entry in comparison.entries):
        yield (
            "Exposed: share of a step that exchanging gradients adds. Hidden: share of the exchange that overlaps with "
            "the backward pass."
        )


def _describe_choice(entry: StrategyEntry) -> str:
    name = name_group(entry.strategy, entry.world_size)
    if entry.best is None:
        return f"{name}: none of {entry.tried} ran well"
    again = f" ({format_count(entry.best.runs, 'run')})" if entry.best.runs > 1 else ""
    return f"{name}: trial {entry.best.number}, best of {entry.feasible}{again}"


def _ranks_of(comparison: StrategyComparison, summary: RunSummary, columns: Sequence[Column]) -> tuple[Section, ...]:
    """The recommended group's ranks; where one device is recommended, the fastest group's."""
    found, fastest = summary.recommendation, comparison.fastest
    if found is not None and (fastest is None or found.number != fastest.number):
        figures = next((column.figures for column in columns if column.number == found.number), None)
        if figures is not None and figures.ranks:
            return rank_section(figures.ranks, name_group(found.config.strategy, found.config.world_size))
    if fastest is None:
        return ()
    is_limiting = any(bottleneck.cause == "uneven_rank" for bottleneck in comparison.bottlenecks)
    remarks = () if is_limiting or not uneven_ranks(fastest.ranks) else ("That does not limit the group here.",)
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
