"""Two searches beside each other on a console within 80 columns: the answer, the figures, and what changed.

Comes in: a Comparison. Goes out: Sections, and their text on a console.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from autotune.messages.units import NO_VALUE, Unit, show
from autotune.records.measurement import Measurement
from autotune.report.blocks import Bullets, Section, Table, filled, tabulate
from autotune.report.comparison import FIRST, SECOND, ComparedConfig, Comparison
from autotune.report.figures import Column, headroom_in
from autotune.report.model import Verdict
from autotune.report.render.console_blocks import print_section
from autotune.report.sections.result import result_table
from autotune.report.text import one_line
from autotune.report.wording.remarks import is_held_in, say_run_spread

__all__ = ["comparison_sections", "print_comparison"]

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
        *([] if recommended is None else _config_sections("Recommended settings", recommended, comparison)),
        *_config_sections("Baseline", comparison.baseline, comparison),
        Section(title="What changed of the machine", blocks=(_changes(comparison.machine),)),
        Section(title="What changed of model and data", blocks=(_changes(comparison.workload),)),
        Section(title="What was asked for otherwise", blocks=(_changes(comparison.asked),)),
        Section(title="What noise is", blocks=(Bullets(sentences=tuple(_noise(comparison))),)),
    )


def _noise(comparison: Comparison) -> Iterator[str]:
    """Return how much runs of the same settings differ, of each kind that was measured."""
    compared = [known for known in (comparison.baseline, comparison.recommended) if known is not None]
    columns = [column for known in compared for column in known.columns if column.runs]
    kinds = {is_held_in(column.runs) for column in columns} or {False}
    for is_held in sorted(kinds):
        yield say_run_spread(comparison.spread, is_held_by_device=is_held)
    yield "How the machine varies from one day to the next was not measured."


def _config_sections(title: str, known: ComparedConfig, comparison: Comparison) -> Iterator[Section]:
    """What both have measured of it, with the settings that differ, and their ceilings."""
    table = result_table(known.columns, None, comparison.spread, reference=FIRST)
    yield Section(title=title, blocks=(table,))
    yield Section(title=f"{title}: what loader and device reach alone", blocks=(_ceilings(known.columns),))


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
