"""Whole searches over the fake launcher: what `autotune.search` finds and says, where that needs no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune import SearchResult
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.messages.space import precision_not_native
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost, fake_environment, fake_facts
from tests.factories.searches import FIXED, GIB, NARROW, figures_of
from tests.factories.searches import fake_search as search

TWO_PRECISIONS = NARROW | {"amp_dtype": ["float32", "bfloat16"]}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "fewest", "most"), [("model", 3, 20), ("tpe", 16, 40)])
def test_open_and_given_number_of_trials(
    tmp_path: Path, method: Any, fewest: int, most: int
) -> None:
    by_itself = len(search(tmp_path / "open", n_trials=None, method=method).trials)
    assert fewest <= by_itself <= most
    assert (
        len(search(tmp_path / "given", n_trials=by_itself + 2, method=method).trials)
        == by_itself + 2
    )


def test_a_space_with_nothing_else_to_try_recommends_the_baseline(tmp_path: Path) -> None:
    result = search(tmp_path, space={**FIXED, "num_workers": 0, "prefetch_factor": None})
    assert result.best == result.baseline
    assert result.best_same_batch == result.baseline
    assert result.speedup == 1.0
    assert len(result.trials) == 1
    assert "already the best" in result.report()


@pytest.fixture(scope="module")
def of_many_trials(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return search(tmp_path_factory.mktemp("many"), n_trials=14)


def test_the_result_finds_what_the_cost_model_rewards(
    of_many_trials: SearchResult,
) -> None:
    result = of_many_trials
    truth = analytic_cost(result.best).samples_per_s / analytic_cost(result.baseline).samples_per_s
    assert result.speedup is not None
    assert result.speedup_ci is not None
    assert result.speedup_ci[0] <= truth * 1.03
    assert result.speedup == pytest.approx(truth, rel=0.03)
    assert result.best.num_workers >= 4


def test_the_best_at_the_users_batch_is_told_beside_the_best(
    of_many_trials: SearchResult,
) -> None:
    result = of_many_trials
    assert result.best_same_batch is not None
    assert result.best_same_batch.global_batch_size == result.baseline.global_batch_size
    assert result.best_same_batch.lr == result.baseline.lr


def _prefers_big_batches(config: TrainingConfig) -> FakeTrial:
    return FakeTrial(samples_per_s=100.0 * config.global_batch_size, peak_memory_bytes=GIB)


def test_lr_follows_the_global_batch(
    tmp_path: Path,
) -> None:
    result = search(
        tmp_path,
        _prefers_big_batches,
        baseline={"lr": 0.1},
        space=NARROW | {"micro_batch_size": [32, 64]},
    )
    assert result.best.global_batch_size == 8 * 32
    assert result.best.lr == pytest.approx(0.8)
    assert {trial.config.lr for trial in result.trials} == {0.1}


def _prefers_small_micro_batches(config: TrainingConfig) -> FakeTrial:
    return FakeTrial(samples_per_s=1e5 / config.micro_batch_size, peak_memory_bytes=GIB)


def test_keep_never_changes_the_global_batch(tmp_path: Path) -> None:
    result = search(
        tmp_path, _prefers_small_micro_batches, objective={"global_batch": "keep"}, n_trials=8
    )
    assert {trial.config.global_batch_size for trial in result.trials} == {32}
    assert result.best.micro_batch_size < 32
    assert result.best.lr == result.baseline.lr


def test_among_equals_the_simplest_is_recommended(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(
            samples_per_s=1000.0 if config.num_workers else 500.0, peak_memory_bytes=GIB
        )

    result = search(tmp_path, cost, n_trials=16)
    compared = [trial for trial in result.trials[1:] if trial.repeats]
    assert result.best.num_workers == min(trial.config.num_workers for trial in compared)


def test_a_listed_value_without_effect_is_said_by_name(tmp_path: Path) -> None:
    environment = fake_environment().model_copy(update={"device_kind": "cpu", "device": "cpu"})
    space = {"pin_memory": [True], "amp_dtype": ["float32", "tf32"]}
    result = search(
        tmp_path, launcher=FakeLauncher(environment=environment), space=space, n_trials=3
    )
    named = figures_of(result.summary.notes, "value_without_effect")
    assert {figures["setting"]: figures["value"] for figures in named} == {
        "pin_memory": True,
        "amp_dtype": "tf32",
    }
    assert not figures_of(result.summary.notes, "precision_not_native")


def test_a_range_of_threads_goes_with_a_baseline_that_leaves_them_to_torch(tmp_path: Path) -> None:
    result = search(tmp_path, space={"intra_op_threads": {"low": 1, "high": 2}}, n_trials=6)
    assert {trial.config.intra_op_threads for trial in result.trials[1:]} <= {1, 2}


def test_emulated_precision_is_named(tmp_path: Path) -> None:
    environment = fake_environment().model_copy(update={"native_amp_dtypes": ("float32",)})
    launcher = FakeLauncher(environment=environment)
    result = search(tmp_path, launcher=launcher, space=TWO_PRECISIONS, n_trials=2)
    assert precision_not_native(device="Fake GPU", precisions=["bfloat16"]) in result.summary.notes


def test_the_best_and_the_baseline_run_again_until_the_gain_is_proven(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    result = search(tmp_path, launcher=launcher, n_trials=6)
    found = result.summary.recommendation
    assert found is not None
    assert found.verdict == "faster"
    assert len(result.trials) == 6
    assert all(result.trials[number].repeats for number in (0, found.number))
    assert len(launcher.launched) == sum(1 + len(trial.repeats) for trial in result.trials)
    assert sum(one.code == "proven" for one in found.reasons) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_trials": 0}, "n_trials"),
        ({"memory_limit": "20 parsecs"}, "memory_limit"),
        ({"baseline": {"num_wokers": 2}}, "num_workers"),
        ({"space": {"num_workers": {"low": 3, "high": 1}}}, "low <= high"),
        ({"space": {"micro_batch_size": [10**9]}}, "fit into the dataset"),
    ],
)
def test_bad_arguments_are_told_by_name(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        search(tmp_path, **arguments)


def test_the_function_stays_a_function_when_its_rooms_are_imported(tmp_path: Path) -> None:
    search(tmp_path, n_trials=1)
    import autotune.tuning.study

    assert callable(autotune.search)


def test_a_token_budget_whose_largest_bucket_does_not_fit_is_not_recommended(
    tmp_path: Path,
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        budget = config.max_tokens or 0
        stressed = (20 if budget > 2000 else 5) * GIB
        return FakeTrial(
            samples_per_s=float(budget), peak_memory_bytes=4 * GIB, stress_peak_bytes=stressed
        )

    facts = fake_facts().model_copy(update={"has_token_budget": True, "budget_samples": 12.7})
    result = search(
        tmp_path,
        launcher=FakeLauncher(cost, facts=facts),
        baseline={"max_tokens": 1000},
        space={"max_tokens": [1000, 2000, 4000], "num_workers": 0, "grad_accum_steps": 1},
        n_trials=6,
    )
    assert {trial.config.max_tokens for trial in result.trials if trial.is_feasible} == {
        1000,
        2000,
        4000,
    }
    assert (result.best.max_tokens, result.best.micro_batch_size) == (2000, 26)
    assert result.best.lr == pytest.approx(2 * result.baseline.lr)
    assert "batch_follows_budget" in {found.code for found in result.summary.notes}
    assert "stress_over_limit" in {found.code for found in result.summary.notes}
    assert "2,000 tokens" in result.report()
