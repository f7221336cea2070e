"""A simulated accelerator in Python, reached by torch's own dispatcher under the device name "sim".

`register` tells torch of it, once a process; after that "sim:0" works wherever a device's name does: tensors, modules,
autograd, optimizers, and torch.sim is its module as torch.cuda is that of "cuda". Kernels are computed at once on the
processor, but their time is put in a queue, which runs on behind the caller as a GPU's stream does: `synchronize`, an
Event and a copy to the host wait for it. Memory is counted by an allocator that keeps what is freed, as CUDA's does,
and refuses what passes the cap or the device. Tests set `DEVICES[0].memory` and `DEVICES[0].queue`.

A process that knows of it has an accelerator for good: a test that needs one is marked `@on_simulated_device`, and runs
in a process of its own. A whole trial gets it by `write_entry_point`, as other plug-ins for devices are found.

There are two devices for what counts memory; training works on the first alone, since torch's guard for devices in
Python knows of one. There is no autocast, and no pinned memory. Source:
torch.utils.backend_registration._setup_privateuseone_for_python_backend; torch/csrc/acc/Module.cpp; for the allocator,
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
MIB = 2**20
_SEGMENT = (
    64 * 1024
)  # bytes by which the allocator takes memory from the device; CUDA's takes 2 MiB
_PRELOADED = ["torch._dynamo", "pytest"]
"""What a test's process has imported when it is forked; the modules that have such tests are added to it."""
_TO_HOST = frozenset(
    {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
)


class Clock:
    """The time by which the queues run: the real one."""

    def now(self) -> float:
        """Seconds."""
        return perf_counter()

    def sleep_until(self, end: float) -> None:
        """Return at a time, or at once where it has passed."""
        while (left := end - self.now()) > 0:
            sleep(left)


@dataclass
class StillClock(Clock):
    """A clock that moves only when somebody waits, or when a test moves it: nothing depends on the machine's pace."""

    time: float = 0.0

    def now(self) -> float:
        """Seconds."""
        return self.time

    def sleep_until(self, end: float) -> None:
        """Move to a time, unless it has passed."""
        self.time = max(self.time, end)


@dataclass
class Queue:
    """What the device has still to do. The kernels' results exist already; here lies their time."""

    kernel_s: float = 0.0
    """Seconds that each kernel takes from now on."""
    clock: Clock = field(default_factory=Clock)
    ends_at: float = 0.0
    """When all that was launched is done, by the clock."""
    kernels: int = 0
    """Kernels launched."""
    waits: int = 0
    """Times that somebody waited for the device: synchronize, an event, a copy to the host."""

    def launch(self, seconds: float | None = None) -> None:
        """Put a kernel behind those that are there; returns at once."""
        self.kernels += 1
        self.ends_at = max(self.ends_at, self.clock.now()) + (
            self.kernel_s if seconds is None else seconds
        )

    def wait(self, until: float | None = None) -> None:
        """Wait until what was launched so far is done, or until a time."""
        self.waits += 1
        self.clock.sleep_until(self.ends_at if until is None else until)


@dataclass
class Memory:
    """A caching allocator: what is freed stays reserved, and serves the next request that it fits."""

    total: int = 64 * MIB
    context: int = 4 * MIB
    """In use outside the allocator from the start on: context, kernels, libraries."""
    others: int = 0
    """In use by other processes."""
    fraction: float = 1.0
    """Share of the total that may be reserved."""
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    retries: int = 0
    ooms: int = 0
    kept: list[int] = field(default_factory=list)
    """Sizes of segments that are free."""

    @property
    def free(self) -> int:
        """What the driver would say is free."""
        return max(0, self.total - self.context - self.others - self.reserved)

    def take(self, size: int) -> int:
        """Allocate; hands on the size of the segment, to be given back by `give`.

        One that is not met gives all that is kept back to the device, counts a retry, and asks once more.

        Raises:
            torch.OutOfMemoryError: it is over the cap, or the device is full.
        """
        segment = -(-max(size, 1) // _SEGMENT) * _SEGMENT
        fitting = [one for one in self.kept if segment <= one < 2 * segment]
        if fitting:
            segment = min(fitting)
            self.kept.remove(segment)
        else:
            self._reserve(segment)
        self.allocated += segment
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return segment

    def give(self, segment: int) -> None:
        """Free a segment: it stays reserved."""
        self.allocated -= segment
        self.kept.append(segment)

    def release(self) -> None:
        """Give what is kept back to the device."""
        self.reserved -= sum(self.kept)
        self.kept.clear()

    def _reserve(self, segment: int) -> None:
        if not self._has_room(segment):
            self.release()
            self.retries += 1
        if not self._has_room(segment):
            self.ooms += 1
            raise torch.OutOfMemoryError(
                f"Sim out of memory. Tried to allocate {segment / MIB:.2f} MiB. The device has a total capacity of "
                f"{self.total / MIB:.2f} MiB of which {self.free / MIB:.2f} MiB is free"
            )
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _has_room(self, segment: int) -> bool:
        return segment <= self.free and self.reserved + segment <= self.fraction * self.total


@dataclass
class SimulatedDevice:
    """One device: its memory, its queue."""

    memory: Memory = field(default_factory=Memory)
    queue: Queue = field(default_factory=Queue)


DEVICES = [SimulatedDevice(), SimulatedDevice()]
CALLS: Counter[str] = Counter()
"""How often a device was synchronised ("synchronize 0") and capped ("cap 0")."""
_is_registered = False


def register() -> None:
    """Tell torch of the device; it can be told once a process, and never of another."""
    global _is_registered  # noqa: PLW0603 - torch keeps it as well, and has no way to ask
    if not _is_registered:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_as_module())
        _is_registered = True


def on_simulated_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own, in which the device is registered. What it is given must be picklable."""
    if test.__module__ not in _PRELOADED:
        _PRELOADED.append(test.__module__)

    @functools.wraps(
        test
    )  # pytest finds parameters and fixtures by it, and `_run_here` the test itself
    def run_apart(**given: Any) -> None:
        apart = multiprocessing.get_context("forkserver")
        apart.set_forkserver_preload(_PRELOADED)  # once
        with ProcessPoolExecutor(1, mp_context=apart) as pool:
            pool.submit(_run_here, test.__module__, test.__name__, given).result()

    return run_apart


def _run_here(module: str, test: str, given: dict[str, Any]) -> None:
    register()
    getattr(import_module(module), test).__wrapped__(**given)


def use_still_clock() -> StillClock:
    """Let both devices run by one clock that moves when somebody waits."""
    clock = StillClock()
    for device in DEVICES:
        device.queue.clock = clock
    return clock


def write_entry_point(folder: Path) -> tuple[Path, Path]:
    """Write what makes torch register the device whenever it is imported, as plug-ins for other devices do.

    Hands on the folders that must stand in PYTHONPATH. Source: torch._import_device_backends.
    """
    info = folder / "sim-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sim\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nsim = tests.accelerator:register\n")
    return folder, Path(__file__).parents[1]


class _Block:
    """A tensor's memory, shared with its views; freed when the last of them is gone."""

    def __init__(self, index: int, size: int) -> None:
        self.memory = DEVICES[index].memory
        self.segment = self.memory.take(size)

    def __del__(self) -> None:
        if hasattr(self, "segment"):
            self.memory.give(self.segment)


class SimTensor(torch.Tensor):
    """A tensor on the device: a shell without storage, whose values `raw` lie in the host's memory."""

    raw: torch.Tensor
    block: _Block

    @staticmethod
    def __new__(cls, raw: torch.Tensor, block: _Block, index: int) -> SimTensor:
        shell: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, index),
        )
        shell.raw, shell.block = raw, block
        return shell

    def __repr__(self, **_: Any) -> str:  # type: ignore[override] # torch's takes keywords of its own
        return f"SimTensor({self.raw}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # torch's stand-in is no class method
        """Launch a kernel."""
        return _launch(func, args, dict(kwargs or {}))


