"""`TrialRecord`: a configuration that was tried, how its runs ended, and the checks that it passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite
from statistics import geometric_mean
from typing import Literal

from autotune.config.environment import Environment
from autotune.config.plan import WorkloadFacts
from autotune.config.training_config import DdpConfig, TrainingConfig
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

# The precision guard: may a cheaper precision or a compiled model win? Figures of some 20 steps
# against float32.
#
# The worker trains the same weights on the same batches in float32 and as the candidate would, and
# fills PrecisionFigures; `objection` judges them. Pure.


GUARD_STEPS = 20
"""Optimizer steps that are compared: our convention."""
MIN_STEPS = 5
"""Fewest steps that the guard judges: our convention."""
LOADING_SHARE = 0.3
"""Of the time until the deadline, after which the batches that came are trained on in turn: our
convention."""
OTHER_SEED = 1_000_003
"""Added to the seed of the repeated float32 run: a prime beyond the seeds of the steps, which count
up."""
_LOSS_TOLERANCE = 0.05
"""Largest mean deviation of the losses, as a share of float32's mean loss: our own convention.
bfloat16 keeps 8 bits of a number (0.4 %); what deviates ten times as much after 20 steps does not
train the same model."""
_MIN_COSINE = 0.95
"""Least cosine between the first step's gradients, all parameters as one vector: our own
convention. Rounding to bfloat16 alone leaves 0.9999; 0.95 is an angle of 18 degrees."""
_TELLING_COSINE = 0.2
"""Where two float32 gradients agree less than this, the gradient is noise, and its cosine means
nothing: our convention."""


class PrecisionFigures(FrozenModel):
    """What the guard has measured."""

    steps: int
    """Optimizer steps that were compared; those that the GradScaler skipped are not among them,
    their batches were taken again."""
    micro_batch_size: int
    """Batch of the comparison: the baseline's, or less where float32 does not fit."""
    reference_losses: tuple[float, ...]
    """float32, one a step: matrix products exactly so, convolutions as torch has them, by default
    in TF32."""
    losses: tuple[float, ...]
    """The candidate's, as many."""
    gradient_cosine: float | None
    """Between the first step's gradients; None where one of them is not finite."""
    repeat_cosine: float | None
    """Between two float32 gradients from the same weights and batch, under other random seeds:
    below 1 where the model itself is random (dropout)."""
    repeat_deviation: float
    """How far two float32 runs of some steps, under other random seeds, deviate, as
    `loss_deviation`."""
    skipped_steps: tuple[bool, ...] = ()
    """For each attempt at a step, whether the GradScaler skipped it; empty without one."""
    remarks: tuple[Note, ...] = ()
    """What weakens the comparison."""

    @property
    def loss_deviation(self) -> float | None:
        """Mean absolute deviation of the losses over the mean of float32's; None where one is not finite."""
        return deviation_of(self.reference_losses, self.losses)


def deviation_of(reference: Sequence[float], losses: Sequence[float]) -> float | None:
    """Mean absolute deviation of some losses over the reference's mean; None where one is not finite, or none is there.

    The longer of the two is cut to the length of the other.
    """
    pairs = list(zip(reference, losses, strict=False))
    if not pairs or not all(isfinite(value) for pair in pairs for value in pair):
        return None
    scale = sum(abs(exact) for exact, _ in pairs)
    return sum(abs(loss - exact) for exact, loss in pairs) / scale if scale > 0 else 0.0


def needs_guard(config: TrainingConfig, baseline: TrainingConfig) -> bool:
    """Whether a configuration computes less exactly than float32, in another way than what the user runs today."""
    is_cheaper = config.amp_dtype != "float32" or config.compile
    return is_cheaper and guard_key(config) != guard_key(baseline)


def guard_key(config: TrainingConfig) -> tuple[str, str]:
    """What the guard's answer depends on: the precision, and the mode of a compiled model, "" for another.

    A fused optimizer, which computes the same formulas in the same precision, is not compared by
    itself: it would cost a process to see what rounding changes. It is part of the comparison where
    the trial that brings it on has it.
    """
    return config.amp_dtype, config.compile_mode if config.compile else ""


