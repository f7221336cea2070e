"""Precision and layout of a script's outermost modules: around their calls, switched from outside.

Comes in: a module that the script calls by itself. While bfloat16 is on, it is called under autocast and what it
returns is float32 again, as accelerate's `prepare` does; while channels-last is on, 4-D inputs come in that layout.
The module's class is what calls so: the module bears no hook, and is copied, pickled, scripted and traced as ever.
Source: accelerate/utils/operations.py, convert_outputs_to_fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from autotune.settings.applied.batch import IMAGE_DIMS, rebuilt

__all__ = ["SWITCHES", "Switches", "accelerate_state", "attach_to", "set_layout", "switched"]

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Switches:
    """What is on now, for all modules."""

    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    """What to compute in; None: as the script does."""
    channels_last: bool = False
    modules: WeakKeyDictionary[nn.Module, bool] = field(default_factory=WeakKeyDictionary)
    """Those that follow, and whether they train in the mode for it: some are trained as they are evaluated."""


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
        plain = nn.Module.__call__ if is_torchs else own  # torch.fx exchanges that of nn.Module for a while
        # What is compiled or exported is as ever.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return plain(self, *args, **kwargs)
        return switched(self, partial(plain, self), args, kwargs)

    call.is_switched = True  # type: ignore[attr-defined]
    kind.__call__ = call  # type: ignore[method-assign]


def switched(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module as the switches say, where it follows them and trains."""
    in_mode = SWITCHES.modules.get(module)
    if in_mode is None or (in_mode and not module.training) or not torch.is_grad_enabled():
        return call(*args, **kwargs)
    if SWITCHES.channels_last:
        args, kwargs = rebuilt(args, _channels_last), rebuilt(kwargs, _channels_last)
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