def _launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, SimTensor)]
    index = inputs[0].device.index
    wanted = kwargs.get("device")
    if wanted is not None:
        index = wanted.index or 0 if wanted.type == NAME else index
        kwargs["device"] = torch.device("cpu")
    result = func(*_raw(args), **_raw(kwargs))
    queue, is_to_host = DEVICES[index].queue, wanted is not None and wanted.type != NAME
    is_into_host = func._schema.name == "aten::copy_" and not isinstance(args[0], SimTensor)
    for (
        one
    ) in inputs:  # a copy from another device waits for what that one has to do first, as CUDA's do
        queue.ends_at = max(queue.ends_at, DEVICES[one.device.index].queue.ends_at)
    queue.launch()
    if is_to_host or is_into_host or func._schema.name in _TO_HOST:
        if not (kwargs.get("non_blocking", False) or (is_into_host and args[2:] == (True,))):
            queue.wait()
        return result
    known = {id(one.raw): one for one in inputs}  # what a kernel writes into, it hands on
    blocks = {one.raw.untyped_storage()._cdata: one.block for one in inputs}
    return pytree.tree_map_only(
        torch.Tensor,
        lambda raw: known[id(raw)] if id(raw) in known else _shell(raw, blocks, index),
        result,
    )


def _raw(tree: Any) -> Any:
    return pytree.tree_map_only(SimTensor, lambda one: one.raw, tree)


