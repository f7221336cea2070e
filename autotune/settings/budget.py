"""How much a search may spend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autotune.frozen import FrozenModel

__all__ = ["ASSUMED_TRAINING_HOURS", "MAX_TRIALS", "Budget"]

ASSUMED_TRAINING_HOURS = 24.0
"""Of a training of which nothing is said: our convention."""
MAX_TRIALS = 40
"""Trials of a search whose number was left open: our convention."""


class Budget(FrozenModel):
    """Trials and seconds; the baseline is the first trial."""

    n_trials: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Measured trials; None: at most 40, and the search may stop by itself."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds for one call, proving the gain included; a search that goes on has them anew. None: no limit."""

    training_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Hours of training that are still to come: a search that may stop by itself tries nothing that costs more of them
    than it is expected to win. None: 24 are assumed."""

    @property
    def training_s(self) -> float:
        """Seconds of training that are still to come, as far as is known."""
        return 3600 * (self.training_hours or ASSUMED_TRAINING_HOURS)

    @property
    def max_trials(self) -> int:
        """The most trials that are measured."""
        return MAX_TRIALS if self.n_trials is None else self.n_trials

    @property
    def may_stop_early(self) -> bool:
        """Whether the search may stop by itself."""
        return self.n_trials is None
