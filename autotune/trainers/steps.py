"""Models whose forward pass is a framework's step, so wrapping or compiling covers the whole step.

They are built in the caller's process, and only run in trials, on a copy of the caller's model.
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
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from autotune.apply.prepare import optimizer_like


def trainer_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch by a TrainerStep, wrapped or not; DataParallel only splits plain dicts."""
    loss: Tensor = model(dict(batch) if isinstance(batch, Mapping) else batch)
    return loss


class TrainerStep(nn.Module):
    """A model whose forward pass is a transformers.Trainer's `compute_loss`.

    Args:
        model: The Trainer's model.
        trainer: A copy of the Trainer, reduced to what a trial needs.
        identity: Identity of the Trainer's loss, besides the model.
    """

    def __init__(self, model: nn.Module, trainer: Any, identity: object) -> None:
        super().__init__()
        self.model = model
        self.autotune_identity = identity
        self._trainer = trainer
        self._is_begun = False

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        if not self._is_begun:
            self._begin()
        loss: Tensor = self._trainer.compute_loss(
            self.model, dict(batch) if isinstance(batch, Mapping) else batch
        )
        return loss

    def _begin(self) -> None:
        """Do what Trainer.train does before the first step."""
        self._is_begun = True
        trainer = self._trainer
        place = _device_of(self.model)
        for name, held in list(vars(trainer).items()):
            if isinstance(held, nn.Module | Tensor):  # a teacher, or the classes' weights
                setattr(trainer, name, held.to(place))
        trainer.model = trainer.model_wrapped = self.model
        trainer.accelerator.device = place
        if trainer.args.gradient_checkpointing:
            kwargs = trainer.args.gradient_checkpointing_kwargs
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)  # type: ignore[operator] # of transformers' models


class LightningStep(nn.Module):
    """A model whose forward pass is a LightningModule's `training_step`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._takes_index = _takes_index(module.training_step)

    def forward(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch.

        Raises:
            TypeError: the module's step returned none.
        """
        module: Any = self.module
        batch = module.on_after_batch_transfer(batch, 0)
        made = (
            module.training_step(batch, index) if self._takes_index else module.training_step(batch)
        )
        loss = made.get("loss") if isinstance(made, Mapping) else made
        if not isinstance(loss, Tensor):
            got = type(loss).__name__
            raise TypeError(
                f"training_step must return a loss tensor or a mapping with 'loss', but returned "
                f"{got}"
            )
        return loss


class LightningLoop:
    """The step of a trial on a LightningStep; it counts batches outside of compiled code."""

    def __init__(self) -> None:
        self._batches = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        if self._batches == 0:
            self._begin(model)
        loss: Tensor = model(batch, self._batches)
        self._batches += 1
        return loss

    @staticmethod
    def _begin(model: nn.Module) -> None:
        """Set the modules' device, as Lightning's `to` does, and discard logs."""
        place = _device_of(model)
        for module in model.modules():
            if "_device" in vars(module):  # of Lightning's, also of a module within a module
                vars(module)["_device"] = place
            if isinstance(module, LightningStep):
                vars(module.module).update(log=_nothing, log_dict=_nothing)


@dataclass(frozen=True, slots=True)
class ClippedOptimizer:
    """Makes optimizers like a trainer's, which clip gradients before each step like the trainer."""

    given: torch.optim.Optimizer
    most: float
    """Clip by the norm of all gradients, or by value."""
    by_value: bool = False

    def __call__(self, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
        """Return an optimizer of these parameters."""
        made = optimizer_like(self.given, parameters, lr)
        made.register_step_pre_hook(partial(_clip, most=self.most, by_value=self.by_value))
        return made


class Alone:
    """An accelerate.Accelerator of one process that does nothing."""

    num_processes = 1
    process_index = 0
    local_process_index = 0
    gradient_accumulation_steps = 1
    is_main_process = is_local_main_process = sync_gradients = True
    parallelism_config = scaler = None
    distributed_type = "NO"
    mixed_precision = "no"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def prepare(self, *prepared: Any, **_: Any) -> Any:
        """Return the argument."""
        return prepared[0] if len(prepared) == 1 else prepared

    def gather(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return the argument."""
        return tensor

    unwrap_model = gather_for_metrics = reduce = pad_across_processes = gather

    def autocast(self, *_: Any, **__: Any) -> Any:
        """Return a context without effect: trials set precision and accumulation around the whole step."""
        return nullcontext()

    no_sync = accumulate = autocast

    def log(self, *_: Any, **__: Any) -> None:
        """Discard a log."""

    print = wait_for_everyone = log


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _takes_index(method: Any) -> bool:
    """Return True if a training_step takes the batch's index, by Lightning's rule.

    lightning/pytorch/loops/training_epoch_loop.py, _build_kwargs, and utilities/signature_utils.py.
    """
    parameters = inspect.signature(method).parameters
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    return takes_any or "batch_idx" in parameters or len(parameters) >= 2


def _clip(
    optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any, *, most: float, by_value: bool
) -> None:
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if by_value:
        clip_grad_value_(own, most)
    else:
        clip_grad_norm_(own, most)


def _nothing(*_: Any, **__: Any) -> None:
    """Discard a log."""
