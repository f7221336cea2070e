"""Gradients as vectors: dense and real, and the cosine between two.

Comes in: gradients, each parameter's in order. Goes out: tensors, a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

import torch
from torch import Tensor

__all__ = ["dense", "gradient_cosine"]

_CHUNK = 2**22  # elements that are widened at once: 32 MiB of float64


def gradient_cosine(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float | None:
    """Cosine between two gradients, each parameter's in order, as one vector; None where one is not finite.

    Summed in float64 on the second's device, a few million elements at a time. Two gradients of zero are equal.
    """
    total = torch.zeros(3, dtype=torch.float64)
    for ours, theirs in zip(first, second, strict=True):
        for a, b in _chunks(ours, theirs):
            total += torch.stack([a @ b, a @ a, b @ b]).to("cpu", torch.float64)
    product, *squares = total.tolist()
    if not all(map(isfinite, (product, *squares))):
        return None
    if 0 in squares:
        return 1.0 if squares[0] == squares[1] else 0.0
    return float(max(-1.0, min(1.0, product / (squares[0] * squares[1]) ** 0.5)))


def _chunks(ours: Tensor | None, theirs: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Two parameters' gradients side by side in pieces; where one has no gradient, it is zero."""
    present = theirs if theirs is not None else ours
    if present is None:
        return
    device, wide = present.device, torch.float32 if present.device.type == "mps" else torch.float64
    zero = torch.zeros((), device=device).expand(dense(present).numel())
    first, second = (zero if part is None else dense(part).reshape(-1) for part in (ours, theirs))
    for a, b in zip(torch.split(first, _CHUNK), torch.split(second, _CHUNK), strict=True):
        yield a.to(device, wide), b.to(device, wide)


def dense(gradient: Tensor) -> Tensor:
    """A gradient without its graph, sparse ones filled up, complex ones as pairs of real numbers."""
    found = gradient.detach()
    found = found.to_dense() if found.is_sparse else found
    return torch.view_as_real(found) if found.is_complex() else found
