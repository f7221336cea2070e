"""Check each rule between settings, machine and workload."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.environment import Environment
from autotune.config.plan import OptimizerFacts, ScriptFacts
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.space import constraints as rules
from tests.factories import CPU, FOUR_DEVICES, make_environment, make_facts

_LOADER_SETTINGS = st.fixed_dictionaries(
    {
        "num_workers": st.integers(0, 8),
        "prefetch_factor": st.sampled_from([None, 2, 4]),
        "persistent_workers": st.booleans(),
        "pin_memory": st.booleans(),
        "channels_last": st.booleans(),
        "compile": st.booleans(),
        "compile_mode": st.sampled_from(["default", "reduce-overhead", "max-autotune"]),
        "cudnn_benchmark": st.booleans(),
        "fused": st.booleans(),
    }
)
_RANK_SETTINGS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["single", "dp", "ddp"]),
        "world_size": st.integers(1, 3),
        "ddp": st.none()
        | st.builds(
            DdpConfig,
            bucket_cap_mb=st.sampled_from([None, 25, 50]),
            static_graph=st.booleans(),
            find_unused_parameters=st.booleans(),
            broadcast_buffers=st.booleans(),
        ).map(DdpConfig.model_dump),
    }
)


@pytest.fixture(scope="session")
def obstacle() -> Callable[..., str | None]:
    """(configuration or its settings); keywords `environment` (four devices), `drop_last` (true), facts' fields."""

    def told(
        config: TrainingConfig | dict[str, Any],
        *,
        environment: Environment = FOUR_DEVICES,
        drop_last: bool = True,
        **facts: Any,
    ) -> str | None:
        parsed = TrainingConfig.model_validate(config)
        return rules.obstacle(parsed, make_facts(**facts), environment, drop_last=drop_last)

    return told


def test_batch_fits_into_the_dataset(
    obstacle: Callable[..., str | None],
) -> None:
    fits, larger = TrainingConfig(micro_batch_size=100), TrainingConfig(micro_batch_size=101)
    assert obstacle(fits, dataset_length=100) is None
    assert "micro_batch_size=101" in str(obstacle(larger, dataset_length=100))
    assert obstacle(larger, dataset_length=100, drop_last=False) is None
    assert obstacle(larger, dataset_length=None) is None


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_batches_of_all_ranks_fit(obstacle: Callable[..., str | None], strategy: str) -> None:
    group = {"strategy": strategy, "world_size": 2}
    assert obstacle({**group, "micro_batch_size": 50}, dataset_length=100) is None
    reason = obstacle({**group, "micro_batch_size": 51}, dataset_length=100)
    assert re.search(r"micro_batch_size=51 .*2 ranks$", str(reason))


def test_fixed_batch_sampler(
    obstacle: Callable[..., str | None],
) -> None:
    group = {"world_size": 2, "micro_batch_size": 16}
    assert obstacle({"micro_batch_size": 16}, fixed_batch_size=16) is None
    assert obstacle({}, fixed_batch_size=16) is not None
    assert obstacle({**group, "strategy": "ddp"}, fixed_batch_size=16) is None
    assert "micro_batch_size=16" in str(obstacle({**group, "strategy": "dp"}, fixed_batch_size=16))
    assert obstacle({**group, "strategy": "dp"}, fixed_batch_size=32) is None


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_too_many_ranks(obstacle: Callable[..., str | None], strategy: str) -> None:
    group = {"strategy": strategy, "world_size": 3}
    assert obstacle(group) is None
    two, named = make_environment(device_count=2), make_environment(device="cuda:2", device_count=4)
    for environment in (two, named):
        assert re.search(
            r"^world_size.* 2, .*world_size=3;", str(obstacle(group, environment=environment))
        )
    assert "cuda:2" in str(obstacle(group, environment=named))


def test_on_the_cpu_each_rank_needs_a_core(obstacle: Callable[..., str | None]) -> None:
    assert obstacle({"strategy": "ddp", "world_size": 4}, environment=CPU) is None
    reason = obstacle({"strategy": "ddp", "world_size": 5}, environment=CPU)
    assert re.search(r"^world_size.* 4, .*cores", str(reason))


