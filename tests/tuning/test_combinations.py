"""A model is asked about all of a small space, and about a telling part of a large one."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from autotune.config.plan import SettingValue
from autotune.config.training_config import TrainingConfig
from autotune.space.space import ResolvedSpace, compose
from autotune.testing import fake_environment
from autotune.tuning.proposals import Candidates, first_guesses, params_of
from tests.factories import make_fake_space
from tests.factories.searches import FIXED

SMALL: dict[str, Any] = {
    **FIXED,
    "micro_batch_size": [16, 32, 64],
    "num_workers": [0, 2, 4],
    "prefetch_factor": [2, 4],
    "amp_dtype": ["float32", "bfloat16"],
}
BEST = TrainingConfig(micro_batch_size=64, num_workers=4, prefetch_factor=4, amp_dtype="bfloat16")


ONE_DEVICE = fake_environment(cores=16)
FOUR_DEVICES = fake_environment(device_count=4, cores=16)
LARGE = make_fake_space(FOUR_DEVICES)


def configs_near(
    space: ResolvedSpace, *best: TrainingConfig, seed: int = 0
) -> list[TrainingConfig]:
    return [config for _, config in Candidates(space, seed).near(best)]


def composed(space: ResolvedSpace, params: dict[str, SettingValue]) -> TrainingConfig:
    config = compose(params, space)
    assert isinstance(config, TrainingConfig), config
    return config


def all_of(space: ResolvedSpace) -> set[TrainingConfig]:
    return {
        config
        for one in space.combinations()
        if isinstance(config := compose(one, space), TrainingConfig)
    }


def test_of_a_small_space_every_configuration_is_a_candidate_once() -> None:
    space = make_fake_space(ONE_DEVICE, **SMALL)
    found = configs_near(space, BEST)
    # without workers, prefetching means nothing: (2 * 2 + 1) loaders
    assert len(found) == len(set(found)) == 3 * 2 * 5
    assert set(found) == all_of(space)


def test_of_a_small_space_neither_seed_nor_best_changes_anything() -> None:
    space = make_fake_space(ONE_DEVICE, **SMALL)
    assert configs_near(space, seed=0) == configs_near(space, BEST, seed=1)


def test_what_breaks_a_rule_is_no_candidate() -> None:
    small: dict[str, Any] = {"num_workers": [0, 2], "prefetch_factor": 2, "pin_memory": False}
    for free in (small, {}):
        space = make_fake_space(FOUR_DEVICES, objective={"max_batch_scale": 2}, **free)
        assert space.batch_cap == 64
        best = BEST.model_copy(update={"grad_accum_steps": 1})
        assert max(config.global_batch_size for config in configs_near(space, best)) == 64


def test_each_candidate_comes_with_the_values_that_make_it() -> None:
    for params, config in Candidates(LARGE, 0).near([BEST]):
        assert compose(params, LARGE) == config


def test_a_large_space_is_not_listed_as_a_whole() -> None:
    assert LARGE.size > 10**6
    assert 1_000 < len(configs_near(LARGE, BEST)) < 10_000


def test_of_a_large_space_the_first_guesses_are_candidates() -> None:
    found = set(configs_near(LARGE))
    assert {composed(LARGE, guess) for guess in first_guesses(LARGE)} <= found


def varied(config: TrainingConfig, count: int) -> set[TrainingConfig]:
    """What another value of so many settings makes of a configuration."""
    own, found = {**first_values(), **params_of(config, LARGE)}, set()
    for names in combinations(LARGE.parameters, count):
        frontier = [own]
        for name in names:
            frontier = [
                {**one, name: value}
                for one in frontier
                for value in LARGE.parameters[name]
                if value != own[name]
            ]
        found |= {
            one for params in frontier if isinstance(one := compose(params, LARGE), TrainingConfig)
        }
    return found


def first_values() -> dict[str, SettingValue]:
    return {name: next(iter(domain)) for name, domain in LARGE.parameters.items()}


def test_neighbors_in_a_large_space() -> None:
    second = BEST.model_copy(update={"micro_batch_size": 16})
    found = set(configs_near(LARGE, BEST, second))
    assert varied(BEST, 1) | varied(BEST, 2) | varied(second, 1) <= found
    assert not varied(second, 2) <= found


def test_neighbors_in_a_long_range() -> None:
    space = make_fake_space(
        ONE_DEVICE,
        **{
            **SMALL,
            "micro_batch_size": {"low": 8, "high": 4096},
            "num_workers": {"low": 0, "high": 64},
        },
    )
    best = BEST.model_copy(update={"micro_batch_size": 100})
    common, found = set(configs_near(space)), set(configs_near(space, best))
    assert 1_000 < len(found) < 6_000
    near = {one.micro_batch_size for one in found - common}
    assert {8, 98, 99, 101, 102, 4096} <= near
    assert len(near) < 40


def test_a_large_space_is_drawn_from_by_its_seed() -> None:
    assert configs_near(LARGE, BEST, seed=3) == configs_near(LARGE, BEST, seed=3)
    assert set(configs_near(LARGE, BEST, seed=3)) != set(configs_near(LARGE, BEST, seed=4))


def test_asking_again_gives_the_same_and_another_best_only_other_neighbours() -> None:
    candidates = Candidates(LARGE, 0)
    first = candidates.near([BEST])
    other = candidates.near([BEST.model_copy(update={"num_workers": 1})])
    assert candidates.near([BEST]) == first
    assert {config for _, config in Candidates(LARGE, 0).near([])} <= {
        config for _, config in other
    }


def test_neighbours_of_what_is_not_among_the_best_any_more_are_not_kept() -> None:
    candidates = Candidates(LARGE, 0)
    leaders = [BEST.model_copy(update={"micro_batch_size": size}) for size in (16, 32, 64, 128)]
    for leader in leaders:
        candidates.near([leader])
    assert [config for config, _ in candidates._around] == leaders[-1:]
