"""The product as a user has it: real processes, from scripts and the command line, in a folder of his own.

Where the search's own process does not matter, the command runs in this one, over a server that all tests share.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.data import TensorDataset

import autotune
from autotune.api import commands as checking
from autotune.api import search as api
from autotune.cli import cli
from autotune.errors import InputError, WorkloadError
from autotune.files.plan_file import read_plan
from autotune.launch.local import LocalLauncher
from autotune.policy import WindowRules
from tests.hurried import Hurried

WORKLOAD = """
import time
import torch

class Data(torch.utils.data.Dataset):
    def __init__(self, count=2000, pause=0.0005):
        self.count, self.pause = count, pause
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        time.sleep(self.pause)
        return torch.full((8,), float(index)), index % 2

def model():
    return torch.nn.Linear(8, 2)

def scaled_loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs / 1e6, targets)

def dataset():
    return Data()

def empty():
    return Data(0)

def words():
    return ["one", "two"] * 100

def broken():
    raise RuntimeError("the weights are not there")

class Keeping(torch.nn.Linear):
    kept = []
    def forward(self, inputs):
        self.kept.append(torch.ones(65536))
        return super().forward(inputs)

def keeping():
    return Keeping(8, 2)

def quick():
    return Data(100_000, 0)
"""
KEPT_BYTES = 65536 * 4

CONFIG = """
workload: {model: "work.py:model", dataset: "work.py:dataset", loss: "work.py:scaled_loss"}
space: {num_workers: [0, 2], micro_batch_size: 32, grad_accum_steps: 1, amp_dtype: float32, prefetch_factor: 2,
        persistent_workers: true, intra_op_threads: null}
budget: {n_trials: 2, timeout_s: 6}
run_dir: run
"""

LONG = ("--set", "budget.n_trials=40", "--set", "budget.timeout_s=90")
"""A search that ends its first trial soon, since it plans for many, and runs on long after it."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A user's folder with a workload and a configuration; nothing of ours runs there afterwards."""
    (tmp_path / "work.py").write_text(WORKLOAD)
    (tmp_path / "tune.yaml").write_text(CONFIG)
    yield tmp_path
    assert _ours(tmp_path) == []


def _ours(folder: Path) -> list[str]:
    """Worker processes that work in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and "autotune.worker" in " ".join(process.cmdline()):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture
def _here(folder: Path, fork_server: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in this process, in the user's folder, and its trials come from the shared server."""
    monkeypatch.chdir(folder)
    for module, name in ((api, "run_plan"), (checking, "check_plan")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), launcher=fork_server))


