"""Search max_tokens in place of the micro batch, which follows it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.plan import SearchSpace, SettingValue
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import list_variations
from autotune.models.observations import device_variations, loader_variations
from autotune.records.ceilings import CeilingBook, loader_key
from autotune.space.ranges import whole_numbers
from autotune.space.scaling import budget_obstacle, samples_within, with_batch, with_mean_batch
from autotune.space.space import ResolvedSpace, compose
from autotune.tuning.proposals import first_guesses, params_of, same_batch_variant
from tests.factories import CPU, make_facts, make_measurement, make_space, make_trial

BASELINE = TrainingConfig(micro_batch_size=13, max_tokens=1000)
_BASELINES = st.builds(
    TrainingConfig,
    micro_batch_size=st.integers(1, 300),
    max_tokens=st.integers(1, 100_000),
    grad_accum_steps=st.integers(1, 6),
)


def budget_space(given_space: dict[str, Any] | None = None, **changes: Any) -> ResolvedSpace:
    known: dict[str, Any] = {"baseline": BASELINE, "has_token_budget": True}
    return make_space(given_space, **(known | changes))


def composed(space: ResolvedSpace, **values: SettingValue) -> TrainingConfig:
    config = compose({**params_of(space.baseline, space), **values}, space)
    assert isinstance(config, TrainingConfig), config
    return config


def test_default_max_tokens() -> None:
    space = budget_space()
    assert list(space.domains["max_tokens"]) == [250, 500, 1000, 2000, 4000, 8000]
    assert "max_tokens" in space.parameters
    assert "micro_batch_size" not in space.parameters
    assert list(budget_space(max_batch_scale=2).domains["max_tokens"]) == [250, 500, 1000, 2000]


def test_no_max_tokens_without_a_budget() -> None:
    space = make_space()
    assert list(space.domains["max_tokens"]) == [None]
    assert {"micro_batch_size"} == {"micro_batch_size", "max_tokens"} & set(space.parameters)


def test_listed_budgets_are_the_ones_that_are_tried() -> None:
    space = budget_space({"max_tokens": [4096, 8192]})
    assert whole_numbers(space.domains["max_tokens"]) == [4096, 8192]
    assert composed(space, max_tokens=8192).micro_batch_size == 106


def test_the_samples_of_a_batch_follow_the_budget() -> None:
    assert composed(budget_space(), max_tokens=8000).micro_batch_size == 104
    assert composed(budget_space(), max_tokens=250).micro_batch_size == 3
    assert samples_within(1, BASELINE) == 1


@given(_BASELINES, st.booleans(), st.data())
def test_composed_batches_follow_the_budget(
    baseline: TrainingConfig, keeps: bool, data: st.DataObject
) -> None:
    space = budget_space(
        baseline=baseline, global_batch="keep" if keeps else "scale", environment=CPU
    )
    assert baseline.max_tokens in space.domains["max_tokens"]
    params = {
        name: data.draw(st.sampled_from(list(domain)), name)
        for name, domain in space.parameters.items()
    }
    config = compose(params, space)
    if isinstance(config, str):
        assert keeps or "within" in config
        return
    assert config.max_tokens == params.get("max_tokens", baseline.max_tokens)
    assert config.max_tokens is not None
    assert config.micro_batch_size == samples_within(config.max_tokens, baseline)
    if keeps:
        assert config.global_batch_ratio(baseline) == 1
    else:
        assert config.global_batch_size <= max(
            8 * baseline.global_batch_size, baseline.global_batch_size
        )
    assert TrainingConfig.model_validate(config.model_dump()) == config


def test_kept_batch_is_in_tokens() -> None:
    space = budget_space(
        baseline=BASELINE.model_copy(update={"grad_accum_steps": 2}), global_batch="keep"
    )
    config = composed(space, max_tokens=500)
    assert (config.grad_accum_steps, config.micro_batch_size) == (4, 6)
    assert config.global_batch_size != space.baseline.global_batch_size
    assert config.global_batch_ratio(space.baseline) == 1


def test_same_batch_variant_is_in_tokens() -> None:
    space = budget_space()
    best = make_trial(1, config=composed(space, max_tokens=500, grad_accum_steps=1))
    variant = same_batch_variant(best, space)
    assert variant is not None
    assert composed(space, **variant).global_batch_ratio(BASELINE) == 1


def test_first_guesses_take_the_largest_budget() -> None:
    assert max(whole_numbers(budget_space().domains["max_tokens"])) in {
        guess.get("max_tokens") for guess in first_guesses(budget_space())
    }


def test_curves_follow_the_budget() -> None:
    space = budget_space()
    budgets = {
        config.max_tokens: config.micro_batch_size
        for config in device_variations(space, CeilingBook())
    }
    assert budgets == {250: 3, 500: 6, 1000: 13, 2000: 26, 4000: 52, 8000: 104}
    ends = {config.max_tokens for config in loader_variations(space, CeilingBook())}
    assert {250, 8000} <= ends
    assert {config.max_tokens for config in list_variations(space, make_measurement())} >= {
        462,
        1000,
        2000,
        4000,
    }


def test_loader_key_holds_the_budget() -> None:
    small, less = (
        BASELINE.model_copy(update={"micro_batch_size": 1, "max_tokens": most}) for most in (80, 40)
    )
    assert loader_key(small) != loader_key(less)


def test_with_batch_scales_the_budget() -> None:
    assert with_batch(BASELINE, 26).max_tokens == 2000
    assert with_batch(TrainingConfig(), 8) == TrainingConfig(micro_batch_size=8)


def test_with_mean_batch() -> None:
    facts = make_facts(has_token_budget=True, budget_samples=12.6)
    assert with_mean_batch(TrainingConfig(max_tokens=1000), facts) == BASELINE
    both = make_facts(has_token_budget=True)
    assert with_mean_batch(BASELINE, both) == BASELINE


@pytest.mark.parametrize(
    ("listed", "has_budget", "refused"),
    [
        ({"micro_batch_size": [8]}, True, "space.micro_batch_size"),
        ({"max_tokens": [64]}, False, "space.max_tokens"),
        ({"max_tokens": None}, False, None),
        ({"max_tokens": [64]}, True, None),
        ({"micro_batch_size": [8]}, False, None),
    ],
)
def test_budget_obstacle(listed: dict[str, Any], has_budget: bool, refused: str | None) -> None:
    reason = budget_obstacle(
        SearchSpace.model_validate(listed).given(), make_facts(has_token_budget=has_budget)
    )
    assert reason is None if refused is None else str(reason).startswith(f"{refused} ")
