"""A result as a table in a notebook: the headline, the result's columns, and the trials to unfold; a diagnosis alike.

Comes in: a ReportModel, or a Diagnosis. Goes out: a fragment of HTML with its styles inline, in the notebook's own
colours. Every text goes through Jinja2's autoescape.
"""

from __future__ import annotations

from autotune.records.diagnosis import Diagnosis
from autotune.report.model import ReportModel
from autotune.report.render.html import render_template
from autotune.report.sections.diagnosis import diagnosis_sections, say_present

__all__ = ["render_diagnosis_notebook", "render_notebook"]

_OPEN_SECTIONS = 3  # where the time goes, the bottlenecks, what to do


def render_notebook(report: ReportModel) -> str:
    """The fragment that a notebook shows for a result."""
    return render_template("notebook.html.j2", {"report": report})


def render_diagnosis_notebook(diagnosis: Diagnosis) -> str:
    """The fragment that a notebook shows for a diagnosis: the answer and what to do, the evidence to unfold."""
    sections = diagnosis_sections(diagnosis)
    first, rest = sections[:_OPEN_SECTIONS], sections[_OPEN_SECTIONS:]
    values = {"headline": diagnosis.headline, "present": say_present(diagnosis), "first": first, "rest": rest}
    return render_template("notebook_diagnosis.html.j2", values)
