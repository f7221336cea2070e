"""The reports in the run folder: written by a search, rebuilt from the folder alone, and never what ends a search."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import autotune
from autotune.api import commands as reporting
from autotune.api.commands import open_report, rewrite_reports
from autotune.api.search import SearchResult
from autotune.errors import RunFolderError
from autotune.files.run_folder import RunFolder
from autotune.report import html as page
from autotune.testing import FakeLauncher
from autotune.tuning.race import Race

REPORTS = ("report.md", "report.html")


def search(run_dir: Path) -> SearchResult:
    data = TensorDataset(torch.zeros(8, 2), torch.zeros(8, 2))
    return autotune.search(
        torch.nn.Linear(2, 2),
        data,
        launcher=FakeLauncher(),
        n_trials=5,
        run_dir=run_dir,
        progress=False,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """One search whose folder nobody changes."""
    return search(tmp_path_factory.mktemp("search") / "run")


def test_a_search_writes_both_reports_for_its_user_alone(result: SearchResult) -> None:
    for name in REPORTS:
        file = result.run_dir / name
        assert file.stat().st_mode & 0o777 == 0o600
        assert "times as fast" in file.read_text(encoding="utf-8")
        assert "recommended.yaml" in file.read_text(encoding="utf-8")


def test_a_report_rebuilt_elsewhere_from_the_folder_alone_is_the_same(
    result: SearchResult, tmp_path: Path
) -> None:
    copy = shutil.copytree(result.run_dir, tmp_path / "elsewhere")
    for name in REPORTS:
        (copy / name).unlink()
    report, note = rewrite_reports(open_report(copy), copy)
    assert (report.summary, note) == (result.summary, "")
    assert (copy / "report.md").read_bytes() == (result.run_dir / "report.md").read_bytes()
    rebuilt, first = (
        (folder / "report.html").read_text(encoding="utf-8") for folder in (copy, result.run_dir)
    )
    assert rebuilt == first


def test_a_folder_that_can_not_be_written_is_said_and_the_summary_is_there(
    result: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "write_atomic", _refuse)
    report, note = rewrite_reports(open_report(result.run_dir), result.run_dir)
    assert report.summary == result.summary
    assert note.endswith(" file system")


@pytest.mark.slow
def test_a_search_outlives_a_fault_in_drawing_and_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def draw(_plot: object) -> str:
        raise MemoryError("no room for a plot")

    monkeypatch.setattr(page, "draw", draw)
    with caplog.at_level(logging.WARNING, logger="autotune"):
        result = search(tmp_path / "run")
    text = (result.run_dir / "report.html").read_text(encoding="utf-8")
    for told in (caplog.text, text):
        assert "MemoryError: no room" in told
    assert "</html>" in text


@pytest.mark.parametrize(
    ("name", "told"),
    [("write_atomic", "read-only file system"), ("render_markdown", "ZeroDivisionError: no share")],
)
def test_search_outlives_any_fault_in_a_report(
    name: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reporting, name, _fail if name == "render_markdown" else _refuse)
    with caplog.at_level(logging.WARNING, logger="autotune"):
        result = search(tmp_path / "run")
    assert (result.run_dir / "recommended.yaml").exists()
    assert told in caplog.text


@pytest.mark.slow
def test_report_fault_hides_no_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reporting, "render_markdown", _fail)
    monkeypatch.setattr(Race, "next_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "run")


def _fail(*_: object) -> str:
    raise ZeroDivisionError("no share of nothing")


def test_fresh_removes_the_page_as_well(result: SearchResult, tmp_path: Path) -> None:
    folder = shutil.copytree(result.run_dir, tmp_path / "run")
    RunFolder(folder).clear()
    assert not (folder / "report.html").exists()


def test_a_notebook_shows_a_table(result: SearchResult) -> None:
    assert result._repr_html_().startswith("<div>")
    assert "times as fast" in result._repr_html_()


def _refuse(_path: Path, _data: bytes) -> None:
    raise RunFolderError("read-only file system")
