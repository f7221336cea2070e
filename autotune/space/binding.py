"""What binding ranks to cores means on a machine: whether it has an effect, is possible, and which cores it leaves.

Comes in: a binding, the number of ranks that share a host, and the Environment; where one process has several devices,
also how many. Goes out: the binding that it comes to, a reason against it, or cores. Pure; what does the same to
processes is settings/applied/cores/numa.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from autotune.settings.environment import DeviceKind, Environment
from autotune.settings.training_config import NumaBinding

__all__ = ["bindings_tried", "can_bind", "cores_left", "effective_binding", "has_binding", "refused_binding"]

_KINDS: frozenset[DeviceKind] = frozenset({"cpu", "cuda", "rocm"})
"""Devices of which torch tells where they are."""
_WITHOUT_AFFINITY = ("macOS", "Darwin", "Windows")
"""How Python's platform.platform begins where processes can't be bound to cores."""


def can_bind(environment: Environment) -> bool:
    """Whether processes can be bound to the cores beside their device."""
    return environment.device_kind in _KINDS and not environment.platform.startswith(_WITHOUT_AFFINITY)


def effective_binding(binding: object, ranks: int, environment: Environment) -> NumaBinding | None:
    """What a binding comes to with so many ranks on a host: "exclusive" for ranks that share no node is "node".

    None where it leaves every rank all cores.
    """
    if binding is None or not can_bind(environment):
        return None
    if binding == "exclusive" and max(_ranks_by_node(ranks, environment)) > 1:
        return "exclusive"
    return "node" if environment.numa_nodes > 1 else None


def refused_binding(
    binding: NumaBinding | None, ranks: int, environment: Environment, devices: int | None = None
) -> str | None:
    """Why so many ranks on a host can't be bound so, or None.

    Args:
        binding: The setting's value.
        ranks: Processes on the host.
        environment: The machine.
        devices: Those of all of these processes; None: one each.
    """
    found = effective_binding(binding, ranks, environment)
    if found is None:
        return None
    places = devices or ranks
    if any(_node_of(place, places, environment) < 0 for place in range(places)):
        return (
            f"numa_binding {binding!r} needs the NUMA node of each device and a core there, but the machine does not "
            f"tell one for every device from {environment.device} on; leave numa_binding out"
        )
    crowded = (
        (taken, cores)
        for taken, cores in zip(_ranks_by_node(ranks, environment), _node_cores(environment), strict=True)
        if taken > cores
    )
    taken, cores = next(crowded, (0, 0))
    if found != "exclusive" or not taken:
        return None
    return (
        f"numa_binding 'exclusive' needs a physical core for each rank of a NUMA node, but {taken} ranks would share "
        f"{cores}; set numa_binding: node, or fewer ranks"
    )


def has_binding(binding: NumaBinding | None, ranks: int, environment: Environment) -> bool:
    """Whether a binding can be had for so many ranks on a host, and changes something."""
    is_possible = refused_binding(binding, ranks, environment) is None
    return is_possible and effective_binding(binding, ranks, environment) is not None


def bindings_tried(rank_counts: Iterable[int], environment: Environment) -> list[NumaBinding]:
    """The bindings that may pay by default, for these numbers of ranks on a host.

    Of a single node's cores only ranks on a CPU get shares of their own: they keep all of them busy, and push each
    other from one core to the next. Our convention.
    """
    counts = list(rank_counts)
    is_spread = environment.numa_nodes > 1 or environment.device_kind == "cpu"
    found: tuple[NumaBinding, ...] = ("node", "exclusive") if is_spread else ()
    return [
        binding
        for binding in found
        if any(
            effective_binding(binding, count, environment) == binding
            and refused_binding(binding, count, environment) is None
            for count in counts
        )
    ]


def cores_left(binding: NumaBinding | None, ranks: int, environment: Environment, devices: int | None = None) -> int:
    """Cores of a host that all of its ranks together may run on; `devices` as in refused_binding."""
    if effective_binding(binding, ranks, environment) is None:
        return environment.cores
    by_node = _node_cores(environment)
    used = zip(by_node, _ranks_by_node(devices or ranks, environment), strict=True)
    share = sum(cores for cores, taken in used if taken) / sum(by_node)
    return min(environment.cores, max(1, ceil(share * max(environment.cores, sum(by_node)))))


def _ranks_by_node(ranks: int, environment: Environment) -> list[int]:
    """Of so many ranks on a host, those on each of its nodes."""
    places = [_node_of(rank, ranks, environment) for rank in range(ranks)]
    return [places.count(node) for node in range(environment.numa_nodes)]


def _node_of(rank: int, ranks: int, environment: Environment) -> int:
    """The place of a rank's node among the nodes; -1 where the machine does not tell it.

    Where devices were not looked up, they are taken to be spread evenly over the nodes.
    """
    nodes = environment.numa_nodes
    if environment.device_kind == "cpu":
        return rank * nodes // ranks
    first = int(environment.device.partition(":")[2] or 0) if environment.hosts == 1 else 0
    if environment.device_nodes:
        return environment.device_nodes[min(first + rank, len(environment.device_nodes) - 1)]
    return min(nodes - 1, (first + rank) * nodes // environment.device_count)


def _node_cores(environment: Environment) -> tuple[int, ...]:
    """Physical cores of each node; where they are not known, equal parts of the cores."""
    even = max(1, environment.cores // environment.numa_nodes)
    known = environment.node_cores
    return known if len(known) == environment.numa_nodes else (even,) * environment.numa_nodes
