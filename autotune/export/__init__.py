"""Write recommended settings in the words of other frameworks, one module for each framework.

Comes in: a TrainingConfig and a target's name, or the contents of a framework's file. Goes out: an
Export or a Reading, or a ConfigError that lists the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.export.accelerate import from_accelerate, to_accelerate
from autotune.export.axolotl import from_axolotl, to_axolotl
from autotune.export.composer import to_composer
from autotune.export.deepspeed import from_deepspeed, to_deepspeed
from autotune.export.hf import from_hf, to_hf
from autotune.export.lightning import to_lightning
from autotune.export.table import Export, Reading, Wanted, wanted
from autotune.export.timm import to_timm
from autotune.export.torchrun import to_torchrun
from autotune.export.ultralytics import to_ultralytics

if TYPE_CHECKING:
    from autotune.config.training_config import TrainingConfig


TARGETS: Mapping[str, Callable[[Wanted], Export]] = {
    "hf": to_hf,
    "accelerate": to_accelerate,
    "lightning": to_lightning,
    "deepspeed": to_deepspeed,
    "torchrun": to_torchrun,
    "timm": to_timm,
    "axolotl": to_axolotl,
    "ultralytics": to_ultralytics,
    "composer": to_composer,
}
READERS: Mapping[str, Callable[[Mapping[str, Any]], Reading]] = {
    "hf": from_hf,
    "accelerate": from_accelerate,
    "deepspeed": from_deepspeed,
    "axolotl": from_axolotl,
}


def export_to(
    config: TrainingConfig, target: str, *, device: str | None = None, optimizer: str | None = None
) -> Export:
    """Export a TrainingConfig; see TrainingConfig.to.

    Raises:
        ConfigError: There is no such target.
    """
    if target not in TARGETS:
        raise ConfigError(
            f"a target must be one of {', '.join(TARGETS)}, but got {target!r:.80}; take one of "
            "these, or dataloader_kwargs and prepare in your own loop"
        )
    return TARGETS[target](wanted(config, device=device, optimizer=optimizer))
