"""Complete the space by the documented ranges, and compose configurations within it."""

from __future__ import annotations

import re
from itertools import islice, product
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.plan import IntRange, SearchSpace
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.messages.space import dataset_not_sharded
from autotune.space import constraints as rules
from autotune.space.space import ResolvedSpace, compose, setting_of
from tests.factories import CPU, FOUR_DEVICES, make_environment, make_space

_DDP_SUBSETS: dict[str, st.SearchStrategy[Any]] = {
    "bucket_cap_mb": st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=3),
    "static_graph": st.lists(st.booleans(), min_size=1),
    "find_unused_parameters": st.lists(st.booleans(), min_size=1),
    "broadcast_buffers": st.booleans(),
    "comm_hook": st.lists(st.sampled_from([None, "fp16", "bf16", "powersgd"]), min_size=1),
}
_SUBSETS: dict[str, st.SearchStrategy[Any]] = {
    "micro_batch_size": st.lists(st.integers(1, 512), min_size=1, max_size=4),
    "grad_accum_steps": st.lists(st.integers(1, 16), min_size=1, max_size=3),
    "amp_dtype": st.lists(st.sampled_from(["float32", "tf32", "bfloat16", "float16"]), min_size=1),
    "num_workers": st.builds(
        lambda low, more: {"low": low, "high": low + more}, st.integers(0, 4), st.integers(0, 12)
    ),
    "prefetch_factor": st.lists(st.none() | st.integers(1, 16), min_size=1, max_size=3),
    "persistent_workers": st.booleans(),
    "pin_memory": st.lists(st.booleans(), min_size=1),
    "in_order": st.lists(st.booleans(), min_size=1),
    "compile": st.lists(st.booleans(), min_size=1),
    "strategy": st.lists(st.sampled_from(["single", "dp", "ddp"]), min_size=1),
    "world_size": st.lists(st.integers(1, 6), min_size=1, max_size=2),
    "ddp": st.fixed_dictionaries({}, optional=_DDP_SUBSETS),
}
_SPACES = st.fixed_dictionaries({}, optional=_SUBSETS)
_BASELINES = st.builds(
    TrainingConfig,
    micro_batch_size=st.integers(1, 300),
    grad_accum_steps=st.integers(1, 6),
    num_workers=st.integers(0, 40),
    compile=st.booleans(),
    intra_op_threads=st.none() | st.integers(1, 4),
)


def _values(space: ResolvedSpace, name: str) -> list[Any]:
    return list(space.domains[name])


def _some_combinations(
    space: ResolvedSpace, random: Random, count: int = 60
) -> list[dict[str, Any]]:
    """Some combinations from all over the space: the first ones are of one strategy alone."""
    domains = {name: list(domain) for name, domain in space.parameters.items()}
    return [{name: random.choice(values) for name, values in domains.items()} for _ in range(count)]


def config_of(params: dict[str, Any], space: ResolvedSpace) -> TrainingConfig:
    config = compose(params, space)
    assert isinstance(config, TrainingConfig), config
    return config


def _composed(space: ResolvedSpace, most: int = 400) -> list[TrainingConfig]:
    found = (compose(params, space) for params in islice(space.combinations(), most))
    return [config for config in found if isinstance(config, TrainingConfig)]


# Default ranges


@pytest.mark.parametrize(("cores", "most"), [(1, 8), (2, 8), (4, 8), (16, 32)])
def test_default_workers(cores: int, most: int) -> None:
    space = make_space(environment=make_environment(cores=cores))
    assert space.domains["num_workers"] == IntRange(low=0, high=most)


def test_the_default_ranges_are_the_documented_ones() -> None:
    space = make_space()
    assert _values(space, "prefetch_factor") == [2, 4, 8]
    assert _values(space, "micro_batch_size") == [8, 16, 32, 64, 128, 256]
    assert {1, 2, 4} <= set(_values(space, "grad_accum_steps"))
    assert _values(space, "amp_dtype") == ["float32", "tf32", "bfloat16", "float16"]
    for name in ("persistent_workers", "pin_memory", "channels_last"):
        assert _values(space, name) == [False, True]
    assert _values(space, "world_size") == [1]
    assert _values(space, "in_order") == [True]
    assert set(space.domains) == set(SearchSpace.model_fields) - {"ddp"}


