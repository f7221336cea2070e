"""The README's code runs as it stands: pasted into an unguarded script, in another folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import autotune
from autotune.testing import FakeLauncher

pytestmark = pytest.mark.flaky(reruns=2)  # whole searches under time-outs, on a machine that others share

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_first_example_runs_and_prints_a_report(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(BLOCKS[0])
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    (found,) = (tmp_path / "runs").glob("*/recommended.yaml")
    assert autotune.load(found).num_workers > 0


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16", "float16"])
def test_the_users_own_loop_runs_with_what_was_recommended(tmp_path: Path, amp_dtype: str) -> None:
    run_dir = tmp_path / "runs" / "quickstart"
    space = {"amp_dtype": amp_dtype, "num_workers": [0, 2], "pin_memory": False}
    autotune.search(object, list, space=space, launcher=FakeLauncher(), n_trials=4, run_dir=run_dir, progress=False)
    (tmp_path / "loop.py").write_text(BLOCKS[1])
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_yaml_example_is_a_valid_configuration() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    from autotune.run_config import read_plan

    path = README.parent / "configs" / "readme-example.yaml"
    try:
        path.write_text(block)
        assert read_plan(path).budget.n_trials == yaml.safe_load(block)["budget"]["n_trials"]
    finally:
        path.unlink()
