"""Observe the debugging modes of a process while it trains, and the lines that switched them on.

Comes in: calls of a user's script, and the state of torch and Python. Goes out: `Modes`. Settings
that autotune makes itself don't count. Called at backward passes: an observation takes some tens of
microseconds.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import profiler

from autotune.records.measurement import SwitchName
from autotune.records.watched_run import Modes
from autotune.worker.failures import OWN_VARIABLES
from autotune.worker.lines import shown_line

# Environment variables that slow each step down
#
# Left out is what costs nothing, or only at the start: NCCL_DEBUG=INFO, TORCH_CPP_LOG_LEVEL,
# TORCH_SHOW_CPP_STACKTRACES. TORCH_SHOW_DISPATCH_TRACE does nothing in torch's own builds, nor does
# MALLOC_CHECK_ since glibc 2.34.

_CUDA = frozenset({"cuda"})
_ROCM = frozenset({"rocm"})
_GPU = frozenset({"cuda", "rocm"})
_ANY = frozenset[str]()


def _is_on(value: str) -> bool:
    return value.strip().lower() not in {"", "0", "false", "off", "no", "none"}


def _is_debugging_malloc(value: str) -> bool:
    return value.endswith("debug")


def _is_detail(value: str) -> bool:
    return value.upper() == "DETAIL"


def _is_trace(value: str) -> bool:
    return value.upper() == "TRACE"


def _is_small_workspace(value: str) -> bool:
    return value.startswith(":16:8")


def _is_verbose(value: str) -> bool:
    return _is_on(value) and value not in {"error", "warn"}


@dataclass(frozen=True, slots=True)
class _Variable:
    """An environment variable that slows steps down."""

    name: str
    is_slow: Callable[[str], bool]
    """Return whether a value slows steps down."""
    devices: frozenset[str] = _ANY
    """Kinds of devices on which it does; empty for all."""
    needs_group: bool = False
    """It does so only in a process group."""


_VARIABLES = (
    # Source: CUDA C++ Programming Guide, "Programmatic enabling/disabling of asynchronous
    # launches": for debugging, never to make production software run reliably.
    _Variable("CUDA_LAUNCH_BLOCKING", _is_on, _CUDA),
    # Source: ROCm documentation, HIP debugging: each kernel and copy waits for the one before.
    _Variable("HIP_LAUNCH_BLOCKING", _is_on, _ROCM),
    _Variable("AMD_SERIALIZE_KERNEL", _is_on, _ROCM),
    _Variable("AMD_SERIALIZE_COPY", _is_on, _ROCM),
    # Source: pytorch.org, CUDA environment variables: for debugging memory errors. Each tensor then
    # calls cudaMalloc and cudaFree, of which the latter synchronizes.
    _Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, _GPU),
    # Source: pytorch.org, torch.use_deterministic_algorithms, and NVIDIA's cuBLAS documentation,
    # "Results reproducibility": :16:8 may limit overall performance.
    _Variable("CUBLAS_WORKSPACE_CONFIG", _is_small_workspace, _CUDA),
    # Source: pytorch.org, torch.distributed, "Debugging torch.distributed applications": DETAIL may
    # impact performance, to be used only when debugging.
    _Variable("TORCH_DISTRIBUTED_DEBUG", _is_detail, needs_group=True),
    # Source: NCCL documentation, environment variables: trace information on every call.
    _Variable("NCCL_DEBUG", _is_trace, _GPU, needs_group=True),
    # Source: pytorch.org, torch.distributed: blocking wait has a performance overhead.
    _Variable("TORCH_NCCL_BLOCKING_WAIT", _is_on, _GPU, needs_group=True),
    _Variable("NCCL_BLOCKING_WAIT", _is_on, _GPU, needs_group=True),
    # Source: docs.python.org, "Python Development Mode": checks that are too expensive to be
    # enabled by default.
    _Variable("PYTHONDEVMODE", _is_on),
    # Source: docs.python.org, PYTHONMALLOC: debug hooks on each allocation.
    _Variable("PYTHONMALLOC", _is_debugging_malloc),
    # Source: man 3 mallopt, M_PERTURB: each allocated and freed byte is written.
    _Variable("MALLOC_PERTURB_", _is_on),
    # Source: oneDNN documentation, "Verbose mode", and oneMKL's: a line for each call.
    _Variable("ONEDNN_VERBOSE", _is_verbose),
    _Variable("DNNL_VERBOSE", _is_verbose),
    _Variable("MKL_VERBOSE", _is_on),
)


def slow_variables(
    variables: Mapping[str, str],
    device_kind: str,
    *,
    has_group: bool,
    own_variables: Iterable[str] = (),
) -> dict[str, str]:
    """Return the environment variables that slow each step down, with their values.

    Args:
        variables: The environment.
        device_kind: Kind of the device: "cpu", "cuda", "rocm" or another one.
        has_group: Training runs in a process group.
        own_variables: Names of variables that autotune has set for this process.
    """
    found = {}
    for variable in _VARIABLES:
        value = variables.get(variable.name, "")
        is_here = not variable.devices or device_kind in variable.devices
        is_used = is_here and (has_group or not variable.needs_group)
        if value and is_used and variable.name not in own_variables and variable.is_slow(value):
            found[variable.name] = value
    return found


# Places where modes are switched on

_PLACES: dict[SwitchName, str] = {}
"""File and line of the first call that switched each mode on."""


def remember_places(caller: Callable[[], tuple[str, int]]) -> None:
    """Remember where a script switches modes on from now on; call once, before its first line.

    Args:
        caller: Returns file and line of the script's running code.
    """
    set_anomaly = torch.set_anomaly_enabled
    set_deterministic = torch.use_deterministic_algorithms
    start_profiler = profiler.profile.start

    # torch's two context managers and its function all call this one.
    @wraps(set_anomaly)
    def anomaly(mode: bool, check_nan: bool = True) -> None:
        if mode:
            remember("anomaly", caller)
        set_anomaly(mode, check_nan)

    @wraps(set_deterministic)
    def deterministic(mode: bool, *args: Any, **kwargs: Any) -> None:
        if mode:
            remember("deterministic", caller)
        set_deterministic(mode, *args, **kwargs)

    @wraps(start_profiler)
    def start(self: Any) -> None:
        remember("profiler", caller)
        start_profiler(self)

    torch.set_anomaly_enabled = anomaly  # type: ignore[assignment] # it has the same arguments
    torch.use_deterministic_algorithms = deterministic
    profiler.profile.start = start  # type: ignore[method-assign]


def remember(name: SwitchName, caller: Callable[[], tuple[str, int]]) -> None:
    """Remember the running line as the one that switched a mode on, unless one is known."""
    if name in _PLACES:
        return
    with suppress(Exception):  # a frame may have lost its file
        file, line = caller()
        if line:
            _PLACES[name] = shown_line(file, line)


# Observing

_is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)
"""Return whether a profiler runs; False with a torch that has no such function."""
_TOOLS = (0, 1, 2)
"""Numbers of sys.monitoring for debuggers, coverage and profilers. Source: docs.python.org,
sys.monitoring, "Tool identifiers"."""


def is_traced() -> bool:
    """Return whether a trace or profile function of Python slows this thread down."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    return any(events for _, events in monitored_events())


