"""A model without what accelerate and torch have put around it; the one that was given stays as it is."""

from __future__ import annotations

from copy import copy
from typing import Any

__all__ = ["plain_model"]


def plain_model(model: Any) -> Any:
    """The model without compilation, parallel wrappers and accelerate's autocast."""
    model = getattr(model, "_orig_mod", model)
    if type(model).__name__ in {"DistributedDataParallel", "DataParallel"}:
        model = model.module
    if "_original_forward" not in getattr(model, "__dict__", {}):
        return model
    plain = copy(model)  # its parameters and modules are the same objects
    forward = vars(plain).pop("_original_forward")
    vars(plain).pop("forward", None)
    if getattr(forward, "__func__", None) is not type(model).forward:
        vars(plain)["forward"] = forward
    return plain
