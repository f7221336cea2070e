"""report.html: complete, self-contained, and safe against what user code has said."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.records.result import RunSummary
from autotune.records.trial import Failure
from autotune.report import html as page
from autotune.report.blocks import Plot
from autotune.report.html import Page
from autotune.report.words import one_line
from tests.factories import (
    BASELINE,
    SAME_BATCH,
    make_recommendation,
    make_rich_summary,
    make_summary,
    make_trial,
)
from tests.report.cases import hostile_summary
from tests.report.forms import as_markdown, as_page, plots_of, report_of

EMPTY = {"meta", "link", "br", "img", "input", "hr", "path", "use"}
ATTACK = (
    "\"><script>alert(1)</script><img src=x onerror=alert(2)> ' & \x1b[31mred\x1b[0m \x00\x07 "
    "</style></pre> {{ 7 * 7 }}"
)


class Reader(HTMLParser):
    """Collects elements, attributes and text; fails where an end tag does not fit."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read(summary: RunSummary, run_dir: Path) -> Reader:
    return Reader(as_page(summary, run_dir).html)


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "draw", lambda plot: f'<svg aria-label="{plot.title}"></svg>')


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A page with every plot drawn, which takes matplotlib a second."""
    return as_page(make_rich_summary(), tmp_path_factory.mktemp("run"))


@pytest.mark.usefixtures("_undrawn")
def test_every_verdict_is_well_formed_html(any_summary: RunSummary, tmp_path: Path) -> None:
    reader = read(any_summary, tmp_path)
    assert reader.tags[:2] == ["html", "head"]
    assert reader.tags.count("h1") == 1


def test_nothing_is_fetched_and_nothing_runs(rich: Page) -> None:
    reader = Reader(rich.html)
    assert not {"script", "img", "link", "iframe", "object"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name == "src"]
    targets = [value or "" for name, value in reader.attributes if name in {"href", "xlink:href"}]
    assert [
        target
        for target in targets
        if not target.startswith("#") and ("/" in target or ":" in target)
    ] == []
    assert "@import" not in rich.html
    assert re.findall(r"url\((?!#)", rich.html) == []
    assert rich.note == ""
    assert reader.tags.count("svg") == 4


@pytest.mark.usefixtures("_undrawn")
def test_page_has_what_markdown_has(any_summary: RunSummary, tmp_path: Path) -> None:
    text = read(any_summary, tmp_path).text
    plain = re.sub(r"\\(.)", r"\1", as_markdown(any_summary, tmp_path))
    for heading in re.findall(r"^## (.+)$", plain, flags=re.MULTILINE):
        assert heading in text
    for plot in plots_of(any_summary):
        assert plot.caption in text
    cells = {
        " ".join(cell.split())
        for line in plain.splitlines()
        if line.startswith("| ")
        for cell in line.split(" | ")[1:-1]
    }
    assert len(cells) > 20
    assert [cell for cell in cells - {"---"} if cell not in text] == []


@pytest.mark.usefixtures("_undrawn")
def test_changes_are_settings(tmp_path: Path) -> None:
    config = BASELINE.model_copy(update={"grad_accum_steps": 4})
    summary = make_summary(recommendation=make_recommendation(config=config))
    assert re.findall(r"<li>([^<]+) <span", as_page(summary, tmp_path).html) == ["grad_accum_steps"]


@pytest.mark.usefixtures("_undrawn")
def test_hostile_text_is_not_markup(tmp_path: Path) -> None:
    html = as_page(hostile_summary(ATTACK), tmp_path).html
    reader = Reader(html)
    assert not {"script", "img"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert reader.tags.count("style") == 1
    assert one_line(ATTACK) in reader.text
    assert not [char for char in html if not char.isprintable() and char != "\n"]


@pytest.mark.usefixtures("_undrawn")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_no_text_changes_the_elements(text: str, tmp_path: Path) -> None:
    assert (
        read(hostile_summary(f"x {text}"), tmp_path).tags
        == read(hostile_summary("x"), tmp_path).tags
    )


@pytest.mark.usefixtures("_undrawn")
def test_long_traceback_is_cut_in_its_middle(tmp_path: Path) -> None:
    long = "Traceback (first line)\n" + "  in a frame\n" * 90_000 + "RecursionError: last line"
    failure = Failure(signature="RecursionError at net.py:1", traceback=long)
    crashed = make_trial(3, SAME_BATCH, "crashed", reason="x" * 1_000_000, failure=failure)
    summary = make_summary(trials=(*make_summary().trials[:3], crashed))
    for text in (as_page(summary, tmp_path).html, as_markdown(summary, tmp_path)):
        assert "Traceback (first line)" in text
        assert "RecursionError: last line" in text
        assert "characters left out" in text
        assert len(text) < 200_000


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(_plot: object) -> str:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(page, "draw", draw)
    made = as_page(make_rich_summary(), tmp_path)
    reader = Reader(made.html)
    assert 'pip install "autotune-torch[report]"' in made.note
    assert made.note in reader.text
    assert "svg" not in reader.tags
    for section in report_of(make_rich_summary()).sections:
        has_more = not all(isinstance(block, Plot) for block in section.blocks)
        assert (f"<h2>{section.title}</h2>" in made.html) == has_more, (
            "no heading without anything below it"
        )


def test_fault_costs_one_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(plot: Plot) -> str:
        if plot.name == "memory":
            raise ValueError("no <b>font</b>")
        return "<svg></svg>"

    monkeypatch.setattr(page, "draw", draw)
    made = as_page(make_rich_summary(), tmp_path)
    assert "ValueError: no <b>font</b>" in made.note
    reader = Reader(made.html)
    assert reader.tags.count("svg") == 3
    assert made.note in reader.text


@pytest.mark.usefixtures("_undrawn")
def test_time_bars_are_as_long_as_their_time(tmp_path: Path) -> None:
    html = as_page(make_rich_summary(), tmp_path).html
    widths = [float(width) for width in re.findall(r'class="track" style="width: ([\d.]+)%"', html)]
    assert widths == [100.0, pytest.approx(100 * 5100 / 12300, abs=0.05)]
