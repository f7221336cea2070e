"""Cases of the loader's settings beyond the number of workers: one where each wins, and one where it does nothing.

Nothing here knows how it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.cases.cpu import Case
from benchmarks.cases.settings import SettingCase

__all__ = [
    "LOADER_SETTING_CASES",
    "in_order_nothing",
    "in_order_wins",
    "worker_threads_nothing",
    "worker_threads_wins",
]

_ITEMS = 100_000
_RARE_EVERY, _RARE_S = 64, 0.25
_USUAL_S = 0.001
_EVEN_S = _USUAL_S + _RARE_S / _RARE_EVERY
_SIDE = 384
"""Of the matrices that an item multiplies: large enough for BLAS to start its threads."""
_FETCH_S = 0.003
"""That such an item waits for its data: workers pay, so that their threads matter."""
_LENGTH = 200_000
"""Numbers that an item sorts, which NumPy does in one thread."""


class _Items(Dataset[tuple[Tensor, int]]):
    """Items that cost what a function of their index costs."""

    def __init__(self, work: Callable[[int], object]) -> None:
        self._work = work

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._work(index)
        return torch.zeros(16), index % 2


def _waits(index: int, *, rare_s: float, usual_s: float) -> None:
    time.sleep(rare_s if index % _RARE_EVERY == 0 else usual_s)


def _multiplies(_index: int, *, values: Any) -> Any:
    time.sleep(_FETCH_S)
    return values @ values


def _sorts(_index: int, *, values: Any) -> Any:
    return np.sort(values)


def _model() -> nn.Module:
    return nn.Linear(16, 2)


def _case(work: Callable[[int], object], workers: int, batch: int) -> Case:
    settings = {
        "micro_batch_size": batch,
        "num_workers": workers,
        "prefetch_factor": 2,
        "persistent_workers": True,
        "intra_op_threads": 1,
    }
    return Case(model=_model, dataset=_Items(work), settings=settings)


def in_order_wins() -> SettingCase:
    """Every 64th item waits 250 ms, the others 1 ms, in four workers: in order, each of the waits stops all four."""
    return SettingCase(
        case=_case(partial(_waits, rare_s=_RARE_S, usual_s=_USUAL_S), workers=4, batch=8),
        setting="in_order",
        value=False,
        expects="wins",
        where="here",
        why="in order, the workers that are done wait for the one whose batch has a slow item",
    )


def in_order_nothing() -> SettingCase:
    """The same time in all, of items that are alike."""
    return SettingCase(
        case=_case(partial(_waits, rare_s=_EVEN_S, usual_s=_EVEN_S), workers=4, batch=8),
        setting="in_order",
        value=False,
        expects="nothing",
        where="here",
        why="workers whose items take equally long finish in order by themselves",
    )


def worker_threads_wins() -> SettingCase:
    """Items wait for their data and then multiply matrices in all of BLAS's threads, in two workers."""
    values = np.ones((_SIDE, _SIDE), dtype=np.float32)
    return SettingCase(
        case=_case(partial(_multiplies, values=values), workers=2, batch=8),
        setting="worker_threads",
        value=1,
        expects="wins",
        where="here",
        why="the threads of two workers take each other's cores, and those that wait spin",
    )


def worker_threads_nothing() -> SettingCase:
    """Items sort numbers in one thread."""
    values = np.random.default_rng(0).random(_LENGTH)
    return SettingCase(
        case=_case(partial(_sorts, values=values), workers=2, batch=8),
        setting="worker_threads",
        value=1,
        expects="nothing",
        where="here",
        why="an item that runs in one thread has no others to limit",
    )


LOADER_SETTING_CASES = (
    in_order_wins(),
    in_order_nothing(),
    worker_threads_wins(),
    worker_threads_nothing(),
)
"""Of the settings that only loader workers use."""
