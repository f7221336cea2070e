from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

import autotune
from autotune.errors import ConfigError, RunFolderError
from autotune.files.run_folder import RunFolder, new_run_dir, open_run_folder, read_summary
from autotune.protocol.disk import TrialFolder
from autotune.testing import FakeLauncher
from tests.factories.searches import fake_search
from tests.protocol.journals import write_journal


def test_fresh_removes_only_our_files(tmp_path: Path) -> None:
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


def test_mode_of_existing_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with open_run_folder(tmp_path, fresh=False):
        pass
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_leftovers_are_removed(tmp_path: Path) -> None:
    (tmp_path / "payload").mkdir()
    (tmp_path / "payload" / "bytes").write_bytes(b"x" * 100)
    (checkpoint := tmp_path / "last.pt").touch()
    write_journal(TrialFolder(tmp_path / "scratch" / "trial-0").overlay, checkpoint)
    with open_run_folder(tmp_path, fresh=False) as folder:
        assert not folder.payload.exists()
        assert folder.scratch.is_dir()
        assert not checkpoint.exists(), "the script's, made in the trial that was killed"
    assert not RunFolder(tmp_path).scratch.exists()


def test_only_unfinished_files_are_removed(tmp_path: Path) -> None:
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


def test_new_folders_of_one_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    monkeypatch.setattr("autotune.files.run_folder.datetime", clock)
    monkeypatch.chdir(tmp_path)
    first = new_run_dir()
    first.mkdir(parents=True)
    assert new_run_dir() != first


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"summary\.json"):
        read_summary(tmp_path)


@pytest.fixture
def small_disk(disk_of: Callable[[str], Path]) -> Path:
    """A real file system of 300 KiB."""
    return disk_of("300k")


def test_full_disk(small_disk: Path) -> None:
    with pytest.raises(RunFolderError, match=str(small_disk)) as caught:
        fake_search(small_disk, n_trials=40)
    assert "\n" not in str(caught.value)
    assert not (small_disk / "run" / "recommended.yaml").exists()
    assert not (small_disk / "run" / "payload").exists()


def test_payload_does_not_fit(small_disk: Path) -> None:
    with pytest.raises(RunFolderError, match=f"{os.strerror(errno.ENOSPC)}.*run_dir"):
        autotune.search(
            bytes(10_000_000),
            list,
            launcher=FakeLauncher(),
            run_dir=small_disk / "run",
            progress=False,
        )
    assert not (small_disk / "run" / "payload").exists()


def test_temporary_files_do_not_fit(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with pytest.raises(RunFolderError, match=f"{os.strerror(errno.ENOSPC)}.*TMPDIR"):
        autotune.diagnose(bytes(10_000_000), list, launcher=FakeLauncher(), progress=False)


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run = fake_search(tmp_path, n_trials=2, run_dir=tmp_path / "runs" / "one")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) & 0o077
        for path in [run.run_dir, *run.run_dir.rglob("*")]
    }
    assert set(modes.values()) == {0}, modes


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("study.db", True),
        (".lock", True),
        ("logs", True),
        ("payload", False),
        (".holder", False),
        ("study.db-wal", False),
        ("summary.json", False),
    ],
)
def test_no_write_follows_a_link(tmp_path: Path, name: str, is_refused: bool) -> None:
    """Files that each search makes again replace a link; others refuse it."""
    outside = tmp_path / "outside"
    is_folder = name in {"logs", "payload"}
    outside.mkdir() if is_folder else outside.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(outside)
    with pytest.raises(RunFolderError, match=name) if is_refused else nullcontext():
        fake_search(tmp_path, n_trials=2)
    if is_folder:
        assert not list(outside.iterdir())
    else:
        assert outside.read_text() == "mine"


def test_linked_study(tmp_path: Path) -> None:
    run = fake_search(tmp_path, n_trials=2).run_dir
    (run / "study.db").rename(tmp_path / "elsewhere.db")
    (run / "study.db").symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(RunFolderError, match=r"study\.db is a link"):
        autotune.open_run(run)


def test_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert fake_search(tmp_path, n_trials=2).trials
    assert (tmp_path / "disk" / "recommended.yaml").is_file()


def test_any_name(tmp_path: Path) -> None:
    name = "a?b=c {SCHEMA_VERSION} {a} 100%20 a#b;c&d größe\n"  # means something to addresses, templates, shells
    run = fake_search(tmp_path, n_trials=2, run_dir=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "study.db").is_file()
    assert len(run.study.trials) == 2
