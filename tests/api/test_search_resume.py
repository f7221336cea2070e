"""What a search leaves in its folder, and how the next call goes on from there, after an interrupt too."""

from __future__ import annotations

import os
import random
import shutil
import signal
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune import SearchResult
from autotune.api import search as searching
from autotune.config.training_config import TrainingConfig
from autotune.errors import RunFolderError, StudyMismatchError
from autotune.files.run_folder import read_summary
from autotune.messages.search import search_resumed
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost
from tests.factories.searches import FIXED, GIB, NARROW, Interrupting
from tests.factories.searches import fake_search as search

SMALL: dict[str, Any] = {"memory_limit": 2 * GIB}
"""A limit near which the largest samples might not fit."""

FEW = 5
"""Trials of the search that tests read, or go on from."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return search(tmp_path_factory.mktemp("finished"), n_trials=FEW)


@pytest.fixture
def gone_on(finished: SearchResult, tmp_path: Path) -> Path:
    """The folder of a copy of the finished search's run."""
    shutil.copytree(finished.run_dir, tmp_path / "run", symlinks=True)
    return tmp_path


def test_the_baseline_is_trial_0_and_counts(finished: SearchResult) -> None:
    assert len(finished.trials) == FEW
    assert finished.trials[0].number == 0
    assert finished.trials[0].config == finished.baseline == TrainingConfig()


def test_a_run_folder_holds_what_design_says(finished: SearchResult) -> None:
    names = {path.name for path in finished.run_dir.iterdir()}
    assert {
        "recommended.yaml",
        "study.db",
        "trials.jsonl",
        "report.md",
        "environment.json",
        "logs",
    } <= names
    assert not names & {"payload", "scratch"}
    assert autotune.load(finished.run_dir / "recommended.yaml") == finished.best


def test_a_run_is_read_back_from_its_folder_alone(finished: SearchResult) -> None:
    assert read_summary(finished.run_dir) == finished.summary


def test_the_study_is_given_back(finished: SearchResult) -> None:
    assert finished.study.best_trial.number in {trial.number for trial in finished.trials}


def test_the_same_call_again_runs_and_proposes_nothing_more(
    finished: SearchResult, gone_on: Path
) -> None:
    def waiting(result: SearchResult) -> int:
        return sum(
            trial.state.name == "WAITING" for trial in result.study.get_trials(deepcopy=False)
        )

    again = search(gone_on, launcher=(launcher := FakeLauncher()), n_trials=FEW)
    assert launcher.launched == []
    assert again.summary == finished.summary
    assert len(again.study.trials) == len(finished.study.trials)
    assert waiting(again) == waiting(finished)


def test_more_trials_go_on_from_those_that_are_there(finished: SearchResult, gone_on: Path) -> None:
    second = search(gone_on, n_trials=FEW + 3, launcher=FakeLauncher(seed=1))
    assert [trial.result for trial in second.trials[:FEW]] == [
        trial.result for trial in finished.trials
    ]
    assert all(
        later.repeats[: len(earlier.repeats)] == earlier.repeats
        for earlier, later in zip(finished.trials, second.trials, strict=False)
    )
    assert len(second.trials) == FEW + 3


def test_fresh_begins_anew(gone_on: Path) -> None:
    search(gone_on, launcher=(launcher := FakeLauncher()), n_trials=2, fresh=True)
    assert launcher.launched[0] == TrainingConfig()


