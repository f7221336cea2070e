"""What a model keeps for its backward pass, against bytes calculated by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import count
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.config.training_config import TrainingConfig
from autotune.records.measurement import Activations, SavedBytes
from autotune.worker.batch import Held
from autotune.worker.device import open_device
from autotune.worker.extras.activations import measure_activations
from autotune.worker.step import Step, Trainer, make_trainer

SAMPLES, WIDTH, INNER = 16, 8, 32
INPUT = SAMPLES * WIDTH * 4
"""Bytes of a block's input."""
HIDDEN = SAMPLES * INNER * 4
"""Bytes of what tanh returns, which it and the product behind it keep: one storage."""


class Block(nn.Module):
    """A residual block: keeps its input and what tanh returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.second(torch.tanh(self.first(inputs)))
        return outputs


def summed(model: nn.Module, batch: Any) -> Tensor:
    """A loss that keeps nothing."""
    outputs: Tensor = model(*batch).sum()
    return outputs


def trainer_of(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor] = summed,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.SGD,
    **settings: Any,
) -> Trainer:
    config = TrainingConfig(micro_batch_size=SAMPLES, **settings)
    return make_trainer(
        model, optimizer(model.parameters()), Step(step, "given"), config, open_device("cpu")
    )


def held_of(samples: int = SAMPLES) -> Held:
    return Held((torch.randn(samples, WIDTH),), samples)


def measure(trainer: Trainer, *held: Held, seconds: float = 0.0, left_s: float = 60) -> Activations:
    ends_at = perf_counter() + left_s
    return measure_activations(trainer, held or [held_of()], seconds=seconds, ends_at=ends_at)


def kept_by(model: nn.Module, samples: int = SAMPLES, **given: Any) -> Activations:
    return measure(trainer_of(model, **given), held_of(samples))


def blocks(number: int) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)))


class Model(nn.Module):
    """Some blocks, and a forward pass of the caller's."""

    def __init__(self, number: int, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.own_forward = blocks(number), forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self.own_forward(self, inputs)


def test_each_storage_counts_once_and_parameters_not_at_all() -> None:
    found = kept_by(blocks(3))
    assert (found.block, found.blocks) == ("Block", 3)
    assert found.whole == SavedBytes(
        samples=SAMPLES,
        total_bytes=3 * (INPUT + HIDDEN),
        inside_bytes=3 * (INPUT + HIDDEN),
        inputs_bytes=3 * INPUT,
        largest_bytes=HIDDEN,
    )
    assert (found.whole.least_saved_bytes, found.whole.most_saved_bytes) == (2 * HIDDEN, 3 * HIDDEN)


def test_half_of_the_batch_keeps_half() -> None:
    found = kept_by(blocks(3))
    assert found.half is not None
    assert found.half.samples == SAMPLES // 2
    assert found.half.total_bytes == found.whole.total_bytes / 2
    assert found.bytes_per_sample == 3 * (INPUT + HIDDEN) / SAMPLES
    assert found.least_saved_bytes(4 * SAMPLES) == 4 * 2 * HIDDEN


def test_what_is_kept_outside_of_the_blocks_stays() -> None:
    body = blocks(2)
    found = kept_by(nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 1)))
    assert found.block == "Block"
    assert found.whole.total_bytes == 4 * INPUT + 2 * HIDDEN, "the inputs of both layers, too"
    assert found.whole.inside_bytes == 2 * (INPUT + HIDDEN)


def test_an_input_that_something_outside_keeps_is_not_saved_nor_left_twice() -> None:
    def forward(model: Model, inputs: Tensor) -> Tensor:
        first = model.blocks[0](inputs)
        outputs: Tensor = first.square() + model.blocks[1](first)
        return outputs

    found = kept_by(Model(2, forward)).whole
    assert found.total_bytes == 2 * (INPUT + HIDDEN)
    assert found.inside_bytes == INPUT + 2 * HIDDEN
    assert found.inputs_bytes == INPUT


def test_a_block_that_is_called_twice_is_two_blocks() -> None:
    def forward(model: Model, inputs: Tensor) -> Tensor:
        outputs: Tensor = model.blocks(model.blocks(inputs))
        return outputs

    found = kept_by(Model(2, forward))
    assert found.blocks == 4
    assert found.whole.largest_bytes == HIDDEN


def test_of_blocks_within_blocks_those_are_taken_by_which_least_is_left() -> None:
    def stage() -> nn.Module:
        return Model(4, lambda model, inputs: model.blocks(inputs))

    found = kept_by(nn.Sequential(stage(), stage()))
    by_stage, by_block = 2 * INPUT + 4 * HIDDEN + 3 * INPUT, 8 * INPUT + HIDDEN
    assert by_block < by_stage
    assert (found.block, found.blocks) == ("Block", 8)


