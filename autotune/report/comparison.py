"""Compare two searches: what changed, and whether throughput differs by more than noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from autotune.frozen import FrozenModel
from autotune.messages.units import NO_VALUE, format_times, show_interval
from autotune.models.evidence import ratio_of_runs
from autotune.records.measurement import Interval, Measurement
from autotune.records.result import RunSummary, RunVariation, changed_settings
from autotune.report.blocks import Bullets, Section, Table, filled, side_by_side
from autotune.report.console import print_section
from autotune.report.figures import Column, drop_none, headroom_in, make_columns
from autotune.report.model import Verdict, verdict_of
from autotune.report.sections import (
    ceiling_section,
    describe_environment,
    describe_run,
    describe_workload,
    result_table,
)
from autotune.report.sentences import describe_run_variation
from autotune.report.words import one_line

# The comparison; its fields are the JSON document of `autotune compare`.

FIRST = "first"
SECOND = "second"


class ComparedConfig(FrozenModel):
    """The baselines, or the recommendations, of the first and the second search."""

    settings: dict[str, tuple[Any, Any]]
    """Settings that differ: {name: (first, second)}."""
    columns: tuple[Column, Column]
    """Settings and runs of each."""
    ratio: Interval | None
    """Throughput of the second over the first, with its 95 % interval; null if one was not measured."""

    @property
    def is_beyond_noise(self) -> bool:
        """Return whether throughput differs by more than run-to-run variation."""
        return self.ratio is not None and not self.ratio.low <= 1 <= self.ratio.high


class Comparison(FrozenModel):
    """What differs between two searches."""

    format: Literal[2] = 2
    """Version, raised when a key is removed or changes its meaning."""
    names: tuple[str, str]
    """The run folders, as given."""
    headline: str
    """The answer in a sentence or two, for people."""
    is_beyond_noise: bool
    """A throughput differs by more than run-to-run variation."""
    is_changed: bool
    """A throughput differs, or only one search measured a baseline or recommends anything."""
    verdicts: tuple[Verdict, Verdict]
    """Verdict of each search."""
    limits: tuple[str | None, str | None]
    """The slower side with the recommended settings: "loader", "device", "copy" or "host"; null if
    unknown."""
    baseline: ComparedConfig
    recommended: ComparedConfig | None
    """null if one of them recommends nothing."""
    machine: dict[str, tuple[str, str]]
    """Facts of the machine that differ: {name: (first, second)}; "" if one lacks it."""
    workload: dict[str, tuple[str, str]]
    """Facts of model and data that differ, likewise."""
    asked: dict[str, tuple[str, str]]
    """Options of the searches that differ, likewise, with autotune's version."""
    spread: RunVariation
    """Run-to-run variation: the larger one of the two searches, which `ratio` includes."""


def compare_summaries(first: RunSummary, second: RunSummary, names: tuple[str, str]) -> Comparison:
    """Compare two searches.

    Args:
        first: The search that is the reference.
        second: The search to compare.
        names: Their names in the report.
    """
    summaries = first, second
    spread = _wider(first.run_variation, second.run_variation)
    columns = [{column.title: column for column in make_columns(summary)} for summary in summaries]
    baseline = _compared(columns, "baseline", spread)
    recommended = None
    limits: tuple[str | None, str | None] = (None, None)
    if first.recommendation is not None and second.recommendation is not None:
        recommended = _compared(columns, "recommended", spread)
        limits = (_limit(recommended.columns[0]), _limit(recommended.columns[1]))
    compared = drop_none([baseline, recommended])
    is_beyond_noise = any(known.is_beyond_noise for known in compared)
    # one side may lack a recommendation, or the runs of a configuration
    is_one_sided = (first.recommendation is None) != (second.recommendation is None) or any(
        bool(before.runs) != bool(after.runs) for before, after in (one.columns for one in compared)
    )
    machine = _differing(*(describe_environment(summary.environment) for summary in summaries))
    return Comparison(
        names=names,
        headline=_headline(baseline, recommended, has_same_machine=not machine),
        is_beyond_noise=is_beyond_noise,
        is_changed=is_beyond_noise or is_one_sided,
        verdicts=(verdict_of(first), verdict_of(second)),
        limits=limits,
        baseline=baseline,
        recommended=recommended,
        machine=machine,
        workload=_differing(*(describe_workload(summary.facts) for summary in summaries)),
        asked=_differing(*map(describe_run, summaries)),
        spread=spread,
    )


