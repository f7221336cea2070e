"""Classify exceptions: out of memory, failed kernels, stopped processes; and write the stack of a hang."""

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

# All errors in an exception: itself, its causes, and those that torch quotes from another process
# or thread.
#
# Takes an exception; hands on each error in it, and one line that names the cause. An exception of
# a loader worker, of the pin thread or of a replica is raised again in the main thread, with its
# traceback as text in the message (torch/_utils.py, ExceptionWrapper).


_LONGEST = 300  # characters of one line in a report: our own convention
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
    """One exception: raised here, or quoted in the message of one that was."""

    kinds: tuple[str, ...]
    """Names of its type and of what that derives from, as far as is known; its own first."""
    message: str
    stack: str
    """Where it was raised, as Python formats a traceback, the innermost frame last; "" where it is
    not known."""

    @property
    def first_line(self) -> str:
        """The first line of the message, as it can be printed; its type where there is none."""
        # the longest of torch's allocator has some 800 characters
        return printable((self.message.strip() or self.kinds[0]).splitlines()[0][:2000])


def errors_in(error: BaseException | None) -> Iterator[ErrorText]:
    """The exception and its causes, the outermost first; of each that quotes another error, that one.

    What was raised `from None` is followed too: torch.compile raises so, from whatever the compiled
    code did.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from _errors_of(error)
        error = error.__cause__ or error.__context__


def cause_of(error: BaseException) -> str:
    """Type and first line; the last one where torch quotes the traceback of a loader worker."""
    kind = type(error).__name__
    lines = (str(error).strip() or "no message").splitlines()
    line = lines[-1].removeprefix(f"{kind}: ") if lines[0].startswith("Caught ") else lines[0]
    return printable(f"{kind}: {line[:_LONGEST]}")[:_LONGEST]


def printable(text: str) -> str:
    r"""Foreign text without colours; what else steers a terminal, or is no character, stands as an escape such as \x1b.

    Half of a surrogate pair, as in file names that are no UTF-8, can't be written to any file of ours either.
    """
    plain = _COLOURS.sub("", text.replace("\r\n", "\n"))
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], plain)


def _errors_of(error: BaseException) -> Iterator[ErrorText]:
    message = str(error)
    kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    quotes = message.split(_TRACEBACK)[1:] if _QUOTE.match(message) else []
    matches = [match for quote in reversed(quotes) if (match := _QUOTED.fullmatch(quote))]
    for match in matches:
        kind = match["kind"]
        own = kinds if kind == kinds[0] else _kinds_of(kind)
        yield ErrorText(kinds=own, message=match["message"] or "", stack=match["stack"])
    if not matches:
        yield ErrorText(
            kinds=kinds, message=message, stack="".join(traceback.format_tb(error.__traceback__))
        )


def _kinds_of(name: str) -> tuple[str, ...]:
    """Names of a type that is known by its own alone; one that Python does not have is taken for a RuntimeError."""
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        return tuple(kind.__name__ for kind in known.__mro__)
    return name, "RuntimeError"


# Failures of a device's kernels: noticed late and elsewhere, and nothing works in the process
# afterwards.
#
# Takes exceptions; decides whether one is such a failure. Makes a process wait for each kernel, so
# that the failure shows where it happens.


# What cudaGetErrorString and hipGetErrorString say of errors after which "the process must be
# terminated and relaunched". Source: CUDA Runtime API, cudaError (700, 702, 710, 714 to 721, 214),
# the first lines of which torch gives on: c10/cuda/CUDAException.cpp,
# c10_cuda_check_implementation.
_LOST = (
    "an illegal memory access was encountered|device-side assert triggered|unspecified launch "
    "failure"
    "|misaligned address|an illegal instruction was encountered|invalid program counter|hardware "
    "stack error"
    "|operation not supported on global/shared address space|the launch timed out and was "
    "terminated"
    "|uncorrectable ECC error encountered|[Ii]nvalid access of peer GPU memory over nvlink or a "
    "hardware error"
)
_FAILURE = re.compile(
    rf"(CUDA|HIP)( driver)? error: ({_LOST})"
    rf"|Triton Error \[(CUDA|HIP)\]: ({_LOST})"  # triton/backends/nvidia/driver.c, gpuAssert
    rf"|Cuda failure (\d+ )?'({_LOST})'"  # NCCL, src/include/checks.h, CUDACHECK
    # A library that finds the context lost reports no more than this, where its own call did not
    # fail first.
    r"|(CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED"
    r"|UR_RESULT_ERROR_DEVICE_LOST"  # XPU, unified-runtime's ur_api.h
)

# CUDA's driver reads its variable when it is initialised, torch at the first error alone
# (c10/cuda's CUDAMiscFunctions.cpp, get_cuda_async_error_suffix); ROCm's counterpart is that of
# torch's own translation (torch/utils/hipify, cuda_to_hip_mappings.py). Both are to be set before
# the first call to the device.
_BLOCKING = {"cuda": ("CUDA_LAUNCH_BLOCKING", "1"), "rocm": ("AMD_SERIALIZE_KERNEL", "3")}


def is_kernel_failure(error: BaseException) -> bool:
    """Whether an exception, or one that it stems from, means that a kernel failed some time before."""
    return any(
        "RuntimeError" in text.kinds and _FAILURE.search(text.message) for text in errors_in(error)
    )


def block_launches() -> None:
    """Have each launch wait for its kernel, in this process and in all that it starts."""
    os.environ.update(_BLOCKING.values())


def launches_block() -> bool:
    """Whether each launch waits for its kernel: then an error has the place where it happened."""
    return any(os.environ.get(name) == value for name, value in _BLOCKING.values())


def blocking_variable(kind: str) -> str | None:
    """What has each launch on a kind of device wait for its kernel, as NAME=value; None: nothing does."""
    name, value = _BLOCKING.get(kind, ("", ""))
    return f"{name}={value}" if os.environ.get(name) == value else None


# Whose memory was used up: the device's, the host's, or nobody's.
#
# Takes an exception of whatever raised it (torch's allocators, CUDA's libraries, NCCL, the kernel,
# a loader worker, a pin thread); hands on a Shortage, or None for any other failure. Only the
# messages of types that torch or the system raise count: a RuntimeError or an OSError, not a
# ValueError of the user's.


_ALMOST_NOTHING_BYTES = 256 * 2**20
"""Free device memory below which a library's first call may fail: what cuBLAS or cuDNN load with
their kernels and a workspace (32 MiB on Hopper) take together, rounded up. Our own convention."""

# Messages that appear only where the device's memory is used up. Sources:
# c10/cuda/CUDACachingAllocator.cpp and its XPU and MPS counterparts; cudaErrorMemoryAllocation as
# c10/cuda/CUDAException.cpp and aten/src/ATen/cuda/Exceptions.h give it on; the status codes of
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

# Messages that appear where the device's memory is used up, and for other reasons too: cuDNN has no
# engine for a precision or a card, a library does not match the driver, a kernel has failed before.
# torch takes an allocator's error for that of an engine and tries the next:
# aten/src/ATen/native/cudnn/Conv_v8.cpp (try_plans), Conv_v7.cpp (try_all). NCCL reports every
# allocation that failed alike: src/include/alloc.h (ncclCudaCallocDebug).
_PERHAPS = re.compile(
    r"[Uu]nable to find an engine to execute this computation|[Uu]nable to find a valid cuDNN algorithm"
    r"|(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b|CUFFT_INTERNAL_ERROR"
    r"|Failed to CUDA calloc|UR_RESULT_ERROR_OUT_OF_RESOURCES"
)

# The host's. Sources: c10/core/impl/alloc_cpu.cpp, aten/src/ATen/MapAllocator.cpp,
# of torch: torch/csrc/DataLoader.cpp and torch/utils/data/_utils/signal_handling.py; strerror(3),
# cudnn_graph.h, unified-runtime's ur_api.h; NCCL: src/include/alloc.h and src/misc/shmutils.cc, ncclShmOpen,
# whose older versions give no error's name.
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
"""Whose memory, and what is used up, by its message; the first that matches counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory, or what stands for it, that was used up."""

    memory: _Memory
    """host: RAM, shared memory, or the files that may be open."""
    reason: str
    """What was used up, and the message."""


def shortage_of(error: BaseException, is_full: Callable[[], bool] | None = None) -> Shortage | None:
    """Whose memory an exception, one that it stems from, or one that it quotes reports as used up; None: nobody's.

    Args:
        error: what was raised.
        is_full: whether the device's memory was used up, asked where the message alone does not
            decide; None: the device that this process has opened is asked, if any, see
            `device_was_full`.
    """
    for text in errors_in(error):
        found = _used_up(text, is_full or device_was_full)
        if found is not None:
            memory, what = found
            detail = (
                f": {text.first_line}" if text.message or memory == "device" else " (MemoryError)"
            )
            return Shortage(memory=memory, reason=what + detail)
    return None


def device_was_full(device: Device | None = None, refusals_before: int = 0) -> bool:
    """Whether its allocators have refused memory more than `refusals_before` times, or next to nothing is free.

    Without a device, the one that this process has opened is asked; where there is none, none is
    full.
    """
    device = device or opened_device()
    if device is None:
        return False
    free_bytes = device.free_bytes()
    return device.refusals() > refusals_before or (
        free_bytes is not None and free_bytes < _ALMOST_NOTHING_BYTES
    )


def _used_up(text: ErrorText, is_full: Callable[[], bool]) -> tuple[_Memory, str] | None:
    if "OutOfMemoryError" in text.kinds:
        return _FULL_DEVICE
    if "MemoryError" in text.kinds:
        return _FULL_RAM
    if not {"RuntimeError", "OSError"} & set(text.kinds):
        return None
    if _was_pinning(text):
        return "host", "the machine ran out of memory that can be page-locked (pin_memory)"
    if _was_making_a_semaphore(text):
        return _FULL_SHARED_MEMORY
    matching = (pattern for pattern in _USED_UP if pattern.search(text.message))
    return next(
        (_USED_UP[pattern] for pattern in matching if pattern is not _PERHAPS or is_full()), None
    )


def _was_pinning(text: ErrorText) -> bool:
    """Whether it was raised where a tensor is copied into page-locked memory, which is the host's.

    cudaHostAlloc's error has the words of cudaMalloc's; the device's allocator has words of its
    own. Source: aten/src/ATen/cuda/CachingHostAllocator.cpp (allocate_host_memory_slowpath).
    """
    return "pin_memory" in _innermost(text) and "error: out of memory" in text.message


def _was_making_a_semaphore(text: ErrorText) -> bool:
    """Whether it was raised where multiprocessing makes a semaphore; these lie in /dev/shm: man 7 sem_overview."""
    return (
        "_multiprocessing.SemLock" in _innermost(text) and "No space left on device" in text.message
    )


def _innermost(text: ErrorText) -> str:
    return text.stack[text.stack.rfind('  File "') :]


# Whether this process or one that it has started was stopped (SIGSTOP) while it was measured.
#
# A stop looks like slow training or a slow loader, and no figure tells it from that. The kernel
# tells: a process that goes on gets SIGCONT, and its parent SIGCHLD, and can ask which of its
# children were stopped or went on. It has to ask at once: of a loader worker that ends with its
# epoch nothing is known any more. Nothing is done in between. Source: man 7 signal; man 2 waitid,
# WCONTINUED; man 2 sigaction, SA_NOCLDSTOP.


class StopProbe:
    """Watches from `start` to `stop`, in the main thread alone: elsewhere, and not on Linux, nothing is seen."""

    def __init__(self) -> None:
        self._was_stopped = False
        self._before = dict[int, Any]()
        """Handlers that were there, by their signals; those of the user and of torch's loader are
        called as well."""

    def start(self) -> None:
        """Watch from now on; what was before does not count."""
        with suppress(ValueError, AttributeError):  # not the main thread, or no such signal
            for number in (signal.SIGCONT, signal.SIGCHLD):
                self._before[number] = signal.signal(number, self._note)
        _children_stopped()
        self._was_stopped = False

    def stop(self) -> Iterator[Note]:
        """Watch no more; the remark on a window in which something was stopped."""
        for number, before in self._before.items():
            if (
                signal.getsignal(number) == self._note
            ):  # else whoever came later calls it, and no one is lost
                signal.signal(number, signal.SIG_DFL if before is None else before)
        if _children_stopped() or self._was_stopped:
            yield window_stopped()

    def _note(self, number: int, frame: Any) -> None:
        self._was_stopped |= number == signal.SIGCONT or _children_stopped()
        if callable(before := self._before.get(number)):
            before(number, frame)


def _children_stopped() -> bool:
    """Whether a child was stopped or went on since the last call."""
    was_stopped = False
    with suppress(ChildProcessError, AttributeError):  # there is none, or no such call
        while os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG) is not None:
            was_stopped = True
    return was_stopped


# When a rank writes down where it stands, before it is ended: faulthandler's timer needs no
# interpreter for it.
#
# Owns two times: shortly before the deadline, and, between the blocks of a group's window, when for
# ten times the longest block no other one has ended. The ranks train their blocks in step: one of
# them hangs then, and the others wait for it. The parent ends a group once such a dump is there.


# Own convention: a loader that pauses, or a second compilation, takes about as long as before.
_PATIENCE = 10.0
_LEAST_S = 30.0  # own convention: longer than most checkpoints and evaluations inside a step


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDump:
    """A rank's words, of which those that are asked for last are the only ones to come."""

    file: TextIO
    """Where they go."""
    ends_at: float
    """Time of perf_counter of the trial's deadline."""
    pid: int = field(default_factory=os.getpid)
    """The process whose words they are."""

    def before_deadline(self) -> None:
        """Let them come shortly before the deadline."""
        self.unless_a_block_ends(inf)

    def unless_a_block_ends(self, longest_s: float) -> None:
        """Let them come when a group stands still, or before the deadline; to be asked for again after each block.

        Words that have come meanwhile are taken back: a block has ended after all.

        Args:
            longest_s: Seconds of the longest block so far, of any rank: all come to the same time.
        """
        if os.getpid() != self.pid:
            # A forked child has no timer's thread, for which faulthandler would wait without end.
            return
        left_s = self.ends_at - 0.5 - perf_counter()  # time to write the stacks
        seconds = min(left_s, max(_LEAST_S, _PATIENCE * longest_s))
        with suppress(OSError, ValueError):  # the user's code may have closed it
            if self.file is not sys.stderr:
                self.file.seek(0)
                self.file.truncate()
            # the deadline is over, the parent about to end the rank
            faulthandler.dump_traceback_later(max(seconds, 0.1), exit=False, file=self.file)
