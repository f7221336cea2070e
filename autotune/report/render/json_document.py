"""The summary as one JSON document for scripts.

Comes in: a ReportModel. Goes out: the text of a SummaryDocument, whose fields document its keys. Keys
may be added under the same `format`; a key that changes its meaning, or goes, raises it. An infinite end of
an interval is the text "Infinity", as in trials.jsonl.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from autotune.frozen import FrozenModel
from autotune.records.measurement import Interval
from autotune.records.recommendation import LargerBatch
from autotune.records.run_spread import RunSpread
from autotune.records.trial import Outcome
from autotune.report.figures import Figures
from autotune.report.model import ReportModel, Verdict
from autotune.report.wording.say import say
from autotune.settings.training_config import TrainingConfig

__all__ = ["MeasuredConfig", "SummaryDocument", "summary_json"]


class MeasuredConfig(FrozenModel):
    """A configuration and what it measured."""

    trial: int
    """Number of the trial; 0 is the baseline."""
    settings: TrainingConfig
    """Every setting; the learning rate is scaled to the global batch where this is a recommendation."""
    global_batch_size: int
    """Samples of one optimizer step, over all ranks."""
    figures: Figures | None
    """null where nothing was measured."""


class SummaryDocument(FrozenModel):
    """The keys of the JSON document."""

    format: Literal[1] = 1
    """Raised when a key goes or changes its meaning."""
    name: str
    """What was tuned."""
    verdict: Verdict
    """In a word: see the headline."""
    headline: str
    """The verdict in a sentence or two, for people."""
    best: MeasuredConfig | None = None
    """The recommended settings; null where nothing is feasible."""
    baseline: MeasuredConfig
    same_batch: MeasuredConfig | None = None
    """The best that keeps the baseline's global batch; may equal `best`."""
    speedup: Interval | None = None
    """Claimed of `best` over the baseline, from all runs of both: the median and the 95 % interval of what is believed;
    null where the baseline is no reference."""
    measured_speedup: Interval | None = None
    """The ratio as measured, with its 95 % interval; null for the baseline itself, and where it is no reference."""
    gain_probability: float | None = None
    """How likely `best` is to be faster than the baseline at all; null for the baseline itself, and where it is no
    reference."""
    same_batch_speedup: Interval | None = None
    """Of `same_batch` over the baseline, as `speedup`; null where the baseline is no reference."""
    larger_batch: LargerBatch | None = None
    """The best at a larger global batch; may equal `best`, and may not be worth it."""
    run_spread: RunSpread
    """By how much runs of the same settings differ on this machine."""
    memory_limit_bytes: int
    """The memory limit in bytes."""
    memory_source: str
    """What the limit is judged on."""
    outcomes: dict[Outcome, int]
    """Trials by outcome."""
    reasons: tuple[str, ...]
    """Why this configuration is recommended."""
    lr_advice: tuple[str, ...]
    """What to do about the learning rate and what goes with it."""
    device_remarks: tuple[str, ...]
    """What the device did during the windows that makes rates doubtful: throttling, a changed clock, other users."""
    notes: tuple[str, ...]
    """What the user should know of this run."""
    note_codes: tuple[str, ...]
    """The notes' codes, for scripts."""
    stopped_because: str
    """Why no further trial ran."""
    wall_s: float
    """Seconds from the call to the recommendation."""
    files: dict[str, str]
    """The run folder's files that are there: {name: absolute path}."""
    seed: int
    """Of the search's proposals, and of every trial."""
    fingerprint: str
    """Of the environment: changes when the hardware, the driver or torch does."""
    autotune_version: str
    """Of autotune, which wrote it."""


def summary_json(report: ReportModel) -> str:
    """One JSON document with the result of a search; its keys are SummaryDocument's fields."""
    summary, found = report.summary, report.summary.recommendation
    best = same_batch = None
    if found is not None:
        best = _measured(report, found.number, found.config)
        if found.same_batch_number is not None and found.same_batch is not None:
            same_batch = _measured(report, found.same_batch_number, found.same_batch)
    document = SummaryDocument(
        name=summary.name,
        verdict=report.verdict,
        headline=report.headline,
        speedup=None if found is None else found.speedup,
        measured_speedup=None if found is None else found.measured_speedup,
        gain_probability=None if found is None else found.gain_probability,
        run_spread=summary.run_spread,
        best=best,
        same_batch=same_batch,
        same_batch_speedup=None if found is None else found.same_batch_speedup,
        larger_batch=None if found is None else found.larger_batch,
        reasons=report.reasons,
        lr_advice=report.lr_advice,
        notes=report.notes,
        memory_source=summary.memory_source,
        wall_s=summary.wall_s,
        seed=summary.seed,
        autotune_version=summary.autotune_version,
        baseline=_measured(report, 0, summary.baseline),
        memory_limit_bytes=summary.limit_bytes,
        outcomes=dict(Counter(trial.outcome for trial in summary.trials).most_common()),
        device_remarks=(*report.doubts, *report.conditions),
        note_codes=tuple(note.code for note in summary.notes),
        stopped_because=say(summary.stopped_because),
        files={name: str((report.run_dir / name).absolute()) for name in report.files},
        fingerprint=summary.environment.fingerprint,
    )
    return document.model_dump_json(indent=2)


def _measured(report: ReportModel, number: int, config: TrainingConfig) -> MeasuredConfig:
    figures = next((column.figures for column in report.columns if column.number == number), None)
    return MeasuredConfig(trial=number, settings=config, global_batch_size=config.global_batch_size, figures=figures)
