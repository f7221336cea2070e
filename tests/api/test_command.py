"""A search on the command of a script, from the call to its files, and once more from where it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.api import diagnose as diagnosing
from autotune.api.diagnose import MeasuringTime, diagnose_plan
from autotune.api.search import SearchResult
from autotune.config.plan import Plan, Workload
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, WorkloadError
from autotune.files.recommended import read_script
from autotune.launch.local import LocalLauncher
from autotune.note import Note
from tests.hurried import Hurried
from tests.worker.script.scripts import HEAD

_SCRIPT = (
    "import sys, time\n"
    + HEAD
    + """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        time.sleep(0.002)
        return data[index]

assert sys.argv[1] == "--lr=0.05", sys.argv
loader = DataLoader(Slow(), batch_size=16, shuffle=True, num_workers=2)
for epoch in range(100000):
    for x, y in loader:
        step(x, y)
"""
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a script whose items take their time."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_SCRIPT, encoding="utf-8")
    return [sys.executable, "train.py", "--lr={lr}"]


_SPACE = {
    "num_workers": [0, 2],
    "micro_batch_size": 16,
    "amp_dtype": "float32",
    "intra_op_threads": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "in_order": True,
    "worker_threads": None,
}
"""Beside what the script does, without workers, which is slower: nobody challenges it, so that nothing runs again."""

Search = Callable[..., SearchResult]


@pytest.fixture
def search(command: list[str], fork_server: LocalLauncher) -> Search:
    """A short search, whose trials come from the server that all tests share."""

    def run(**changes: Any) -> SearchResult:
        own: dict[str, Any] = {"n_trials": 2, "timeout_s": 120.0, "space": _SPACE}
        own |= {"baseline": {"lr": 0.05, "num_workers": 3}, "run_dir": "run"}
        return autotune.search(
            command=command,
            device="cpu",
            progress=False,
            launcher=Hurried(fork_server),
            **(own | changes),
        )

    return run


def test_a_search_goes_from_what_the_script_does_to_what_can_be_applied(
    command: list[str], search: Search
) -> None:
    result = search()
    baseline = result.summary.baseline
    assert (baseline.micro_batch_size, baseline.num_workers, baseline.lr) == (16, 2, 0.05)
    assert result.trials[0].config == baseline
    assert [trial.config.num_workers for trial in result.trials] == [2, 0]
    codes = [told.code for told in result.summary.notes if isinstance(told, Note)]
    assert "script_overrides_baseline" in codes
    assert "setting_unreached" in codes
    assert result.best is not None
    file = Path("run", "recommended.yaml")
    found = read_script(file)
    assert found.command == tuple(command)
    assert found.script.observed == baseline
    assert autotune.load(file) == result.best
    assert f" -- {sys.executable} train.py '--lr={{lr}}'\n" in file.read_text()
    again = search()
    assert [trial.config for trial in again.trials] == [trial.config for trial in result.trials]
    assert again.summary.baseline == baseline


def test_a_space_that_asks_for_what_is_out_of_reach_is_refused(search: Search) -> None:
    with pytest.raises(ConfigError, match=r"space\.grad_accum_steps"):
        search(space={"grad_accum_steps": [1, 2]})


def test_a_script_that_fails_is_told_with_its_own_traceback(search: Search) -> None:
    Path("train.py").write_text(
        f"import torch\n{HEAD}\nraise ValueError('no such column')\n", encoding="utf-8"
    )
    with pytest.raises(WorkloadError, match="no such column") as raised:
        search()
    assert 'train.py", line ' in raised.value.remote_traceback


@pytest.mark.quiet
def test_a_diagnosis_says_that_a_slow_dataset_holds_a_script_up(
    command: list[str], fork_server: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(_SCRIPT.replace(", num_workers=2)", ")"), encoding="utf-8")
    varied = TrainingConfig(micro_batch_size=16, lr=0.05, num_workers=2)
    monkeypatch.setattr(diagnosing, "list_variations", lambda *_: [varied])
    baseline = TrainingConfig(lr=0.05)
    plan = Plan(
        name="case", workload=Workload(command=tuple(command)), baseline=baseline, device="cpu"
    )
    brief = MeasuringTime(window_s=0.4, stretch_s=0.1)
    found = diagnose_plan(plan, progress=False, launcher=fork_server, measuring=brief)
    assert found.verdict.startswith("data")
    assert found.diagnosis.headline
    assert found.advice
