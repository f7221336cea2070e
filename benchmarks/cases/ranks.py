"""Workloads of ranks.py and measures/gpu_ranks.py: two that train in groups, and one whose rank dies.

Their data lie in memory and epochs last for seconds, so that what is measured is training and exchanging.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import Dataset

from benchmarks.cases.cpu import Case, note

__all__ = ["RATE_SETTINGS", "Death", "convnet", "dies", "mlp", "wide"]

Death = Literal["killed", "raised"]

RATE_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "accumulation 4": {"grad_accum_steps": 4},
    "fp16 hook": {"ddp": {"comm_hook": "fp16"}},
}
"""What a rate is measured with, beside a case's own settings."""

_FEATURES = 256
_HIDDEN = 512
_SIDE = 32
_CLASSES = 10
_STORED = 2048
_ITEMS = 1 << 17
_BATCHES_OF_A_LIFE = 30


def mlp() -> Case:
    """An MLP whose gradients, 1.6 MB, take a good part of a step to exchange."""
    return Case(
        model=lambda: nn.Sequential(
            nn.Linear(_FEATURES, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _CLASSES),
        ),
        dataset=_Stored((_FEATURES,)),
        settings={"micro_batch_size": 32, "lr": 0.01, "intra_op_threads": 1},
    )


def convnet() -> Case:
    """A CNN with batch norm: small gradients, and buffers that rank 0 sends before each forward pass."""
    return Case(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, _CLASSES),
        ),
        dataset=_Stored((3, _SIDE, _SIDE)),
        settings={"micro_batch_size": 16, "lr": 0.01, "intra_op_threads": 1},
    )


def dies(notes: Path, how: Death, rank: int) -> Case:
    """A small job of which one rank, in a group, notes the time and ends after some batches."""
    return Case(
        model=lambda: nn.Linear(_FEATURES, _CLASSES),
        dataset=_Stored((_FEATURES,)),
        step=_LastingStep(notes, how, rank),
        settings={"micro_batch_size": 32, "lr": 0.01, "intra_op_threads": 1},
    )


def wide(notes: Path, *, width: int) -> Case:
    """Layers of width * width weights, in batches that are sliced at once; notes the backend that gradients go over."""
    return Case(
        model=lambda: nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())),
            nn.Linear(width, _CLASSES),
        ),
        dataset=_Sliced(width),
        step=_NamingStep(notes),
        collate_fn=_as_it_is,
        settings={"micro_batch_size": 256, "lr": 0.01},
    )


class _Stored(Dataset[tuple[Tensor, int]]):
    """Random items of a shape, the stored ones over and over."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._items = torch.randn(_STORED, *shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._items[index % _STORED], index % _CLASSES


class _Sliced(Dataset[tuple[Tensor, Tensor]]):
    """Gives whole batches, so that the loader takes next to nothing. Source: torch.utils.data, __getitems__."""

    def __init__(self, width: int) -> None:
        self._items = torch.randn(_STORED, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._items[index % _STORED], torch.tensor(index % _CLASSES)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self._items[chosen % _STORED], chosen % _CLASSES


class _LastingStep:
    """Cross-entropy, until this rank's time has come."""

    def __init__(self, notes: Path, how: Death, rank: int) -> None:
        self._notes, self._how, self._rank = notes, how, rank
        self._left = _BATCHES_OF_A_LIFE

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self._left -= 1
        if (
            self._left == 0
            and distributed.is_initialized()
            and distributed.get_rank() == self._rank
        ):
            note(self._notes, "died")
            if self._how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this rank was told to fail")
        return _cross_entropy(model, batch)


class _NamingStep:
    """Cross-entropy; appends the backend's name once, where there is a group."""

    def __init__(self, notes: Path) -> None:
        self._notes, self._is_noted = notes, False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if not self._is_noted:
            self._is_noted = True
            name = distributed.get_backend() if distributed.is_initialized() else "none"
            note(self._notes, f"{type(model).__name__}/{name}")
        return _cross_entropy(model, batch)


def _cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def _as_it_is(batch: Any) -> Any:
    return batch
