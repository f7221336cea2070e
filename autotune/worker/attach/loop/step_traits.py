"""What a script's own step is like, as far as settings of the step depend on it, and which of these are within reach.

Comes in: the script's modules, its batches and its optimizer, as Sightings have them. Goes out: values that are
observed, facts of the workload, and for each of these settings whether it can be changed from outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autotune.settings.applied.batch import IMAGE_DIMS
from autotune.worker.measure.batch import tensors_of
from autotune.worker.setup.algorithms import has_convolutions, is_deterministic

__all__ = [
    "BatchShapes",
    "asked_lr",
    "is_channels_last",
    "observed_step",
    "reached_step",
    "step_facts",
    "unreached_step",
]


@dataclass(slots=True)
class BatchShapes:
    """Shapes of the batches that a script trains on."""

    seen: Counter[tuple[torch.Size, ...]] = field(default_factory=Counter)

    def see(self, batch: object) -> None:
        """Its loader has handed one on; one without tensors tells nothing."""
        shapes = tuple(tensor.shape for tensor in tensors_of(batch))
        if shapes:
            self.seen[shapes] += 1

    @property
    def are_fixed(self) -> bool | None:
        """Whether all are of the same shapes, but for an epoch's last one; None: too few were seen."""
        if self.seen.total() < 3:  # two may be alike by chance
            return None
        is_alike = len({tuple((len(shape), *shape[1:]) for shape in each) for each in self.seen}) == 1
        return is_alike and len(self.seen) <= 2  # one size, and the smaller one that an epoch may end with


def observed_step(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The values that a script has of these settings; of an optimizer that is not known, torch's own."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "fused": any(bool(group.get("fused")) for group in groups),
    }


def asked_lr(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate that the script has asked for: before a schedule has changed it; its peak, where that is told.

    Source: torch.optim.lr_scheduler, LRScheduler (initial_lr) and OneCycleLR (max_lr).
    """
    group = optimizer.param_groups[0]
    rate = group.get("max_lr", group.get("initial_lr", group.get("lr")))
    return float(rate) if rate is not None and float(rate) > 0 else None


def is_channels_last(module: nn.Module) -> bool:
    """Whether the 4-D parameters of a module are laid out so, wherever that can be told."""
    images = [part for part in module.parameters() if part.ndim == IMAGE_DIMS and min(part.shape[1:]) > 1]
    return bool(images) and all(
        part.is_contiguous(memory_format=torch.channels_last) and not part.is_contiguous() for part in images
    )


def step_facts(modules: Iterable[nn.Module], shapes: BatchShapes) -> dict[str, Any]:
    """What of WorkloadFacts says whether these settings can bring anything."""
    return {"has_convolutions": has_convolutions(modules), "has_fixed_shapes": shapes.are_fixed}


def reached_step(device_type: str) -> Iterator[str]:
    """Settings of the step that can be changed from outside."""
    if device_type == "cuda" and not is_deterministic():
        yield "cudnn_benchmark"


def unreached_step(
    optimizer: torch.optim.Optimizer, device_type: str, modules: Iterable[nn.Module], *, is_compiled: bool
) -> dict[str, str]:
    """Those that can't be, each with a code of the reason; one that could bring nothing here is left out."""
    reasons: dict[str, str] = {}
    if is_compiled:
        reasons["compile_mode"] = "in_the_script"
    is_torchs = type(optimizer).__module__.startswith("torch.optim.") and "fused" in optimizer.defaults
    if is_torchs and not observed_step(optimizer)["fused"]:
        reasons["fused"] = "own_optimizer"
    if device_type == "cuda" and has_convolutions(modules):
        reasons["cudnn_benchmark"] = "own_algorithms"
    return reasons
