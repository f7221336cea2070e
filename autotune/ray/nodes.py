"""The nodes of a Ray cluster: those that live, an actor on each, what it tells of its machine, those of a kind."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autotune.phrasing import first_line
from autotune.ray.host import Host, HostFacts
from autotune.settings.environment import Environment
from autotune.version import __version__

__all__ = [
    "Candidate",
    "OneHost",
    "facts_of",
    "kill_actor",
    "living_nodes",
    "most_of_a_kind",
    "ranks_a_host",
    "say_other",
    "start_actor",
]


@dataclass(slots=True, eq=False)
class OneHost:
    """A host that trials may run on."""

    node: str
    name: str
    address: str
    actor: Any
    environment: Environment
    interface: str | None
    bundle: dict[str, float]
    """All of the host's processors and devices, in Ray's terms."""
    payloads: set[str] = field(default_factory=set)
    """Keys of the payloads that it holds."""
    aside_until: float = 0.0
    """Another job keeps it: others come first until then, by monotonic()."""


@dataclass(slots=True)
class Candidate:
    """A node whose actor has been started and has not yet told what machine it is."""

    name: str
    address: str
    actor: Any
    answer: Any
    bundle: dict[str, float]


def most_of_a_kind(environments: Collection[Environment]) -> Environment | None:
    """One of the machines that most are like; accelerators come before processors."""
    kinds: dict[str, list[Environment]] = {}
    for one in environments:
        kinds.setdefault(one.fingerprint, []).append(one)

    def weight(alike: Sequence[Environment]) -> tuple[bool, int, int]:
        return alike[0].device_kind != "cpu", len(alike) * alike[0].device_count, alike[0].cores

    return max(kinds.values(), key=weight)[0] if kinds else None


def living_nodes() -> dict[str, dict[str, Any]]:
    """What Ray tells of each node that lives, by its id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call] # Ray's own


def ranks_a_host(environment: Environment) -> int:
    """Ranks that a host has room for."""
    return environment.cores if environment.device_kind == "cpu" else environment.device_count


def start_actor(node: str, found: Mapping[str, Any], device: str) -> Candidate:
    """Start a node's actor and have it look at its machine; returns at once."""
    host: Any = ray.remote(Host)
    actor = host.options(
        num_cpus=0,
        max_concurrency=4,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},  # it sees all devices of the host
    ).remote(dict(os.environ))
    resources = found["Resources"]
    bundle = {name: float(resources[name]) for name in ("CPU", "GPU") if resources.get(name)}
    name = f"{found['NodeManagerHostname']} ({found['NodeManagerAddress']}, node {node[:8]})"
    return Candidate(
        name, found["NodeManagerAddress"], actor, actor.describe.remote(device, found["NodeManagerAddress"]), bundle
    )


def facts_of(candidate: Candidate) -> HostFacts | str:
    """What a host has told of itself, or why it can't be used."""
    try:
        facts = HostFacts.model_validate_json(ray.get(candidate.answer))
    except (RayError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"{candidate.name} is not used: autotune can't be started there ({reason})."
    if facts.version != __version__:
        return f"{candidate.name} is not used: it has autotune {facts.version}, and here is {__version__}."
    if facts.environment is None:
        return f"{candidate.name} is not used: {facts.reason}."
    return facts


def say_other(name: str, environment: Environment, chosen: Environment | None) -> str:
    """That a host is of another kind than the chosen one."""
    if chosen is None:
        return f"{name} is not used."
    return (
        f"{name} is not used: a study is bound to one kind of machine, here {_say_kind(chosen)}, but it has "
        f"{_say_kind(environment)}."
    )


def _say_kind(environment: Environment) -> str:
    count = f"{environment.device_count} × " if environment.device_kind != "cpu" else ""  # noqa: RUF001 - a times sign
    return f"{count}{environment.device_name}, {environment.cores} cores, torch {environment.torch}"


def kill_actor(actor: Any) -> None:
    """End an actor, whatever it does."""
    with suppress(RayError):  # it is dead already, and Ray knows it no more
        ray.kill(actor, no_restart=True)
