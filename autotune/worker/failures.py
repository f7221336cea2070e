"""Classify exceptions, notice stopped processes, and write the stacks of a process that hangs.

Comes in: an exception of whatever raised it. Goes out: the errors in it as text, whether a kernel
failed, and whose memory was used up (`Shortage`).
"""

from __future__ import annotations

import builtins
import faulthandler
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any, Literal, TextIO

from autotune.messages.trials import window_stopped
from autotune.note import Note
from autotune.worker.device import Device, opened_device

# Text of all errors in an exception: itself, its causes, and errors quoted from other processes.

_LONGEST = 300
"""Most characters of one line in a report. Source: our own convention."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_QUOTE = re.compile(r"Caught \w+ .*\nOriginal Traceback")
_TRACEBACK = "Traceback (most recent call last):\n"
_QUOTED = re.compile(
    r"(?P<stack>(?:[ ][^\n]*\n)*)(?:[\w<>]+\.)*(?P<kind>\w+)(?:: (?P<message>.*?))?"
    r"(?:\n\n(?:The above exception was|During handling of)[^\n]*)?\s*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """One exception: raised here, or quoted in the message of another."""

    kinds: tuple[str, ...]
    """Names of its type and of the base types, as far as known; its own first."""
    message: str
    stack: str
    """Formatted traceback, the innermost frame last; "" if unknown."""

    @property
    def first_line(self) -> str:
        """First line of the message, printable; the name of its type if there is none."""
        # the longest of torch's allocator has some 800 characters
        return printable((self.message.strip() or self.kinds[0]).splitlines()[0][:2000])


def errors_in(error: BaseException | None) -> Iterator[ErrorText]:
    """Yield an exception and its causes, the outermost first; of each that quotes another, the quoted one.

    An exception of a loader worker, of the pin-memory thread or of a replica is raised again in the
    main thread, with its traceback as text in the message (torch/_utils.py, ExceptionWrapper).
    Exceptions raised `from None` are followed too: torch.compile does that with errors of the
    compiled code.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from _errors_of(error)
        error = error.__cause__ or error.__context__


def cause_of(error: BaseException) -> str:
    """Return the type and first line of an exception; the last line if torch quotes a worker's traceback."""
    kind = type(error).__name__
    lines = (str(error).strip() or "no message").splitlines()
    line = lines[0]
    if line.startswith("Caught "):
        line = lines[-1].removeprefix(f"{kind}: ")
    return printable(f"{kind}: {line[:_LONGEST]}")[:_LONGEST]


def printable(text: str) -> str:
    r"""Return foreign text without colours; control and invalid characters become escapes such as \x1b.

    Half of a surrogate pair, as in file names that are not UTF-8, can't be written to our files
    either.
    """
    plain = _COLOURS.sub("", text.replace("\r\n", "\n"))
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], plain)


def _errors_of(error: BaseException) -> Iterator[ErrorText]:
    """Yield the errors that an exception quotes, the innermost first; without any, the exception itself."""
    message = str(error)
    kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    quotes = list[str]()
    if _QUOTE.match(message):
        quotes = message.split(_TRACEBACK)[1:]
    has_match = False
    for quote in reversed(quotes):
        match = _QUOTED.fullmatch(quote)
        if match is None:
            continue
        has_match = True
        kind = match["kind"]
        own = kinds if kind == kinds[0] else _kinds_of(kind)
        yield ErrorText(kinds=own, message=match["message"] or "", stack=match["stack"])
    if not has_match:
        stack = "".join(traceback.format_tb(error.__traceback__))
        yield ErrorText(kinds=kinds, message=message, stack=stack)


def _kinds_of(name: str) -> tuple[str, ...]:
    """Return the type names of a quoted error; one that Python does not have counts as a RuntimeError."""
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        return tuple(kind.__name__ for kind in known.__mro__)
    return name, "RuntimeError"


# Failures of a device's kernels: they surface late and elsewhere, and break the whole process.

