"""Place processes on cores: threads, NUMA nodes, the cores of loader workers, and variables of the environment."""

from __future__ import annotations

import getpass
import multiprocessing
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, inf
from pathlib import Path
from typing import Any

import threadpoolctl
import torch
from platformdirs import user_cache_path

from autotune.errors import ConfigError

# The processor: its name, the cores of it that this process may use, and the control groups that
# say so.


_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: the lesser of affinity and cgroup quota, at least 1.

    Source: Linux kernel, admin-guide/cgroup-v2 (cpu.max) and scheduler/sched-bwc (cfs_quota_us).
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, ceil(min(affinity, cpu_quota_here())))


def cpu_quota_here() -> float:
    """Cores that this process may use by its control group and all above it; infinite where none limits it."""
    return min([inf, *map(cpu_quota, cgroup_folders("cpu"))])


def cgroup_folders(controller: str) -> list[Path]:
    """This process's group and all above it: the tightest limit counts."""
    folders: list[Path] = []
    with suppress(OSError):
        for line in _CGROUP_MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _CGROUP_ROOT if controllers == "" else _CGROUP_ROOT / controller
            if controllers in {"", controller} or controller in controllers.split(","):
                own = root / path.lstrip("/")
                folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return folders


def cpu_quota(folder: Path) -> float:
    """Cores that a group may use; infinite where it is not limited, which stands there as "max", or as -1."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else inf
    return inf


def processor_name() -> str:
    """The processor's model, such as "AMD EPYC 9354"."""
    return cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def cpuinfo(*names: str) -> str:
    """The value of the first line of /proc/cpuinfo that begins with one of these names; "" where there is none."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            (line.partition(":")[2].strip() for line in lines if line.startswith(names)), ""
        )
    return ""


# Binds a process that trains to its cores, as numa_binding says: in trials and in the user's own
# loop alike.
#
# Comes in: the binding, where the devices of this host's ranks are, which of the ranks this is, and
# what the kernel tells of nodes and cores. Goes out: a process whose threads stay on its cores, as
# do later threads and loader workers, which inherit them; or a CoresError. Linux alone. What
# concerns GPUs has not run beside one.
#
# torchrun's --numa-binding has the same meanings (torch/numa/binding.py, AffinityMode, torch 2.13),
# but knows GPUs alone, needs the program numactl, and divides a node's cores among all of its GPUs.
# Source of the files: Linux kernel, Documentation/ABI/stable/sysfs-devices-node,
# ABI/testing/sysfs-bus-pci (numa_node) and admin-guide/cputopology.


SYS = Path("/sys")
"""Where the kernel tells of devices."""

Nodes = Mapping[int, Sequence[frozenset[int]]]
"""By the number of a NUMA node its physical cores that may be used, in order: each as its logical
cores."""

Addresses = Sequence[str | None]
"""PCI addresses of a rank's devices, such as "0000:3b:00.0"; None for one that is not told; empty
on the CPU."""

_THREADS = Path("/proc/self/task")
_PLACES_THREADS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP gives each thread a core itself, whatever its process is bound to.
Source: OpenMP 5.2, 21.1.7; libgomp's manual; LLVM's OpenMP documentation."""
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

    space/constraints.py asks the same of a machine that was described.
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

    Where there is one node it is that: the kernel then often writes -1. As in
    torch/numa/binding.py.
    """
    number = -1
    with suppress(OSError, ValueError):
        number = int((root / "bus/pci/devices" / address / "numa_node").read_text())
    if number >= 0:
        return number
    return next(iter(nodes)) if len(nodes) == 1 else None


def cores_of_rank(
    binding: str, rank: int, nodes_of_ranks: Sequence[frozenset[int]], nodes: Nodes
) -> frozenset[int]:
    """The logical cores that a rank of a host is bound to.

    Args:
        binding: "node", or "exclusive": whole physical cores that no other rank has. Where they
            don't come out even, the first ranks of a node have one more.
        rank: Its number on this host.
        nodes_of_ranks: The nodes of each rank's devices: several where one process has several
            devices.
        nodes: The cores that may be used.

    Raises:
        CoresError: none of the nodes' cores may be used, or they are fewer than the ranks that
            would share them.
    """
    own = nodes_of_ranks[rank]
    cores = [core for node in sorted(own) for core in nodes.get(node, ())]
    if not cores:
        raise CoresError(
            "numa_binding needs a core of the NUMA node that a rank's device is on, but this "
            "process may use none of "
            f"node {', '.join(map(str, sorted(own)))}; start it with more cores (taskset, cpuset), "
            f"or leave "
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
    place = peers.index(rank)
    each, rest = divmod(len(cores), len(peers))
    start = place * each + min(place, rest)
    return frozenset().union(*cores[start : start + each + (place < rest)])


def bind_rank(
    binding: str,
    rank: int,
    devices: Sequence[Addresses],
    *,
    is_alone: bool = False,
    root: Path = SYS,
) -> int:
    """Bind this process, as one of a host's ranks; how many threads an operation gets where torch chooses them.

    A process alone has as large a part of the threads that it would have unbound as it keeps of the
    cores. Ranks of a group that are bound to the same cores divide these, and all of a host's ranks
    the quota of their control group. Call it before operations have started threads; those that are
    there already are bound too.

    Args:
        binding: "node" or "exclusive".
        rank: Its number on this host.
        devices: Of each rank on this host.
        is_alone: The process is of no group, on this host or another.
        root: In place of /sys.

    Raises:
        CoresError: it can't be bound, and runs where it ran before.
    """
    name = next(
        (name for name in _PLACES_THREADS if os.environ.get(name, "").lower() not in _OFF), None
    )
    if name is not None:  # it may have put this very thread onto one core
        raise CoresError(
            "numa_binding can't stand beside a variable by which OpenMP places threads itself, but "
            "got "
            f"{name}={os.environ[name]}; unset it, or leave numa_binding out"
        )
    allowed = allowed_cores()
    if not allowed:
        raise CoresError(
            "numa_binding binds processes to cores, which Linux alone can; leave numa_binding out"
        )
    nodes = allowed_nodes(allowed, root)
    places = [_nodes_of(number, devices, nodes, root) for number in range(len(devices))]
    if None in (places if binding == "exclusive" else [places[rank]]):
        raise CoresError(
            "numa_binding needs the NUMA node of each device, but the machine does not tell it, or "
            "this process does "
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
    before = allowed_cores()
    reason = "it leaves others"
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        reason = str(error.strerror)
    if allowed_cores() != cores:
        with suppress(OSError):  # a cpuset may have let it in part
            os.sched_setaffinity(0, before)
        raise CoresError(
            f"numa_binding binds a process to its cores, but the kernel did not let it ({reason}); "
            f"leave "
            "numa_binding out"
        )
    for thread in _THREADS.iterdir():
        with suppress(OSError):  # it has ended
            if os.sched_getaffinity(int(thread.name)) == before:
                os.sched_setaffinity(int(thread.name), cores)


def is_bound_by_launcher() -> bool:
    """Whether whoever started this process has bound it to fewer cores than it runs on itself.

    torchrun --numa-binding, mpirun --bind-to and srun --cpu-bind do so: one rank's share must not
    be shared out anew.
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
    first = (module.current_device() if own.index is None else own.index) - rank
    last = module.device_count()
    each = count if ranks == 1 else 1
    places = [range(first + number, first + number + each) for number in range(ranks)]
    return [
        [pci_address(torch.device(own.type, place)) if 0 <= place < last else None for place in its]
        for its in places
    ]


