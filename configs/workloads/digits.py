"""A small MLP on scikit-learn's handwritten digits, all in memory: so quick to load that workers may only cost."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

__all__ = ["dataset", "loss", "model"]

PIXELS = 64
CLASSES = 10
_HIDDEN = 256
_BRIGHTEST = 16.0


def model() -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(PIXELS, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, CLASSES),
    )


def dataset() -> TensorDataset:
    """1797 images of 8 by 8 pixels, as (64,) floats in 0..1 with the digit."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "this example takes its digits from scikit-learn: pip install 'autotune-torch[examples]'"
        ) from error
    images, digits = load_digits(return_X_y=True)
    return TensorDataset(
        torch.from_numpy(images).float() / _BRIGHTEST, torch.from_numpy(digits).long()
    )


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with a little label smoothing."""
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)
