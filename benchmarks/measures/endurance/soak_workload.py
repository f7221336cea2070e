"""What the soak trains, apart from it: a trial imports the module of its workload, and nothing else of the soak."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

__all__ = ["data", "model"]


def model() -> torch.nn.Module:
    """A linear layer."""
    return torch.nn.Linear(8, 2)


def data() -> TensorDataset:
    """8,192 rows of zeros."""
    return TensorDataset(torch.zeros(8192, 8), torch.zeros(8192, dtype=torch.long))
