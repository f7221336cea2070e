"""report.html: one self-contained page with the report's sections and plots.

Comes in: a ReportModel. Goes out: HTML that fetches nothing and runs no script. Every text goes
through Jinja2's autoescape, here and in a notebook; only our own plots are taken as markup. A plot
that can't be drawn is left out, and the page says why.
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
from autotune.report.diagnosis import diagnosis_sections, say_present
from autotune.report.drawing import draw
from autotune.report.model import ReportModel
from autotune.report.words import PART_NAMES, one_line, without_controls

_FAULT = 'The plot "{title}" could not be drawn ({fault}); its figures are in the tables.'
_NO_MATPLOTLIB = (
    'Plots need matplotlib: pip install "autotune-torch[report]", then autotune report RUN_DIR.'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page, and what a person should know of how it was made."""

    html: str
    remark: str
    """Why plots are missing, in a sentence; "" where none is."""


def render_page(report: ReportModel) -> Page:
    """The whole page."""
    plots = [
        block for section in report.sections for block in section.blocks if isinstance(block, Plot)
    ]
    drawings, remark = _draw_all(plots)
    missing = [plot for plot in plots if plot.name not in drawings]
    sections = (
        replace(section, blocks=tuple(block for block in section.blocks if block not in missing))
        for section in report.sections
    )
    values = {
        "report": report,
        "sections": filled(*sections),
        "drawings": drawings,
        "remark": remark,
    }
    return Page(html=render_template("report.html.j2", values), remark=remark)


def _draw_all(plots: Iterable[Plot]) -> tuple[dict[str, Markup], str]:
    """The plots by name, as far as they could be drawn, and why not. The one place that catches a fault in drawing."""
    drawings: dict[str, Markup] = {}
    remark = ""
    for plot in plots:
        try:
            drawings[plot.name] = Markup(draw(plot))  # noqa: S704 - our own drawing of numbers
        except Exception as error:  # noqa: BLE001 - no plot may cost a finished search its report
            is_missing = (
                isinstance(error, ImportError)
                and (error.name or "").partition(".")[0] == "matplotlib"
            )
            fault = one_line(f"{type(error).__name__}: {error}")
            remark = _NO_MATPLOTLIB if is_missing else _FAULT.format(title=plot.title, fault=fault)
    return drawings, remark


def render_template(name: str, values: Mapping[str, object]) -> str:
    """Fill a template of this package; a value that it names and is not given is an error."""
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    """Jinja2 over the templates of this package: every text that a template shows is escaped."""
    environment = Environment(
        loader=PackageLoader("autotune.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plain=one_line, lines=without_controls, percent=format_fraction)
    environment.tests["block"] = lambda block, kind: (
        type(block).__name__ == kind
    )  # one of `blocks`' classes, by name
    environment.globals.update(text_heads=TEXT_HEADS, part_names=PART_NAMES)
    return environment


# A result as a table in a notebook: the headline, the result's columns, and the trials to unfold; a
# diagnosis alike.
#
# Comes in: a ReportModel, or a Diagnosis. Goes out: a fragment of HTML with its styles inline, in
# the notebook's own colours. Every text goes through Jinja2's autoescape.


_OPEN_SECTIONS = 3  # where the time goes, the bottlenecks, what to do


def render_notebook(report: ReportModel) -> str:
    """The fragment that a notebook shows for a result."""
    return render_template("notebook.html.j2", {"report": report})


def render_diagnosis_notebook(diagnosis: Diagnosis) -> str:
    """The fragment that a notebook shows for a diagnosis: the answer and what to do, the evidence to unfold."""
    sections = diagnosis_sections(diagnosis)
    first = sections[:_OPEN_SECTIONS]
    rest = sections[_OPEN_SECTIONS:]
    values = {
        "headline": diagnosis.headline,
        "present": say_present(diagnosis),
        "first": first,
        "rest": rest,
    }
    return render_template("notebook_diagnosis.html.j2", values)
