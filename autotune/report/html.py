"""Render report.html, a self-contained page, and the fragments that a notebook shows.

Takes a ReportModel or a Diagnosis; returns HTML that fetches nothing and runs no script. Jinja2
escapes every text; only our own plots are taken as markup. A plot that can't be drawn is left out,
and the page states why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autotune.messages.units import format_fraction
from autotune.records.result import Diagnosis
from autotune.report.blocks import TEXT_HEADS, Plot, filled
from autotune.report.diagnosis import ADVICE_TITLE, describe_present, diagnosis_sections
from autotune.report.drawing import draw
from autotune.report.model import ReportModel
from autotune.report.words import PART_NAMES, one_line, without_controls

_FAULT = 'The plot "{title}" could not be drawn ({fault}); its figures are in the tables.'
_NO_MATPLOTLIB = (
    'Plots need matplotlib: pip install "autotune-torch[report]", then autotune report RUN_DIR.'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page, and why plots are missing."""

    html: str
    note: str
    """Reason for missing plots, in a sentence; "" if none is missing."""


def render_page(report: ReportModel) -> Page:
    """Render a report as a page."""
    plots = [
        block for section in report.sections for block in section.blocks if isinstance(block, Plot)
    ]
    drawings, note = _draw_all(plots)
    missing = [plot for plot in plots if plot.name not in drawings]
    sections = (
        replace(section, blocks=tuple(block for block in section.blocks if block not in missing))
        for section in report.sections
    )
    values = {
        "report": report,
        "sections": filled(*sections),
        "drawings": drawings,
        "note": note,
    }
    return Page(html=render_template("report.html.j2", values), note=note)


def _draw_all(plots: Iterable[Plot]) -> tuple[dict[str, Markup], str]:
    """Return the plots that could be drawn, by name, and the reason why others could not."""
    drawings: dict[str, Markup] = {}
    note = ""
    for plot in plots:
        try:
            drawings[plot.name] = Markup(draw(plot))  # noqa: S704 - our own drawing of numbers
        except Exception as error:  # noqa: BLE001 - no plot may cost a finished search its report
            name = error.name if isinstance(error, ImportError) else None
            if (name or "").partition(".")[0] == "matplotlib":
                note = _NO_MATPLOTLIB
            else:
                fault = one_line(f"{type(error).__name__}: {error}")
                note = _FAULT.format(title=plot.title, fault=fault)
    return drawings, note


def render_template(name: str, values: Mapping[str, object]) -> str:
    """Fill a template of this package; a missing value is an error."""
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    """Return the environment of this package's templates, which escapes every text."""
    environment = Environment(
        loader=PackageLoader("autotune.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plain=one_line, lines=without_controls, percent=format_fraction)
    # a test for the class of a block, by its name in `blocks`
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    environment.globals.update(text_heads=TEXT_HEADS, part_names=PART_NAMES)
    return environment


# Notebooks: fragments with inline styles, in the notebook's own colours.


def render_notebook(report: ReportModel) -> str:
    """Render the fragment that a notebook shows for a result."""
    return render_template("notebook.html.j2", {"report": report})


def render_diagnosis_notebook(diagnosis: Diagnosis) -> str:
    """Render the fragment that a notebook shows for a diagnosis, its evidence to unfold."""
    sections = diagnosis_sections(diagnosis)
    titles = [section.title for section in sections]
    first = titles.index(ADVICE_TITLE) + 1 if ADVICE_TITLE in titles else len(sections)
    values = {
        "headline": diagnosis.headline,
        "present": describe_present(diagnosis),
        "first": sections[:first],
        "rest": sections[first:],
    }
    return render_template("notebook_diagnosis.html.j2", values)