def test_max_batch_scale() -> None:
    assert _values(make_space(max_batch_scale=2), "micro_batch_size") == [8, 16, 32, 64]
    odd = _values(make_space(baseline=TrainingConfig(micro_batch_size=48)), "micro_batch_size")
    assert 48 in odd
    assert odd[-1] == 256


def test_default_precisions_are_native() -> None:
    space = make_space(environment=CPU)
    assert _values(space, "amp_dtype") == ["float32", "bfloat16"]
    assert _values(space, "pin_memory") == [False]
    assert _values(space, "intra_op_threads") == [None, 1, 2]


def test_unsharded_iterable_gets_one_worker() -> None:
    space = make_space(is_iterable=True, is_sharded=False, dataset_length=None)
    assert space.domains["num_workers"] == IntRange(low=0, high=1)
    assert space.notes == (dataset_not_sharded(most_workers=1),)
    explicit = make_space(
        {"num_workers": [4]}, is_iterable=True, is_sharded=False, dataset_length=None
    )
    assert _values(explicit, "num_workers") == [4]
    assert explicit.notes == (dataset_not_sharded(most_workers=None),)


def test_small_dataset_caps_the_batch() -> None:
    assert _values(make_space(dataset_length=100), "micro_batch_size") == [8, 16, 32, 64]
    assert _values(make_space(dataset_length=5), "micro_batch_size") == [5]
    assert _values(make_space(dataset_length=100, drop_last=False), "micro_batch_size")[-1] == 256


@given(_BASELINES)
def test_the_default_ranges_hold_the_baseline(baseline: TrainingConfig) -> None:
    space = make_space(baseline=baseline)
    own = baseline.model_dump() | {"prefetch_factor": 2}
    assert {name for name, domain in space.domains.items() if own[name] not in domain} == set()
    composed = config_of({name: own[name] for name in space.parameters}, space)
    keys = {
        rules.same_behaviour_key(config, space.facts, space.environment)
        for config in (composed, baseline)
    }
    assert len(keys) == 1


# Explicit choices


def test_explicit_choices_override_every_cap() -> None:
    listed = {"micro_batch_size": 4096, "num_workers": 64, "prefetch_factor": 32}
    config = config_of({}, make_space(listed))
    assert {name: getattr(config, name) for name in listed} == listed


def test_listed_accumulation() -> None:
    space = make_space({"grad_accum_steps": [1, 4]})
    assert {config.grad_accum_steps for config in _composed(space, 10**6)} == {1, 4}
    assert max(config.global_batch_size for config in _composed(space, 10**6)) == 256
    beyond = make_space({"grad_accum_steps": [64]})
    assert {config.global_batch_size for config in _composed(beyond, 10**6)} == {64 * 8}


def test_fixed_batch_sampler_leaves_one_batch() -> None:
    assert _values(make_space(fixed_batch_size=512), "micro_batch_size") == [512]


# Composing


