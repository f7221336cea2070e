"""A script's variables set torch's threads, though torch was imported before the script."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from autotune.worker.script.overrides import follow_variables


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    threads, plain = torch.get_num_threads(), builtins.__import__
    torch.set_num_threads(2)
    follow_variables()
    yield
    builtins.__import__ = plain
    torch.set_num_threads(threads)


def run(code: str) -> None:
    """A script's lines."""
    exec(code, ModuleType("__main__").__dict__)


def test_variable_set_before_the_import_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run("from torch import nn")
    assert torch.get_num_threads() == 3


def test_variable_set_later_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run("import torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run("import torch.nn")
    assert torch.get_num_threads() == 2


def test_other_imports_need_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a thread that runs `__import__` itself."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "_getframe", None)
        run("import builtins")


@pytest.mark.parametrize("value", ["", "two", "0", "3,1"])
def test_no_number_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    run("import torch")
    assert torch.get_num_threads() == 2
