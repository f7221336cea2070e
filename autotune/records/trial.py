"""One trial: how it ended, what it measured, and the record that is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp
from statistics import geometric_mean
from typing import Literal

from autotune.frozen import FrozenModel
from autotune.records.measurement import Block, Measurement
from autotune.records.precision_check import PrecisionFigures
from autotune.settings.training_config import TrainingConfig

__all__ = [
    "OUT_OF_MEMORY",
    "Failure",
    "Outcome",
    "Score",
    "TrialRecord",
    "TrialResult",
    "answered",
    "believed_score",
    "best_of",
    "reference_of",
    "runs_of",
    "score_value",
]

Outcome = Literal["ok", "over_memory", "oom", "host_oom", "timeout", "crashed", "diverged", "pruned", "invalid"]
OUT_OF_MEMORY: frozenset[Outcome] = frozenset({"oom", "host_oom"})
"""A trial that ran out of the device's memory, or of RAM."""

_MOST_TIMEOUTS = 2
"""Runs of one configuration that hit their deadline before it counts as one that hangs: our own convention."""


class Failure(FrozenModel):
    """The exception that ended a rank."""

    signature: str
    """Type and place, equal for the same exception at the same place: "ValueError at net.py:12"."""
    traceback: str
    """The user's frames; ours are left out."""
    is_asynchronous: bool = False
    """A device's own error, noticed some time after it happened: its place is where the host waited next, so that two
    at the same place need not have the same cause."""


class TrialResult(FrozenModel):
    """How one run of a configuration ended, and what it measured."""

    outcome: Outcome
    """ok, or what ended it."""
    reason: str = ""
    """Why it is not "ok", in a sentence; "" where it is."""
    measurement: Measurement | None = None
    """None where the trial did not get that far."""
    failure: Failure | None = None
    """The exception that ended it; None where none did."""
    guard: PrecisionFigures | None = None
    """What the precision guard has measured, where this trial was the first of its precision, or was refused for it. A
    refused trial keeps its measurement; its outcome and reason are the guard's."""
    blocks: tuple[Block, ...] = ()
    """What a trial had measured that was stopped early; else none, since a measurement has its own."""
    violation: float | None = None
    """Share by which a limit was passed where there is no measurement (out of memory)."""
    wall_s: float = 0.0
    """Seconds from the start of the trial's process to its end."""
    at_s: float = 0.0
    """Seconds of the search, interruptions left out, at which it ended."""
    log: str | None = None
    """Name of the log inside the run folder."""

    @property
    def own_s(self) -> float:
        """Wall time without what was measured after the window: what a run takes that measures its window alone."""
        return self.wall_s - (self.measurement.after_s if self.measurement is not None else 0.0)


class Score(FrozenModel):
    """What a trial is worth. Higher is better; the baseline's own is close to 1."""

    value: float
    """Rate over the reference's, less what idle time costs."""
    feasible: bool
    """It ran within the memory limit."""
    violation: float = 0.0
    """Share by which the memory limit is passed; negative: room left. Of a run that was short of memory below the
    limit, a small constant."""
    reason: str = ""
    """Why it is not feasible; "" where it is."""


