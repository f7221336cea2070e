"""Apply a configuration to a script by the mildest means: variables, arguments, contexts, cores."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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
    DdpConfig,
    TrainingConfig,
)
from autotune.protocol.attach import ACCELERATE_NAMES, changed_settings
from autotune.worker.device import DeviceError
from autotune.worker.nvml import visible_gpu

# Binds a script's process to its cores before its first line, while no device is open yet.
#
# Comes in: a binding, and what was seen of the script. Goes out: the process on its cores, or a
# CoresError. Ranks are those that a launcher such as torchrun has numbered. Where a GPU is,
# NVIDIA's driver tells; it has not run beside one.


_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU, named by its PCI address. Source: NVIDIA driver README, the /proc file
system interface."""


@dataclass(frozen=True, slots=True)
class Begun:
    """How a process stood before the first line of its script."""

    cores: frozenset[int]
    is_numbered: bool
    """A launcher has told it its rank on this host."""


def as_begun() -> Begun:
    """How this process stands now."""
    return Begun(allowed_cores(), "LOCAL_RANK" in os.environ)


def can_bind_script(begun: Begun, ranks: int, device: torch.device) -> bool:
    """Whether a script's process can be bound from outside.

    It must not have bound itself, nor been bound by whoever started it, and a launcher must have
    numbered its ranks.
    """
    is_known = device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)
    is_free = bool(begun.cores) and begun.cores == allowed_cores() and not is_bound_by_launcher()
    return is_free and is_known and (ranks == 1 or begun.is_numbered)


