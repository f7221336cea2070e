"""All that differs between CUDA, ROCm, MPS, XPU and the CPU; and which device "auto" stands for."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
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

# What this machine grants a process, and what a process tree takes of it, read from the kernel.
#
# Hands on RAM, the processor's flags, bytes read from disks, and the peak memory of a process tree.


_TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables of the environment that change what float32 means: NVIDIA's libraries' own switch, and
torch's. Source: cuBLAS's documentation; aten/src/ATen/Context.h."""


def usable_ram_bytes() -> int:
    """RAM that this process may use: the lesser of the machine's and the cgroup's."""
    return int(min([psutil.virtual_memory().total, *map(_memory_limit, cgroup_folders("memory"))]))


def processor_flags() -> frozenset[str]:
    """Instruction-set flags as Linux lists them; empty elsewhere."""
    return frozenset(cpuinfo("flags", "Features").split())


def tf32_overrides() -> tuple[str, ...]:
    """Those of _TF32_VARIABLES that are set, as NAME=0 or NAME=1: what else one may hold means nothing.

    Source: c10::utils::check_env for torch's; NVIDIA's is documented for 0 alone.
    """
    return tuple(
        f"{name}={os.environ[name]}"
        for name in _TF32_VARIABLES
        if os.environ.get(name) in {"0", "1"}
    )


def bytes_from_disk() -> int:
    """Bytes that this process has had read from disks so far, the page cache not counted; 0 elsewhere than on Linux.

    Source: man 5 proc, /proc/pid/io.
    """
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    return 0


def reset_tree_peak() -> None:
    """Begin a new peak of the memory of this process and of all below it. Source: man 5 proc, /proc/pid/clear_refs."""
    for process in _process_tree():
        with suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def tree_peak() -> tuple[int, str]:
    """Peak memory of this process and of all below it, such as loader workers, and what the figure is made of.

    It is what they have now (on Linux their proportional set sizes, so that shared pages count
    once), and what each has had resident beyond that at its own peak since `reset_tree_peak`. Their
    peaks need not have come at the same time: the sum is an upper bound, never less than the tree
    had. Takes milliseconds.
    """
    total = 0
    for process in _process_tree():
        with suppress(psutil.Error):
            full = process.memory_full_info()
            total += int(getattr(full, "pss", full.uss)) + _above_present_bytes(process.pid)
    return (
        total,
        "PSS of the process tree" if sys.platform == "linux" else "USS of the process tree",
    )


