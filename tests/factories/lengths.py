"""Sequences of many lengths, batch samplers that put alike ones together, and what was timed of batches by length."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from autotune.records.measurement import LengthStep

VOCABULARY = 50
LENGTHS = [random.Random(number).choice([8, 16, 32, 64]) for number in range(600)]
WIDTHS = (8, 16, 24, 32, 48, 64)
"""To which batches of such items are padded, when they are timed."""


class Sequences(Dataset[Tensor]):
    """Rows of tokens, each as long as its entry in `lengths`."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.lengths[index],), 1 + index % (VOCABULARY - 1))


def padded_rows(items: list[Tensor]) -> dict[str, Tensor]:
    """Rows of one length, padded with zeros."""
    return {"input_ids": nn.utils.rnn.pad_sequence(items, batch_first=True)}


def rows_with_mask(items: list[Tensor]) -> dict[str, Tensor]:
    """Return the same with a mask of the tokens that are no padding."""
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(item) for item in items], batch_first=True)
    return padded_rows(items) | {"attention_mask": mask}


class Tagger(nn.Module):
    """A layer over each token: its time goes with the padded tokens."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.relu(self.embedding(input_ids)))
        return outputs


def tagging_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of telling each token by itself, padding included."""
    tokens = batch["input_ids"]
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class ByLength:
    """Batches of so many rows of like length, in random order."""

    def __init__(self, dataset: Sequences, batch_size: int) -> None:
        order = sorted(range(len(dataset)), key=dataset.lengths.__getitem__)
        whole = len(order) - len(order) % batch_size
        self.batches = [order[at : at + batch_size] for at in range(0, whole, batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))

    def __len__(self) -> int:
        return len(self.batches)


class ByBudget:
    """Batches of rows of like length, as many as fit into a number of tokens as padded, in random order."""

    def __init__(self, dataset: Sequences, max_tokens: int) -> None:
        self.batches: list[list[int]] = []
        for index in sorted(range(len(dataset)), key=dataset.lengths.__getitem__):
            longest = dataset.lengths[index]  # they come in order
            if self.batches and (len(self.batches[-1]) + 1) * longest <= max_tokens:
                self.batches[-1].append(index)
            else:
                self.batches.append([index])

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))

    def __len__(self) -> int:
        return len(self.batches)


def timed_widths(
    seconds: Callable[[float], float], widths: Sequence[int] = WIDTHS, relative_sd: float = 0.0
) -> list[LengthStep]:
    """Batches of each width, with the seconds that a function gives them."""
    return [
        LengthStep(longest=width, padded=width, seconds=seconds(width), relative_sd=relative_sd)
        for width in widths
    ]


def longest_of_batches(lengths: Sequence[int], size: int = 32, batches: int = 400) -> list[int]:
    """Return the longest item of each of some random batches."""
    chance = random.Random(0)
    return [max(chance.choices(lengths, k=size)) for _ in range(batches)]
