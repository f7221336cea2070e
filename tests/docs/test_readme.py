"""The README's code runs as it stands: pasted into an unguarded script, in another folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import autotune
from autotune.files.plan_file import read_plan
from tests.factories.searches import fake_search

README = Path(__file__).parents[2] / "README.md"
_TF_DATA = (
    Path(__file__).parents[1] / "integrations" / "tf_data_example.py"
)  # make integrations runs it
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


ALL_LOOPS = """
import os, runpy, sys
for folder in sys.argv[1:]:
    os.chdir(folder)
    runpy.run_path("../loop.py", run_name="__main__")
"""
"""Runs the loop once in each folder, so that torch is imported but once."""


@pytest.mark.slow
def test_first_example(tmp_path: Path) -> None:
    assert "n_trials=6, timeout_s=30" in BLOCKS[0]
    (tmp_path / "example.py").write_text(
        BLOCKS[0].replace("n_trials=6, timeout_s=30", "n_trials=1, timeout_s=6")
    )
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    (found,) = (tmp_path / "runs").glob("*/recommended.yaml")
    assert isinstance(autotune.load(found), autotune.TrainingConfig)


@pytest.mark.slow
def test_own_loop(tmp_path: Path) -> None:
    space = {"amp_dtype": "bfloat16", "num_workers": [0, 2], "pin_memory": False}
    searched = fake_search(tmp_path, space=space, n_trials=2)
    recommended = (searched.run_dir / "recommended.yaml").read_text()
    assert "amp_dtype: bfloat16" in recommended
    folders = [tmp_path / amp_dtype for amp_dtype in ("float32", "bfloat16", "float16")]
    for folder in folders:
        run_dir = folder / "runs" / "quickstart"
        run_dir.mkdir(parents=True)
        text = recommended.replace("amp_dtype: bfloat16", f"amp_dtype: {folder.name}")
        (run_dir / "recommended.yaml").write_text(text)
    (tmp_path / "loop.py").write_text(BLOCKS[1])
    (tmp_path / "all.py").write_text(ALL_LOOPS)
    done = subprocess.run(
        [sys.executable, "all.py", *folders],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_code_on_pages_is_run() -> None:
    shown = [
        block
        for page in sorted(README.parent.glob("docs/*.md"))
        if page.name
        not in {"tutorial.md", "own-objects.md"}  # test_tutorial and tests/integrations run theirs
        for block in re.findall(
            r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL
        )
    ]
    assert shown, "or what is looked for is written in another way"
    run = README.read_text() + _TF_DATA.read_text()
    assert all(block in run for block in shown)


def test_length() -> None:
    assert len(README.read_text().split()) <= 500


def test_yaml_example(tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^```yaml\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    shutil.copytree(
        README.parent / "configs",
        tmp_path / "configs",
        ignore=shutil.ignore_patterns("data", "runs"),
    )
    path = (
        tmp_path / "configs" / "readme-example.yaml"
    )  # the README's example lies beside those that are shipped
    path.write_text(block)
    assert read_plan(path).budget.n_trials == yaml.safe_load(block)["budget"]["n_trials"]
