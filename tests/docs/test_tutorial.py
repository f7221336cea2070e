"""docs/tutorial.md: its training script runs, and its commands and its pages' words are those of this version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import cli
from tests.factories.searches import fake_search

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_its_script_trains_with_what_was_recommended(tmp_path: Path) -> None:
    (script,) = blocks("python")
    workloads = tmp_path / "configs" / "workloads"
    workloads.mkdir(parents=True)
    photos = (ROOT / "configs" / "workloads" / "photos.py").read_text()
    assert "COUNT = 512\n" in photos
    (workloads / "photos.py").write_text(photos.replace("COUNT = 512\n", "COUNT = 16\n"))
    space = {
        "amp_dtype": "bfloat16",
        "num_workers": [0, 2],
        "pin_memory": False,
        "micro_batch_size": 32,
    }
    fake_search(tmp_path, space=space, n_trials=2, run_dir=tmp_path / "runs" / "quickstart")
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    epoch = r"epoch \d: loss \d\.\d{3}, [\d,]+ samples/s\n"
    assert re.fullmatch(f"({epoch}){{3}}", done.stdout)


def test_its_commands_are_those_of_the_command_line() -> None:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    commands = [line.split() for line in lines if line.startswith("autotune")]
    assert {command[1] for command in commands} == {"check", "diagnose", "run"}
    assert {command[1] for command in commands} <= set(cli.commands)
    assert all((ROOT / command[2]).is_file() for command in commands)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_its_first_command_is_a_target_of_the_makefile() -> None:
    command, *_ = blocks("console")[0].splitlines()
    assert command == "make setup"
    assert (
        subprocess.run(
            [*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, check=False
        ).returncode
        == 0
    )
