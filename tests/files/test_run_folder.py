from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import autotune
from autotune.errors import ConfigError, RunFolderError
from autotune.files.run_folder import RunFolder, new_run_dir, open_run_folder, read_summary
from autotune.protocol.disk import TrialFolder
from autotune.testing import FakeLauncher
from tests.protocol.journals import write_journal


def test_everything_in_a_run_folder_is_the_users_alone(tmp_path: Path) -> None:
    run = autotune.search(
        object, list, launcher=FakeLauncher(), n_trials=3, run_dir=tmp_path / "run", progress=False
    )
    assert stat.S_IMODE(run.run_dir.stat().st_mode) == 0o700
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in run.run_dir.rglob("*")
    }
    assert set(modes.values()) == {0}, modes


def test_fresh_removes_our_files_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    folder = RunFolder(tmp_path)
    ours = [path for path in vars(folder).values() if path not in {tmp_path, folder.lock}]
    for path in ours:
        path.mkdir() if path in {folder.logs, folder.payload, folder.scratch} else path.write_text(
            "old"
        )
    with open_run_folder(tmp_path, fresh=True):
        pass
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [path for path in ours if path.is_file() and path.read_bytes() == b"old"] == []


def test_a_folder_of_the_users_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with open_run_folder(tmp_path, fresh=False):
        pass
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_leftovers_of_a_killed_search_are_removed(tmp_path: Path) -> None:
    (tmp_path / "payload").mkdir()
    (tmp_path / "payload" / "bytes").write_bytes(b"x" * 100)
    (checkpoint := tmp_path / "last.pt").touch()
    write_journal(TrialFolder(tmp_path / "scratch" / "trial-0").overlay, checkpoint)
    with open_run_folder(tmp_path, fresh=False) as folder:
        assert not folder.payload.exists()
        assert folder.scratch.is_dir()
        assert not checkpoint.exists(), "the script's, made in the trial that was killed"
    assert not RunFolder(tmp_path).scratch.exists()


def test_only_half_written_files_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    half = tmp_path / f".report.md.{dead.pid}"
    kept = [
        tmp_path / name
        for name in (f".report.md.{os.getpid()}", ".notes.md", f"notes.{dead.pid}", ".lock")
    ]
    for path in (half, *kept):
        path.write_text("half")
    with open_run_folder(tmp_path, fresh=False):
        assert not half.exists()
        assert all(path.exists() for path in kept)


def test_new_run_folders_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = new_run_dir()
    first.mkdir(parents=True)
    assert new_run_dir() != first


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"summary\.json"):
        read_summary(tmp_path)


def test_a_summary_that_was_tampered_with_is_told(tmp_path: Path) -> None:
    run = autotune.search(
        object, list, launcher=FakeLauncher(), n_trials=2, run_dir=tmp_path / "run", progress=False
    )
    (run.run_dir / "summary.json").write_text('{"name": 1}')
    with pytest.raises(ConfigError, match=r"summary\.json"):
        read_summary(run.run_dir)


@pytest.fixture
def small_disk(disk_of: Callable[[str], Path]) -> Path:
    """A real file system of 300 KiB."""
    return disk_of("300k")


def test_a_full_disk_is_one_error_and_nothing_is_half_written(small_disk: Path) -> None:
    with pytest.raises(RunFolderError, match=str(small_disk)) as caught:
        autotune.search(
            object,
            list,
            launcher=FakeLauncher(),
            n_trials=40,
            run_dir=small_disk / "run",
            progress=False,
        )
    assert "\n" not in str(caught.value)
    assert not (small_disk / "run" / "recommended.yaml").exists()
    assert not (small_disk / "run" / "payload").exists()


def test_a_payload_that_does_not_fit_is_refused(small_disk: Path) -> None:
    model = bytes(10_000_000)
    with pytest.raises(RunFolderError, match=f"{os.strerror(errno.ENOSPC)}.*run_dir"):
        autotune.search(
            model,
            list,
            launcher=FakeLauncher(),
            n_trials=2,
            run_dir=small_disk / "run",
            progress=False,
        )
    assert not (small_disk / "run" / "payload").exists()


def test_where_temporary_files_do_not_fit_their_folder_is_named(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with pytest.raises(RunFolderError, match=f"{os.strerror(errno.ENOSPC)}.*TMPDIR"):
        autotune.diagnose(bytes(10_000_000), list, launcher=FakeLauncher(), progress=False)


def simulated(run_dir: Path) -> autotune.SearchResult:
    return autotune.search(
        object,
        list,
        launcher=FakeLauncher(),
        n_trials=2,
        method="random",
        run_dir=run_dir,
        progress=False,
    )


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_no_umask_opens_a_run_folder_to_others(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run = simulated(tmp_path / "runs" / "one")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) & 0o077
        for path in [run.run_dir, *run.run_dir.rglob("*")]
    }
    assert set(modes.values()) == {0}, modes


FOLDERS = {"logs", "scratch", "payload"}
REPLACED = {
    "scratch",
    "payload",
    ".holder",
    "study.db-wal",
    "trials.jsonl",
    "report.md",
    "summary.json",
}
"""Made again by each search: a link in their place is removed, not followed."""


@pytest.mark.parametrize("name", ["study.db", ".lock", "logs", *sorted(REPLACED)])
def test_a_link_among_the_names_leads_no_write_out_of_the_folder(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir() if name in FOLDERS else outside.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(outside)
    if name in REPLACED:
        simulated(run)
    else:
        with pytest.raises(RunFolderError, match=name):
            simulated(run)
    assert (list(outside.iterdir()) if name in FOLDERS else outside.read_text()) == (
        [] if name in FOLDERS else "mine"
    )


def test_a_study_that_is_a_link_is_not_opened(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run").run_dir
    (run / "study.db").rename(tmp_path / "elsewhere.db")
    (run / "study.db").symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(RunFolderError, match=r"study\.db is a link"):
        autotune.open_run(run)


def test_a_run_folder_may_itself_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert simulated(tmp_path / "run").trials
    assert (tmp_path / "disk" / "recommended.yaml").is_file()


def test_whatever_a_run_folder_is_called_all_of_it_lies_there(tmp_path: Path) -> None:
    name = "a?b=c {SCHEMA_VERSION} {a} 100%20 a#b;c&d größe\n"  # means something to addresses, templates, shells
    run = simulated(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "study.db").is_file()
    assert len(run.study.trials) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write whatever its mode")
def test_a_study_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.db").touch(mode=0o400)
    with pytest.raises(RunFolderError, match=r"study\.db"), open_run_folder(tmp_path, fresh=False):
        pass
