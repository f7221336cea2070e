"""Place processes on cores: usable cores, NUMA binding, threads of loader workers and of operations.

In trials and, through TrainingConfig, in the user's own loop. Reads /sys, /proc and the
environment; changes affinity, thread counts and torch's current device.
"""

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
from typing import TYPE_CHECKING, Any

import threadpoolctl
from platformdirs import user_cache_path

from autotune.errors import ConfigError

if TYPE_CHECKING:
    import torch

# The processor and control groups


_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the cores that this process may use: the smaller of affinity and cgroup quota, at least 1.

    Source: Linux kernel, admin-guide/cgroup-v2 (cpu.max) and scheduler/sched-bwc (cfs_quota_us).
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, ceil(min(affinity, cpu_quota_here())))


def cpu_quota_here() -> float:
    """Return the cores that this process's control groups allow; infinity without a limit."""
    return min([inf, *map(cpu_quota, cgroup_folders("cpu"))])


def cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's control group and of all above it; the lowest limit counts."""
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
    """Return the cores that a control group allows; infinity without a limit ("max" or -1)."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else inf
    return inf


def processor_name() -> str:
    """Return the processor's model, such as "AMD EPYC 9354"."""
    return cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def cpuinfo(*names: str) -> str:
    """Return the value of the first line of /proc/cpuinfo that begins with one of these names, or ""."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            (line.partition(":")[2].strip() for line in lines if line.startswith(names)), ""
        )
    return ""


# numa_binding: bind a training process to cores. Later threads and loader workers inherit its
# affinity. Linux only.
#
# torchrun's --numa-binding has the same values (torch/numa/binding.py, AffinityMode, torch 2.13),
# but only knows GPUs, needs the program numactl, and divides a node's cores among all of its GPUs.
# Source of the files: Linux kernel, Documentation/ABI/stable/sysfs-devices-node,
# ABI/testing/sysfs-bus-pci (numa_node) and admin-guide/cputopology.


_SYS = Path("/sys")
"""Root of the kernel's description of devices."""

Nodes = Mapping[int, Sequence[frozenset[int]]]
"""Allowed physical cores by number of the NUMA node, each as the set of its logical cores."""

Addresses = Sequence[str | None]
"""PCI addresses of a rank's devices, such as "0000:3b:00.0"; None for an unknown one; empty on the
CPU."""

_THREADS = Path("/proc/self/task")
_PLACES_THREADS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP binds each thread itself, whatever its process is bound to.
Source: OpenMP 5.2, 21.1.7; libgomp's manual; LLVM's OpenMP documentation."""
_KINDS = frozenset({"cpu", "cuda"})
"""Kinds of device whose place torch reports; "cuda" is ROCm's too."""
_OFF = frozenset({"", "false", "none", "disabled"})


class CoresError(ConfigError):
    """Raised if a process can't be bound to cores as its configuration asks."""


def allowed_cores() -> frozenset[int]:
    """Return the logical cores that this thread may run on; offline ones are left out.

    Empty if processes can't be bound to cores (macOS, Windows).
    """
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else frozenset()


def can_bind(device: torch.device) -> bool:
    """Return True if processes can be bound to the cores next to a device; else numa_binding has no effect.

    space/constraints.py has the same rule for a described machine.
    """
    return device.type in _KINDS and bool(allowed_cores())


def allowed_nodes(allowed: frozenset[int]) -> Nodes:
    """Return the allowed cores by NUMA node; a single node 0 if the kernel reports none."""
    found = dict[int, list[frozenset[int]]]()
    for folder in (_SYS / "devices/system/node").glob("node[0-9]*"):
        own = _numbers_in(folder / "cpulist") & allowed
        if own:
            found[int(folder.name.removeprefix("node"))] = _physical(own)
    if frozenset().union(*(core for cores in found.values() for core in cores)) != allowed:
        return {0: _physical(allowed)}
    return dict(sorted(found.items()))


def node_of_pci(address: str | None, nodes: Nodes) -> int | None:
    """Return the NUMA node of a device by its PCI address; None if the machine reports neither.

    With a single node it is that one: the kernel then often writes -1. Source:
    torch/numa/binding.py.
    """
    if address is None:
        return None
    number = -1
    with suppress(OSError, ValueError):
        number = int((_SYS / "bus/pci/devices" / address / "numa_node").read_text())
    if number >= 0:
        return number
    return next(iter(nodes)) if len(nodes) == 1 else None


