"""Each method proposes by its own sampler; a grid visits every combination once, and must be small enough to."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, get_args

import optuna
import pytest

from autotune.config.plan import Method
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.records.trial import TrialResult
from autotune.space.space import ResolvedSpace
from autotune.testing import fake_environment
from autotune.tuning.study import METHODS, Study
from tests.factories import make_fake_space

SAMPLERS = {
    "model": optuna.samplers.TPESampler,
    "tpe": optuna.samplers.TPESampler,
    "gp": optuna.samplers.GPSampler,
    "random": optuna.samplers.RandomSampler,
    "grid": optuna.samplers.RandomSampler,
}
BATCHES, WORKERS, PREFETCH = [16, 32, 64], [0, 1, 2, 4], [2, 4]
FIXED: dict[str, Any] = {
    "grad_accum_steps": 1,
    "amp_dtype": "float32",
    "persistent_workers": False,
    "pin_memory": False,
}
CRASH = TrialResult(outcome="crashed", reason="boom")


@pytest.fixture(autouse=True)
def _without_notices() -> Iterator[None]:
    """Optuna calls several of its samplers' arguments experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


MANY_CORES = fake_environment(cores=64)
SMALL = make_fake_space(
    MANY_CORES, micro_batch_size=BATCHES, num_workers=WORKERS, prefetch_factor=PREFETCH, **FIXED
)


def visited(
    space: ResolvedSpace, method: Method, seed: int = 0, most: int = 1_000
) -> list[TrainingConfig]:
    """What a study asks for until its space is exhausted."""
    study, found = (
        Study.open(None, space, identity={}, seed=seed, method=method),
        list[TrainingConfig](),
    )
    while len(found) < most and (trial := study.ask()) is not None:
        found.append(trial.config)
        study.tell(trial, CRASH, None)
    return found


def test_every_method_is_known() -> None:
    assert set(SAMPLERS) == set(METHODS) == set(get_args(Method))


@pytest.mark.parametrize("method", get_args(Method))
def test_each_method_has_its_sampler(method: Method) -> None:
    assert type(METHODS[method].make_sampler(0)) is SAMPLERS[method]


@pytest.mark.parametrize("method", ["model", "tpe", "random", "grid"])
def test_the_seed_decides_what_is_proposed(method: Method) -> None:
    once, again, other = (visited(SMALL, method, seed=seed, most=8) for seed in (0, 0, 1))
    assert once == again != other


def test_a_grid_visits_every_combination_once_from_the_baseline_on() -> None:
    found = visited(SMALL, "grid")
    loaders = {
        (workers, prefetch if workers else None) for workers, prefetch in product(WORKERS, PREFETCH)
    }
    wanted = {(batch, *loader) for batch, loader in product(BATCHES, loaders)}
    assert found[0] == TrainingConfig()
    assert len(found) == len(wanted) == 21
    assert {(one.micro_batch_size, one.num_workers, one.prefetch_factor) for one in found} == wanted


def test_a_grid_draws_nothing_in_vain() -> None:
    study = Study.open(None, SMALL, identity={}, seed=0, method="grid")
    while (trial := study.ask()) is not None:
        study.tell(trial, CRASH, None)
    assert len(study.optuna_study.trials) == len(study.records) == 21


def test_a_grid_tries_first_what_is_proposed() -> None:
    study = Study.open(None, SMALL, identity={}, seed=0, method="grid")
    assert study.propose({"micro_batch_size": 64, "num_workers": 4, "prefetch_factor": 4})
    first, second = study.ask(), study.ask()
    assert first is not None
    assert second is not None
    assert (second.config.micro_batch_size, second.config.num_workers) == (64, 4)


def test_a_grid_that_is_too_large_is_refused_with_both_numbers() -> None:
    large = make_fake_space(MANY_CORES)
    assert large.size > 20_000
    with pytest.raises(ConfigError, match=rf"20,000 .*{large.size:,};"):
        Study.open(None, large, identity={}, seed=0, method="grid")
    Study.open(None, large, identity={}, seed=0, method="random")


def test_a_grid_lists_its_space_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list[int]()

    def combinations(space: ResolvedSpace) -> Iterable[dict[str, Any]]:
        listed.append(space.size)
        return original(space)

    original = ResolvedSpace.combinations
    monkeypatch.setattr(ResolvedSpace, "combinations", combinations)
    assert len(visited(SMALL, "grid")) == 21
    assert len(listed) == 1


def test_no_other_method_lists_its_space_before_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResolvedSpace, "combinations", None)
    assert len(visited(SMALL, "tpe", most=3)) == 3
