"""A watched forward pass holds nothing of what it has made once that is out of reach, backward pass or not."""

from __future__ import annotations

import gc
import weakref
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.config.training_config import TrainingConfig
from autotune.worker.batch import Held
from autotune.worker.device import open_device
from autotune.worker.extras.activations import measure_activations
from autotune.worker.step import Step, make_trainer

SAMPLES, WIDTH = 16, 8


class Headed(nn.Module):
    """Blocks, and a head whose output, which softmax keeps, is never used; fails on half of the batch if it is to."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        )
        self.fails, self.seen = fails, list[weakref.ref[Tensor]]()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(inputs)
        unused = torch.softmax(hidden, 1)
        self.seen.append(weakref.ref(unused))
        if self.fails and len(inputs) < SAMPLES:
            raise ValueError("expected a whole batch")
        return hidden


def summed(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(*batch).sum()
    return outputs


def penalised(model: nn.Module, batch: Any) -> Tensor:
    """A loss on gradients, for which what was kept has to lead on to what it was made of."""
    inputs = batch[0].requires_grad_()
    loss = model(inputs).square().sum()
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    total: Tensor = loss + slope.square().sum()
    return total


def measure(model: nn.Module, step: Any = summed) -> Any:
    config, optimizer = (
        TrainingConfig(micro_batch_size=SAMPLES),
        torch.optim.SGD(model.parameters(), lr=1e-2),
    )
    trainer = make_trainer(model, optimizer, Step(step, "given"), config, open_device("cpu"))
    held = Held((torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0)),), SAMPLES)
    return measure_activations(trainer, [held], seconds=0.0, ends_at=perf_counter() + 60)


@pytest.mark.parametrize("fails", [False, True], ids=["never used", "the half batch fails"])
def test_an_output_that_no_backward_pass_frees_is_gone_with_its_last_reader(fails: bool) -> None:
    model = Headed(fails=fails)
    gc.disable()  # a cycle would wait for it; on a device the timed steps would not have its memory
    try:
        found = measure(model)
        alive = [one for one in model.seen if one() is not None]
    finally:
        gc.enable()
    assert (found.half is None) is fails
    assert model.seen
    assert not alive


def test_a_loss_on_gradients_learns_the_same_as_without_a_watch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    before = [one.detach().clone() for one in model.parameters()]
    assert measure(model, penalised).whole.total_bytes > 0
    after = [one.detach().clone() for one in model.parameters()]
    for one, old in zip(model.parameters(), before, strict=True):
        one.data.copy_(old)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    for inputs in (batch, batch[: SAMPLES // 2], batch, batch[: SAMPLES // 2]):
        optimizer.zero_grad()
        torch.autograd.backward(penalised(model, (inputs.clone(),)))
        optimizer.step()
    for one, watched in zip(model.parameters(), after, strict=True):
        assert torch.allclose(one, watched)
