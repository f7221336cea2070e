"""docs/autotune.sbatch and docs/cluster.md: what SLURM's users are given does what it says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from autotune.config.plan import Executor

DOCS = Path(__file__).parents[2] / "docs"
SBATCH = DOCS / "autotune.sbatch"
STAND_INS = {
    "scontrol": 'printf "node1\\nnode2\\n"',
    "hostname": "echo 10.0.0.1 10.1.0.1",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": 'printf "%s\\n" "$RAY_ADDRESS" "$@"',
}


@pytest.fixture
def allocation(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two nodes, where SLURM's and Ray's commands are stand-ins."""
    for name, line in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o700)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2"}
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_ON_NODE": "16", **job}


def run(allocation: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SBATCH, *arguments],
        env=allocation,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_search_on_all_nodes(allocation: dict[str, str]) -> None:
    told = run(allocation, "my config.yaml", "--set", "budget.timeout_s=1500")
    assert (told.returncode, told.stderr) == (0, "")
    address, command, *options = told.stdout.splitlines()
    assert address == "10.0.0.1:6856"
    assert command == "symmetric-run"
    cluster, search = options[: options.index("--")], options[options.index("--") + 1 :]
    assert dict(zip(cluster[:6:2], cluster[1:6:2], strict=True)) == {
        "--address": address,
        "--min-nodes": "2",
        "--num-cpus": "16",
    }
    assert search == [
        "autotune",
        "run",
        "my config.yaml",
        "--set",
        "budget.timeout_s=1500",
        "--executor",
        "ray",
    ]


def test_usage(allocation: dict[str, str]) -> None:
    told = run(allocation)
    assert told.returncode == 2
    assert told.stderr.startswith("usage: ")


def test_example_executor() -> None:
    text = (DOCS / "cluster.md").read_text()
    example = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert Executor.model_validate(example["executor"]).kind == "ray"
