"""The summary, the machine and a checked configuration on a console, within 80 columns.

Comes in: a ReportModel, or what `autotune check` has found, and a rich Console. Goes out: text on that console.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autotune.report.blocks import Bullets, Facts, Paragraph, Section, Table
from autotune.report.model import ReportModel
from autotune.report.render.console_blocks import print_block, print_section
from autotune.report.sections.facts import describe_environment, describe_workload
from autotune.report.wording.names import format_setting, format_value
from autotune.report.wording.say import say
from autotune.report.wording.units import format_count
from autotune.settings.environment import Environment
from autotune.settings.search_space import Choices, Domain
from autotune.settings.workload import WorkloadFacts
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["print_check", "print_environment", "print_summary"]


def print_summary(report: ReportModel, console: Console) -> None:
    """The short form of a report: headline, table, whether more devices help, reasons, advice, failures, files."""
    console.print()
    console.print(Text(report.headline, style="bold green" if report.verdict == "faster" else "bold"))
    for block in report.lead:
        print_block(block, console)
    for section in report.sections:
        if section.is_brief and section.title != "Files":
            print_section(section, console)
    if report.files:
        print_section(Section(title=f"Files in {report.folder}", blocks=(Facts(facts=report.files),)), console)


def print_environment(environment: Environment, console: Console) -> None:
    """The machine as trials see it."""
    print_block(Facts(facts=describe_environment(environment)), console)


def print_check(
    environment: Environment, facts: WorkloadFacts, space: ResolvedSpace, console: Console, *, stale: str | None = None
) -> None:
    """What a search would try: the machine, the workload, each setting's values; and why a former result is stale."""
    print_block(Facts(facts=describe_environment(environment) | describe_workload(facts)), console)
    print_block(_space_table(space), console)
    console.print(Text(f"{format_count(space.size, 'combination')}, less those that rules exclude or that run alike."))
    if space.notes:
        print_section(Section(title="Notes", blocks=(Bullets(sentences=tuple(map(say, space.notes))),)), console)
    if stale is not None:
        console.print()
        print_block(Paragraph(text=say(stale), is_warning=True), console)


def _space_table(space: ResolvedSpace) -> Table:
    rows = []
    searched = space.parameters
    for name in sorted(space.domains, key=lambda name: (name not in searched, name)):
        domain = space.domains[name]
        values = _describe_domain(domain)
        if name not in searched:
            values = f"follows the batch: {values}" if len(domain) > 1 else f"fixed: {values}"
        rows.append((name, format_setting(name, space.baseline), values))
    lr = "not searched; follows the global batch" if space.objective.lr_rule != "none" else "fixed"
    rows.append(("lr", format_setting("lr", space.baseline), lr))
    kinds = ("" if name in searched else "fixed" for name, _, _ in rows)
    heads = ("setting", "baseline", "searched")
    return Table(heads=heads, rows=tuple(rows), texts=frozenset({"setting", "searched"}), row_kinds=tuple(kinds))


def _describe_domain(domain: Domain) -> str:
    if isinstance(domain, Choices):
        return ", ".join(map(format_value, domain.values))
    return f"{domain.low} to {domain.high}{', evenly in the logarithm' if domain.log else ''}"
