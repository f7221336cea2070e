"""Whole searches over the fake launcher: what `autotune.search` promises that needs no process."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.api import search as searching
from autotune.errors import (
    ConfigError,
    NothingFeasibleError,
    RepeatedFailureError,
    RunFolderError,
    StudyMismatchError,
    WorkloadError,
)
from autotune.files.run_folder import read_summary
from autotune.note import note
from autotune.protocol.jobs import read_job
from autotune.records.trial import Failure
from autotune.settings.training_config import TrainingConfig
from autotune.testing import CostModel, FakeLauncher, FakeTrial, analytic_cost, fake_environment, fake_facts
from tests.factories.searches import GIB, NARROW, figures_of


def search(tmp_path: Path, cost: CostModel = analytic_cost, **arguments: Any) -> autotune.SearchResult:
    arguments = {
        "launcher": FakeLauncher(cost),
        "space": NARROW,
        "n_trials": 12,
        "run_dir": tmp_path / "run",
        **arguments,
    }
    return autotune.search(object, list, progress=False, **arguments)


def failing(message: str, where: str = "net.py:1") -> FakeTrial:
    failure = Failure(signature=f"ValueError at {where}", traceback=f"ValueError: {message}")
    return FakeTrial(outcome="crashed", reason=f"ValueError: {message}", failure=failure)


def test_the_baseline_is_trial_0_and_counts(tmp_path: Path) -> None:
    result = search(tmp_path, n_trials=5)
    assert len(result.trials) == 5
    assert result.trials[0].number == 0
    assert result.trials[0].config == result.baseline == TrainingConfig()


@pytest.mark.parametrize(("method", "n_trials"), [("model", 22), ("tpe", 42)])
def test_a_number_of_trials_is_honoured(tmp_path: Path, method: Any, n_trials: int) -> None:
    """More than a search without one would make, as the next test has it."""
    assert len(search(tmp_path, n_trials=n_trials, method=method).trials) == n_trials


@pytest.mark.parametrize(("method", "fewest", "most"), [("model", 3, 20), ("tpe", 16, 40)])
def test_an_open_number_of_trials_stops_at_40_or_before(tmp_path: Path, method: Any, fewest: int, most: int) -> None:
    result = search(tmp_path, n_trials=None, method=method)
    assert fewest <= len(result.trials) <= most


def test_a_search_ends_when_the_space_is_exhausted(tmp_path: Path) -> None:
    space = {"num_workers": [0, 4], "micro_batch_size": 32, "grad_accum_steps": 1, "amp_dtype": "float32"}
    fixed = {"prefetch_factor": 2, "persistent_workers": False, "pin_memory": False}
    result = search(tmp_path, space={**space, **fixed}, n_trials=30)
    assert [trial.config.num_workers for trial in result.trials] == [0, 4]
    assert result.best.num_workers == 4


def test_a_space_with_nothing_else_to_try_recommends_the_baseline(tmp_path: Path) -> None:
    fixed = {name: getattr(TrainingConfig(), name) for name in ("amp_dtype", "pin_memory", "persistent_workers")}
    space = {**fixed, "num_workers": 0, "micro_batch_size": 32, "grad_accum_steps": 1, "prefetch_factor": None}
    result = search(tmp_path, space=space)
    assert result.best == result.baseline
    assert result.best_same_batch == result.baseline
    assert result.speedup == 1.0
    assert len(result.trials) == 1
    assert "already the best" in result.report()


@pytest.fixture(scope="module")
def of_thirty_trials(tmp_path_factory: pytest.TempPathFactory) -> autotune.SearchResult:
    return search(tmp_path_factory.mktemp("thirty"), n_trials=30)


def test_the_result_finds_what_the_cost_model_rewards(of_thirty_trials: autotune.SearchResult) -> None:
    result = of_thirty_trials
    truth = analytic_cost(result.best).samples_per_s / analytic_cost(result.baseline).samples_per_s
    assert result.speedup is not None
    assert result.speedup_ci is not None
    assert result.speedup_ci[0] <= truth * 1.03
    assert result.speedup == pytest.approx(truth, rel=0.03)
    assert result.best.num_workers >= 4


def test_the_best_at_the_users_batch_is_told_beside_the_best(of_thirty_trials: autotune.SearchResult) -> None:
    result = of_thirty_trials
    assert result.best_same_batch is not None
    assert result.best_same_batch.global_batch_size == result.baseline.global_batch_size
    assert result.best_same_batch.lr == result.baseline.lr


def _prefers_big_batches(config: TrainingConfig) -> FakeTrial:
    return FakeTrial(samples_per_s=100.0 * config.global_batch_size, peak_memory_bytes=GIB)


def test_the_recommended_learning_rate_follows_the_global_batch_and_trials_keep_the_baselines(tmp_path: Path) -> None:
    result = search(tmp_path, _prefers_big_batches, baseline={"lr": 0.1}, space={})
    assert result.best.global_batch_size == 8 * 32
    assert result.best.lr == pytest.approx(0.8)
    assert {trial.config.lr for trial in result.trials} == {0.1}


def _prefers_small_micro_batches(config: TrainingConfig) -> FakeTrial:
    return FakeTrial(samples_per_s=1e5 / config.micro_batch_size, peak_memory_bytes=GIB)


def test_keep_never_changes_the_global_batch(tmp_path: Path) -> None:
    result = search(tmp_path, _prefers_small_micro_batches, objective={"global_batch": "keep"}, n_trials=20)
    assert {trial.config.global_batch_size for trial in result.trials} == {32}
    assert result.best.micro_batch_size < 32
    assert result.best.lr == result.baseline.lr


def test_what_passes_the_memory_limit_never_wins(tmp_path: Path) -> None:
    """A sampler of Optuna's knows nothing of memory."""

    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=100.0 * config.micro_batch_size, peak_memory_bytes=config.micro_batch_size * GIB)

    result = search(tmp_path, cost, memory_limit=64 * GIB, n_trials=20, method="tpe")
    assert result.best.micro_batch_size == 64
    over = [trial for trial in result.trials if trial.config.micro_batch_size > 64]
    assert over
    assert all(trial.outcome == "over_memory" and "65,536 MiB" in trial.reason for trial in over)


