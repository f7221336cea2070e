from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.plan import Choices, IntRange, OptimizerFacts
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.records.trial import TrialRecord, TrialResult
from autotune.space.space import ResolvedSpace, compose
from autotune.testing import fake_environment
from autotune.tuning.proposals import (
    explaining_setting,
    first_guesses,
    largest_batch_variant,
    nearest,
    params_of,
    same_batch_variant,
)
from tests.factories import make_fake_space, make_measurement, make_space

MIB = 2**20


GROUP = TrainingConfig(strategy="ddp", world_size=4)


FOUR_DEVICES = fake_environment(device_count=4, cores=8)


def guessed(space: ResolvedSpace) -> list[TrainingConfig]:
    """The configurations of the first guesses, none of which may break a rule."""
    configs = []
    for guess in first_guesses(space):
        config = compose(guess, space)
        assert isinstance(config, TrainingConfig), config
        configs.append(config)
    assert len(set(configs)) == len(configs)
    return configs


def ddp_config(**ddp: Any) -> TrainingConfig:
    return GROUP.model_copy(update={"ddp": DdpConfig(**ddp)})


def test_guesses_keep_what_is_fixed() -> None:
    for config in guessed(make_fake_space(num_workers=3, amp_dtype="float32")):
        assert (config.num_workers, config.amp_dtype) == (3, "float32")


def test_first_guess_has_a_worker_for_each_core() -> None:
    space = make_fake_space()
    first, *others = guessed(space)
    assert first.num_workers == space.environment.cores
    assert first.global_batch_size == space.baseline.global_batch_size
    assert len(others) >= 2


def test_one_early_guess_takes_all_devices_and_shares_the_cores_among_them() -> None:
    space = make_fake_space(FOUR_DEVICES)
    configs = guessed(space)
    assert [config.world_size for config in configs] == [1, 1, 4, 1, 1]
    group = configs[2]
    assert (group.strategy, group.num_workers, group.ddp) == (
        "ddp",
        2,
        DdpConfig(gradient_as_bucket_view=True),
    )
    assert group.global_batch_size == configs[1].global_batch_size == 256
    assert group.amp_dtype == configs[1].amp_dtype


def test_where_the_baseline_is_a_group_one_guess_takes_one_device() -> None:
    configs = guessed(make_fake_space(FOUR_DEVICES, baseline=GROUP))
    assert [config.world_size for config in configs] == [4, 4, 1, 4, 4]
    assert [config.num_workers for config in configs[:3]] == [2, 2, 8]


def test_where_ranks_are_fixed_every_guess_has_them_and_the_cores_are_shared() -> None:
    configs = guessed(make_fake_space(FOUR_DEVICES, strategy="ddp", world_size=2))
    assert {(config.strategy, config.world_size) for config in configs} == {("ddp", 2)}
    assert configs[0].num_workers == 4


def test_without_ddp_in_the_space_every_guess_is_on_one_device() -> None:
    assert {
        config.world_size
        for config in guessed(make_fake_space(FOUR_DEVICES, strategy=["single", "dp"]))
    } == {1}
    assert {
        config.world_size for config in guessed(make_fake_space(FOUR_DEVICES, world_size=1))
    } == {1}


def test_guess_beyond_the_batch_cap() -> None:
    configs = guessed(
        make_fake_space(baseline=TrainingConfig(grad_accum_steps=4, micro_batch_size=16))
    )
    assert max(config.global_batch_size for config in configs) == 8 * 64
    assert max(config.micro_batch_size for config in configs) == 128


@given(st.integers(-5, 50), st.integers(0, 20), st.integers(0, 20))
def test_the_nearest_value_lies_in_the_range(value: int, low: int, length: int) -> None:
    domain = IntRange(low=low, high=low + length)
    found = nearest(domain, value)
    assert found in domain
    assert isinstance(found, int)
    assert all(abs(found - value) <= abs(other - value) for other in domain)


def test_a_value_that_does_not_compare_gives_the_first_choice() -> None:
    assert nearest(Choices(values=(None, 1)), True) is None


def test_params_say_what_a_default_prefetch_means() -> None:
    params = params_of(TrainingConfig(num_workers=2), make_fake_space())
    assert params["prefetch_factor"] == 2
    assert "prefetch_factor" not in params_of(TrainingConfig(), make_fake_space())


@given(data=st.data())
def test_a_configuration_is_composed_again_from_its_params(data: st.DataObject) -> None:
    more: dict[str, Any] = data.draw(
        st.sampled_from([{}, {"ddp": {"bucket_cap_mb": {"low": 10, "high": 90}}}])
    )
    space = make_fake_space(
        FOUR_DEVICES, baseline=data.draw(st.sampled_from([TrainingConfig(), GROUP])), **more
    )
    params = {
        name: data.draw(st.sampled_from(list(domain))) for name, domain in space.parameters.items()
    }
    config = compose(params, space)
    if isinstance(config, TrainingConfig):
        assert compose(params_of(config, space), space) == config