# Texts of cudaGetErrorString and hipGetErrorString for errors after which "the process must be
# terminated and relaunched". Source: CUDA Runtime API, cudaError (700, 702, 710, 714 to 721, 214);
# torch passes on their first lines: c10/cuda/CUDAException.cpp, c10_cuda_check_implementation.
_LOST = (
    "an illegal memory access was encountered|device-side assert triggered|unspecified launch "
    "failure|misaligned address|an illegal instruction was encountered|invalid program "
    "counter|hardware stack error|operation not supported on global/shared address space|the "
    "launch timed out and was terminated|uncorrectable ECC error encountered|[Ii]nvalid access of "
    "peer GPU memory over nvlink or a hardware error"
)
_FAILURE = re.compile(
    rf"(CUDA|HIP)( driver)? error: ({_LOST})"
    rf"|Triton Error \[(CUDA|HIP)\]: ({_LOST})"  # triton/backends/nvidia/driver.c, gpuAssert
    rf"|Cuda failure (\d+ )?'({_LOST})'"  # NCCL, src/include/checks.h, CUDACHECK
    # a library that finds the context lost reports only this, unless its own call failed first
    r"|(CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED"
    r"|UR_RESULT_ERROR_DEVICE_LOST"  # XPU, unified-runtime's ur_api.h
)

# Set them before the first call to the device: CUDA's driver reads its variable when initialised,
# torch at the first error (c10/cuda's CUDAMiscFunctions.cpp, get_cuda_async_error_suffix). ROCm's
# counterpart is from torch/utils/hipify, cuda_to_hip_mappings.py.
_BLOCKING = {"cuda": ("CUDA_LAUNCH_BLOCKING", "1"), "rocm": ("AMD_SERIALIZE_KERNEL", "3")}
OWN_VARIABLES: set[str] = set()
"""Variables that autotune has set in this process: they are no fault of the user's."""


def is_kernel_failure(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, means that a kernel failed some time before."""
    return any(
        "RuntimeError" in text.kinds and _FAILURE.search(text.message) for text in errors_in(error)
    )


def block_launches() -> None:
    """Make each launch wait for its kernel, in this process and in all that it starts."""
    OWN_VARIABLES.update(name for name, _ in _BLOCKING.values() if name not in os.environ)
    os.environ.update(_BLOCKING.values())


def launches_block() -> bool:
    """Return whether each launch waits for its kernel, so that an error's location is exact."""
    return any(map(blocking_variable, _BLOCKING))


def blocking_variable(kind: str) -> str | None:
    """Return the variable that makes launches on a kind of device block, as NAME=value; None if unset."""
    name, value = _BLOCKING.get(kind, ("", ""))
    if os.environ.get(name) != value:
        return None
    return f"{name}={value}"


# Out-of-memory errors of torch's allocators, CUDA's libraries, NCCL, the kernel and loader workers.

_ALMOST_NOTHING_BYTES = 256 * 2**20
"""Free device memory below which a library's first call may fail: the kernels of cuBLAS or cuDNN
and a workspace (32 MiB on Hopper), rounded up. Source: our own convention."""

# Messages that appear only if the device's memory is used up. Sources:
# c10/cuda/CUDACachingAllocator.cpp and its XPU and MPS counterparts; cudaErrorMemoryAllocation as
# c10/cuda/CUDAException.cpp and aten/src/ATen/cuda/Exceptions.h pass it on; the status codes of
# cuBLAS, cuSOLVER, cuSPARSE, cuFFT (aten/src/ATen/native/cuda/CuFFTUtils.h), cuDNN 8 and 9
# (cudnn_graph.h) and MIOpen; NCCL's src/include/checks.h, with or without the error's number;
# Triton's driver.c; unified-runtime's ur_api.h.
_DEVICE = re.compile(
    r"\b(CUDA|HIP|XPU) (ran )?out of memory\b|\bMPS backend out of memory\b"
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'|Triton Error \[(CUDA|HIP)\]: out of memory"
    r"|(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED|(CU|HIP)FFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|miopenStatusAllocFailed"
    r"|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
)

# Messages that appear if the device's memory is used up, and for other reasons: cuDNN has no engine
# for a precision or a card, a library does not match the driver, a kernel has failed before. torch
# takes an allocator's error for that of an engine and tries the next:
# aten/src/ATen/native/cudnn/Conv_v8.cpp (try_plans), Conv_v7.cpp (try_all). NCCL reports every
# allocation that failed alike: src/include/alloc.h (ncclCudaCallocDebug).
_PERHAPS = re.compile(
    r"[Uu]nable to find an engine to execute this computation|[Uu]nable to find a valid cuDNN algorithm"
    r"|(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b|CUFFT_INTERNAL_ERROR"
    r"|Failed to CUDA calloc|UR_RESULT_ERROR_OUT_OF_RESOURCES"
)

# Messages that appear if the host's memory is used up. Sources: torch's
# c10/core/impl/alloc_cpu.cpp, aten/src/ATen/MapAllocator.cpp, torch/csrc/DataLoader.cpp and
# torch/utils/data/_utils/signal_handling.py; strerror(3); cudnn_graph.h; unified-runtime's
# ur_api.h; NCCL's src/include/alloc.h and src/misc/shmutils.cc (ncclShmOpen), whose older versions
# omit the error's name.
_FILES = re.compile("Too many open files|received 0 items of ancdata")
_SHARED_MEMORY = re.compile(
    r"Bus error|bus error encountered in worker|No space left on device.*shm|/shm/.*No space left on device"
    r"|unable to (write to file|resize file|mmap|allocate shared memory|open shared memory object)"
    r"(?!.*(No such file|Permission denied|File exists))"
    r"|(failed to extend|creating shared memory segment) \S*/nccl-\S* [^,\n]*(?m:$)"
)
_RAM = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory|Failed to malloc \d+ bytes"
    r"|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED|UR_RESULT_ERROR_OUT_OF_HOST_MEMORY"
)
_KILLED = re.compile("DataLoader worker .* is killed by signal: Killed")

