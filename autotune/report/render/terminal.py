"""The summary, the machine and a checked configuration on a console, within 80 columns.

Comes in: a ReportModel, or what `autotune check` has found, and a rich Console. Goes out: text on that console.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autotune.messages.units import format_count
from autotune.report.blocks import Bullets, Facts, Paragraph, Section, Table
from autotune.report.model import ReportModel
from autotune.report.render.console_blocks import print_block, print_section
from autotune.report.sections.facts import describe_environment, describe_workload
from autotune.report.wording.names import format_setting, format_value
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
        print_section(Section(title="Notes", blocks=(Bullets(sentences=tuple(map(str, space.notes))),)), console)
    if stale is not None:
        console.print()
        print_block(Paragraph(text=str(stale), is_warning=True), console)


def _space_table(space: ResolvedSpace) -> Table:
    values = {name: _describe_domain(space.domains[name]) for name in sorted(space.parameters)}
    for name in sorted(space.domains.keys() - values):
        prefix = "follows the batch" if len(space.domains[name]) > 1 else "fixed"
        values[name] = f"{prefix}: {_describe_domain(space.domains[name])}"
    values["lr"] = _describe_lr(space)
    rows = tuple((name, format_setting(name, space.baseline), searched) for name, searched in values.items())
    return Table(heads=("setting", "baseline", "searched"), rows=rows)


def _describe_lr(space: ResolvedSpace) -> str:
    script = space.facts.script
    if script is not None and "lr" not in script.placeholders:
        return "the script's own; {lr} in the command lets it follow the batch"
    return "not searched; follows the global batch" if space.objective.lr_rule != "none" else "fixed"


def _describe_domain(domain: Domain) -> str:
    if isinstance(domain, Choices):
        return ", ".join(map(format_value, domain.values))
    return f"{domain.low} to {domain.high}{', evenly in the logarithm' if domain.log else ''}"
