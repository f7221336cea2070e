"""Precision and layout of a module are switched from outside, for training alone; nothing of them is left behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from autotune.worker.script.overrides import SWITCHES, attach_to, set_layout


class Found(NamedTuple):
    """What a model may return."""

    logits: Tensor
    others: list[dict[str, Any]]


class Net(nn.Module):
    """Notes what it computes in; returns tensors in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen = nn.Conv2d(3, 4, 1), list[tuple[torch.dtype, bool]]()

    def forward(self, x: Tensor, *, scale: Tensor | None = None, fails: bool = False) -> Found:
        inner = self.conv(x)
        self.seen.append((inner.dtype, x.is_contiguous(memory_format=torch.channels_last)))
        if fails:
            raise ValueError("no such batch")
        return Found(
            inner, [{"inner": inner, "count": torch.ones(2, dtype=torch.long), "scale": scale}]
        )


class Wide(nn.Conv2d):
    """Torch's own class is not to be changed in the tests' process."""


class Plain(nn.Module):
    """Can be scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


@pytest.fixture
def net() -> Iterator[Net]:
    """A module that follows the switches, which are off afterwards."""
    module = Net()
    attach_to(module)
    yield module
    SWITCHES.dtype, SWITCHES.channels_last = None, False
    SWITCHES.modules.clear()


X = torch.randn(2, 3, 4, 4)


def test_forward_computes_in_bfloat16_and_returns_float32(net: Net) -> None:
    SWITCHES.dtype = torch.bfloat16
    found = net(X)
    assert net.seen == [(torch.bfloat16, False)]
    assert isinstance(found, Found)
    assert (found.logits.dtype, found.others[0]["inner"].dtype) == (torch.float32, torch.float32)
    assert found.others[0]["count"].dtype == torch.long
    torch.autograd.backward(found.logits.sum())
    assert net.conv.weight.grad is not None
    assert net.conv.weight.grad.dtype == net.conv.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_off_again_as_before(net: Net) -> None:
    before = net(X).logits
    SWITCHES.dtype = torch.bfloat16
    assert not torch.equal(net(X).logits, before)
    SWITCHES.dtype = None
    assert torch.equal(net(X).logits, before)


def test_new_weights_count_at_once(net: Net) -> None:
    SWITCHES.dtype = torch.bfloat16
    first = net(X).logits
    with torch.no_grad():
        net.conv.weight.mul_(2)
        net.conv.bias.mul_(2)  # type: ignore[union-attr] # it has one
    assert torch.allclose(net(X).logits, 2 * first, rtol=0.05, atol=0.05)


def test_evaluation_and_own_autocast_are_left_alone(net: Net) -> None:
    SWITCHES.dtype = torch.bfloat16
    with torch.no_grad():
        net(X)
    net.eval()
    net(X)
    net.train()
    with torch.autocast("cpu", dtype=torch.float16):
        found = net(X)
    assert [dtype for dtype, _ in net.seen] == [torch.float32, torch.float32, torch.float16]
    assert found.logits.dtype == torch.float16


def test_raising_forward_leaves_nothing_on(net: Net) -> None:
    SWITCHES.dtype = torch.bfloat16
    with pytest.raises(ValueError, match="no such batch"):
        net(X, fails=True)
    assert not torch.is_autocast_enabled("cpu")


def test_layout_of_images_and_weights(net: Net) -> None:
    SWITCHES.channels_last = True
    set_layout(net, channels_last=True)
    net(X)
    with torch.no_grad():
        net(X)
    assert [last for _, last in net.seen] == [True, False]
    set_layout(net, channels_last=False)
    assert net.conv.weight.is_contiguous()


@pytest.mark.usefixtures("net")
def test_later_module_is_channels_last() -> None:
    SWITCHES.channels_last = True
    wide = Wide(3, 4, 3)
    attach_to(wide)
    assert wide.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("net")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_export_is_as_without_autotune() -> None:
    """A training that ends with an export must not fail there after hours."""
    model = Plain()
    expected = model(X)
    attach_to(model)
    attach_to(model)
    SWITCHES.dtype = torch.bfloat16
    assert not torch.equal(model(X), expected)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert b"autotune" not in pickle.dumps(model.state_dict())
    assert not {name for name in vars(copy.deepcopy(model)) if "autotune" in name}
    copies = [
        copy.deepcopy(model),
        torch.jit.script(model),
        torch.jit.trace(model, X),  # type: ignore[no-untyped-call]
        symbolic_trace(model),
    ]
    copies.append(torch.compile(model, backend="eager"))
    assert all(torch.equal(one.eval()(X), expected) for one in copies)