def _process_tree() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _above_present_bytes(pid: int) -> int:
    """How much more a process has had resident at its peak than now. 0 where unknown."""
    with suppress(OSError, KeyError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        values = {line.partition(":")[0]: line.split() for line in lines}
        return max(0, int(values["VmHWM"][1]) - int(values["VmRSS"][1])) * 1024
    return 0


def _memory_limit(folder: Path) -> float:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return inf


# The device room: all that differs between CUDA, ROCm, MPS, XPU, other accelerators and the CPU.
#
# Opens a device by name and hands on one object whose functions synchronise it, cap its memory and
# read its peak. An accelerator is reached through torch's module of its kind (torch.cuda,
# torch.xpu, or what a plug-in has registered), whose functions have the same names; what a module
# lacks is left out, whatever its version.


_KINDS: dict[str, DeviceKind] = {"cuda": "cuda", "mps": "mps", "xpu": "xpu"}


@dataclass(frozen=True)
class Device:
    """The device of a rank; under strategy dp, all the devices of its one process. On the CPU, memory is RAM."""

    torch_device: torch.device
    """The first one, which batches go to."""
    kind: DeviceKind
    beside: tuple[torch.device, ...] = ()
    """The further devices that strategy dp splits a batch over."""
    limit_bytes: int | None = None
    """Memory that may be in use on each device, what is not ours included; None: not limited."""
    remark: Note | None = None
    """What the user should know of the choice of this device."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that the process trains on."""
        return (self.torch_device, *self.beside)

    @property
    def module(self) -> Any:
        """Torch's functions for this kind of device: torch.cuda, torch.xpu, torch.mps, torch.cpu and their like."""
        return torch.get_device_module(self.torch_device)

    @property
    def has_own_memory(self) -> bool:
        """Whether the device has an allocator whose peak torch counts."""
        return self.kind not in {"cpu", "mps"} and hasattr(self.module, "max_memory_reserved")

    @cached_property
    def total_memory_bytes(self) -> int:
        """Memory of the device; the process's share of RAM on the CPU and on MPS. Of several, the smallest one's."""
        if not self.has_own_memory:
            return usable_ram_bytes()
        return min(self._total_bytes(device) for device in self.devices)

    def synchronize(self) -> None:
        """Wait until all work given to the devices is done."""
        if self.kind == "mps":
            torch.mps.synchronize()
        elif self.kind != "cpu":
            for device in self.devices:
                self.module.synchronize(device)

    def cap_memory(self) -> None:
        """Make torch's allocator refuse what would pass the limit, so that a trial is measured under it.

        The cap is the limit less what lies outside torch (context, libraries, other processes).
        That grows: kernels are loaded when they are first called, and a communicator's buffers come
        with the first exchange of a kind. So the cap is set again once they are there; the
        allocator checks its next request against it, with all that it has reserved so far. No
        effect on the CPU, and where torch can't do so. Source: c10/cuda/CUDACachingAllocator.cpp,
        setMemoryFraction and alloc_block.
        """
        cap = getattr(self.module, "set_per_process_memory_fraction", None)
        if self.limit_bytes is None or not self.has_own_memory or cap is None:
            return
        for device in self.devices:
            share = (self.limit_bytes - (self._outside_bytes(device) or 0)) / self._total_bytes(
                device
            )
            cap(max(0.0, min(1.0, share)), device)

    def alloc_retries(self) -> int | None:
        """How often the allocators have found no room, given back what they held and asked again, since the start.

        None where they do not count that. Source: num_alloc_retries in
        c10/cuda/CUDACachingAllocator.cpp, alloc_block.
        """
        return self._counted("num_alloc_retries")

    def refusals(self) -> int:
        """How often the allocators have refused memory, since the start; 0 where they do not count that.

        A refusal counts when it is raised, even if the exception is caught later; cuDNN, which
        tries for an engine that needs less, does. Source: c10/cuda/CUDACachingAllocator.cpp
        (malloc: stats.num_ooms).
        """
        return self._counted("num_ooms") or 0

    def free_bytes(self) -> int | None:
        """Memory that nobody uses, of several devices the fullest one's; None without own memory, or where one is lost.

        Source of the last: a failed kernel fails each later call (CUDA Runtime API,
        cudaErrorIllegalAddress).
        """
        with suppress(RuntimeError):
            if self.has_own_memory and hasattr(self.module, "mem_get_info"):
                return min(int(self.module.mem_get_info(device)[0]) for device in self.devices)
        return None

    def reset_peak(self) -> None:
        """Start a new peak: what was needed to build the workload is not what training needs."""
        if self.has_own_memory:
            self.give_back()
            for device in self.devices:
                self._ask("reset_peak_memory_stats", device)
            return
        reset_tree_peak()

    def give_back(self) -> None:
        """Have the allocators give back what they hold in reserve, where they do."""
        if self.has_own_memory:
            self._ask("empty_cache")

    def peak_memory(self, retries_before: int | None = None) -> MemorySample:
        """Peak memory since `reset_peak`, of several devices the fullest one's. Takes milliseconds: never in a window.

        Args:
            retries_before: `alloc_retries` at the beginning of what retries are to be counted in;
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
        """What tensors take now of the allocators' memory, of all devices; None without own memory, or where unknown.

        Waits for nothing.
        """
        if not self.has_own_memory:
            return None
        held: list[Any] = [self._ask("memory_allocated", device) for device in self.devices]
        return None if None in held else sum(held)

    def _peak_of(self, device: torch.device) -> MemorySample:
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
        """Memory in use outside torch's allocator; None where the module does not tell what is free."""
        if not hasattr(self.module, "mem_get_info"):
            return None
        free, total = self.module.mem_get_info(device)
        return max(0, int(total) - int(free) - int(self._ask("memory_reserved", device) or 0))

    def _total_bytes(self, device: torch.device) -> int:
        return int(self.module.get_device_properties(device).total_memory)

    def _counted(self, name: str) -> int | None:
        """A count of the allocators' since the start, of all devices; None where one does not keep it."""
        if not self.has_own_memory:
            return None
        counts: list[Any] = [
            (self._ask("memory_stats", device) or {}).get(name) for device in self.devices
        ]
        return None if None in counts else sum(counts)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """What a function of the module answers; None where the module has no such function."""
        function = getattr(self.module, name, None)
        return None if function is None else function(*arguments)


def open_device(
    name: str, rank: int = 0, *, count: int = 1, limit_bytes: int | None = None
) -> Device:
    """Open a device by torch's name, or the machine's accelerator for "auto", else the CPU.

    Args:
        name: As torch names it, or "auto".
        rank: Number of this rank on its host: the ranks take the devices from the one named on, in
            order; on the CPU they share it.
        count: Devices that this process trains on, from that one on.
        limit_bytes: Memory that may be in use on each.

    Raises:
        DeviceError: there is no such device here, or "auto" would pass over a GPU.
    """
    name, remark = choose(detect()) if name == "auto" else (name, None)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(
            f"device must be one of torch's names, such as cuda:0 or cpu, but got {name!r}"
        ) from error
    if device.type == "cpu":
        return Device(torch.device("cpu"), "cpu", limit_bytes=limit_bytes, remark=remark)
    _refuse_absent(name, device)
    module = torch.get_device_module(device)
    first = (device.index or 0) + rank
    there_are = module.device_count()
    last = first + count - 1
    if last >= there_are:
        raise DeviceError(
            f"device {device.type}:{last} was asked for, but there are {there_are} here; name one "
            f"below "
            f"{device.type}:{there_are}"
        )
    own, *beside = (torch.device(device.type, index) for index in range(first, last + 1))
    if hasattr(module, "set_device"):  # Apple's has one device, and no way to choose it
        module.set_device(own)
    return Device(own, _kind_of(own), beside=tuple(beside), limit_bytes=limit_bytes, remark=remark)


def opened_device() -> Device | None:
    """The current device of the accelerator that this process has in use; None where it has opened none.

    Opens none itself: a job on the CPU leaves a GPU's driver alone. Which accelerator it could be
    is known from how torch was built. Source: aten/src/ATen/DeviceAccelerator.cpp, getAccelerator.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module: Any = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", bool)():
        return None
    own = torch.device(accelerator.type, module.current_device())
    return Device(own, _kind_of(own))


def _kind_of(device: torch.device) -> DeviceKind:
    is_rocm = device.type == "cuda" and torch.version.hip is not None
    return "rocm" if is_rocm else _KINDS.get(device.type, "other")


def _refuse_absent(name: str, device: torch.device) -> None:
    found = detect()
    if found.usable is None or device.type != torch.device(found.usable).type:
        why = unusable(found) if device.type == "cuda" else None
        reason = why or f"torch {torch.__version__} sees none here; set device: auto"
        raise DeviceError(f"device {name!r} was asked for, but {reason}")


# Which device "auto" stands for, and whether a GPU would be passed over by that.
#
# Takes a Detection of torch and of the machine (`detect`, the only reader); hands on a name, or
# refuses: a torch that can't use the GPU of this machine would tune the CPU, and the user would not
# notice.


_NODES = {"NVIDIA": "nvidia[0-9]*", "AMD": "kfd"}
"""Files in /dev by which a maker's driver gives its GPUs. Source: NVIDIA driver README,
nvidia-modprobe; ROCm documentation, running containers."""
_VISIBLE = {
    "NVIDIA": (("CUDA_VISIBLE_DEVICES",),),
    "AMD": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}
"""Variables that leave a process a part of the GPUs, one after the other; of those side by side the
first that is set counts. Source: CUDA C++ Programming Guide, environment variables; ROCm
documentation, GPU isolation techniques."""
_HIDDEN = (
    "",
    "-1",
    "NoDevFiles",
)  # the first two by CUDA's rules, the last by Slurm where a job has no GPU


class DeviceError(Exception):
    """The device that was asked for is not there; the message is a complete sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What torch can use, and which GPUs this machine has."""

    torch: str
    """Torch's version."""
    usable: str | None = None
    """The accelerator that torch can use now, such as "cuda"; None: none, and the other fields show
    why."""
    built_for: str | None = None
    """What torch was built for, such as "CUDA 13.0" or "ROCm 7.0"; None: for neither."""
    gpu: str | None = None
    """Maker of a GPU that is physically here and not hidden from this process: "AMD" for a torch
    that was built for ROCm, "NVIDIA" for any other; None: there is none."""
    driver: str | None = None
    """Version of its driver; None where it is not known."""
    driver_cuda: int | None = None
    """The newest major version of CUDA that this driver is for; None where its library libcuda is
    not found."""
    visible: str | None = None
    """The variable of the environment that restricts the GPUs that this process may see, as
    NAME=value; None: none."""
    torch_warning: str | None = None
    """Why torch can't use the GPU, in its own words; None where it gave none."""


def choose(found: Detection) -> tuple[str, Note | None]:
    """The device for "auto", and what the user should know of it: the accelerator that torch can use, else the CPU.

    Raises:
        DeviceError: torch was built for the GPU that is here, and can't use it.
    """
    if found.usable is not None:
        return found.usable, None
    reason = unusable(found)
    if reason is not None:
        raise DeviceError(
            f"device: auto must not pass over a GPU, but {reason}, or set device: cpu"
        )
    return "cpu", None if found.gpu is None else torch_without_cuda(found.gpu, found.torch)


def unusable(found: Detection) -> str | None:
    """Why torch can't use the GPU that it was built for, with a remedy; None where that is not so."""
    if found.usable is not None or found.built_for is None or found.gpu is None:
        return None
    driver = "a driver of unknown version" if found.driver is None else f"driver {found.driver}"
    visible = "" if found.visible is None else f" and {found.visible}"
    torch_warning = "" if found.torch_warning is None else f" (torch says: {found.torch_warning})"
    return (
        f"torch {found.torch}, built for {found.built_for}, can't use the {found.gpu} GPU here "
        f"with {driver}{visible}"
        f"{torch_warning}; {_remedy(found)}"
    )


def _remedy(found: Detection) -> str:
    """What most likely helps, by what is known for certain first.

    The driver is too old where CUDA's major version is newer than its own: it runs all minor ones.
    Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility"; NVIDIA Container Toolkit,
    driver capabilities.
    """
    platform, _, version = (found.built_for or "").partition(" ")
    if found.driver_cuda is not None and found.driver_cuda < int(version.partition(".")[0]):
        return f"this driver is for CUDA {found.driver_cuda}: install a newer one, or a torch built for that CUDA"
    if found.torch_warning is not None:
        return "mend what it says"
    if found.visible is not None:
        return "let that name GPUs that are here, or unset it"
    if found.gpu == "NVIDIA" and found.driver_cuda is None:
        return "install the driver's libcuda.so.1; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return f"see that another program which uses {platform} runs here"


def detect() -> Detection:
    """Find out what torch can use, and where that is nothing, which GPU there is. To be called first.

    torch warns only once in a process why it can't use a GPU. Source: c10/cuda/CUDAFunctions.cpp,
    device_count.
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
    is_nvidia = maker == "NVIDIA"
    return replace(
        found,
        gpu=maker if (is_nvidia and nvml.gpu_count()) or _has_node(maker) else None,
        driver=nvml.driver_version() if is_nvidia else None,
        driver_cuda=nvml.driver_cuda() if is_nvidia else None,
        visible=_visible(maker),
        torch_warning=torch_warning,
    )


def _ask_torch() -> tuple[bool, str | None]:
    """Whether torch can use an accelerator, and what it warns of meanwhile; the warning is passed on to the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.accelerator.is_available()
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    words = [line for warning in caught for line in str(warning.message).splitlines()[:1]]
    return is_available, words[0].partition(" (Triggered internally")[0].strip() if words else None


def _variables(maker: str) -> list[str]:
    """The names of the variables that count."""
    firsts = (
        next((name for name in names if name in os.environ), None) for names in _VISIBLE[maker]
    )
    return [name for name in firsts if name is not None]


def _visible(maker: str) -> str | None:
    return ", ".join(f"{name}={os.environ[name]}" for name in _variables(maker)) or None


def _is_hidden(maker: str) -> bool:
    """Whether the environment hides all GPUs from this process."""
    return any(os.environ[name].split(",")[0].strip() in _HIDDEN for name in _variables(maker))


def _has_node(maker: str) -> bool:
    """Whether there is a GPU that this process may open: a container or a job may see one that is not its own."""
    return any(_can_open(node) for node in Path("/dev").glob(_NODES[maker]))


def _can_open(node: Path) -> bool:
    with suppress(OSError):
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        return True
    return False


# Which of torch's algorithms a training may use: whether modules convolve, and whether runs are to
# be alike.
#
# Comes in: modules, and what the user's code has asked torch for. Goes out: facts of the workload.


def has_convolutions(modules: Iterable[nn.Module]) -> bool:
    """Whether there are modules that convolve among these and all within; functions that do are not seen."""
    return any(isinstance(part, _ConvNd) for module in modules for part in module.modules())


def is_deterministic() -> bool:
    """Whether this process is to compute alike in each run, as far as the user's code has asked torch for it."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