def _shell(raw: torch.Tensor, blocks: dict[int, _Block], index: int) -> SimTensor:
    """A tensor of the device for values on the host: a view of one that is there already, or with memory of its own."""
    storage = raw.untyped_storage()
    return SimTensor(raw, blocks.get(storage._cdata) or _Block(index, storage.nbytes()), index)


def _empty(device: torch.device | None, raw: torch.Tensor) -> SimTensor:
    return _shell(raw, {}, 0 if device is None or device.index is None else device.index)


@torch.library.impl("aten::empty.memory_format", "privateuseone")
def _empty_memory_format(
    size: Sequence[int], *, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any
) -> SimTensor:
    return _empty(device, torch.empty(size, dtype=dtype))


@torch.library.impl("aten::empty_strided", "privateuseone")
def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any
) -> SimTensor:
    return _empty(device, torch.empty_strided(size, stride, dtype=dtype))


class Event:
    """A mark in the queue, as torch.cuda.Event is one in a stream."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._is_timed, self._at, self._queue = enable_timing, 0.0, Queue()

    def record(self, stream: object = None) -> None:
        """Put the mark behind what was launched so far; returns at once."""
        self._queue = DEVICES[0].queue
        self._at = max(self._queue.ends_at, self._queue.clock.now())

    def query(self) -> bool:
        """Whether the device has come to it."""
        return self._at <= self._queue.clock.now()

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        self._queue.wait(self._at)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds to a later event; both must have been reached."""
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end_event._at - self._at) * 1000


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    return 0 if device is None else torch.device(device).index or 0


def _memory(device: Any) -> Memory:
    return DEVICES[_index(device)].memory


def synchronize(device: Any = None) -> None:
    """Wait for all that was launched."""
    CALLS[f"synchronize {_index(device)}"] += 1
    DEVICES[_index(device)].queue.wait()


def memory_stats(device: Any = None) -> dict[str, int]:
    """The allocator's counts, under torch's names."""
    memory = _memory(device)
    return {
        "allocated_bytes.all.current": memory.allocated,
        "allocated_bytes.all.peak": memory.peak_allocated,
        "reserved_bytes.all.current": memory.reserved,
        "reserved_bytes.all.peak": memory.peak_reserved,
        "num_alloc_retries": memory.retries,
        "num_ooms": memory.ooms,
    }


def reset_peak_memory_stats(device: Any = None) -> None:
    """Peaks begin anew from what is in use; counts stay."""
    memory = _memory(device)
    memory.peak_allocated, memory.peak_reserved = memory.allocated, memory.reserved


def empty_cache() -> None:
    """Give what is kept back to the devices."""
    for device in DEVICES:
        device.memory.release()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    return _memory(device).free, _memory(device).total


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Share of the total that may be reserved."""
    CALLS[f"cap {_index(device)}"] += 1
    _memory(device).fraction = fraction


def _as_module() -> Any:
    """The functions under the names that torch, and we, ask for."""
    return SimpleNamespace(
        Event=Event,
        _is_in_bad_fork=lambda: False,
        current_device=lambda: 0,
        device_count=lambda: len(DEVICES),
        empty_cache=empty_cache,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_device_name=lambda device=None: f"Simulated accelerator {_index(device)}",
        get_device_properties=lambda device=None: SimpleNamespace(
            total_memory=_memory(device).total
        ),
        get_rng_state=lambda device=None: torch.get_rng_state(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed_all=lambda seed: None,
        max_memory_allocated=lambda device=None: _memory(device).peak_allocated,
        max_memory_reserved=lambda device=None: _memory(device).peak_reserved,
        mem_get_info=mem_get_info,
        memory_allocated=lambda device=None: _memory(device).allocated,
        memory_reserved=lambda device=None: _memory(device).reserved,
        memory_stats=memory_stats,
        reset_peak_memory_stats=reset_peak_memory_stats,
        set_device=lambda device: None,
        set_per_process_memory_fraction=set_per_process_memory_fraction,
        set_rng_state=lambda state, device=None: None,
        synchronize=synchronize,
    )