def test_strategy_needs_the_device(
    obstacle: Callable[..., str | None],
) -> None:
    apple = make_environment(device="mps", device_kind="mps")
    assert "CUDA" in str(obstacle({"strategy": "dp", "world_size": 2}, environment=CPU))
    assert "gloo" in str(obstacle({"strategy": "ddp"}, environment=apple))
    assert obstacle({}, environment=apple) is None


def test_unused_parameters(
    obstacle: Callable[..., str | None],
) -> None:
    def told(**ddp: bool) -> str | None:
        return obstacle(
            {"strategy": "ddp", "world_size": 2, "ddp": ddp}, has_unused_parameters=True
        )

    assert "ddp.find_unused_parameters" in str(told())
    assert told(find_unused_parameters=True) is None
    assert told(static_graph=True) is None
    assert obstacle({}, has_unused_parameters=True) is None
    assert obstacle({"strategy": "dp", "world_size": 2}, has_unused_parameters=True) is None


@pytest.mark.parametrize(
    ("hook", "is_refused"), [("bf16", True), ("fp16", False), ("powersgd", False), (None, False)]
)
def test_the_bf16_hook_alone_is_refused_on_gloo(
    obstacle: Callable[..., str | None], hook: str | None, is_refused: bool
) -> None:
    group = {"strategy": "ddp", "world_size": 2, "ddp": {"comm_hook": hook}}
    assert obstacle(group) is None
    assert (obstacle(group, environment=CPU) is not None) == is_refused
    assert (rules.hook_obstacle(hook, CPU) is not None) == is_refused


def test_coarse_exchange() -> None:
    def group(hook: str | None, amp_dtype: str = "float32") -> TrainingConfig:
        values = {
            "strategy": "ddp",
            "world_size": 2,
            "amp_dtype": amp_dtype,
            "ddp": {"comm_hook": hook},
        }
        return TrainingConfig.model_validate(values)

    plain = TrainingConfig()
    assert rules.coarse_exchange(group(None), plain) is None
    assert rules.coarse_exchange(group("fp16", "float16"), plain) is None
    assert rules.coarse_exchange(group("bf16", "bfloat16"), plain) is None
    assert rules.coarse_exchange(group("powersgd"), group("powersgd")) is None
    for hook, amp_dtype in (
        ("fp16", "float32"),
        ("fp16", "bfloat16"),
        ("bf16", "float16"),
        ("powersgd", "float16"),
    ):
        reason = rules.coarse_exchange(group(hook, amp_dtype), plain)
        assert f"ddp.comm_hook={hook} and amp_dtype={amp_dtype}" in str(reason)


GROUP_OF_TWO = TrainingConfig(
    strategy="ddp",
    world_size=2,
    ddp=DdpConfig(static_graph=True, find_unused_parameters=True, broadcast_buffers=False),
)
SWITCHED = TrainingConfig(
    cudnn_benchmark=True, fused=True, compile=True, compile_mode="reduce-overhead"
)
FUSABLE = OptimizerFacts(name="SGD", can_fuse=True)


@pytest.mark.parametrize(
    ("config", "facts", "environment", "found"),
    [
        (
            TrainingConfig(pin_memory=True, channels_last=True),
            {"has_4d_input": False},
            CPU,
            {"pin_memory": "no_copy_to_accelerator", "channels_last": "no_4d_input"},
        ),
        (TrainingConfig(pin_memory=True, channels_last=True), {}, None, {}),
        (TrainingConfig(), {"has_4d_input": False}, CPU, {}),
        (
            GROUP_OF_TWO,
            {},
            CPU,
            {
                "ddp.find_unused_parameters": "static_graph",
                "ddp.broadcast_buffers": "no_buffers",
            },
        ),
        (GROUP_OF_TWO, {"has_buffers": True}, CPU, {"ddp.find_unused_parameters": "static_graph"}),
        (
            SWITCHED,
            {"has_convolutions": True},
            CPU,
            {
                "cudnn_benchmark": "no_cudnn",
                "fused": "no_fused_optimizer",
                "compile_mode": "no_cuda_graphs",
            },
        ),
        (SWITCHED, {"optimizer": FUSABLE}, None, {}),
        (TrainingConfig(compile=True, compile_mode="max-autotune"), {}, CPU, {}),
    ],
)
def test_without_effect(
    config: TrainingConfig,
    facts: dict[str, Any],
    environment: Environment | None,
    found: dict[str, str],
) -> None:
    machine = environment or make_environment()
    assert rules.without_effect(config, make_facts(**facts), machine) == found


