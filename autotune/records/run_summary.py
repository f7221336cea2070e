"""The result of a finished or interrupted search, from which all reports are made, and its progress on the way."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.records.measurement import Interval
from autotune.records.recommendation import Recommendation
from autotune.records.run_spread import RunSpread
from autotune.records.trial import TrialRecord
from autotune.settings.budget import Budget
from autotune.settings.environment import Environment
from autotune.settings.objective import Objective
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import WorkloadFacts

__all__ = ["Known", "Phase", "Progress", "RunSummary", "changed_settings", "is_single"]

Phase = Literal["probe", "search", "confirm", "measure", "curves"]
"""Of a search: probe, search, confirm (what leads and the baseline run again, alternately). Of a diagnosis: probe,
measure (the baseline), curves (other settings)."""


class RunSummary(FrozenModel):
    """Everything that a report shows; read back from a run folder as it was written."""

    format: Literal[2] = 2
    """Of summary.json and environment.json: raised when a key goes or changes its meaning."""
    name: str
    """What was tuned, in a few words."""
    environment: Environment
    facts: WorkloadFacts
    command: tuple[str, ...] = ()
    """The command that was the workload, word by word; () where a model and a dataset were given."""
    objective: Objective
    budget: Budget
    baseline: TrainingConfig
    limit_bytes: int
    """The memory limit in bytes."""
    memory_source: str
    """What the memory limit is judged on."""
    seed: int
    """Of the search's proposals, and of every trial."""
    trials: tuple[TrialRecord, ...]
    """In the order of the study."""
    run_spread: RunSpread
    """Between runs of the same settings on this machine: all intervals rest on it."""
    recommendation: Recommendation | None
    """None where nothing feasible was found."""
    notes: tuple[Note, ...] = ()
    """What the user should know of this run."""
    stopped_because: Note
    """Why no further trial ran."""
    is_complete: bool = True
    """The search came to its end: nothing interrupted it."""
    wall_s: float
    """Seconds from the call to the recommendation; of a search that went on after an interruption, its last part."""
    promised_s: float | None = None
    """What it was expected to take before its first trial; None where it continued an interrupted search."""
    autotune_version: str
    """Of autotune, which wrote it."""


class Known(FrozenModel):
    """What a search knows by now of the best over the baseline."""

    number: int
    """Of the best trial."""
    speedup: Interval
    """What is believed, with its 95 % interval."""
    is_proven: bool
    """It beats the baseline at the kept error."""


class Progress(FrozenModel):
    """Where a search or a diagnosis stands; sent to the display after every step."""

    phase: Phase
    done: int = 0
    """Trials measured; once one was settled on, pairs of runs of it and of the baseline."""
    total: int = 1
    """Trials at the most."""
    elapsed_s: float
    remaining_s: float | None = None
    """Seconds left of the time-out, or an estimate; None where neither is known."""
    baseline: TrialRecord | None = None
    best: TrialRecord | None = None
    """The best feasible trial so far."""
    last: TrialRecord | None = None
    """The trial that has just ended; None at the start of a phase."""
    can_win: float | None = None
    """What other settings can still give at the most, as a share of the best rate: 0.04 = 4 %; None: not known."""
    known: Known | None = None
    """What is known of the best over the baseline; None while the baseline leads."""
    warnings: tuple[Note, ...] = ()
    """What the user should know before the search begins; each is sent once."""


def changed_settings(config: TrainingConfig, baseline: TrainingConfig) -> dict[str, tuple[object, object]]:
    """Settings in which a configuration differs from the baseline: {name: (baseline's, its own)}."""
    before, after = baseline.model_dump(), config.model_dump()
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}


def is_single(changes: Collection[str]) -> bool:
    """Whether settings, by name, are changed as one: with a token budget the samples of a batch go along."""
    return len(set(changes) - {"max_tokens"} or set(changes)) == 1
