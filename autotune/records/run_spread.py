"""How far runs of the same settings stray from one another on a machine: what was learned of it, as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from autotune.frozen import FrozenModel

__all__ = ["MOST_SD", "RunSpread"]

MOST_SD = 10.0
"""A factor of 22,000: more is no spread but a broken file. Our own convention."""


class RunSpread(FrozenModel):
    """The spread between runs of the same settings, some minutes apart.

    On an accelerator there are two kinds of runs. Those that the device holds hardly differ; those that the host holds,
    by launching, loading or copying, differ as much as the host's speed does.
    """

    sd: float = Field(gt=0, le=MOST_SD)
    """Standard deviation of the logarithm of a run's rate, beyond what its own window can tell: 0.05 is about 5 %. On
    an accelerator of runs that the host holds."""
    degrees_of_freedom: float = Field(gt=0, allow_inf_nan=False)
    """How much the figure rests on: as many as a standard deviation from one run more would have."""
    source: Literal["assumed", "workload"] = "assumed"
    """Our convention for such a device, or learned from this search's repeats."""
    device: RunSpread | None = None
    """The same of runs that the device holds; None on a CPU, where all runs are of one kind."""

    def of(self, held_by_device: Iterable[bool]) -> RunSpread:
        """Return the spread that counts where some runs are compared: the host's, unless the device holds all of them.

        The host's is the wider one: whoever compares runs of both kinds errs on the safe side.

        Args:
            held_by_device: Of each run, whether the device holds it.
        """
        runs = tuple(held_by_device)
        return self.device if self.device is not None and runs and all(runs) else self