@pytest.mark.parametrize(
    "model", [nn.Sequential(Block(), nn.Linear(WIDTH, 1)), nn.Linear(WIDTH, 1)]
)
def test_without_repeated_blocks_there_is_nothing_to_checkpoint(model: nn.Module) -> None:
    found = kept_by(model)
    assert (found.block, found.blocks, found.forward) == (None, 0, None)
    assert found.whole.total_bytes > 0
    assert found.least_saved_bytes(SAMPLES) == 0


def test_layers_that_keep_nothing_but_their_input_save_nothing() -> None:
    assert kept_by(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))).block is None


def test_blocks_that_are_checkpointed_already_save_nothing_more() -> None:
    def forward(model: Model, inputs: Tensor) -> Tensor:
        for block in model.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=False)
        return inputs

    assert kept_by(Model(3, forward)).block is None


def test_weights_that_autocast_converts_do_not_grow_with_the_batch() -> None:
    found = kept_by(blocks(3), amp_dtype="bfloat16")
    weights = (
        (3 * 2 - 1) * WIDTH * INNER * 2
    )  # the first one's is not needed: its input is the batch
    assert found.half is not None
    fixed = 2 * found.half.total_bytes - found.whole.total_bytes
    assert fixed == weights
    assert found.bytes_per_sample * SAMPLES == found.whole.total_bytes - weights


def test_batches_that_are_accumulated_count_by_themselves() -> None:
    assert kept_by(blocks(2), grad_accum_steps=3).whole == kept_by(blocks(2)).whole


@pytest.mark.parametrize("samples", [1, 2])
def test_where_half_of_a_batch_is_not_trained_on_all_counts_as_growing(samples: int) -> None:
    def forward(model: Model, inputs: Tensor) -> Tensor:
        """Refuse a batch of one sample, as a normalisation over the batch does."""
        if samples == 2 and len(inputs) == 1:
            raise ValueError("expected more than 1 value per channel when training")
        outputs: Tensor = model.blocks(inputs)
        return outputs

    found = kept_by(Model(2, forward), samples=samples)
    assert (found.half, found.half_step) == (None, None)
    assert found.bytes_per_sample == found.whole.total_bytes / samples


def test_of_several_batches_the_largest_is_taken() -> None:
    found = measure(trainer_of(blocks(2)), *(held_of(samples) for samples in (4, 12, 8)))
    assert found.whole.samples == 12


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_times_have_an_error_from_three_turns_on(seconds: float) -> None:
    found = measure(trainer_of(blocks(2)), seconds=seconds)
    for ratio in (found.forward, found.half_step):
        assert ratio is not None
        assert ratio.value > 0
        assert (ratio.sd is not None) == (seconds > 0)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_hooks_are_gone_whatever_the_users_code_does(fails_at: int) -> None:
    calls = count(1)

    def forward(model: Model, inputs: Tensor) -> Tensor:
        outputs: Tensor = model.blocks(inputs)
        if next(calls) == fails_at:
            raise RuntimeError("at last")
        return outputs

    model = Model(2, forward)
    if fails_at == 2:
        assert kept_by(model).half is None
    else:
        with pytest.raises(RuntimeError, match="at last"):
            kept_by(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def penalised(model: nn.Module, batch: Any) -> Tensor:
    """A loss on gradients, for which what was kept has to lead on to what it was made of."""
    inputs = batch[0].requires_grad_()
    loss = model(inputs).square().sum()
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    total: Tensor = loss + slope.square().sum()
    return total


@pytest.mark.parametrize("step", [summed, penalised])
def test_training_takes_the_same_steps_as_without_a_watch(step: Any) -> None:
    torch.manual_seed(0)
    model = blocks(2)
    plain = deepcopy(model)
    held = held_of()
    found = measure(trainer_of(model, step), held, left_s=0)  # no half, one turn
    assert found.half is None
    trainer = trainer_of(plain, step)
    for _ in range(2 if found.forward is None else 3):
        trainer.train((held.batch[0].clone(),))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize("fails", [False, True], ids=["never used", "the half batch fails"])
def test_an_output_that_no_backward_pass_frees_is_gone_with_its_last_reader(fails: bool) -> None:
    seen = list[weakref.ref[Tensor]]()

    def forward(model: Model, inputs: Tensor) -> Tensor:
        hidden: Tensor = model.blocks(inputs)
        seen.append(weakref.ref(torch.softmax(hidden, 1)))  # which keeps its output
        if fails and len(inputs) < SAMPLES:
            raise ValueError("expected a whole batch")
        return hidden

    gc.disable()  # a cycle would wait for it; on a device the timed steps would not have its memory
    try:
        found = kept_by(Model(2, forward))
        alive = [one for one in seen if one() is not None]
    finally:
        gc.enable()
    assert (found.half is None) is fails
    assert seen
    assert not alive
