"""Apply a configuration to a script with the least intrusion: arguments, contexts, threads, cores.

In: a configuration, and the facts of the script's probe. Out: a script that runs with it. Only
settings that differ from the script's own, and that the probe found to be changeable, are touched.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autotune.apply.cores import (
    Addresses,
    CoresError,
    allowed_cores,
    bind_rank,
    is_bound_by_launcher,
    limited,
)
from autotune.apply.loader import IMAGE_DIMS, rebuilt
from autotune.apply.precision import tf32_products
from autotune.apply.prepare import comm_hook, ddp_arguments
from autotune.config.plan import LoaderSite, ScriptFacts
from autotune.config.training_config import (
    LOADER_SETTINGS,
    NEUTRAL_WITHOUT_WORKERS,
    TrainingConfig,
)
from autotune.protocol.attach import ACCELERATE_NAMES, before_changes, changed_settings
from autotune.worker.device import DeviceError
from autotune.worker.nvml import visible_gpu

# Binding to cores, before the script's first line, while no device is open yet
#
# Ranks are those of a launcher such as torchrun. NVIDIA's driver gives the location of a GPU; this
# was not tested with a GPU.


_GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder with one folder for each GPU, named by its PCI address. Source: NVIDIA driver README, the
/proc file system interface."""


@dataclass(frozen=True, slots=True)
class Begun:
    """State of a process before the first line of its script."""

    cores: frozenset[int] = field(default_factory=allowed_cores)
    """Cores that it may use."""
    is_numbered: bool = field(default_factory=lambda: "LOCAL_RANK" in os.environ)
    """True if a launcher gave it a rank on this host."""


def can_bind_script(begun: Begun, ranks: int, device: torch.device) -> bool:
    """Return whether a script's process can be bound from outside.

    Neither the script nor its launcher may have bound it, and ranks must have numbers from a
    launcher.

    Args:
        begun: State of the process before the script's first line.
        ranks: Number of the script's processes, on all hosts.
        device: The device that it trains on.
    """
    is_known = device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)
    is_free = bool(begun.cores) and begun.cores == allowed_cores() and not is_bound_by_launcher()
    return is_free and is_known and (ranks == 1 or begun.is_numbered)


def bind_script(binding: str, ranks: int, device: torch.device) -> None:
    """Bind this process to cores, and limit its intra-op threads to their number.

    A launcher itself is left alone: its ranks would inherit its cores. So is a process that a
    launcher has bound: its cores must not be divided again.

    Args:
        binding: "node" or "exclusive".
        ranks: Number of the script's processes, on all hosts.
        device: The device that the script trains on; of several ranks the first one's.

    Raises:
        CoresError: The process can't be bound.
    """
    if (ranks > 1 and "LOCAL_RANK" not in os.environ) or is_bound_by_launcher():
        return
    if ranks > 1:
        rank = int(os.environ["LOCAL_RANK"])
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        first_gpu = 0
    else:
        rank = 0
        local_ranks = 1
        first_gpu = device.index or 0
    places: list[Addresses] = [()] * local_ranks
    if device.type != "cpu":
        places = [[_address_of(first_gpu + number)] for number in range(local_ranks)]
    threads = bind_rank(binding, rank, places, is_alone=ranks == 1)
    torch.set_num_threads(min(threads, torch.get_num_threads()))


def _address_of(index: int, folder: Path = _GPUS) -> str | None:
    """Return the PCI address of a GPU by its CUDA index; None if the driver does not give it."""
    gpu = visible_gpu(index)
    if gpu is None:
        return None
    for file in folder.glob("*/information"):
        if f" {gpu.uuid}\n" in file.read_text().replace("\t", " "):
            return file.parent.name
    return None


# Threads that a script sets by an environment variable before it imports torch: autotune has
# imported torch by then, so the variable would have no effect


_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that set torch's number of threads at its import; if both change, the first counts.
Source: aten/src/ATen/ParallelOpenMP.cpp, get_num_threads, over omp_get_max_threads and
mkl_get_max_threads."""


def follow_variables() -> None:
    """Set torch's threads at the script's import of torch, if a variable has changed by then."""
    before = _values()
    plain = builtins.__import__
    is_over = False

    def importing(name: str, *arguments: Any, **named: Any) -> Any:
        nonlocal is_over
        is_torch = name.partition(".")[0] == "torch"
        if not is_over and is_torch and not _is_ours(sys._getframe(1)):  # noqa: SLF001
            is_over = True
            if builtins.__import__ is importing:
                builtins.__import__ = plain
            changed = [now for now, was in zip(_values(), before, strict=True) if now != was]
            value = changed[0] if changed else None
            if value is not None and value.isdecimal() and int(value) > 0:
                torch.set_num_threads(int(value))
        return plain(name, *arguments, **named)

    builtins.__import__ = importing


def _values() -> list[str | None]:
    return [os.environ.get(name) for name in _VARIABLES]


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "autotune"


# Precision and layout of a script's outermost modules
#
# With a 16-bit dtype on, a module is called under autocast and its outputs are converted to
# float32, as accelerate's `prepare` does. With channels-last on, 4-D inputs are converted. The
# module's class is patched: the module itself has no hook, and can be copied, pickled, scripted and
# traced. Source: accelerate/utils/operations.py, convert_outputs_to_fp32.


_HALVES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Switches:
    """Present precision and layout, for all modules that follow."""

    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    """Autocast dtype; None to compute as the script does."""
    channels_last: bool = False
    modules: WeakKeyDictionary[nn.Module, bool] = field(default_factory=WeakKeyDictionary)
    """Modules that follow, each with whether it trains in training mode: some train in eval mode."""


SWITCHES = Switches()


def accelerate_state() -> Mapping[str, object]:
    """Return the shared state of the script's Accelerator; empty if it has none."""
    module = sys.modules.get("accelerate.state")
    return getattr(getattr(module, "AcceleratorState", None), "_shared_state", {})


