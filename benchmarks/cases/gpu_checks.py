"""Workloads of benchmarks/gpu.py that show one thing each: a starved loop, a broken float16, ragged samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks.cases import fidelity as fidelity_cases
from benchmarks.cases.cpu import Case

__all__ = ["breaks_in_float16", "healthy", "launch_bound", "ragged", "starved"]

_FEATURES = 256
_WIDTH = 1024
_CLASSES = 10
_ITEMS = 8192
_TWICE = 1e3
_ITEM_S = 1e-4
_ITEM_FLOATS = 2048
_WIDE = 4096
_LAUNCH_BOUND_LAYERS = 18
_LENGTH = 1 << 20  # items of an epoch: longer than any run


def starved(*, is_small: bool = False, layers: int = 0, width: int = _WIDE) -> Case:
    """Items of 2,048 floats that wait 0.1 ms each, for a linear layer behind `layers` hidden ones of `width`.

    Wide layers keep the device busy with few launches: on an H200 a batch of 256 takes 0.9 ms a layer of 4,096, and
    0.22 ms a layer of 2,048, which the host can't launch much faster. `is_small` changes nothing: the case is small.
    """
    del is_small
    return Case(
        model=lambda: _layered(layers, width),
        dataset=_Waiting(),
        settings={"micro_batch_size": 32, "num_workers": 0, "lr": 0.01},
    )


def launch_bound(*, is_small: bool = False) -> Case:
    """The same items for 18 narrow layers: on an H200 the host needs 4.5 to 5.4 ms to launch 4.0 ms of kernels."""
    return replace(
        starved(layers=2 if is_small else _LAUNCH_BOUND_LAYERS, width=_ITEM_FLOATS),
        settings={"micro_batch_size": 256, "num_workers": 0, "lr": 0.01},
    )


def healthy() -> Case:
    """A plain MLP: trains alike in every precision."""
    return _case(
        lambda: nn.Sequential(nn.Linear(_FEATURES, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _CLASSES))
    )


def breaks_in_float16() -> Case:
    """The same MLP, scaled up a million times and back on its way: beyond 65,504, float16's largest number.

    The loss stays finite, since tanh of infinity is 1; the gradient below it is gone. bfloat16 has float32's range.
    """
    return _case(_Overflowing)


def ragged() -> Case:
    """Dictionaries of 8 to 256 tokens, padded to the longest of the batch."""
    return replace(fidelity_cases.ragged(), settings={"micro_batch_size": 16, "lr": 1e-3})


class _Waiting(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(_ITEM_S)
        return torch.ones(_ITEM_FLOATS), index % _CLASSES


class _Overflowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(_FEATURES, _WIDTH), nn.Linear(_WIDTH, _CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.body(features) * _TWICE * _TWICE / _TWICE**2
        return self.head(torch.tanh(hidden))  # type: ignore[no-any-return] # nn.Module's call is untyped


def _layered(layers: int, width: int) -> nn.Module:
    sizes = [_ITEM_FLOATS, *([width] * layers)]
    hidden = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(sizes)]
    return nn.Sequential(*chain.from_iterable(hidden), nn.Linear(sizes[-1], _CLASSES))


def _case(model: Callable[[], nn.Module]) -> Case:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(_ITEMS, _FEATURES, generator=generator)
    labels = (features @ torch.randn(_FEATURES, _CLASSES, generator=generator)).argmax(dim=1)
    return Case(
        model=model,
        dataset=TensorDataset(features, labels),
        settings={"micro_batch_size": 64, "lr": 0.01},
    )