def bind_script(binding: str, ranks: int, device: torch.device) -> None:
    """Bind this process, and let an operation have no more threads than that leaves it.

    A launcher, which trains nothing itself, is left alone: its ranks would inherit its cores. So is
    a process that a launcher has bound: its share must not be shared out anew.

    Args:
        binding: "node" or "exclusive".
        ranks: Of the script, on all hosts.
        device: What the script trains on, of several ranks the first one's.

    Raises:
        CoresError: it can't be bound.
    """
    here, rank = (
        int(os.environ.get(name, number))
        for name, number in (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    if (ranks > 1 and "LOCAL_RANK" not in os.environ) or is_bound_by_launcher():
        return
    first = 0 if ranks > 1 else device.index or 0
    places: list[Addresses] = [
        () if device.type == "cpu" else [_address_of(first + number)]
        for number in range(here if ranks > 1 else 1)
    ]
    threads = bind_rank(binding, rank if ranks > 1 else 0, places, is_alone=ranks == 1)
    torch.set_num_threads(min(threads, torch.get_num_threads()))


def _address_of(index: int, folder: Path = _GPUS) -> str | None:
    """The PCI address of the GPU that CUDA is about to number so; None where the driver does not tell it."""
    gpu = visible_gpu(index)
    if gpu is None:
        return None
    files = (
        file
        for file in folder.glob("*/information")
        if f" {gpu.uuid}\n" in file.read_text().replace("\t", " ")
    )
    return next((file.parent.name for file in files), None)


# The number of threads that a script sets by a variable before it imports torch, which autotune has
# imported already.
#
# Comes in: the variables before its first line. Goes out: torch's number of threads, at the
# script's own import of torch.


_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""What torch takes its number of threads from when it is imported; of two that have changed the
first counts. Source: aten/src/ATen/ParallelOpenMP.cpp, get_num_threads, over omp_get_max_threads
and mkl_get_max_threads."""


def follow_variables() -> None:
    """At the first import of torch from now on, set its threads as variables say that have changed until then."""
    before = _values()
    plain = builtins.__import__
    is_over = False

    def importing(name: str, *arguments: Any, **named: Any) -> Any:
        nonlocal is_over
        if not is_over and name.partition(".")[0] == "torch" and not _is_ours(sys._getframe(1)):  # noqa: SLF001
            is_over = True
            if builtins.__import__ is importing:
                builtins.__import__ = plain
            set_now = next(
                (value for value, was in zip(_values(), before, strict=True) if value != was), None
            )
            if set_now is not None and set_now.isdecimal() and int(set_now) > 0:
                torch.set_num_threads(int(set_now))
        return plain(name, *arguments, **named)

    builtins.__import__ = importing


def _values() -> list[str | None]:
    return [os.environ.get(name) for name in _VARIABLES]


def _is_ours(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "autotune"


# Precision and layout of a script's outermost modules: around their calls, switched from outside.
#
# Comes in: a module that the script calls by itself. While bfloat16 is on, it is called under
# autocast and what it returns is float32 again, as accelerate's `prepare` does; while channels-last
# is on, 4-D inputs come in that layout. The module's class is what calls so: the module bears no
# hook, and is copied, pickled, scripted and traced as ever. Source: accelerate/utils/operations.py,
# convert_outputs_to_fp32.


_HALVES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Switches:
    """What is on now, for all modules."""

    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    """What to compute in; None: as the script does."""
    channels_last: bool = False
    modules: WeakKeyDictionary[nn.Module, bool] = field(default_factory=WeakKeyDictionary)
    """Those that follow, and whether they train in the mode for it: some are trained as they are
    evaluated."""


SWITCHES = Switches()


def accelerate_state() -> Mapping[str, object]:
    """Return what the script's Accelerator shares among its parts; empty where it has made none."""
    module = sys.modules.get("accelerate.state")
    return getattr(getattr(module, "AcceleratorState", None), "_shared_state", {})


def attach_to(module: nn.Module) -> None:
    """Let a module follow the switches, once."""
    if module in SWITCHES.modules:
        return
    SWITCHES.modules[module] = module.training
    _follow_calls_of(type(module))
    if SWITCHES.channels_last:
        set_layout(module, channels_last=True)


def _follow_calls_of(kind: type[nn.Module]) -> None:
    """Have the modules of a class called by way of `switched`."""
    own = kind.__call__
    if getattr(own, "is_switched", False):
        return
    is_torchs = own is nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = (
            nn.Module.__call__ if is_torchs else own
        )  # torch.fx exchanges that of nn.Module for a while
        # What is compiled or exported is as ever.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return plain(self, *args, **kwargs)
        return switched(self, partial(plain, self), args, kwargs)

    call.is_switched = True  # type: ignore[attr-defined]
    kind.__call__ = call  # type: ignore[method-assign]


def switched(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module as the switches say, where it follows them and trains."""
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
    """Put a module's 4-D parameters and buffers into a layout, in place."""
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


# A configuration's settings put into a script, each by the mildest means: a framework's variable,
# an argument, a hook.
#
# Comes in: a configuration, and what was seen of the script (ScriptFacts). Only settings that
# differ from what the script does, and that were found to be within reach, are touched.


class Overrides:
    """The settings of a configuration that a script is to have and does not have by itself.

    Args:
        config: What the script is to run with.
        facts: What was seen of it; None: it is only looked at, and nothing is changed.
        is_trial: As in TrainingConfig.arrange.
        is_switched: Precision and layout are to be switched while the script runs, whatever it
            begins with.
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
        self.changed = frozenset[str]() if facts is None else changed_settings(config, facts)

    def in_process(self) -> None:
        """What is set in each process that trains, before its first line.

        Raises:
            DeviceError: a trial's process can't be bound to cores, and must not be measured as if
                it were.
        """
        config = self.config
        if "numa_binding" in self.changed and config.numa_binding is not None:
            self._bind(config.numa_binding)
        if "intra_op_threads" in self.changed and config.intra_op_threads is not None:
            torch.set_num_threads(config.intra_op_threads)
        if "amp_dtype" in self.changed and config.amp_dtype == "tf32":
            tf32_products().__enter__()  # for the whole life of this process
        # The first forward pass comes before it, and what that has chosen for a shape is kept.
        self.before_step()

    def _bind(self, binding: str) -> None:
        assert self.facts is not None  # noqa: S101 - else nothing is changed
        try:
            bind_script(binding, self.config.world_size, torch.device(self.facts.device))
        except CoresError as error:
            if self._is_trial:
                raise DeviceError(str(error)) from error
            sys.stderr.write(f"autotune: this process runs unbound: {error}\n")

    def loader(self, site: LoaderSite, arguments: dict[str, Any]) -> bool:
        """Change the arguments of a DataLoader that is about to be made at a place.

        Returns:
            Whether it is one of those that are searched; before the probe any may be.
        """
        if self.facts is None:
            return True
        if not self._is_searched(site):
            return False
        has_own_batches = (
            arguments.get("batch_sampler") is not None or arguments.get("batch_size", 1) is None
        )
        if "micro_batch_size" in self.changed and not has_own_batches:
            arguments["batch_size"] = self.config.loader_batch_size
        if not self.changed & set(LOADER_SETTINGS):
            return True
        settings = {
            name: value
            for name, value in self.config.loader_settings.items()
            if name in self.facts.reached
        }
        arguments |= settings
        if "worker_threads" in self.changed:
            arguments["worker_init_fn"] = limited(
                arguments.get("worker_init_fn"), self.config.worker_threads
            )
        if not arguments.get("num_workers"):  # what only workers use; torch refuses it without any
            for name in (*NEUTRAL_WITHOUT_WORKERS, "multiprocessing_context", "timeout"):
                arguments.pop(name, None)
        return True

    def _is_searched(self, site: LoaderSite) -> bool:
        """Return whether a loader is one of those that were searched, or such a one made again.

        The dataset of one made again may have another length where samples are drawn, as for a
        training: a function that makes all loaders makes those of an evaluation in order, or of
        other data.
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
            known = (
                place if place.dataset else place.model_copy(update=manner)
            )  # a file may name the place alone
            if not place.dataset and place.nth != site.nth:
                continue
            if known.is_like(site, ignores_batch_size=is_free) and (
                known.length == site.length or site.is_drawn
            ):
                return True
        return False

    @property
    def follows_modules(self) -> bool:
        """Whether modules are to compute otherwise than by themselves."""
        return self._is_switched or not self.changed.isdisjoint({"amp_dtype", "channels_last"})

    def module(self, module: nn.Module) -> None:
        """Have an outermost module follow the configuration's precision and layout."""
        dtype = self.config.amp_dtype
        if "channels_last" in self.changed:
            SWITCHES.channels_last = self.config.channels_last
        if "amp_dtype" in self.changed and dtype in ACCELERATE_NAMES and not _is_mixed(dtype):
            SWITCHES.device_type = next((own.device.type for own in module.parameters()), "cpu")
            SWITCHES.dtype = getattr(torch, dtype)
        if self._is_switched or SWITCHES.dtype is not None or "channels_last" in self.changed:
            attach_to(module)

    def before_step(self) -> None:
        """What a script may have set for itself on its way to its first step."""
        if "cudnn_benchmark" in self.changed:
            torch.backends.cudnn.benchmark = self.config.cudnn_benchmark

    def ddp(self, arguments: dict[str, Any]) -> None:
        """Change the arguments of a DistributedDataParallel that is about to be made."""
        if "ddp" in self.changed and self.config.ddp is not None:
            arguments |= ddp_arguments(self.config.ddp)
            if self.config.ddp.bucket_cap_mb is None:
                arguments.setdefault("bucket_cap_mb", None)

    def ddp_made(self, model: DistributedDataParallel) -> None:
        """Compress gradients on their way, where that is asked for."""
        hook = (self.config.ddp or DdpConfig()).comm_hook
        if "ddp" in self.changed and hook is not None:
            model.register_comm_hook(*comm_hook(hook, is_trial=self._is_trial))


def _is_mixed(dtype: str) -> bool:
    """Whether accelerate computes in this precision by itself, as its environment variable has told it to."""
    own = str(accelerate_state().get("_mixed_precision"))
    return own == ACCELERATE_NAMES[dtype] and "ACCELERATE_MIXED_PRECISION" in os.environ
