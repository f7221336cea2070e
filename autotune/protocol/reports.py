"""What a rank answers to any job.

One type for all kinds of job: most reports are failures, which are the same for every kind and are also written by
those that do not know the kind (a launcher, the group's report). A body for each kind would replace one check for None,
which every reader needs anyway since any job may fail, by a check of the body's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from autotune.frozen import FrozenModel
from autotune.records.conditions import DeviceConditions
from autotune.records.diagnosis import Curves
from autotune.records.precision_check import PrecisionFigures
from autotune.records.stress_check import StressFigures
from autotune.records.trial import TrialResult
from autotune.settings.environment import Environment
from autotune.settings.workload import WorkloadFacts

__all__ = ["REPORT_UNWRITTEN", "RankReport"]

REPORT_UNWRITTEN = 74
"""Exit code of a rank whose report could not be written. Source: sysexits.h (EX_IOERR)."""


class RankReport(FrozenModel):
    """A result, and the figures of the one kind of job that was run."""

    version: Literal[1] = 1
    rank: int = 0
    result: TrialResult
    environment: Environment | None = None
    """Of a description or a probe."""
    facts: WorkloadFacts | None = None
    """Of a probe."""
    variables: Mapping[str, str] = Field(default={})
    """Of a probe of a script: environment variables that it has set. They may be secret: the trial's folder alone holds
    them, until it is removed."""
    conditions: DeviceConditions | None = None
    """Of a probe: what used the device before this process opened it."""
    guard: PrecisionFigures | None = None
    curves: Curves | None = None
    stress: StressFigures | None = None
    workload_build_s: float | None = None
    """Of a series: seconds that reading the workload and building its model and dataset took, so far as it is built."""
    kept_bytes: int = 0
    """Of a series: RAM that it takes beside what its jobs take, for the weights that each begins with."""
    is_workload_fault: bool = False
    """The reason is a sentence about the user's workload, complete as it stands."""
    is_collateral: bool = False
    """This rank failed only because another rank was gone: its connection was closed, or a collective timed out."""

    def with_result(self, **changes: object) -> RankReport:
        """The report with these fields of its result changed."""
        return self.model_copy(update={"result": self.result.model_copy(update=changes)})
