"""Name a folder for compiled code that only its user can have filled."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from runpy import run_path

import pytest
import torch
from torch import nn

from autotune.apply import cores
from autotune.apply.cores import compile_cache_variables
from autotune.config.training_config import TrainingConfig

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of compiled code, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is undone
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "home" / "autotune" / "inductor"


def test_folder_is_private(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        variables = compile_cache_variables()
    finally:
        os.umask(before)
    assert Path(variables[VARIABLE]).parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    monkeypatch.setenv(VARIABLE, variables[VARIABLE])  # as a child process inherits it
    assert compile_cache_variables() == variables


def test_folder_of_the_user_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(Path(tempfile.gettempdir(), "torchinductor_of_a_project")))
    assert compile_cache_variables() == {}
    assert not cache.exists()


def test_default_of_torch_is_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    usual = run_path(str(source))[
        "default_cache_dir"
    ]  # by its file: importing its package takes seconds
    monkeypatch.setenv(VARIABLE, usual())
    assert Path(compile_cache_variables()[VARIABLE]).parent == cache


def test_folder_of_doubtful_owner(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile_cache_variables() != {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
        assert compile_cache_variables() == {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # a read-only disk; root may write anywhere
        assert compile_cache_variables() == {}
    cache.chmod(0o770)
    assert compile_cache_variables() == {}
    cache.chmod(0o700)
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    assert compile_cache_variables() == {}


def test_no_folder_can_be_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: str) -> Path:
        raise RuntimeError("Could not determine home directory")

    cache.parent.parent.touch()
    assert compile_cache_variables() == {}
    for home in (no_home, lambda _: Path("~/.cache/autotune")):
        monkeypatch.setattr(cores, "user_cache_path", home)
        assert compile_cache_variables() == {}


@pytest.mark.usefixtures("cache")
def test_processors_share_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_cache_variables()
    monkeypatch.setattr(cores, "cpuinfo", lambda *_: "fpu sse2")
    assert compile_cache_variables() != here


@pytest.mark.usefixtures("cache")
def test_prepare_sets_it_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(model: nn.Module, **_: str) -> nn.Module:
        assert {VARIABLE: os.environ[VARIABLE]} == compile_cache_variables()
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    TrainingConfig().prepare(nn.Linear(2, 2), "cpu")
    assert VARIABLE not in os.environ
    TrainingConfig(compile=True).prepare(nn.Linear(2, 2), "cpu")
    assert VARIABLE in os.environ
