"""`autotune compare`: what differs between the searches in two run folders, and whether by more than noise.

Comes in: two folders. Goes out: a Comparison.
"""

from __future__ import annotations

from pathlib import Path

from autotune.files.run_folder import read_summary
from autotune.report.comparison import Comparison, compare_summaries

__all__ = ["compare_runs"]


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare two finished searches, whatever machines and versions of autotune they are from.

    Raises:
        ConfigError: a folder holds no finished search, or one that can't be read; the message names the file.
    """
    return compare_summaries(read_summary(first), read_summary(second), (str(first), str(second)))
