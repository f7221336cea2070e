"""Take apart a transformers.Trainer, a LightningModule, or objects that accelerate has prepared.

Goes out: model, loader, optimizer, step and baseline settings for a workload. The given objects are
not changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from autotune.apply.loader import inner_loader
from autotune.apply.prepare import base_lr, inner_optimizer
from autotune.errors import AutotuneError, ConfigError, WorkloadError
from autotune.messages.space import during_training
from autotune.note import Note
from autotune.trainers.steps import (
    Alone,
    ClippedOptimizer,
    LightningLoop,
    LightningStep,
    TrainerStep,
    trainer_step,
)


def plain_model(model: Any) -> Any:
    """Unwrap a model from compilation, parallel wrappers and accelerate's autocast."""
    model = getattr(model, "_orig_mod", model)
    if type(model).__name__ in {"DistributedDataParallel", "DataParallel"}:
        model = model.module
    if "_original_forward" not in getattr(model, "__dict__", {}):
        return model
    plain = copy(model)  # its parameters and modules are the same objects
    forward = vars(plain).pop("_original_forward")
    vars(plain).pop("forward", None)
    if getattr(forward, "__func__", None) is not type(model).forward:
        vars(plain)["forward"] = forward
    return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The parts of a workload, by the arguments of `search`, with notes."""

    name: str
    """Name of the model's class."""
    model: Any
    dataset: Any
    """A DataLoader, or the given dataset."""
    optimizer: Any
    step: Callable[..., Any] | None
    baseline: Mapping[str, Any]
    """Settings of a TrainingConfig, by name."""
    notes: tuple[Note, ...] = ()


def note_with_trainer(framework: str, names: list[str]) -> tuple[Note, ...]:
    """Return a note on what a trainer does besides the step, which does not run in trials."""
    return (during_training(framework, [*dict.fromkeys(names)]),) if names else ()


# accelerate
#
# Source: accelerate 1.15, accelerator.py (prepare_model) and utils/other.py
# (extract_model_from_parallel).


_DTYPES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