def test_ddps_params_are_those_of_a_group_alone() -> None:
    space = make_fake_space(FOUR_DEVICES)
    searched = {name for name in space.parameters if name.startswith("ddp.")}
    assert searched == {
        "ddp.bucket_cap_mb",
        "ddp.gradient_as_bucket_view",
        "ddp.static_graph",
        "ddp.comm_hook",
    }
    assert searched <= params_of(GROUP, space).keys()
    assert params_of(GROUP, space)["ddp.bucket_cap_mb"] is None
    assert params_of(ddp_config(bucket_cap_mb=50), space)["ddp.bucket_cap_mb"] == 50.0
    for config in (TrainingConfig(), TrainingConfig(strategy="dp", world_size=2)):
        assert searched.isdisjoint(params_of(config, space))


def test_the_setting_that_all_failures_and_no_success_have_explains_them() -> None:
    failed = [
        TrainingConfig(amp_dtype="float16"),
        TrainingConfig(amp_dtype="float16", num_workers=2),
    ]
    succeeded = [TrainingConfig(), TrainingConfig(num_workers=2)]
    assert explaining_setting(failed, succeeded) == ("amp_dtype", frozenset({"float16"}))


@pytest.mark.parametrize(
    ("failed", "succeeded"),
    [
        # two settings could explain it
        ([TrainingConfig(amp_dtype="float16", channels_last=True)], TrainingConfig()),
        # no switch differs
        ([TrainingConfig(micro_batch_size=size) for size in (64, 128)], TrainingConfig()),
        # a success is the same
        ([TrainingConfig(amp_dtype="float16")], TrainingConfig(amp_dtype="float16")),
    ],
)
def test_unexplained_failures(failed: list[TrainingConfig], succeeded: TrainingConfig) -> None:
    assert explaining_setting(failed, [succeeded]) is None


def test_a_strategy_explains_failures_that_its_settings_do_not() -> None:
    failed = [GROUP, ddp_config(static_graph=True), ddp_config(bucket_cap_mb=50)]
    assert explaining_setting(failed, [TrainingConfig()]) == ("strategy", frozenset({"ddp"}))
    assert explaining_setting(failed, [TrainingConfig(), GROUP]) is None


def test_ddp_setting_explains_before_the_strategy() -> None:
    failed = [ddp_config(static_graph=True), ddp_config(static_graph=True, bucket_cap_mb=50)]
    explanation = ("ddp.static_graph", frozenset({True}))
    assert explaining_setting(failed, [TrainingConfig()]) == explanation
    assert explaining_setting(failed, [TrainingConfig(), GROUP]) == explanation
    assert explaining_setting(failed, [ddp_config(static_graph=True, comm_hook="fp16")]) is None


def memory_trials(peaks_mib: Mapping[int, int | None], **settings: object) -> list[TrialRecord]:
    """A trial of each micro batch; None: it ran out of memory."""
    records = []
    for number, (batch, peak) in enumerate(peaks_mib.items()):
        config = TrainingConfig.model_validate({"micro_batch_size": batch, **settings})
        result = TrialResult(outcome="oom")
        if peak is not None:
            result = TrialResult(
                outcome="ok", measurement=make_measurement(100.0, peak_memory_bytes=peak * MIB)
            )
        records.append(TrialRecord(number=number, config=config, results=(result,)))
    return records


LINEAR = {32: 132, 64: 164, 128: 228}
BATCHES = [32, 64, 128, 256, 512, 1024]


def limited(space: ResolvedSpace, limit_mib: int) -> ResolvedSpace:
    """The space under another memory limit."""
    return replace(
        space, objective=space.objective.model_copy(update={"memory_limit": limit_mib * MIB})
    )


def largest(
    records: list[TrialRecord], limit_mib: int, best: int = 0, **space: Any
) -> dict[str, object] | None:
    resolved = make_fake_space(micro_batch_size=BATCHES, **space)
    found = largest_batch_variant(records[best], limited(resolved, limit_mib), records)
    return None if found is None else dict(found)


def test_largest_batch_that_fits() -> None:
    found = largest(memory_trials(LINEAR, num_workers=2), 700)
    assert found is not None
    assert (found["micro_batch_size"], found["num_workers"]) == (512, 2)


def test_a_batch_that_was_run_is_not_proposed_again() -> None:
    assert largest(memory_trials({**LINEAR, 512: 612}), 700) is None


def test_a_batch_that_was_too_big_gives_way_to_the_next() -> None:
    found = largest(memory_trials({**LINEAR, 512: None}), 700)
    assert found is not None
    assert found["micro_batch_size"] == 256


