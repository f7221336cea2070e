"""Workloads of benchmarks/lengths.py: sequences of many lengths, and of one, that a small transformer is trained on.

Nothing here knows how it is measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.cases.cpu import Case

__all__ = ["LENGTH_CASES", "PooledByLength"]

_VOCABULARY = 100
_WIDTH = 64
_ROWS = 6000
_LONGEST = 384
_MEDIAN_LOG, _SPREAD_LOG = 3.7, 0.9  # of the lengths' logarithm: a median of 40 tokens
_EQUAL = 64
_SLOW_ITEM_S = 8e-3  # many times what training the lighter model takes
_POOL_BATCHES = 50


class _Sequences(Dataset[Tensor]):
    """Rows of tokens."""

    def __init__(self, lengths: list[int], item_s: float = 0.0) -> None:
        self.lengths, self._item_s = lengths, item_s

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        if self._item_s:
            time.sleep(self._item_s)
        return torch.full((self.lengths[index],), 1 + index % (_VOCABULARY - 1))


class PooledByLength:
    """Batches of like lengths: pools of 50 batches drawn at random, each sorted, its batches in random order."""

    def __init__(self, dataset: _Sequences, batch_size: int) -> None:
        self._lengths, self._size = dataset.lengths, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(len(self._lengths)), len(self._lengths))
        pool = _POOL_BATCHES * self._size
        for begin in range(0, len(order), pool):
            rows = sorted(order[begin : begin + pool], key=self._lengths.__getitem__)
            batches = [rows[at : at + self._size] for at in range(0, len(rows), self._size)]
            yield from random.sample(batches, len(batches))

    def __len__(self) -> int:
        return ceil(len(self._lengths) / self._size)


class _Transformer(nn.Module):
    """Two layers of attention over each row."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layers(self.embedding(rows)))
        return outputs


class _Light(nn.Module):
    """A layer over each token: little beside a slow loader."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(_VOCABULARY, 8), nn.Linear(8, _VOCABULARY))

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layers(rows)
        return outputs


def _padded(items: list[Tensor]) -> dict[str, Tensor]:
    rows = nn.utils.rnn.pad_sequence(items, batch_first=True)
    return {"input_ids": rows, "attention_mask": (rows != 0).long()}


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    rows = batch["input_ids"]
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten(), ignore_index=0)


def _case(lengths: list[int]) -> Case:
    return Case(
        model=_Transformer,
        dataset=_Sequences(lengths),
        step=_step,
        collate_fn=_padded,
        settings={"micro_batch_size": 16, "intra_op_threads": 1},
    )


def _varied() -> list[int]:
    chance = random.Random(0)
    return [
        min(_LONGEST, max(4, round(chance.lognormvariate(_MEDIAN_LOG, _SPREAD_LOG))))
        for _ in range(_ROWS)
    ]


def _slow_loader() -> Case:
    case = _case(_varied())
    settings = {**case.settings, "num_workers": 2}
    return replace(
        case, model=_Light, dataset=_Sequences(_varied(), _SLOW_ITEM_S), settings=settings
    )


LENGTH_CASES: Mapping[str, Callable[[], Case]] = {
    "varied": lambda: _case(_varied()),
    "equal": lambda: _case([_EQUAL] * _ROWS),
    "varied, slow loader": _slow_loader,
}
"""By name: the device is the bottleneck and lengths vary; lengths are equal; the loader is the bottleneck."""
