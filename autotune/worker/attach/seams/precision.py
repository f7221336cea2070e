"""Precision and layout of a script's outermost modules: by hooks around their forward passes, switched from outside.

Comes in: a module that the script calls by itself. While bfloat16 is on, its forward pass runs under autocast and what
it returns is float32 again, as accelerate's `prepare` does; while channels-last is on, 4-D inputs come in that layout.
The hooks are functions of this module, so that a model which bears them can be pickled.
Source: accelerate/utils/operations.py, convert_outputs_to_fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from autotune.settings.applied.batch import rebuilt

__all__ = ["SWITCHES", "Switches", "attach_to", "set_layout"]

_IMAGE_DIMS = 4
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Switches:
    """What is on now, for all modules."""

    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    """What to compute in; None: as the script does."""
    channels_last: bool = False
    modules: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Those that bear the hooks."""
    entered: list[Any] = field(default_factory=list)
    """Contexts of forward passes under way."""


SWITCHES = Switches()


def attach_to(module: nn.Module) -> None:
    """Let a module follow the switches, once."""
    if module in SWITCHES.modules:
        return
    SWITCHES.modules.add(module)
    module.register_forward_pre_hook(_enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(_leave, always_call=True)
    if SWITCHES.channels_last:
        set_layout(module, channels_last=True)


def set_layout(module: nn.Module, *, channels_last: bool) -> None:
    """Put a module's 4-D parameters and buffers into a layout, in place."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module.to(memory_format=layout)  # type: ignore[call-overload] # torch's stubs lack the keyword alone


def _enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    context = None
    if torch.is_grad_enabled():
        if SWITCHES.channels_last:
            args, kwargs = rebuilt(args, _channels_last), rebuilt(kwargs, _channels_last)
        if SWITCHES.dtype is not None and not torch.is_autocast_enabled(SWITCHES.device_type):
            context = torch.autocast(SWITCHES.device_type, dtype=SWITCHES.dtype)
            context.__enter__()  # type: ignore[no-untyped-call] # torch
    SWITCHES.entered.append(context)
    return args, kwargs


def _leave(_: nn.Module, __: Any, output: Any) -> Any:
    context = SWITCHES.entered.pop() if SWITCHES.entered else None
    if context is None:
        return output
    context.__exit__(None, None, None)
    return _widened(output)


def _channels_last(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_image = value.ndim == _IMAGE_DIMS and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if is_image else value
    return rebuilt(value, _channels_last)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    return rebuilt(value, _widened)
