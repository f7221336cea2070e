"""The result of a search or a diagnosis, as it is stored and reported.

Data only: run-to-run variation, the recommendation with its evidence, the diagnosis, and the
summary that report, recommended.yaml and JSON read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from pydantic import Field, JsonValue

from autotune.config.environment import Environment
from autotune.config.plan import Budget, Objective, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.frozen import FrozenModel, with_field_copy
from autotune.note import Note
from autotune.records.ceilings import Ceiling, Headroom
from autotune.records.measurement import Interval, Measurement
from autotune.records.trial import StressFigures, TrialRecord
from autotune.records.watched_run import RunShare, WatchedRun
from autotune.space.scaling import LrAdvice

# Run-to-run variation.


MOST_SD = 10.0
"""Largest standard deviation, a factor of 22,000: more means a broken file. Our own convention."""


class RunVariation(FrozenModel):
    """Variation between runs of the same settings, some minutes apart.

    On an accelerator there are two kinds of runs. Those limited by the device hardly vary; those
    limited by the host, by launching, loading or copying, vary as much as the host's speed.
    """

    sd: float = Field(gt=0, le=MOST_SD)
    """Standard deviation of a run's log throughput beyond its own window's error: 0.05 is about 5
    %. On an accelerator, of runs limited by the host."""
    degrees_of_freedom: float = Field(gt=0, allow_inf_nan=False)
    """Degrees of freedom of `sd`."""
    source: Literal["assumed", "workload"] = "assumed"
    """assumed: our convention for such a device; workload: learned from this search's repeats."""
    device: RunVariation | None = None
    """Variation of runs limited by the device; None on a CPU, where all runs are of one kind."""

    def of(self, held_by_device: Iterable[bool]) -> RunVariation:
        """Return the variation for a comparison of runs: the host's, unless the device limits all of them.

        The host's is the wider one, so comparisons of both kinds are on the safe side.

        Args:
            held_by_device: For each run, True if the device limits it.
        """
        runs = tuple(held_by_device)
        if self.device is not None and runs and all(runs):
            return self.device
        return self


# The recommendation.


Verdict = Literal["faster", "already_best", "unconfirmed", "baseline_infeasible"]


class LargerBatch(FrozenModel):
    """Best configuration with a larger global batch than the baseline's, and the fastest at that one."""

    config: TrainingConfig
    """Ready to use: the learning rate is scaled to the global batch."""
    number: int
    """Number of the trial."""
    speedup: Interval | None
    """Ratio to the baseline; None if the baseline is no reference."""
    over_same_batch: Interval | None
    """Ratio to the fastest at the baseline's global batch; None if none was feasible."""
    is_worth_it: bool
    """It beats that one beyond noise and by what the objective requires, or there is none."""
    break_even: Interval | None
    """Gradient noise scale in samples above which it trains faster: 0 at any; an infinite upper end
    if it may not be faster. None if it is not faster, or if none was feasible at the baseline's
    batch."""

    @property
    def is_faster(self) -> bool:
        """Return whether it has more samples/s than the fastest at the baseline's batch, beyond noise."""
        return self.over_same_batch is not None and self.over_same_batch.low > 1


class Recommendation(FrozenModel):
    """The configuration to use, and its evidence."""

    config: TrainingConfig
    """Ready to use: the learning rate is scaled to the global batch."""
    number: int
    """Number of the trial."""
    verdict: Verdict
    """faster: proven to beat the baseline within the error budget. already_best: no tried
    configuration is likely to be worth a change. unconfirmed: undecided."""
    speedup: Interval | None
    """Estimated gain over the baseline from all runs: median and 95 % interval of the posterior,
    shrunk for luck. None if the baseline is no reference."""
    measured_speedup: Interval | None = None
    """Ratio as measured; None for the baseline itself."""
    gain_probability: float | None = None
    """Probability that it is faster than the baseline; None if the baseline is no reference."""
    more_s: float | None = None
    """Seconds of further runs that should decide it; None if decided, or unknown."""
    lr_advice: LrAdvice
    same_batch: TrainingConfig | None = None
    """Best configuration with the baseline's global batch."""
    same_batch_number: int | None = None
    """Number of its trial; None if there is none."""
    same_batch_speedup: Interval | None = None
    """Its ratio to the baseline; None if the baseline is no reference."""
    larger_batch: LargerBatch | None = None
    """Best configuration with a larger global batch, worth it or not; None if none was measured."""
    reasons: tuple[Note, ...] = ()
    """Notes on the reasons for this choice."""
    confirmations: tuple[TrialRecord, ...] = ()
    """Baseline, recommended trial, and others that ran more than once."""
    stress: StressFigures | None = None
    """Stress run of the recommended configuration; None if there was none."""
    overloaded: tuple[int, ...] = ()
    """Numbers of trials that failed on the largest samples: from then on only configurations tested
    on them, and the baseline, may win."""
    is_outrun: bool = False
    """Something faster was measured that may not be used: refused, over the limit, or failed in a
    repeat."""


