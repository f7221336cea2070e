"""Hide the differences between CUDA, ROCm, MPS, XPU and the CPU behind one `Device`.

Comes in: a device's name, or "auto". Goes out: a `Device` that synchronizes it, caps its memory and
reads its peak; also what the machine grants this process, and which GPUs torch can use.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from autotune.apply.cores import cgroup_folders, cpuinfo
from autotune.config.environment import DeviceKind
from autotune.messages.trials import torch_without_cuda
from autotune.note import Note
from autotune.records.measurement import MemorySample
from autotune.worker import nvml

_PROC = Path("/proc")

# The machine: RAM, processor flags, bytes read from disks, peak memory of a process tree.

_TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Environment variables that change what float32 means: of NVIDIA's libraries, and of torch.
Source: cuBLAS's documentation; aten/src/ATen/Context.h."""


def usable_ram_bytes() -> int:
    """Return the RAM that this process may use: the lesser of the machine's and the cgroup's."""
    return int(min([psutil.virtual_memory().total, *map(_memory_limit, cgroup_folders("memory"))]))


def processor_flags() -> frozenset[str]:
    """Return the instruction-set flags as Linux lists them; empty elsewhere."""
    return frozenset(cpuinfo("flags", "Features").split())


def tf32_overrides() -> tuple[str, ...]:
    """Return the _TF32_VARIABLES that are set, as NAME=0 or NAME=1; other values have no effect.

    Source: c10::utils::check_env for torch's; NVIDIA's is documented for 0 only.
    """
    names = [name for name in _TF32_VARIABLES if os.environ.get(name) in {"0", "1"}]
    return tuple(f"{name}={os.environ[name]}" for name in names)


def bytes_from_disk() -> int:
    """Return the bytes read from disks for this process so far, without page cache hits; 0 outside of Linux.

    Source: man 5 proc, /proc/pid/io.
    """
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    return 0


def reset_tree_peak() -> None:
    """Start a new memory peak for this process and all below it. Source: man 5 proc, /proc/pid/clear_refs."""
    for process in process_tree():
        with suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def tree_peak() -> tuple[int, str]:
    """Return the peak memory of this process and all below it, such as loader workers, and its source.

    It is the sum of the present memory (on Linux the proportional set sizes, so that shared pages
    count once) and of what each process had resident beyond that at its own peak since
    `reset_tree_peak`. Their peaks need not coincide: the sum is an upper bound, never too small.
    Takes milliseconds.

    Returns:
        Bytes, and the name of the figure.
    """
    total = 0
    for process in process_tree():
        with suppress(psutil.Error):
            full = process.memory_full_info()
            total += int(getattr(full, "pss", full.uss)) + _above_present_bytes(process.pid)
    kind = "PSS" if sys.platform == "linux" else "USS"
    return total, f"{kind} of the process tree"


def pages_of(pid: int | str) -> tuple[int, int] | None:
    """Return a process's private bytes, and the anonymous bytes that it shares with others.

    Source: man 5 proc, /proc/pid/smaps_rollup. None if the system does not report them, or the
    process has ended.
    """
    values = _rollup(pid)
    try:
        private = values["Private_Dirty"] + values["Private_Clean"]
        return private, max(0, values["Anonymous"] - private)
    except KeyError:
        return None


def anonymous_bytes(pid: int | str) -> int | None:
    """Return the anonymous memory of a process, shared or not; None if the system does not report it.

    The private memory of a process that has forked grows as its children copy pages: it is no sign
    of growth there.
    """
    return _rollup(pid).get("Anonymous")


def _rollup(pid: int | str) -> Mapping[str, int]:
    """Return the bytes of /proc/pid/smaps_rollup by name; none if it can't be read."""
    found = dict[str, int]()
    with suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            number, _, unit = value.strip().partition(" ")
            if unit == "kB":
                found[name] = int(number) * 1024
    return found


def process_tree() -> list[psutil.Process]:
    """Return this process and all below it."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _above_present_bytes(pid: int) -> int:
    """Return how much more memory a process had resident at its peak than now; 0 if unknown."""
    with suppress(OSError, KeyError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        values = {line.partition(":")[0]: line.split() for line in lines}
        return max(0, int(values["VmHWM"][1]) - int(values["VmRSS"][1])) * 1024
    return 0


def _memory_limit(folder: Path) -> float:
    """Return the memory limit of a cgroup in bytes; infinity if it has none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return inf


