"""Tensors that say that they lie on CUDA devices, on a machine that has none.

torch's FakeTensorMode knows shapes, dtypes and devices of results, and computes nothing. Autograd asks a device for its
stream, so that nothing here can go backward; a device needs its index, or torch asks which one is current.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.worker.device import Device

CUDA = Device(torch.device("cuda:0"), "cuda")


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Two devices that can compute in bfloat16; what torch asks of them beside tensors is answered for them."""
    patch = pytest.MonkeyPatch()
    with patch.context() as patched, FakeTensorMode() as mode:
        patched.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patched.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        asked = {
            "is_available": lambda: True,
            "current_accelerator": lambda *_: torch.device("cuda"),
            "current_stream": lambda *_: nullcontext(),
            "device_index": lambda *_: nullcontext(),
        }
        for name, answer in asked.items():
            patched.setattr(torch.accelerator, name, answer)
        yield mode


def on_device(model: nn.Module, index: int = 0) -> nn.Module:
    """The model with its weights on a device, in their layout; call it within `fake_cuda`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                place = f"cuda:{index}"
                fake = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=place
                )
                module._parameters[name] = nn.Parameter(fake, requires_grad=False)
    return model


class Seen(Exception):  # noqa: N818 - no error
    """A forward pass is over: what it has given."""

    def __init__(self, **found: Any) -> None:
        super().__init__()
        self.found = SimpleNamespace(**found)


def forward_alone(model: nn.Module, batch: Any) -> Tensor:
    """A user's step that ends before its backward pass, with all that it was given and has computed."""
    raise Seen(batch=batch, outputs=model(batch[0]))