def test_a_baseline_over_memory_is_said_and_gives_no_speedup(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=100.0 * config.micro_batch_size, peak_memory_bytes=config.micro_batch_size * GIB)

    result = search(tmp_path, cost, memory_limit=16 * GIB, n_trials=20)
    assert result.best.micro_batch_size == 16
    assert result.speedup is None
    assert result.speedup_ci is None
    assert result.trials[0].outcome == "over_memory"


def test_a_limit_that_nothing_meets_names_the_nearest_miss(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=100.0, peak_memory_bytes=(4 + config.micro_batch_size) * GIB)

    with pytest.raises(NothingFeasibleError, match=r"nearest miss.*batch 8.* took 12.00 GiB") as caught:
        search(tmp_path, cost, memory_limit="1GiB", n_trials=20)
    assert caught.value.exit_code == 3
    assert (tmp_path / "run" / "report.md").exists()
    assert not (tmp_path / "run" / "recommended.yaml").exists()


def test_a_failing_baseline_stops_at_once_with_the_users_traceback(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda _: failing("bad shape"))
    with pytest.raises(WorkloadError, match="bad shape") as caught:
        search(tmp_path, launcher=launcher)
    assert "ValueError: bad shape" in caught.value.remote_traceback
    assert len(launcher.launched) == 1


