"""What a journal names is removed, and nothing else; how it comes to be written: test_protection."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.protocol.made_files import remove_made
from tests.protocol.journals import write_journal


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "made"
    path.mkdir()
    (path / "log").touch()
    return path


def test_what_a_journal_names_is_removed_and_its_garbage_passed_over(made: Path, tmp_path: Path) -> None:
    write_journal(tmp_path / "overlay", made, made / "log")
    with (tmp_path / "overlay/journal").open("ab") as journal:
        journal.write(b'\xff\n[]\n7\n["new"]\n["unmap", "/etc"]\n["new", "/etc/pa')
    assert remove_made(tmp_path / "overlay") == ()
    assert not made.exists()


def test_of_a_link_the_link_is_removed(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made)
    write_journal(tmp_path / "overlay", tmp_path / "link")
    assert remove_made(tmp_path / "overlay") == ()
    assert [*made.iterdir()] == [made / "log"]
    assert not (tmp_path / "link").is_symlink()


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


def test_without_a_journal_or_with_a_copied_one_nothing_is_removed(made: Path, tmp_path: Path) -> None:
    assert remove_made(tmp_path / "overlay") == ()
    write_journal(tmp_path / "overlay", made / "log")
    copied = (tmp_path / "overlay/journal").read_bytes()
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied/journal").write_bytes(copied)
    assert remove_made(tmp_path / "copied") == ()
    assert (made / "log").exists()
