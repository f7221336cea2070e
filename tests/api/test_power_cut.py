"""What a kill or a power cut may cost a search: never a trial that has ended, nor a file that people use."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import autotune
from autotune.api import report as reporting
from autotune.api import search as searching
from autotune.files import run_folder
from autotune.launch.launcher import Exit, Launch
from autotune.protocol.disk import write_atomic
from autotune.testing import FakeLauncher
from tests.factories.searches import NARROW


class Killed(BaseException):
    """Stands for a kill: nobody handles it."""


def search(tmp_path: Path, launcher: FakeLauncher) -> autotune.SearchResult:
    return autotune.search(
        object,
        list,
        space=NARROW,
        n_trials=4,
        method="random",
        launcher=launcher,
        run_dir=tmp_path / "run",
        progress=False,
    )


@pytest.mark.parametrize("name", ["recommended.yaml", "summary.json", "report.html"])
def test_a_search_that_was_killed_while_it_wrote_its_result_writes_all_of_it_with_the_next_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_trials_that_the_study_alone_holds_are_in_the_list_of_trials_again_once_the_search_goes_on(
    tmp_path: Path,
) -> None:
    result = search(tmp_path, FakeLauncher())
    file = result.run_dir / "trials.jsonl"
    whole = file.read_bytes()
    first, *_, last = whole.splitlines(keepends=True)
    for damaged in (first, whole + last, b""):
        file.write_bytes(damaged)
        search(tmp_path, FakeLauncher())
        assert file.read_bytes() == whole


@dataclass(slots=True)
class WatchingLauncher(FakeLauncher):
    """Notes which files were synced between one trial and the next."""

    synced: set[str] = field(default_factory=set)
    between: list[set[str]] = field(default_factory=list)

    def launch(self, launch: Launch) -> Exit:
        if launch.log.stem.removeprefix("trial-").isdecimal():
            self.between.append(set(self.synced))
            self.synced.clear()
        return FakeLauncher.launch(self, launch)


def test_a_trial_that_has_ended_is_on_the_disk_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, sync = WatchingLauncher(), os.fsync

    def fsync(descriptor: int) -> None:
        launcher.synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    search(tmp_path, launcher)
    assert len(launcher.between) == 4
    for synced in launcher.between[1:]:
        assert {"study.db-wal", "trials.jsonl", "run"} <= synced
