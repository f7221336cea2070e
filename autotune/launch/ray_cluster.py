"""Join a Ray cluster: its nodes, an actor on each, and whole hosts reserved for a search."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Timer, current_thread, main_thread
from typing import Any

import ray
from ray import exceptions
from ray._private import worker as rays_worker
from ray._private.services import get_ray_address_from_environment
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autotune.config.environment import Environment
from autotune.errors import AutotuneError, ConfigError, LauncherError, first_line
from autotune.launch.ray_host import Host, HostFacts
from autotune.messages.trials import host_not_used
from autotune.note import Note
from autotune.protocol.disk import monotonic
from autotune.protocol.messages import GroupPart
from autotune.version import __version__

# Joins a Ray cluster from the driver, and undoes what Ray changes in its process: signal handlers,
# prints.


_LOG = logging.getLogger(__name__)


def join(address: str | None, undo: ExitStack) -> None:
    """Connect to the cluster; a connection that the caller has already made is used. `undo` leaves it as it was.

    Ray's own handler of SIGTERM is removed: a search saves its results first.

    Raises:
        ConfigError: no cluster answers, or the caller has joined another one.
    """
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in {None, "auto", joined}:
            raise ConfigError(
                f"one process can use one Ray cluster, and this one has joined that at {joined}, "
                f"but executor.address "
                f"is {address}; leave it out, or call ray.shutdown() before"
            )
        return
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _connect(get_ray_address_from_environment("auto", None) if where == "auto" else where)
    except (OSError, ValueError) as error:
        raise _unreachable(where, error) from error
    signals = (signal.SIGTERM, signal.SIGINT) if current_thread() is main_thread() else ()
    before = {number: signal.getsignal(number) for number in signals}
    try:
        ray.init(
            address=where, log_to_driver=False, logging_level=logging.ERROR, namespace="autotune"
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(where, error) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    undo.callback(ray.shutdown)
    _silence_prints(undo)


def _connect(address: str) -> None:
    """Raise where nothing listens: Ray itself would retry for minutes, and print."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), 5.0).close()


def _unreachable(where: str, error: Exception) -> ConfigError:
    place = f"at {where}" if where != "auto" else "on this machine, and RAY_ADDRESS is not set"
    return ConfigError(
        f"executor ray needs a running Ray cluster, but none answers {place} "
        f"({first_line(error)}); start one "
        "(ray start --head) or name its address (executor: {kind: ray, address: HOST:6379})"
    )


def _silence_prints(undo: ExitStack) -> None:
    """Keep Ray from printing 25 lines of a dead node's log on the caller's stdout, which is for results.

    Ray has no setting for it. Source: ray/_private/worker.py, listen_error_messages, also with
    log_to_driver=False.
    """

    def keep(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        _LOG.debug("%s", data.get("lines"))

    name = "print_to_stdstream"
    if hasattr(rays_worker, name):
        undo.callback(setattr, rays_worker, name, getattr(rays_worker, name))
        setattr(rays_worker, name, keep)


# The nodes of a Ray cluster: those that are alive, an actor on each and calls to it, its machine
# and its kind.
#
# Owns the exceptions for a host that is gone and for hosts that do not suffice.


SEARCH_IS_OVER = "the search is over: its hosts are given back"
"""The error of a trial that was under way."""
_LOST = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.WorkerCrashedError,
)
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
        """Call a method of the actor; return the reference to its answer.

        Raises:
            HostLostError: the actor is gone.
        """
        try:
            return getattr(self.actor, method).remote(*arguments)
        except (
            Exception
        ) as error:  # Ray raises a plain one for an actor that it does not know any more
            raise HostLostError(self) from error

    def receive(self, reference: Any, *, was_running: bool = False) -> Any:
        """Return the answer to a call.

        Raises:
            HostLostError: the host is gone, in whichever way Ray reports that.
            LauncherError: the call failed on the host.
        """
        try:
            return ray.get(reference)
        except exceptions.OutOfMemoryError as error:
            why = (
                f"Ray ended the trial for the memory of its host, {self.name}: {first_line(error)}"
            )
            raise HostLostError(
                self, was_running=was_running, for_memory=why if was_running else ""
            ) from error
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
        """Return the machine by the actor's description, which also names its interface; or why it can't be used."""
        try:
            facts = HostFacts.model_validate_json(ray.get(self.answer))
        except (exceptions.RayError, ValueError) as error:
            reason = (
                f"autotune can't be started there ({type(error).__name__}: {first_line(error)})"
            )
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
        self.host = host
        self.was_running = was_running
        self.for_memory = for_memory


