"""A linear layer on vectors that take 0.1 ms of waiting each: the classic device that starves for data.

The wait stands for a read from a disk or a network: it uses no core, so workers beyond the number of cores help.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["SleepingVectors", "dataset", "model", "optimizer"]

FEATURES = 2048
CLASSES = 10
LENGTH = 16384
_STORED = 1024  # vectors held in memory; items repeat them
_WAIT_S = 1e-4


class SleepingVectors(Dataset[tuple[Tensor, Tensor]]):
    """Vectors (2048,) with a class that a linear layer can learn."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._vectors = torch.randn(_STORED, FEATURES, generator=generator)
        self._labels = (self._vectors @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(
            dim=1
        )

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(_WAIT_S)
        return self._vectors[index % _STORED], self._labels[index % _STORED]


def model() -> nn.Module:
    """One linear layer."""
    return nn.Linear(FEATURES, CLASSES)


def dataset() -> SleepingVectors:
    """The vectors."""
    return SleepingVectors()


def optimizer(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(params, lr=lr)
