"""A model's weights and buffers, kept aside to begin from again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["kept_weights", "put_back"]


def kept_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model).items()}


def put_back(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Put weights and buffers back in place; buffers that the model has made since are its own cache."""
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if name in kept and tensor.shape == kept[name].shape:
                tensor.copy_(kept[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
