"""A workload that tells which process trains it, and fails as the batch's size asks. Read by trials from this file."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

FEATURES = 4
CRASHES, HANGS, DIES = 5, 6, 7
"""Samples of a batch at which a forward pass does so."""


class Telling(nn.Module):
    """A linear layer with a buffer that counts passes."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)
        self.convolution = nn.Conv2d(2, 2, 2, bias=False)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.passes == 0:
            bias, strides = float(self.layer.bias.detach().sum()), self.convolution.weight.stride()
            _tell(f"{os.getpid()} {len(inputs)} {bias:.6f} {float(inputs.sum()):.6f} {strides}")
        self.passes += 1
        if len(inputs) == CRASHES:
            raise ArithmeticError("five is too many")
        if len(inputs) == HANGS:
            time.sleep(60)
        if len(inputs) == DIES:
            os._exit(9)
        outputs: Tensor = self.layer(inputs)
        return outputs + 0 * self.convolution.weight.sum()


def telling() -> nn.Module:
    """Notes each build."""
    _tell("built")
    sys.stdout.write("built\n")
    return Telling()


class ReadOnce(IterableDataset[tuple[Tensor, int]]):
    """Gives its items to the first who asks."""

    def __init__(self) -> None:
        self._is_read = False

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        if not self._is_read:
            self._is_read = True
            for _ in range(100_000):
                yield torch.zeros(FEATURES), 1


def read_once() -> ReadOnce:
    return ReadOnce()


class DyingLater(Dataset[tuple[Tensor, int]]):
    """Its worker is killed once a file is there."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index % 7 == 0 and get_worker_info() is not None and Path("now").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(FEATURES), index % 2


class StallingLater(Dataset[tuple[Tensor, int]]):
    """Hangs once a file is there."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if Path("now").exists():
            time.sleep(60)
        return torch.zeros(FEATURES), index % 2


def stalling_later() -> StallingLater:
    return StallingLater()


def dying_later() -> DyingLater:
    return DyingLater()


def _tell(line: str) -> None:
    with Path("told").open("a") as file:
        file.write(f"{line}\n")
