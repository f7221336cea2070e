"""Build what a trial trains from a `Workload`: model, dataset and optimizer.

Comes in: the user's workload and a configuration. Goes out: objects on the device and in the layout
asked for. User code runs here; a fault in it is a `WorkloadFault`, a complete sentence for the
user.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from autotune.apply.loader import inner_loader
from autotune.apply.prepare import (
    ForeignParametersError,
    arranged,
    can_fuse,
    is_fused,
    optimizer_like,
    set_fused,
)
from autotune.config.plan import PARTS, OptimizerFacts, Ref, Workload
from autotune.config.tf_data import TfData
from autotune.config.training_config import TrainingConfig
from autotune.worker.device import Device


class WorkloadFault(Exception):  # noqa: N818 - a fault of the workload, not an error of ours
    """Part of the user's workload can't be used; the message states rule, value and remedy."""


def resolved(workload: Workload) -> Workload:
    """Return the workload with each Ref replaced by the object it names.

    Raises:
        WorkloadFault: A reference names nothing.
    """
    objects = dict[str, Any]()
    for name in PARTS:
        value = getattr(workload, name)
        if isinstance(value, Ref):
            objects[name] = _resolve(name, value)
    return replace(workload, **objects)


def build_model(workload: Workload, config: TrainingConfig, device: Device) -> nn.Module:
    """Return the user's model in training mode, on the device, arranged by the configuration.

    That is its layout, strategy and compilation. For strategy ddp, the process group must be open.

    Args:
        workload: The user's workload, resolved.
        config: The trial's settings.
        device: The device of this rank.

    Raises:
        WorkloadFault: The workload gives no model.
    """
    return arranged(config, made_model(workload).train(), device.torch_device, is_trial=True)


def made_model(workload: Workload) -> nn.Module:
    """Return the user's model as it is, before any configuration."""
    model: nn.Module = _made(
        "model", workload.model, "be an nn.Module or", lambda found: isinstance(found, nn.Module)
    )
    return model


def build_dataset(workload: Workload) -> Any:
    """Return the user's dataset, DataLoader or TfData.

    A map-style dataset has __getitem__, an iterable one __iter__.

    Raises:
        WorkloadFault: It is none of these, or empty, or a bare tf.data pipeline.
    """
    made = made_dataset(workload)
    if type(made).__module__.partition(".")[0] == "tensorflow":
        raise WorkloadFault(
            "a tf.data pipeline must come as autotune.TfData(build), so that its settings can be "
            f"tuned, but dataset is {_kind(made)}; pass TfData with the function that builds it"
        )
    try:
        data = inner_loader(made)
    except ValueError as error:
        raise WorkloadFault(str(error)) from error
    if length_of(dataset_of(data)) == 0:
        raise WorkloadFault(
            "the dataset must hold at least one sample, but its length is 0; check the path it "
            "reads from"
        )
    return data


def made_dataset(workload: Workload) -> Any:
    """Return the user's dataset as it is, with wrappers."""
    return _made("dataset", workload.dataset, "have __getitem__ or __iter__, or be", _holds_items)


def dataset_of(data: Any) -> Any:
    """Return the dataset of a DataLoader; a dataset is returned as it is."""
    return data.dataset if isinstance(data, DataLoader) else data


def length_of(data: Any) -> int | None:
    """Return the items of a dataset, or the batches of a loader's epoch; None if it has no length."""
    with suppress(TypeError, NotImplementedError):
        return len(data)
    return None


