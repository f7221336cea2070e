"""Which of torch's algorithms a training may use: whether modules convolve, and whether runs are to be alike.

Comes in: modules, and what the user's code has asked torch for. Goes out: facts of the workload.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["has_convolutions", "is_deterministic"]


def has_convolutions(modules: Iterable[nn.Module]) -> bool:
    """Whether there are modules that convolve among these and all within; functions that do are not seen."""
    return any(isinstance(part, _ConvNd) for module in modules for part in module.modules())


def is_deterministic() -> bool:
    """Whether this process is to compute alike in each run, as far as the user's code has asked torch for it."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