def monitored_events() -> list[tuple[int, int]]:
    """Return the tools of sys.monitoring (Python 3.12) that get all events of a kind, and these events."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        return []
    found = []
    for tool in _TOOLS:
        with suppress(ValueError):  # not in use
            events = monitoring.get_events(tool)
            if events:
                found.append((tool, events))
    return found


def is_deterministic(device_kind: str) -> bool:
    """Return whether deterministic algorithms are asked for; cuDNN's own switch counts where it is used."""
    has_cudnn = device_kind == "cuda"
    is_cudnn = has_cudnn and torch.backends.cudnn.deterministic
    return torch.are_deterministic_algorithms_enabled() or is_cudnn


def observe_modes(device_kind: str, *, has_group: bool = False) -> Modes:
    """Return the modes of this process and thread at this moment; call at a backward pass.

    Args:
        device_kind: Kind of the device: "cpu", "cuda", "rocm" or another one.
        has_group: Training runs in a process group.
    """
    return Modes(
        is_anomaly_detected=torch.is_anomaly_enabled(),
        is_profiled=bool(_is_profiling()),
        is_traced=is_traced(),
        is_deterministic=is_deterministic(device_kind),
        is_cudnn_benchmark=device_kind == "cuda" and torch.backends.cudnn.benchmark,
        variables=slow_variables(
            os.environ, device_kind, has_group=has_group, own_variables=OWN_VARIABLES
        ),
        places={str(name): place for name, place in _PLACES.items()},
    )


def join_modes(seen: Sequence[Modes]) -> Modes:
    """Return the modes that were on in at least half of the moments observed.

    A profiler that records some first steps, or every hundredth, slows an hour of training by
    nothing.

    Args:
        seen: Modes at some backward passes; places and variables are those of the last one.
    """
    if not seen:
        return Modes()
    counts = Counter[str]()
    for modes in seen:
        counts.update(name for name in _FLAGS if getattr(modes, name))
    flags = {name: 2 * counts[name] >= len(seen) for name in _FLAGS}
    return seen[-1].model_copy(update=flags)


_FLAGS = (
    "is_anomaly_detected",
    "is_profiled",
    "is_traced",
    "is_deterministic",
    "is_cudnn_benchmark",
)
