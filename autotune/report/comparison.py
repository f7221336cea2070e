"""Compare the searches of two run folders: model and section of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from rich.console import Console
from rich.text import Text

from autotune.frozen import FrozenModel
from autotune.messages.units import NO_VALUE, Unit, format_times, show, show_interval
from autotune.models.evidence import ratio_of_runs
from autotune.records.measurement import Interval, Measurement
from autotune.records.result import RunSpread, RunSummary, changed_settings
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
from autotune.report.sentences import is_held_in, say_run_spread
from autotune.report.words import one_line

# Two searches beside each other: what changed, and whether their rates differ by more than noise.
#
# Comes in: two RunSummaries. Goes out: a Comparison, whose fields are the JSON document of
# `autotune compare`.


Role = Literal["baseline", "recommended"]
"""The two configurations of each search that are compared: what was run before, and what it
recommends."""
_ROLES: tuple[Role, ...] = get_args(Role)
FIRST = "first"
SECOND = "second"


class ComparedConfig(FrozenModel):
    """A search's baseline, or what it recommends, in the first search and in the second."""

    settings: dict[str, tuple[Any, Any]]
    """Settings that differ: {name: (the first's, the second's)}."""
    columns: tuple[Column, Column]
    """The settings and the runs of each."""
    ratio: Interval | None
    """The second's rate over the first's, with its 95 % interval; null where one was not measured."""

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the rates differ by more than runs of the same settings do."""
        return self.ratio is not None and not self.ratio.low <= 1 <= self.ratio.high


class Comparison(FrozenModel):
    """What differs between two searches."""

    format: Literal[2] = 2
    """Raised when a key goes or changes its meaning."""
    names: tuple[str, str]
    """Of the run folders, as they were given."""
    headline: str
    """The answer in a sentence or two, for people."""
    is_beyond_noise: bool
    """A rate differs by more than runs of the same settings do."""
    is_changed: bool
    """A rate does, or only one of the searches has measured a baseline, or recommends anything."""
    verdicts: tuple[Verdict, Verdict]
    """Each search's verdict in a word."""
    limits: tuple[str | None, str | None]
    """Which side of the recommended settings is the slower one: "loader", "device", "copy" or
    "host"; null where not known."""
    baseline: ComparedConfig
    recommended: ComparedConfig | None
    """null where one of them recommends nothing."""
    machine: dict[str, tuple[str, str]]
    """What differs of the machine: {what: (the first's, the second's)}; "" where one does not have
    it."""
    workload: dict[str, tuple[str, str]]
    """The same of model and data."""
    asked: dict[str, tuple[str, str]]
    """The same of what the searches were asked for, autotune's version among it."""
    spread: RunSpread
    """Between runs of the same settings: the wider one of the two searches' spreads, which `ratio`
    rests on."""


