"""From a Workload to what a trial trains: model, dataset and optimizer, on the device and in the layout asked.

User code runs here. What is wrong with the workload itself is a WorkloadFault: a complete sentence
for the user.
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
    """Something about the user's workload can't be used; the message states rule, value and remedy."""


def resolved(workload: Workload) -> Workload:
    """The workload with every Ref replaced by the object it names.

    Raises:
        WorkloadFault: a reference names nothing.
    """
    found = {
        name: getattr(workload, name) for name in PARTS if isinstance(getattr(workload, name), Ref)
    }
    return replace(workload, **{name: _resolve(name, ref) for name, ref in found.items()})


def build_model(workload: Workload, config: TrainingConfig, device: Device) -> nn.Module:
    """The user's model in training mode, on the device, in the configuration's layout and strategy, compiled if asked.

    For strategy ddp, the process group must be open.
    """
    return config.arrange(made_model(workload).train(), device.torch_device, is_trial=True)


def made_model(workload: Workload) -> nn.Module:
    """The user's model as it comes."""
    model: nn.Module = _made(
        "model", workload.model, "be an nn.Module or", lambda found: isinstance(found, nn.Module)
    )
    return model


def build_dataset(workload: Workload) -> Any:
    """The user's dataset, DataLoader or TfData: a map-style dataset has __getitem__, an iterable one __iter__."""
    made = made_dataset(workload)
    if type(made).__module__.partition(".")[0] == "tensorflow":
        raise WorkloadFault(
            "a tf.data pipeline must come as autotune.TfData(build), so that its settings can be "
            "tuned, but dataset is "
            f"{_kind(made)}; pass TfData with the function that builds it"
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
    """The user's dataset as it comes."""
    return _made("dataset", workload.dataset, "have __getitem__ or __iter__, or be", _holds_items)


def dataset_of(data: Any) -> Any:
    """The dataset of a DataLoader; a dataset as it is."""
    return data.dataset if isinstance(data, DataLoader) else data


def length_of(data: Any) -> int | None:
    """Items of a dataset, or batches of a loader's epoch; None where it has no length."""
    with suppress(TypeError, NotImplementedError):
        return len(data)
    return None


def is_stream(dataset: Any) -> bool:
    """Whether the dataset itself says which items come and when an epoch ends, by `__iter__`."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def build_optimizer(
    workload: Workload, model: nn.Module, lr: float, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """The user's optimizer, or SGD.

    Args:
        workload: Whose optimizer.
        model: Its parameters that require a gradient are trained.
        lr: The learning rate.
        fused: As a configuration has it: by torch's fused implementation, or not, whatever the
            user's own code chooses.
            None: as that chooses, which an optimizer keeps too that is fused in a way of its own
                (see can_fuse).

    Raises:
        WorkloadFault: there is nothing to train, or what the user has given makes no optimizer of
            it.
    """
    optimizer = _own_optimizer(workload, model, lr)
    if fused is not None and fused != is_fused(optimizer) and (fused or can_fuse(optimizer)):
        set_fused(optimizer, is_on=fused)
    return optimizer


def _own_optimizer(workload: Workload, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise WorkloadFault("the model must have parameters to train, but none requires a gradient")
    if workload.optimizer is None:
        return torch.optim.SGD(parameters, lr=lr)
    try:
        optimizer = (
            optimizer_like(workload.optimizer, parameters, lr)
            if isinstance(workload.optimizer, torch.optim.Optimizer)
            else workload.optimizer(parameters, lr)
        )
    except ForeignParametersError as error:
        raise WorkloadFault(str(error)) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadFault(
            f"optimizer(params, lr) must return a torch.optim.Optimizer, but returned "
            f"{_kind(optimizer)}"
        )
    return optimizer


def optimizer_facts(optimizer: torch.optim.Optimizer, *, can_fuse: bool = False) -> OptimizerFacts:
    """Name, betas and eps of an optimizer, and whether torch has it fused, which is for the caller to find out."""
    betas = optimizer.defaults.get("betas")
    eps = optimizer.defaults.get("eps")
    pair = (
        (float(betas[0]), float(betas[1]))
        if isinstance(betas, tuple | list) and len(betas) == 2
        else None
    )
    return OptimizerFacts(
        name=type(optimizer).__name__,
        betas=pair,
        eps=float(eps) if isinstance(eps, int | float) else None,
        can_fuse=can_fuse,
    )


def _holds_items(found: Any) -> bool:
    if isinstance(found, TfData):
        return True
    return not isinstance(found, type) and (
        hasattr(found, "__getitem__") or hasattr(found, "__iter__")
    )


def _made(part: str, given: Any, rule: str, fits: Callable[[Any], bool]) -> Any:
    """What the user has given for a part, or what it returns where it is a factory; of the kind that the rule names."""
    made = given if fits(given) else _called(part, given)
    if not fits(made):
        raise WorkloadFault(
            f"{part} must {rule} a callable that returns one, but got {_kind(made)}"
        )
    return made


def _called(part: str, factory: Any) -> Any:
    if not callable(factory):
        raise WorkloadFault(
            f"{part} must be an object of its kind or a callable that returns one, but got "
            f"{_kind(factory)}"
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise WorkloadFault(
            f"{part} must be callable without arguments, but {_kind(factory)} is not ({error})"
        ) from error
    except ValueError:
        return factory()  # a builtin that has no signature to look at
    return factory()


def _resolve(part: str, ref: Ref) -> Any:
    place, _, names = ref.target.rpartition(":")
    value: Any = (
        _module_from_file(part, place, ref)
        if place.endswith(".py")
        else _module_by_name(part, place)
    )
    for name in names.split("."):
        if not hasattr(value, name):
            near = get_close_matches(name, dir(value), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise WorkloadFault(f"workload.{part}: {place} has no attribute {name!r}{hint}")
        value = getattr(value, name)
    return value


def _module_by_name(part: str, name: str) -> ModuleType:
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
    candidates = [Path(folder, place).resolve() for folder in ref.folders] or [
        Path(place).resolve()
    ]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        places = " and ".join(str(candidate) for candidate in candidates)
        raise WorkloadFault(f"workload.{part}: there is no file {place} (looked for {places})")
    name = f"{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadFault(f"workload.{part}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(
        str(path.parent)
    )  # the file's neighbours, as when it is run as a script; behind all else
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(
        module
    )  # loader workers that are not forked can't import it by name
    return module


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's random generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> tuple[Any, ...]:
    """Where those generators are."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def put_random_state(state: tuple[Any, ...]) -> None:
    """Put them back to where they were."""
    of_python, of_numpy, of_torch = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)


def kept_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model).items()}


def put_back(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Put weights and buffers back in place; buffers that the model has made since are its own cache."""
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if name in kept and tensor.shape == kept[name].shape:
                tensor.copy_(kept[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
