"""Patch what a script calls to save, log, collect and wait, so that a Watch clocks it.

In: a watch, and modules as they are imported. Out: calls of `watch.inside(part, what)` around the
functions of `_SEAMS`, in the script's own thread. A function is patched where all of its callers
meet: `model.save_pretrained` ends in `safetensors.torch.save_file`, tqdm's loop in `tqdm.update`.

Not patched: methods of C types (`file.flush`, whose last buffer is small), writes by native code,
and threads of a library's own: an asynchronous checkpoint or tracker counts while it blocks the
script.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.protocol.attach import is_muted_by
from autotune.records.watched_run import RunPart
from autotune.worker.script.patching import (
    after_import,
    imported_module,
    replace_everywhere,
)

if TYPE_CHECKING:
    from autotune.worker.script.watch import Watch

__all__ = ["install_device_seams", "install_seams", "is_muted", "uninstall_seams"]


_Pair = tuple[Callable[..., Any], Callable[..., Any]]


class _Seam(NamedTuple):
    """Functions of one module that belong to one part."""

    part: RunPart
    module: str
    """Module that defines them."""
    prefix: str
    """Name of the module, or of its class's owner, as users write it."""
    names: tuple[str, ...]
    """Functions and methods; a final `*` stands for all methods that begin so."""


_SEAMS = (
    _Seam("checkpoint", "torch.serialization", "torch.", ("save",)),
    _Seam("checkpoint", "torch.jit._serialization", "torch.jit.", ("save",)),
    _Seam("checkpoint", "torch.export", "torch.export.", ("save",)),
    _Seam(
        "checkpoint",
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.distributed.checkpoint.",
        ("save", "async_save", "save_state_dict"),
    ),
    _Seam("checkpoint", "safetensors.torch", "safetensors.torch.", ("save_file", "save_model")),
    _Seam("checkpoint", "safetensors.numpy", "safetensors.numpy.", ("save_file",)),
    _Seam("checkpoint", "pickle", "pickle.", ("dump",)),
    _Seam("checkpoint", "joblib.numpy_pickle", "joblib.", ("dump",)),
    _Seam("checkpoint", "numpy", "numpy.", ("save", "savez", "savez_compressed")),
    _Seam("checkpoint", "os", "os.", ("fsync", "fdatasync")),
    _Seam("checkpoint", "accelerate.accelerator", "", ("Accelerator.save_state",)),
    _Seam("checkpoint", "transformers.trainer", "", ("Trainer._save_checkpoint",)),
    _Seam("checkpoint", "lightning.pytorch.trainer.trainer", "", ("Trainer.save_checkpoint",)),
    _Seam("checkpoint", "pytorch_lightning.trainer.trainer", "", ("Trainer.save_checkpoint",)),
    _Seam("logging", "builtins", "", ("print",)),
    _Seam("logging", "logging", "logging.", ("Handler.handle",)),
    _Seam(
        "logging",
        "tqdm.std",
        "",
        (
            "tqdm.update",
            "tqdm.refresh",
            "tqdm.set_postfix",
            "tqdm.set_postfix_str",
            "tqdm.set_description",
            "tqdm.set_description_str",
            "tqdm.close",
        ),
    ),
    _Seam(
        "logging",
        "rich.progress",
        "rich.",
        ("Progress.update", "Progress.advance", "Progress.refresh"),
    ),
    _Seam("logging", "rich.console", "rich.", ("Console.print",)),
    _Seam(
        "logging",
        "torch.utils.tensorboard.writer",
        "",
        ("SummaryWriter.add_*", "SummaryWriter.flush"),
    ),
    _Seam("logging", "tensorboardX.writer", "", ("SummaryWriter.add_*", "SummaryWriter.flush")),
    _Seam("logging", "wandb.sdk.wandb_run", "wandb.", ("Run.log", "Run.log_artifact")),
    _Seam(
        "logging",
        "wandb.integration.torch.wandb_torch",
        "wandb.watch: ",
        ("TorchHistory.log_tensor_stats",),
    ),
    _Seam("logging", "mlflow.tracking.fluent", "mlflow.", ("log_*",)),
    _Seam("logging", "mlflow.tracking.client", "mlflow.", ("MlflowClient.log_*",)),
    _Seam("logging", "comet_ml.experiment", "comet_ml.", ("BaseExperiment.log_*",)),
    _Seam(
        "logging",
        "neptune.attributes.series.series",
        "neptune.",
        ("Series.append", "Series.extend"),
    ),
    _Seam("logging", "neptune_scale.api.run", "neptune_scale.", ("Run.log_*",)),
    _Seam("logging", "clearml.logger", "clearml.", ("Logger.report_*",)),
    _Seam("logging", "swanlab.data.sdk", "swanlab.", ("log",)),
    _Seam("logging", "transformers.trainer_callback", "", ("CallbackHandler.on_log",)),
    _Seam(
        "logging",
        "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
        "",
        ("_LoggerConnector.log_metrics",),
    ),
    _Seam(
        "logging",
        "pytorch_lightning.trainer.connectors.logger_connector.logger_connector",
        "",
        ("_LoggerConnector.log_metrics",),
    ),
    _Seam("logging", "lightning.pytorch.core.module", "", ("LightningModule.log",)),
    _Seam("logging", "pytorch_lightning.core.module", "", ("LightningModule.log",)),
    _Seam("collection", "gc", "gc.", ("collect",)),
    _Seam("collection", "torch.cuda.memory", "torch.cuda.", ("empty_cache",)),
    _Seam("collection", "torch.xpu.memory", "torch.xpu.", ("empty_cache",)),
    _Seam("collection", "torch.mps", "torch.mps.", ("empty_cache",)),
    _Seam("collection", "torch.accelerator.memory", "torch.accelerator.", ("empty_cache",)),
)
"""Functions that save, log or collect. Source: each library's documentation; of Lightning and
transformers the one method that all of their loggers share."""

