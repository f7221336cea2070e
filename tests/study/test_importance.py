"""Settings by importance: what decides is named first, and where nothing can be told nothing is."""

from __future__ import annotations

from collections.abc import Callable

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution

from autotune.study.importance import setting_importances

WORKERS, DTYPE = IntDistribution(0, 8), CategoricalDistribution(["float32", "bfloat16"])
Score = Callable[[int, str], float]


def study_of(score: Score, trials: int = 24) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    for number in range(trials):
        params = {"num_workers": (number * 5) % 9, "amp_dtype": ["float32", "bfloat16"][number // 9 % 2]}
        study.add_trial(
            optuna.trial.create_trial(
                params=params,
                distributions={"num_workers": WORKERS, "amp_dtype": DTYPE},
                value=score(params["num_workers"], params["amp_dtype"]),  # type: ignore[arg-type]
            )
        )
    return study


@pytest.fixture(autouse=True)
def _verbosity() -> object:
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def test_the_setting_that_decides_comes_first() -> None:
    found = setting_importances(study_of(lambda workers, _: float(workers)), range(24))
    assert next(iter(found)) == "num_workers"
    assert found["num_workers"] > found["amp_dtype"]
    assert sum(found.values()) == pytest.approx(1)


def test_trials_that_are_not_named_do_not_count() -> None:
    study = study_of(lambda workers, _: float(workers))
    assert setting_importances(study, [0, 1, 2]) == {}
    assert setting_importances(study, []) == {}


@pytest.mark.parametrize("score", [lambda *_: 1.0, lambda workers, _: float(workers > 4)])
def test_fewer_than_four_different_scores_tell_nothing(score: Score) -> None:
    assert setting_importances(study_of(score), range(24)) == {}


def test_what_optuna_can_not_tell_is_left_out() -> None:
    study = optuna.create_study(direction="maximize")
    for number in range(6):
        study.add_trial(optuna.trial.create_trial(params={}, distributions={}, value=float(number)))
    assert setting_importances(study, range(6)) == {}
