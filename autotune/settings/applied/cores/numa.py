"""Binds a process that trains to its cores, as numa_binding says: in trials and in the user's own loop alike.

Comes in: the binding, where the devices of this host's ranks are, which of the ranks this is, and what the kernel tells
of nodes and cores. Goes out: a process whose threads stay on its cores, as do later threads and loader workers, which
inherit them; or a CoresError. Linux alone. What concerns GPUs has not run beside one.

torchrun's --numa-binding has the same meanings (torch/numa/binding.py, AffinityMode, torch 2.13), but knows GPUs alone,
needs the program numactl, and divides a node's cores among all of its GPUs. Source of the files: Linux kernel,
Documentation/ABI/stable/sysfs-devices-node, ABI/testing/sysfs-bus-pci (numa_node) and admin-guide/cputopology.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from autotune.errors import ConfigError
from autotune.settings.applied.cores.processor import cpu_quota_here

__all__ = [
    "SYS",
    "Addresses",
    "CoresError",
    "Nodes",
    "addresses_of_ranks",
    "allowed_cores",
    "allowed_nodes",
    "bind_rank",
    "bind_to",
    "can_bind",
    "cores_of_rank",
    "is_bound_by_launcher",
    "node_of_pci",
    "pci_address",
]

SYS = Path("/sys")
"""Where the kernel tells of devices."""

Nodes = Mapping[int, Sequence[frozenset[int]]]
"""By the number of a NUMA node its physical cores that may be used, in order: each as its logical cores."""

Addresses = Sequence[str | None]
"""PCI addresses of a rank's devices, such as "0000:3b:00.0"; None for one that is not told; empty on the CPU."""

_THREADS = Path("/proc/self/task")
_PLACES_THREADS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP gives each thread a core itself, whatever its process is bound to. Source: OpenMP 5.2,
21.1.7; libgomp's manual; LLVM's OpenMP documentation."""
_KINDS = frozenset({"cpu", "cuda"})
"""Devices of which torch tells where they are, by torch's names: "cuda" is ROCm's too."""
_OFF = frozenset({"", "false", "none", "disabled"})


class CoresError(ConfigError):
    """A process can't be bound to cores as its configuration wants it."""


def allowed_cores() -> frozenset[int]:
    """Logical cores that this thread may run on: affinity and cpuset, without those that are offline.

    Empty where processes can't be bound to cores (macOS, Windows).
    """
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else frozenset()


def can_bind(device: torch.device) -> bool:
    """Whether processes can be bound to the cores beside a device; where not, numa_binding has no effect.

    space/binding.py asks the same of a machine that was described.
    """
    return device.type in _KINDS and bool(allowed_cores())


def allowed_nodes(allowed: frozenset[int], root: Path = SYS) -> Nodes:
    """The allowed cores by NUMA node, nodes without one left out; a single node where the kernel tells of none."""
    found = dict[int, list[frozenset[int]]]()
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        own = _numbers_in(folder / "cpulist") & allowed
        if own:
            found[int(folder.name.removeprefix("node"))] = _physical(own, root)
    if frozenset().union(*(core for cores in found.values() for core in cores)) != allowed:
        return {0: _physical(allowed, root)}
    return dict(sorted(found.items()))


def node_of_pci(address: str, nodes: Nodes, root: Path = SYS) -> int | None:
    """The NUMA node of a device, by its PCI address; None where the machine does not tell it.

    Where there is one node it is that: the kernel then often writes -1. As in torch/numa/binding.py.
    """
    number = -1
    with suppress(OSError, ValueError):
        number = int((root / "bus/pci/devices" / address / "numa_node").read_text())
    if number >= 0:
        return number
    return next(iter(nodes)) if len(nodes) == 1 else None


def cores_of_rank(binding: str, rank: int, nodes_of_ranks: Sequence[frozenset[int]], nodes: Nodes) -> frozenset[int]:
    """The logical cores that a rank of a host is bound to.

    Args:
        binding: "node", or "exclusive": whole physical cores that no other rank has. Where they don't come out even,
            the first ranks of a node have one more.
        rank: Its number on this host.
        nodes_of_ranks: The nodes of each rank's devices: several where one process has several devices.
        nodes: The cores that may be used.

    Raises:
        CoresError: none of the nodes' cores may be used, or they are fewer than the ranks that would share them.
    """
    own = nodes_of_ranks[rank]
    cores = [core for node in sorted(own) for core in nodes.get(node, ())]
    if not cores:
        raise CoresError(
            "numa_binding needs a core of the NUMA node that a rank's device is on, but this process may use none of "
            f"node {', '.join(map(str, sorted(own)))}; start it with more cores (taskset, cpuset), or leave "
            "numa_binding out"
        )
    if binding == "node":
        return frozenset().union(*cores)
    peers = [number for number, theirs in enumerate(nodes_of_ranks) if theirs & own]
    if len(cores) < len(peers):
        raise CoresError(
            "numa_binding 'exclusive' needs a physical core for each rank of a NUMA node, but "
            f"{len(peers)} ranks share {len(cores)}; set numa_binding: node, or fewer ranks"
        )
    place, (each, rest) = peers.index(rank), divmod(len(cores), len(peers))
    start = place * each + min(place, rest)
    return frozenset().union(*cores[start : start + each + (place < rest)])