def most_of_a_kind(environments: Sequence[Environment]) -> Environment | None:
    """Return a machine of the kind that most are of; accelerators come before processors."""
    count = Counter(environment.fingerprint for environment in environments)

    def weight(machine: Environment) -> tuple[bool, int, int]:
        return (
            machine.device_kind != "cpu",
            count[machine.fingerprint] * machine.device_count,
            machine.cores,
        )

    return max(environments, key=weight, default=None)


def living_nodes() -> dict[str, dict[str, Any]]:
    """Return Ray's description of each node that is alive, by its id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call] # Ray's own


def start_actor(node: str, found: Mapping[str, Any], device: str) -> OneHost:
    """Start a node's actor and have it describe its machine; returns at once."""
    host: Any = ray.remote(Host)
    actor = host.options(
        num_cpus=0,
        max_concurrency=4,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={
            "env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        },  # it sees all devices of the host
    ).remote(dict(os.environ))
    resources = found["Resources"]
    bundle = {name: float(resources[name]) for name in ("CPU", "GPU") if resources.get(name)}
    name = f"{found['NodeManagerHostname']} ({found['NodeManagerAddress']}, node {node[:8]})"
    address = found["NodeManagerAddress"]
    return OneHost(
        node, name, address, actor, bundle, answer=actor.describe.remote(device, address)
    )


def of_other_kind(name: str, environment: Environment, chosen: Environment) -> Note:
    """Return the note that a host is of another kind than the chosen one."""
    own = _describe_kind(chosen)
    other = _describe_kind(environment)
    reason = f"a study is bound to one kind of machine, here {own}, but it has {other}"
    return host_not_used(host=name, reason=reason)


def _describe_kind(environment: Environment) -> str:
    count = f"{environment.device_count} × " if environment.device_kind != "cpu" else ""  # noqa: RUF001 - a times sign
    return f"{count}{environment.device_name}, {environment.cores} cores, torch {environment.torch}"


# Whole hosts reserved in Ray for one search, so that no other job of the cluster runs next to a
# trial.
#
# A placement group over a trial's hosts is kept for a moment after the trial: to reserve them again
# for the next one would take up to a second.


_KEPT_S = 1.0  # our convention: longer than a search thinks between two trials
_NODE_LABEL = "ray.io/node-id"


@dataclass(slots=True, eq=False)
class _Reservation:
    group: PlacementGroup
    begun: float
    ending: Timer | None = None
    """Gives the hosts back; None while a trial runs."""


class Reservations:
    """The placement groups of a search, by the ids of their nodes. Every method takes the pool's lock."""

    def __init__(self, lock: Condition) -> None:
        self._lock = lock
        self._kept: dict[tuple[str, ...], _Reservation] = {}

    def reserve(self, hosts: Sequence[OneHost]) -> PlacementGroup:
        """Return the kept group of the last trial on these hosts, else a new one, which may not be ready."""
        nodes = tuple(host.node for host in hosts)
        with self._lock:
            kept = self._kept.get(nodes)
            if kept is None:
                self.give_back(nodes)
                group = placement_group(
                    [host.bundle for host in hosts],
                    strategy="STRICT_PACK" if len(nodes) == 1 else "STRICT_SPREAD",
                    bundle_label_selector=[{_NODE_LABEL: node} for node in nodes],
                )
                kept = self._kept[nodes] = _Reservation(group, monotonic())
            elif kept.ending is not None:
                kept.ending.cancel()
                kept.ending = None
            return kept.group

    def give_back_soon(self, nodes: tuple[str, ...]) -> None:
        """Give back the hosts of a trial that has ended, unless the next one comes soon, as is likely."""
        with self._lock:
            kept = self._kept.get(nodes)
            if kept is None:
                return
            if monotonic() - kept.begun > 60.0:  # then other jobs that wait for the host come first
                self.give_back(nodes)
                return
            kept.ending = Timer(_KEPT_S, self._give_back_unused, (nodes, kept))
            kept.ending.daemon = True
            kept.ending.start()

    def give_back(self, nodes: Collection[str] | None = None) -> None:
        """Give back all that includes one of these nodes; None: everything."""
        with self._lock:
            for key in [key for key in self._kept if nodes is None or set(nodes) & set(key)]:
                reservation = self._kept.pop(key)
                if reservation.ending is not None:
                    reservation.ending.cancel()
                remove_placement_group(reservation.group)

    def _give_back_unused(self, nodes: tuple[str, ...], kept: _Reservation) -> None:
        with self._lock:
            if self._kept.get(nodes) is kept and kept.ending is not None:
                self.give_back(nodes)
