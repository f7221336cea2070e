"""The nodes of a Ray cluster: those that are alive, an actor on each and calls to it, its machine and its kind.

Owns the exceptions for a host that is gone and for hosts that do not suffice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autotune.errors import AutotuneError, LauncherError, first_line
from autotune.messages.trials import host_not_used
from autotune.note import Note
from autotune.protocol.jobs import GroupPart
from autotune.ray.host import Host, HostFacts
from autotune.settings.environment import Environment
from autotune.version import __version__

__all__ = [
    "SEARCH_IS_OVER",
    "HostLostError",
    "NoRoomError",
    "OneHost",
    "Team",
    "living_nodes",
    "most_of_a_kind",
    "of_other_kind",
    "start_actor",
]

SEARCH_IS_OVER = "the search is over: its hosts are given back"
"""The error of a trial that was under way."""
_LOST = (exceptions.RayActorError, exceptions.NodeDiedError, exceptions.ObjectLostError, exceptions.WorkerCrashedError)
_PART_BYTES = 32 * 1024 * 1024  # our convention: a third of the smallest object store


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

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the actor; the reference to its answer.

        Raises:
            HostLostError: the actor is gone.
        """
        try:
            return getattr(self.actor, method).remote(*arguments)
        except Exception as error:  # Ray raises a plain one for an actor that it does not know any more
            raise HostLostError(self) from error

    def receive(self, reference: Any, *, was_running: bool = False) -> Any:
        """The answer to a call.

        Raises:
            HostLostError: the host is gone, in whichever way Ray reports that.
            LauncherError: the call failed on the host.
        """
        try:
            return ray.get(reference)
        except exceptions.OutOfMemoryError as error:
            why = f"Ray ended the trial for the memory of its host, {self.name}: {first_line(error)}"
            raise HostLostError(self, was_running=was_running, for_memory=why if was_running else "") from error
        except _LOST as error:
            raise HostLostError(self, was_running=was_running) from error
        except exceptions.RayError as error:
            cause = error.cause if isinstance(error, exceptions.RayTaskError) else None
            reason = cause if isinstance(cause, AutotuneError) else error  # of a bug the traceback
            raise LauncherError(f"{self.name} can't run trials: {reason}") from error

    def take_payload(self, key: str, payload: Path) -> None:
        """Give the host its copy of the workload, in parts: once a search."""
        if key in self.payloads:
            return
        for name in ("stream", "bytes", "index.json"):
            with (payload / name).open("rb") as file:
                for offset in range(0, max(1, (payload / name).stat().st_size), _PART_BYTES):
                    self.receive(self.call("take", key, name, offset, file.read(_PART_BYTES)))
        self.payloads.add(key)

    def describe(self) -> Environment | Note:
        """The machine by the actor's description, which also names its interface; or why it can't be used."""
        try:
            facts = HostFacts.model_validate_json(ray.get(self.answer))
        except (exceptions.RayError, ValueError) as error:
            reason = f"autotune can't be started there ({type(error).__name__}: {first_line(error)})"
            return host_not_used(host=self.name, reason=reason)
        if facts.version != __version__:
            reason = f"it has autotune {facts.version}, and here is {__version__}"
            return host_not_used(host=self.name, reason=reason)
        if facts.environment is None:
            return host_not_used(host=self.name, reason=facts.reason)
        self.interface = facts.interface
        return facts.environment

    def kill(self) -> None:
        """End the actor, whatever it does."""
        with suppress(exceptions.RayError):  # it is dead already, and Ray knows it no more
            ray.kill(self.actor, no_restart=True)


Team = Sequence[tuple[OneHost, GroupPart]]
"""The hosts of a trial, in the order of its ranks, and the ranks on each."""


class NoRoomError(LauncherError):
    """The cluster has hosts, but too few for a trial's ranks."""


class HostLostError(Exception):
    """A host is gone.

    Args:
        host: that one.
        was_running: its part of the trial had begun.
        for_memory: why Ray has ended what ran there, where that was for the host's memory.
    """

    def __init__(self, host: OneHost, *, was_running: bool = False, for_memory: str = "") -> None:
        super().__init__(host.name)
        self.host, self.was_running, self.for_memory = host, was_running, for_memory


def most_of_a_kind(environments: Sequence[Environment]) -> Environment | None:
    """A machine of the kind that most are of; accelerators come before processors."""
    count = Counter(environment.fingerprint for environment in environments)

    def weight(machine: Environment) -> tuple[bool, int, int]:
        return machine.device_kind != "cpu", count[machine.fingerprint] * machine.device_count, machine.cores

    return max(environments, key=weight, default=None)


def living_nodes() -> dict[str, dict[str, Any]]:
    """Ray's description of each node that is alive, by its id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call] # Ray's own


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


def of_other_kind(name: str, environment: Environment, chosen: Environment) -> Note:
    """That a host is of another kind than the chosen one."""
    own, other = _say_kind(chosen), _say_kind(environment)
    reason = f"a study is bound to one kind of machine, here {own}, but it has {other}"
    return host_not_used(host=name, reason=reason)


def _say_kind(environment: Environment) -> str:
    count = f"{environment.device_count} × " if environment.device_kind != "cpu" else ""  # noqa: RUF001 - a times sign
    return f"{count}{environment.device_name}, {environment.cores} cores, torch {environment.torch}"
