"""The products of a step's linear layers, timed in bfloat16 and in float8 on the device that trains.

Takes the products that a micro batch has asked for; hands on Float8Products. Each shape is timed by itself, with normal
values, as are scaling and casting its operands: what a step gains by torchao.float8 is a difference of these. Costs a
few hundredths of a second for each shape, after the window. It has not run on a GPU yet; it is tested on the CPU, where
torch has a product in float8 as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.records.diagnosis import Float8Products
from autotune.worker.setup.device import Device

__all__ = ["ProductsMode", "Shape", "has_float8", "time_products"]

Shape = tuple[int, int, int]
"""Rows, inner dimension and columns of a product."""
_LEAST_CAPABILITY = (8, 9)
"""Ada and Hopper have tensor cores for float8. Source: torch._scaled_mm, aten/src/ATen/native/cuda/Blas.cpp."""
_MULTIPLE = 16
"""Of every dimension, for torch._scaled_mm. Source: the same, and torchao.float8's module_filter_fn."""
_MOST_SHAPES = 12  # the heaviest: our own convention
_OPERANDS = {"mm": (0, 1), "addmm": (1, 2)}
"""Products of linear layers, forward and backward, and which of their arguments are the operands."""
_CAST_BYTES = 5  # of a number in bfloat16: read for the largest of all, read again, and written in float8


class ProductsMode(TorchDispatchMode):
    """Counts the products that run inside it, by shape: of linear layers, whose operands are float32 or narrower."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch
        self.shapes: Counter[Shape] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = _OPERANDS.get(func._schema.name.partition("::")[2])  # noqa: SLF001 - no public way to its name
        if operands is not None:
            left, right = (args[at] for at in operands)
            if left.is_floating_point() and left.dtype != torch.float64:
                self.shapes[left.shape[0], left.shape[1], right.shape[1]] += 1
        return func(*args, **(kwargs or {}))


def has_float8(device: Device) -> bool:
    """Whether the device computes products in float8 as torchao uses them: CUDA's, of a capability of 8.9 or more."""
    if device.kind != "cuda" or not hasattr(torch, "_scaled_mm"):
        return False
    return torch.cuda.get_device_capability(device.torch_device) >= _LEAST_CAPABILITY


def time_products(
    shapes: Mapping[Shape, int],
    device: Device,
    repeats_per_s: Callable[[Callable[[], object], Device], float],
    peak_bytes_per_s: float,
) -> Float8Products | None:
    """Time the heaviest shapes whose dimensions can all be divided by 16; None without one.

    Args:
        shapes: How often a micro batch asks for each.
        device: Where it is trained.
        repeats_per_s: Says how often a second something runs on a device.
        peak_bytes_per_s: Of a large copy, read and written bytes together.
    """
    fitting = [shape for shape in shapes if all(size % _MULTIPLE == 0 for size in shape) and min(shape) > 0]
    heaviest = sorted(fitting, key=lambda shape: -shapes[shape] * _flops(shape))[:_MOST_SHAPES]
    seconds, cast_bytes = [0.0, 0.0, 0.0], 0.0
    for shape in heaviest:
        often, (rows, inner, columns) = shapes[shape], shape
        for at, work in enumerate(_works(shape, device)):
            seconds[at] += often / repeats_per_s(work, device)
        cast_bytes += often * _CAST_BYTES * (rows * inner + inner * columns)
    if not heaviest:
        return None
    return Float8Products(
        flops=sum(shapes[shape] * _flops(shape) for shape in heaviest),
        bfloat16_s=seconds[0],
        float8_s=seconds[1],
        cast_s=seconds[2],
        moved_cast_s=cast_bytes / peak_bytes_per_s,
    )


def _works(shape: Shape, device: Device) -> tuple[Callable[[], object], ...]:
    """A product in bfloat16, the same in float8, and casting its two operands."""
    rows, inner, columns = shape
    left = torch.randn((rows, inner), dtype=torch.bfloat16, device=device.torch_device)
    right = torch.randn((columns, inner), dtype=torch.bfloat16, device=device.torch_device)
    (left8, left_scale), (right8, right_scale) = _cast(left), _cast(right)

    def in_float8() -> None:
        torch._scaled_mm(  # noqa: SLF001 - what torchao.float8 calls
            left8, right8.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16
        )

    return lambda: torch.mm(left, right.t()), in_float8, lambda: (_cast(left), _cast(right))


def _flops(shape: Shape) -> float:
    return 2.0 * shape[0] * shape[1] * shape[2]


def _cast(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values in float8, and the scale that brings them back: by their largest, as torchao's tensor-wise scaling."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = values.abs().amax().float().clamp(min=1e-12) / most
    return (values / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale
