"""`TrialRecord`: a configuration that was tried, the results of its runs, and the checks on it.

Comes in: measurements and failures from the worker, or a line of trials.jsonl. Goes out: records,
with the outcome, the objections of the precision guard, and the peak of the stress run. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite
from statistics import geometric_mean
from typing import Literal

from autotune.config.environment import Environment
from autotune.config.plan import WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.frozen import FrozenModel
from autotune.messages.search import (
    gradient_not_finite,
    gradients_differ,
    loss_not_finite,
    losses_deviate,
    steps_skipped,
    too_few_steps_compared,
)
from autotune.note import Note
from autotune.records.measurement import Block, Measurement, MemorySample
from autotune.space.constraints import ranks_on_host

# The precision guard: compare a cheaper precision or a compiled model with float32 over some 20
# steps.
#
# The worker trains the same weights on the same batches in float32 and as the candidate would, and
# fills `PrecisionFigures`; `objection` judges them.


GUARD_STEPS = 20
"""Optimizer steps of the comparison: our convention."""
MIN_STEPS = 5
"""Fewest steps that the guard judges: our convention."""
LOADING_SHARE = 0.3
"""Share of the time until the deadline for loading batches; after it, the loaded ones are repeated.
Our convention."""
OTHER_SEED = 1_000_003
"""Offset of the seed of the repeated float32 run: a prime beyond the seeds of the steps, which
count up."""
_LOSS_TOLERANCE = 0.05
"""Largest mean deviation of the losses, relative to float32's mean loss: our own convention.
bfloat16 has 8 significant bits (0.4 %); ten times that after 20 steps is another model."""
_MIN_COSINE = 0.95
"""Least cosine between the first step's gradients, all parameters as one vector: our own
convention. Rounding to bfloat16 alone gives 0.9999; 0.95 is an angle of 18 degrees."""
_TELLING_COSINE = 0.2
"""Cosine between two float32 gradients below which the gradient is noise, and its comparison
meaningless: our convention."""


class PrecisionFigures(FrozenModel):
    """Measurements of the precision guard."""

    steps: int
    """Optimizer steps compared, without those that the GradScaler skipped; their batches were
    repeated."""
    micro_batch_size: int
    """Micro batch of the comparison: the baseline's, or less if float32 does not fit."""
    reference_losses: tuple[float, ...]
    """Losses in float32, one per step: matrix products exactly so, convolutions as torch has them,
    by default in TF32."""
    losses: tuple[float, ...]
    """The candidate's losses, one per step."""
    gradient_cosine: float | None
    """Cosine between the first step's gradients; None if one of them is not finite."""
    repeat_cosine: float | None
    """Cosine between two float32 gradients from the same weights and batch with different seeds:
    below 1 if the model itself is random (dropout)."""
    repeat_deviation: float
    """Deviation of two float32 runs of some steps with different seeds, as `loss_deviation`."""
    skipped_steps: tuple[bool, ...] = ()
    """For each attempt at a step, True if the GradScaler skipped it; empty without a GradScaler."""
    notes: tuple[Note, ...] = ()
    """Notes on what weakens the comparison."""

    @property
    def loss_deviation(self) -> float | None:
        """Mean absolute deviation of the losses over float32's mean; None if a loss is not finite."""
        return deviation_of(self.reference_losses, self.losses)