@given(
    given_space=_SPACES,
    baseline=_BASELINES,
    keep=st.booleans(),
    scale=st.sampled_from([1, 1.5, 8]),
    length=st.none() | st.integers(1, 3000),
    drop_last=st.booleans(),
    on_cpu=st.booleans(),
    has_4d=st.booleans(),
    has_unused=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_what_is_composed_breaks_no_rule_and_no_cap(
    given_space: dict[str, Any],
    baseline: TrainingConfig,
    keep: bool,
    scale: float,
    length: int | None,
    drop_last: bool,
    on_cpu: bool,
    has_4d: bool,
    has_unused: bool,
    random: Random,
) -> None:
    space = make_space(
        given_space,
        baseline=baseline,
        environment=CPU if on_cpu else FOUR_DEVICES,
        drop_last=drop_last,
        global_batch="keep" if keep else "scale",
        max_batch_scale=scale,
        dataset_length=length,
        has_4d_input=has_4d,
        has_unused_parameters=has_unused,
    )
    for params in _some_combinations(space, random):
        config = compose(params, space)
        if isinstance(config, str):
            assert config
            continue
        assert rules.obstacle(config, space.facts, space.environment, drop_last=drop_last) is None
        assert rules.without_effect(config, space.facts, space.environment) == {}
        assert config.lr == baseline.lr
        plain = config.model_dump()
        assert rules.normalised(plain, space.facts, space.environment) == plain
        if keep:
            assert config.global_batch_size == baseline.global_batch_size
        elif not given_space.keys() & {"micro_batch_size", "grad_accum_steps", "world_size"}:
            assert config.global_batch_size <= max(scale * baseline.global_batch_size, 1)
        assert config.strategy in space.domains["strategy"]
        assert config.world_size in space.domains["world_size"] or config.strategy == "single"


@given(_BASELINES)
def test_keeping_the_batch_leaves_a_way(
    baseline: TrainingConfig,
) -> None:
    space = make_space(baseline=baseline, global_batch="keep")
    assert "grad_accum_steps" not in space.parameters
    sizes = set()
    for size in space.domains["micro_batch_size"]:
        params = {name: next(iter(domain)) for name, domain in space.parameters.items()} | {
            "micro_batch_size": size
        }
        config = compose(params, space)
        assert isinstance(config, TrainingConfig), config
        assert config.global_batch_size == baseline.global_batch_size
        sizes.add(config.micro_batch_size)
    assert baseline.micro_batch_size in sizes


def test_kept_batch_must_be_divided() -> None:
    own = TrainingConfig(micro_batch_size=64)
    space = make_space({"micro_batch_size": [24, 32, 64]}, global_batch="keep", baseline=own)
    assert "micro_batch_size=24" in str(compose({"micro_batch_size": 24}, space))
    assert config_of({"micro_batch_size": 32}, space).grad_accum_steps == 2


def test_value_outside_the_space() -> None:
    assert "num_workers=99" in str(compose({"num_workers": 99}, make_space()))


def test_a_contradiction_is_refused_by_its_rule() -> None:
    space = make_space(
        {
            "strategy": "ddp",
            "world_size": 2,
            "ddp": {"static_graph": True},
            "grad_accum_steps": [1, 2],
        },
        environment=FOUR_DEVICES,
    )
    assert str(compose({"grad_accum_steps": 2}, space)).startswith("ddp.static_graph ")


def test_no_dp_with_a_compiled_model() -> None:
    space = make_space({"compile": [False, True], "world_size": [1, 2]}, environment=FOUR_DEVICES)
    assert "dp" in space.domains["strategy"]
    composed = [compose(params, space) for params in _some_combinations(space, Random(0))]
    ran = {(one.strategy, one.compile) for one in composed if isinstance(one, TrainingConfig)}
    assert ran == {*product(("single", "ddp"), (False, True)), ("dp", False)}
    only_that = {"compile": True, "strategy": "dp", "world_size": 2}
    refused = compose({}, make_space(only_that, environment=FOUR_DEVICES))
    assert re.search(r"^compile .*'dp'", str(refused))


def test_what_has_no_effect_is_put_to_neutral() -> None:
    space = make_space({"pin_memory": [True]}, environment=None, has_4d_input=False)
    config = config_of({"num_workers": 0, "prefetch_factor": 8, "persistent_workers": True}, space)
    assert (config.prefetch_factor, config.persistent_workers, config.channels_last) == (
        None,
        False,
        False,
    )


def test_in_order_needs_workers() -> None:
    space = make_space({**_ONE_VALUE_EACH, "num_workers": [0, 2], "in_order": [True, False]})
    found = {(config.num_workers, config.in_order) for config in _composed(space)}
    assert found == {(0, True), (2, True), (2, False)}


def test_a_setting_with_one_value_is_no_parameter() -> None:
    space = make_space(
        {name: domain for name, domain in _ONE_VALUE_EACH.items() if name != "num_workers"}
    )
    assert set(space.parameters) == {"num_workers"}
    assert space.size == len(list(space.combinations())) == 9
    assert make_space(_ONE_VALUE_EACH).size == 1
    assert list(make_space(_ONE_VALUE_EACH).combinations()) == [{}]


_ONE_VALUE_EACH = {
    "micro_batch_size": 32,
    "grad_accum_steps": 1,
    "amp_dtype": "float32",
    "num_workers": 2,
    "prefetch_factor": 2,
    "persistent_workers": False,
    "pin_memory": False,
    "channels_last": False,
    "compile": False,
    "intra_op_threads": None,
}


# Several ranks


@pytest.mark.parametrize(
    "params",
    [
        {"strategy": "single", "world_size": 3},
        {"strategy": "dp", "world_size": 1},
        {"strategy": "ddp", "world_size": 1, "ddp.static_graph": True, "ddp.bucket_cap_mb": 50.0},
    ],
)
def test_one_rank_is_single(params: dict[str, Any]) -> None:
    space = make_space(environment=FOUR_DEVICES)
    config = compose(params, space)
    assert config == compose({}, space)
    assert isinstance(config, TrainingConfig)
    assert (config.strategy, config.world_size, config.ddp) == ("single", 1, None)


def test_ddp_settings_reach_the_configuration() -> None:
    space = make_space(environment=FOUR_DEVICES)
    group: dict[str, Any] = {"strategy": "ddp", "world_size": 2}
    plain = config_of(group, space)
    own = config_of({**group, "ddp.bucket_cap_mb": 50.0}, space)
    assert (plain.strategy, plain.world_size, plain.ddp) == ("ddp", 2, None)
    assert own.ddp == DdpConfig(bucket_cap_mb=50)
    parallel = config_of({"strategy": "dp", "world_size": 2, "ddp.bucket_cap_mb": 50.0}, space)
    assert (parallel.strategy, parallel.world_size, parallel.ddp) == ("dp", 2, None)


def test_setting_of() -> None:
    group = TrainingConfig(strategy="ddp", world_size=2, ddp=DdpConfig(bucket_cap_mb=50))
    assert (setting_of(group, "world_size"), setting_of(group, "ddp.bucket_cap_mb")) == (2, 50.0)
    assert setting_of(group.model_copy(update={"ddp": None}), "ddp.broadcast_buffers") is True
    assert setting_of(TrainingConfig(), "ddp.broadcast_buffers") is None


def test_one_rank_may_be_left_out() -> None:
    space = make_space({"strategy": "ddp", "world_size": [1, 2]}, environment=FOUR_DEVICES)
    assert "'single'" in str(compose({"world_size": 1}, space))
    assert isinstance(compose({"world_size": 2}, space), TrainingConfig)
    with_one = make_space(
        {"strategy": ["single", "ddp"], "world_size": 2}, environment=FOUR_DEVICES
    )
    config = config_of({"strategy": "single"}, with_one)
    assert config.world_size == 1


def test_workers_of_all_ranks_are_capped() -> None:
    params: dict[str, Any] = {"strategy": "ddp", "world_size": 4, "num_workers": 32}
    shared = config_of(params, make_space(environment=FOUR_DEVICES))
    listed = config_of(params, make_space({"num_workers": [0, 32]}, environment=FOUR_DEVICES))
    assert (shared.num_workers, listed.num_workers) == (8, 32)


def test_listed_ranks_raise_the_cap() -> None:
    given_space = {"strategy": "ddp", "world_size": 4, "grad_accum_steps": [8]}
    space = make_space(given_space, environment=FOUR_DEVICES, max_batch_scale=1)
    assert {config.global_batch_size for config in _composed(space, 10_000)} == {8 * 8 * 4}


def test_a_kept_batch_is_split_over_the_ranks() -> None:
    baseline = TrainingConfig(micro_batch_size=32, grad_accum_steps=2)
    space = make_space(environment=FOUR_DEVICES, global_batch="keep", baseline=baseline)
    group: dict[str, Any] = {"strategy": "ddp", "world_size": 4}
    config = config_of({**group, "micro_batch_size": 8}, space)
    assert (config.grad_accum_steps, config.global_batch_size) == (2, 64)
    reason = str(compose({**group, "micro_batch_size": 32}, space))
    assert re.search("micro_batch_size=32 .*4 ranks", reason)


def test_unlisted_hooks_may_not_round() -> None:
    group: dict[str, Any] = {"strategy": "ddp", "world_size": 2, "ddp.comm_hook": "bf16"}
    space = make_space(environment=FOUR_DEVICES)
    assert "ddp.comm_hook=bf16" in str(compose(group, space))
    assert "ddp.comm_hook=bf16" in str(compose({**group, "amp_dtype": "float16"}, space))
    assert isinstance(compose({**group, "amp_dtype": "bfloat16"}, space), TrainingConfig)
    listed = make_space({"ddp": {"comm_hook": [None, "bf16"]}}, environment=FOUR_DEVICES)
    assert isinstance(compose(group, listed), TrainingConfig)