def compare_summaries(first: RunSummary, second: RunSummary, names: tuple[str, str]) -> Comparison:
    """What differs between two searches; `names` is what they are called."""
    summaries = first, second
    spread = _wider(first.run_spread, second.run_spread)
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

    machine = differing(lambda summary: describe_environment(summary.environment))
    has_lost = (first.recommendation is None) != (second.recommendation is None) or any(
        bool(known.columns[0].runs) != bool(known.columns[1].runs)
        for known in found.values()
        if known is not None
    )
    return Comparison(
        names=names,
        headline=_headline(baseline, recommended, has_same_machine=not machine),
        is_beyond_noise=is_beyond_noise,
        is_changed=is_beyond_noise or has_lost,
        verdicts=(_verdict(first), _verdict(second)),
        limits=(None, None)
        if recommended is None
        else (_limit(recommended.columns[0]), _limit(recommended.columns[1])),
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
    """Return the answer: the recommendations' rates, the baselines', and whether the machine is the same."""
    sentences = [_describe_recommended(recommended)]
    if baseline.ratio is None:
        sentences.append("One of the baselines was not measured.")
    else:
        times = f"{format_times(baseline.ratio.value)} times {_describe_interval(baseline, baseline.ratio)}"
        sentences.append(
            f"Baseline: {times}{', with different settings' if baseline.settings else ''}."
        )
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


def _wider(first: RunSpread, second: RunSpread) -> RunSpread:
    """Return the wider spread of two, of each kind of runs."""
    wider = max(first, second, key=lambda one: one.sd)
    of_device = [one.device for one in (first, second) if one.device is not None]
    return wider.model_copy(update={"device": max(of_device, key=lambda one: one.sd, default=None)})


def _compared(
    summaries: tuple[RunSummary, RunSummary],
    columns: tuple[Mapping[str, Column], ...],
    role: Role,
    spread: RunSpread,
) -> ComparedConfig | None:
    """One of each search's configurations; where the baseline itself is recommended, it is both."""
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


# Two searches beside each other on a console within 80 columns: the answer, the figures, and what
# changed.
#
# Comes in: a Comparison. Goes out: Sections, and their text on a console.


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
    """The answer first, then what it rests on."""
    console.print()
    console.print(Text(one_line(comparison.headline), style="bold"))
    for section in comparison_sections(comparison):
        print_section(section, console)


def comparison_sections(comparison: Comparison) -> tuple[Section, ...]:
    """All that stands below the headline; what does not differ is left out."""
    recommended = comparison.recommended
    rows = [
        {"what": "folder", FIRST: comparison.names[0], SECOND: comparison.names[1]},
        _row("verdict", *(_VERDICTS[verdict] for verdict in comparison.verdicts)),
        _row("slower side", *(limit or NO_VALUE for limit in comparison.limits)),
    ]
    return filled(
        Section(title="The two searches", blocks=(tabulate(rows),)),
        *(
            []
            if recommended is None
            else _config_sections("Recommended settings", recommended, comparison)
        ),
        *_config_sections("Baseline", comparison.baseline, comparison),
        Section(title="What changed of the machine", blocks=(_changes(comparison.machine),)),
        Section(title="What changed of model and data", blocks=(_changes(comparison.workload),)),
        Section(title="What was asked for otherwise", blocks=(_changes(comparison.asked),)),
        Section(title="What noise is", blocks=(Bullets(sentences=tuple(_noise(comparison))),)),
    )


def _noise(comparison: Comparison) -> Iterator[str]:
    """Return how much runs of the same settings differ, of each kind that was measured."""
    compared = [
        known for known in (comparison.baseline, comparison.recommended) if known is not None
    ]
    columns = [column for known in compared for column in known.columns if column.runs]
    kinds = {is_held_in(column.runs) for column in columns} or {False}
    for is_held in sorted(kinds):
        yield say_run_spread(comparison.spread, is_held_by_device=is_held)
    yield "How the machine varies from one day to the next was not measured."


def _config_sections(
    title: str, known: ComparedConfig, comparison: Comparison
) -> Iterator[Section]:
    """What both have measured of it, with the settings that differ, and their ceilings."""
    table = result_table(known.columns, None, comparison.spread, reference=FIRST)
    yield Section(title=title, blocks=(table,))
    yield Section(
        title=f"{title}: what loader and device reach alone", blocks=(_ceilings(known.columns),)
    )


def _ceilings(columns: Sequence[Column]) -> Table:
    """What each side reaches alone, and which share of that the whole does."""
    rows = []
    for name, (read, unit) in _CEILINGS.items():
        values = [None if column.figures is None else read(column.figures) for column in columns]
        rows += [_row(name, *(show(value, unit) for value in values))] if any(values) else []
    return tabulate(rows, ("what", FIRST, SECOND) if rows else ())


def _changes(pairs: Mapping[str, tuple[str, str]]) -> Table:
    rows = [_row(name, *pair) for name, pair in pairs.items()]
    return tabulate(rows, ("what", FIRST, SECOND) if rows else ())


def _row(what: str, first: str, second: str) -> dict[str, str]:
    return {"what": what, FIRST: first or NO_VALUE, SECOND: second or NO_VALUE}