def shortfall(figures: PrecisionFigures) -> Note | None:
    """Why the figures are too few to be judged; None where they are enough, or where a loss that is not finite ends it.

    A GradScaler that skips step after step is judged by its skips.
    """
    attempts = max(figures.steps, len(figures.skipped_steps))
    is_finite = all(isfinite(loss) for loss in (*figures.losses, *figures.reference_losses))
    if attempts >= MIN_STEPS or not is_finite:
        return None
    return too_few_steps_compared(figures.steps, least_steps=MIN_STEPS)


def objection(figures: PrecisionFigures) -> Note | None:
    """Why the candidate may not win, with the figures; None where it may.

    Losses that float32 itself does not keep finite are no objection to the candidate. What two
    float32 runs differ by is allowed on top of the tolerance. Where their gradients differ, half of
    the cosine that they have is asked for.
    """
    if not all(isfinite(loss) for loss in figures.reference_losses):
        return None
    return next(_objections_to_losses(figures), None) or _gradients_differ(figures)


def _objections_to_losses(figures: PrecisionFigures) -> Iterator[Note]:
    at = next((at for at, loss in enumerate(figures.losses) if not isfinite(loss)), None)
    if at is not None:
        yield loss_not_finite(loss=str(figures.losses[at]), step=at + 1, steps=GUARD_STEPS)
    attempts = len(figures.skipped_steps)
    last = figures.skipped_steps[-5:]
    if any(last):
        skipped = sum(figures.skipped_steps)
        yield steps_skipped(
            last_skipped=sum(last), last=len(last), skipped=skipped, attempts=attempts
        )
    deviation = figures.loss_deviation
    allowed = _LOSS_TOLERANCE + figures.repeat_deviation
    if deviation is not None and deviation > allowed:
        yield losses_deviate(figures.steps, deviation_fraction=deviation, allowed_fraction=allowed)


def _gradients_differ(figures: PrecisionFigures) -> Note | None:
    """Nothing is asked of the gradient where float32's own is not finite, or not reproducible."""
    cosine = figures.gradient_cosine
    repeat = figures.repeat_cosine
    if repeat is None:
        return None
    if cosine is None:
        return gradient_not_finite() if figures.steps > 0 else None
    least = _MIN_COSINE if repeat >= _MIN_COSINE else repeat / 2
    if repeat < _TELLING_COSINE or cosine >= least:
        return None
    return gradients_differ(cosine, least_cosine=least)


# The stress run: the winner trained for longer on the largest samples that the dataset has shown.
# Pure.
#
# It runs in one process. A Load is its peak for all ranks whose memory counts together, to be
# compared with the limit.


_LOOK_S = 4.0  # our convention
_LOOK_SHARE = 0.2  # of the time left: our convention
_WHERE = {"ddp": "in one process", "dp": "on one device"}


class StressFigures(FrozenModel):
    """What a stress run has measured."""

    steps: int
    """Optimizer steps, ordinary batches and batches of the largest samples in turns."""
    seconds: float
    """Wall time of the steps."""
    items_seen: int
    """Items of the dataset whose size was measured."""
    median_item_bytes: float
    """Bytes of an item's tensors, in the median of those seen."""
    largest_item_bytes: int
    """Equal to the median where all items have one size."""
    largest_batch_bytes: int = 0
    """Tensors of the batch of the largest samples, as it was trained on."""
    remark: Note | None = None
    """Why no batch of the largest samples was trained on; None where one was."""
    memory: MemorySample
    """Of the one process that it ran in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A stress run's peak where its settings train on several ranks."""

    own_bytes: int
    """Peak of the one process that ran."""
    bucket_bytes: int = 0
    """DistributedDataParallel's buckets of a rank, which that process has not."""
    where: str = ""
    """How that process differs from what its settings say: "in one process", "on one device"; ""
    where it does not."""
    ranks: int = 1
    """Those whose memory counts together: on the CPU all of a host."""

    @property
    def least_bytes(self) -> int:
        """What a rank takes by itself, to be compared with the limit."""
        return self.own_bytes + self.bucket_bytes

    @property
    def peak_bytes(self) -> int:
        """What all may take together; less where they share memory."""
        return self.ranks * self.least_bytes

    @property
    def is_more(self) -> bool:
        """Whether that is more than what the process took."""
        return self.peak_bytes > self.own_bytes


def sample_scan_s(left_s: float) -> float:
    """Seconds for measuring samples' sizes before the stress run, of so many until its deadline."""
    return min(_LOOK_S, _LOOK_SHARE * max(0.0, left_s))


