"""Workloads of benchmarks/advice.py: jobs that are slow for one reason each, which some setting mends.

Two are those of configs/, four are made here. Nothing here knows how it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks.cases.cpu import Case
from benchmarks.cases.fidelity import photos, sleeping_vectors

__all__ = ["ADVICE_CASES"]

_FEATURES = 16
_TABLE_ROWS = 200
_TABLES = 4000
_OPERATIONS = 200
_BARRIERS = 40
_BARRIER_NUMBERS = (
    2**12
)  # times a batch of 32: torch shares such a tensor out among all its threads
_TOO_MANY_THREADS = 32
_SHORT_EPOCH = 320  # ten batches of 32


class _Tables(Dataset[tuple[Tensor, int]]):
    """A small text table an item, parsed by numpy: some ms of CPU time."""

    def __init__(self) -> None:
        table = np.random.default_rng(0).random((_TABLE_ROWS, _FEATURES))
        self._text = "\n".join(" ".join(f"{value:.4f}" for value in row) for row in table)

    def __len__(self) -> int:
        return _TABLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        table = np.loadtxt(StringIO(self._text), dtype=np.float32)
        return torch.from_numpy(table.mean(0)), index % 2


class _SmallOperations(nn.Module):
    """Multiplies sixteen numbers, over and over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_FEATURES))
        self.head = nn.Linear(_FEATURES, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(_OPERATIONS):
            inputs = inputs * self.weight + 0.001
        outputs: Tensor = self.head(inputs)
        return outputs


class _Barriers(nn.Module):
    """Operations after each of which all threads wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_BARRIER_NUMBERS))
        self.head = nn.Linear(_FEATURES, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs[:, :1] * self.weight
        for _ in range(_BARRIERS):
            wide = torch.tanh(wide)
        outputs: Tensor = self.head(inputs)
        return outputs + wide.mean(1, keepdim=True)


def _tables() -> Case:
    return Case(model=_small_net, dataset=_Tables())


def _small_operations() -> Case:
    return Case(model=_SmallOperations, dataset=_numbers(4096))


def _too_many_threads() -> Case:
    return Case(
        model=_Barriers, dataset=_numbers(4096), settings={"intra_op_threads": _TOO_MANY_THREADS}
    )


def _short_epochs() -> Case:
    return Case(
        model=_small_net,
        dataset=_numbers(_SHORT_EPOCH),
        settings={"num_workers": 1, "intra_op_threads": 1},
    )


def _photos() -> Case:
    return replace(photos(), settings={"micro_batch_size": 32})


def _sleeping_vectors() -> Case:
    return replace(sleeping_vectors(), settings={"micro_batch_size": 64})


ADVICE_CASES: Mapping[str, Callable[[], Case]] = {
    "tables": _tables,
    "photos": _photos,
    "sleeping_vectors": _sleeping_vectors,
    "short_epochs": _short_epochs,
    "small_operations": _small_operations,
    "too_many_threads": _too_many_threads,
}
"""The workloads by name; `settings` is what is run today."""


def _small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(_FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))


def _numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.zeros(length, _FEATURES), torch.zeros(length, dtype=torch.long))
