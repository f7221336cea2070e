"""A search, parsed and checked once: what the YAML border and the Python call both make, and what the search takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from autotune.settings.budget import Budget
from autotune.settings.executor import Executor
from autotune.settings.objective import Objective
from autotune.settings.search_options import SearchOptions
from autotune.settings.search_space import SearchSpace
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a search is asked for."""

    name: str
    """A few words for reports: the configuration file's name, or the model's class."""
    workload: Workload
    baseline: TrainingConfig = field(default_factory=TrainingConfig)
    space: SearchSpace = field(default_factory=SearchSpace)
    objective: Objective = field(default_factory=Objective)
    budget: Budget = field(default_factory=Budget)
    search: SearchOptions = field(default_factory=SearchOptions)
    device: str = "auto"
    executor: Executor = field(default_factory=Executor)
    run_dir: Path | None = None
    """None: a new folder below ./runs."""
    seed: int = 0
