"""report.html: one self-contained page with the report's sections and plots.

Comes in: a RunSummary and its run folder. Goes out: HTML that fetches nothing and runs no script. Every text goes
through Jinja2's autoescape; only our own plots are taken as markup. A plot that can't be drawn costs nothing but
itself: what kept it from being drawn is said on the page and handed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from autotune.records.run_summary import RunSummary
from autotune.report.content import list_changes, say_headline
from autotune.report.figures import PART_NAMES
from autotune.report.formatting import one_line
from autotune.report.plots.drawing import draw
from autotune.report.plots.plots import Plot, list_plots
from autotune.report.render.templating import render_template
from autotune.report.sections.assembly import list_sections, result_blocks

__all__ = ["Page", "render_page"]

_NO_MATPLOTLIB = 'Plots need matplotlib: pip install "autotune-torch[report]", then autotune report RUN_DIR.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page, and what a person should know of how it was made."""

    html: str
    remark: str
    """Why plots are missing, in a sentence; "" where none is."""


def render_page(summary: RunSummary, run_dir: Path) -> Page:
    """The whole page."""
    plots = list_plots(summary)
    drawings, remark = _draw_all(plots)
    values: dict[str, object] = {
        "name": one_line(summary.name),
        "headline": say_headline(summary),
        "verdict": "nothing" if summary.recommendation is None else summary.recommendation.verdict,
        "changes": list_changes(summary),
        "result": result_blocks(summary),
        "sections": list_sections(summary, run_dir, own_file="report.html", drawn=drawings),
        "plots": {plot.name: plot for plot in plots},
        "drawings": drawings,
        "remark": remark,
        "version": summary.autotune_version,
        "part_names": PART_NAMES,
    }
    html = render_template("report.html.j2", values)
    return Page(html=html, remark=remark)


def _draw_all(plots: tuple[Plot, ...]) -> tuple[dict[str, Markup], str]:
    """The plots by name, as far as they could be drawn, and why not. The one place that catches a fault in drawing."""
    drawings: dict[str, Markup] = {}
    remark = ""
    for plot in plots:
        try:
            drawings[plot.name] = Markup(draw(plot))  # noqa: S704 - our own drawing of numbers
        except ImportError as error:
            missing = (error.name or "").partition(".")[0] == "matplotlib"
            remark = _NO_MATPLOTLIB if missing else _say_fault(plot, error)
        except Exception as error:  # noqa: BLE001 - no plot may cost a finished search its report
            remark = _say_fault(plot, error)
    return drawings, remark


def _say_fault(plot: Plot, error: Exception) -> str:
    said = one_line(f"{type(error).__name__}: {error}")
    return f'The plot "{plot.title}" could not be drawn ({said}); all figures stand in the tables.'
