"""Whole searches in which trials fail, or pass the limit: what ends a search, what is left out, what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, NothingFeasibleError, RepeatedFailureError, WorkloadError
from autotune.records.trial import Failure
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost
from tests.factories.searches import FIXED, GIB, NARROW, figures_of
from tests.factories.searches import fake_search as search

TWO_PRECISIONS = NARROW | {"amp_dtype": ["float32", "bfloat16"]}


def failing(message: str, where: str = "net.py:1") -> FakeTrial:
    failure = Failure(signature=f"ValueError at {where}", traceback=f"ValueError: {message}")
    return FakeTrial(outcome="crashed", reason=f"ValueError: {message}", failure=failure)


def gibibyte_a_sample(config: TrainingConfig) -> FakeTrial:
    return FakeTrial(
        samples_per_s=100.0 * config.micro_batch_size,
        peak_memory_bytes=config.micro_batch_size * GIB,
    )


def test_what_passes_the_memory_limit_never_wins(tmp_path: Path) -> None:
    """A sampler of Optuna's knows nothing of memory."""
    result = search(tmp_path, gibibyte_a_sample, memory_limit=64 * GIB, n_trials=16, method="tpe")
    assert result.best.micro_batch_size == 64
    over = [trial for trial in result.trials if trial.config.micro_batch_size > 64]
    assert over
    assert all(trial.outcome == "over_memory" and "65,536 MiB" in trial.reason for trial in over)


def test_a_baseline_over_memory_is_said_and_gives_no_speedup(tmp_path: Path) -> None:
    result = search(tmp_path, gibibyte_a_sample, memory_limit=16 * GIB, n_trials=20)
    assert result.best.micro_batch_size == 16
    assert result.speedup is None
    assert result.speedup_ci is None
    assert result.trials[0].outcome == "over_memory"


def test_a_limit_that_nothing_meets_names_the_nearest_miss(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=100.0, peak_memory_bytes=(4 + config.micro_batch_size) * GIB)

    with pytest.raises(NothingFeasibleError, match=r"batch 8.*12\.00 GiB") as caught:
        search(tmp_path, cost, memory_limit="1GiB", n_trials=12)
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
        return failing(
            "now here, now there", where=f"net.py:{config.micro_batch_size}/{config.num_workers}"
        )

    result = search(tmp_path, cost, n_trials=10, space={})
    assert len(result.trials) == 10
    assert result.best == result.baseline


def test_a_value_that_alone_fails_is_left_out_and_said(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return (
            analytic_cost(config)
            if config.amp_dtype == "float32"
            else failing("not in half precision")
        )

    result = search(tmp_path, cost, space=TWO_PRECISIONS, n_trials=20, method="tpe")
    assert sum(trial.outcome == "crashed" for trial in result.trials) == 3
    assert len(result.trials) == 20
    assert figures_of(result.summary.notes, "setting_left_out")[0]["values"] == ["bfloat16"]


@pytest.mark.slow
def test_refused_value_is_left_out(
    tmp_path: Path,
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        if config.amp_dtype != "float32":
            return FakeTrial(outcome="invalid", reason="no half")
        return (
            analytic_cost(config)
            if config.num_workers < 3
            else FakeTrial(outcome="invalid", reason="no such data")
        )

    result = search(tmp_path, cost, space=TWO_PRECISIONS, n_trials=20, method="tpe")
    assert len(result.trials) == 20
    assert sum(trial.reason == "no half" for trial in result.trials) == 3
    assert sum(trial.reason == "no such data" for trial in result.trials) > 3
    assert figures_of(result.summary.notes, "setting_left_out")[0]["values"] == ["bfloat16"]


def test_time_outs_and_divergence_are_outcomes(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        if config.num_workers > 4:
            return FakeTrial(hangs=True)
        if config.amp_dtype == "float16":
            return FakeTrial(outcome="diverged", reason="the loss became nan")
        return analytic_cost(config)

    result = search(tmp_path, cost, n_trials=24, method="tpe")
    assert {"ok", "timeout", "diverged"} <= {trial.outcome for trial in result.trials}
    assert result.best.amp_dtype != "float16"
    assert result.best.num_workers <= 4


@pytest.mark.slow
def test_baseline_that_hangs_in_repeats(
    tmp_path: Path,
) -> None:
    launcher = FakeLauncher()

    def cost(config: TrainingConfig) -> FakeTrial:
        is_again = config == TrainingConfig() and config in launcher.launched[:-1]
        return FakeTrial(hangs=True) if is_again else analytic_cost(config)

    launcher.cost = cost
    result = search(tmp_path, launcher=launcher, n_trials=6)
    assert {repeat.outcome for repeat in result.trials[0].repeats} == {"timeout"}
    assert result.summary.recommendation is not None
    assert result.summary.recommendation.verdict == "unconfirmed", (
        "a single run of the baseline proves nothing"
    )
    assert result.best.num_workers > 0


def test_what_passes_the_limit_when_it_runs_again_is_not_recommended(tmp_path: Path) -> None:
    launcher = FakeLauncher()

    def cost(config: TrainingConfig) -> FakeTrial:
        is_over = config.num_workers == 8 and config in launcher.launched[:-1]
        return FakeTrial(
            samples_per_s=100.0 * (1 + config.num_workers),
            peak_memory_bytes=(64 if is_over else 1) * GIB,
        )

    launcher.cost = cost
    space = {**FIXED, "num_workers": [0, 2, 4, 8], "channels_last": False}
    result = search(tmp_path, launcher=launcher, space=space, n_trials=12)
    (refuted,) = (trial for trial in result.trials if trial.refuted_by is not None)
    assert refuted.config.num_workers == 8
    assert refuted.refuted_by is not None
    assert refuted.refuted_by.outcome == "over_memory"
    assert [
        figures["trial"] for figures in figures_of(result.summary.notes, "finalist_failed")
    ] == [refuted.number]
    assert result.best.num_workers == 4
    assert result.summary.recommendation is not None
    assert (result.summary.recommendation.verdict, result.summary.recommendation.is_outrun) == (
        "faster",
        True,
    )


def test_a_failed_baseline_can_be_mended_and_the_same_call_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError):
        search(tmp_path, lambda _: failing("not yet"))
    result = search(tmp_path, n_trials=4)
    assert result.trials[0].config == TrainingConfig()
    assert result.speedup is not None


def test_a_baseline_of_more_ranks_than_devices_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"baseline: .*world_size=2"):
        search(tmp_path, baseline={"strategy": "ddp", "world_size": 2})
