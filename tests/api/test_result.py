"""A result that is opened again is the one that the search has returned."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune import SearchResult
from autotune.errors import ConfigError, NothingFeasibleError, RunFolderError
from autotune.testing import FakeTrial
from tests.factories.searches import fake_search


def search(run_dir: Path, **arguments: Any) -> SearchResult:
    return fake_search(run_dir.parent, run_dir=run_dir, **{"n_trials": 4, **arguments})


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A search that has ended, whose folder stays as it is."""
    found = search(tmp_path_factory.mktemp("ended") / "run")
    gc.collect()
    return found


@pytest.fixture
def run_dir(ended: SearchResult, tmp_path: Path) -> Path:
    """A copy of its folder."""
    return Path(shutil.copytree(ended.run_dir, tmp_path / "run"))


def test_a_run_is_opened_again_as_it_ended(ended: SearchResult) -> None:
    found = ended
    again = autotune.open_run(str(found.run_dir))
    for field in fields(found):
        if field.name != "study":
            assert getattr(again, field.name) == getattr(found, field.name), field.name
    assert again.report() == found.report()
    assert again.study.best_trial.number == found.study.best_trial.number
    assert len(again.study.trials) == len(found.study.trials)


def test_a_result_keeps_no_file_open_and_its_study_opens_again(tmp_path: Path) -> None:
    found = search(tmp_path / "run")
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if link.readlink().is_relative_to(tmp_path)]
    assert not list((tmp_path / "run").glob("study.db-*"))
    assert len(found.study.trials) >= len(found.trials) == 4
    found.study.set_user_attr("noted", True)
    assert autotune.open_run(tmp_path / "run").study.user_attrs["noted"]


def test_a_run_that_was_moved_elsewhere_is_opened_there(run_dir: Path) -> None:
    assert autotune.open_run(run_dir).run_dir == run_dir


def test_read_only_run_is_opened(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = autotune.open_run(run_dir)
    found.study.set_user_attr(
        "noted", "later"
    )  # opens the study again: this lies in its log, as a kill leaves it
    values = [trial.values for trial in found.study.trials]
    files = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    assert files["study.db-wal"]
    monkeypatch.setattr(
        os, "access", lambda *_: False
    )  # the file system's own answer: root may write anywhere
    again = autotune.open_run(run_dir)
    assert [trial.values for trial in again.study.trials] == values
    assert again.study.user_attrs["noted"] == "later"
    again.study.set_user_attr("changed", True)
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == files
    backend = again.study._storage._backend  # type: ignore[attr-defined]
    folder = Path(str(backend.engine.url.database).removeprefix("file:")).parent
    assert folder.is_dir()
    del again, backend
    gc.collect()
    assert not folder.exists()


def test_a_file_that_is_no_database_and_can_not_be_written_leaves_no_copy(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "study.db").write_bytes(b"no database")
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RunFolderError, match="SQLite"):
        autotune.open_run(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"summary\.json"):
        autotune.open_run(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is made there"


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "must hold study.db"), (b"no database", "SQLite"), (b"", "one study")],
)
def test_a_study_that_is_lost_is_told(content: bytes | None, says: str, run_dir: Path) -> None:
    for path in run_dir.glob("study.db*"):
        path.unlink()
    if content is not None:
        (run_dir / "study.db").write_bytes(content)
    with pytest.raises(RunFolderError, match=says):
        autotune.open_run(run_dir)


def test_a_search_that_found_nothing_feasible_says_so_again(tmp_path: Path) -> None:
    with pytest.raises(NothingFeasibleError) as first:
        search(
            tmp_path / "run", cost=lambda _: FakeTrial(samples_per_s=100.0, peak_memory_bytes=2**60)
        )
    with pytest.raises(NothingFeasibleError) as again:
        autotune.open_run(tmp_path / "run")
    assert str(again.value) == str(first.value)
