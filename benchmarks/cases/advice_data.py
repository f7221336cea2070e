"""Advice on padding that benchmarks/advice.py follows.

Nothing here knows how it is measured.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.cases.cpu import Case
from benchmarks.cases.followed_cases import FollowedCase
from benchmarks.cases.lengths import LENGTH_CASES, PooledByLength

__all__ = ["DATA_CASES"]

_VOCABULARY = 100
_WIDTH = 96
_LONGEST = 384
_FEW = 320
"""Sequences: a quarter of an epoch, which batches of like lengths are drawn from, is five batches of 16."""
_MEDIAN_LOG, _SPREAD_LOG = 3.7, 0.9  # of the lengths' logarithm: a median of 40 tokens
_BATCH = 16


class _Rows(Dataset[Tensor]):
    """Rows of tokens."""

    def __init__(self, rows: list[Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


class _TokenWise(nn.Module):
    """A few layers over each token by itself: no token sees another, whichever rows they share."""

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
        self.layers = nn.Sequential(
            nn.Embedding(_VOCABULARY, _WIDTH), *layers, nn.Linear(_WIDTH, _VOCABULARY)
        )

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layers(rows)
        return outputs


def _sequences() -> list[Tensor]:
    chance = random.Random(0)
    lengths = (round(chance.lognormvariate(_MEDIAN_LOG, _SPREAD_LOG)) for _ in range(_FEW))
    return [
        torch.full((min(_LONGEST, max(4, length)),), 1 + number % (_VOCABULARY - 1))
        for number, length in enumerate(lengths)
    ]


def _packed(sequences: list[Tensor]) -> list[Tensor]:
    """Rows as long as the longest sequence: each, the longest first, goes into the first row with room for it."""
    longest = max(map(len, sequences))
    rows: list[list[Tensor]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        row = next((row for row in rows if sum(map(len, row)) + len(sequence) <= longest), None)
        if row is None:
            rows.append([sequence])
        else:
            row.append(sequence)
    return [torch.cat(row) for row in rows]


def _padded(items: list[Tensor]) -> dict[str, Tensor]:
    rows = nn.utils.rnn.pad_sequence(items, batch_first=True)
    return {"input_ids": rows, "attention_mask": (rows != 0).long()}


def _masked_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of telling each token; padding, 0, counts for nothing."""
    rows = batch["input_ids"]
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten(), ignore_index=0)


def _packing() -> FollowedCase:
    sequences = _sequences()
    rows = _packed(sequences)
    per_row = len(sequences) / len(rows)
    settings = {"micro_batch_size": _BATCH, "intra_op_threads": 1}
    today = Case(
        model=_TokenWise,
        dataset=_Rows(sequences),
        step=_masked_step,
        collate_fn=_padded,
        settings=settings,
    )
    same_samples = {**settings, "micro_batch_size": max(1, round(_BATCH / per_row))}
    return FollowedCase(
        name="rows packed whole",
        kind="pack_sequences",
        today=today,
        followed=replace(today, dataset=_Rows(rows), settings=same_samples),
        samples_per_item=per_row,
        why="few sequences of many lengths: too few to sort pools of batches by, so that rows that are full win more",
    )


def _buckets() -> FollowedCase:
    today = LENGTH_CASES["varied"]()
    return FollowedCase(
        name="lengths alike in a batch",
        kind="batch_like_lengths",
        today=today,
        followed=replace(today, batch_sampler=PooledByLength),
        why="many sequences of many lengths below a small transformer, which is the bottleneck",
    )


DATA_CASES = (_packing(), _buckets())
"""The advice on padding."""