def test_without_a_line_of_its_precision_nothing_is_proposed() -> None:
    records = [*memory_trials(LINEAR), *memory_trials({32: 80}, amp_dtype="bfloat16")]
    assert largest(records, 700, best=3) is None


def test_largest_batch_accumulates_less() -> None:
    space = make_fake_space(grad_accum_steps=[1, 2])
    records = memory_trials(LINEAR, grad_accum_steps=2)
    found = largest_batch_variant(records[0], limited(space, 10_000), records)
    assert found is not None
    assert (found["micro_batch_size"], found["grad_accum_steps"]) == (256, 1)


def test_only_trials_on_as_many_ranks_tell_of_a_batchs_memory() -> None:
    batches: dict[str, Any] = {"micro_batch_size": [8, 16, 32, 64, 128], "grad_accum_steps": 1}
    space = make_fake_space(FOUR_DEVICES, **batches)
    alone = memory_trials(LINEAR)
    group = memory_trials({16: 500, 32: 532}, strategy="ddp", world_size=4)
    found = largest_batch_variant(group[1], limited(space, 700), [*alone, *group])
    assert found is not None
    assert (found["micro_batch_size"], found["world_size"]) == (64, 4)
    assert largest_batch_variant(group[1], limited(space, 700), alone) is None


def record_of(config: TrainingConfig) -> TrialRecord:
    return TrialRecord(
        number=1,
        config=config,
        results=(TrialResult(outcome="ok", measurement=make_measurement(100.0)),),
    )


def test_the_baselines_batch_is_shared_among_the_ranks_of_the_best() -> None:
    space = make_fake_space(FOUR_DEVICES)
    found = same_batch_variant(record_of(GROUP.model_copy(update={"micro_batch_size": 64})), space)
    assert found is not None
    config = compose(found, space)
    assert isinstance(config, TrainingConfig)
    assert (config.world_size, config.micro_batch_size, config.grad_accum_steps) == (4, 8, 1)


def test_accumulation_makes_up_for_a_share_that_the_space_does_not_have() -> None:
    baseline = TrainingConfig(micro_batch_size=64)
    space = make_fake_space(
        FOUR_DEVICES, baseline=baseline, micro_batch_size=[4, 8, 64], grad_accum_steps=[1, 2]
    )
    found = same_batch_variant(record_of(GROUP.model_copy(update={"micro_batch_size": 4})), space)
    assert found is not None
    assert (found["micro_batch_size"], found["grad_accum_steps"]) == (8, 2)


def test_a_batch_that_the_ranks_can_not_share_has_no_variant() -> None:
    space = make_fake_space(FOUR_DEVICES, baseline=TrainingConfig(micro_batch_size=32))
    three = TrainingConfig(strategy="ddp", world_size=3, micro_batch_size=64)
    assert same_batch_variant(record_of(three), space) is None
    assert same_batch_variant(record_of(TrainingConfig(num_workers=2)), space) is None


def test_compile_mode_explains_before_compile() -> None:
    failed = [
        TrainingConfig(compile=True, compile_mode="reduce-overhead", num_workers=count)
        for count in (0, 1)
    ]
    explanation = ("compile_mode", frozenset({"reduce-overhead"}))
    assert explaining_setting(failed, [TrainingConfig()]) == explanation
    assert (
        explaining_setting(failed, [TrainingConfig(), TrainingConfig(compile=True)]) == explanation
    )
    both = [*failed, TrainingConfig(compile=True)]
    assert explaining_setting(both, [TrainingConfig()]) == ("compile", frozenset({True}))


def test_a_fused_optimizer_explains_failures_that_nothing_else_does() -> None:
    fused, coarse = TrainingConfig(fused=True), TrainingConfig(fused=True, amp_dtype="bfloat16")
    assert explaining_setting([fused], [TrainingConfig()]) == ("fused", frozenset({True}))
    assert explaining_setting([coarse], [TrainingConfig()]) == (
        "amp_dtype",
        frozenset({"bfloat16"}),
    )
    assert explaining_setting([coarse], [TrainingConfig(amp_dtype="bfloat16")]) == (
        "fused",
        frozenset({True}),
    )
    assert explaining_setting([fused], [TrainingConfig(fused=True, num_workers=1)]) is None


def test_the_devices_cheap_gains_are_guessed_together() -> None:
    optimizer = OptimizerFacts(name="SGD", can_fuse=True)
    space = make_space(optimizer=optimizer, has_convolutions=True, has_fixed_shapes=True)
    assert any(
        one.fused and one.cudnn_benchmark and one.amp_dtype == "bfloat16" for one in guessed(space)
    )
    assert not any(one.fused or one.cudnn_benchmark for one in guessed(make_space()))