_Memory = Literal["device", "host"]
_FULL_DEVICE: tuple[_Memory, str] = "device", "the device ran out of memory"
_FULL_RAM: tuple[_Memory, str] = "host", "the machine ran out of memory"
_FULL_SHARED_MEMORY: tuple[_Memory, str] = "host", "the shared memory (/dev/shm) is full"
_USED_UP: dict[re.Pattern[str], tuple[_Memory, str]] = {
    _DEVICE: _FULL_DEVICE,
    _FILES: ("host", "the limit of open files (ulimit -n) was reached"),
    _SHARED_MEMORY: _FULL_SHARED_MEMORY,
    _RAM: _FULL_RAM,
    re.compile("Failed to CUDA host alloc"): (
        "host",
        "the machine ran out of memory that can be page-locked",
    ),
    _KILLED: ("host", "a loader worker was killed, most likely for its memory"),
    _PERHAPS: _FULL_DEVICE,
}
"""Owner of the memory, and what was used up, by message; the first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory, or a similar resource, that was used up."""

    memory: _Memory
    """Owner of the memory. "host" means RAM, shared memory, or open files."""
    reason: str
    """What was used up, and the message."""


def shortage_of(error: BaseException, is_full: Callable[[], bool] | None = None) -> Shortage | None:
    """Classify out-of-memory errors: device, host, or neither.

    Only types that torch or the system raise count: a RuntimeError or an OSError, not the user's
    ValueError.

    Args:
        error: The exception; its causes and the errors that it quotes are examined too.
        is_full: Returns whether the device's memory was used up; called if the message does not
            decide. None: ask the device that this process has opened, see `device_was_full`.

    Returns:
        None if no memory was used up.
    """
    for text in errors_in(error):
        found = _used_up(text, is_full or device_was_full)
        if found is None:
            continue
        memory, what = found
        if text.message or memory == "device":
            return Shortage(memory=memory, reason=f"{what}: {text.first_line}")
        return Shortage(memory=memory, reason=f"{what} (MemoryError)")
    return None


def device_was_full(device: Device | None = None, refusals_before: int = 0) -> bool:
    """Return whether a device's allocators have refused memory, or almost none is free.

    Args:
        device: The device; None: the one that this process has opened. False if there is none.
        refusals_before: Refusals that happened earlier and do not count.
    """
    device = device or opened_device()
    if device is None:
        return False
    free_bytes = device.free_bytes()
    if device.refusals() > refusals_before:
        return True
    return free_bytes is not None and free_bytes < _ALMOST_NOTHING_BYTES


def _used_up(text: ErrorText, is_full: Callable[[], bool]) -> tuple[_Memory, str] | None:
    """Return the owner of the memory that one error reports as used up, and its description."""
    if "OutOfMemoryError" in text.kinds:
        return _FULL_DEVICE
    if "MemoryError" in text.kinds:
        return _FULL_RAM
    if not {"RuntimeError", "OSError"} & set(text.kinds):
        return None
    # Some errors are recognized by where they were raised, all others by their message.
    if _was_pinning(text):
        return "host", "the machine ran out of memory that can be page-locked (pin_memory)"
    if _was_making_a_semaphore(text):
        return _FULL_SHARED_MEMORY
    for pattern, used_up in _USED_UP.items():
        if pattern.search(text.message) and (pattern is not _PERHAPS or is_full()):
            return used_up
    return None