def take_prepared(accelerator: Any, model: Any, dataset: Any, optimizer: Any) -> Taken:
    """Take apart a model, a loader and an optimizer, each prepared by accelerate or not.

    Raises:
        ConfigError: The Accelerator has several processes, or an engine or a precision that is not
            supported.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 or kind in {"DEEPSPEED", "FSDP", "MEGATRON_LM"}:
        what = f"with {kind}"
        if accelerator.num_processes > 1:
            what = f"of {accelerator.num_processes} processes"
        raise ConfigError(
            f"accelerator: an Accelerator {what} can't be taken apart; search with autotune run -- "
            f"and your command"
        )
    if accelerator.mixed_precision not in _DTYPES:
        raise ConfigError(
            f"accelerator: mixed_precision must be one of {', '.join(_DTYPES)}, but is "
            f"{accelerator.mixed_precision}"
        )
    plain = plain_model(model)
    backend = getattr(getattr(accelerator.state, "dynamo_plugin", None), "backend", None)
    trackers = [type(tracker).__name__ for tracker in accelerator.trackers]
    return Taken(
        name=type(plain).__name__,
        model=plain,
        dataset=dataset,
        optimizer=optimizer,
        step=None,
        baseline={
            "amp_dtype": _DTYPES[accelerator.mixed_precision],
            "grad_accum_steps": accelerator.gradient_accumulation_steps,
            "compile": str(getattr(backend, "value", "NO")).upper() not in {"NO", "NONE"},
        },
        notes=note_with_trainer(
            "accelerate", ["the trackers " + ", ".join(trackers)] if trackers else []
        ),
    )


# Lightning
#
# Source: lightning 2.6, pytorch/core/module.py, hooks.py and optimizer.py (_configure_optimizers).


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
"""Methods of a module that run before or in a trial."""
_EVALUATION = (
    "validation",
    "test",
    "predict",
    "on_validation",
    "on_test",
    "on_predict",
    "val_dataloader",
)


def take_module(module: Any, data: Any, optimizer: Any) -> Taken:
    """Take apart a LightningModule and its data.

    Args:
        module: It may be attached to a Lightning Trainer, whose settings are then the baseline's.
        data: A LightningDataModule, a DataLoader or a dataset; None: the module's own
            train_dataloader.
        optimizer: As of `search`; None: of the module's configure_optimizers.

    Raises:
        ConfigError: the module optimizes by hand, has several loaders or optimizers, or trains on
            several devices.
        WorkloadError: a method of the module or of its data failed.
    """
    trainer = getattr(module, "_trainer", None)
    if not module.automatic_optimization:
        raise ConfigError(
            "model: a LightningModule must optimize automatically, but automatic_optimization is "
            "False; give step= and "
            "optimizer= with it, or search with autotune run -- and your command"
        )
    if trainer is not None and trainer.world_size > 1:
        raise ConfigError(
            f"model: a LightningModule whose Trainer has {trainer.world_size} processes can't be "
            "taken apart; search with autotune run -- and your command"
        )
    own = _apart(module)
    source = copy(data)
    loader = _called("setup, configure_model or train_dataloader", lambda: _loader(own, source))
    made = (
        _called("configure_optimizers", lambda: _optimizer(own)) if optimizer is None else optimizer
    )
    clip = None if trainer is None else trainer.gradient_clip_val
    if optimizer is None and trainer is not None and clip:
        made = ClippedOptimizer(
            made, float(clip), by_value=trainer.gradient_clip_algorithm == "value"
        )
    return Taken(
        name=type(module).__name__,
        model=LightningStep(own),
        dataset=loader,
        optimizer=made,
        step=LightningLoop(),
        baseline=_baseline(trainer, made),
        notes=note_with_trainer("Lightning's Trainer", [*_module_extras(module, trainer)]),
    )


def _apart(module: Any) -> Any:
    """Copy a module, with the same parameters, so that submodules and attributes can be added."""
    own = copy(module)
    for held in ("_parameters", "_buffers", "_modules"):
        vars(own)[held] = copy(vars(own)[held])
    vars(own)["_trainer"] = getattr(
        module, "_trainer", None
    )  # a copy has none; nor has what a trial is sent
    return own


def _called(method: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except AutotuneError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{method} of a LightningModule or its data must run outside of a Trainer's fit, but it "
            f"raised {type(error).__name__}: {error}; give a DataLoader and optimizer=, or search "
            "with autotune run --"
        ) from error


def _loader(module: Any, data: Any) -> Any:
    """Return the training loader, after the hooks that Lightning calls before it; `data` is a copy."""
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
            "dataset: train_dataloader must return one DataLoader, but returned a "
            f"{type(data).__name__}; give one, or search with autotune run -- and your command"
        )
    return data


def _optimizer(module: Any) -> Any:
    """Return the single optimizer of configure_optimizers, in any form that Lightning accepts."""
    made = module.configure_optimizers()
    if isinstance(made, list | tuple) and len(made) == 2 and isinstance(made[0], list):
        made = made[0]  # without the schedulers
    entries = list(made) if isinstance(made, list | tuple) else [made]
    found = [entry["optimizer"] if isinstance(entry, Mapping) else entry for entry in entries]
    if len(found) != 1 or found[0] is None:
        raise ConfigError(
            "model: configure_optimizers must return one optimizer, but returned "
            f"{len([*filter(None, found)])}; search with autotune run -- and your command"
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


def _module_extras(module: Any, trainer: Any) -> Iterator[str]:
    """Return what does not run in trials: overridden hooks of the module, and features of the Trainer."""
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


# transformers
#
# Source: transformers 5.24, trainer.py (get_train_dataloader, create_optimizer, compute_loss,
# _inner_training_loop).


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
"""Attributes of a Trainer that compute_loss does not need, or that a trial sets."""
_PLACES = ("output_dir", "logging_dir", "run_name", "hub_model_id", "resume_from_checkpoint")
"""Arguments about a run's files, which do not change the training."""
_USUAL_CALLBACKS = frozenset(
    {"DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
)


def take_trainer(trainer: Any) -> Taken:
    """Take apart a transformers.Trainer.

    Raises:
        ConfigError: It trains in several processes, or by an engine that can't be taken apart.
    """
    args = trainer.args
    engines = [name for name in ("deepspeed", "fsdp") if getattr(args, name, None)]
    if engines or args.world_size > 1:
        what = f"with {engines[0]}" if engines else f"in a group of {args.world_size} processes"
        raise ConfigError(
            f"model: a Trainer {what} can't be taken apart; search with autotune run -- and your "
            f"command"
        )
    shadow = _alone(trainer)  # so that whatever its methods note down is noted on a copy
    loader = inner_loader(shadow.get_train_dataloader())
    shadow.model = model = plain_model(trainer.model)
    given = trainer.optimizer
    optimizer = shadow.create_optimizer() if given is None else inner_optimizer(given)
    lr = base_lr(optimizer)
    most = args.max_grad_norm
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
        notes=note_with_trainer("transformers.Trainer", _trainer_extras(trainer)),
    )