@pytest.mark.parametrize(
    "changed",
    [
        {"space": {"num_workers": [0, 1]}},
        {"baseline": {"lr": 0.5}},
        {"objective": {"busy_weight": 0.5}},
    ],
)
def test_another_searchs_folder_is_refused(gone_on: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(StudyMismatchError, match=next(iter(changed))):
        search(gone_on, n_trials=FEW, **changed)


def test_an_interrupted_baseline_is_measured_first(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, launcher=Interrupting(at=lambda job, _: job.kind == "trial"))
    result = search(tmp_path, n_trials=3)
    assert [trial.number for trial in result.trials] == [0, 1, 2]
    assert result.trials[0].config == TrainingConfig()


def test_interrupted_proof_is_resumed(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, n_trials=4, launcher=Interrupting(at=lambda _, launched: launched == 4))
    interrupted = read_summary(tmp_path / "run").recommendation
    assert interrupted is not None
    assert interrupted.verdict == "unconfirmed"
    assert interrupted.speedup is not None
    launcher = FakeLauncher()
    found = search(tmp_path, n_trials=4, launcher=launcher).summary.recommendation
    assert launcher.launched, "what the proof still takes"
    assert found is not None
    assert found.verdict == "faster"
    assert found.speedup is not None
    assert interrupted.speedup.low < found.speedup.low


def test_of_a_time_out_some_is_kept_to_write_the_reports(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    search(tmp_path, n_trials=4, timeout_s=20, launcher=launcher, **SMALL)
    (last,) = (job for job in launcher.jobs if job.kind == "stress")
    assert last.process.deadline_s < 19


@pytest.mark.slow
def test_interrupted_stress_run_is_resumed(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(
            tmp_path,
            launcher=Interrupting(at=lambda job, _launched: job.kind == "stress"),
            n_trials=5,
            **SMALL,
        )
    interrupted = read_summary(tmp_path / "run")
    assert interrupted.recommendation is not None
    assert interrupted.recommendation.verdict == "faster"
    assert not interrupted.is_complete
    again = search(tmp_path, n_trials=5, **SMALL).summary
    assert again.is_complete
    assert again.recommendation is not None
    assert again.recommendation.stress is not None


@pytest.mark.slow
def test_finished_search_with_nan_is_known(
    tmp_path: Path,
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        if config.amp_dtype == "float32":
            return analytic_cost(config)
        return FakeTrial(
            samples_per_s=1e6, peak_memory_bytes=GIB, passes_guard=False, broken_loss=nan
        )

    first, launcher = search(tmp_path, cost, n_trials=6), FakeLauncher(cost)
    losses = [
        loss
        for trial in first.trials
        if trial.result.guard is not None
        for loss in trial.result.guard.losses
    ]
    assert any(isnan(loss) for loss in losses)
    search(tmp_path, launcher=launcher, n_trials=6)
    assert launcher.jobs == []


def test_an_exhausted_search_that_is_called_again_runs_nothing_more(tmp_path: Path) -> None:
    space = {**FIXED, "num_workers": [0, 4]}
    first, launcher = search(tmp_path, space=space, n_trials=30), FakeLauncher()
    assert [trial.config.num_workers for trial in first.trials] == [0, 4]
    again = search(tmp_path, space=space, n_trials=30, launcher=launcher)
    assert again.summary == first.summary
    assert launcher.launched == []


def test_changed_objective_is_decided_again(
    tmp_path: Path,
) -> None:
    rates = {32: 1000.0, 64: 1030.0, 128: 1020.0}
    space = {**FIXED, "micro_batch_size": [*rates], "num_workers": 0, "channels_last": False}
    asked = {"space": space, "baseline": {"micro_batch_size": 32}}

    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(
            samples_per_s=rates[config.micro_batch_size],
            peak_memory_bytes=GIB + config.micro_batch_size,
        )

    first = search(tmp_path, cost, objective={"larger_batch_gain": 0.05}, n_trials=8, **asked)
    assert first.best.micro_batch_size == 32
    second = search(tmp_path, cost, objective={"larger_batch_gain": 0.0}, n_trials=8, **asked)
    assert second.summary.objective.larger_batch_gain == 0.0
    assert second.best.micro_batch_size == 64


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["select", "_summarise", "_write"])
def test_an_interrupt_once_the_search_is_done_costs_it_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    work, heard = getattr(searching, moment), signal.getsignal(signal.SIGINT)

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return work(*arguments)

    monkeypatch.setattr(searching, moment, interrupted)
    result = search(tmp_path, n_trials=4)
    assert read_summary(tmp_path / "run").recommendation == result.summary.recommendation
    assert result.summary.is_complete
    assert signal.getsignal(signal.SIGINT) is heard


def test_an_interrupted_search_keeps_the_best_so_far_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, launcher=Interrupting(at=lambda _, launched: launched == 6))
    best = autotune.load(tmp_path / "run" / "recommended.yaml")
    assert best.num_workers > 0
    launcher = FakeLauncher()
    result = search(tmp_path, launcher=launcher, n_trials=10)
    assert len(result.trials) == 10
    assert TrainingConfig() not in launcher.launched[:4]


def test_a_study_of_a_dataset_whose_code_has_changed_is_refused_by_name(tmp_path: Path) -> None:
    def dataset(body: str) -> Any:
        scope: dict[str, Any] = {"__name__": "program"}
        exec(f"class Photos:\n    def __getitem__(self, index):\n        return {body}", scope)
        return scope["Photos"]()

    def run(body: str, **arguments: Any) -> FakeLauncher:
        launcher = FakeLauncher()
        options = {
            "space": NARROW,
            "n_trials": 3,
            "progress": False,
            "run_dir": tmp_path / "run",
            **arguments,
        }
        autotune.search(partial(dict, path=tmp_path), dataset(body), launcher=launcher, **options)
        return launcher

    assert run("slowly(index)").launched
    assert run("slowly(index)").jobs == [], (
        "equal code goes on, also where a partial holds an object"
    )
    with pytest.raises(StudyMismatchError, match=r"dataset: Photos#\w+ .*Photos#\w+.*--fresh"):
        run("fast(index)")
    assert run("fast(index)", fresh=True).launched


@pytest.mark.slow
def test_a_search_that_goes_on_says_so_and_what_it_does_not_compare(tmp_path: Path) -> None:
    options: Any = {"launcher": FakeLauncher(), "progress": False, "run_dir": tmp_path / "run"}
    first = autotune.search(object, list, n_trials=2, **options).summary.notes
    again = autotune.search(object, list, n_trials=3, **options).summary.notes
    told = search_resumed(has_command=False)
    assert [[each for each in notes if each == told] for notes in (first, again)] == [[], [told]]


def test_one_search_at_a_time_holds_a_run_folder(tmp_path: Path) -> None:
    class Nested(FakeLauncher):
        def launch(self, launch: Any) -> Any:
            with pytest.raises(RunFolderError, match="one search"):
                search(tmp_path)
            return super().launch(launch)

    assert search(tmp_path, launcher=Nested(), n_trials=1).trials


def test_an_unwritable_run_folder_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="run_dir"):
        search(tmp_path, run_dir=tmp_path / "file" / "run")


def test_the_callers_random_state_is_as_before(tmp_path: Path) -> None:
    random.seed(1)
    before = random.getstate()
    search(tmp_path, n_trials=4)
    assert random.getstate() == before