# The device of a rank.

_KINDS: dict[str, DeviceKind] = {"cuda": "cuda", "mps": "mps", "xpu": "xpu"}


@dataclass(frozen=True)
class Device:
    """The device of a rank; with strategy dp, all devices of its one process. On the CPU, memory is RAM.

    An accelerator is reached through torch's module of its kind (torch.cuda, torch.xpu, or what a
    plug-in has registered), whose functions share their names; functions that a module lacks are
    left out, whatever its version.
    """

    torch_device: torch.device
    """The first device, which batches go to."""
    kind: DeviceKind
    further: tuple[torch.device, ...] = ()
    """The further devices that strategy dp splits a batch over."""
    limit_bytes: int | None = None
    """Memory that may be in use on each device, by all processes; None: no limit."""
    note: Note | None = None
    """A note for the user on how this device was chosen."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that the process trains on."""
        return (self.torch_device, *self.further)

    @property
    def module(self) -> Any:
        """Torch's module for this kind of device: torch.cuda, torch.xpu, torch.mps, torch.cpu and the like."""
        return torch.get_device_module(self.torch_device)

    @property
    def has_own_memory(self) -> bool:
        """Return whether the device has an allocator whose peak torch counts."""
        return self.kind not in {"cpu", "mps"} and hasattr(self.module, "max_memory_reserved")

    @cached_property
    def total_memory_bytes(self) -> int:
        """Memory of the device, of several the smallest; on the CPU and MPS the RAM that this process may use."""
        if not self.has_own_memory:
            return usable_ram_bytes()
        return min(self._total_bytes(device) for device in self.devices)

    def synchronize(self) -> None:
        """Wait until the devices have finished all their work."""
        if self.kind == "mps":
            torch.mps.synchronize()
        elif self.kind != "cpu":
            for device in self.devices:
                self.module.synchronize(device)

    def cap_memory(self) -> None:
        """Make torch's allocator refuse requests above the limit, so that a trial is measured under it.

        The cap is the limit minus memory outside torch (context, libraries, other processes). That
        grows: kernels are loaded when first called, and a communicator's buffers come with the
        first exchange of a kind. So the cap is set again once they exist; the allocator checks its
        next request against it, with everything reserved so far. No effect on the CPU, or if torch
        has no such function. Source: c10/cuda/CUDACachingAllocator.cpp, setMemoryFraction and
        alloc_block.
        """
        cap = getattr(self.module, "set_per_process_memory_fraction", None)
        if self.limit_bytes is None or not self.has_own_memory or cap is None:
            return
        for device in self.devices:
            allowed_bytes = self.limit_bytes - (self._outside_bytes(device) or 0)
            share = allowed_bytes / self._total_bytes(device)
            cap(max(0.0, min(1.0, share)), device)

    def alloc_retries(self) -> int | None:
        """Return how often the allocators found no room, freed their cache and tried again, since the start.

        None if they do not count that. Source: num_alloc_retries in
        c10/cuda/CUDACachingAllocator.cpp, alloc_block.
        """
        return self._counted("num_alloc_retries")

    def refusals(self) -> int:
        """Return how often the allocators have refused memory since the start; 0 if they do not count that.

        A refusal counts when it is raised, even if the exception is caught later, as cuDNN does to
        try an engine that needs less. Source: c10/cuda/CUDACachingAllocator.cpp (malloc:
        stats.num_ooms).
        """
        return self._counted("num_ooms") or 0

    def free_bytes(self) -> int | None:
        """Return the free memory of the fullest device; None without own memory, or if a device is lost.

        After a failed kernel each later call fails. Source: CUDA Runtime API,
        cudaErrorIllegalAddress.
        """
        with suppress(RuntimeError):
            if self.has_own_memory and hasattr(self.module, "mem_get_info"):
                return min(int(self.module.mem_get_info(device)[0]) for device in self.devices)
        return None

    def reset_peak(self) -> None:
        """Start a new peak: building the workload may have needed more than training does."""
        if self.has_own_memory:
            self.give_back()
            for device in self.devices:
                self._ask("reset_peak_memory_stats", device)
            return
        reset_tree_peak()

    def give_back(self) -> None:
        """Free the memory that the allocators cache, if they can."""
        if self.has_own_memory:
            self._ask("empty_cache")

    def peak_memory(self, retries_before: int | None = None) -> MemorySample:
        """Return the peak memory since `reset_peak`, of the fullest device.

        Takes milliseconds: never call it in a window.

        Args:
            retries_before: `alloc_retries` at the start of the period in which retries are counted;
                None: not counted.
        """
        if not self.has_own_memory:
            peak_bytes, source = tree_peak()
            return MemorySample(peak_bytes=peak_bytes, source=source)
        sample = max(map(self._peak_of, self.devices), key=lambda sample: sample.peak_bytes)
        retries = self.alloc_retries()
        if retries is None or retries_before is None:
            return sample
        return sample.model_copy(update={"alloc_retries": retries - retries_before})

    def allocated_bytes(self) -> int | None:
        """Return the bytes of all tensors on all devices; None without own memory, or if unknown.

        Does not synchronize.
        """
        if not self.has_own_memory:
            return None
        held: list[Any] = [self._ask("memory_allocated", device) for device in self.devices]
        return None if None in held else sum(held)

    def _peak_of(self, device: torch.device) -> MemorySample:
        """Return the peak memory of one device."""
        reserved = int(self.module.max_memory_reserved(device))
        outside = self._outside_bytes(device)
        return MemorySample(
            peak_bytes=reserved + (outside or 0),
            source="max reserved" if outside is None else "max reserved + outside torch",
            reserved_bytes=reserved,
            outside_bytes=outside,
            allocated_bytes=self._ask("max_memory_allocated", device),
        )

    def _outside_bytes(self, device: torch.device) -> int | None:
        """Return the memory in use outside torch's allocator; None if the module does not report free memory."""
        if not hasattr(self.module, "mem_get_info"):
            return None
        free, total = self.module.mem_get_info(device)
        return max(0, int(total) - int(free) - int(self._ask("memory_reserved", device) or 0))

    def _total_bytes(self, device: torch.device) -> int:
        return int(self.module.get_device_properties(device).total_memory)

    def _counted(self, name: str) -> int | None:
        """Return an allocator count since the start, summed over the devices; None if one does not keep it."""
        if not self.has_own_memory:
            return None
        counts = list[Any]()
        for device in self.devices:
            stats = self._ask("memory_stats", device) or {}
            counts.append(stats.get(name))
        return None if None in counts else sum(counts)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return the result of a function of the module; None if it has no such function."""
        function = getattr(self.module, name, None)
        if function is None:
            return None
        return function(*arguments)


def open_device(
    name: str, rank: int = 0, *, count: int = 1, limit_bytes: int | None = None
) -> Device:
    """Open a device by torch's name; for "auto", the machine's accelerator, else the CPU.

    Args:
        name: Torch's name of a device, or "auto".
        rank: Number of this rank on its host: ranks take the devices from the named one on, in
            order; on the CPU they share it.
        count: Devices that this process trains on, from that one on.
        limit_bytes: Memory that may be in use on each device.

    Raises:
        DeviceError: There is no such device here, or "auto" would ignore a GPU.
    """
    note = None
    if name == "auto":
        name, note = choose(detect())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(
            f"device must be one of torch's names, such as cuda:0 or cpu, but got {name!r}"
        ) from error
    if device.type == "cpu":
        return Device(torch.device("cpu"), "cpu", limit_bytes=limit_bytes, note=note)
    _refuse_absent(name, device)

    # Take this rank's devices: `count` of them, behind those of lower ranks.
    module = torch.get_device_module(device)
    first = (device.index or 0) + rank
    there_are = module.device_count()
    last = first + count - 1
    if last >= there_are:
        raise DeviceError(
            f"device {device.type}:{last} was asked for, but there are {there_are} here; name one "
            f"below {device.type}:{there_are}"
        )
    own, *further = (torch.device(device.type, index) for index in range(first, last + 1))
    if hasattr(module, "set_device"):  # torch.mps has one device and no such function
        module.set_device(own)
    return Device(own, _kind_of(own), further=tuple(further), limit_bytes=limit_bytes, note=note)


def opened_device() -> Device | None:
    """Return the current device of the accelerator that this process has opened; None if it has none.

    Opens none itself: a job on the CPU leaves a GPU's driver alone. The kind of accelerator follows
    from how torch was built. Source: aten/src/ATen/DeviceAccelerator.cpp, getAccelerator.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    # a module without this function has opened nothing (bool() is False)
    module: Any = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", bool)():
        return None
    own = torch.device(accelerator.type, module.current_device())
    return Device(own, _kind_of(own))