# The diagnosis: evidence, findings, verdict and ranked advice.


Bottleneck = Literal[
    "data_cpu",
    "data_io",
    "data_tail",
    "restart",
    "copy",
    "compute",
    "launch",
    "script",
    "synchronise",
    "memory",
    "threads",
    "checkpoint",
    "validation",
    "logging",
    "collection",
    "startup",
    "debugging",
    "denormals",
    "cores",
    "communication",
    "repeats",
    "unknown",
]
"""Limits of throughput: an item's CPU work, its I/O waits, its slow tail; short epochs; copies;
computing; launching operations; the script's work between them; synchronization before further
launches; memory bandwidth; CPU oversubscription. Of the whole run: writing checkpoints; validation;
logging; garbage collection; starting; a debugging mode; subnormal values; cores that the process
may not use; the exchange of gradients; samples that each loader worker repeats."""


class CurvePoint(FrozenModel):
    """Loader, device or copying alone, in a configuration that differs from the baseline in a few settings.

    A loader's point may differ in loader settings and in the batch.
    """

    changes: dict[str, object]
    """Changed settings under TrainingConfig's names; empty for the baseline itself."""
    ceiling: Ceiling | None
    """None if it could not be measured."""
    cpu_s_per_sample: float | None = None
    """CPU seconds per sample, all threads and loader workers; None if not measured."""
    peak_memory_bytes: int | None = None
    """Peak memory of a device's point; None for other sides, or if not measured."""
    took_s: float = 0.0
    """Seconds of the whole point: start, warm-up and timed stretch."""
    reason: Note | str = ""
    """Reason for a missing ceiling: a note of ours, or the text of an error."""

    @property
    def is_left_out(self) -> bool:
        """Return True if it was not tried for lack of time."""
        return isinstance(self.reason, Note) and self.reason.code == "no_time_left"


class Roofline(FrozenModel):
    """Work of one step, and the device's peaks, all measured.

    Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
    """

    flops: float
    """Floating-point operations of training on one batch, forward and backward, by
    torch.utils.flop_counter."""
    moved_bytes: float
    """Bytes that the operators of one batch read and write, without views, including the
    optimizer's step."""
    operators: int
    """Operators of one batch."""
    peak_flops_per_s: float
    """Peak of a large matrix product in the same precision: TF32 if most work is float32
    convolutions that run in it."""
    peak_bytes_per_s: float
    """Peak of a large copy, read and written bytes together."""


with with_field_copy():

    class Curves(FrozenModel):
        """Ceilings around the baseline, and the roofline of a step."""

        loader: tuple[CurvePoint, ...] = ()
        """The loader alone, one point per tried setting."""
        device: tuple[CurvePoint, ...] = ()
        """The device alone, one point per tried setting."""
        copy: tuple[CurvePoint, ...] = ()  # type: ignore[assignment] # hides a method
        """Copying batches to the device alone, from pinned and from pageable memory; empty on a
        CPU."""
        roofline: Roofline | None = None
        """None if not measured."""
        threads: int | None = None
        """Threads of one operation on the CPU, chosen by torch or by the configuration."""
        notes: tuple[Note, ...] = ()
        """Notes on what could not be measured, and why."""
        is_cut: bool = False
        """The measuring process ended early: another one can continue from here."""


class Evidence(FrozenModel):
    """Everything that a diagnosis is based on."""

    config: TrainingConfig
    """Current settings."""
    drop_last: bool = True
    """The loader drops an epoch's last, smaller batch."""
    environment: Environment
    run_variation: RunVariation
    """Run-to-run variation on this machine, as far as it is known."""
    facts: WorkloadFacts
    limit_bytes: int
    """Memory limit."""
    free_ram_bytes: int | None = None
    """Free RAM before the measurements; None if unknown."""
    measurement: Measurement
    """Includes breakdown, loader costs and all ceilings."""
    curves: Curves
    watched: WatchedRun | None = None
    """The script's own run before it was measured; None of a model and a dataset."""


class Finding(FrozenModel):
    """A bottleneck, with the figures that show it."""

    bottleneck: Bottleneck
    """The limit of training."""
    share: float
    """Share of the wall time that it takes, or that it adds to the run; findings are sorted by
    it."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """Figures that show it, by name."""
    evidence: str
    """These figures in a sentence."""


class Advice(FrozenModel):
    """An action for the user, and its expected gain."""

    kind: str
    """Code of the action: "cache_items"."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """Values for the text, and the measured figures that the expectation is based on."""
    settings: dict[str, object] = Field(default_factory=dict)
    """Settings to change under TrainingConfig's names; empty if no setting helps."""
    expected_samples_per_s: float | None
    """Expected throughput; None if it can't be estimated."""
    expected_gain: float | None
    """Expected throughput of the whole run over the current one, minus 1."""
    text: str
    """The action in a sentence."""
    basis: str
    """Measured figures behind the expectation."""
    is_fault: bool = False
    """True if it removes a fault, whose gain comes before settings that were measured under it."""
    against: Bottleneck | None = None
    """Bottleneck that it is against; None for settings, which may help with several."""
    gain_interval: Interval | None = None
    """95 % interval of `expected_gain`; None if unknown."""
    place: str = ""
    """File and line that it is about; empty if unknown."""


