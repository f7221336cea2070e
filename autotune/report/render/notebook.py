"""A result as a table in a notebook: the headline, the result's columns, and the trials to unfold; a diagnosis alike.

Comes in: a RunSummary and its run folder, or a Diagnosis. Goes out: a fragment of HTML with its styles inline, in the
notebook's own colours. Every text goes through Jinja2's autoescape.
"""

from __future__ import annotations

from pathlib import Path

from autotune.records.diagnosis import Diagnosis
from autotune.records.run_summary import RunSummary
from autotune.report.blocks import Block, Facts, Section, Table
from autotune.report.content import list_remarks, say_course, say_headline, show_path
from autotune.report.figures import make_columns, make_rows
from autotune.report.render.templating import render_template
from autotune.report.sections.assembly import result_table
from autotune.report.sections.devices import figures_by_title, say_doubts
from autotune.report.sections.diagnosis import diagnosis_sections, say_present
from autotune.report.sections.headroom import say_standing
from autotune.report.sections.trials import trial_table

__all__ = ["render_diagnosis_notebook", "render_notebook"]

_OPEN_SECTIONS = 3  # where the time goes, what holds it, what to do


def render_notebook(summary: RunSummary, run_dir: Path) -> str:
    """The fragment that a notebook shows for a result."""
    columns = make_columns(summary)
    values: dict[str, object] = {
        "headline": say_headline(summary),
        "standing": " ".join((*say_standing(summary), *say_doubts(figures_by_title(columns)))),
        "result": result_table(columns, make_rows(columns, summary.limit_bytes)),
        "remarks": list_remarks(summary, columns),
        "course": say_course(summary),
        "trials": trial_table(summary),
        "page": show_path(run_dir / "report.html"),
    }
    return render_template("notebook.html.j2", values)


def render_diagnosis_notebook(diagnosis: Diagnosis) -> str:
    """The fragment that a notebook shows for a diagnosis: the answer and what to do, the evidence to unfold."""
    sections = [_with_tables(section) for section in diagnosis_sections(diagnosis)]
    values: dict[str, object] = {
        "headline": diagnosis.headline,
        "present": say_present(diagnosis),
        "first": sections[:_OPEN_SECTIONS],
        "rest": sections[_OPEN_SECTIONS:],
    }
    return render_template("notebook_diagnosis.html.j2", values)


def _with_tables(section: Section) -> Section:
    """Names and values as a table of two columns."""
    return Section(title=section.title, blocks=tuple(map(_as_table, section.blocks)))


def _as_table(block: Block) -> Block:
    if not isinstance(block, Facts):
        return block
    heads = ("", "value")
    return Table(heads=heads, rows=tuple(block.facts.items()), texts=frozenset(heads))