_DEVICE_SEAMS = (
    _Seam("synchronise", "torch.cuda", "torch.cuda.", ("synchronize",)),
    _Seam("synchronise", "torch.xpu", "torch.xpu.", ("synchronize",)),
    _Seam("synchronise", "torch.mps", "torch.mps.", ("synchronize",)),
    _Seam("synchronise", "torch.accelerator", "torch.accelerator.", ("synchronize",)),
)
"""Functions that wait for an accelerator."""
_SYNCHRONISING = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
"""Methods of a tensor on an accelerator that wait for its value."""

AUTOMATIC = "garbage collection"
"""Name of collections that Python starts itself."""


@dataclass(slots=True)
class _Installed:
    """The seams of this process."""

    watch: Watch | None = None
    """The watch; None before `install_seams` and after `uninstall_seams`."""
    functions: list[_Pair] = field(default_factory=list)
    """Functions of modules: each replacement with its original."""
    methods: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    """Attributes of classes and streams: owner, name, replacement, and the original; None if the
    attribute was inherited."""
    collections: list[AbstractContextManager[None]] = field(default_factory=list)
    """The automatic collection that runs, if any."""
    is_collecting: bool = False
    """True within the script's own gc.collect, whose collection is not an automatic one."""
    has_fork_hook: bool = False
    """True once forked children are set to call the originals."""


_installed = _Installed()
_print = print


def install_seams(watch: Watch) -> None:
    """Patch what saves, logs and collects, in modules imported by now and later, until `uninstall_seams`.

    A second call only changes the watch.

    Args:
        watch: The watch to call.
    """
    is_first = _installed.watch is None
    _installed.watch = watch
    if not is_first:
        return
    if not _installed.has_fork_hook:
        _installed.has_fork_hook = True
        os.register_at_fork(after_in_child=_watch_nothing)
    _patch_modules(_SEAMS)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(AttributeError):  # a stream of the script's own that takes no attributes
            _patch_attribute(stream, "write", _timed(stream.write, "logging", f"sys.{name}.write"))
    gc.callbacks.append(_on_collection)
    after_import("torch._dynamo.trace_rules", _skip_in_compiling)


def install_device_seams() -> None:
    """Patch what waits for an accelerator or copies to it; needs `install_seams`.

    Only for training on an accelerator: on a CPU it would cost time and show nothing.
    """
    import torch

    _patch_modules(_DEVICE_SEAMS)
    for name in _SYNCHRONISING:
        method = getattr(torch.Tensor, name)
        _patch_attribute(torch.Tensor, name, _timed_on_device(method, f"Tensor.{name}"))
    for name in ("to", "cuda"):
        method = getattr(torch.Tensor, name)
        _patch_attribute(torch.Tensor, name, _timed_copy(method, f"Tensor.{name}"))


def uninstall_seams() -> None:
    """Restore what was patched; what others have patched since stays, and only passes on.

    `print` stays too: torch.compile would compile a function again that calls it.
    """
    _installed.watch = None
    kept = [pair for pair in _installed.functions if pair[1] is _print]
    replace_everywhere([pair for pair in _installed.functions if pair[1] is not _print])
    for owner, name, replacement, original in reversed(_installed.methods):
        if vars(owner).get(name) is not replacement:
            continue
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    if _on_collection in gc.callbacks:
        gc.callbacks.remove(_on_collection)
    _installed.functions[:] = kept
    _installed.methods.clear()
    _installed.collections.clear()


def is_muted(what: str) -> bool:
    """Return whether a trial keeps a tracker from doing anything, so that its calls can only be counted.

    Args:
        what: Name of the call, as seams give it to a watch.
    """
    return is_muted_by(what.partition(".")[0], os.environ)


def _watch_nothing() -> None:
    """Let a forked child, a loader's worker, call the originals."""
    _installed.watch = None


def _skip_in_compiling(trace_rules: ModuleType) -> None:
    """Let torch.compile call a patched function as it is, without compiling seams and watch."""
    with suppress(AttributeError):  # a torch without this function compiles them along
        trace_rules.add(__name__)
        trace_rules.add("autotune.worker.script.watch")


