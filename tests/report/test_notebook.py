"""The table that a notebook shows."""

from __future__ import annotations

from pathlib import Path

import autotune
from autotune.records.result import RunSummary
from autotune.report.html import render_diagnosis_notebook
from autotune.testing import FakeLauncher
from tests.factories import make_rich_summary, said
from tests.report.forms import as_notebook
from tests.report.test_html import ATTACK, Reader


def test_verdicts_are_well_formed(any_summary: RunSummary, tmp_path: Path) -> None:
    reader = Reader(as_notebook(any_summary, tmp_path))
    assert reader.tags[0] == "div"
    assert reader.tags.count("table") == 2


def test_diagnosis_shows_its_answer() -> None:
    found = autotune.diagnose(object, list, progress=False, launcher=FakeLauncher())
    hostile = found.diagnosis.model_copy(
        update={"notes": (said(ATTACK),), "headline": f"{found.headline} {ATTACK}"}
    )
    reader = Reader(render_diagnosis_notebook(hostile))
    assert reader.tags[0] == "div"
    assert reader.tags.count("table") >= 6
    assert found.advice[0].text in reader.text
    assert "Measured by" in reader.text
    assert not {"script", "img", "style", "link"} & set(reader.tags)
    assert Reader(found._repr_html_()).text.strip().startswith(found.headline)


def test_styles_are_inline(tmp_path: Path) -> None:
    summary = make_rich_summary(stopped_because=said(ATTACK), memory_source=ATTACK)
    reader = Reader(as_notebook(summary, tmp_path))
    assert not {"script", "img", "style", "link"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