def test_fused_needs_torchs_optimizer(
    obstacle: Callable[..., str | None],
) -> None:
    assert "got RMSprop" in str(obstacle({"fused": True}, optimizer=OptimizerFacts(name="RMSprop")))
    assert obstacle({"fused": True}, optimizer=FUSABLE) is None
    assert obstacle({"fused": False}, optimizer=OptimizerFacts(name="RMSprop")) is None


def test_cudnn_benchmark_without_convolutions() -> None:
    """Keep it, since the model may call torch's functions."""
    settings: dict[str, object] = {"cudnn_benchmark": True, "strategy": "single"}
    assert rules.normalised(settings, make_facts(), make_environment())["cudnn_benchmark"] is True
    assert rules.normalised(settings, make_facts(), CPU)["cudnn_benchmark"] is False


def test_scripts_optimizer_may_be_fused() -> None:
    script = ScriptFacts(observed=TrainingConfig(fused=True), framework="plain loop")
    facts = make_facts(script=script)
    assert rules.normalised({"fused": True}, facts, CPU)["fused"] is True
    assert rules.normalised({"fused": True}, make_facts(), CPU)["fused"] is False
    assert "fused" not in rules.without_effect(TrainingConfig(fused=True), facts, CPU)
    assert rules.obstacle(TrainingConfig(fused=True), facts, CPU, drop_last=False) is None


@given(
    st.builds(
        lambda own, ranks: {**own, **(ranks or {})}, _LOADER_SETTINGS, st.none() | _RANK_SETTINGS
    ).filter(
        lambda settings: (
            not (settings["compile"] and settings.get("strategy") == "dp")
        )  # a contradiction anywhere
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_normalising_is_idempotent(
    settings: dict[str, object],
    is_cpu: bool,
    has_4d: bool,
    has_buffers: bool,
    may_switch: bool,
) -> None:
    optimizer = OptimizerFacts(name="SGD", can_fuse=may_switch)
    facts = make_facts(
        has_4d_input=has_4d,
        has_buffers=has_buffers,
        has_convolutions=may_switch,
        optimizer=optimizer,
    )
    environment = CPU if is_cpu else make_environment()
    before = dict(settings)
    once = rules.normalised(settings, facts, environment)
    assert settings == before
    assert rules.normalised(once, facts, environment) == once
    config = TrainingConfig.model_validate(once)
    assert rules.without_effect(config, facts, environment) == {}
    assert (config.strategy == "single") == (config.world_size == 1)
    assert config.ddp != DdpConfig()


def test_configurations_that_run_alike_share_a_key() -> None:
    def key(**settings: Any) -> str:
        return rules.same_behaviour_key(
            TrainingConfig(**settings), make_facts(has_4d_input=False), CPU
        )

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


def test_groups_that_run_alike_share_a_key() -> None:
    def key(world_size: int = 2, gradient_mib: int = 0, **ddp: Any) -> str:
        config = TrainingConfig(
            strategy="ddp", world_size=world_size, ddp=DdpConfig(**ddp) if ddp else None
        )
        return rules.same_behaviour_key(
            config, make_facts(gradient_bytes=gradient_mib * 2**20), FOUR_DEVICES
        )

    assert key() == key(broadcast_buffers=True) == key(broadcast_buffers=False)
    assert key() == key(bucket_cap_mb=25, first_bucket_mb=1)
    assert key() != key(bucket_cap_mb=25), "torch's own first bucket is smaller"
    assert key(bucket_cap_mb=50) == key(bucket_cap_mb=50, first_bucket_mb=50)
    assert key(bucket_cap_mb=50) != key(bucket_cap_mb=100)
    assert key(gradient_mib=20, bucket_cap_mb=50) == key(gradient_mib=20, bucket_cap_mb=100)
    assert key(static_graph=True) == key(static_graph=True, find_unused_parameters=True)
    assert key() != key(world_size=3)
    alone = rules.same_behaviour_key(TrainingConfig(), make_facts(), FOUR_DEVICES)
    assert key(world_size=1, static_graph=True) == alone