def call(*arguments: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(cli, arguments, prog_name="autotune")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "autotune", *arguments]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_trials(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        path = folder / "run" / "trials.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"{count} trials did not end within 60 s")


@pytest.mark.quiet
@pytest.mark.usefixtures("_here")
def test_a_search_from_the_command_line_recommends_what_helps(folder: Path) -> None:
    done = call("run", "tune.yaml", "--set", "budget.timeout_s=25")
    assert done.exit_code == 0, done.stderr
    assert autotune.load(folder / "run" / "recommended.yaml").num_workers == 2
    assert call("report", "run").exit_code == 0


@pytest.mark.slow  # .ci/try_package.py runs the README's example so, and test_main_objects looks at __main__
def test_an_unguarded_script_with_classes_and_lambdas_in_main_leaves_its_objects_alone(
    folder: Path,
) -> None:
    script = """
import random, time
import numpy, torch
import autotune

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.table = torch.randn(500, 8)
    def __len__(self):
        return 500
    def __getitem__(self, index):
        self.touched = True
        time.sleep(0.0005)
        return self.table[index], index % 2

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        self.second = torch.nn.Linear(8, 2)
    def forward(self, x):
        return self.second(self.norm(self.first(x)))

net, data = Net().eval(), Data()
before = {name: value.clone() for name, value in net.state_dict().items()}
table = data.table.clone()
states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
result = autotune.search(
    net, data, loss=lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets),
    optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr),
    n_trials=1, timeout_s=6, run_dir="run", progress=False,
)
assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
assert not net.training and all(parameter.grad is None for parameter in net.parameters())
assert torch.equal(table, data.table) and not hasattr(data, "touched")
assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
assert numpy.random.get_state()[1].tolist() == states[2]
assert [trial.outcome for trial in result.trials] == ["ok"], [t.reason for t in result.trials]
print("as before")
"""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as before\n"


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_ctrl_c_saves_the_best_so_far_and_the_same_command_goes_on(folder: Path) -> None:
    process = start(folder, "run", "tune.yaml", "--quiet", *LONG)
    wait_for_trials(folder, 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert (folder / "run" / "recommended.yaml").exists(), errors
    assert autotune.load(folder / "run" / "recommended.yaml")
    assert _ours(folder) == []
    done = call("run", "tune.yaml", "--quiet")
    assert done.exit_code == 0, done.stderr
    lines = (folder / "run" / "trials.jsonl").read_text().splitlines()
    outcomes = [json.loads(line)["results"][0]["outcome"] for line in lines]
    assert outcomes[0] == "ok"
    assert json.loads(lines[0])["number"] == 0


@pytest.mark.usefixtures("_here")
def test_a_killed_search_leaves_nothing_goes_on_and_writes_no_secret(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value")
    process = start(folder, "run", "tune.yaml", "--quiet", *LONG)
    wait_for_trials(folder, 1)
    process.kill()
    process.communicate()
    first = (folder / "run" / "trials.jsonl").read_text().splitlines()[0]
    deadline = time.monotonic() + 15
    while _ours(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _ours(folder) == []
    done = call("run", "tune.yaml", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["format"] == 2
    assert (folder / "run" / "trials.jsonl").read_text().splitlines()[0] == first
    for path in (folder / "run").rglob("*"):
        assert path.is_dir() or b"s3cr3t-value" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.model=no_such_package.net:build", r"no module named 'no_such_package'"),
        ("workload.model=work.py:modell", r"'modell'; .*'model'"),
        ("workload.dataset=work.py:empty", r"sample"),
        ("workload.dataset=work.py:words", r"at least one tensor"),
        ("space.num_wokers=3", r"num_workers"),
        ("device=cuda:7", r"device 'cuda:7' was asked for"),
        ("workload.model=work.py:dataset", r"must be an nn.Module"),
    ],
)
def test_bad_input_is_one_clear_error_with_exit_code_2(
    folder: Path, fork_server: LocalLauncher, override: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        api.run_plan(
            read_plan(folder / "tune.yaml", [override, f"run_dir={folder}/run"]),
            launcher=fork_server,
            progress=False,
        )
    assert caught.value.exit_code == 2
    assert "autotune/worker" not in str(caught.value)


@pytest.mark.usefixtures("_here")
def test_the_users_own_exception_is_shown_with_his_traceback_and_none_of_ours() -> None:
    done = call("run", "tune.yaml", "--set", "workload.model=work.py:broken", "--quiet")
    assert done.exit_code == 2, done.stderr
    assert "RuntimeError: the weights" in done.stderr
    assert "work.py" in done.stderr
    assert "autotune/worker" not in done.stderr
    assert done.stdout == ""


@pytest.mark.usefixtures("_here")
def test_a_limit_that_nothing_meets_exits_3_with_the_nearest_miss() -> None:
    done = call("run", "tune.yaml", "--set", "objective.memory_limit=1MiB", "--quiet")
    assert done.exit_code == 3, done.stderr
    assert re.search(r"Nearest: trial \d+ \(batch", done.stderr), done.stderr


@pytest.mark.usefixtures("_here")
def test_check_says_what_would_be_searched_and_leaves_no_run_folder(folder: Path) -> None:
    done = call("check", "tune.yaml")
    assert done.exit_code == 0, done.stderr
    assert "num_workers" in done.stdout
    assert not (folder / "run").exists()


def test_an_unpicklable_model_names_the_attribute_and_the_remedy(
    folder: Path, fork_server: LocalLauncher
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    net[0].__dict__["lock"] = threading.Lock()
    data = TensorDataset(torch.randn(64, 2), torch.randn(64, 2))
    with pytest.raises(WorkloadError, match=r"model\.0\.lock.*zero-argument function"):
        autotune.search(net, data, launcher=fork_server, run_dir=folder / "run", progress=False)


def test_a_model_that_keeps_something_of_every_batch_is_told_with_its_slope(
    folder: Path, fork_server: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    changes = (
        "workload.model=work.py:keeping",
        "workload.dataset=work.py:quick",
        "space.num_workers=0",
    )
    many_blocks = Hurried(fork_server, WindowRules(max_s=1.5, precision=1e-6, block_s=0.01))
    plan = read_plan(folder / "tune.yaml", [*changes, "baseline.intra_op_threads=1"])
    result = api.run_plan(plan, progress=False, launcher=many_blocks)
    # One note on the recommended settings, and one on the baseline if that is another trial
    *_, told = [note.figures for note in result.summary.notes if note.code == "memory_growth"]
    slope, batches = told["bytes_per_batch"], told["batches_to_limit"]
    assert isinstance(slope, int)
    assert isinstance(batches, int)
    assert told["kind"] == "host"
    assert 0.5 * KEPT_BYTES < slope < 2 * KEPT_BYTES
    assert 0 < batches < result.summary.environment.ram_bytes / slope
    assert "Host memory grew" in (folder / "run" / "report.md").read_text()