def attach_to(module: nn.Module) -> None:
    """Let a module follow the switches; a second call does nothing."""
    if module in SWITCHES.modules:
        return
    SWITCHES.modules[module] = module.training
    _follow_calls_of(type(module))
    if SWITCHES.channels_last:
        set_layout(module, channels_last=True)


def _follow_calls_of(kind: type[nn.Module]) -> None:
    """Patch a class, so that its modules are called through `switched`."""
    own = kind.__call__
    if getattr(own, "is_switched", False):
        return
    is_torchs = own is nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.fx replaces nn.Module.__call__ for a while, so read it at each call.
        plain = nn.Module.__call__ if is_torchs else own
        # Code that is compiled or exported stays unchanged.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return plain(self, *args, **kwargs)
        return switched(self, partial(plain, self), args, kwargs)

    call.is_switched = True  # type: ignore[attr-defined]
    kind.__call__ = call  # type: ignore[method-assign]


def switched(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module with the present precision and layout, if it follows the switches and trains."""
    in_mode = SWITCHES.modules.get(module)
    if in_mode is None or (in_mode and not module.training) or not torch.is_grad_enabled():
        return call(*args, **kwargs)
    if SWITCHES.channels_last:
        args = rebuilt(args, _channels_last)
        kwargs = rebuilt(kwargs, _channels_last)
    if SWITCHES.dtype is None or torch.is_autocast_enabled(SWITCHES.device_type):
        return call(*args, **kwargs)
    with torch.autocast(SWITCHES.device_type, dtype=SWITCHES.dtype):
        output = call(*args, **kwargs)
    return _widened(output)


def set_layout(module: nn.Module, *, channels_last: bool) -> None:
    """Convert a module's 4-D parameters and buffers to a layout, in place."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module.to(memory_format=layout)  # type: ignore[call-overload] # torch's stubs lack the keyword alone


def _channels_last(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_image = value.ndim == IMAGE_DIMS and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if is_image else value
    return rebuilt(value, _channels_last)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    return rebuilt(value, _widened)


# The overrides


class Overrides:
    """Apply those settings of a configuration that a script does not have by itself.

    Args:
        config: The configuration to run the script with.
        facts: Facts of the script's probe; None to change nothing.
        is_trial: True in a trial, False in a training under `autotune apply`; see
            apply.prepare.arranged.
        is_switched: Precision and layout will be switched while the script runs, so that all
            outermost modules must follow.

    Attributes:
        before: The configuration with the script's own values where they differ: what is equal in
            both is left alone.
        changed: Names of the settings that differ.
    """

    def __init__(
        self,
        config: TrainingConfig,
        facts: ScriptFacts | None,
        *,
        is_trial: bool = True,
        is_switched: bool = False,
    ) -> None:
        self.config = config
        self.facts = facts
        self._is_trial = is_trial
        self._is_switched = is_switched
        self.before = config if facts is None else before_changes(config, facts)
        self.changed = frozenset[str]() if facts is None else changed_settings(config, facts)

    def in_process(self) -> None:
        """Apply the settings of a training process, before the script's first line.

        Raises:
            DeviceError: A trial's process can't be bound to cores, so it must not be measured.
        """
        config = self.config
        before = self.before
        if config.numa_binding is not None and config.numa_binding != before.numa_binding:
            self._bind(config.numa_binding)
        if config.intra_op_threads is not None and self.sets_threads:
            torch.set_num_threads(config.intra_op_threads)
        if config.amp_dtype == "tf32" and before.amp_dtype != "tf32":
            tf32_products().__enter__()  # for the whole life of this process
        # The first forward pass comes before the first step, and its choice of algorithms stays.
        self.before_step()

    @property
    def sets_threads(self) -> bool:
        """True if the script gets another number of intra-op threads than its own."""
        return self.config.intra_op_threads != self.before.intra_op_threads

    def _bind(self, binding: str) -> None:
        assert self.facts is not None  # noqa: S101 - else nothing is changed
        try:
            bind_script(binding, self.config.world_size, torch.device(self.facts.device))
        except CoresError as error:
            if self._is_trial:
                raise DeviceError(str(error)) from error
            sys.stderr.write(f"autotune: this process runs unbound: {error}\n")

    def loader(self, site: LoaderSite, arguments: dict[str, Any]) -> bool:
        """Change the arguments of a DataLoader that is about to be made.

        Args:
            site: The loader's call site.
            arguments: Its arguments by name; changed in place.

        Returns:
            True if the loader is one of the searched ones; any may be before the probe.
        """
        if self.facts is None:
            return True
        if not self._is_searched(site):
            return False

        # The batch size, unless the script makes the batches itself.
        has_sampler = arguments.get("batch_sampler") is not None
        has_own_batches = has_sampler or arguments.get("batch_size", 1) is None
        config = self.config
        if config.micro_batch_size != self.before.micro_batch_size and not has_own_batches:
            arguments["batch_size"] = config.loader_batch_size

        # The loader's other settings.
        if not self.changed & set(LOADER_SETTINGS):
            return True
        settings = config.loader_settings
        reached = self.facts.reached
        arguments |= {name: value for name, value in settings.items() if name in reached}
        if config.worker_threads != self.before.worker_threads:
            own = arguments.get("worker_init_fn")
            arguments["worker_init_fn"] = limited(own, config.worker_threads)
        if not arguments.get("num_workers"):  # torch refuses workers' settings without workers
            for name in (*NEUTRAL_WITHOUT_WORKERS, "timeout"):
                arguments.pop(name, None)
        return True

    def _is_searched(self, site: LoaderSite) -> bool:
        """Return whether a loader is one of the searched ones, or such a one rebuilt.

        The dataset of a rebuilt loader may have another length if it is shuffled, as for training.
        One function may make all loaders; those of an evaluation are in order, or of other data.
        """
        assert self.facts is not None  # noqa: S101 - asked for by `loader` alone
        own = self.facts.observed.micro_batch_size if site.batch_size else None
        manner = {
            "dataset": site.dataset,
            "order": site.order,
            "length": site.length,
            "batch_size": own,
        }
        is_free = "micro_batch_size" in self.facts.placeholders
        for place in self.facts.loaders:
            known = place
            if not place.dataset:  # a file may give the place only
                if place.nth != site.nth:
                    continue
                known = place.model_copy(update=manner)
            has_its_length = known.length == site.length or site.is_drawn
            if has_its_length and known.is_like(site, ignores_batch_size=is_free):
                return True
        return False

    @property
    def follows_modules(self) -> bool:
        """True if the script's modules need another precision or layout."""
        return self._is_switched or self._changes_precision or self._changes_layout

    @property
    def _changes_precision(self) -> bool:
        return self.config.amp_dtype != self.before.amp_dtype

    @property
    def _changes_layout(self) -> bool:
        return self.config.channels_last != self.before.channels_last

    def module(self, module: nn.Module) -> None:
        """Let an outermost module follow the configuration's precision and layout."""
        dtype = self.config.amp_dtype
        if self._changes_layout:
            SWITCHES.channels_last = self.config.channels_last
        if self._changes_precision and dtype in ACCELERATE_NAMES and not _is_mixed(dtype):
            SWITCHES.device_type = next((own.device.type for own in module.parameters()), "cpu")
            SWITCHES.dtype = getattr(torch, dtype)
        if self._is_switched or SWITCHES.dtype is not None or self._changes_layout:
            attach_to(module)

    def before_step(self) -> None:
        """Set again what a script may have changed on its way to its first step."""
        if self.config.cudnn_benchmark != self.before.cudnn_benchmark:
            torch.backends.cudnn.benchmark = self.config.cudnn_benchmark

    def ddp(self, arguments: dict[str, Any]) -> None:
        """Change the arguments of a DistributedDataParallel that is about to be made."""
        wanted = self.config.ddp
        if wanted is not None and wanted != self.before.ddp:
            arguments |= ddp_arguments(wanted)
            if wanted.bucket_cap_mb is None:
                arguments.setdefault("bucket_cap_mb", None)

    def ddp_made(self, model: DistributedDataParallel) -> None:
        """Register the configuration's communication hook, which compresses gradients."""
        hook = self.config.ddp_settings.comm_hook
        if self.config.ddp != self.before.ddp and hook is not None:
            model.register_comm_hook(*comm_hook(hook, is_trial=self._is_trial))


def _is_mixed(dtype: str) -> bool:
    """Return whether accelerate computes in this precision itself, by its environment variable."""
    own = str(accelerate_state().get("_mixed_precision"))
    return own == ACCELERATE_NAMES[dtype] and "ACCELERATE_MIXED_PRECISION" in os.environ
