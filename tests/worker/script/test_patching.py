"""An act that waits for a module happens once, when the module is whole, and leaves the module as any other."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from autotune.worker.script.patching import after_import


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that nobody has imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "awaited_module.py").write_text("VALUE = 1\nLOADER = __spec__.loader\n")
    yield "awaited_module"
    sys.modules.pop("awaited_module", None)


def test_act_happens_once_on_the_whole_module(name: str) -> None:
    seen: list[int] = []
    after_import(name, lambda module: seen.append(module.VALUE))
    assert seen == []
    module = importlib.import_module(name)
    importlib.import_module(name)
    importlib.reload(module)
    assert seen == [1]
    assert module.LOADER is module.__loader__
    assert type(module.__loader__).__name__ == "SourceFileLoader"


def test_imported_module_is_acted_on_at_once() -> None:
    seen: list[ModuleType] = []
    after_import("json", seen.append)
    assert seen == [json]


def test_finding_is_not_importing(name: str) -> None:
    seen: list[str] = []
    after_import(name, lambda module: seen.append(module.__name__))
    assert importlib.util.find_spec(name) is not None
    assert seen == []
    importlib.import_module(name)
    assert seen == [name]


def test_two_acts_for_one_module(name: str) -> None:
    seen: list[str] = []
    after_import(name, lambda _: seen.append("first"))
    after_import(name, lambda _: seen.append("second"))
    importlib.import_module(name)
    assert sorted(seen) == ["first", "second"]


def test_missing_module(name: str) -> None:
    after_import("no_such_module_at_all", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")


def test_failed_import_can_be_repeated(name: str, tmp_path: Path) -> None:
    seen: list[str] = []
    (tmp_path / "awaited_module.py").write_text("1 / 0\n")
    after_import(name, lambda module: seen.append(module.__name__))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(name)
    (tmp_path / "awaited_module.py").write_text("VALUE = 1  # mended\n")
    importlib.invalidate_caches()
    importlib.import_module(name)
    assert seen == [name]
