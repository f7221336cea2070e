"""A LightningModule with its data, taken apart: its training_step, its train_dataloader, its configure_optimizers.

Source: lightning 2.6, pytorch/core/module.py, hooks.py and optimizer.py (_configure_optimizers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

from autotune.errors import AutotuneError, ConfigError, WorkloadError
from autotune.settings.applied.optimizer import base_lr, inner_optimizer
from autotune.trainers.steps import ClippedOptimizer, LightningLoop, LightningStep
from autotune.trainers.taken import Taken, note_beside

__all__ = ["take_module"]

_PRECISIONS = {"bf16-mixed": "bfloat16", "16-mixed": "float16", "32-true": "float32"}
_RUN = frozenset(
    {
        "configure_model",
        "configure_optimizers",
        "forward",
        "on_after_batch_transfer",
        "prepare_data",
        "setup",
        "train_dataloader",
        "training_step",
    }
)
"""Methods of a module that run for a trial, or in it."""
_EVALUATION = ("validation", "test", "predict", "on_validation", "on_test", "on_predict", "val_dataloader")


def take_module(module: Any, data: Any, optimizer: Any) -> Taken:
    """What trials train of a LightningModule.

    Args:
        module: It may be attached to a Lightning Trainer, whose settings are then the baseline's.
        data: A LightningDataModule, a DataLoader or a dataset; None: the module's own train_dataloader.
        optimizer: As of `search`; None: of the module's configure_optimizers.

    Raises:
        ConfigError: the module optimizes by hand, has several loaders or optimizers, or trains on several devices.
        WorkloadError: a method of the module or of its data failed.
    """
    trainer = getattr(module, "_trainer", None)
    if not module.automatic_optimization:
        raise ConfigError(
            "model: a LightningModule must optimize automatically, but automatic_optimization is False; give step= and "
            "optimizer= beside it, or search with autotune run -- and your command"
        )
    if trainer is not None and trainer.world_size > 1:
        raise ConfigError(
            f"model: a LightningModule whose Trainer has {trainer.world_size} processes can't be taken apart; search "
            "with autotune run -- and your command"
        )
    own, source = _apart(module), copy(data)
    loader = _called("setup, configure_model or train_dataloader", lambda: _loader(own, source))
    made = _called("configure_optimizers", lambda: _optimizer(own)) if optimizer is None else optimizer
    clip = None if trainer is None else trainer.gradient_clip_val
    if optimizer is None and trainer is not None and clip:
        made = ClippedOptimizer(made, float(clip), by_value=trainer.gradient_clip_algorithm == "value")
    return Taken(
        name=type(module).__name__,
        model=LightningStep(own),
        dataset=loader,
        optimizer=made,
        step=LightningLoop(),
        baseline=_baseline(trainer, made),
        notes=note_beside("Lightning's Trainer", [*_beside(module, trainer)]),
    )


def _apart(module: Any) -> Any:
    """A copy of the module with the same parameters, to which submodules and attributes can be added."""
    own = copy(module)
    for held in ("_parameters", "_buffers", "_modules"):
        vars(own)[held] = copy(vars(own)[held])
    vars(own)["_trainer"] = getattr(module, "_trainer", None)  # a copy has none; nor has what a trial is sent
    return own


def _called(method: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except AutotuneError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{method} of a LightningModule or its data must run outside of a Trainer's fit, but it raised "
            f"{type(error).__name__}: {error}; give a DataLoader and optimizer=, or search with autotune run --"
        ) from error


def _loader(module: Any, data: Any) -> Any:
    """The training loader, after what Lightning calls before it, in its order; `data` is a copy."""
    is_module = hasattr(data, "train_dataloader")
    if is_module:
        data.prepare_data()
    module.prepare_data()
    if is_module:
        data.setup("fit")
    module.setup("fit")
    module.configure_model()
    if data is None or is_module:
        data = (module if data is None else data).train_dataloader()
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
    return inner_optimizer(found[0])


def _baseline(trainer: Any, optimizer: Any) -> dict[str, Any]:
    given = getattr(optimizer, "given", optimizer)
    lr = base_lr(given) if hasattr(given, "param_groups") else None
    baseline: dict[str, Any] = {} if lr is None else {"lr": lr}
    if trainer is not None:
        precision = _PRECISIONS.get(str(trainer.precision))
        baseline |= {"grad_accum_steps": trainer.accumulate_grad_batches}
        baseline |= {"amp_dtype": precision} if precision is not None else {}
    return baseline


def _beside(module: Any, trainer: Any) -> Iterator[str]:
    """What does not run in trials: methods of Lightning's that the module has its own of, and the Trainer's doings."""
    own = type(module)
    base: Any = next(kind for kind in own.__mro__ if kind.__name__ == "LightningModule")
    package = base.__module__.partition(".")[0]
    for name in sorted(set(dir(base)) - _RUN):
        theirs = getattr(base, name)
        is_lightnings = str(getattr(theirs, "__module__", "")).startswith(package)
        if name[0] != "_" and is_lightnings and getattr(own, name) is not theirs:
            yield "evaluation" if name.startswith(_EVALUATION) else name
    yield from ("logging", "checkpoints", "schedules of the learning rate")
    if trainer is None:
        return
    if str(trainer.precision) not in _PRECISIONS:
        yield f"precision {trainer.precision}"
    yield from (type(callback).__name__ for callback in trainer.callbacks)
