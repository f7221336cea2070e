"""The result of a search or a diagnosis: what is recommended, how sure that is, and what it rests on.

Run-to-run variation, recommendation, diagnosis and the summary that report, recommended.yaml and
JSON read.
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
from autotune.space.scaling import LrAdvice

# How far runs of the same settings stray from one another on a machine: what was learned of it, as
# data.


MOST_SD = 10.0
"""A factor of 22,000: more is no spread but a broken file. Our own convention."""


class RunSpread(FrozenModel):
    """The spread between runs of the same settings, some minutes apart.

    On an accelerator there are two kinds of runs. Those that the device holds hardly differ; those
    that the host holds, by launching, loading or copying, differ as much as the host's speed does.
    """

    sd: float = Field(gt=0, le=MOST_SD)
    """Standard deviation of the logarithm of a run's rate, beyond what its own window can tell:
    0.05 is about 5 %. On an accelerator of runs that the host holds."""
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


# A search's recommendation and its evidence: the trials that were compared, and the ratios of their
# throughput.


Verdict = Literal["faster", "already_best", "unconfirmed", "baseline_infeasible"]


class LargerBatch(FrozenModel):
    """The best at a larger global batch than the baseline's, against the fastest at the baseline's own."""

    config: TrainingConfig
    """Ready to use: its learning rate is scaled to its global batch."""
    number: int
    """Trial that measured it."""
    speedup: Interval | None
    """Its ratio to the baseline; None where the baseline is no reference."""
    over_same_batch: Interval | None
    """Its rate over that of the fastest at the baseline's global batch; None where none was
    feasible at that."""
    is_worth_it: bool
    """It beats the fastest at that batch beyond noise, and by what the objective asks for; or there
    is none."""
    break_even: Interval | None
    """The gradient noise scale in samples above which it trains sooner: 0 at any; an infinite upper
    end where it may be no faster. None where it is not faster, or none was feasible at the
    baseline's batch."""

    @property
    def is_faster(self) -> bool:
        """It has more samples/s than that one, beyond noise."""
        return self.over_same_batch is not None and self.over_same_batch.low > 1


class Recommendation(FrozenModel):
    """The configuration to use, and what speaks for it."""

    config: TrainingConfig
    """Ready to use: its learning rate is scaled to its global batch."""
    number: int
    """Trial that measured it."""
    verdict: Verdict
    """faster: it is proven to beat the baseline, at an error that is kept. already_best: nothing
    that was tried is likely to be worth a change. unconfirmed: it is not decided."""
    speedup: Interval | None
    """The claimed gain over the baseline, from all runs of the search: median and 95 % interval of
    what is believed, shrunk as far as luck goes. None where the baseline is no reference."""
    measured_speedup: Interval | None = None
    """The ratio as measured; None for the baseline itself."""
    gain_probability: float | None = None
    """How likely it is to be faster than the baseline at all; None where the baseline is no
    reference."""
    more_s: float | None = None
    """Seconds of further runs that should decide it; None where it is decided, or nothing says."""
    lr_advice: LrAdvice
    same_batch: TrainingConfig | None = None
    """The best configuration that keeps the baseline's global batch."""
    same_batch_number: int | None = None
    """Trial that measured it; None where there is none."""
    same_batch_speedup: Interval | None = None
    """Its ratio to the baseline; None where the baseline is no reference."""
    larger_batch: LargerBatch | None = None
    """The best that has a larger global batch, which need not be worth it; None where none was
    measured."""
    reasons: tuple[Note, ...] = ()
    """Why this one."""
    confirmations: tuple[TrialRecord, ...] = ()
    """The baseline and what is recommended, and others that ran more than once."""
    stress: StressFigures | None = None
    """The recommended configuration trained for longer on the largest samples; None where that was
    not run."""
    overloaded: tuple[int, ...] = ()
    """Trials that failed on the largest samples: since then only what was run on them may win, and
    the baseline."""
    is_outrun: bool = False
    """Something faster was measured that may not be used: refused, over the limit, or failed when
    it was run again."""


# Why is training slow? The evidence of one diagnosis, and what follows from it: findings, verdict
# and ranked advice.
#
# Data alone.


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
    "unknown",
]
"""What limits the rate: an item's CPU work, its waits for I/O, its slow tail; epochs that are too
short; copies; computing; launching operations; what the script does between them; a host that waits
for the device before it launches more; memory bandwidth; CPU oversubscription."""


class CurvePoint(FrozenModel):
    """The loader, the device or copying alone, in a configuration that differs from the baseline in a few settings.

    A loader's point may differ in its own settings and in the batch.
    """

    changes: dict[str, object]
    """Settings under TrainingConfig's names; empty for the baseline itself."""
    ceiling: Ceiling | None
    """None where it could not be measured."""
    cpu_s_per_sample: float | None = None
    """CPU seconds for a sample, of all threads and loader workers; None where not measured."""
    peak_memory_bytes: int | None = None
    """Peak memory of the device's side; None for the others, and where not measured."""
    took_s: float = 0.0
    """Seconds that the point took in all: start, warm-up and timed stretch."""
    reason: Note | str = ""
    """Why it could not: a note of ours, or the text of an error."""

    @property
    def is_left_out(self) -> bool:
        """Return True where it was not tried, since no time was left."""
        return isinstance(self.reason, Note) and self.reason.code == "no_time_left"


