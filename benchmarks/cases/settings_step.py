"""Cases of the settings of a step: a fused optimizer, cuDNN's benchmark and the mode of torch.compile.

The optimizer's run on the usual machine; the others need a GPU, and are on paper.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.cases.cpu import Case
from benchmarks.cases.settings import SettingCase

__all__ = ["STEP_SETTING_CASES", "one_product", "small_tensors"]

_TENSORS = 400
_FEATURES = 64
_WIDE = 1024
_ITEMS = 8192
_ONE_THREAD = {"intra_op_threads": 1}
"""Two threads beside other programs may cost such small steps many times their time."""


class _InPieces(nn.Module):
    """A layer whose weight is kept in hundreds of pieces, as tables of many small features are."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.randn(_FEATURES) / _FEATURES for _ in range(_TENSORS))

    def forward(self, features: Tensor) -> Tensor:
        return features @ torch.stack([*self.pieces]).T


def small_tensors() -> Case:
    """Adam over hundreds of small tensors, each of which costs it a dozen operations where it is not fused."""
    features, labels = torch.randn(_ITEMS, _FEATURES), torch.randint(0, _TENSORS, (_ITEMS,))
    settings = {"micro_batch_size": 64, **_ONE_THREAD}
    return Case(
        model=_InPieces, dataset=TensorDataset(features, labels), optimizer=_adam, settings=settings
    )


def one_product() -> Case:
    """Plain SGD on one large matrix product, beside which the step of its two tensors costs next to nothing."""
    features = torch.randn(_ITEMS // 4, _WIDE)
    return Case(
        model=_wide_layer,
        dataset=TensorDataset(features, torch.randint(0, _WIDE, (len(features),))),
        settings={"micro_batch_size": 512, **_ONE_THREAD},
    )


def _adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr)


def _wide_layer() -> nn.Module:
    return nn.Linear(_WIDE, _WIDE)


STEP_SETTING_CASES = (
    SettingCase(
        case=small_tensors(),
        setting="fused",
        value=True,
        expects="wins",
        where="here",
        why="Adam's loop over hundreds of small tensors costs more than the step's arithmetic; fused it is one kernel",
    ),
    SettingCase(
        case=one_product(),
        setting="fused",
        value=True,
        expects="nothing",
        where="here",
        why="SGD over two tensors takes a few operations, fused or not, beside a product that takes all of the time",
    ),
    SettingCase(
        case=None,
        setting="cudnn_benchmark",
        value=True,
        expects="wins",
        where="paper",
        why="For convolutions of fixed shapes an algorithm that was timed may beat the one that cuDNN's rules choose",
    ),
    SettingCase(
        case=None,
        setting="cudnn_benchmark",
        value=True,
        expects="nothing",
        where="paper",
        why="Where cuDNN's rules choose the fastest algorithm already, timing it finds the same",
    ),
    SettingCase(
        case=None,
        setting="compile_mode",
        value="reduce-overhead",
        expects="wins",
        where="paper",
        why="Where launching kernels is what takes the time, a recorded graph launches all of them at once",
    ),
    SettingCase(
        case=None,
        setting="compile_mode",
        value="reduce-overhead",
        expects="loses",
        where="paper",
        why="Where kernels are long, copying batches into a graph's memory and gradients out of it is all that changes",
    ),
)
