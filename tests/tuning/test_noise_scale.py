"""Batches are ranked by what a sample is worth in them, where the noise scale at a checkpoint is known."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.errors import ConfigError, WorkloadError
from autotune.protocol.reports import RankReport
from autotune.records.trial import TrialResult
from autotune.settings.training_config import TrainingConfig
from autotune.space.efficiency import NoiseBounds
from autotune.testing import FakeLauncher, FakeTrial
from tests.factories import make_fake_space
from tests.factories.searches import GIB, FailingLauncher, codes_of, figures_of

SPACE: dict[str, Any] = {
    "micro_batch_size": [32, 64, 128, 256],
    "num_workers": 0,
    "amp_dtype": "float32",
    "grad_accum_steps": 1,
    "pin_memory": False,
    "channels_last": False,
}


RATES = {32: 1000.0, 64: 1500.0, 128: 2600.0, 256: 3600.0}


def cost(config: TrainingConfig) -> FakeTrial:
    """The rate grows with the batch."""
    rate = RATES[config.micro_batch_size]
    return FakeTrial(samples_per_s=rate, peak_memory_bytes=1 * GIB + config.micro_batch_size)


def found_in(
    folder: Path,
    launcher: FakeLauncher,
    objective: dict[str, Any] | None = None,
    checkpoint: Any = None,
    n_trials: int = 8,
) -> autotune.SearchResult:
    baseline = TrainingConfig(micro_batch_size=32)
    return autotune.search(
        object,
        list,
        launcher=launcher,
        baseline=baseline,
        space=SPACE,
        objective=objective or {"global_batch": "goodput"},
        checkpoint=checkpoint,
        run_dir=folder,
        n_trials=n_trials,
        progress=False,
    )


def kinds(launcher: FakeLauncher) -> list[str]:
    return [job.kind for job in launcher.jobs]


@pytest.mark.parametrize(
    ("noise_scale", "expected"),
    [(1.0, 32), (60.0, 128), (1e5, 256)],
    ids=["little noise", "some noise", "much noise"],
)
def test_the_more_noise_there_is_the_larger_is_the_batch_that_wins(
    tmp_path: Path, noise_scale: float, expected: int
) -> None:
    launcher = FakeLauncher(cost, noise_scale=noise_scale)
    found = found_in(tmp_path / "run", launcher)
    assert found.best.micro_batch_size == expected
    assert kinds(launcher).count("noise_scale") == 1
    assert found.summary.noise_scale is not None
    assert found.summary.noise_scale.value == pytest.approx(noise_scale, rel=0.05)


def test_what_is_claimed_counts_what_samples_are_worth(tmp_path: Path) -> None:
    found = found_in(tmp_path / "run", FakeLauncher(cost, noise_scale=60.0))
    recommended = found.summary.recommendation
    assert recommended is not None
    assert recommended.config.micro_batch_size == 128
    worth = (60.0 + 32) / (60.0 + 128)
    assert recommended.measured_speedup is not None
    assert recommended.measured_speedup.value == pytest.approx(2.6 * worth, rel=0.04)
    larger = recommended.larger_batch
    assert larger is not None
    assert larger.number == recommended.number
    assert larger.worth == pytest.approx(worth, rel=0.02)
    assert larger.over_same_batch is not None
    assert larger.over_same_batch.value == pytest.approx(2.6, rel=0.04)


def test_what_is_not_known_of_the_noise_scale_widens_what_is_claimed(tmp_path: Path) -> None:
    sure = found_in(tmp_path / "sure", FakeLauncher(cost, noise_scale=60.0, noise_scale_spread=0.02))
    unsure = found_in(tmp_path / "unsure", FakeLauncher(cost, noise_scale=60.0, noise_scale_spread=1.0))

    def width(found: autotune.SearchResult) -> float:
        known = found.summary.recommendation
        assert known is not None
        assert known.measured_speedup is not None
        return known.measured_speedup.high / known.measured_speedup.low

    assert unsure.best == sure.best
    assert width(unsure) > 1.1 * width(sure)


class AtInitialisation(FakeLauncher):
    """Gradients of a model without a checkpoint."""

    def _answer(self, trial: FakeTrial, job: Any, place: int) -> Any:
        report = FakeLauncher._answer(self, trial, job, place)
        if report.gradients is None:
            return report
        return report.model_copy(update={"gradients": report.gradients.model_copy(update={"has_checkpoint": False})})


def test_what_was_measured_at_initialisation_is_told_and_ranks_nothing(tmp_path: Path) -> None:
    found = found_in(tmp_path / "run", AtInitialisation(cost, noise_scale=1.0))
    assert found.best.micro_batch_size == 256
    (said,) = figures_of(found.summary.notes, "noise_scale")
    assert not said["has_checkpoint"]
    assert not found.summary.is_weighed


def test_where_it_could_not_be_measured_rates_alone_decide_and_that_is_told(tmp_path: Path) -> None:
    failure = TrialResult(outcome="crashed", reason="RuntimeError: no")
    found = found_in(tmp_path / "run", FailingLauncher(cost, failures={"noise_scale": failure}))
    assert found.best.micro_batch_size == 256
    assert "noise_scale_not_measured" in codes_of(found.summary.notes)
    assert found.summary.noise_scale is None


def test_it_is_measured_once_for_a_search_that_goes_on(tmp_path: Path) -> None:
    first = FakeLauncher(cost, noise_scale=1.0)
    found_in(tmp_path / "run", first)
    second = FakeLauncher(cost, noise_scale=1e5)
    found = found_in(tmp_path / "run", second)
    assert "noise_scale" not in kinds(second)
    assert found.best.micro_batch_size == 32


def test_a_search_that_goes_on_keeps_the_scale_that_its_trials_were_scored_by(tmp_path: Path) -> None:
    found_in(tmp_path / "run", FakeLauncher(cost, noise_scale=1.0), n_trials=2)
    again = FakeLauncher(cost, noise_scale=1e5)
    found = found_in(tmp_path / "run", again)
    assert "noise_scale" not in kinds(again)
    assert found.best.micro_batch_size == 32
    assert found.summary.noise_scale is not None
    assert found.summary.noise_scale.value == pytest.approx(1.0, rel=0.05)


def test_a_search_that_was_begun_without_a_checkpoint_stays_ranked_by_rates(tmp_path: Path) -> None:
    found_in(tmp_path / "run", AtInitialisation(cost, noise_scale=1.0), n_trials=2)
    again = FakeLauncher(cost, noise_scale=1.0)
    found = found_in(tmp_path / "run", again, checkpoint=lambda model: None)
    assert "noise_scale" not in kinds(again)
    assert "noise_scale_too_late" in codes_of(found.summary.notes)
    assert found.best.micro_batch_size == 256


def test_another_gain_that_is_asked_of_a_larger_batch_is_not_answered_by_the_old_summary(tmp_path: Path) -> None:
    rates = {**RATES, 64: 1030.0, 128: 1020.0, 256: 1010.0}

    def close(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(samples_per_s=rates[config.micro_batch_size], peak_memory_bytes=GIB + config.micro_batch_size)

    first = found_in(tmp_path / "run", FakeLauncher(close), {"larger_batch_gain": 0.05})
    assert first.best.micro_batch_size == 32
    second = found_in(tmp_path / "run", FakeLauncher(close), {"larger_batch_gain": 0.0})
    assert second.summary.objective.larger_batch_gain == 0.0
    assert second.best.micro_batch_size == 64


def test_what_was_measured_at_initialisation_is_told_again_by_a_search_that_goes_on(tmp_path: Path) -> None:
    found_in(tmp_path / "run", AtInitialisation(cost, noise_scale=1.0), n_trials=2)
    again = AtInitialisation(cost, noise_scale=1e5)
    found = found_in(tmp_path / "run", again)
    assert "noise_scale" not in kinds(again)
    assert "noise_scale_too_late" not in codes_of(found.summary.notes)
    assert found.summary.noise_scale is not None
    assert not found.summary.is_weighed


def test_a_token_budget_is_weighed_by_its_tokens() -> None:
    baseline = TrainingConfig(micro_batch_size=3, max_tokens=4096)
    bounds = NoiseBounds(value=10.0, low=5.0, high=20.0)
    space = replace(make_fake_space(), baseline=baseline, noise_scale=bounds)
    halved = TrainingConfig(micro_batch_size=2, max_tokens=2048, grad_accum_steps=2)
    assert space.log_worth(halved) == 0.0, "as many tokens, though four samples for three"
    assert space.log_worth(TrainingConfig(micro_batch_size=6, max_tokens=8192)) == pytest.approx(log(13 / 16))


def test_other_objectives_measure_no_gradients_and_say_that_a_checkpoint_is_not_used(tmp_path: Path) -> None:
    launcher = FakeLauncher(cost)
    found = found_in(tmp_path / "run", launcher, {"global_batch": "scale"}, checkpoint=lambda model: None)
    assert "noise_scale" not in kinds(launcher)
    assert "checkpoint_unused" in codes_of(found.summary.notes)


def test_a_checkpoint_that_was_written_anew_is_told_and_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "last.pt"
    file.write_bytes(b"1")
    found_in(tmp_path / "run", FakeLauncher(cost), checkpoint=file, n_trials=2)
    file.write_bytes(b"22")
    again = FakeLauncher(cost)
    found = found_in(tmp_path / "run", again, checkpoint=file)
    assert "noise_scale" not in kinds(again)
    assert "noise_scale_of_before" in codes_of(found.summary.notes)


def test_a_checkpoint_that_can_not_be_read_ends_the_search_in_a_sentence(tmp_path: Path) -> None:
    fault = RankReport(result=TrialResult(outcome="invalid", reason="a sentence"), is_workload_fault=True)

    class Refusing(FakeLauncher):
        def _answer(self, trial: FakeTrial, job: Any, place: int) -> RankReport:
            return fault if job.kind == "noise_scale" else FakeLauncher._answer(self, trial, job, place)

    with pytest.raises(WorkloadError, match="a sentence"):
        found_in(tmp_path / "run", Refusing(cost))


def test_a_file_or_a_value_that_is_no_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    for wrong in (3, "weights", object()):
        with pytest.raises(ConfigError, match="checkpoint must be"):
            found_in(tmp_path / "run", FakeLauncher(cost), checkpoint=wrong)
