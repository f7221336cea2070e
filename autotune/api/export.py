"""`autotune export`: recommended settings in the words of another framework.

Comes in: a recommended.yaml, or the run folder that holds one, and a target's name. Goes out: an Export for the device
that the settings were found on, as a JSON document too.
"""

from __future__ import annotations

import json
import warnings
from os.path import lexists
from pathlib import Path

from autotune.api.load import load
from autotune.errors import ConfigError
from autotune.files.recommended_machine import read_machine
from autotune.files.run_folder import RunFolder, read_summary, recommended_of
from autotune.settings.exports.export import Export

__all__ = ["export_json", "export_remarks", "export_run"]


def export_run(path: Path, target: str) -> Export:
    """The recommended settings for a target.

    Args:
        path: A recommended.yaml, or a run folder.
        target: One of the names of TrainingConfig.to.

    Raises:
        ConfigError: the file can't be read, or there is no such target.
    """
    file = recommended_of(path)
    config = load(file)
    device = read_machine(file).get("device")
    optimizer = None if file == path else _optimizer_of(path)
    return config.to(target, device=str(device) if device else None, optimizer=optimizer)


def _optimizer_of(run_dir: Path) -> str | None:
    """The class of the optimizer that trials had, with a warning where the run folder can't tell it."""
    if not lexists(RunFolder(run_dir).summary):  # a recommended.yaml was put into a folder by itself
        return None
    try:
        return read_summary(run_dir).facts.optimizer.name
    except ConfigError as error:
        warnings.warn(f"Exported without the name of your optimizer, which the run folder lacks: {error}", stacklevel=3)
        return None


def export_remarks(export: Export) -> list[str]:
    """What the text does not carry and where the target differs by itself, a line each."""
    dropped = [f"not exported: {setting}: {reason}" for setting, reason in export.dropped]
    return dropped + [f"differs by default: {name}: {reason}" for name, reason in export.defaults]


def export_json(export: Export) -> str:
    """The whole export as one document."""
    document = {
        "format": 1,
        "target": export.target,
        "text": export.text,
        "settings": export.settings,
        "dropped": [one._asdict() for one in export.dropped],
        "defaults": [one._asdict() for one in export.defaults],
    }
    return json.dumps(document, indent=2)
