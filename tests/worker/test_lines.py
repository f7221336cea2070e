"""The user's code is told from libraries, and its lines are written in one way."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from autotune.worker import modes
from autotune.worker.lines import is_users, shown_line


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("/home/me/autotune_tests/train.py", True),
        ("<string>", False),
        (json.__file__, False),
        (modes.__file__, False),
        (f"{sysconfig.get_path('purelib')}/lightning/trainer.py", False),
    ],
)
def test_whose_code_runs(file: str, expected: bool) -> None:
    assert is_users(file) is expected


def test_files_below_the_working_folder_are_shown_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_line(str(tmp_path / "pkg" / "train.py"), 41) == f"{Path('pkg/train.py')}:41"
    assert shown_line("train.py", 41) == "train.py:41"
    assert shown_line("/home/me/train.py", 41) == "train.py:41"


def test_a_working_folder_that_is_gone_leaves_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert shown_line("/home/me/train.py", 41) == "train.py:41"
