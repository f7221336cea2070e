"""The device room: all that differs between CUDA, ROCm, MPS, XPU, other accelerators and the CPU.

Opens a device by name and hands on one object whose functions synchronise it, cap its memory and read its peak.
An accelerator is reached through torch's module of its kind (torch.cuda, torch.xpu, or what a plug-in has registered),
whose functions have the same names; what a module lacks is left out, whatever its version.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autotune.note import Note
from autotune.records.measurement import MemorySample
from autotune.settings.environment import DeviceKind
from autotune.worker.setup import machine
from autotune.worker.setup.device_choice import DeviceError, choose, detect, unusable

__all__ = ["Device", "DeviceError", "open_device", "opened_device"]

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
            return machine.usable_ram_bytes()
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

        The cap is the limit less what lies outside torch (context, libraries, other processes). That grows: kernels
        are loaded when they are first called, and a communicator's buffers come with the first exchange of a kind. So
        the cap is set again once they are there; the allocator checks its next request against it, with all that it has
        reserved so far. No effect on the CPU, and where torch can't do so.
        Source: c10/cuda/CUDACachingAllocator.cpp, setMemoryFraction and alloc_block.
        """
        cap = getattr(self.module, "set_per_process_memory_fraction", None)
        if self.limit_bytes is None or not self.has_own_memory or cap is None:
            return
        for device in self.devices:
            share = (self.limit_bytes - (self._outside_bytes(device) or 0)) / self._total_bytes(device)
            cap(max(0.0, min(1.0, share)), device)

    def alloc_retries(self) -> int | None:
        """How often the allocators have found no room, given back what they held and asked again, since the start.

        None where they do not count that. Source: num_alloc_retries in c10/cuda/CUDACachingAllocator.cpp, alloc_block.
        """
        return self._counted("num_alloc_retries")

    def refusals(self) -> int:
        """How often the allocators have refused memory, since the start; 0 where they do not count that.

        A refusal counts when it is raised, even if the exception is caught later; cuDNN, which tries for an engine that
        needs less, does. Source: c10/cuda/CUDACachingAllocator.cpp (malloc: stats.num_ooms).
        """
        return self._counted("num_ooms") or 0

    def free_bytes(self) -> int | None:
        """Memory that nobody uses, of several devices the fullest one's; None without own memory, or where one is lost.

        Source of the last: a failed kernel fails each later call (CUDA Runtime API, cudaErrorIllegalAddress).
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
        machine.reset_tree_peak()

    def give_back(self) -> None:
        """Have the allocators give back what they hold in reserve, where they do."""
        if self.has_own_memory:
            self._ask("empty_cache")

    def peak_memory(self, retries_before: int | None = None) -> MemorySample:
        """Peak memory since `reset_peak`, of several devices the fullest one's. Takes milliseconds: never in a window.

        Args:
            retries_before: `alloc_retries` at the beginning of what retries are to be counted in; None: not counted.
        """
        if not self.has_own_memory:
            peak_bytes, source = machine.tree_peak()
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
        reserved, outside = int(self.module.max_memory_reserved(device)), self._outside_bytes(device)
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
        counts: list[Any] = [(self._ask("memory_stats", device) or {}).get(name) for device in self.devices]
        return None if None in counts else sum(counts)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """What a function of the module answers; None where the module has no such function."""
        function = getattr(self.module, name, None)
        return None if function is None else function(*arguments)


def open_device(name: str, rank: int = 0, *, count: int = 1, limit_bytes: int | None = None) -> Device:
    """Open a device by torch's name, or the machine's accelerator for "auto", else the CPU.

    Args:
        name: As torch names it, or "auto".
        rank: Number of this rank on its host: the ranks take the devices from the one named on, in order; on the CPU
            they share it.
        count: Devices that this process trains on, from that one on.
        limit_bytes: Memory that may be in use on each.

    Raises:
        DeviceError: there is no such device here, or "auto" would pass over a GPU.
    """
    name, remark = choose(detect()) if name == "auto" else (name, None)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"device must be one of torch's names, such as cuda:0 or cpu, but got {name!r}") from error
    if device.type == "cpu":
        return Device(torch.device("cpu"), "cpu", limit_bytes=limit_bytes, remark=remark)
    _refuse_absent(name, device)
    module, first = torch.get_device_module(device), (device.index or 0) + rank
    there_are, last = module.device_count(), first + count - 1
    if last >= there_are:
        raise DeviceError(
            f"device {device.type}:{last} was asked for, but there are {there_are} here; name one below "
            f"{device.type}:{there_are}"
        )
    own, *beside = (torch.device(device.type, index) for index in range(first, last + 1))
    if hasattr(module, "set_device"):  # Apple's has one device, and no way to choose it
        module.set_device(own)
    return Device(own, _kind_of(own), beside=tuple(beside), limit_bytes=limit_bytes, remark=remark)


def opened_device() -> Device | None:
    """The current device of the accelerator that this process has in use; None where it has opened none.

    Opens none itself: a job on the CPU leaves a GPU's driver alone. Which accelerator it could be is known from how
    torch was built. Source: aten/src/ATen/DeviceAccelerator.cpp, getAccelerator.
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