def load_of(
    figures: StressFigures, config: TrainingConfig, environment: Environment, facts: WorkloadFacts
) -> Load:
    """A stress run's peak for all ranks of the settings whose memory counts together.

    It errs upwards: what ranks share (libraries, a mapped dataset) is counted for each. With
    gradient_as_bucket_view the gradients lie in the buckets and take no more. Source:
    torch.nn.parallel.DistributedDataParallel, on gradient_as_bucket_view: the memory that it saves
    equals the total size of the gradients.
    """
    has_buckets = (
        config.strategy == "ddp" and not (config.ddp or DdpConfig()).gradient_as_bucket_view
    )
    return Load(
        own_bytes=figures.memory.peak_bytes,
        bucket_bytes=facts.gradient_bytes if has_buckets else 0,
        where=_WHERE.get(config.strategy, ""),
        ranks=ranks_on_host(config.process_count, environment) if environment.has_only_ram else 1,
    )


# One trial: how it ended, what it measured, and the record that is kept of it.


Outcome = Literal[
    "ok", "over_memory", "oom", "host_oom", "timeout", "crashed", "diverged", "pruned", "invalid"
]
OUT_OF_MEMORY: frozenset[Outcome] = frozenset({"oom", "host_oom"})
"""A trial that ran out of the device's memory, or of RAM."""

_MOST_TIMEOUTS = 2
"""Runs of one configuration that hit their deadline before it counts as one that hangs: our own
convention."""


class Failure(FrozenModel):
    """The exception that ended a rank."""

    signature: str
    """Type and place, equal for the same exception at the same place: "ValueError at net.py:12"."""
    traceback: str
    """The user's frames; ours are left out."""
    is_asynchronous: bool = False
    """A device's own error, noticed some time after it happened: its place is where the host waited
    next, so that two at the same place need not have the same cause."""


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
    """What the precision guard has measured, where this trial was the first of its precision, or
    was refused for it. A refused trial keeps its measurement; its outcome and reason are the
    guard's."""
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
    """Share by which the memory limit is passed; negative: room left. Of a run that was short of
    memory below the limit, a small constant."""
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
    """Of its runs, in the order in which they ended; () before the first has. That one is what the
    trial is judged by, further ones are made to be sure of it."""
    score: Score | None = None
    """None where the trial measured nothing."""

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
        """The first run, of a trial that has ended."""
        return self.results[0]

    @property
    def repeats(self) -> tuple[TrialResult, ...]:
        """The further runs."""
        return self.results[1:]

    @property
    def runs(self) -> tuple[Measurement, ...]:
        """What the runs have measured; those that measured nothing are left out."""
        return tuple(
            result.measurement for result in self.results if result.measurement is not None
        )

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

        One that ran into its deadline may be slow by chance, two hang. The baseline is what all
        others are compared with: its deadlines refute nothing.
        """
        late = [repeat for repeat in self.repeats if repeat.outcome == "timeout"]
        failed = [repeat for repeat in self.repeats if repeat.outcome not in {"ok", "timeout"}]
        if failed:
            return failed[-1]
        return late[-1] if len(late) >= _MOST_TIMEOUTS and self.number != 0 else None

    @property
    def is_refused(self) -> bool:
        """Whether the trial ran well, and the precision guard would not let it win."""
        return (
            self.result.outcome != "ok" and self.measurement is not None
        )  # else a failed trial has no measurement


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
    log_rate = believed.get(record.number)
    measured = record.measurement
    if log_rate is None or measured is None:
        return score_value(record)
    return score_value(record) * exp(log_rate) / measured.samples_per_s


def best_of(
    records: Sequence[TrialRecord], score: Callable[[TrialRecord], float] = score_value
) -> TrialRecord | None:
    """The feasible trial with the best score."""
    return max((record for record in records if record.is_feasible), key=score, default=None)


def reference_of(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """The trial that scores refer to: the baseline where it ran well, else the feasible trial that was first to end."""
    return next(
        (record for record in records if record.is_feasible and record.measurement is not None),
        None,
    )


def runs_of(records: Iterable[TrialRecord], number: int) -> tuple[Measurement, ...]:
    """Return what the runs of a trial have measured, its further runs included; () where it is not among the records.

    All figures of a configuration are made from these runs.
    """
    return tuple(run for record in records if record.number == number for run in record.runs)
