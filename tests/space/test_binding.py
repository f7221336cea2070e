"""Bind ranks to cores: its effect, refusals, and defaults."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.environment import Environment
from autotune.config.training_config import TrainingConfig
from autotune.messages.space import baseline_without_effect, value_without_effect
from autotune.space import constraints as rules
from autotune.space.constraints import (
    cores_left,
    effective_binding,
    has_binding,
    refused_binding,
)
from autotune.space.space import compose
from tests.factories import CPU, FOUR_DEVICES, make_environment, make_facts, make_space

TWO_SOCKETS = CPU.model_copy(update={"cores": 16, "numa_nodes": 2, "node_cores": (4, 4)})
"""A CPU of two nodes, each with four physical cores of two threads."""
SERVER = FOUR_DEVICES.model_copy(
    update={"numa_nodes": 2, "node_cores": (8, 8), "device_nodes": (0, 0, 0, 1)}
)
"""Four devices, of which one is alone on its node."""
GROUP: dict[str, Any] = {"strategy": "ddp", "world_size": 2}


@pytest.mark.parametrize(
    ("environment", "ranks", "node", "exclusive"),
    [
        (CPU, 1, None, None),
        (CPU, 2, None, "exclusive"),
        (TWO_SOCKETS, 1, "node", "node"),
        (TWO_SOCKETS, 2, "node", "node"),
        (TWO_SOCKETS, 3, "node", "exclusive"),
        (FOUR_DEVICES, 2, None, "exclusive"),
        (SERVER, 1, "node", "node"),
        (SERVER, 2, "node", "exclusive"),
        (make_environment(device="mps", device_kind="mps", platform="macOS-15.1"), 1, None, None),
        (CPU.model_copy(update={"platform": "macOS-15.1"}), 2, None, None),
        (SERVER.model_copy(update={"device_kind": "xpu"}), 2, None, None),
    ],
)
def test_a_binding_is_what_it_changes_here(
    environment: Environment, ranks: int, node: str | None, exclusive: str | None
) -> None:
    assert effective_binding(None, ranks, environment) is None
    assert effective_binding("node", ranks, environment) == node
    assert effective_binding("exclusive", ranks, environment) == exclusive


def test_has_binding() -> None:
    assert has_binding("node", 2, SERVER)
    assert not has_binding("node", 2, FOUR_DEVICES), "one node"
    assert not has_binding("node", 2, SERVER.model_copy(update={"device_nodes": (-1,) * 4})), (
        "nodes that are not told"
    )
    assert not has_binding(None, 2, SERVER)


def test_named_device_is_the_first_rank() -> None:
    named = SERVER.model_copy(update={"device": "cuda:2"})
    assert effective_binding("exclusive", 2, named) == "node", (
        "cuda:2 and cuda:3 lie on different nodes"
    )


def test_unknown_nodes_are_spread_evenly() -> None:
    unknown = SERVER.model_copy(update={"device_nodes": (), "node_cores": ()})
    assert effective_binding("exclusive", 2, unknown) == "exclusive"
    assert cores_left("node", 2, unknown) == 8
    assert cores_left("node", 4, unknown) == 16


def test_refused_binding() -> None:
    few = CPU.model_copy(update={"node_cores": (2,)})
    assert refused_binding("exclusive", 2, few) is None
    assert "'exclusive'" in str(refused_binding("exclusive", 3, few))
    assert refused_binding("node", 3, few) is None
    lost = SERVER.model_copy(update={"device_nodes": (0, -1, -1, -1)})
    assert refused_binding("node", 1, lost) is None
    assert "cuda:0" in str(refused_binding("node", 2, lost))
    config = TrainingConfig(**GROUP, numa_binding="node")
    assert rules.obstacle(config, make_facts(), lost, drop_last=True) == refused_binding(
        "node", 2, lost
    )
    beside = TrainingConfig(strategy="dp", world_size=2, numa_binding="node")
    assert rules.obstacle(beside, make_facts(), lost, drop_last=True) == refused_binding(
        "node", 2, lost
    )


def test_dp_is_bound_once() -> None:
    few = SERVER.model_copy(update={"node_cores": (2, 2), "cores": 4})
    dp = TrainingConfig(strategy="dp", world_size=3, numa_binding="exclusive")
    assert rules.obstacle(dp, make_facts(), few, drop_last=True) is None, (
        "it needs no core for each device"
    )
    assert rules.without_effect(dp, make_facts(), few) == {}
    assert rules.normalised(dp.model_dump(), make_facts(), few)["numa_binding"] == "node"
    assert rules.cores_within(dp, few) == 2, "those beside its devices"
    assert rules.cores_within(dp.model_copy(update={"world_size": 4}), few) == 4
    one_node = few.model_copy(update={"numa_nodes": 1, "node_cores": (2,), "device_nodes": ()})
    assert rules.obstacle(dp, make_facts(), one_node, drop_last=True) is None
    assert rules.without_effect(dp, make_facts(), one_node) == {"numa_binding": "one_numa_node"}


def test_normalised_binding() -> None:
    def normalised(environment: Environment, **settings: Any) -> object:
        return rules.normalised({**settings}, make_facts(), environment)["numa_binding"]

    assert normalised(CPU, numa_binding="exclusive") is None
    assert normalised(CPU, numa_binding="exclusive", **GROUP) == "exclusive"
    assert normalised(TWO_SOCKETS, numa_binding="exclusive", **GROUP) == "node"
    assert normalised(TWO_SOCKETS, numa_binding="exclusive", strategy="ddp", world_size=1) == "node"
    assert normalised(SERVER, numa_binding="exclusive", strategy="dp", world_size=2) == "node", (
        "one process"
    )
    alone = rules.same_behaviour_key(TrainingConfig(numa_binding="exclusive"), make_facts(), CPU)
    assert alone == rules.same_behaviour_key(TrainingConfig(), make_facts(), CPU)


def test_binding_over_hosts() -> None:
    pair = FOUR_DEVICES.model_copy(update={"hosts": 4, "is_spread": True})
    config = TrainingConfig(strategy="ddp", world_size=4, numa_binding="exclusive")
    assert rules.without_effect(config, make_facts(), pair) == {"numa_binding": "one_numa_node"}
    packed = pair.model_copy(update={"is_spread": False})
    assert rules.without_effect(config, make_facts(), packed) == {}


def test_the_reason_is_the_machines() -> None:
    config = TrainingConfig(numa_binding="node")
    assert rules.without_effect(config, make_facts(), CPU) == {"numa_binding": "one_numa_node"}
    apple = CPU.model_copy(update={"platform": "macOS-15.1"})
    assert rules.without_effect(config, make_facts(), apple) == {"numa_binding": "no_affinity"}
    assert rules.without_effect(config, make_facts(), TWO_SOCKETS) == {}


@pytest.mark.parametrize(
    ("environment", "space", "tried"),
    [
        (CPU, {}, (None,)),
        (CPU, {"numa_binding": "node"}, ("node",)),
        (CPU, {"world_size": [1, 2]}, (None, "exclusive")),
        (CPU.model_copy(update={"node_cores": (2,)}), {"world_size": [1, 4]}, (None,)),
        (TWO_SOCKETS, {}, (None, "node")),
        (TWO_SOCKETS, {"world_size": [1, 2]}, (None, "node")),
        (TWO_SOCKETS, {"world_size": [1, 4]}, (None, "node", "exclusive")),
        (SERVER, {}, (None, "node", "exclusive")),
        (SERVER, {"strategy": "single"}, (None, "node")),
        (SERVER.model_copy(update={"device_nodes": (-1,) * 4}), {}, (None,)),
    ],
)
def test_default_bindings(
    environment: Environment, space: dict[str, Any], tried: tuple[str | None, ...]
) -> None:
    assert tuple(make_space(space, environment=environment).domains["numa_binding"]) == tried


def test_a_proposal_is_composed_of_what_it_comes_to() -> None:
    space = make_space({"numa_binding": ["exclusive", None], "world_size": [1, 2]}, environment=CPU)
    alone, together = (
        compose({"numa_binding": "exclusive", "world_size": size, "strategy": strategy}, space)
        for size, strategy in ((1, "single"), (2, "ddp"))
    )
    assert isinstance(alone, TrainingConfig)
    assert isinstance(together, TrainingConfig)
    assert (alone.numa_binding, together.numa_binding) == (None, "exclusive")


def test_notes_on_bindings() -> None:
    given: dict[str, Any] = {"numa_binding": [None, "node", "exclusive"]}
    told = {"setting": "numa_binding", "reason": "one_numa_node", "device": "cpu"}
    both = tuple(value_without_effect(value=value, **told) for value in ("node", "exclusive"))
    assert make_space(given, environment=CPU).notes == both
    assert make_space({**given, "world_size": [1, 2]}, environment=CPU).notes == both[:1]
    assert make_space(given, environment=TWO_SOCKETS).notes == ()
    baseline = TrainingConfig(numa_binding="node")
    (note,) = make_space(environment=CPU, baseline=baseline).notes
    assert note == baseline_without_effect(**told)


@given(
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 64),
    st.sampled_from(["node", "exclusive"]),
)
def test_cores_left(nodes: int, ranks: int, cores: int, binding: Any) -> None:
    machine = CPU.model_copy(update={"cores": cores, "numa_nodes": nodes})
    assert 1 <= cores_left(binding, ranks, machine) <= cores
    assert cores_left(None, ranks, machine) == cores
    if ranks >= nodes:
        assert cores_left(binding, ranks, machine) == cores, "every node has a rank"
