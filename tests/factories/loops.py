"""Feeds for the measuring loop, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.worker.feed import Feed
from autotune.worker.loader import build_loader


def make_feed(
    dataset: Any, config: TrainingConfig, *, is_shallow: bool = False, **parts: Any
) -> Feed:
    """Return a feed of a dataset, with the workload's other parts as keywords; not started."""
    workload = Workload(model=None, dataset=dataset, **parts)
    loader = build_loader(workload, dataset, config, Path("/nowhere"))
    return Feed(loader, is_shallow=is_shallow)
