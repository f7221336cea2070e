"""The nodes of a Ray cluster: those that are alive, an actor on each, its description of the machine, its kind."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autotune.errors import first_line
from autotune.note import Note, note
from autotune.ray.host import Host, HostFacts
from autotune.settings.environment import Environment
from autotune.version import __version__

__all__ = [
    "OneHost",
    "facts_of",
    "kill_actor",
    "living_nodes",
    "most_of_a_kind",
    "of_other_kind",
    "ranks_a_host",
    "say_unused",
    "start_actor",
]


@dataclass(slots=True, eq=False)
class OneHost:
    """A node with its actor: a candidate until the actor has described the machine, then a host for trials."""

    node: str
    name: str
    address: str
    actor: Any
    bundle: dict[str, float]
    """All of the host's processors and devices, in Ray's terms."""
    answer: Any = None
    """Reference to the actor's description."""
    interface: str | None = None
    payloads: set[str] = field(default_factory=set)
    """Keys of the payloads that it has received."""
    aside_until: float = 0.0
    """Another job uses it: other hosts come first until then, by monotonic()."""


def most_of_a_kind(environments: Collection[Environment]) -> Environment | None:
    """A machine of the kind that most are of; accelerators come before processors."""
    kinds: dict[str, list[Environment]] = {}
    for environment in environments:
        kinds.setdefault(environment.fingerprint, []).append(environment)

    def weight(alike: Sequence[Environment]) -> tuple[bool, int, int]:
        return alike[0].device_kind != "cpu", len(alike) * alike[0].device_count, alike[0].cores

    return max(kinds.values(), key=weight)[0] if kinds else None


def living_nodes() -> dict[str, dict[str, Any]]:
    """Ray's description of each node that is alive, by its id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call] # Ray's own


def ranks_a_host(environment: Environment) -> int:
    """Ranks that a host has room for."""
    return environment.cores if environment.device_kind == "cpu" else environment.device_count


def start_actor(node: str, found: Mapping[str, Any], device: str) -> OneHost:
    """Start a node's actor and have it describe its machine; returns at once."""
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
    address = found["NodeManagerAddress"]
    return OneHost(node, name, address, actor, bundle, answer=actor.describe.remote(device, address))


def facts_of(candidate: OneHost) -> HostFacts | Note:
    """A host's description of itself, or why it can't be used."""
    try:
        facts = HostFacts.model_validate_json(ray.get(candidate.answer))
    except (RayError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return _unused("host_without_autotune", candidate.name, f"autotune can't be started there ({reason})")
    if facts.version != __version__:
        reason = f"it has autotune {facts.version}, and here is {__version__}"
        return _unused("host_with_other_version", candidate.name, reason)
    if facts.environment is None:
        return _unused("host_without_trials", candidate.name, facts.reason)
    return facts


def of_other_kind(name: str, environment: Environment, chosen: Environment) -> Note:
    """That a host is of another kind than the chosen one."""
    own, other = _say_kind(chosen), _say_kind(environment)
    return _unused(
        "host_of_other_kind", name, f"a study is bound to one kind of machine, here {own}, but it has {other}"
    )


def say_unused(notes: Collection[Note]) -> list[str]:
    """Why hosts are not used, for an error's message."""
    return [f"{note.figures['host']} is not used: {note.figures['reason']}." for note in notes]


def _unused(code: str, host: str, reason: str) -> Note:
    """A note on a host that is not used; the reason is an error's text."""
    return note(code, host=host, reason=reason)


def _say_kind(environment: Environment) -> str:
    count = f"{environment.device_count} × " if environment.device_kind != "cpu" else ""  # noqa: RUF001 - a times sign
    return f"{count}{environment.device_name}, {environment.cores} cores, torch {environment.torch}"


def kill_actor(actor: Any) -> None:
    """End an actor, whatever it does."""
    with suppress(RayError):  # it is dead already, and Ray knows it no more
        ray.kill(actor, no_restart=True)
