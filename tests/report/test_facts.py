"""The run folder's files; machine, workload and run in words are golden files."""

from __future__ import annotations

from pathlib import Path

from autotune.report.sections import list_files


def test_patch_is_listed_if_it_exists(tmp_path: Path) -> None:
    assert "recommended.patch" not in list_files(tmp_path)
    (tmp_path / "recommended.patch").touch()
    assert list_files(tmp_path).keys() == {"recommended.patch"}
