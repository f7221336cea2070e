"""How far runs of the same settings stray from one another on a machine: what was learned of it, as data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.frozen import FrozenModel

__all__ = ["MOST_SD", "RunSpread"]

MOST_SD = 10.0
"""A factor of 22,000: more is no spread but a broken file. Our own convention."""


class RunSpread(FrozenModel):
    """The spread between runs of the same settings, some minutes apart."""

    sd: float = Field(gt=0, le=MOST_SD)
    """Standard deviation of the logarithm of a run's rate, beyond what its own window can tell: 0.05 is about 5 %."""
    degrees_of_freedom: float = Field(gt=0, allow_inf_nan=False)
    """How much the figure rests on: as many as a standard deviation from one run more would have."""
    source: Literal["assumed", "machine", "workload"] = "assumed"
    """Whether it is our convention for such a device, or was learned on this machine, of others or this workload."""
