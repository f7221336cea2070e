"""Compute default ranges of ranks, DistributedDataParallel and the step's switches."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.environment import Environment
from autotune.config.plan import IntRange, OptimizerFacts
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.space.ranges import most_workers
from autotune.space.space import ResolvedSpace, compose
from tests.factories import CPU, FOUR_DEVICES, GPU, make_environment, make_facts, make_space

MIB = 2**20
ROCM = make_environment(device_kind="rocm")
NAMED = make_environment(device="cuda:1", device_count=4)
GROUP = {"strategy": ["single", "ddp"], "world_size": [1, 2]}


def values(space: ResolvedSpace, name: str) -> list[Any]:
    return list(space.domains[name])


def ranks_of(space: ResolvedSpace) -> tuple[list[Any], list[Any]]:
    return values(space, "world_size"), values(space, "strategy")


def ddp_names(space: ResolvedSpace) -> set[str]:
    return {name for name in space.domains if name.startswith("ddp.")}


def test_several_devices_are_compared_with_one() -> None:
    space = make_space(environment=FOUR_DEVICES)
    assert ranks_of(space) == ([1, 2, 3, 4], ["single", "dp", "ddp"])
    assert space.group_sizes == (2, 3, 4)


def test_ddps_settings_are_searched_where_ddp_is() -> None:
    space = make_space(environment=FOUR_DEVICES)
    assert {name: values(space, name) for name in ddp_names(space)} == {
        "ddp.bucket_cap_mb": [None, 50.0, 100.0],
        "ddp.first_bucket_mb": [None],
        "ddp.gradient_as_bucket_view": [False, True],
        "ddp.static_graph": [False, True],
        "ddp.find_unused_parameters": [False],
        "ddp.broadcast_buffers": [True],
        "ddp.comm_hook": [None, "fp16", "bf16"],
    }


@pytest.mark.parametrize(
    "given_space", [{"strategy": "single"}, {"strategy": ["single", "dp"]}, {"world_size": 1}]
)
def test_where_ddp_is_not_tried_it_has_no_settings(given_space: dict[str, Any]) -> None:
    space = make_space(given_space, environment=FOUR_DEVICES)
    assert ddp_names(space) == set()
    assert space.group_sizes == ()


def test_no_groups_by_default() -> None:
    for environment in (CPU, make_environment(), make_environment(device="mps", device_kind="mps")):
        space = make_space(environment=environment)
        assert ranks_of(space) == ([1], ["single"])
        assert ddp_names(space) == set()


@pytest.mark.parametrize(
    ("environment", "given_space", "ranks"),
    [
        (CPU, {"world_size": [1, 2]}, ([1, 2], ["single", "ddp"])),
        (CPU, {"world_size": 2}, ([2], ["ddp"])),
        (CPU, {"strategy": ["single", "ddp"]}, ([1, 2, 4], ["single", "ddp"])),
        (CPU, {"strategy": "ddp"}, ([2, 4], ["ddp"])),
        (CPU, {"strategy": "single"}, ([1], ["single"])),
        (CPU, GROUP, ([1, 2], ["single", "ddp"])),
        (FOUR_DEVICES, {"world_size": [1, 4]}, ([1, 4], ["single", "dp", "ddp"])),
        (FOUR_DEVICES, {"world_size": 4}, ([4], ["dp", "ddp"])),
        (FOUR_DEVICES, {"strategy": "ddp"}, ([2, 3, 4], ["ddp"])),
        (FOUR_DEVICES, {"strategy": "single"}, ([1], ["single"])),
        (NAMED, {}, ([1], ["single"])),
        (NAMED, {"strategy": "ddp"}, ([2, 3], ["ddp"])),
    ],
)
def test_ranks_and_strategies(
    environment: Environment, given_space: dict[str, Any], ranks: tuple[list[Any], list[Any]]
) -> None:
    assert ranks_of(make_space(given_space, environment=environment)) == ranks


def test_more_ranks_than_devices() -> None:
    space = make_space({"world_size": [1, 2]}, environment=make_environment())
    assert "world_size=2" in str(compose({"strategy": "ddp", "world_size": 2}, space))
    space = make_space(
        {"world_size": 2}, environment=make_environment(device="mps", device_kind="mps")
    )
    assert "strategy 'ddp'" in str(compose({}, space))


def test_the_baselines_group_lies_in_the_space() -> None:
    ddp = DdpConfig(
        bucket_cap_mb=10,
        first_bucket_mb=2,
        static_graph=True,
        find_unused_parameters=True,
        broadcast_buffers=False,
        comm_hook="powersgd",
    )
    baseline = TrainingConfig(strategy="ddp", world_size=4, ddp=ddp)
    for environment in (CPU, FOUR_DEVICES):
        space = make_space(environment=environment, baseline=baseline)
        assert {4} <= set(values(space, "world_size"))
        assert "ddp" in values(space, "strategy")
        for name, value in ddp.model_dump().items():
            assert value in space.domains[f"ddp.{name}"], name
        assert values(space, "ddp.broadcast_buffers") == [False]
    assert ranks_of(make_space(environment=CPU, baseline=baseline)) == ([1, 4], ["single", "ddp"])


@pytest.mark.parametrize(
    ("gradient_bytes", "caps"),
    [
        (0, [50.0, 100.0]),
        (MIB, []),
        (10 * MIB, [50.0]),
        (50 * MIB, [50.0]),
        (51 * MIB, [50.0, 100.0]),
    ],
)
def test_bucket_caps(gradient_bytes: int, caps: list[float]) -> None:
    space = make_space(environment=FOUR_DEVICES, gradient_bytes=gradient_bytes)
    assert values(space, "ddp.bucket_cap_mb") == [None, *caps]


def test_static_graph_may_be_impossible() -> None:
    accumulating = make_space({"grad_accum_steps": [2, 4]}, environment=FOUR_DEVICES)
    unused = make_space(environment=FOUR_DEVICES, has_unused_parameters=True)
    assert values(accumulating, "ddp.static_graph") == values(unused, "ddp.static_graph") == [False]


def test_unused_parameters_are_searched() -> None:
    space = make_space(environment=FOUR_DEVICES, has_unused_parameters=True)
    assert values(space, "ddp.find_unused_parameters") == [True]
    config = compose({"strategy": "ddp", "world_size": 2}, space)
    assert isinstance(config, TrainingConfig)
    assert config.ddp == DdpConfig(find_unused_parameters=True)


def test_default_hooks() -> None:
    coarse = {"amp_dtype": ["float16", "bfloat16"]}
    assert values(make_space(GROUP, environment=CPU), "ddp.comm_hook") == [None]
    assert values(make_space({**GROUP, **coarse}, environment=CPU), "ddp.comm_hook") == [
        None,
        "fp16",
    ]
    plain = make_space({"amp_dtype": ["float32", "bfloat16"]}, environment=FOUR_DEVICES)
    assert values(plain, "ddp.comm_hook") == [None, "bf16"]


def test_workers_are_those_of_one_rank() -> None:
    assert most_workers(make_facts(), FOUR_DEVICES) == 32
    assert make_space(environment=FOUR_DEVICES).domains["num_workers"] == IntRange(low=0, high=32)
    group = make_space({"strategy": "ddp", "world_size": [2, 4]}, environment=FOUR_DEVICES)
    assert group.domains["num_workers"] == IntRange(low=0, high=16)
    unsharded = make_space(
        {"strategy": "ddp", "world_size": 4},
        environment=FOUR_DEVICES,
        is_iterable=True,
        is_sharded=False,
    )
    assert unsharded.domains["num_workers"] == IntRange(low=0, high=1)


def test_smallest_batch_is_a_ranks_share() -> None:
    eight = make_space(environment=make_environment(device_count=8))
    assert values(eight, "micro_batch_size")[0] == 4
    odd = make_space(
        environment=make_environment(device_count=2), baseline=TrainingConfig(micro_batch_size=48)
    )
    assert {24, 48} <= set(values(odd, "micro_batch_size"))


@pytest.mark.parametrize(
    ("facts", "environment", "tried"),
    [
        ({}, GPU, [False, True]),
        ({}, ROCM, [False, True]),
        ({}, CPU, [False]),
        ({"has_convolutions": False}, GPU, [False]),
        ({"has_fixed_shapes": None}, GPU, [False]),
        ({"is_deterministic": True}, GPU, [False]),
    ],
)
def test_default_cudnn_benchmark(
    facts: dict[str, Any], environment: Environment, tried: list[bool]
) -> None:
    space = make_space(
        environment=environment, **{"has_convolutions": True, "has_fixed_shapes": True, **facts}
    )
    assert values(space, "cudnn_benchmark") == tried


def test_baselines_cudnn_benchmark() -> None:
    space = make_space(
        baseline=TrainingConfig(cudnn_benchmark=True), environment=GPU, has_fixed_shapes=True
    )
    assert values(space, "cudnn_benchmark") == [True]


@pytest.mark.parametrize(("can_fuse", "tried"), [(True, [False, True]), (False, [False])])
def test_default_fused(can_fuse: bool, tried: list[bool]) -> None:
    space = make_space(optimizer=OptimizerFacts(name="Adam", can_fuse=can_fuse))
    assert values(space, "fused") == tried


@pytest.mark.parametrize(
    ("given_space", "today", "tried"),
    [
        ({}, {}, ["default"]),
        ({"compile": [False, True]}, {}, ["default", "reduce-overhead"]),
        ({"compile": False}, {"compile": True}, ["default"]),
        ({}, {"compile": True}, ["default", "reduce-overhead"]),
        (
            {},
            {"compile": True, "compile_mode": "max-autotune"},
            ["default", "reduce-overhead", "max-autotune"],
        ),
        ({"compile": True, "compile_mode": ["max-autotune"]}, {}, ["max-autotune"]),
    ],
)
def test_default_compile_modes(
    given_space: dict[str, Any], today: dict[str, Any], tried: list[str]
) -> None:
    baseline = TrainingConfig.model_validate(today)
    assert (
        values(make_space(given_space, baseline=baseline, has_fixed_shapes=True), "compile_mode")
        == tried
    )


def test_cuda_graphs_need_a_gpu_and_fixed_shapes() -> None:
    compiled = TrainingConfig(compile=True)
    assert values(
        make_space(baseline=compiled, environment=ROCM, has_fixed_shapes=True), "compile_mode"
    ) == [
        "default",
        "reduce-overhead",
    ]
    for environment, is_fixed in ((CPU, True), (GPU, False), (GPU, None), (ROCM, False)):
        space = make_space(baseline=compiled, environment=environment, has_fixed_shapes=is_fixed)
        assert values(space, "compile_mode") == ["default"]


def test_mode_needs_compile() -> None:
    space = make_space({"compile": [False, True]}, has_fixed_shapes=True)
    plain = compose({"compile": False, "compile_mode": "reduce-overhead"}, space)
    assert plain == compose({"compile": False, "compile_mode": "default"}, space)
    graphs = compose({"compile": True, "compile_mode": "reduce-overhead"}, space)
    assert isinstance(graphs, TrainingConfig)
    assert graphs.records_graphs
