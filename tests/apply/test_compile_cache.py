"""Trials and the training compile into one folder, which nobody else can have filled."""

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


def test_the_folder_is_made_for_its_user_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        variables = compile_cache_variables()
    finally:
        os.umask(before)
    assert Path(variables[VARIABLE]).parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "name", ["mine", str(Path(tempfile.gettempdir(), "torchinductor_of_a_project"))]
)
def test_a_folder_that_the_user_has_named_stays(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    assert compile_cache_variables() == {}
    assert not cache.exists()


def test_what_torch_has_named_by_itself_is_not_the_users(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    usual = run_path(str(source))[
        "default_cache_dir"
    ]  # by its file: importing its package takes seconds
    monkeypatch.setenv(VARIABLE, usual())
    assert Path(compile_cache_variables()[VARIABLE]).parent == cache


def test_a_process_below_another_one_has_the_same_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = compile_cache_variables()
    monkeypatch.setenv(VARIABLE, above[VARIABLE])
    assert compile_cache_variables() == above


@pytest.mark.parametrize("how", ["writable", "a link", "another user's"])
def test_a_folder_that_others_may_have_filled_is_not_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    assert compile_cache_variables() != {}
    if how == "writable":
        cache.chmod(0o770)
    elif how == "a link":
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    assert compile_cache_variables() == {}


@pytest.mark.parametrize(
    "why", ["it can't be made", "the disk is read-only", "no home", "no home, of old"]
)
def test_without_a_folder_that_can_be_used_torch_keeps_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def no_home(_: str) -> Path:
        raise RuntimeError("Could not determine home directory")

    def unresolved_home(_: str) -> Path:
        return Path("~/.cache/autotune")

    if why == "it can't be made":
        cache.parent.parent.touch()
    elif why == "the disk is read-only":
        monkeypatch.setattr(
            os, "access", lambda *_: False
        )  # root, as whom tests may run, may write everywhere else
    elif why == "no home":
        monkeypatch.setattr(cores, "user_cache_path", no_home)
    else:
        monkeypatch.setattr(cores, "user_cache_path", unresolved_home)
    assert compile_cache_variables() == {}


@pytest.mark.usefixtures("cache")
def test_unlike_processors_that_share_a_home_share_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_cache_variables()
    monkeypatch.setattr(cores, "cpuinfo", lambda *_: "fpu sse2")
    assert compile_cache_variables() != here


@pytest.mark.usefixtures("cache")
def test_prepare_names_it_where_the_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(model: nn.Module, **_: str) -> nn.Module:
        assert {VARIABLE: os.environ[VARIABLE]} == compile_cache_variables()
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    TrainingConfig().prepare(nn.Linear(2, 2), "cpu")
    assert VARIABLE not in os.environ
    TrainingConfig(compile=True).prepare(nn.Linear(2, 2), "cpu")
    assert VARIABLE in os.environ