class Roofline(FrozenModel):
    """What one step asks of the device, and what the device can do, each measured.

    Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
    """

    flops: float
    """Floating-point operations of training on one batch, forward and backward, by
    torch.utils.flop_counter."""
    moved_bytes: float
    """Bytes that the operators of one batch read and write, views left out, the optimizer's step
    included."""
    operators: int
    """Operators of one batch."""
    peak_flops_per_s: float
    """Of a large matrix product in the same precision: TF32 where float32's convolutions do most,
    and run in that."""
    peak_bytes_per_s: float
    """Of a large copy, read and written bytes together."""


with with_field_copy():

    class Curves(FrozenModel):
        """Ceilings around the baseline, and a step's roofline."""

        loader: tuple[CurvePoint, ...] = ()
        """The loader alone, a point for each setting tried."""
        device: tuple[CurvePoint, ...] = ()
        """The device alone, a point for each setting tried."""
        copy: tuple[CurvePoint, ...] = ()  # type: ignore[assignment] # hides a method
        """Copying batches to the device alone, from memory that is pinned and that is not; empty on
        a CPU."""
        roofline: Roofline | None = None
        """None where it was not measured."""
        threads: int | None = None
        """Threads of one operation on the CPU, where the configuration leaves them to torch or sets
        them."""
        remarks: tuple[Note, ...] = ()
        """What could not be measured, and why."""
        is_cut: bool = False
        """The process that measured them ended early: another process can continue from here."""


class Evidence(FrozenModel):
    """All that a diagnosis rests on."""

    config: TrainingConfig
    """What the user runs today."""
    drop_last: bool = True
    """The loader leaves out an epoch's last, smaller batch."""
    environment: Environment
    run_spread: RunSpread
    """Between runs of the same settings on this machine, as far as it is known."""
    facts: WorkloadFacts
    limit_bytes: int
    """The memory limit."""
    free_ram_bytes: int | None = None
    """RAM that was free before the measurements; None where unknown."""
    measurement: Measurement
    """With breakdown, loader costs and all ceilings."""
    curves: Curves


class Finding(FrozenModel):
    """A bottleneck, with the figures that show it."""

    bottleneck: Bottleneck
    """What holds training up."""
    share: float
    """Of the wall time: what the bottleneck takes, or lengthens the run by; findings are ordered by
    it."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """The figures that show it, by name."""
    evidence: str
    """The same in a sentence."""


class Advice(FrozenModel):
    """Something that the user can do, and its expected gain."""

    kind: str
    """What to do, as a code: "cache_items"."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """What the text is filled with, and the measured figures that the expectation rests on."""
    settings: dict[str, object] = Field(default_factory=dict)
    """Settings to change, under TrainingConfig's names; empty where no setting helps."""
    expected_samples_per_s: float | None
    """None where no figure can be given."""
    expected_gain: float | None
    """The expected rate over the present rate, less 1."""
    text: str
    """What to do, in a sentence."""
    basis: str
    """Which measured figures the expectation comes from."""


class Diagnosis(FrozenModel):
    """Why training is slow, and what to do about it: what `autotune diagnose --json` writes."""

    format: Literal[1] = 1
    """Of the document: raised when a key goes or changes its meaning."""
    name: str
    """What was diagnosed, in a few words."""
    verdict: Bottleneck
    """The first finding's."""
    headline: str
    """The answer in a sentence or two."""
    headline_notes: tuple[Note, ...]
    """The same as notes."""
    is_healthy: bool
    """Nothing beside computing takes a tenth of the time, and nothing that was measured promises
    5 % more."""
    standing: Headroom
    """Where today's rate stands between the ceilings."""
    findings: tuple[Finding, ...]
    """The bottlenecks, the largest share first, but the host before the device that waits for it;
    at least one."""
    advice: tuple[Advice, ...]
    """What to do: settings first, then what lies outside of them; the largest gain first in each."""
    evidence: Evidence
    remarks: tuple[Note, ...] = ()
    """What should be known about the evidence."""
    wall_s: float = 0.0
    """Seconds that the diagnosis took."""
    autotune_version: str = ""
    """Of autotune, which wrote it."""


# The result of a finished or interrupted search, from which all reports are made, and its progress
# on the way.


Phase = Literal["probe", "search", "confirm", "measure", "curves"]
"""Of a search: probe, search, confirm (what leads and the baseline run again, alternately). Of a
diagnosis: probe, measure (the baseline), curves (other settings)."""


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
    """Seconds from the call to the recommendation; of a search that went on after an interruption,
    its last part."""
    promised_s: float | None = None
    """What it was expected to take before its first trial; None where it continued an interrupted
    search."""
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
    """What other settings can still give at the most, as a share of the best rate: 0.04 = 4 %;
    None: not known."""
    known: Known | None = None
    """What is known of the best over the baseline; None while the baseline leads."""
    warnings: tuple[Note, ...] = ()
    """What the user should know before the search begins; each is sent once."""


def changed_settings(
    config: TrainingConfig, baseline: TrainingConfig
) -> dict[str, tuple[object, object]]:
    """Settings in which a configuration differs from the baseline: {name: (baseline's, its own)}."""
    before = baseline.model_dump()
    after = config.model_dump()
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}


def is_single(changes: Collection[str]) -> bool:
    """Whether settings, by name, are changed as one: with a token budget the samples of a batch go along."""
    return len(set(changes) - {"max_tokens"} or set(changes)) == 1
