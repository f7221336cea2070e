"""A run folder with one file damaged: what reads it names the file, or goes on with what is whole and says so."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.api.export import export_run
from autotune.errors import ConfigError, RunFolderError
from autotune.files.run_folder import RunFolder, read_summary
from autotune.messages.search import trials_lost
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
            file.write_bytes(b"" if how == "emptied" else SPOILT[how](file.read_bytes() if file.exists() else b""))
        return run_dir

    return damage


def search(run_dir: Path) -> autotune.SearchResult:
    return autotune.search(object, list, launcher=FakeLauncher(), run_dir=run_dir, **ARGUMENTS)


def notes_of(result: autotune.SearchResult) -> list[Note]:
    return [each for each in result.summary.notes if each.code in {"file_damaged", "trials_lost"}]


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("name", ["summary.json", "trials.jsonl"])
def test_a_report_names_the_file_that_is_damaged(name: str, how: str, damaged: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read_summary(damaged(name, how))
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


def test_trials_that_a_summary_speaks_of_must_be_there(damaged: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"trials\.jsonl .*trial 0.*summary\.json"):
        read_summary(damaged("trials.jsonl", "emptied"))


def test_a_file_that_is_far_too_large_is_not_read(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    os.truncate(run_dir / "summary.json", 2**30)
    with pytest.raises(ConfigError, match=r"summary\.json.*512 MiB"):
        read_summary(run_dir)


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_study_is_told_by_both_that_need_it(how: str, damaged: Callable[[str, str], Path]) -> None:
    run_dir = damaged("study.db", how)
    for use in (autotune.open_run, search):
        with pytest.raises(RunFolderError, match=r"study\.db.* SQLite"):
            use(run_dir)


@pytest.mark.parametrize("how", ["emptied", "other text", "later version"])
def test_a_search_that_is_over_mends_its_trials_from_the_study_and_says_so(
    how: str, whole: Path, damaged: Callable[[str, str], Path]
) -> None:
    result = search(run_dir := damaged("trials.jsonl", how))
    (told,) = notes_of(result)
    assert (told.code, told.figures["name"]) == ("file_damaged", "trials.jsonl")
    assert (run_dir / "trials.jsonl").read_bytes() == (whole / "trials.jsonl").read_bytes()
    assert notes_of(search(run_dir)) == []


def test_a_search_whose_summary_is_damaged_goes_on_and_says_so(damaged: Callable[[str, str], Path]) -> None:
    result = search(damaged("summary.json", "noise"))
    (told,) = notes_of(result)
    assert (told.code, told.figures["name"]) == ("file_damaged", "summary.json")
    assert len(result.trials) == 3


def test_trials_that_are_lost_with_the_study_are_told(damaged: Callable[[str, str], Path]) -> None:
    run_dir = damaged("study.db", "emptied")
    (run_dir / "study.db-wal").unlink(missing_ok=True)
    lost = (run_dir / "trials.jsonl").read_bytes()
    (told,) = notes_of(search(run_dir))
    assert told == trials_lost(count=3, kept="trials.lost.jsonl")
    assert (run_dir / "trials.lost.jsonl").read_bytes() == lost


def test_damaged_curves_are_measured_anew_and_told(damaged: Callable[[str, str], Path]) -> None:
    folder = RunFolder(damaged("curves.json", "noise"))
    found = folder.read_curves()
    assert found is not None
    assert found.code == "file_damaged"  # type: ignore[union-attr]
    folder.curves.unlink()
    assert folder.read_curves() is None


def test_an_export_says_that_a_damaged_summary_could_not_name_the_optimizer(
    damaged: Callable[[str, str], Path],
) -> None:
    with pytest.warns(UserWarning, match=r"optimizer.*summary\.json"):
        export_run(damaged("summary.json", "noise"), "hf")