def _alone(trainer: Any) -> Any:
    """Copy the Trainer, with an Accelerator of one process and without logging."""
    alone = copy(trainer)
    alone.accelerator = Alone()
    alone.gather_function = alone.accelerator.gather_for_metrics
    alone.log = alone.accelerator.log
    return alone


def _carried(trainer: Any) -> Any:
    """Copy the Trainer so that it can be sent to a trial, for its compute_loss."""
    carried = _alone(trainer)
    for name in _NOT_CARRIED:
        if name in vars(carried):
            vars(carried)[name] = None
    return carried


def _identity(trainer: Any) -> tuple[object, ...]:
    """Return the identity of a Trainer's training: its class, loss and arguments."""
    plain = {name: value for name, value in trainer.args.to_dict().items() if name not in _PLACES}
    return type(trainer), trainer.compute_loss_func, json.dumps(plain, sort_keys=True, default=str)


def _amp_dtype(args: Any) -> str:
    if args.bf16:
        return "bfloat16"
    if args.fp16:
        return "float16"
    return "tf32" if args.tf32 else "float32"


def _several_devices(args: Any) -> dict[str, Any]:
    """Return the settings of a Trainer in one process with several devices, which uses DataParallel."""
    if args.n_gpu <= 1:
        return {}
    return {
        "strategy": "dp",
        "world_size": args.n_gpu,
        "micro_batch_size": args.per_device_train_batch_size,
    }


def _trainer_extras(trainer: Any) -> list[str]:
    args = trainer.args
    own = type(trainer)
    base: Any = next(
        kind
        for kind in own.__mro__
        if kind.__name__ == "Trainer" and kind.__module__.startswith("transformers.")
    )
    names = [f"{own.__name__}.training_step"] if own.training_step is not base.training_step else []
    names += [
        name
        for name, setting in (("evaluation", "eval_strategy"), ("checkpoints", "save_strategy"))
        if str(getattr(getattr(args, setting, "no"), "value", "no")) != "no"
    ]
    names += [
        "logging",
        f"the schedule of the learning rate ({getattr(args.lr_scheduler_type, 'value', 'none')})",
    ]
    names += ["NEFTune's noise"] if getattr(args, "neftune_noise_alpha", None) else []
    callbacks = (type(callback).__name__ for callback in trainer.callback_handler.callbacks)
    return [*names, *(name for name in callbacks if name not in _USUAL_CALLBACKS)]


# The framework of a call's arguments


_DECIDED_BY_TRAINER = (
    "dataset",
    "accelerator",
    "optimizer",
    "loss",
    "step",
    "collate_fn",
    "loader",
)


def take_apart(given: Mapping[str, Any]) -> Taken | None:
    """Take apart a framework's objects among the arguments of `search`; None without any.

    Raises:
        ConfigError: An object can't be taken apart, or is given next to a part that it decides.
    """
    model = given["model"]
    dataset = given["dataset"]
    accelerator = given["accelerator"]
    if _is_of(model, "transformers", "Trainer"):
        idle = [name for name in _DECIDED_BY_TRAINER if given.get(name) is not None]
        if idle:
            raise ConfigError(
                f"{', '.join(idle)}: can't be combined with a Trainer, which decides that itself; "
                f"leave it out"
            )
        return take_trainer(model)
    if accelerator is not None:
        if not _is_of(accelerator, "accelerate", "Accelerator"):
            kind = type(accelerator).__name__
            raise ConfigError(
                f"accelerator must be an accelerate.Accelerator, but got {kind}; leave it out"
            )

        return take_prepared(accelerator, model, dataset, given["optimizer"])
    is_lightning = any(
        _is_of(model, package, "LightningModule") for package in ("lightning", "pytorch_lightning")
    )
    if is_lightning and given["step"] is None and given["loss"] is None:
        return take_module(model, dataset, given["optimizer"])
    return None


def _is_of(value: object, package: str, name: str) -> bool:
    """Return True if a value is an instance of a package's class, by name, without importing it."""
    kinds = type(value).__mro__
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in kinds
    )
