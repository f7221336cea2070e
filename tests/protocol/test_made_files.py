"""What a journal names is removed, and nothing else; how it comes to be written: test_protection."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.protocol import disk
from autotune.protocol.disk import list_names, remove_made
from tests.protocol.journals import write_journal


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "made"
    path.mkdir()
    (path / "log").touch()
    return path


def test_what_a_journal_names_is_removed_and_its_garbage_passed_over(
    made: Path, tmp_path: Path
) -> None:
    write_journal(tmp_path / "overlay", made, made / "log")
    with (tmp_path / "overlay/journal").open("ab") as journal:
        journal.write(
            b'\xff\n[]\n7\n["new"]\n["moved", "/etc"]\n["unmap", "/etc"]\n["new", "/etc/pa'
        )
    assert remove_made(tmp_path / "overlay") == ()
    assert not made.exists()


def test_of_a_link_the_link_is_removed(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made)
    write_journal(tmp_path / "overlay", tmp_path / "link")
    assert remove_made(tmp_path / "overlay") == ()
    assert [*made.iterdir()] == [made / "log"]
    assert not (tmp_path / "link").is_symlink()


def test_another_file_of_the_same_name_stays_in_a_folder_that_was_made_too(
    made: Path, tmp_path: Path
) -> None:
    """A checkpoint that another training has put there by a rename."""
    write_journal(tmp_path / "overlay", made, made / "log")
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "other").replace(made / "log")
    assert remove_made(tmp_path / "overlay") == (str(made / "log"),)
    assert (made / "log").read_text() == "theirs"


def test_a_file_that_was_moved_into_a_folder_that_was_made_stays(
    made: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("the only copy")
    os.utime(tmp_path / "data", (1, 1))
    write_journal(tmp_path / "overlay", made, made / "log")
    (tmp_path / "data").replace(made / "data")
    (made / "written natively").touch()
    assert remove_made(tmp_path / "overlay") == (str(made / "data"),)
    assert [path.name for path in made.iterdir()] == ["data"]


def test_long_after_the_end_what_has_changed_since_stays(made: Path, tmp_path: Path) -> None:
    """After a search that was killed its user has trained: into the same folder, and into the same file."""
    (made / "metrics").touch()
    write_journal(tmp_path / "overlay", made, made / "log", made / "metrics")
    ended_ns = (tmp_path / "overlay/journal").stat().st_mtime_ns
    later = (ended_ns + 10**9,) * 2
    for name in ("metrics", "epoch-9"):
        (made / name).write_text("of the user's own training")
        os.utime(made / name, ns=later)
    left = remove_made(tmp_path / "overlay", until_ns=ended_ns)
    assert left == (str(made / "epoch-9"), str(made / "metrics"))
    assert {path.name for path in made.iterdir()} == {"epoch-9", "metrics"}


def test_another_file_of_the_same_name_stays(made: Path, tmp_path: Path) -> None:
    write_journal(tmp_path / "overlay", made / "log")
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "other").replace(made / "log")
    assert remove_made(tmp_path / "overlay") == (str(made / "log"),)
    assert (made / "log").read_text() == "theirs"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove whatever its folder's mode")
def test_what_may_not_be_removed_is_named(made: Path, tmp_path: Path) -> None:
    write_journal(tmp_path / "overlay", made / "log")
    made.chmod(0o500)
    assert remove_made(tmp_path / "overlay") == (str(made / "log"),)


def test_without_a_journal_or_with_a_copied_one_nothing_is_removed(
    made: Path, tmp_path: Path
) -> None:
    assert remove_made(tmp_path / "overlay") == ()
    write_journal(tmp_path / "overlay", made / "log")
    copied = (tmp_path / "overlay/journal").read_bytes()
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied/journal").write_bytes(copied)
    assert remove_made(tmp_path / "copied") == ()
    assert (made / "log").exists()


def test_a_users_older_file_is_not_taken_for_that_of_a_database(tmp_path: Path) -> None:
    for name in ("training-journal", "new.db-wal"):
        (tmp_path / name).write_text("mine")
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "training").write_text("a log")
    (tmp_path / "new.db").write_bytes(b"SQLite format 3\0")
    write_journal(tmp_path / "overlay", tmp_path / "training", tmp_path / "new.db")
    (tmp_path / "training-wal").write_text("younger, and of no database")
    (tmp_path / "new.db-shm").touch()
    assert remove_made(tmp_path / "overlay") == ()
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {"training-journal", "new.db-wal", "training-wal"}


def test_of_what_is_kept_only_the_lock_of_a_build_is_removed(tmp_path: Path) -> None:
    """A trial was killed while torch compiled an extension: every later training would wait for that file."""
    cache = tmp_path / "torch_extensions/py311_cpu/shm"
    cache.mkdir(parents=True)
    (cache / "lock").touch()
    (cache / "build.ninja").touch()
    write_journal(tmp_path / "overlay", cache / "lock", cache / "build.ninja", kind="kept")
    assert remove_made(tmp_path / "overlay") == ()
    assert [path.name for path in cache.iterdir()] == ["build.ninja"]


def test_what_appears_in_a_folder_and_in_those_right_in_it_is_told(
    made: Path, tmp_path: Path
) -> None:
    """HDF5 and programs that are not Python write past the journal; a download is kept on purpose."""
    (made / "out").mkdir()
    before = list_names(made)
    for new in ("out/results.h5", "download", "__pycache__"):
        (made / new).touch()
    write_journal(tmp_path / "overlay", made / "download", kind="kept")
    assert remove_made(tmp_path / "overlay", before=before) == (f"{made}/out/results.h5",)
    (made / "log").rename(made / "log.1")
    assert remove_made(tmp_path / "overlay", before=before) == (
        f"{made}/log.1",
        f"{made}/out/results.h5",
    )
    for path in (made / "out/results.h5", made / "out"):
        path.unlink() if path.is_file() else path.rmdir()
    assert remove_made(tmp_path / "overlay", before=before) == (f"{made}/log.1",)


def test_a_folder_of_very_many_files_is_not_looked_at(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made / "data").mkdir()
    for number in range(4):
        (made / f"data/{number}").touch()
    monkeypatch.setattr(disk, "_MOST_NAMES", 4)
    assert list_names(made) == {str(made): {"data", "log"}, f"{made}/data": {"0", "1", "2", "3"}}
    (made / "data/4").touch()
    assert list_names(made) == {str(made): {"data", "log"}}
    assert list_names(made / "none") == {}