def cores_of_rank(
    binding: str, rank: int, nodes_of_ranks: Sequence[frozenset[int]], nodes: Nodes
) -> frozenset[int]:
    """Return the logical cores to bind a rank of a host to.

    Args:
        binding: "node", or "exclusive": whole physical cores of its own. If they can't be divided
            evenly, the first ranks of a node get one more.
        rank: Number of the rank on this host.
        nodes_of_ranks: NUMA nodes of each rank's devices.
        nodes: The allowed cores.

    Raises:
        CoresError: None of the nodes' cores is allowed, or there are fewer than ranks to share
            them.
    """
    own = nodes_of_ranks[rank]
    cores = [core for node in sorted(own) for core in nodes.get(node, ())]
    if not cores:
        raise CoresError(
            "numa_binding needs a core of the NUMA node that a rank's device is on, but this "
            f"process may use none of node {', '.join(map(str, sorted(own)))}; start it with more "
            "cores (taskset, cpuset), or leave numa_binding out"
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
) -> int:
    """Bind this process, one of the ranks on its host, to its cores.

    Call it before operations start threads; existing threads are bound too.

    Args:
        binding: "node" or "exclusive".
        rank: Number of the rank on this host.
        devices: Addresses of each rank's devices on this host.
        is_alone: True if the process is in no group.

    Returns:
        Threads per operation if torch chooses them. A process alone keeps the share of its threads
        that it keeps of the cores. Ranks bound to the same cores divide these, and all ranks of a
        host divide the quota of their control group.

    Raises:
        CoresError: It can't be bound, and keeps its affinity.
    """
    import torch

    for name in _PLACES_THREADS:
        if os.environ.get(name, "").lower() not in _OFF:  # this very thread may be on one core now
            raise CoresError(
                "numa_binding can't be combined with a variable by which OpenMP places threads "
                f"itself, but got {name}={os.environ[name]}; unset it, or leave numa_binding out"
            )
    allowed = allowed_cores()
    if not allowed:
        raise CoresError(
            "numa_binding binds processes to cores, which Linux alone can; leave numa_binding out"
        )
    nodes = allowed_nodes(allowed)
    # An exclusive share depends on the other ranks' devices too.
    places = [_nodes_of(number, devices, nodes) for number in range(len(devices))]
    needed = places if binding == "exclusive" else [places[rank]]
    if None in needed:
        raise CoresError(
            "numa_binding needs the NUMA node of each device, but the machine does not report it, or "
            "this process does not see the devices of the other ranks (CUDA_VISIBLE_DEVICES); leave "
            "numa_binding out"
        )
    known = [place or frozenset() for place in places]
    own = cores_of_rank(binding, rank, known, nodes)
    bind_to(own)
    if is_alone:
        return max(1, torch.get_num_threads() * len(own) // len(allowed))
    sharing = 1
    if binding == "node":
        sharing = sum(bool(theirs & known[rank]) for theirs in known)
    return max(1, int(min(len(own) // sharing, cpu_quota_here() / len(devices))))


def bind_to(cores: frozenset[int]) -> None:
    """Bind this thread, and all threads of this process with the same affinity, to logical cores.

    Threads with another affinity keep it, as in torch/numa/binding.py.

    Raises:
        CoresError: The kernel refuses, and the thread keeps its affinity.
    """
    before = allowed_cores()
    reason = "it leaves others"
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        reason = str(error.strerror)
    if allowed_cores() != cores:
        with suppress(OSError):  # a cpuset may have allowed a part
            os.sched_setaffinity(0, before)
        raise CoresError(
            f"numa_binding binds a process to its cores, but the kernel did not let it ({reason}); "
            "leave numa_binding out"
        )
    for thread in _THREADS.iterdir():
        with suppress(OSError):  # it has ended
            if os.sched_getaffinity(int(thread.name)) == before:
                os.sched_setaffinity(int(thread.name), cores)


def is_bound_by_launcher() -> bool:
    """Return True if the parent process has bound this one to a part of its own cores.

    torchrun --numa-binding, mpirun --bind-to and srun --cpu-bind do so: such a share must not be
    divided again.
    """
    with suppress(OSError, AttributeError):
        return allowed_cores() < os.sched_getaffinity(os.getppid())
    return False


def addresses_of_ranks(own: torch.device, rank: int, ranks: int, count: int = 1) -> list[Addresses]:
    """Return the PCI addresses of each rank's devices on this host; None for a device that is not visible.

    Ranks take the devices in order.

    Args:
        own: This rank's device, or the first of several.
        rank: Number of the rank on this host.
        ranks: Number of ranks on this host.
        count: Number of devices, for a process that is alone.
    """
    import torch

    if own.type == "cpu":
        return [()] * ranks
    module = torch.get_device_module(own)
    first = (module.current_device() if own.index is None else own.index) - rank
    last = module.device_count()
    each = count if ranks == 1 else 1
    addresses: list[Addresses] = []
    for number in range(ranks):
        places = range(first + number, first + number + each)
        addresses.append(
            [
                pci_address(torch.device(own.type, place)) if 0 <= place < last else None
                for place in places
            ]
        )
    return addresses


def pci_address(device: torch.device) -> str | None:
    """Return a device's PCI address; None if torch does not report it. Source: torch/numa/binding.py."""
    import torch

    with suppress(AttributeError, RuntimeError, AssertionError):
        own = torch.get_device_module(device).get_device_properties(device)
        return f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"
    return None


def _nodes_of(rank: int, devices: Sequence[Addresses], nodes: Nodes) -> frozenset[int] | None:
    """Return the NUMA nodes of a rank's devices; None if one is not known.

    Ranks on the CPU are distributed evenly over the nodes, consecutive ones together.
    """
    if not devices[rank]:
        return frozenset({[*nodes][rank * len(nodes) // len(devices)]})
    found = [node_of_pci(address, nodes) for address in devices[rank]]
    known = [node for node in found if node is not None]
    return frozenset(known) if len(known) == len(found) else None


def _physical(cores: frozenset[int]) -> list[frozenset[int]]:
    """Group logical cores by physical core, ordered by the lowest logical core."""
    left = set(cores)
    found = list[frozenset[int]]()
    for core in sorted(cores):
        if core in left:
            siblings = _numbers_in(
                _SYS / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
            )
            found.append(frozenset({core, *(siblings & left)}))
            left -= found[-1]
    return found


def _numbers_in(file: Path) -> frozenset[int]:
    """Read a list of numbers such as "0-2,4,6-7"; empty if the file is missing or holds anything else."""
    with suppress(OSError, ValueError):
        numbers = set[int]()
        for part in file.read_text().strip().split(","):
            if part:
                first, _, last = part.partition("-")
                numbers.update(range(int(first), int(last or first) + 1))
        return frozenset(numbers)
    return frozenset()


# worker_threads: threads per operation in loader workers. torch limits only its own, to one
# (torch/utils/data/_utils/worker.py); BLAS, OpenMP and OpenCV start one per core in each worker.


VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
"""Variables that set the number of threads of libraries loaded later."""


@dataclass(frozen=True, slots=True)
class LimitedThreads:
    """A worker_init_fn that limits the threads of its worker, then calls the user's own; can be pickled."""

    threads: int
    then: Callable[[int], None] | None = None
    """The user's worker_init_fn."""

    def __call__(self, worker_id: int) -> None:
        """Limit the threads; torch calls this in each worker when it starts, with the dataset loaded."""
        limit_threads(self.threads)
        if self.then is not None:
            self.then(worker_id)


def limited(
    worker_init_fn: Callable[[int], None] | None, threads: int | None
) -> Callable[[int], None] | None:
    """Return a worker_init_fn that sets the threads of a worker, then calls the user's own.

    A limit that `worker_init_fn` sets already is replaced. With `threads` None, return the user's
    own.
    """
    own = worker_init_fn.then if isinstance(worker_init_fn, LimitedThreads) else worker_init_fn
    return own if threads is None else LimitedThreads(threads, own)


def threads_in_workers(worker_init_fn: object) -> int | None:
    """Return the worker_threads that a worker_init_fn sets, or None."""
    return worker_init_fn.threads if isinstance(worker_init_fn, LimitedThreads) else None


def limit_threads(count: int) -> None:
    """Set the number of threads per operation in this process, a loader worker.

    In a forked worker numbers are only lowered, so torch keeps its one thread: GNU OpenMP would
    wait for ever for the parent's threads, which were not forked. For the same reason OpenCV is set
    to 0 threads, which computes in the calling thread: to end forked threads it waits for ever or
    crashes.

    Source: gcc.gnu.org, bug 58378 (libgomp after fork); OpenCV, modules/core/src/parallel_impl.cpp,
    ThreadPool::setNumOfThreads.
    """
    import torch

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
    """Return True if this process was forked, or was not started by multiprocessing.

    A process started without a context knows the start method in effect: it inherits it, or
    spawning sets it. Source: CPython, multiprocessing/context.py, Process; spawn.py, prepare.
    """
    started_by = getattr(multiprocessing.current_process(), "_start_method", "fork")
    return (started_by or multiprocessing.get_start_method()) == "fork"


# The compile cache that trials and the training share.


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_cache_variables() -> dict[str, str]:
    """Return the variable that makes torch keep compiled code in a folder of the user's cache.

    Return {} if the user has set a folder, or if the cache can't be used; torch then uses its
    default. torch unpickles and loads what it finds, so the folder must belong to the user, and
    nobody else may enter it.
    """
    if sys.platform == "win32":  # files there have no owner to compare
        return {}
    try:
        cache = user_cache_path("autotune") / "inductor"
    except RuntimeError:  # the user has no home
        return {}
    # Hosts with different processors may share a home, and torch compiles for the processor.
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
    # torch makes the folders in it by umask, so the permissions of this one protect them.
    is_open_to_others = bool(status.st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    is_writable = os.access(cache, os.W_OK | os.X_OK)  # the disk may be read-only
    if not is_own or is_open_to_others or not is_writable:
        return {}
    return {_VARIABLE: folder}


def _is_usual(folder: Path) -> bool:
    """Return True if torch itself, when imported, has set the variable to this folder.

    Source: torch/_inductor/runtime/cache_dir_utils.py, default_cache_dir.
    """
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (OSError, KeyError):  # nobody has this process's user id
        return False
    return folder == Path(tempfile.gettempdir(), f"torchinductor_{user}")


# The process that trains: its device, threads and cuDNN's switch.


def own_device(*, is_rank: bool) -> torch.device:
    """Return the accelerator's current device, or that of LOCAL_RANK for a rank; the CPU without one."""
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return torch.device("cpu")
    index = _from_launcher("LOCAL_RANK") if is_rank else None
    if index is None:
        index = torch.accelerator.current_device_index()
    return torch.device(kind.type, index)


def set_current(device: torch.device) -> None:
    """Make an accelerator's device the current one, as trials do."""
    import torch

    if device.index is not None and torch.accelerator.is_available():
        own = torch.accelerator.current_accelerator()
        if own is not None and own.type == device.type:
            torch.accelerator.set_device_index(device.index)


def set_threads(count: int | None, ranks_here: int | None) -> None:
    """Set torch's CPU threads per operation.

    Args:
        count: Number of threads; None: divide the cores among the ranks.
        ranks_here: Ranks on this host. Both None: change nothing.
    """
    import torch

    if count is not None or ranks_here is not None:
        torch.set_num_threads(count or max(1, usable_cores() // (ranks_here or 1)))


def set_cudnn_benchmark(is_on: bool) -> None:
    """Switch cuDNN's (or ROCm MIOpen's) timing of algorithms for each new shape.

    No effect without either. Source: torch.backends.cudnn.benchmark.
    """
    import torch

    torch.backends.cudnn.benchmark = is_on


def local_rank() -> int:
    """Return this rank's number on its host: LOCAL_RANK, else the rank in an open process group, else 0."""
    import torch

    own = _from_launcher("LOCAL_RANK")
    if own is not None:
        return own
    group: Any = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() else 0


def local_ranks(world_size: int) -> int:
    """Return the ranks on this host: LOCAL_WORLD_SIZE, else `world_size`."""
    return _from_launcher("LOCAL_WORLD_SIZE") or world_size


def _from_launcher(name: str) -> int | None:
    """Return a number that a launcher such as torchrun has set in the environment; None without one."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None
