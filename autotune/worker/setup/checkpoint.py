"""Weights of the user's training, read into a model that was just built.

Comes in: a path to weights, or the user's function. Goes out: nothing; the model has them. Files are data: safetensors,
or what torch.save has written, of which only tensors and plain containers are read (weights_only).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.worker.setup.build import WorkloadFault

__all__ = ["load_checkpoint"]

_INSIDE = ("state_dict", "model_state_dict", "model")
"""Keys below which a model's weights are often kept: by Lightning, torch's tutorials, timm among others."""
_PREFIXES = ("module.", "_orig_mod.")
"""Of weights that were saved from within DistributedDataParallel or torch.compile."""
_REMEDY = "pass a function checkpoint(model) that loads it"


def load_checkpoint(checkpoint: str | Mapping[str, Any] | Callable[[nn.Module], object], model: nn.Module) -> None:
    """Load weights into a model, all of them, in place.

    Raises:
        WorkloadFault: the file can't be read, or holds other weights than the model has.
    """
    if callable(checkpoint):
        if isinstance(found := checkpoint(model), nn.Module) and found is not model:
            raise WorkloadFault(
                "checkpoint(model) must load weights into the model that it is given, but returns another"
            )
        return
    name = checkpoint if isinstance(checkpoint, str) else "what was given"
    weights = _weights_in(_read(checkpoint) if isinstance(checkpoint, str) else checkpoint, name)
    own = model.state_dict()
    weights = _without_prefixes(weights, own)
    absent = [key for key in own if key not in weights and not _is_tied(own, key, weights)]
    unknown = [key for key in weights if key not in own]
    other = [key for key in weights if key in own and weights[key].shape != own[key].shape]
    for rule, keys in (("lacks", absent), ("also has", unknown), ("has another shape of", other)):
        if keys:
            raise WorkloadFault(
                f"workload.checkpoint must hold the model's weights, but {name} {rule} {', '.join(keys[:3])}"
                f"{' and more' if len(keys) > 3 else ''}; {_REMEDY}"
            )
    model.load_state_dict(weights, strict=False)


def _read(path: str) -> Any:
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise WorkloadFault(
            f"workload.checkpoint: reading {path} needs the package safetensors; pip install safetensors"
        ) from error
    except Exception as error:  # whatever a reader makes of a file that is none
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WorkloadFault(
            f"workload.checkpoint must be a file of weights alone, but {path}: {reason:.300}; {_REMEDY}"
        ) from error


def _weights_in(found: Any, name: str) -> dict[str, Tensor]:
    if isinstance(found, Mapping):
        inner = next((found[key] for key in _INSIDE if isinstance(found.get(key), Mapping)), found)
        if inner and all(isinstance(value, Tensor) for value in inner.values()):
            return dict(inner)
    keys = f"the keys {', '.join(map(str, list(found)[:8]))}" if isinstance(found, Mapping) else type(found).__name__
    raise WorkloadFault(
        f"workload.checkpoint must hold a state_dict, or one below {', '.join(_INSIDE)}, but {name} has {keys}; "
        f"{_REMEDY}"
    )


def _without_prefixes(weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the model's own names, whatever they were wrapped in when they were saved."""
    while not weights.keys() & own.keys():
        prefix = next((prefix for prefix in _PREFIXES if all(key.startswith(prefix) for key in weights)), None)
        if prefix is None:
            break
        weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def _is_tied(own: Mapping[str, Tensor], key: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether a weight that a file leaves out is another one of the file's as well, such as a tied embedding."""
    view = _view(own[key])
    return own[key].numel() > 0 and any(other in weights and _view(own[other]) == view for other in own)


def _view(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where a tensor lies, and how: an RNN's weights on CUDA share a storage, each with a part of its own."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
