"""Compiled code is taken from a folder that nobody else can have filled, and kept where nobody else can read it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from autotune.settings.applied.compiled_code import own_torch_cache, sealed
from autotune.worker.setup import compile_cache
from autotune.worker.setup.compile_cache import keep_compiled, keep_compiled_code_private

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
NAME = "key.bin"


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


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("kind", ["writable", "a link", "a file"])
def test_a_folder_that_others_may_have_filled_is_not_used(
    usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_named: bool
) -> None:
    """Nor where torch has named it in the environment, as it does once it has compiled."""
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
    if is_named:
        monkeypatch.setenv(VARIABLE, str(usual))
    assert own_torch_cache() is None
    keep_compiled_code_private(tmp_path / "scratch")
    assert os.environ[VARIABLE] == str(tmp_path / "scratch" / "compiled")


def test_a_folder_that_the_user_has_named_stays(usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mine")
    keep_compiled_code_private(tmp_path)
    assert os.environ[VARIABLE] == "mine"
    assert not usual.exists()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The user's folder of compiled code, which is not there yet."""
    return tmp_path / "compiled"


def keep(cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None = b"code", name: str = NAME) -> bool:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: content if content is None else (content, None))
    return keep_compiled(cache / name)


def test_what_is_kept_is_for_its_user_alone_and_one_file_for_the_same_settings(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keep(cache, monkeypatch)
    assert keep(cache, monkeypatch, b"anew")
    (file,) = cache.iterdir()
    assert (stat.S_IMODE(cache.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o600)
    assert file.read_bytes() == sealed(b"anew")


def test_a_folder_that_others_could_write_is_closed_to_them(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert keep(cache, monkeypatch)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_the_latest_files_stay_within_their_bytes_and_what_a_killed_search_left_goes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(sealed(b"code"))
    monkeypatch.setattr(compile_cache, "_MOST_BYTES", 3 * size)
    cache.mkdir(parents=True)
    (cache / f".half.bin.{2**22 + 1}").touch()
    for number in range(1, 6):
        assert keep(cache, monkeypatch, name=f"{number}.bin")
        os.utime(cache / f"{number}.bin", (number, number))
    left = {file.stat().st_mtime for file in cache.iterdir()}
    assert left == {3, 4, 5}


def test_what_is_too_large_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "_MOST_OF_ONE_BYTES", 3)
    assert not keep(cache, monkeypatch)
    assert not cache.exists()


def test_where_nothing_was_compiled_nothing_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not keep(cache, monkeypatch, None)
    assert not cache.exists()


def test_what_can_not_be_kept_ends_no_search(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.touch()
    assert not keep(cache, monkeypatch)
    assert not keep_compiled(None)