def _kind_of(device: torch.device) -> DeviceKind:
    is_rocm = device.type == "cuda" and torch.version.hip is not None
    if is_rocm:
        return "rocm"
    return _KINDS.get(device.type, "other")


def _refuse_absent(name: str, device: torch.device) -> None:
    """Raise `DeviceError` unless torch can use a device of this kind."""
    found = detect()
    if found.usable is not None and device.type == torch.device(found.usable).type:
        return
    reason = None
    if device.type == "cuda":
        reason = unusable(found)
    if reason is None:
        reason = f"torch {torch.__version__} sees none here; set device: auto"
    raise DeviceError(f"device {name!r} was asked for, but {reason}")


# The choice of a device for "auto", from a `Detection` of torch and of the machine.

_NODES = {"NVIDIA": "nvidia[0-9]*", "AMD": "kfd"}
"""Files in /dev of a vendor's GPUs. Source: NVIDIA driver README, nvidia-modprobe; ROCm
documentation, running containers."""
_VISIBLE = {
    "NVIDIA": (("CUDA_VISIBLE_DEVICES",),),
    "AMD": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}
"""Variables that restrict the GPUs of a process, applied in turn; of alternatives the first that is
set counts. Source: CUDA C++ Programming Guide, environment variables; ROCm documentation, GPU
isolation techniques."""
_HIDDEN = ("", "-1", "NoDevFiles")
"""Values that hide all GPUs: two by CUDA's rules, one by Slurm for a job without GPUs."""


