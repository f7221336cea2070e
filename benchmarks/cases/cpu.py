"""Workloads of the CPU benchmarks, and the Case that all benchmarks describe a workload by.

The product trains a Case through `autotune.search`, the plain loop through a loop of its own, both from this one
description. Nothing here knows how it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

__all__ = ["Case", "heavy_tail", "note", "nothing_to_do", "queue_trap"]

_FEATURES = 16
_CLASSES = 10
_ITEM_S = 1e-3
_STALL_S = 3.0
_RARE_EVERY = 64
_RARE_S = 40e-3
_USUAL_S = 0.2e-3
_LONGER_THAN_ANY_RUN = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training job, as a user would describe it."""

    model: Callable[[], nn.Module]
    dataset: Any
    optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer] | None = None
    step: Callable[[nn.Module, Any], Tensor] | None = None
    """step(model, batch) -> loss; None: what the batch's form suggests."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    batch_sampler: Callable[[Any, int], Iterable[list[int]]] | None = None
    """batch_sampler(dataset, batch_size) -> lists of indices; None: the loader's own batches."""
    shuffle: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What is run "today", under TrainingConfig's names."""


def queue_trap(*, stall_s: float = _STALL_S) -> Case:
    """Items of 1 ms, and a first step that stalls while the workers fill their queue."""
    return Case(
        model=lambda: _StallsOnce(stall_s),
        dataset=_SleepingItems(),
        settings={"micro_batch_size": 32, "num_workers": 2, "prefetch_factor": 8},
    )


def heavy_tail() -> Case:
    """An unshuffled stream in which every 64th item of each worker takes 40 ms, the others 0.2 ms."""
    return Case(
        model=_linear,
        dataset=_HeavyTailStream(),
        shuffle=False,
        settings={"micro_batch_size": 16, "num_workers": 2, "prefetch_factor": 2},
    )


def nothing_to_do(notes: Path) -> Case:
    """A job whose build and loading take next to nothing; it notes when its first batch and first step come."""
    return Case(
        model=_linear,
        dataset=_StoredItems(),
        step=_NotingStep(notes),
        collate_fn=_NotingCollate(notes),
        settings={"micro_batch_size": 256},
    )


def note(notes: Path, what: str) -> None:
    """Append what has happened and when, by the clock that all processes of a Linux machine share."""
    with notes.open("a") as file:
        file.write(f"{what} {time.monotonic()!r}\n")


class _StallsOnce(nn.Module):
    def __init__(self, stall_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(_FEATURES, _CLASSES)
        self._stall_s = stall_s

    def forward(self, features: Tensor) -> Tensor:
        if self._stall_s:
            time.sleep(self._stall_s)
            self._stall_s = 0.0
        return self.linear(features)  # type: ignore[no-any-return] # nn.Module's call is untyped


class _SleepingItems(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return _LONGER_THAN_ANY_RUN

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(_ITEM_S)
        return torch.zeros(_FEATURES), index % _CLASSES


class _HeavyTailStream(IterableDataset[tuple[Tensor, int]]):
    """Shared out among workers by stride, as torch's documentation advises."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for own, index in enumerate(range(first, _LONGER_THAN_ANY_RUN, stride), start=1):
            time.sleep(_RARE_S if own % _RARE_EVERY == 0 else _USUAL_S)
            yield torch.zeros(_FEATURES), index % _CLASSES


class _StoredItems(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self._features = torch.zeros(4096, _FEATURES)

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._features[index], index % _CLASSES


class _NotingCollate:
    def __init__(self, notes: Path) -> None:
        self._notes, self._is_noted = notes, False

    def __call__(self, items: list[Any]) -> Any:
        batch = default_collate(items)
        if not self._is_noted:
            self._is_noted = True
            note(self._notes, "first_batch")
        return batch


class _NotingStep:
    def __init__(self, notes: Path) -> None:
        self._notes, self._is_noted = notes, False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if not self._is_noted:
            self._is_noted = True
            note(self._notes, "first_step")
        features, labels = batch
        return nn.functional.cross_entropy(model(features), labels)


def _linear() -> nn.Module:
    return nn.Linear(_FEATURES, _CLASSES)