def bind_rank(
    binding: str, rank: int, devices: Sequence[Addresses], *, is_alone: bool = False, root: Path = SYS
) -> int:
    """Bind this process, as one of a host's ranks; how many threads an operation gets where torch chooses them.

    A process alone has as large a part of the threads that it would have unbound as it keeps of the cores. Ranks of a
    group that are bound to the same cores divide these, and all of a host's ranks the quota of their control group.
    Call it before operations have started threads; those that are there already are bound too.

    Args:
        binding: "node" or "exclusive".
        rank: Its number on this host.
        devices: Of each rank on this host.
        is_alone: The process is of no group, on this host or another.
        root: In place of /sys.

    Raises:
        CoresError: it can't be bound, and runs where it ran before.
    """
    name = next((name for name in _PLACES_THREADS if os.environ.get(name, "").lower() not in _OFF), None)
    if name is not None:  # it may have put this very thread onto one core
        raise CoresError(
            "numa_binding can't stand beside a variable by which OpenMP places threads itself, but got "
            f"{name}={os.environ[name]}; unset it, or leave numa_binding out"
        )
    allowed = allowed_cores()
    if not allowed:
        raise CoresError("numa_binding binds processes to cores, which Linux alone can; leave numa_binding out")
    nodes = allowed_nodes(allowed, root)
    places = [_nodes_of(number, devices, nodes, root) for number in range(len(devices))]
    if None in (places if binding == "exclusive" else [places[rank]]):
        raise CoresError(
            "numa_binding needs the NUMA node of each device, but the machine does not tell it, or this process does "
            "not see the devices of the other ranks (CUDA_VISIBLE_DEVICES); leave numa_binding out"
        )
    known = [place or frozenset() for place in places]
    own = cores_of_rank(binding, rank, known, nodes)
    bind_to(own)
    if is_alone:
        return max(1, torch.get_num_threads() * len(own) // len(allowed))
    sharing = sum(bool(theirs & known[rank]) for theirs in known) if binding == "node" else 1
    return max(1, int(min(len(own) // sharing, cpu_quota_here() / len(devices))))


def bind_to(cores: frozenset[int]) -> None:
    """Bind this thread, and all threads of this process that may run where it may, to logical cores.

    Threads that were placed elsewhere stay there, as in torch/numa/binding.py.

    Raises:
        CoresError: the kernel does not let it, and the thread runs where it ran before.
    """
    before, reason = allowed_cores(), "it leaves others"
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        reason = str(error.strerror)
    if allowed_cores() != cores:
        with suppress(OSError):  # a cpuset may have let it in part
            os.sched_setaffinity(0, before)
        raise CoresError(
            f"numa_binding binds a process to its cores, but the kernel did not let it ({reason}); leave "
            "numa_binding out"
        )
    for thread in _THREADS.iterdir():
        with suppress(OSError):  # it has ended
            if os.sched_getaffinity(int(thread.name)) == before:
                os.sched_setaffinity(int(thread.name), cores)


def is_bound_by_launcher() -> bool:
    """Whether whoever started this process has bound it to fewer cores than it runs on itself.

    torchrun --numa-binding, mpirun --bind-to and srun --cpu-bind do so: one rank's share must not be shared out anew.
    """
    with suppress(OSError, AttributeError):
        return allowed_cores() < os.sched_getaffinity(os.getppid())
    return False


def addresses_of_ranks(own: torch.device, rank: int, ranks: int, count: int = 1) -> list[Addresses]:
    """Where the devices of each rank on this host are, which take them in order; that of a rank out of sight is None.

    Args:
        own: This rank's device, or the first of them.
        rank: Its number on this host.
        ranks: Ranks on this host.
        count: Devices of a process that is alone.
    """
    if own.type == "cpu":
        return [()] * ranks
    module = torch.get_device_module(own)
    first, last = (module.current_device() if own.index is None else own.index) - rank, module.device_count()
    each = count if ranks == 1 else 1
    places = [range(first + number, first + number + each) for number in range(ranks)]
    return [
        [pci_address(torch.device(own.type, place)) if 0 <= place < last else None for place in its] for its in places
    ]


def pci_address(device: torch.device) -> str | None:
    """Where a device is on the PCI bus; None where torch does not tell. Source: torch/numa/binding.py."""
    with suppress(AttributeError, RuntimeError, AssertionError):
        own = torch.get_device_module(device).get_device_properties(device)
        return f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"
    return None


def _nodes_of(rank: int, devices: Sequence[Addresses], nodes: Nodes, root: Path) -> frozenset[int] | None:
    """The NUMA nodes of a rank's devices; None where one is not known.

    Ranks on a CPU are spread evenly over its nodes, neighbours together.
    """
    if not devices[rank]:
        return frozenset({[*nodes][rank * len(nodes) // len(devices)]})
    found = [None if address is None else node_of_pci(address, nodes, root) for address in devices[rank]]
    known = [node for node in found if node is not None]
    return frozenset(known) if len(known) == len(found) else None


def _physical(cores: frozenset[int], root: Path) -> list[frozenset[int]]:
    """Logical cores by the physical core that they lie on, in order of the lowest of each."""
    left, found = set(cores), list[frozenset[int]]()
    for core in sorted(cores):
        if core in left:
            siblings = _numbers_in(root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
            found.append(frozenset({core, *(siblings & left)}))
            left -= found[-1]
    return found


def _numbers_in(file: Path) -> frozenset[int]:
    """The numbers of a list such as "0-2,4,6-7"; none where the file is not there or holds something else."""
    with suppress(OSError, ValueError):
        ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
        return frozenset(number for first, _, last in ranges for number in range(int(first), int(last or first) + 1))
    return frozenset()
