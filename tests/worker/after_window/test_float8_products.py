"""Products of linear layers in float8: which are counted, and that their times are those of a micro batch.

They are timed on the CPU, whose torch multiplies in float8 as well; a GPU has not been seen yet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autotune.worker.after_window import float8_products
from autotune.worker.after_window.float8_products import ProductsMode, Shape, has_float8, time_products
from autotune.worker.setup.device import Device, open_device

CUDA = Device(torch.device("cuda:0"), "cuda")


def ten_a_second(work: Callable[[], object], _: Device) -> float:
    """It is run once, and taken to need a tenth of a second."""
    work()
    return 10.0


@pytest.mark.parametrize("rank", [2, 3])
def test_the_products_of_a_linear_layer_are_counted_forward_and_backward(rank: int) -> None:
    layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 48, bias=False))
    inputs = torch.randn((64, 16) if rank == 2 else (4, 16, 16))
    with ProductsMode() as mode:
        layers(inputs).sum().backward()
    assert mode.shapes == {
        (64, 16, 32): 1,
        (64, 32, 48): 1,
        (48, 64, 32): 1,  # the second layer's weight
        (64, 48, 32): 1,  # its inputs
        (32, 64, 16): 1,  # the first layer's weight
    }


def test_products_between_activations_and_in_float64_are_none_of_them() -> None:
    with ProductsMode() as mode:
        torch.bmm(torch.randn(2, 16, 16), torch.randn(2, 16, 16))
        torch.mm(torch.randn(16, 16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64))
        torch.mm(torch.ones(16, 16, dtype=torch.long), torch.ones(16, 16, dtype=torch.long))
    assert not mode.shapes


def test_each_shape_is_timed_as_often_as_a_batch_asks_for_it() -> None:
    shapes: dict[Shape, int] = {(32, 64, 16): 3, (16, 16, 16): 2}
    found = time_products(shapes, open_device("cpu"), ten_a_second, 1e9)
    assert found is not None
    assert found.flops == 2 * (3 * 32 * 64 * 16 + 2 * 16**3)
    assert [found.bfloat16_s, found.float8_s, found.cast_s] == pytest.approx([0.5] * 3)
    assert found.moved_cast_s == pytest.approx(5 * (3 * (32 * 64 + 64 * 16) + 2 * 2 * 16**2) / 1e9)


def test_shapes_that_float8_cannot_have_are_left_out() -> None:
    odd: dict[Shape, int] = {(32, 64, 10): 5, (33, 64, 16): 5, (0, 16, 16): 1}
    assert time_products(odd, open_device("cpu"), ten_a_second, 1e9) is None
    found = time_products({**odd, (16, 16, 16): 1}, open_device("cpu"), ten_a_second, 1e9)
    assert found is not None
    assert found.flops == 2 * 16**3


def test_of_many_shapes_the_heaviest_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_products, "_MOST_SHAPES", 1)
    found = time_products({(16, 16, 16): 7, (32, 32, 32): 1}, open_device("cpu"), ten_a_second, 1e9)
    assert found is not None
    assert found.flops == 2 * 32**3, "8 of 16 cubed outweigh 7"


def test_a_product_in_float8_is_nearly_that_in_bfloat16() -> None:
    left, right = torch.randn(32, 64), torch.randn(16, 64)
    (left8, left_scale), (right8, right_scale) = (float8_products._cast(each) for each in (left, right))
    found = torch._scaled_mm(left8, right8.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16)
    exact = left @ right.t()
    assert (found.float() - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_gpus_from_ada_on_have_float8(capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert has_float8(CUDA) is has


def test_other_devices_are_not_asked() -> None:
    assert not has_float8(open_device("cpu"))
    assert not has_float8(Device(torch.device("cuda:0"), "rocm"))