def _headline(
    baseline: ComparedConfig, recommended: ComparedConfig | None, *, has_same_machine: bool
) -> str:
    """Return the answer: the recommendations, the baselines, and whether the machine changed."""
    sentences = [_describe_recommended(recommended)]
    if baseline.ratio is None:
        sentences.append("One of the baselines was not measured.")
    else:
        times = format_times(baseline.ratio.value)
        interval = _describe_interval(baseline, baseline.ratio)
        different = ", with different settings" if baseline.settings else ""
        sentences.append(f"Baseline: {times} times {interval}{different}.")
    if not has_same_machine:
        sentences.append("The machine or its versions changed as well.")
    return " ".join(sentences)


def _describe_recommended(recommended: ComparedConfig | None) -> str:
    if recommended is None:
        return "One of the searches recommends nothing."
    if recommended.ratio is None:
        return "One of the searches has not measured what it recommends."
    interval = _describe_interval(recommended, recommended.ratio)
    first, second = (column.config.global_batch_size for column in recommended.columns)
    batch = "" if first == second else f", at a global batch of {second} instead of {first}"
    if not recommended.is_beyond_noise:
        return f"The recommendations do not differ measurably {interval}{batch}."
    times = format_times(recommended.ratio.value)
    return f"The second recommendation has {times} times the throughput of the first {interval}{batch}."


def _describe_interval(compared: ComparedConfig, ratio: Interval) -> str:
    where = "beyond" if compared.is_beyond_noise else "within"
    return f"({show_interval(ratio.low, ratio.high, 'times')}, {where} noise)"


def _wider(first: RunVariation, second: RunVariation) -> RunVariation:
    """Return the larger variation of two, for each kind of runs."""
    wider = max(first, second, key=lambda one: one.sd)
    of_device = [one.device for one in (first, second) if one.device is not None]
    return wider.model_copy(update={"device": max(of_device, key=lambda one: one.sd, default=None)})


def _compared(
    columns: Sequence[Mapping[str, Column]], title: str, spread: RunVariation
) -> ComparedConfig:
    """Compare a configuration of each search; a recommended baseline has both titles."""
    first, second = (known.get(title, known["baseline"]) for known in columns)
    ratio = ratio_of_runs(second.runs, first.runs, spread) if first.runs and second.runs else None
    return ComparedConfig(
        settings=changed_settings(second.config, first.config),
        columns=(
            first.model_copy(update={"title": FIRST, "speedup": None}),
            second.model_copy(update={"title": SECOND, "speedup": ratio}),
        ),
        ratio=ratio,
    )


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys([*first, *second])
    values = {name: (first.get(name, ""), second.get(name, "")) for name in names}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _limit(column: Column) -> str | None:
    headroom = None if column.figures is None else headroom_in(column.figures)
    return None if headroom is None else headroom.lower


# The comparison on a console within 80 columns.

_VERDICTS: dict[Verdict, str] = {
    "faster": "proven faster",
    "already_best": "already the best",
    "unconfirmed": "not decided",
    "baseline_infeasible": "baseline does not work",
    "nothing_feasible": "nothing feasible",
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the answer first, then the figures behind it."""
    console.print()
    console.print(Text(one_line(comparison.headline), style="bold"))
    for section in comparison_sections(comparison):
        print_section(section, console)


def comparison_sections(comparison: Comparison) -> tuple[Section, ...]:
    """Return the sections below the headline, without what does not differ."""
    searches = {
        title: {"folder": folder, "verdict": _VERDICTS[verdict], "slower side": limit or NO_VALUE}
        for title, folder, verdict, limit in zip(
            (FIRST, SECOND), comparison.names, comparison.verdicts, comparison.limits, strict=True
        )
    }
    sections = [Section(title="The two searches", blocks=(side_by_side(searches),))]
    compared = {"Recommended settings": comparison.recommended, "Baseline": comparison.baseline}
    runs: list[Sequence[Measurement]] = []
    for title, known in compared.items():
        if known is not None:
            measured = {one.title: one.figures for one in known.columns if one.figures is not None}
            sections += [
                Section(title=title, blocks=(result_table(known.columns),)),
                replace(ceiling_section(measured), title=f"{title}: ceilings"),
            ]
            runs += [column.runs for column in known.columns if column.runs]
    noise = [
        *describe_run_variation(comparison.spread, runs),
        "Variation of the machine from day to day was not measured.",
    ]
    return filled(
        *sections,
        Section(title="Changes of the machine", blocks=(_changes(comparison.machine),)),
        Section(title="Changes of model and data", blocks=(_changes(comparison.workload),)),
        Section(title="Changes of the options", blocks=(_changes(comparison.asked),)),
        Section(title="Noise", blocks=(Bullets(sentences=tuple(noise)),)),
    )


def _changes(pairs: Mapping[str, tuple[str, str]]) -> Table:
    return side_by_side(
        {
            title: {name: pair[place] or NO_VALUE for name, pair in pairs.items()}
            for place, title in enumerate((FIRST, SECOND))
        }
    )