def _was_pinning(text: ErrorText) -> bool:
    """Return whether an error was raised while copying into page-locked memory, which is the host's.

    cudaHostAlloc's error has the words of cudaMalloc's; the device's allocator has words of its
    own. Source: aten/src/ATen/cuda/CachingHostAllocator.cpp (allocate_host_memory_slowpath).
    """
    return "pin_memory" in _innermost(text) and "error: out of memory" in text.message


def _was_making_a_semaphore(text: ErrorText) -> bool:
    """Return whether multiprocessing failed to make a semaphore, in /dev/shm: man 7 sem_overview."""
    return (
        "_multiprocessing.SemLock" in _innermost(text) and "No space left on device" in text.message
    )


def _innermost(text: ErrorText) -> str:
    return text.stack[text.stack.rfind('  File "') :]


# Stopped processes.


class StopProbe:
    """Notices whether this process or one of its children is stopped (SIGSTOP) during a measurement.

    A stop looks like slow training or a slow loader in every figure. The kernel reports it: a
    process that continues gets SIGCONT, its parent gets SIGCHLD and can ask which children were
    stopped or continued. It has to ask at once, since nothing is known of a loader worker that has
    ended with its epoch. Source: man 7 signal; man 2 waitid, WCONTINUED; man 2 sigaction,
    SA_NOCLDSTOP.

    Works only in the main thread and on Linux; elsewhere it notices nothing.
    """

    def __init__(self) -> None:
        self._was_stopped = False
        self._before = dict[int, Any]()
        """Previous handlers by signal; those of the user and of torch's loader are called as
        well."""

    def start(self) -> None:
        """Start watching; earlier stops do not count."""
        with suppress(ValueError, AttributeError):  # not the main thread, or no such signal
            for number in (signal.SIGCONT, signal.SIGCHLD):
                self._before[number] = signal.signal(number, self._note)
        _children_stopped()
        self._was_stopped = False

    def stop(self) -> Iterator[Note]:
        """Stop watching; yield a note if something was stopped."""
        for number, before in self._before.items():
            # a handler that was set later calls this one, and stays
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        if _children_stopped() or self._was_stopped:
            yield window_stopped()

    def _note(self, number: int, frame: Any) -> None:
        self._was_stopped |= number == signal.SIGCONT or _children_stopped()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


def _children_stopped() -> bool:
    """Return whether a child was stopped or continued since the last call."""
    was_stopped = False
    with suppress(ChildProcessError, AttributeError):  # there is none, or no such call
        while os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG) is not None:
            was_stopped = True
    return was_stopped


# Stacks of a rank that hangs.

_PATIENCE = 10.0
"""Ratio to the longest block: a loader that pauses, or a second compilation, takes about as long as
before. Source: our own convention."""
_LEAST_S = 30.0
"""Seconds, longer than most checkpoints and evaluations inside a step. Source: our own
convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDump:
    """Writes the stacks of a rank that hangs before it is ended; only the last request is active.

    It writes at one of two times: shortly before the deadline, or, between the blocks of a group's
    window, after ten times the longest block without another one. Ranks train their blocks in step:
    one of them hangs then, and the others wait for it. The parent ends a group once such a dump
    exists. faulthandler's timer needs no interpreter for it.
    """

    file: TextIO
    """File that the stacks are written to."""
    ends_at: float
    """Time of perf_counter of the trial's deadline."""
    pid: int = field(default_factory=os.getpid)
    """The process whose stacks are written."""

    def before_deadline(self) -> None:
        """Write the stacks shortly before the deadline."""
        self.unless_a_block_ends(inf)

    def unless_a_block_ends(self, longest_s: float) -> None:
        """Write the stacks when a group stands still, or before the deadline; call it again after each block.

        Stacks written meanwhile are erased: a block has ended after all.

        Args:
            longest_s: Seconds of the longest block so far, of any rank, so that all have the same
                time.
        """
        if os.getpid() != self.pid:
            # faulthandler would wait forever for its timer thread, which a forked child lacks
            return
        left_s = self.ends_at - 0.5 - perf_counter()  # time to write the stacks
        seconds = min(left_s, max(_LEAST_S, _PATIENCE * longest_s))
        with suppress(OSError, ValueError):  # the user's code may have closed it
            if self.file is not sys.stderr:
                self.file.seek(0)
                self.file.truncate()
            # at least 0.1 s, even if the deadline is over and the parent is about to end the rank
            faulthandler.dump_traceback_later(max(seconds, 0.1), exit=False, file=self.file)
