"""Recorded surfaces, and a launcher that serves them through the product's ordinary launcher seam.

A surface is the whole grid of a workload as surfaces.py has recorded it on a real machine. ReplayLauncher answers a
trial with what was recorded of its configuration and charges the seconds that it took; no figure is made up, and what
was not recorded is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from autotune import TrainingConfig
from autotune.core.diagnosis import Curves
from autotune.core.environment import Environment
from autotune.core.trial import TrialResult
from autotune.core.workload import WorkloadFacts

__all__ = ["FORMAT_VERSION", "SURFACES", "RecordedTrial", "Surface", "Visit", "read_surface"]

FORMAT_VERSION = 1
SURFACES = Path(__file__).resolve().parent / "surfaces"
Visit = int | Literal["reference"]
"""Which visit of a point a trial was; "reference": the baseline, between other points."""


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """A trial of a point of the grid."""

    config: TrainingConfig
    visit: Visit
    result: TrialResult


@dataclass(frozen=True)
class Surface:
    """A workload's grid, as far as it was recorded."""

    header: Mapping[str, Any]
    trials: tuple[RecordedTrial, ...]
    curves: Curves | None
    curves_s: float
    """Seconds that recording the curves took."""

    @property
    def baseline(self) -> TrainingConfig:
        """What is run today."""
        return TrainingConfig.model_validate(self.header["baseline"])

    @property
    def limit_bytes(self) -> int:
        """The memory limit."""
        return int(self.header["limit_bytes"])

    @property
    def environment(self) -> Environment:
        """The machine that it was recorded on."""
        return Environment.model_validate(self.header["environment"])

    @property
    def facts(self) -> WorkloadFacts:
        """The workload as a probe has seen it."""
        return WorkloadFacts.model_validate(self.header["facts"])

    @cached_property
    def visits(self) -> dict[TrainingConfig, list[TrialResult]]:
        """Every visit of each point, in order; the references are none."""
        found: dict[TrainingConfig, list[TrialResult]] = {}
        for trial in self.trials:
            if trial.visit != "reference":
                found.setdefault(trial.config, []).append(trial.result)
        return found

    @property
    def configs(self) -> list[TrainingConfig]:
        """The points that were visited."""
        return list(self.visits)

    def is_over(self, config: TrainingConfig) -> bool:
        """Whether a visit of a point ran out of memory, or passed the limit."""
        return any(_is_over(result, self.limit_bytes) for result in self.visits[config])

    def rates(self) -> dict[TrainingConfig, float]:
        """The mean rate of each point whose every visit ended well and within the limit."""
        return {
            config: fmean(result.measurement.samples_per_s for result in results if result.measurement)
            for config, results in self.visits.items()
            if all(result.outcome == "ok" for result in results) and not self.is_over(config)
        }

    def pairs(self) -> Iterator[tuple[float, float]]:
        """The rates of two visits of a point, wherever there are two."""
        for results in self.visits.values():
            rates = [result.measurement.samples_per_s for result in results if result.measurement]
            yield from pairwise(rates)


def read_surface(path: Path) -> Surface:
    """Read a file of surfaces.py.

    Raises:
        ValueError: it is of another version.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_kind = {
        kind: list(group)
        for kind, group in groupby(sorted(lines, key=lambda line: line["kind"]), key=lambda line: line["kind"])
    }
    (header,) = by_kind["header"]
    if header["version"] != FORMAT_VERSION:
        raise ValueError(f"{path} must be of version {FORMAT_VERSION}, but is of {header['version']}; record it anew")
    curves = by_kind.get("curves", [None])[0]
    return Surface(
        header=header,
        trials=tuple(_trial_of(line) for line in by_kind.get("trial", ())),
        curves=None if curves is None else Curves.model_validate(curves["curves"]),
        curves_s=0.0 if curves is None else float(curves["wall_s"]),
    )


def _trial_of(line: Mapping[str, Any]) -> RecordedTrial:
    return RecordedTrial(
        config=TrainingConfig.model_validate(line["config"]),
        visit=line["visit"],
        result=TrialResult.model_validate(line["result"]),
    )


def _is_over(result: TrialResult, limit_bytes: int) -> bool:
    if result.measurement is None:
        return result.outcome in {"oom", "host_oom"}
    return result.measurement.peak_memory_bytes > limit_bytes