class DeviceError(Exception):
    """The requested device is not available; the message is a complete sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """The accelerator that torch can use, and the GPUs of this machine."""

    torch: str
    """Torch's version."""
    usable: str | None = None
    """The accelerator that torch can use, such as "cuda"; None: none, and the other fields explain
    it."""
    built_for: str | None = None
    """Platform that torch was built for, such as "CUDA 13.0" or "ROCm 7.0"; None: neither."""
    gpu: str | None = None
    """Vendor of a GPU that is present and not hidden from this process: "AMD" for a torch built for
    ROCm, "NVIDIA" for any other; None: there is none."""
    driver: str | None = None
    """Version of its driver; None if unknown."""
    driver_cuda: int | None = None
    """Newest major version of CUDA that the driver supports; None if its library libcuda is not
    found."""
    visible: str | None = None
    """Environment variable that restricts the GPUs visible to this process, as NAME=value; None:
    none."""
    torch_warning: str | None = None
    """Torch's own warning about why it can't use the GPU; None if it gave none."""


def choose(found: Detection) -> tuple[str, Note | None]:
    """Return the device for "auto" and a note on the choice: torch's accelerator, else the CPU.

    Refuses to ignore a GPU: the user would not notice that the CPU is tuned.

    Raises:
        DeviceError: Torch was built for a GPU that is here and can't use it.
    """
    if found.usable is not None:
        return found.usable, None
    reason = unusable(found)
    if reason is not None:
        raise DeviceError(
            f"device: auto must not pass over a GPU, but {reason}, or set device: cpu"
        )
    if found.gpu is None:
        return "cpu", None
    return "cpu", torch_without_cuda(found.gpu, found.torch)


