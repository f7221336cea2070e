"""`autotune.load`: a recommendation read back, with a warning where this is another machine than it was found on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from autotune.files.recommended_file import read_recommended
from autotune.files.recommended_machine import differing_fields, read_machine
from autotune.launch.local.nvidia_driver import driver_and_gpus
from autotune.messages.search import found_elsewhere
from autotune.settings.applied.cores.processor import processor_name, usable_cores
from autotune.settings.training_config import TrainingConfig

__all__ = ["load"]


def load(path: str | Path) -> TrainingConfig:
    """Read the settings of a recommended.yaml.

    Warns:
        UserWarning: this machine is another than the one that they were found on, by what can be told without opening
            a device: processor or NVIDIA GPU, driver, cores, and torch's version where torch is imported already.

    Raises:
        ConfigError: the file can't be read, is no recommended.yaml, or was changed to what breaks a rule.
    """
    config = read_recommended(path)
    there = read_machine(Path(path))
    differing = differing_fields(there, _told_here(there))
    if differing:
        warnings.warn(str(found_elsewhere(str(path), differing)), stacklevel=2)
    return config


def _told_here(there: Mapping[str, object]) -> dict[str, object]:
    """What can be told of this machine, under the file's names, for a device of the kind that the file names."""
    told: dict[str, object] = {"cores": usable_cores()}
    if there.get("device_kind") == "cpu":
        told["name"] = processor_name()
    elif there.get("device_kind") == "cuda":
        driver, gpus = driver_and_gpus()
        told |= {"driver": driver, "name": there.get("name") if there.get("name") in gpus else next(iter(gpus), None)}
    if (torch := sys.modules.get("torch")) is not None:
        told["torch"] = str(torch.__version__)
    return told
