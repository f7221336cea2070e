"""What a model keeps for its backward pass, against bytes calculated by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def kept_by(model: nn.Module, samples: int = SAMPLES, **given: Any) -> Activations:
    held = Held((torch.randn(samples, WIDTH),), samples)
    return measure_activations(
        trainer_of(model, **given), [held], seconds=0.0, ends_at=perf_counter() + 60
    )


def test_each_storage_counts_once_and_parameters_not_at_all() -> None:
    found = kept_by(nn.Sequential(*(Block() for _ in range(3))))
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
    found = kept_by(nn.Sequential(*(Block() for _ in range(3))))
    assert found.half is not None
    assert found.half.samples == SAMPLES // 2
    assert found.half.total_bytes == found.whole.total_bytes / 2
    assert found.bytes_per_sample == 3 * (INPUT + HIDDEN) / SAMPLES
    assert found.least_saved_bytes(4 * SAMPLES) == 4 * 2 * HIDDEN


def test_what_is_kept_outside_of_the_blocks_stays() -> None:
    body = nn.Sequential(*(Block() for _ in range(2)))
    found = kept_by(nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 1)))
    assert found.block == "Block"
    assert found.whole.total_bytes == 4 * INPUT + 2 * HIDDEN, "the inputs of both layers, too"
    assert found.whole.inside_bytes == 2 * (INPUT + HIDDEN)


def test_an_input_that_something_outside_keeps_is_not_saved_nor_left_twice() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            first = self.blocks[0](inputs)
            outputs: Tensor = self.blocks[1](first) + first.square()
            return outputs

    found = kept_by(Squared()).whole
    assert found.total_bytes == 2 * (INPUT + HIDDEN)
    assert found.inside_bytes == INPUT + 2 * HIDDEN
    assert found.inputs_bytes == INPUT


def test_a_block_that_is_called_twice_is_two_blocks() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            for block in (*self.blocks, *self.blocks):
                inputs = block(inputs)
            return inputs

    found = kept_by(Looped())
    assert found.blocks == 4
    assert found.whole.largest_bytes == HIDDEN


def test_of_blocks_within_blocks_those_are_taken_by_which_least_is_left() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.blocks(inputs)
            return outputs

    found = kept_by(nn.Sequential(Stage(), Stage()))
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
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, inputs: Tensor) -> Tensor:
            for block in self.blocks:
                inputs = checkpoint(block, inputs, use_reentrant=False)
            return inputs

    assert kept_by(Checkpointed()).block is None


def test_weights_that_autocast_converts_do_not_grow_with_the_batch() -> None:
    found = kept_by(nn.Sequential(*(Block() for _ in range(3))), amp_dtype="bfloat16")
    weights = (
        (3 * 2 - 1) * WIDTH * INNER * 2
    )  # the first one's is not needed: its input is the batch
    assert found.half is not None
    fixed = 2 * found.half.total_bytes - found.whole.total_bytes
    assert fixed == weights
    assert found.bytes_per_sample * SAMPLES == found.whole.total_bytes - weights


def test_batches_that_are_accumulated_count_by_themselves() -> None:
    plain = kept_by(nn.Sequential(*(Block() for _ in range(2))))
    assert (
        kept_by(nn.Sequential(*(Block() for _ in range(2))), grad_accum_steps=3).whole
        == plain.whole
    )


@pytest.mark.parametrize("samples", [1, 2])
def test_where_half_of_a_batch_is_not_trained_on_all_counts_as_growing(samples: int) -> None:
    class Normed(nn.Module):
        """Refuses a batch of one sample, as a normalisation over the batch does."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, inputs: Tensor) -> Tensor:
            if samples == 2 and len(inputs) == 1:
                raise ValueError("expected more than 1 value per channel when training")
            outputs: Tensor = self.blocks(inputs)
            return outputs

    found = kept_by(Normed(), samples=samples)
    assert (found.half, found.half_step) == (None, None)
    assert found.bytes_per_sample == found.whole.total_bytes / samples


def test_of_several_batches_the_largest_is_looked_at() -> None:
    held = [Held((torch.randn(samples, WIDTH),), samples) for samples in (4, 12, 8)]
    trainer = trainer_of(nn.Sequential(Block(), Block()))
    assert (
        measure_activations(trainer, held, seconds=0.0, ends_at=perf_counter() + 60).whole.samples
        == 12
    )


def test_times_are_told_with_their_scatter_from_three_turns_on() -> None:
    def measured(seconds: float) -> Activations:
        held, trainer = (
            Held((torch.randn(SAMPLES, WIDTH),), SAMPLES),
            trainer_of(nn.Sequential(Block(), Block())),
        )
        return measure_activations(trainer, [held], seconds=seconds, ends_at=perf_counter() + 60)

    found = measured(1.0)
    assert found.forward is not None
    assert found.half_step is not None
    assert found.forward.sd is not None
    assert found.half_step.sd is not None
    assert found.forward.value > 0
    once = measured(0.0)
    assert once.forward is not None
    assert once.forward.sd is None


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_hooks_are_gone_whatever_the_users_code_does(fails_at: int) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.calls = nn.Sequential(Block(), Block()), 0

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.blocks(inputs)
            self.calls += 1
            if self.calls == fails_at:
                raise RuntimeError("at last")
            return outputs

    model = Failing()
    if fails_at == 2:
        assert kept_by(model).half is None
    else:
        with pytest.raises(RuntimeError, match="at last"):
            kept_by(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_training_takes_the_same_steps_as_without_a_watch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    before = [one.detach().clone() for one in model.parameters()]
    trainer = trainer_of(model)
    held = Held((torch.randn(SAMPLES, WIDTH),), SAMPLES)
    found = measure_activations(
        trainer, [held], seconds=0.0, ends_at=perf_counter()
    )  # no half, one turn of two steps
    watched = [one.detach().clone() for one in model.parameters()]
    for one, old in zip(model.parameters(), before, strict=True):
        one.data.copy_(old)
    for _ in range(3):
        trainer.train(held.batch)
    assert found.half is None
    for one, other in zip(model.parameters(), watched, strict=True):
        assert torch.equal(one, other)
