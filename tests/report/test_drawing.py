"""Drawn plots: inline, in the page's colours, and the same each time."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from autotune.report.blocks import Mark, Plot
from autotune.report.drawing import draw
from tests.factories import make_rich_summary
from tests.report.forms import plots_of


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {plot.name: draw(plot) for plot in plots_of(make_rich_summary())}


def test_plot_is_one_named_element(drawn: dict[str, str]) -> None:
    assert len(drawn) == 4
    for svg in drawn.values():
        root = ET.fromstring(svg)
        assert root.tag.endswith("svg")
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert root.get("viewBox")
        assert root.get("width") is None


def test_colours_and_font_are_the_pages(drawn: dict[str, str]) -> None:
    for svg in drawn.values():
        assert "#0100" not in svg
        assert "var(--ink)" in svg
        assert "DejaVu" not in svg
        assert "<text" in svg


def test_ids_are_unique(drawn: dict[str, str]) -> None:
    everything = "".join(drawn.values())
    ids = re.findall(r'\bid="([^"]*)"', everything)
    assert len(ids) == len(set(ids))
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', everything)
    assert used
    assert {own or linked for own, linked in used} <= set(ids)


def test_same_plot_is_the_same_text() -> None:
    plot = plots_of(make_rich_summary())[0]
    assert draw(plot) == draw(plot)
    assert "<dc:date>" not in draw(plot)


def test_users_style_has_no_effect(drawn: dict[str, str]) -> None:
    plot = plots_of(make_rich_summary())[0]
    with mpl.rc_context({"font.size": 31, "axes.grid": False, "lines.linewidth": 9}):
        before = dict(mpl.rcParams)
        assert draw(plot) == drawn[plot.name]
        assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("y", [0.0, 1e-12, 1e15, None])
def test_extreme_and_single_marks_can_be_drawn(y: float | None) -> None:
    marks = (Mark(x=1, y=y, amp_dtype="float32", fate="feasible", role="baseline"),)
    plot = Plot(
        name="one", title="One", x_label="x", quantity="rate", caption="", marks=marks, is_log=True
    )
    assert draw(plot).startswith("<svg")


def test_labels_of_a_logarithmic_axis() -> None:
    marks = tuple(
        Mark(x=x, y=1.0, amp_dtype="float32", fate="feasible", role="") for x in range(1, 257)
    )
    plot = Plot(
        name="one", title="One", x_label="x", quantity="rate", caption="", marks=marks, is_log=True
    )
    labels = [
        int(label)
        for label in re.findall(r">(\d+)</text>", draw(plot).partition("matplotlib.axis_2")[0])
    ]
    assert labels == [1, 2, 5, 11, 24, 53, 116, 256]