def deviation_of(reference: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the mean absolute deviation of losses, relative to the reference's mean.

    The longer sequence is cut to the length of the other.

    Args:
        reference: Losses of the reference, one per step.
        losses: Losses to compare, one per step.

    Returns:
        None if a loss is not finite, or if there is none.
    """
    pairs = list(zip(reference, losses, strict=False))
    if not pairs or not all(isfinite(exact) and isfinite(loss) for exact, loss in pairs):
        return None
    scale = sum(abs(exact) for exact, _ in pairs)
    if scale <= 0:
        return 0.0
    return sum(abs(loss - exact) for exact, loss in pairs) / scale


def needs_guard(config: TrainingConfig, baseline: TrainingConfig) -> bool:
    """Return whether a configuration computes less exactly than float32, in another way than the baseline."""
    is_cheaper = config.amp_dtype != "float32" or config.compile
    return is_cheaper and guard_key(config) != guard_key(baseline)


GUARDED = ("amp_dtype", "compile", "compile_mode")
"""Settings that the guard's verdict depends on, as in `guard_key`."""


def guard_key(config: TrainingConfig) -> tuple[str, str]:
    """Return what the guard's verdict depends on: the precision, and the compile mode ("" if not compiled).

    A fused optimizer, which computes the same formulas in the same precision, is not compared by
    itself: that would cost a process to see the effect of rounding. It is part of the comparison if
    the trial has it.
    """
    return config.amp_dtype, config.compile_mode if config.compile else ""


def shortfall(figures: PrecisionFigures) -> Note | None:
    """Return a note if there are too few steps to judge.

    Not so if a loss is not finite, which `objection` judges. A GradScaler that skips step after
    step is judged by its skips.
    """
    attempts = max(figures.steps, len(figures.skipped_steps))
    is_finite = all(isfinite(loss) for loss in (*figures.losses, *figures.reference_losses))
    if attempts >= MIN_STEPS or not is_finite:
        return None
    return too_few_steps_compared(figures.steps, least_steps=MIN_STEPS)


def objection(figures: PrecisionFigures) -> Note | None:
    """Return a note on why the candidate may not win, with the figures; None if it may.

    Losses that are not finite in float32 either are no objection. The deviation between two float32
    runs is added to the tolerance. If their gradients differ, half of their cosine is required.
    """
    if not all(isfinite(loss) for loss in figures.reference_losses):
        return None
    for step, loss in enumerate(figures.losses, start=1):
        if not isfinite(loss):
            return loss_not_finite(loss=str(loss), step=step, steps=GUARD_STEPS)
    last = figures.skipped_steps[-5:]
    if any(last):
        return steps_skipped(
            last_skipped=sum(last),
            last=len(last),
            skipped=sum(figures.skipped_steps),
            attempts=len(figures.skipped_steps),
        )
    deviation = figures.loss_deviation
    allowed = _LOSS_TOLERANCE + figures.repeat_deviation
    if deviation is not None and deviation > allowed:
        return losses_deviate(figures.steps, deviation_fraction=deviation, allowed_fraction=allowed)
    return _gradients_differ(figures)


def _gradients_differ(figures: PrecisionFigures) -> Note | None:
    """Return an objection to the gradient; None if float32's own is not finite or not reproducible."""
    cosine = figures.gradient_cosine
    repeat = figures.repeat_cosine
    if repeat is None:
        return None
    if cosine is None:
        return gradient_not_finite() if figures.steps > 0 else None
    # Require less if float32's own gradients differ
    least = _MIN_COSINE if repeat >= _MIN_COSINE else repeat / 2
    if repeat < _TELLING_COSINE or cosine >= least:
        return None
    return gradients_differ(cosine, least_cosine=least)


# The stress run: train the winner for longer, on the largest samples found, in one process.


_SCAN_S = 4.0
_SCAN_SHARE = 0.2
"""Most seconds for measuring samples' sizes, and their most share of the time left: our convention."""
_WHERE = {"ddp": "in one process", "dp": "on one device"}


class StressFigures(FrozenModel):
    """Measurements of a stress run."""

    steps: int
    """Optimizer steps, interleaving ordinary batches and batches of the largest samples."""
    seconds: float
    """Wall seconds of the steps."""
    items_seen: int
    """Items of the dataset whose size was measured."""
    median_item_bytes: float
    """Median bytes of an item's tensors."""
    largest_item_bytes: int
    """Most bytes of an item's tensors; the median if all items have one size."""
    largest_batch_bytes: int = 0
    """Bytes of the tensors of the batch of the largest samples."""
    note: Note | None = None
    """Reason why no batch of the largest samples was trained on; None if one was."""
    memory: MemorySample
    """Memory of the process that it ran in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Peak of a stress run, projected to settings with several ranks."""

    own_bytes: int
    """Peak of the process that ran."""
    bucket_bytes: int = 0
    """DistributedDataParallel's buckets per rank, which that process lacks."""
    where: str = ""
    """Difference between that process and its settings: "in one process", "on one device"; "" if
    none."""
    ranks: int = 1
    """Ranks whose memory counts together: on the CPU all of a host."""

    @property
    def least_bytes(self) -> int:
        """Bytes of one rank, for comparison with the limit."""
        return self.own_bytes + self.bucket_bytes

    @property
    def peak_bytes(self) -> int:
        """Upper bound of the bytes of all ranks; less if they share memory."""
        return self.ranks * self.least_bytes

    @property
    def is_more(self) -> bool:
        """Return whether that exceeds what the process took."""
        return self.peak_bytes > self.own_bytes


def sample_scan_s(left_s: float) -> float:
    """Return the seconds for measuring samples' sizes before the stress run, from those until its deadline."""
    return min(_SCAN_S, _SCAN_SHARE * max(0.0, left_s))


def load_of(
    figures: StressFigures, config: TrainingConfig, environment: Environment, facts: WorkloadFacts
) -> Load:
    """Project a stress run's peak to all ranks whose memory counts together.

    An upper bound: what ranks share (libraries, a mapped dataset) is counted for each. With
    gradient_as_bucket_view, gradients are views of the buckets and take no more. Source:
    torch.nn.parallel.DistributedDataParallel, on gradient_as_bucket_view: the saved memory equals
    the total size of the gradients.

    Args:
        figures: Measurements of the stress run.
        config: The settings that were tested.
        environment: The machine.
        facts: Properties of the workload, with the gradients' bytes.
    """
    bucket_bytes = 0
    if config.is_ddp and not config.ddp_settings.gradient_as_bucket_view:
        bucket_bytes = facts.gradient_bytes
    ranks = 1
    if environment.has_only_ram:
        ranks = ranks_on_host(config.process_count, environment)
    return Load(
        own_bytes=figures.memory.peak_bytes,
        bucket_bytes=bucket_bytes,
        where=_WHERE.get(config.strategy, ""),
        ranks=ranks,
    )


# The trial: its runs, its score, and the record that is stored.


Outcome = Literal[
    "ok", "over_memory", "oom", "host_oom", "timeout", "crashed", "diverged", "pruned", "invalid"
]
OUT_OF_MEMORY: frozenset[Outcome] = frozenset({"oom", "host_oom"})
"""Outcomes of a trial that ran out of device memory or RAM."""

_MOST_TIMEOUTS = 2
"""Runs past their deadline from which a configuration counts as hanging: our own convention."""


class Failure(FrozenModel):
    """Exception that ended a rank."""

    signature: str
    """Type and place, equal for the same exception at the same place: "ValueError at net.py:12"."""
    traceback: str
    """Frames of user code."""
    is_asynchronous: bool = False
    """Device error, noticed later: its place is where the host waited next, so equal signatures
    need not have the same cause."""


class TrialResult(FrozenModel):
    """Outcome and measurement of one run of a configuration."""

    outcome: Outcome
    """ok, or the reason for the end."""
    reason: str = ""
    """Reason of another outcome than "ok", in a sentence; "" for "ok"."""
    measurement: Measurement | None = None
    """None if the trial did not get that far."""
    failure: Failure | None = None
    """Exception that ended it; None if there was none."""
    guard: PrecisionFigures | None = None
    """Measurements of the precision guard, if this trial was the first of its precision, or was
    refused. A refused trial keeps its measurement; outcome and reason are the guard's."""
    blocks: tuple[Block, ...] = ()
    """Blocks of a trial that was stopped early; else (), since a measurement has its own."""
    violation: float | None = None
    """Relative excess over a limit, without a measurement (out of memory)."""
    wall_s: float = 0.0
    """Seconds from the start of the trial's process to its end."""
    at_s: float = 0.0
    """Seconds of the search at its end, without interruptions."""
    log: str | None = None
    """Name of the log inside the run folder."""

    @property
    def own_s(self) -> float:
        """Wall seconds without the measurements after the window: the time of a run that measures only its window."""
        if self.measurement is None:
            return self.wall_s
        return self.wall_s - self.measurement.after_s


class Score(FrozenModel):
    """Score of a trial. Higher is better; the baseline's own is close to 1."""

    value: float
    """Throughput over the reference's, minus a penalty for idle time."""
    feasible: bool
    """The trial ran within the memory limit."""
    violation: float = 0.0
    """Relative excess over the memory limit; negative below it. A small constant for a run that
    lacked memory below the limit."""
    reason: str = ""
    """Reason why it is not feasible; "" if it is."""


class TrialRecord(FrozenModel):
    """A configuration from its proposal to the report: a trial of the study, and a line of trials.jsonl."""

    format: Literal[2] = 2
    """Version of the line: raised when a key goes or changes its meaning."""
    number: int
    """Number of the trial in the Optuna study; 0 is the baseline."""
    config: TrainingConfig
    results: tuple[TrialResult, ...] = ()
    """Results of its runs, in the order in which they ended; () before the first. The first one
    decides, further ones confirm or refute it."""
    score: Score | None = None
    """None if the trial measured nothing."""

    def with_run(self, result: TrialResult) -> TrialRecord:
        """Return the record with a further run."""
        return TrialRecord(
            number=self.number,
            config=self.config,
            results=(*self.results, result),
            score=self.score,
        )

    @property
    def result(self) -> TrialResult:
        """Result of the first run; the trial must have ended."""
        return self.results[0]

    @property
    def repeats(self) -> tuple[TrialResult, ...]:
        """Results of the further runs."""
        return self.results[1:]

    @property
    def runs(self) -> tuple[Measurement, ...]:
        """Measurements of all runs that have one."""
        return tuple(
            result.measurement for result in self.results if result.measurement is not None
        )

    @property
    def samples_per_s(self) -> float:
        """Geometric mean of the runs' throughput; some run must have one."""
        return geometric_mean(run.samples_per_s for run in self.runs)

    @property
    def outcome(self) -> Outcome:
        """Outcome of the trial; "over_memory" if it ran, but above the limit."""
        if self.result.outcome == "ok" and self.score is not None and not self.score.feasible:
            return "over_memory"
        return self.result.outcome

    @property
    def measurement(self) -> Measurement | None:
        """Measurement of the first run; None if it did not get that far."""
        return self.result.measurement

    @property
    def reason(self) -> str:
        """Reason why the trial is no candidate; "" if it is."""
        if self.outcome == "over_memory" and self.score is not None and self.score.reason:
            return self.score.reason
        return self.result.reason

    @property
    def is_feasible(self) -> bool:
        """Return whether the trial ran well and within the limit, and no further run refutes that."""
        is_sound = self.result.outcome == "ok" and self.score is not None and self.score.feasible
        return is_sound and self.refuted_by is None

    @property
    def refuted_by(self) -> TrialResult | None:
        """The last further run that failed; None if none refutes the trial.

        One run past its deadline may be slow by chance, two are not. All others are compared with
        the baseline: its deadlines refute nothing.
        """
        failed = [repeat for repeat in self.repeats if repeat.outcome not in {"ok", "timeout"}]
        if failed:
            return failed[-1]
        late = [repeat for repeat in self.repeats if repeat.outcome == "timeout"]
        if self.number != 0 and len(late) >= _MOST_TIMEOUTS:
            return late[-1]
        return None

    @property
    def is_refused(self) -> bool:
        """Return whether the trial ran well, but the precision guard refused it."""
        # Any other failed trial has no measurement
        return self.result.outcome != "ok" and self.measurement is not None


def answered(record: TrialRecord, answer: TrialResult) -> TrialRecord:
    """Return a record with the guard's verdict; a refusal sets outcome and reason, and removes the score."""
    own = {"outcome": answer.outcome, "reason": answer.reason, "guard": answer.guard}
    results = (record.result.model_copy(update=own), *record.repeats)
    score = record.score if answer.outcome == "ok" else None
    return TrialRecord(number=record.number, config=record.config, results=results, score=score)


def score_value(record: TrialRecord) -> float:
    """Return the score of a feasible record."""
    return record.score.value if record.score is not None else 0.0


def believed_score(record: TrialRecord, believed: Mapping[int, float]) -> float:
    """Return the score of a feasible record at its estimated throughput.

    Args:
        record: The record.
        believed: Logarithms of estimated throughputs, by number. Without one, the record's own
            measurement counts.
    """
    log_rate = believed.get(record.number)
    measured = record.measurement
    if log_rate is None or measured is None:
        return score_value(record)
    return score_value(record) * exp(log_rate) / measured.samples_per_s


def best_of(
    records: Sequence[TrialRecord], score: Callable[[TrialRecord], float] = score_value
) -> TrialRecord | None:
    """Return the feasible trial with the best score; None if none is feasible."""
    return max((record for record in records if record.is_feasible), key=score, default=None)


def reference_of(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the trial that scores refer to: the baseline if it ran well, else the first feasible trial to end."""
    for record in records:
        if record.is_feasible and record.measurement is not None:
            return record
    return None


def runs_of(records: Iterable[TrialRecord], number: int) -> tuple[Measurement, ...]:
    """Return the measurements of all runs of a trial; () if it is not among the records.

    All figures of a configuration are made from these runs.
    """
    return tuple(run for record in records if record.number == number for run in record.runs)