def _patch_modules(seams: Sequence[_Seam]) -> None:
    """Patch imported modules at once, since a search of all modules takes a while, and others later."""
    pairs = []
    for seam in seams:
        module = imported_module(seam.module)
        if module is None:
            after_import(seam.module, partial(_patch_module, seam))
        else:
            pairs += _patched(seam, module)
    replace_everywhere(pairs)


def _patch_module(seam: _Seam, module: ModuleType) -> None:
    """Patch the functions and methods of one seam, once its module is imported."""
    if _installed.watch is not None:
        replace_everywhere(_patched(seam, module))


def _patched(seam: _Seam, module: ModuleType) -> list[_Pair]:
    """Patch the methods of one seam, and return its functions with their replacements."""
    pairs = []
    for owner, name, function in _found(seam, module):
        is_method = isinstance(owner, type)
        # Lightning's loggers share one private class.
        kind = "Logger" if name == "log_metrics" and is_method else getattr(owner, "__name__", "")
        what = f"{seam.prefix}{kind}.{name}" if is_method else f"{seam.prefix}{name}"
        timed = _timed(_asked_for(function) if what == "gc.collect" else function, seam.part, what)
        if is_method:
            _patch_attribute(owner, name, timed)
        else:
            pairs.append((function, timed))
            _installed.functions.append((timed, function))
    return pairs


def _found(seam: _Seam, module: ModuleType) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the functions of a seam, each with its owner and its name."""
    for dotted in seam.names:
        *path, wanted = dotted.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        held: Mapping[str, Any] = getattr(owner, "__dict__", {})
        for name in list(held):
            is_wanted = name.startswith(wanted[:-1]) if wanted.endswith("*") else name == wanted
            is_plain = callable(held[name]) and not isinstance(held[name], type)
            is_patched = any(held[name] is timed for timed, _ in _installed.functions)
            if is_wanted and is_plain and not is_patched:
                yield owner, name, held[name]


def _patch_attribute(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = vars(owner).get(name)
    setattr(owner, name, replacement)
    _installed.methods.append((owner, name, replacement, original))


# The replacements


def _timed(function: Callable[..., Any], part: RunPart, what: str) -> Callable[..., Any]:
    """Return a function whose calls belong to a part."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        watch = _installed.watch
        if watch is None or watch.is_over or _is_called_by_us():
            return function(*args, **named)
        with watch.inside(part, what):
            return function(*args, **named)

    return call


def _asked_for(collect: Callable[..., int]) -> Callable[..., int]:
    """Return gc.collect, marked as the script's own while it runs."""

    @wraps(collect)
    def call(*args: Any, **named: Any) -> int:
        _installed.is_collecting = True
        try:
            return collect(*args, **named)
        finally:
            _installed.is_collecting = False

    return call


def _is_called_by_us() -> bool:
    """Return whether autotune called a replacement, as it does to write its own report."""
    caller: FrameType | None = sys._getframe(2)  # noqa: SLF001 - a cheap way to the caller
    while caller is not None and caller.f_globals.get("__name__") == __name__:
        caller = caller.f_back  # a replacement within a replacement
    return caller is not None and str(caller.f_globals.get("__name__")).startswith("autotune.")


def _timed_on_device(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a method of tensors whose calls wait for the device if the tensor lies there."""
    timed = _timed(method, "synchronise", what)

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        if self.is_cpu:
            return method(self, *args, **named)
        return timed(self, *args, **named)

    return call


def _timed_copy(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a method of tensors whose calls are copies to the device, or wait for it."""
    copied = _timed(method, "copy", what)
    awaited = _timed(method, "synchronise", f"{what}('cpu')")
    is_always_to_device = what == "Tensor.cuda"

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        is_to_cpu = None if is_always_to_device else _goes_to_cpu(args, named)
        if self.is_cpu and (is_always_to_device or is_to_cpu is False):
            return copied(self, *args, **named)
        if is_to_cpu and not self.is_cpu:
            return awaited(self, *args, **named)
        return method(self, *args, **named)

    return call


def _goes_to_cpu(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool | None:
    """Return whether `Tensor.to` copies to the CPU; None if it stays where it is."""
    target = named.get("device", named.get("other", args[0] if args else None))
    target = getattr(target, "device", target)  # another tensor's
    if isinstance(target, str):
        return target.startswith("cpu")
    if isinstance(target, int) and not isinstance(target, bool):
        return False
    kind = getattr(target, "type", None)  # of a torch.device
    return kind == "cpu" if isinstance(kind, str) else None


def _on_collection(phase: str, info: Mapping[str, int]) -> None:
    """Clock a collection of the collector; Python calls this at its start and its end.

    Collections do not nest, not even in two threads.
    """
    if phase == "stop":
        while _installed.collections:
            _installed.collections.pop().__exit__(None, None, None)
        return
    watch = _installed.watch
    if watch is None or watch.is_over or _installed.is_collecting:
        return
    is_full = info.get("generation") == 2
    context = watch.inside("collection", f"{AUTOMATIC}, generation 2" if is_full else AUTOMATIC)
    context.__enter__()
    _installed.collections.append(context)
