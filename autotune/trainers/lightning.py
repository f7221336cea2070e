"""A LightningModule with its data, taken apart: its training_step, its train_dataloader, its configure_optimizers.

Source: lightning 2.6, pytorch/core/module.py, hooks.py and optimizer.py (_configure_optimizers).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from autotune.errors import AutotuneError, ConfigError, WorkloadError
from autotune.trainers.steps import ClippedOptimizer, LightningStep, step
from autotune.trainers.taken import Taken, note_beside

__all__ = ["take_module"]

_PRECISIONS = {"bf16-mixed": "bfloat16", "16-mixed": "float16", "32-true": "float32"}
_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
    "validation_step",
)
"""Methods of a module that a Lightning Trainer calls beside training_step, and trials do not."""


def take_module(module: Any, data: Any, optimizer: Any) -> Taken:
    """What trials train of a LightningModule.

    Args:
        module: It may be attached to a Lightning Trainer, whose settings are then the baseline's.
        data: A LightningDataModule, a DataLoader or a dataset; None: the module's own train_dataloader.
        optimizer: As of `search`; None: of the module's configure_optimizers.

    Raises:
        ConfigError: the module optimizes by hand, or has several loaders or optimizers.
        WorkloadError: a method of the module or of its data failed.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            "model: a LightningModule must optimize automatically, but automatic_optimization is False; give step= and "
            "optimizer= beside it, or search with autotune run -- and your command"
        )
    trainer = getattr(module, "_trainer", None)
    own = _called("configure_optimizers", lambda: _optimizer(module)) if optimizer is None else optimizer
    clip = getattr(trainer, "gradient_clip_val", None)
    if optimizer is None and clip and getattr(trainer, "gradient_clip_algorithm", None) in {None, "norm"}:
        own = ClippedOptimizer(own, float(clip))
    return Taken(
        name=type(module).__name__,
        model=LightningStep(module),
        dataset=_called("train_dataloader", lambda: _loader(module, data)),
        optimizer=own,
        step=step,
        baseline=_baseline(trainer, own),
        notes=note_beside("Lightning's Trainer", _beside(module, trainer)),
    )


def _called(method: str, call: Any) -> Any:
    try:
        return call()
    except AutotuneError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{method} of a LightningModule or its data must run without a Trainer, but it raised "
            f"{type(error).__name__}: {error}; attach one (module.trainer = ...), or give a DataLoader and optimizer="
        ) from error


def _loader(module: Any, data: Any) -> Any:
    """The training loader; a data module's methods are called on a copy of it, in Lightning's order."""
    source = module if data is None else data
    if hasattr(source, "train_dataloader"):
        if data is not None:
            source = copy(data)
            source.prepare_data()
            source.setup("fit")
        data = source.train_dataloader()
    if isinstance(data, Mapping | list | tuple) or type(data).__name__ == "CombinedLoader":
        raise ConfigError(
            f"dataset: train_dataloader must return one DataLoader, but returned a {type(data).__name__}; give one, or "
            "search with autotune run -- and your command"
        )
    return data


def _optimizer(module: Any) -> Any:
    """The one optimizer that configure_optimizers returns, in any of the forms that Lightning takes."""
    made = module.configure_optimizers()
    if isinstance(made, list | tuple) and len(made) == 2 and isinstance(made[0], list):
        made = made[0]  # beside the schedulers
    entries = list(made) if isinstance(made, list | tuple) else [made]
    found = [entry["optimizer"] if isinstance(entry, Mapping) else entry for entry in entries]
    if len(found) != 1 or found[0] is None:
        raise ConfigError(
            f"model: configure_optimizers must return one optimizer, but returned {len([*filter(None, found)])}; "
            "search with autotune run -- and your command"
        )
    return getattr(found[0], "optimizer", found[0])


def _baseline(trainer: Any, optimizer: Any) -> dict[str, Any]:
    given = getattr(optimizer, "given", optimizer)
    groups = getattr(given, "param_groups", None)
    baseline: dict[str, Any] = {"lr": float(groups[0]["lr"])} if groups else {}
    if trainer is not None:
        precision = _PRECISIONS.get(str(trainer.precision))
        baseline |= {"grad_accum_steps": trainer.accumulate_grad_batches}
        baseline |= {"amp_dtype": precision} if precision is not None else {}
    return baseline


def _beside(module: Any, trainer: Any) -> list[str]:
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    names = [name for name in _HOOKS if getattr(type(module), name, None) is not getattr(base, name, None)]
    names += ["logging", "checkpoints", "schedulers of the learning rate"]
    if trainer is None:
        return names
    if str(trainer.precision) not in _PRECISIONS:
        names.append(f"precision {trainer.precision}")
    return [*names, *(type(callback).__name__ for callback in trainer.callbacks)]
