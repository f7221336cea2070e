"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from autotune.errors import RunFolderError
from autotune.protocol.disk import write_atomic


def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(full_disk: Path) -> None:
    target = full_disk / "report.json"
    write_atomic(target, b"old")
    with pytest.raises(RunFolderError, match=os.strerror(errno.ENOSPC)):
        write_atomic(target, b"y" * 2**18)
    assert target.read_bytes() == b"old"
    assert sorted(one.name for one in full_disk.iterdir()) == ["ballast", "report.json"]


def test_an_atomic_write_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"1")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