def is_stream(dataset: Any) -> bool:
    """Return whether the dataset itself decides, by `__iter__`, which items come and when an epoch ends."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def build_optimizer(
    workload: Workload, model: nn.Module, lr: float, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """Return the user's optimizer, or SGD.

    Args:
        workload: The workload.
        model: The model, whose parameters that require a gradient are trained.
        lr: The learning rate.
        fused: Use torch's fused implementation or not, whatever the user's code chooses; None: keep
            that choice. An optimizer that is fused in a way of its own (see can_fuse) keeps it too.

    Raises:
        WorkloadFault: There is nothing to train, or the user's optimizer can't be made for it.
    """
    optimizer = _own_optimizer(workload, model, lr)
    if fused is not None and fused != is_fused(optimizer) and (fused or can_fuse(optimizer)):
        set_fused(optimizer, is_on=fused)
    return optimizer


def _own_optimizer(workload: Workload, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the user's optimizer, fused or not as their code chooses, or SGD."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise WorkloadFault("the model must have parameters to train, but none requires a gradient")
    if workload.optimizer is None:
        return torch.optim.SGD(parameters, lr=lr)
    try:
        if isinstance(workload.optimizer, torch.optim.Optimizer):
            optimizer = optimizer_like(workload.optimizer, parameters, lr)
        else:
            optimizer = workload.optimizer(parameters, lr)
    except ForeignParametersError as error:
        raise WorkloadFault(str(error)) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadFault(
            f"optimizer(params, lr) must return a torch.optim.Optimizer, but returned "
            f"{_kind(optimizer)}"
        )
    return optimizer


def optimizer_facts(optimizer: torch.optim.Optimizer, *, can_fuse: bool = False) -> OptimizerFacts:
    """Return the name, betas and eps of an optimizer.

    Args:
        optimizer: The optimizer.
        can_fuse: Torch has a fused implementation of it, as found by the caller.
    """
    betas = optimizer.defaults.get("betas")
    eps = optimizer.defaults.get("eps")
    pair = None
    if isinstance(betas, tuple | list) and len(betas) == 2:
        pair = float(betas[0]), float(betas[1])
    return OptimizerFacts(
        name=type(optimizer).__name__,
        betas=pair,
        eps=float(eps) if isinstance(eps, int | float) else None,
        can_fuse=can_fuse,
    )


def _holds_items(found: Any) -> bool:
    if isinstance(found, TfData):
        return True
    if isinstance(found, type):
        return False
    return hasattr(found, "__getitem__") or hasattr(found, "__iter__")


def _made(part: str, given: Any, rule: str, fits: Callable[[Any], bool]) -> Any:
    """Return the part that the user has given, or what their factory returns.

    Args:
        part: Name of the part.
        given: The object or factory.
        rule: What the part must be, for the message.
        fits: Returns whether an object is of that kind.

    Raises:
        WorkloadFault: It is of another kind, or can't be called without arguments.
    """
    made = given
    if not fits(given) and callable(given):
        try:
            inspect.signature(given).bind()
        except ValueError:
            pass  # a builtin has no signature
        except TypeError as error:
            raise WorkloadFault(
                f"{part} must be callable without arguments, but {_kind(given)} is not ({error})"
            ) from error
        made = given()
    if not fits(made):
        raise WorkloadFault(
            f"{part} must {rule} a callable that returns one, but got {_kind(made)}"
        )
    return made


def _resolve(part: str, ref: Ref) -> Any:
    """Return the object that a reference names, `module:name` or `file.py:name`."""
    place, _, names = ref.target.rpartition(":")
    is_file = place.endswith(".py")
    value: Any = _module_from_file(part, place, ref) if is_file else _module_by_name(part, place)
    for name in names.split("."):
        if not hasattr(value, name):
            hint = ""
            near = get_close_matches(name, dir(value), n=1)
            if near:
                hint = f"; did you mean {near[0]!r}?"
            raise WorkloadFault(f"workload.{part}: {place} has no attribute {name!r}{hint}")
        value = getattr(value, name)
    return value


def _module_by_name(part: str, name: str) -> ModuleType:
    """Import a module; raise `WorkloadFault` only if this module itself is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the user's module exists and imports something that does not
        raise WorkloadFault(
            f"workload.{part}: there is no module named {error.name!r}; install it or set "
            f"PYTHONPATH"
        ) from error


def _module_from_file(part: str, place: str, ref: Ref) -> ModuleType:
    # Find the file in the folders of the reference, else in the current one.
    """Import a file as a module, once per process."""
    candidates = [Path(folder, place).resolve() for folder in ref.folders or (".",)]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        places = " and ".join(str(candidate) for candidate in candidates)
        raise WorkloadFault(f"workload.{part}: there is no file {place} (looked for {places})")

    # Import it under a name of its own, so that files with equal names do not collide.
    name = f"{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadFault(f"workload.{part}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # it may import files of its own folder, as when run as a script; after everything else
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    # loader workers that are not forked can't import it by name
    cloudpickle.register_pickle_by_value(module)
    return module


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def seed_all(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> tuple[Any, ...]:
    """Return the state of the random generators of Python, NumPy and torch."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def put_random_state(state: tuple[Any, ...]) -> None:
    """Restore a state returned by `random_state`."""
    of_python, of_numpy, of_torch = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)


def kept_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model).items()}


def put_back(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Restore parameters and buffers in place.

    Args:
        model: The model.
        kept: Result of `kept_weights`; buffers that the model made since are its own cache and
            stay.
    """
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if name in kept and tensor.shape == kept[name].shape:
                tensor.copy_(kept[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
