"""Each rule between settings, as a reason or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core import rules
from autotune.core.environment import Environment
from autotune.core.training_config import DdpConfig, TrainingConfig
from autotune.core.workload import WorkloadFacts

_LOADER_SETTINGS = st.fixed_dictionaries(
    {
        "num_workers": st.integers(0, 8),
        "prefetch_factor": st.sampled_from([None, 2, 4]),
        "persistent_workers": st.booleans(),
        "pin_memory": st.booleans(),
        "channels_last": st.booleans(),
    }
)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prefetch_factor": 4}, "num_workers=0 and prefetch_factor=4"),
        ({"persistent_workers": True}, "num_workers=0"),
        ({"world_size": 4}, "world_size=4"),
        ({"ddp": DdpConfig()}, "'single'"),
        ({"strategy": "ddp", "ddp": DdpConfig(static_graph=True), "grad_accum_steps": 4}, "grad_accum_steps=4"),
    ],
)
def test_a_contradiction_names_the_values_seen(changes: dict[str, Any], named: str) -> None:
    reason = rules.contradiction(TrainingConfig().model_copy(update=changes))
    assert reason is not None
    assert named in reason


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(),
        TrainingConfig(num_workers=2, prefetch_factor=4, persistent_workers=True),
        TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(static_graph=True)),
        TrainingConfig(strategy="ddp", world_size=2, grad_accum_steps=2, ddp=DdpConfig()),
    ],
)
def test_settings_that_go_together_have_no_contradiction(config: TrainingConfig) -> None:
    assert rules.contradiction(config) is None


def test_a_batch_must_fit_into_the_dataset_where_the_last_one_is_dropped(
    make_facts: Callable[..., WorkloadFacts],
) -> None:
    facts = make_facts(dataset_length=100)
    fits, larger = TrainingConfig(micro_batch_size=100), TrainingConfig(micro_batch_size=101)
    assert rules.obstacle(fits, facts, drop_last=True) is None
    assert "100 samples" in str(rules.obstacle(larger, facts, drop_last=True))
    assert rules.obstacle(larger, facts, drop_last=False) is None
    assert rules.obstacle(larger, make_facts(dataset_length=None), drop_last=True) is None


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_more_than_one_device_is_said_to_be_out_of_reach(
    make_facts: Callable[..., WorkloadFacts], strategy: str
) -> None:
    config = TrainingConfig.model_validate({"strategy": strategy})
    assert f"strategy={strategy}" in str(rules.obstacle(config, make_facts(), drop_last=True))


def test_a_fixed_batch_sampler_fixes_the_batch(make_facts: Callable[..., WorkloadFacts]) -> None:
    facts = make_facts(fixed_batch_size=16)
    assert rules.obstacle(TrainingConfig(micro_batch_size=16), facts, drop_last=True) is None
    assert "batches of 16" in str(rules.obstacle(TrainingConfig(), facts, drop_last=True))


def test_what_has_no_effect_is_named_with_its_reason(
    make_facts: Callable[..., WorkloadFacts], make_environment: Callable[..., Environment], cpu: Environment
) -> None:
    config, flat = TrainingConfig(pin_memory=True, channels_last=True), make_facts(has_4d_input=False)
    assert set(rules.without_effect(config, flat, cpu)) == {"pin_memory", "channels_last"}
    assert rules.without_effect(config, make_facts(), make_environment()) == {}
    assert rules.without_effect(TrainingConfig(), flat, cpu) == {}


@given(_LOADER_SETTINGS, st.booleans(), st.booleans())
def test_normalising_is_idempotent_valid_and_leaves_nothing_without_effect(
    make_facts: Callable[..., WorkloadFacts],
    make_environment: Callable[..., Environment],
    cpu: Environment,
    settings: dict[str, object],
    is_cpu: bool,
    has_4d: bool,
) -> None:
    facts, environment = make_facts(has_4d_input=has_4d), cpu if is_cpu else make_environment()
    before = dict(settings)
    once = rules.normalised(settings, facts, environment)
    assert settings == before
    assert rules.normalised(once, facts, environment) == once
    assert rules.without_effect(TrainingConfig.model_validate(once), facts, environment) == {}


def test_configurations_that_run_alike_share_a_key(
    make_facts: Callable[..., WorkloadFacts], make_environment: Callable[..., Environment], cpu: Environment
) -> None:
    def key(**settings: Any) -> str:
        return rules.same_behaviour_key(TrainingConfig(**settings), make_facts(has_4d_input=False), cpu)

    assert key(num_workers=2) == key(num_workers=2, prefetch_factor=2)
    assert key() == key(pin_memory=True, channels_last=True, lr=0.5)
    assert key(num_workers=2) != key(num_workers=2, prefetch_factor=4)
    assert key() != key(num_workers=1)
    assert key() != key(micro_batch_size=64)
    on_cuda = [
        rules.same_behaviour_key(TrainingConfig(pin_memory=pin), make_facts(), make_environment())
        for pin in (True, False)
    ]
    assert on_cuda[0] != on_cuda[1]
