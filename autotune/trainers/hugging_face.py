"""A transformers.Trainer, taken apart: its model with its own loss, its loader, its optimizer, its settings.

Source: transformers 5.24, trainer.py (get_train_dataloader, create_optimizer, compute_loss, _inner_training_loop).
"""

from __future__ import annotations

import json
from copy import copy
from typing import Any

from autotune.errors import ConfigError
from autotune.settings.applied.loader import inner_loader
from autotune.settings.applied.optimizer import base_lr, inner_optimizer
from autotune.trainers.steps import Alone, ClippedOptimizer, TrainerStep, trainer_step
from autotune.trainers.taken import Taken, note_beside
from autotune.trainers.unwrapping import plain_model

__all__ = ["take_trainer"]

_NOT_CARRIED = (
    "callback_handler",
    "eval_dataset",
    "lr_scheduler",
    "model",
    "model_init",
    "model_wrapped",
    "optimizer",
    "train_dataset",
    "_eval_dataloaders",
    "_memory_tracker",
    "_train_dataloader",
)
"""Attributes of a Trainer that its compute_loss has no use for, or is given in a trial."""
_PLACES = ("output_dir", "logging_dir", "run_name", "hub_model_id", "resume_from_checkpoint")
"""Arguments that say where a run is written, and nothing of how it trains."""
_USUAL_CALLBACKS = frozenset({"DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback"})


def take_trainer(trainer: Any) -> Taken:
    """What trials train of a Trainer.

    Raises:
        ConfigError: it trains in several processes, or by an engine that can't be taken apart.
    """
    args = trainer.args
    engines = [name for name in ("deepspeed", "fsdp") if getattr(args, name, None)]
    if engines or args.world_size > 1:
        what = f"with {engines[0]}" if engines else f"in a group of {args.world_size} processes"
        raise ConfigError(f"model: a Trainer {what} can't be taken apart; search with autotune run -- and your command")
    shadow = _alone(trainer)  # so that whatever its methods note down is noted on a copy
    loader = inner_loader(shadow.get_train_dataloader())
    shadow.model = model = plain_model(trainer.model)
    given = trainer.optimizer
    optimizer = shadow.create_optimizer() if given is None else inner_optimizer(given)
    lr, most = base_lr(optimizer), args.max_grad_norm
    return Taken(
        name=type(model).__name__,
        model=TrainerStep(model, _carried(trainer), _identity(trainer)),
        dataset=loader,
        optimizer=ClippedOptimizer(optimizer, most) if most is not None and most > 0 else optimizer,
        step=trainer_step,
        baseline={
            "grad_accum_steps": args.gradient_accumulation_steps,
            "lr": args.learning_rate if lr is None else lr,
            "amp_dtype": _amp_dtype(args),
            "compile": bool(args.torch_compile),
            **_several_devices(args),
        },
        notes=note_beside("transformers.Trainer", _beside(trainer)),
    )


def _alone(trainer: Any) -> Any:
    """A copy of the Trainer whose Accelerator is of one process, and which logs nothing."""
    alone = copy(trainer)
    alone.accelerator = Alone()
    alone.gather_function = alone.accelerator.gather_for_metrics
    alone.log = alone.accelerator.log
    return alone


def _carried(trainer: Any) -> Any:
    """A copy of the Trainer that can be carried to a trial, for its compute_loss."""
    carried = _alone(trainer)
    for name in _NOT_CARRIED:
        if name in vars(carried):
            vars(carried)[name] = None
    return carried


def _identity(trainer: Any) -> tuple[object, ...]:
    """What tells this Trainer's training from another's: its class, its loss, and its arguments."""
    plain = {name: value for name, value in trainer.args.to_dict().items() if name not in _PLACES}
    return type(trainer), trainer.compute_loss_func, json.dumps(plain, sort_keys=True, default=str)


def _amp_dtype(args: Any) -> str:
    if args.bf16:
        return "bfloat16"
    if args.fp16:
        return "float16"
    return "tf32" if args.tf32 else "float32"


def _several_devices(args: Any) -> dict[str, Any]:
    """A Trainer in one process that sees several devices trains in DataParallel, its batch shared out among them."""
    if args.n_gpu <= 1:
        return {}
    return {"strategy": "dp", "world_size": args.n_gpu, "micro_batch_size": args.per_device_train_batch_size}


def _beside(trainer: Any) -> list[str]:
    args, own = trainer.args, type(trainer)
    base: Any = next(
        kind for kind in own.__mro__ if kind.__name__ == "Trainer" and kind.__module__.startswith("transformers.")
    )
    names = [f"{own.__name__}.training_step"] if own.training_step is not base.training_step else []
    names += [
        name
        for name, setting in (("evaluation", "eval_strategy"), ("checkpoints", "save_strategy"))
        if str(getattr(getattr(args, setting, "no"), "value", "no")) != "no"
    ]
    names += ["logging", f"the schedule of the learning rate ({getattr(args.lr_scheduler_type, 'value', 'none')})"]
    names += ["NEFTune's noise"] if getattr(args, "neftune_noise_alpha", None) else []
    callbacks = (type(callback).__name__ for callback in trainer.callback_handler.callbacks)
    return [*names, *(name for name in callbacks if name not in _USUAL_CALLBACKS)]
