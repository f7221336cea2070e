"""Models whose forward pass is a framework's own step: what wraps or compiles the model does so to the whole step.

They are built in the caller's process from the caller's model, and run in trials alone, on the trial's own copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotune.settings.applied.optimizer import optimizer_like

__all__ = ["Alone", "ClippedOptimizer", "LightningStep", "TrainerStep", "step"]


def step(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch, by a model of this module."""
    loss: Tensor = model(batch)
    return loss


class TrainerStep(nn.Module):
    """A model that computes the loss of a batch as a transformers.Trainer does (`compute_loss`).

    Args:
        model: The Trainer's.
        trainer: A copy of the Trainer without what a trial has no use for.
    """

    def __init__(self, model: nn.Module, trainer: Any) -> None:
        super().__init__()
        self.model = model
        self._trainer = trainer
        self._is_begun = False

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a batch."""
        if not self._is_begun:
            self._begin()
        loss: Tensor = self._trainer.compute_loss(self.model, dict(batch))
        return loss

    def _begin(self) -> None:
        """What Trainer.train does to the model before the first step."""
        self._is_begun = True
        self._trainer.model = self._trainer.model_wrapped = self.model
        args = self._trainer.args
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)  # type: ignore[operator] # of transformers' models


class LightningStep(nn.Module):
    """A model that computes the loss of a batch as a LightningModule does (`training_step`)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._takes_index = "batch_idx" in inspect.signature(module.training_step).parameters  # type: ignore[arg-type] # a method
        self._batches = 0

    def forward(self, batch: Any) -> Tensor:
        """The loss of a batch.

        Raises:
            TypeError: the module's step returned none.
        """
        module: Any = self.module
        if self._batches == 0:
            module.log = module.log_dict = _nothing  # there is no trainer that would take it
        batch = module.on_after_batch_transfer(batch, 0)
        index = {"batch_idx": self._batches} if self._takes_index else {}
        self._batches += 1
        made = module.training_step(batch, **index)
        loss = made.get("loss") if isinstance(made, Mapping) else made
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step must return a loss tensor or a mapping with 'loss', but returned {made!r:.80}"
            )
        return loss


@dataclass(frozen=True, slots=True)
class ClippedOptimizer:
    """Makes optimizers like a trainer's, which clip the norm of all gradients before each step as the trainer does."""

    given: torch.optim.Optimizer
    max_norm: float

    def __call__(self, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
        """An optimizer of these parameters."""
        made = optimizer_like(self.given, parameters, lr)
        made.register_step_pre_hook(partial(_clip, max_norm=self.max_norm))
        return made


class Alone:
    """Stands for an accelerate.Accelerator of one process that has nothing to prepare, gather or unwrap."""

    num_processes, process_index, local_process_index = 1, 0, 0
    is_main_process = is_local_main_process = sync_gradients = True
    parallelism_config = None
    distributed_type, mixed_precision = "NO", "no"

    def prepare(self, *prepared: Any, **_: Any) -> Any:
        """What was given."""
        return prepared[0] if len(prepared) == 1 else prepared

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """What was given."""
        return model

    def gather(self, tensor: Any) -> Any:
        """What was given."""
        return tensor

    def gather_for_metrics(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """What was given."""
        return tensor

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """What was given."""
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """What was given."""
        return tensor

    def autocast(self, *_: Any, **__: Any) -> Any:
        """Nothing: trials set the precision around the whole step."""
        return nullcontext()

    @property
    def device(self) -> torch.device:
        """Where a trial trains."""
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return kind or torch.device("cpu")


def _clip(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any, *, max_norm: float) -> None:
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(own, max_norm)


def _nothing(*_: Any, **__: Any) -> None:
    """Logs nothing."""
