"""Models that a 16-bit precision breaks, and samples of many sizes: for the guard and the stress run.

Loaded by the ranks themselves, as a user's file is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FEATURES = 4


class Between(nn.Module):
    """Does something between two layers."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(FEATURES, 16), nn.Linear(16, 2), act

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.relu(self.act(self.first(inputs))))
        return outputs


def beyond_float16() -> nn.Module:
    """Activations of a million, which float16 does not hold."""
    return Between(lambda hidden: hidden * 1e3 * 1e3 / 1e6)


def losing_digits() -> nn.Module:
    """A difference of large numbers, which has no digit left in 16 bits."""
    return Between(lambda hidden: (hidden + 1e4) - 1e4)


def raising_under_autocast() -> nn.Module:
    def act(hidden: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("no half precision here")
        return hidden

    return Between(act)


class Texts(Dataset[Tensor]):
    """Sequences of each length from 1 to 64."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1 + index)


def texts() -> Dataset[Tensor]:
    return Texts()


def padded(items: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(items, batch_first=True)


def averaging() -> nn.Module:
    return nn.Linear(1, 1)


def averaged(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch.mean(1, keepdim=True)).mean()
    return loss


def running_out_at_64(model: nn.Module, batch: Tensor) -> Tensor:
    """Trains until the four longest sequences meet in a batch."""
    if sorted(batch.count_nonzero(1).tolist()) == [61, 62, 63, 64]:
        raise MemoryError
    return averaged(model, batch)


class Buckets:
    """Sequences of like length, as many as fit into a number of tokens; the shortest first."""

    def __init__(self, dataset: Texts, max_tokens: int) -> None:
        self.batches: list[list[int]] = [[]]
        for index in range(len(dataset)):
            if (len(self.batches[-1]) + 1) * (1 + index) > max_tokens:
                self.batches.append([])
            self.batches[-1].append(index)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def out_of_memory_in_the_largest_bucket(model: nn.Module, batch: Tensor) -> Tensor:
    """Ordinary batches fit; at 128 tokens the two longest sequences, of 63 and 64 tokens, make the largest bucket."""
    if batch.shape == (2, 64):
        raise MemoryError
    return averaged(model, batch)
