"""A batch's way to the device: tensors, containers of them, and objects that move themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["IMAGE_DIMS", "moved", "rebuilt"]

IMAGE_DIMS = 4
"""Dimensions of a batch of images, batch, channels, height, width: what torch.channels_last is defined for."""


def moved(value: Any, device: torch.device, *, channels_last: bool, non_blocking: bool) -> Any:
    """A batch on the device, its 4-D tensors in channels-last layout where asked; of any type.

    An object with a method `to` is asked to move itself, before any other rule: its class knows best. One that returns
    nothing has moved in place. Source: accelerate.utils.send_to_device and lightning's move_data_to_device, which both
    do so.
    """
    if isinstance(value, Tensor):
        if channels_last and value.ndim == IMAGE_DIMS:
            return value.to(device, non_blocking=non_blocking, memory_format=torch.channels_last)
        return value.to(device, non_blocking=non_blocking)
    move = getattr(value, "to", None)
    if not callable(move):
        return rebuilt(value, lambda part: moved(part, device, channels_last=channels_last, non_blocking=non_blocking))
    own = _move_without_blocking(move, device) if non_blocking else move(device)
    return value if own is None else own


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same type whose parts are changed; anything else as it is.

    Source: torch/utils/data/_utils/pin_memory.py, whose rules for mappings these are.
    """
    if isinstance(value, Mapping):
        return _like(value, {key: change(part) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if isinstance(value, tuple | list):
        return type(value)(map(change, value))
    if is_dataclass(value) and not isinstance(value, type):
        own = copy(value)
        for field in fields(value):
            object.__setattr__(own, field.name, change(getattr(value, field.name)))  # a frozen one's too
        return own
    return value


def _like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type with other values; a dict where its type can't be made so."""
    if type(value) is dict:
        return parts
    try:
        if not isinstance(value, MutableMapping):
            return type(value)(parts)  # type: ignore[call-arg] # a mapping's type usually takes one
        own = copy(value)  # it may have attributes beside its items
        for key, part in parts.items():
            own[key] = part  # transformers' ModelOutput refuses `update`
    except Exception:  # noqa: BLE001 - a type of the user's may raise anything
        return parts
    return own


def _move_without_blocking(move: Callable[..., Any], device: torch.device) -> Any:
    try:
        return move(device, non_blocking=True)
    except TypeError:  # a method without that argument
        return move(device)
