"""Which framework the arguments of a call are of, and so which module takes them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import ConfigError
from autotune.trainers.taken import Taken

__all__ = ["take_apart"]


def take_apart(given: Mapping[str, Any]) -> Taken | None:
    """What is taken from a framework's objects among the arguments of `search`; None where there is none.

    Raises:
        ConfigError: an object can't be taken apart, or stands beside what it decides itself.
    """
    model, dataset, accelerator = given["model"], given["dataset"], given["accelerator"]
    if _is_of(model, "transformers", "Trainer"):
        _refuse_beside(
            given, "a Trainer", "dataset", "accelerator", "optimizer", "loss", "step", "collate_fn", "loader"
        )
        from autotune.trainers.hugging_face import take_trainer

        return take_trainer(model)
    if accelerator is not None:
        if not _is_of(accelerator, "accelerate", "Accelerator"):
            kind = type(accelerator).__name__
            raise ConfigError(f"accelerator must be an accelerate.Accelerator, but got {kind}; leave it out")
        from autotune.trainers.accelerated import take_prepared

        return take_prepared(accelerator, model, dataset, given["optimizer"])
    if _is_lightning(model, "LightningModule") and given["step"] is None and given["loss"] is None:
        from autotune.trainers.lightning import take_module

        return take_module(model, dataset, given["optimizer"])
    return None


def _is_of(value: object, package: str, name: str) -> bool:
    """Whether a value's class is, or is derived from, a class of that name in a package; imports nothing."""
    kinds = type(value).__mro__
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in kinds)


def _is_lightning(value: object, name: str) -> bool:
    return _is_of(value, "lightning", name) or _is_of(value, "pytorch_lightning", name)


def _refuse_beside(given: Mapping[str, Any], what: str, *names: str) -> None:
    idle = [name for name in names if given.get(name) is not None]
    if idle:
        raise ConfigError(f"{', '.join(idle)}: can't stand beside {what}, which decides that itself; leave it out")