class Diagnosis(FrozenModel):
    """Why training is slow, and what to do about it: the document of `autotune diagnose --json`."""

    format: Literal[1] = 1
    """Version of the document: raised when a key goes or changes its meaning."""
    name: str
    """Name of the workload, in a few words."""
    verdict: Bottleneck
    """Bottleneck of the first finding."""
    headline: str
    """The answer in a sentence or two."""
    headline_notes: tuple[Note, ...]
    """The headline as notes."""
    is_healthy: bool
    """Only computing takes a tenth of the time, without a fault, and no advice gains 5 %."""
    headroom: Headroom
    """Headroom of the current throughput below the ceilings."""
    shares: tuple[RunShare, ...] = ()
    """An hour of training by part, in the parts' order; what was not observed is left out."""
    findings: tuple[Finding, ...]
    """Bottlenecks, largest share first, except that the host comes before the device that waits for
    it; at least one."""
    advice: tuple[Advice, ...]
    """Actions: faults worth 10 % by gain, then faults of unknown gain, then the rest by gain."""
    not_excluded: tuple[Note, ...] = ()
    """Causes that could not be checked, each in a few words with the reason."""
    evidence: Evidence
    notes: tuple[Note, ...] = ()
    """Notes on the evidence."""
    wall_s: float = 0.0
    """Seconds that the diagnosis took."""
    autotune_version: str = ""
    """Version of autotune that wrote it."""


# The summary of a finished or interrupted search, from which all reports are made, and its
# progress.


Phase = Literal["probe", "search", "confirm", "measure", "curves"]
"""Phase of a search: probe, search, confirm (leader and baseline again, interleaved). Of a
diagnosis: probe, measure (the baseline), curves (other settings)."""


class RunSummary(FrozenModel):
    """Everything that a report shows; read back from a run folder as it was written."""

    format: Literal[2] = 2
    """Version of summary.json and environment.json: raised when a key goes or changes its
    meaning."""
    name: str
    """Name of the workload, in a few words."""
    environment: Environment
    facts: WorkloadFacts
    command: tuple[str, ...] = ()
    """The workload's command, word by word; () for a model and a dataset."""
    objective: Objective
    budget: Budget
    baseline: TrainingConfig
    limit_bytes: int
    """Memory limit."""
    memory_source: str
    """Figure that is compared with the memory limit."""
    seed: int
    """Seed of the search's proposals and of every trial."""
    trials: tuple[TrialRecord, ...]
    """Trials in the order of the study."""
    run_variation: RunVariation
    """Run-to-run variation on this machine: all intervals depend on it."""
    recommendation: Recommendation | None
    """None if no trial was feasible."""
    notes: tuple[Note, ...] = ()
    """Notes to the user."""
    stopped_because: Note
    """Reason why no further trial ran."""
    is_complete: bool = True
    """The search ended by itself, without an interruption."""
    wall_s: float
    """Seconds from the call to the recommendation; for a resumed search, of its last part."""
    promised_s: float | None = None
    """Estimated seconds before the first trial; None for a resumed search."""
    autotune_version: str
    """Version of autotune that wrote it."""


class Known(FrozenModel):
    """Estimated gain of the best trial so far over the baseline."""

    number: int
    """Number of the best trial."""
    speedup: Interval
    """Posterior ratio with its 95 % interval."""
    is_proven: bool
    """It beats the baseline within the error budget."""


class Progress(FrozenModel):
    """State of a search or a diagnosis; sent to the display after every step."""

    phase: Phase
    done: int = 0
    """Trials measured; after settling, pairs of runs of leader and baseline."""
    total: int = 1
    """Most trials."""
    elapsed_s: float
    remaining_s: float | None = None
    """Seconds left of the timeout, or an estimate; None if neither is known."""
    baseline: TrialRecord | None = None
    best: TrialRecord | None = None
    """Best feasible trial so far."""
    last: TrialRecord | None = None
    """Trial that has just ended; None at the start of a phase."""
    can_win: float | None = None
    """Most that other settings can still gain, as a share of the best throughput: 0.04 = 4 %; None
    if unknown."""
    known: Known | None = None
    """Estimated gain of the best; None while the baseline leads."""
    warnings: tuple[Note, ...] = ()
    """Notes to the user before the search begins; each is sent once."""


def changed_settings(
    config: TrainingConfig, baseline: TrainingConfig
) -> dict[str, tuple[object, object]]:
    """Return the settings that differ from the baseline: {name: (baseline's, its own)}."""
    before = baseline.model_dump()
    after = config.model_dump()
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}


def is_single(changes: Collection[str]) -> bool:
    """Return whether settings change as one: a token budget changes the samples of a batch with it."""
    names = set(changes)
    return len(names - {"max_tokens"} or names) == 1
