from __future__ import annotations

from pathlib import Path

import pytest

from autotune.files.source_files import source_digest
from autotune.settings.workload import Ref


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A script that imports a neighbour, which imports a package of its own."""
    (tmp_path / "train.py").write_text("import torch\nfrom data import Photos\ndef build(): return Photos()")
    (tmp_path / "data.py").write_text("def load():\n    from lib.deep import reading\nclass Photos: pass")
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / "deep" / "__init__.py").write_text("from . import reading")
    (tmp_path / "lib" / "deep" / "reading.py").write_text("from ..other import wait")
    (tmp_path / "lib" / "other.py").write_text("def wait(): pass")
    (tmp_path / "unused.py").write_text("a = 1")
    return tmp_path


def digest(folder: Path, target: str = "train.py:build") -> str:
    found = source_digest(Ref(target=target, folders=(str(folder),)))
    assert found.is_complete
    return found.digest


@pytest.mark.parametrize("target", ["train.py:build", "train:build"])
@pytest.mark.parametrize("name", ["train.py", "data.py", "lib/deep/__init__.py", "lib/deep/reading.py", "lib/other.py"])
def test_each_file_that_a_reference_leads_to_counts(project: Path, name: str, target: str) -> None:
    before = digest(project, target)
    assert before == digest(project, target) != ""
    (project / name).write_text((project / name).read_text() + "\nchanged = 1")
    assert digest(project, target) != before


def test_other_files_do_not_count(project: Path) -> None:
    before = digest(project)
    (project / "unused.py").write_text("a = 2")
    assert digest(project) == before


def test_installed_packages_count_by_their_name(project: Path) -> None:
    assert digest(project, "torch.nn:Linear") == ""
    assert digest(project, "no_such_module_anywhere:f") == ""


@pytest.mark.parametrize("content", [b"def f(:", b"\x00", b"\xff\xfe", b"", b"(" * 5000])
def test_what_is_no_python_is_read_all_the_same(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.py").write_bytes(content)
    assert digest(tmp_path) != ""


def test_files_that_import_each_other_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b")
    (tmp_path / "b.py").write_text("import a")
    assert digest(tmp_path, "a.py:f") != digest(tmp_path, "b.py:f")


def test_too_many_files_are_said_to_be_too_many(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(600)]
    (tmp_path / "train.py").write_text("\n".join(f"import {name}" for name in names))
    for name in names:
        (tmp_path / f"{name}.py").touch()
    assert not source_digest(Ref(target="train.py:f", folders=(str(tmp_path),))).is_complete