def test_the_same_failure_in_three_configurations_stops_the_search(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return analytic_cost(config) if config == TrainingConfig() else failing("always")

    launcher = FakeLauncher(cost)
    with pytest.raises(RepeatedFailureError, match="always"):
        search(tmp_path, launcher=launcher, space={})
    assert len(launcher.launched) == 4


def test_different_failures_do_not_stop_the_search(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        if config == TrainingConfig():
            return analytic_cost(config)
        return failing("now here, now there", where=f"net.py:{config.micro_batch_size}/{config.num_workers}")

    result = search(tmp_path, cost, n_trials=10, space={})
    assert len(result.trials) == 10
    assert result.best == result.baseline


def test_a_value_that_alone_fails_is_left_out_and_said(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return analytic_cost(config) if config.amp_dtype == "float32" else failing("not in half precision")

    space = {"amp_dtype": ["float32", "bfloat16"]}
    result = search(tmp_path, cost, space=space, n_trials=25)
    assert sum(trial.outcome == "crashed" for trial in result.trials) == 3
    assert len(result.trials) == 25
    assert figures_of(result.summary.notes, "setting_left_out")[0]["values"] == ["bfloat16"]


def test_a_value_that_is_always_refused_is_left_out_too_but_refusals_alone_stop_nothing(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        if config.amp_dtype != "float32":
            return FakeTrial(outcome="invalid", reason="no half precision with this data")
        return analytic_cost(config) if config.num_workers < 3 else FakeTrial(outcome="invalid", reason="no such data")

    space = {"amp_dtype": ["float32", "bfloat16"]}
    result = search(tmp_path, cost, space=space, n_trials=25)
    assert len(result.trials) == 25
    assert sum(trial.reason == "no half precision with this data" for trial in result.trials) == 3
    assert sum(trial.reason == "no such data" for trial in result.trials) > 3
    assert figures_of(result.summary.notes, "setting_left_out")[0]["values"] == ["bfloat16"]


def test_time_outs_and_divergence_are_outcomes(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        if config.num_workers > 4:
            return FakeTrial(hangs=True)
        if config.amp_dtype == "float16":
            return FakeTrial(outcome="diverged", reason="the loss became nan")
        return analytic_cost(config)

    result = search(tmp_path, cost, n_trials=30, method="tpe")
    assert {"ok", "timeout", "diverged"} <= {trial.outcome for trial in result.trials}
    assert result.best.amp_dtype != "float16"
    assert result.best.num_workers <= 4


def test_among_equals_the_simplest_is_recommended(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=1000.0 if config.num_workers else 500.0, peak_memory_bytes=GIB)

    result = search(tmp_path, cost, n_trials=30)
    finalists = [entrant for entrant in result.summary.recommendation.confirmations if entrant.number != 0]  # type: ignore[union-attr]
    assert result.best.num_workers == min(entrant.config.num_workers for entrant in finalists)


def _fails_when_confirmed(launcher: FakeLauncher, trials: int, fails: Any) -> CostModel:
    """The analytic machine, on which some configurations break down in the confirmation."""

    def cost(config: TrainingConfig) -> FakeTrial:
        if len(launcher.launched) > trials and fails(config):
            return FakeTrial(samples_per_s=100.0, peak_memory_bytes=64 * GIB, stress_peak_bytes=GIB)
        return analytic_cost(config)

    return cost


def test_a_baseline_that_fails_only_in_the_confirmation_is_not_called_infeasible(tmp_path: Path) -> None:
    launcher = FakeLauncher()

    def cost(config: TrainingConfig) -> FakeTrial:
        if len(launcher.launched) > 10 and config == TrainingConfig():
            return FakeTrial(hangs=True)
        return analytic_cost(config)

    launcher.cost = cost
    result = search(tmp_path, launcher=launcher, n_trials=10)
    assert result.summary.recommendation is not None
    assert result.summary.recommendation.verdict == "unconfirmed"
    assert result.best.num_workers > 0
    assert result.speedup is None


def test_finalists_that_pass_the_limit_in_the_confirmation_do_not_make_the_baseline_the_best(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    launcher.cost = _fails_when_confirmed(launcher, 12, lambda config: config != TrainingConfig())
    result = search(tmp_path, launcher=launcher, n_trials=12)
    assert result.summary.recommendation is not None
    refuted = {entrant.config for entrant in result.summary.recommendation.confirmations if not entrant.is_feasible}
    assert refuted
    assert result.best not in refuted
    assert result.summary.recommendation.verdict == "unconfirmed"
    assert result.summary.recommendation.stress is not None


def test_a_failed_baseline_can_be_mended_and_the_same_call_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError):
        search(tmp_path, lambda _: failing("not yet"))
    result = search(tmp_path)
    assert result.trials[0].config == TrainingConfig()
    assert result.speedup is not None


def test_an_interrupted_baseline_is_measured_first(tmp_path: Path) -> None:
    class Interrupting(FakeLauncher):
        def launch(self, launch: Any) -> Any:
            if self.is_armed:
                raise KeyboardInterrupt
            self.is_armed = True  # the probe passes
            return super().launch(launch)

        is_armed = False

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, launcher=Interrupting())
    result = search(tmp_path, n_trials=3)
    assert [trial.number for trial in result.trials] == [0, 1, 2]
    assert result.trials[0].config == TrainingConfig()


def test_an_interrupted_search_claims_nothing_and_is_confirmed_by_the_next_call(tmp_path: Path) -> None:
    class Interrupting(FakeLauncher):
        def launch(self, launch: Any) -> Any:
            if len(self.launched) == 4:
                raise KeyboardInterrupt  # at the first run of the confirmation
            return super().launch(launch)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, n_trials=4, launcher=Interrupting())
    interrupted = read_summary(tmp_path / "run").recommendation
    assert interrupted is not None
    assert (interrupted.verdict, interrupted.speedup) == ("unconfirmed", None)
    launcher = FakeLauncher()
    result = search(tmp_path, n_trials=4, launcher=launcher)
    assert launcher.launched, "the confirmation is made up for"
    assert result.speedup is not None


def test_of_a_time_out_some_is_kept_to_write_the_reports(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    search(tmp_path, n_trials=4, timeout_s=20, launcher=launcher)
    (last,) = (job for job in launcher.jobs if job.kind == "stress")
    assert last.process.deadline_s < 19


def test_an_interrupted_stress_run_keeps_the_confirmation_and_is_made_up_for_by_the_next_call(tmp_path: Path) -> None:
    class Interrupting(FakeLauncher):
        def launch(self, launch: Any) -> Any:
            if read_job(launch.folder.job).kind == "stress":
                raise KeyboardInterrupt
            return super().launch(launch)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, launcher=Interrupting())
    interrupted = read_summary(tmp_path / "run")
    assert interrupted.recommendation is not None
    assert interrupted.recommendation.verdict == "faster"
    assert not interrupted.is_complete
    again = search(tmp_path).summary
    assert again.is_complete
    assert again.recommendation is not None
    assert again.recommendation.stress is not None


def test_a_finished_search_is_known_again_though_a_guard_has_seen_what_is_no_number(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        if config.amp_dtype == "float32":
            return analytic_cost(config)
        return FakeTrial(samples_per_s=1e6, peak_memory_bytes=GIB, passes_guard=False, broken_loss=nan)

    first, launcher = search(tmp_path, cost), FakeLauncher(cost)
    losses = [loss for trial in first.trials if trial.result.guard is not None for loss in trial.result.guard.losses]
    assert any(isnan(loss) for loss in losses)
    search(tmp_path, launcher=launcher)
    assert launcher.jobs == []


def test_an_exhausted_search_that_is_called_again_runs_nothing_more(tmp_path: Path) -> None:
    space = {"num_workers": [0, 4], "micro_batch_size": 32, "grad_accum_steps": 1, "amp_dtype": "float32"}
    fixed = {"prefetch_factor": 2, "persistent_workers": False, "pin_memory": False}
    first, launcher = search(tmp_path, space={**space, **fixed}, n_trials=30), FakeLauncher()
    assert search(tmp_path, space={**space, **fixed}, n_trials=30, launcher=launcher).summary == first.summary
    assert launcher.launched == []


def test_to_see_that_a_search_is_finished_proposes_nothing(tmp_path: Path) -> None:
    def waiting(result: autotune.SearchResult) -> int:
        return sum(trial.state.name == "WAITING" for trial in result.study.get_trials(deepcopy=False))

    first = search(tmp_path, n_trials=5)
    again = search(tmp_path, n_trials=5)
    assert len(again.study.trials) == len(first.study.trials)
    assert waiting(again) == waiting(first)


def test_a_listed_value_without_effect_is_said_by_name(tmp_path: Path) -> None:
    environment = fake_environment().model_copy(update={"device_kind": "cpu", "device": "cpu"})
    space = {"pin_memory": [True], "amp_dtype": ["float32", "tf32"]}
    result = search(tmp_path, launcher=FakeLauncher(environment=environment), space=space, n_trials=3)
    named = figures_of(result.summary.notes, "value_without_effect")
    assert {figures["setting"]: figures["value"] for figures in named} == {"pin_memory": True, "amp_dtype": "tf32"}
    assert not figures_of(result.summary.notes, "precision_not_native")


def test_a_batch_that_fails_again_and_again_stops_the_search(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return analytic_cost(config) if config.micro_batch_size == 32 else failing("only 32")

    with pytest.raises(RepeatedFailureError, match="only 32"):
        search(tmp_path, cost, n_trials=30)


def test_a_baseline_of_more_ranks_than_devices_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"baseline: world_size must be at most 1, .* but got world_size=2"):
        search(tmp_path, baseline={"strategy": "ddp", "world_size": 2})


def test_a_range_of_threads_goes_with_a_baseline_that_leaves_them_to_torch(tmp_path: Path) -> None:
    result = search(tmp_path, space={"intra_op_threads": {"low": 1, "high": 2}}, n_trials=6)
    assert {trial.config.intra_op_threads for trial in result.trials[1:]} <= {1, 2}


def test_precisions_that_are_listed_are_tried_and_emulated_ones_named(tmp_path: Path) -> None:
    environment = fake_environment().model_copy(update={"native_amp_dtypes": ("float32",)})
    launcher = FakeLauncher(environment=environment)
    result = search(tmp_path, launcher=launcher, space={"amp_dtype": ["float32", "bfloat16"]}, n_trials=12)
    assert {trial.config.amp_dtype for trial in result.trials} == {"float32", "bfloat16"}
    assert note("precision_not_native", device="Fake GPU", precisions=["bfloat16"]) in result.summary.notes


def test_finalists_are_measured_in_turns_with_the_baseline(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    result = search(tmp_path, launcher=launcher)
    again = launcher.launched[sum(1 + len(trial.repeats) for trial in result.trials) :]
    entrants = len(set(again))
    assert again[:entrants] == again[entrants : 2 * entrants][::-1]
    assert result.baseline in again[:entrants]


def test_a_run_folder_holds_what_design_says(tmp_path: Path) -> None:
    result = search(tmp_path)
    names = {path.name for path in result.run_dir.iterdir()}
    assert {"recommended.yaml", "study.db", "trials.jsonl", "report.md", "environment.json", "logs"} <= names
    assert not names & {"payload", "scratch"}
    assert autotune.load(result.run_dir / "recommended.yaml") == result.best


def test_a_run_is_read_back_from_its_folder_alone(tmp_path: Path) -> None:
    result = search(tmp_path)
    assert read_summary(result.run_dir) == result.summary


def test_the_same_call_again_runs_nothing_more(tmp_path: Path) -> None:
    first, launcher = search(tmp_path), FakeLauncher()
    second = search(tmp_path, launcher=launcher)
    assert launcher.launched == []
    assert second.summary == first.summary


def test_more_trials_go_on_from_those_that_are_there(tmp_path: Path) -> None:
    first, launcher = search(tmp_path, n_trials=5), FakeLauncher(seed=1)
    second = search(tmp_path, n_trials=8, launcher=launcher)
    assert [trial.result for trial in second.trials[:5]] == [trial.result for trial in first.trials]
    assert all(
        later.repeats[: len(earlier.repeats)] == earlier.repeats
        for earlier, later in zip(first.trials, second.trials, strict=False)
    )
    assert len(second.trials) == 8


def test_fresh_begins_anew(tmp_path: Path) -> None:
    search(tmp_path)
    launcher = FakeLauncher()
    search(tmp_path, launcher=launcher, fresh=True)
    assert launcher.launched[0] == TrainingConfig()


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
    class Interrupting(FakeLauncher):
        def launch(self, launch: Any) -> Any:
            if len(self.launched) == 6:
                raise KeyboardInterrupt
            return super().launch(launch)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, launcher=Interrupting())
    best = autotune.load(tmp_path / "run" / "recommended.yaml")
    assert best.num_workers > 0
    launcher = FakeLauncher()
    result = search(tmp_path, launcher=launcher, n_trials=10)
    assert len(result.trials) == 10
    assert TrainingConfig() not in launcher.launched[:4]


@pytest.mark.parametrize(
    "changed", [{"space": {"num_workers": [0, 1]}}, {"baseline": {"lr": 0.5}}, {"objective": {"busy_weight": 0.5}}]
)
def test_another_searchs_folder_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    search(tmp_path)
    with pytest.raises(StudyMismatchError, match=next(iter(changed))):
        search(tmp_path, **changed)


def test_a_study_of_a_dataset_whose_code_has_changed_is_refused_by_name(tmp_path: Path) -> None:
    def dataset(body: str) -> Any:
        scope: dict[str, Any] = {"__name__": "program"}
        exec(f"class Photos:\n    def __getitem__(self, index):\n        return {body}", scope)
        return scope["Photos"]()

    def run(body: str, **arguments: Any) -> FakeLauncher:
        launcher = FakeLauncher()
        options = {"space": NARROW, "n_trials": 3, "progress": False, "run_dir": tmp_path / "run", **arguments}
        autotune.search(partial(dict, path=tmp_path), dataset(body), launcher=launcher, **options)
        return launcher

    assert run("slowly(index)").launched
    assert run("slowly(index)").jobs == [], "equal code goes on, also where a partial holds an object"
    with pytest.raises(StudyMismatchError, match=r"differs in dataset: Photos#\w+ there, Photos#\w+ here.*--fresh"):
        run("fast(index)")
    assert run("fast(index)", fresh=True).launched


def test_a_search_that_goes_on_says_so_and_what_it_does_not_compare(tmp_path: Path) -> None:
    options: Any = {"launcher": FakeLauncher(), "progress": False, "run_dir": tmp_path / "run"}
    first = autotune.search(object, list, n_trials=2, **options).summary.notes
    again = autotune.search(object, list, n_trials=3, **options).summary.notes
    told = note("goes_on", has_command=False)
    assert [[each for each in notes if each == told] for notes in (first, again)] == [[], [told]]


def test_one_search_at_a_time_holds_a_run_folder(tmp_path: Path) -> None:
    class Nested(FakeLauncher):
        def launch(self, launch: Any) -> Any:
            with pytest.raises(RunFolderError, match="one search at a time"):
                search(tmp_path)
            return super().launch(launch)

    assert search(tmp_path, launcher=Nested(), n_trials=1).trials


def test_an_unwritable_run_folder_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="run_dir"):
        search(tmp_path, run_dir=tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_trials": 0}, "n_trials"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"memory_limit": "20 parsecs"}, "memory_limit"),
        ({"baseline": {"num_wokers": 2}}, "num_workers"),
        ({"space": {"num_workers": {"low": 3, "high": 1}}}, "low <= high"),
        ({"space": {"micro_batch_size": [10**9]}}, "fit into the dataset"),
        ({"loader": {"samler": None}}, "samler"),
    ],
)
def test_bad_arguments_are_told_by_name(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(tmp_path, **arguments)


def test_the_callers_random_state_is_as_before(tmp_path: Path) -> None:
    random.seed(1)
    before = random.getstate()
    search(tmp_path, n_trials=4)
    assert random.getstate() == before


def test_the_study_is_given_back(tmp_path: Path) -> None:
    result = search(tmp_path, n_trials=5)
    assert result.study.best_trial.number in {trial.number for trial in result.trials}


def test_the_function_stays_a_function_when_its_rooms_are_imported(tmp_path: Path) -> None:
    search(tmp_path, n_trials=1)
    import autotune.study.study

    assert callable(autotune.search)


def test_a_token_budget_whose_largest_bucket_does_not_fit_is_not_recommended(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        budget = config.max_tokens or 0
        stressed = (20 if budget > 2000 else 2) * GIB
        return FakeTrial(samples_per_s=float(budget), peak_memory_bytes=GIB, stress_peak_bytes=stressed)

    fixed = {"amp_dtype": "float32", "num_workers": 0, "grad_accum_steps": 1, "pin_memory": False, "strategy": "single"}
    facts = fake_facts().model_copy(update={"has_token_budget": True, "budget_samples": 12.7})
    result = search(
        tmp_path,
        launcher=FakeLauncher(cost, facts=facts),
        baseline={"max_tokens": 1000},
        space=fixed | {"max_tokens": [1000, 2000, 4000]},
        n_trials=6,
    )
    assert {trial.config.max_tokens for trial in result.trials if trial.is_feasible} == {1000, 2000, 4000}
    assert (result.best.max_tokens, result.best.micro_batch_size) == (2000, 26)
    assert result.best.lr == pytest.approx(2 * result.baseline.lr)
    assert "batch_follows_budget" in {found.code for found in result.summary.notes}
    assert "stress_over_limit" in {found.code for found in result.summary.notes}
    assert "2,000 tokens" in result.report()
