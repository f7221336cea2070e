"""Who may reach what a search writes, under any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.errors import RunFolderError
from autotune.protocol.disk import make_private, refuse_foreign, refuse_unfit, write_atomic


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_folder_is_private_and_others_may_not_write_above_it(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        make_private(tmp_path / "a" / "b" / "c")
        write_atomic(tmp_path / "a" / "b" / "c" / "file", b"")
    assert mode_of(tmp_path / "a" / "b" / "c") == 0o700
    assert mode_of(tmp_path / "a" / "b" / "c" / "file") == 0o600
    assert {mode_of(tmp_path / "a"), mode_of(tmp_path / "a" / "b")} == {0o755 & ~mask}


def test_a_umask_that_locks_the_owner_out_is_refused(tmp_path: Path) -> None:
    with umask(0o777), pytest.raises(RunFolderError, match=r"umask .*0777"):
        refuse_unfit(tmp_path)
    with umask(0o022):
        refuse_unfit(tmp_path)
        assert os.umask(0o022) == 0o022


def test_a_name_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"UTF-8.*xff"):
        refuse_unfit(tmp_path / "a\udcff")


def test_a_new_file_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".report.md.{os.getpid()}").symlink_to(victim)
    write_atomic(tmp_path / "report.md", b"ours")
    assert (victim.read_text(), (tmp_path / "report.md").read_text()) == ("mine", "ours")
    assert not (tmp_path / "report.md").is_symlink()


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(RunFolderError, match=f"belongs to user id {owner}"):
        refuse_foreign(tmp_path)


def test_a_folder_that_anybody_may_write_is_refused(tmp_path: Path) -> None:
    """It keeps its mode: it may be /tmp."""
    for mode in (0o777, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(RunFolderError, match=f"{mode:04o}"):
            refuse_foreign(tmp_path)
        assert mode_of(tmp_path) == mode
    for mode in (0o775, 0o755, 0o700):
        tmp_path.chmod(mode)
        refuse_foreign(tmp_path)
