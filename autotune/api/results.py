"""Results read back from disk: the settings of a recommended.yaml, and all that a run folder holds."""

from __future__ import annotations

from pathlib import Path

from autotune.files.recommended_file import read_recommended
from autotune.files.run_folder import read_summary
from autotune.records.run_summary import RunSummary
from autotune.settings.training_config import TrainingConfig

__all__ = ["load", "read_run"]


def load(path: str | Path) -> TrainingConfig:
    """Read the settings of a recommended.yaml.

    Raises:
        ConfigError: the file is missing or is no recommended.yaml.
    """
    return read_recommended(Path(path))


def read_run(run_dir: str | Path) -> RunSummary:
    """Everything that reports are made from, read from a run folder alone.

    Raises:
        ConfigError: the folder holds no finished search.
    """
    return read_summary(Path(run_dir))
