"""What a search says, as benchmarks read it: the one place that knows the words of a Recommendation."""

from __future__ import annotations

from autotune import TrainingConfig
from autotune.records.measurement import Interval
from autotune.records.result import Recommendation

__all__ = ["claim_of", "is_proven", "recommended_of", "verdict_of"]


def recommended_of(said: Recommendation | None, baseline: TrainingConfig) -> TrainingConfig:
    """What a user would run from now on, at the baseline's learning rate; the baseline where nothing is said."""
    return baseline if said is None else said.config.model_copy(update={"lr": baseline.lr})


def is_proven(said: Recommendation) -> bool:
    """Whether it says that its recommendation beats the baseline."""
    return said.verdict == "faster"


def claim_of(said: Recommendation) -> Interval | None:
    """What it says of the recommendation's rate over the baseline's; None where it recommends the baseline."""
    return None if said.number == 0 else said.speedup


def verdict_of(said: Recommendation) -> str:
    """Its word."""
    return said.verdict
