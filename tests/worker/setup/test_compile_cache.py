"""Compiled code is taken from a folder that nobody else can have filled."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from autotune.worker.setup.compile_cache import keep_compiled_code_private

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's own folder, in a temporary folder of this test's."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return Path(default_cache_dir())


def test_torchs_own_folder_is_made_for_its_user_alone(usual: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keep_compiled_code_private(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("kind", ["writable", "a link", "a file"])
def test_a_folder_that_others_may_have_filled_is_not_used(
    usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "writable":
        usual.mkdir()
        usual.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "theirs").mkdir()
        usual.symlink_to(tmp_path / "theirs")
    else:
        usual.touch()
    monkeypatch.setenv(VARIABLE, "")  # so that what is set here is undone
    monkeypatch.delenv(VARIABLE)
    keep_compiled_code_private(tmp_path / "scratch")
    assert os.environ[VARIABLE] == str(tmp_path / "scratch" / "compiled")


def test_a_folder_that_the_user_has_named_stays(usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mine")
    keep_compiled_code_private(tmp_path)
    assert os.environ[VARIABLE] == "mine"
    assert not usual.exists()