def pci_address(device: torch.device) -> str | None:
    """Where a device is on the PCI bus; None where torch does not tell. Source: torch/numa/binding.py."""
    with suppress(AttributeError, RuntimeError, AssertionError):
        own = torch.get_device_module(device).get_device_properties(device)
        return f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"
    return None


def _nodes_of(
    rank: int, devices: Sequence[Addresses], nodes: Nodes, root: Path
) -> frozenset[int] | None:
    """The NUMA nodes of a rank's devices; None where one is not known.

    Ranks on a CPU are spread evenly over its nodes, neighbours together.
    """
    if not devices[rank]:
        return frozenset({[*nodes][rank * len(nodes) // len(devices)]})
    found = [
        None if address is None else node_of_pci(address, nodes, root) for address in devices[rank]
    ]
    known = [node for node in found if node is not None]
    return frozenset(known) if len(known) == len(found) else None


def _physical(cores: frozenset[int], root: Path) -> list[frozenset[int]]:
    """Logical cores by the physical core that they lie on, in order of the lowest of each."""
    left = set(cores)
    found = list[frozenset[int]]()
    for core in sorted(cores):
        if core in left:
            siblings = _numbers_in(
                root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
            )
            found.append(frozenset({core, *(siblings & left)}))
            left -= found[-1]
    return found


def _numbers_in(file: Path) -> frozenset[int]:
    """The numbers of a list such as "0-2,4,6-7"; none where the file is not there or holds something else."""
    with suppress(OSError, ValueError):
        ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
        return frozenset(
            number
            for first, _, last in ranges
            for number in range(int(first), int(last or first) + 1)
        )
    return frozenset()


# Threads of one operation in loader workers: what the setting `worker_threads` does in each of them
# as it starts.
#
# Comes in: the setting, and a worker_init_fn of the user's own. Goes out: a worker_init_fn for
# torch's DataLoader, which can be pickled, for workers that are not forked.
#
# torch limits only its own threads in workers, to one (torch/utils/data/_utils/worker.py). BLAS,
# OpenMP and OpenCV start one a core in each.


VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
"""What libraries that are loaded later take their number of threads from."""


@dataclass(frozen=True, slots=True)
class LimitedThreads:
    """A worker_init_fn that limits the threads of its worker, and then calls another one."""

    threads: int
    then: Callable[[int], None] | None = None
    """The user's own."""

    def __call__(self, worker_id: int) -> None:
        """Called by torch in each worker as it starts; the dataset is there already."""
        limit_threads(self.threads)
        if self.then is not None:
            self.then(worker_id)


def limited(
    worker_init_fn: Callable[[int], None] | None, threads: int | None
) -> Callable[[int], None] | None:
    """A worker_init_fn for this setting, in which the user's own runs too, afterwards; None: that alone.

    One that limits threads already is not limited twice: the new number takes the place of the old
    one.
    """
    own = worker_init_fn.then if isinstance(worker_init_fn, LimitedThreads) else worker_init_fn
    return own if threads is None else LimitedThreads(threads, own)


def threads_in_workers(worker_init_fn: object) -> int | None:
    """The setting that a worker_init_fn carries; None where it carries none."""
    return worker_init_fn.threads if isinstance(worker_init_fn, LimitedThreads) else None


def limit_threads(count: int) -> None:
    """So many threads for one operation in this process, which is a loader's worker.

    In a forked worker numbers are only lowered, so that torch keeps its one thread. More of them
    would wait for ever: GNU OpenMP holds the threads that its parent has started for its own, and
    these were not forked. For the same reason fewer threads of OpenCV than it has are asked for as
    none: it computes in the calling thread then, and ends no threads. To end forked ones it waits
    for ever, or crashes.

    Source: gcc.gnu.org, bug 58378 (libgomp after fork); OpenCV, modules/core/src/parallel_impl.cpp,
    ThreadPool::setNumOfThreads.
    """
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    is_forked = _is_forked()
    torch.set_num_threads(min(count, torch.get_num_threads()) if is_forked else count)
    for pool in threadpoolctl.ThreadpoolController().lib_controllers:
        pool.set_num_threads(min(count, pool.num_threads or count) if is_forked else count)
    opencv: Any = sys.modules.get("cv2")
    if not hasattr(opencv, "setNumThreads"):  # not there, or being imported
        return
    if count == 1 or (is_forked and count < opencv.getNumThreads()):
        opencv.setNumThreads(0)
    elif not is_forked:
        opencv.setNumThreads(count)


def _is_forked() -> bool:
    """Whether this process was forked from its parent; a process that multiprocessing has not started counts as such.

    One that was started without a context of its own has the start method that is in effect, which
    it knows too: it inherits it, or spawning sets it. Source: CPython, multiprocessing/context.py,
    Process; spawn.py, prepare.
    """
    started_by = getattr(multiprocessing.current_process(), "_start_method", "fork")
    return (started_by or multiprocessing.get_start_method()) == "fork"


# The folder of compiled code that trials and the training share, so that what a search has compiled
# is found again.
#
# Comes in: the user's environment. Goes out: the variable that names the folder to torch. Imports
# no torch, since `autotune apply` starts without it.


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_cache_variables() -> dict[str, str]:
    """Return the variable that makes torch keep compiled code in a folder of the user's cache.

    Return {} where the user has named a folder, or where the cache can't be used: torch then has
    its usual folder. torch unpickles and loads what it finds, so the folder must be the user's own,
    and nobody else may enter it.
    """
    if sys.platform == "win32":  # files there have no owner to compare
        return {}
    try:
        cache = user_cache_path("autotune") / "inductor"
    except RuntimeError:  # the user has no home
        return {}
    # A home may be shared by unlike hosts, and torch compiles for the instructions of the one that
    # it runs on.
    instructions = cpuinfo("flags", "Features") or processor_name()
    folder = str(cache / sha256(instructions.encode()).hexdigest()[:16])
    named = os.environ.get(_VARIABLE, folder)
    if not cache.is_absolute() or (named != folder and not _is_usual(Path(named))):
        return {}
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache.lstat()
    except OSError:
        return {}
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    is_open_to_others = bool(
        status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    )  # torch makes folders below it by umask
    if (
        not is_own or is_open_to_others or not os.access(cache, os.W_OK | os.X_OK)
    ):  # the disk may be read-only
        return {}
    return {_VARIABLE: folder}


def _is_usual(folder: Path) -> bool:
    """Return whether torch, rather than the user, has set the variable to this folder: it does once it is imported.

    Source: torch/_inductor/runtime/cache_dir_utils.py, default_cache_dir.
    """
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (OSError, KeyError):  # nobody has this process's user id
        return False
    return folder == Path(tempfile.gettempdir(), f"torchinductor_{user}")


# The process that trains: its device, the threads of its operations, and how cuDNN chooses among
# its algorithms.


def own_device(*, is_rank: bool) -> torch.device:
    """The accelerator's current device, for a rank of torchrun the one of its number on this host; else the CPU."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return torch.device("cpu")
    index = os.environ.get("LOCAL_RANK", "") if is_rank else ""
    return torch.device(
        kind.type, int(index) if index.isdecimal() else torch.accelerator.current_device_index()
    )


def set_current(device: torch.device) -> None:
    """Make an accelerator's device the current one, as trials do: what names no device lies there then."""
    if device.index is not None and torch.accelerator.is_available():
        own = torch.accelerator.current_accelerator()
        if own is not None and own.type == device.type:
            torch.accelerator.set_device_index(device.index)


def set_threads(count: int | None, ranks_here: int | None) -> None:
    """So many threads for each of torch's operations on the CPU; without a number the ranks of a host share its cores.

    Both None: as they are.
    """
    if count is not None or ranks_here is not None:
        torch.set_num_threads(count or max(1, usable_cores() // (ranks_here or 1)))


def set_cudnn_benchmark(is_on: bool) -> None:
    """Have cuDNN time its algorithms for each new shape, or choose by its own rules; ROCm's MIOpen alike.

    Of no effect where torch has neither. Source: torch.backends.cudnn.benchmark.
    """
    torch.backends.cudnn.benchmark = is_on


def local_rank() -> int:
    """This rank's number on its host, as torchrun says it; else that in its process group, if one is open."""
    own = os.environ.get("LOCAL_RANK", "")
    if own.isdecimal():
        return int(own)
    group: Any = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() else 0


def local_ranks(world_size: int) -> int:
    """Ranks on this host, as torchrun says it; all of them where nothing does."""
    own = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(own) if own.isdecimal() and int(own) else world_size
