"""A kill or a power cut costs a search no trial that has ended, and no file that people use."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from optuna.storages import RDBStorage

import autotune
from autotune.api import commands as reporting
from autotune.api import search as searching
from autotune.files import run_folder
from autotune.launch.launcher import Exit, Launch
from autotune.protocol.disk import write_atomic
from autotune.testing import FakeLauncher
from autotune.tuning import study as storage
from tests.factories.searches import fake_search

FULL = storage._SYNCHRONOUS


class Killed(BaseException):
    """Stands for a kill: nobody handles it."""


def search(tmp_path: Path, launcher: FakeLauncher) -> autotune.SearchResult:
    return fake_search(tmp_path, n_trials=4, method="random", launcher=launcher)


@pytest.mark.parametrize("name", ["recommended.yaml", "summary.json", "report.html"])
def test_killed_while_writing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> None:
        if path.name == name:
            raise Killed
        write_atomic(path, data)

    with monkeypatch.context() as patched:
        for module in (searching, reporting, run_folder):
            patched.setattr(module, "write_atomic", write)
        with pytest.raises(Killed):
            search(tmp_path, FakeLauncher())
    result = search(tmp_path, FakeLauncher())
    assert [trial.number for trial in result.trials] == [0, 1, 2, 3]
    assert autotune.load(result.run_dir / "recommended.yaml") == result.best
    for written in ("summary.json", "environment.json", "report.md", "report.html"):
        assert (result.run_dir / written).stat().st_size > 0


def test_trials_jsonl_is_completed(tmp_path: Path) -> None:
    result = search(tmp_path, FakeLauncher())
    file = result.run_dir / "trials.jsonl"
    whole = file.read_bytes()
    first, *_, last = whole.splitlines(keepends=True)
    for damaged in (first, whole + last, b""):
        file.write_bytes(damaged)
        search(tmp_path, FakeLauncher())
        assert file.read_bytes() == whole


@dataclass(slots=True)
class CountingLauncher(FakeLauncher):
    """Count the records that another process would find in the study before each trial."""

    study: Path = Path()
    found: list[int] = field(default_factory=list)

    def launch(self, launch: Launch) -> Exit:
        if launch.log.stem.removeprefix("trial-").isdecimal():
            with closing(sqlite3.connect(self.study)) as connection:
                query = "SELECT count(*) FROM trial_user_attributes WHERE key = 'autotune_record'"
                self.found += connection.execute(query).fetchone()
        return FakeLauncher.launch(self, launch)


def test_a_trial_that_has_ended_is_committed_before_the_next_one_begins(tmp_path: Path) -> None:
    launcher = CountingLauncher(study=tmp_path / "run" / "study.db")
    search(tmp_path, launcher)
    assert launcher.found == [0, 1, 2, 3]


def test_each_connection_waits_for_the_disk_at_each_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_SYNCHRONOUS", FULL)  # tests turn it off
    opened = storage.open_storage(tmp_path / "study.db")
    assert isinstance(opened, RDBStorage)
    with opened.engine.connect() as first, opened.engine.connect() as second:
        for connection in (first, second):
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
