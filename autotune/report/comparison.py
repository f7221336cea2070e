"""Compare two searches: what changed, and whether throughput differs by more than noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from rich.console import Console
from rich.text import Text

from autotune.frozen import FrozenModel
from autotune.messages.units import NO_VALUE, Unit, format_times, show, show_interval
from autotune.models.evidence import ratio_of_runs
from autotune.records.measurement import Interval, Measurement
from autotune.records.result import RunSummary, RunVariation, changed_settings
from autotune.report.blocks import Bullets, Section, Table, filled, tabulate
from autotune.report.console import print_section
from autotune.report.figures import Column, headroom_in, make_columns
from autotune.report.model import Verdict
from autotune.report.sections import (
    describe_environment,
    describe_run,
    describe_workload,
    result_table,
)
from autotune.report.sentences import describe_run_variation, is_held_in
from autotune.report.words import one_line

# The comparison; its fields are the JSON document of `autotune compare`.

Role = Literal["baseline", "recommended"]
"""Configurations of each search that are compared."""
_ROLES: tuple[Role, ...] = get_args(Role)
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
    columns = tuple(
        {column.title: column for column in make_columns(summary)} for summary in summaries
    )
    found: dict[Role, ComparedConfig | None] = {
        role: _compared(summaries, columns, role, spread) for role in _ROLES
    }
    baseline = found["baseline"]
    recommended = found["recommended"]
    assert baseline is not None, "every search has a baseline"  # noqa: S101 - our own bug
    is_beyond_noise = any(known is not None and known.is_beyond_noise for known in found.values())

    def differing(
        describe: Callable[[RunSummary], Mapping[str, str]],
    ) -> dict[str, tuple[str, str]]:
        return _differing(describe(first), describe(second))

    # one side may lack a recommendation, or the runs of a configuration
    is_one_sided = (first.recommendation is None) != (second.recommendation is None)
    for known in found.values():
        if known is not None:
            is_one_sided |= bool(known.columns[0].runs) != bool(known.columns[1].runs)
    limits: tuple[str | None, str | None] = (None, None)
    if recommended is not None:
        limits = (_limit(recommended.columns[0]), _limit(recommended.columns[1]))
    machine = differing(lambda summary: describe_environment(summary.environment))
    return Comparison(
        names=names,
        headline=_headline(baseline, recommended, has_same_machine=not machine),
        is_beyond_noise=is_beyond_noise,
        is_changed=is_beyond_noise or is_one_sided,
        verdicts=(_verdict(first), _verdict(second)),
        limits=limits,
        baseline=baseline,
        recommended=recommended,
        machine=machine,
        workload=differing(lambda summary: describe_workload(summary.facts)),
        asked=differing(describe_run),
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
    summaries: tuple[RunSummary, RunSummary],
    columns: tuple[Mapping[str, Column], ...],
    role: Role,
    spread: RunVariation,
) -> ComparedConfig | None:
    """Compare a configuration of each search; a recommended baseline has both roles."""
    if role == "recommended" and any(summary.recommendation is None for summary in summaries):
        return None
    first, second = (known.get(role, known["baseline"]) for known in columns)
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


def _verdict(summary: RunSummary) -> Verdict:
    return "nothing_feasible" if summary.recommendation is None else summary.recommendation.verdict


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


def _share_of_lowest(run: Measurement) -> float | None:
    headroom = headroom_in(run)
    return None if headroom is None else headroom.share_of_lower


_CEILINGS: Mapping[str, tuple[Callable[[Measurement], float | None], Unit]] = {
    "loader alone": (lambda known: known.loader_ceiling, "plain_rate"),
    "copying alone": (lambda known: known.copy_ceiling, "plain_rate"),
    "device alone": (lambda known: known.device_ceiling, "plain_rate"),
    "host alone": (lambda known: known.host_ceiling, "plain_rate"),
    "share of the lowest": (_share_of_lowest, "share"),
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the answer first, then the figures behind it."""
    console.print()
    console.print(Text(one_line(comparison.headline), style="bold"))
    for section in comparison_sections(comparison):
        print_section(section, console)


def comparison_sections(comparison: Comparison) -> tuple[Section, ...]:
    """Return the sections below the headline, without what does not differ."""
    recommended = comparison.recommended
    rows = [
        {"what": "folder", FIRST: comparison.names[0], SECOND: comparison.names[1]},
        _row("verdict", *(_VERDICTS[verdict] for verdict in comparison.verdicts)),
        _row("slower side", *(limit or NO_VALUE for limit in comparison.limits)),
    ]
    sections = [Section(title="The two searches", blocks=(tabulate(rows),))]
    if recommended is not None:
        sections += _config_sections("Recommended settings", recommended, comparison)
    sections += _config_sections("Baseline", comparison.baseline, comparison)
    return filled(
        *sections,
        Section(title="Changes of the machine", blocks=(_changes(comparison.machine),)),
        Section(title="Changes of model and data", blocks=(_changes(comparison.workload),)),
        Section(title="Changes of the options", blocks=(_changes(comparison.asked),)),
        Section(title="Noise", blocks=(Bullets(sentences=tuple(_noise(comparison))),)),
    )


def _noise(comparison: Comparison) -> Iterator[str]:
    """Yield the run-to-run variation of each kind of runs that was measured."""
    compared = [
        known for known in (comparison.baseline, comparison.recommended) if known is not None
    ]
    columns = [column for known in compared for column in known.columns if column.runs]
    kinds = {is_held_in(column.runs) for column in columns} or {False}
    for is_held in sorted(kinds):
        yield describe_run_variation(comparison.spread, is_held_by_device=is_held)
    yield "Variation of the machine from day to day was not measured."


def _config_sections(
    title: str, known: ComparedConfig, comparison: Comparison
) -> Iterator[Section]:
    """Yield a configuration's figures with the settings that differ, and its ceilings."""
    table = result_table(known.columns, None, comparison.spread, reference=FIRST)
    yield Section(title=title, blocks=(table,))
    yield Section(
        title=f"{title}: what loader and device reach alone", blocks=(_ceilings(known.columns),)
    )


def _ceilings(columns: Sequence[Column]) -> Table:
    """Tabulate the ceiling of each side, and the share of the lowest that is reached."""
    rows = []
    for name, (read, unit) in _CEILINGS.items():
        values = [column.figures and read(column.figures) for column in columns]
        if any(values):
            rows.append(_row(name, *(show(value, unit) for value in values)))
    return tabulate(rows, ("what", FIRST, SECOND) if rows else ())


def _changes(pairs: Mapping[str, tuple[str, str]]) -> Table:
    rows = [_row(name, *pair) for name, pair in pairs.items()]
    return tabulate(rows, ("what", FIRST, SECOND) if rows else ())


def _row(what: str, first: str, second: str) -> dict[str, str]:
    return {"what": what, FIRST: first or NO_VALUE, SECOND: second or NO_VALUE}