def unusable(found: Detection) -> str | None:
    """Return why torch can't use the GPU that it was built for, with a remedy; None if that is not so."""
    if found.usable is not None or found.built_for is None or found.gpu is None:
        return None
    reason = f"torch {found.torch}, built for {found.built_for}, can't use the {found.gpu} GPU here"
    if found.driver is None:
        reason += " with a driver of unknown version"
    else:
        reason += f" with driver {found.driver}"
    if found.visible is not None:
        reason += f" and {found.visible}"
    if found.torch_warning is not None:
        reason += f" (torch says: {found.torch_warning})"
    return f"{reason}; {_remedy(found)}"


def _remedy(found: Detection) -> str:
    """Return the most likely remedy, the most certain cause first.

    The driver is too old if CUDA's major version is newer than its own: it runs all minor ones.
    Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility"; NVIDIA Container Toolkit,
    driver capabilities.
    """
    platform, _, version = (found.built_for or "").partition(" ")
    if found.driver_cuda is not None and found.driver_cuda < int(version.partition(".")[0]):
        return f"this driver is for CUDA {found.driver_cuda}: install a newer one, or a torch built for that CUDA"
    if found.torch_warning is not None:
        return "fix what it reports"
    if found.visible is not None:
        return "let that name GPUs that are here, or unset it"
    if found.gpu == "NVIDIA" and found.driver_cuda is None:
        return "install the driver's libcuda.so.1; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return f"see that another program which uses {platform} runs here"


def detect() -> Detection:
    """Find out what torch can use, and, if that is nothing, which GPU is present.

    Call it before anything else asks torch: it warns only once per process why it can't use a GPU.
    Source: c10/cuda/CUDAFunctions.cpp, device_count.
    """
    is_available, torch_warning = _ask_torch()
    if is_available:
        return Detection(
            torch=torch.__version__, usable=str(torch.accelerator.current_accelerator())
        )
    maker = "NVIDIA"
    platform = "CUDA"
    version = torch.version.cuda
    if torch.version.hip is not None:
        maker = "AMD"
        platform = "ROCm"
        version = torch.version.hip
    found = Detection(torch=torch.__version__, built_for=version and f"{platform} {version}")
    if _is_hidden(maker):
        return found

    # Look for a GPU in NVML and /dev, since torch sees none.
    is_nvidia = maker == "NVIDIA"
    has_gpu = (is_nvidia and nvml.gpu_count()) or _has_node(maker)
    return replace(
        found,
        gpu=maker if has_gpu else None,
        driver=nvml.driver_version() if is_nvidia else None,
        driver_cuda=nvml.driver_cuda() if is_nvidia else None,
        visible=_visible(maker),
        torch_warning=torch_warning,
    )


def _ask_torch() -> tuple[bool, str | None]:
    """Return whether torch can use an accelerator, and its warning, which is raised again for the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.accelerator.is_available()
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    messages = [str(warning.message) for warning in caught if str(warning.message)]
    if not messages:
        return is_available, None
    first_line = messages[0].splitlines()[0]
    return is_available, first_line.partition(" (Triggered internally")[0].strip()


def _variables(maker: str) -> list[str]:
    """Return the names of the variables that apply."""
    found = list[str]()
    for alternatives in _VISIBLE[maker]:
        found.extend([name for name in alternatives if name in os.environ][:1])
    return found


def _visible(maker: str) -> str | None:
    return ", ".join(f"{name}={os.environ[name]}" for name in _variables(maker)) or None


def _is_hidden(maker: str) -> bool:
    """Return whether the environment hides all GPUs from this process."""
    return any(os.environ[name].split(",")[0].strip() in _HIDDEN for name in _variables(maker))


def _has_node(maker: str) -> bool:
    """Return whether this process may open a GPU; a container may see GPUs that are not its own."""
    return any(_can_open(node) for node in Path("/dev").glob(_NODES[maker]))


def _can_open(node: Path) -> bool:
    with suppress(OSError):
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        return True
    return False


# Facts of a workload that decide which of torch's algorithms it may use.


def has_convolutions(modules: Iterable[nn.Module]) -> bool:
    """Return whether these modules, or modules inside them, convolve; functional calls are not seen."""
    return any(isinstance(part, _ConvNd) for module in modules for part in module.modules())


def is_deterministic() -> bool:
    """Return whether the user's code has asked torch for deterministic algorithms."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
