"""A run folder with one file damaged: readers name the file, or go on without it."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.api.commands import export_run
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, RunFolderError
from autotune.files.run_folder import RunFolder, read_summary
from autotune.note import Note
from autotune.testing import FakeLauncher
from tests.factories.searches import NARROW

ARGUMENTS: dict[str, Any] = {"space": NARROW, "n_trials": 3, "method": "random", "progress": False}
_NOT_OURS = b"Dear diary,\ntoday I have written over a file that was not mine.\n" * 200


def _later(before: bytes) -> bytes:
    """Rename keys, as a later version may."""
    for old, new in ((b'"name"', b'"title"'), (b'"config"', b'"settings"')):
        before = before.replace(old, new)
    return before


SPOILT: Mapping[str, Callable[[bytes], bytes]] = {
    "cut": lambda before: before[: len(before) * 7 // 10],
    "other text": lambda _: _NOT_OURS,
    "noise": lambda _: random.Random(7).randbytes(5000),
    "deep": lambda _: b"[" * 200_000,
    "later version": _later,
}
"""By name: what a damaged file holds, of what it held before."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that nobody changes."""
    path = tmp_path_factory.mktemp("search") / "run"
    search(path)
    return path


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Callable[[str, str], Path]:
    """A copy of the run in which a file is damaged."""

    def damage(name: str, how: str) -> Path:
        run_dir = tmp_path / "run"
        shutil.copytree(whole, run_dir)
        file = run_dir / name
        if (name, how) == ("study.db", "later version"):
            with closing(sqlite3.connect(file)) as known, known:
                known.execute("UPDATE alembic_version SET version_num = 'v9.9.9'")
        else:
            file.write_bytes(
                b""
                if how == "emptied"
                else SPOILT[how](file.read_bytes() if file.exists() else b"")
            )
        return run_dir

    return damage


def search(run_dir: Path) -> autotune.SearchResult:
    return autotune.search(object, list, launcher=FakeLauncher(), run_dir=run_dir, **ARGUMENTS)


def notes_of(result: autotune.SearchResult) -> list[Note]:
    return [each for each in result.summary.notes if each.code == "file_damaged"]


@pytest.mark.parametrize("how", SPOILT)
def test_damaged_summary(how: str, damaged: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"summary\.json") as caught:
        read_summary(damaged("summary.json", how))
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["cut", "other text", "later version"])
def test_damaged_study(how: str, damaged: Callable[[str, str], Path]) -> None:
    run_dir = damaged("study.db", how)
    for use in (autotune.open_run, search):
        with pytest.raises(RunFolderError, match=r"study\.db.* SQLite.*--fresh"):
            use(run_dir)


@pytest.mark.parametrize("how", ["emptied", "other text"])
def test_damaged_trials(how: str, whole: Path, damaged: Callable[[str, str], Path]) -> None:
    run_dir = damaged("trials.jsonl", how)
    assert autotune.open_run(run_dir).trials == autotune.open_run(whole).trials
    assert notes_of(search(run_dir)) == []
    assert (run_dir / "trials.jsonl").read_bytes() == (whole / "trials.jsonl").read_bytes()


def test_search_with_damaged_summary(
    damaged: Callable[[str, str], Path],
) -> None:
    result = search(damaged("summary.json", "noise"))
    (told,) = notes_of(result)
    assert (told.code, told.figures["name"]) == ("file_damaged", "summary.json")
    assert len(result.trials) == 3


def test_search_without_study(
    damaged: Callable[[str, str], Path],
) -> None:
    run_dir = damaged("study.db", "emptied")
    launcher = FakeLauncher()
    result = autotune.search(object, list, launcher=launcher, run_dir=run_dir, **ARGUMENTS)
    assert [each.figures["name"] for each in notes_of(result)] == ["study.db"]
    assert launcher.launched[0] == TrainingConfig()
    assert len((run_dir / "trials.jsonl").read_text().splitlines()) == 3


def test_damaged_curves(damaged: Callable[[str, str], Path]) -> None:
    folder = RunFolder(damaged("curves.json", "noise"))
    found = folder.read_curves()
    assert found is not None
    assert found.code == "file_damaged"  # type: ignore[union-attr]
    folder.curves.unlink()
    assert folder.read_curves() is None


def test_export_with_damaged_summary(
    damaged: Callable[[str, str], Path],
) -> None:
    with pytest.warns(UserWarning, match=r"optimizer.*summary\.json"):
        export_run(damaged("summary.json", "noise"), "hf")