class TrialRecord(FrozenModel):
    """A configuration from its proposal to the report: a trial of the study, and a line of trials.jsonl."""

    format: Literal[2] = 2
    """Of the line: raised when a key goes or changes its meaning."""
    number: int
    """Number of the trial in the Optuna study; 0 is the baseline."""
    config: TrainingConfig
    results: tuple[TrialResult, ...] = ()
    """Of its runs, in the order in which they ended; () before the first has. That one is what the trial is judged by,
    further ones are made to be sure of it."""
    score: Score | None = None
    """None where the trial measured nothing."""

    def with_run(self, result: TrialResult) -> TrialRecord:
        """Return the record with a further run."""
        return TrialRecord(number=self.number, config=self.config, results=(*self.results, result), score=self.score)

    @property
    def result(self) -> TrialResult:
        """The first run, of a trial that has ended."""
        return self.results[0]

    @property
    def repeats(self) -> tuple[TrialResult, ...]:
        """The further runs."""
        return self.results[1:]

    @property
    def runs(self) -> tuple[Measurement, ...]:
        """What the runs have measured; those that measured nothing are left out."""
        return tuple(result.measurement for result in self.results if result.measurement is not None)

    @property
    def samples_per_s(self) -> float:
        """Geometric mean of the runs' throughput, of a trial that measured something."""
        return geometric_mean(run.samples_per_s for run in self.runs)

    @property
    def outcome(self) -> Outcome:
        """How the trial ended; "over_memory" where it ran, but above the limit."""
        if self.result.outcome == "ok" and self.score is not None and not self.score.feasible:
            return "over_memory"
        return self.result.outcome

    @property
    def measurement(self) -> Measurement | None:
        """What was measured; None where the trial did not get that far."""
        return self.result.measurement

    @property
    def reason(self) -> str:
        """Why the trial is no candidate; "" where it is."""
        if self.outcome == "over_memory" and self.score is not None and self.score.reason:
            return self.score.reason
        return self.result.reason

    @property
    def is_feasible(self) -> bool:
        """Whether the trial ran well and within the limit, and no further run refutes that."""
        is_sound = self.result.outcome == "ok" and self.score is not None and self.score.feasible
        return is_sound and self.refuted_by is None

    @property
    def refuted_by(self) -> TrialResult | None:
        """The further run that failed, the last of several; None where none refutes the trial.

        One that ran into its deadline may be slow by chance, two hang. The baseline is what all others are compared
        with: its deadlines refute nothing.
        """
        late = [repeat for repeat in self.repeats if repeat.outcome == "timeout"]
        failed = [repeat for repeat in self.repeats if repeat.outcome not in {"ok", "timeout"}]
        if failed:
            return failed[-1]
        return late[-1] if len(late) >= _MOST_TIMEOUTS and self.number != 0 else None

    @property
    def is_refused(self) -> bool:
        """Whether the trial ran well, and the precision guard would not let it win."""
        return self.result.outcome != "ok" and self.measurement is not None  # else a failed trial has no measurement


def answered(record: TrialRecord, answer: TrialResult) -> TrialRecord:
    """Return a record with the precision guard's answer; a refusal is its outcome and reason, and takes its score."""
    own = {"outcome": answer.outcome, "reason": answer.reason, "guard": answer.guard}
    results = (record.result.model_copy(update=own), *record.repeats)
    score = record.score if answer.outcome == "ok" else None
    return TrialRecord(number=record.number, config=record.config, results=results, score=score)


def score_value(record: TrialRecord) -> float:
    """The score of a feasible record."""
    return record.score.value if record.score is not None else 0.0


def believed_score(record: TrialRecord, believed: Mapping[int, float]) -> float:
    """The score of a feasible record at the rate that is believed of it, by the logarithms of such rates by number.

    Where nothing is known but its own measurement, that is believed.
    """
    log_rate, measured = believed.get(record.number), record.measurement
    if log_rate is None or measured is None:
        return score_value(record)
    return score_value(record) * exp(log_rate) / measured.samples_per_s


def best_of(records: Sequence[TrialRecord], score: Callable[[TrialRecord], float] = score_value) -> TrialRecord | None:
    """The feasible trial with the best score."""
    return max((record for record in records if record.is_feasible), key=score, default=None)


def reference_of(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """The trial that scores refer to: the baseline where it ran well, else the feasible trial that was first to end."""
    return next((record for record in records if record.is_feasible and record.measurement is not None), None)


def runs_of(records: Iterable[TrialRecord], number: int) -> tuple[Measurement, ...]:
    """Return what the runs of a trial have measured, its further runs included; () where it is not among the records.

    All figures of a configuration are made from these runs.
    """
    return tuple(run for record in records if record.number == number for run in record.runs)
