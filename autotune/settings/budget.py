"""How much a search may spend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autotune.frozen import FrozenModel

__all__ = ["MAX_TRIALS", "Budget"]

MAX_TRIALS = 40
"""Trials of a search whose number was left open: our convention."""


class Budget(FrozenModel):
    """Trials and seconds; the baseline is the first trial."""

    n_trials: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Measured trials; None: at most 40, and the search may stop by itself."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds for one call, the confirmation included; a search that goes on has them anew. None: no limit."""

    @property
    def max_trials(self) -> int:
        """The most trials that are measured."""
        return MAX_TRIALS if self.n_trials is None else self.n_trials

    @property
    def may_stop_early(self) -> bool:
        """Whether the search may stop by itself."""
        return self.n_trials is None
