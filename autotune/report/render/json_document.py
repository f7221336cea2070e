"""The summary as one JSON document for scripts.

Comes in: a RunSummary and its run folder. Goes out: the text of a SummaryDocument, whose fields document its keys. Keys
may be added under the same `format`; a key that changes its meaning, or goes, raises it. An infinite end of
an interval is the text "Infinity", as in trials.jsonl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from autotune.records.recommendation import Ratio, Recommendation
from autotune.records.run_summary import RunSummary
from autotune.records.trial import Outcome
from autotune.report.content import count_outcomes, list_advice, list_files, list_reasons, say_headline
from autotune.report.figures import Figures, make_columns, summarise
from autotune.report.sections.devices import figures_by_title, say_conditions, say_doubts
from autotune.report.wording.say import say
from autotune.settings.training_config import TrainingConfig

__all__ = ["MeasuredConfig", "SummaryDocument", "summary_json"]


class MeasuredConfig(BaseModel):
    """A configuration and what it measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    trial: int
    """Number of the trial; 0 is the baseline."""
    settings: TrainingConfig
    """Every setting; the learning rate is scaled to the global batch where this is a recommendation."""
    global_batch_size: int
    figures: Figures | None
    """null where nothing was measured."""


class SummaryDocument(BaseModel):
    """The keys of the JSON document."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format: Literal[1] = 1
    name: str
    """What was tuned."""
    verdict: Literal["faster", "already_best", "unconfirmed", "baseline_infeasible", "nothing_feasible"]
    headline: str
    """The verdict in a sentence or two, for people."""
    best: MeasuredConfig | None
    """The recommended settings; null where nothing is feasible."""
    baseline: MeasuredConfig
    same_batch: MeasuredConfig | None
    """The best that keeps the baseline's global batch; may equal `best`."""
    speedup: Ratio | None
    """Of `best` over the baseline, measured in turns, with its 95 % interval."""
    same_batch_speedup: Ratio | None
    memory_limit_bytes: int
    memory_source: str
    """What the limit is judged on."""
    outcomes: dict[Outcome, int]
    """Trials by outcome."""
    reasons: tuple[str, ...]
    """Why this configuration is recommended."""
    lr_advice: tuple[str, ...]
    """What to do about the learning rate and what goes with it."""
    device_remarks: tuple[str, ...]
    """What the device did during the windows that makes rates doubtful: throttling, a moved clock, other users."""
    notes: tuple[str, ...]
    stopped_because: str
    wall_s: float
    files: dict[str, str]
    """The run folder's files that are there: {name: absolute path}."""
    seed: int
    fingerprint: str
    """Of the environment: changes when the hardware, the driver or torch does."""
    autotune_version: str


def summary_json(summary: RunSummary, run_dir: Path) -> str:
    """One JSON document with the result of a search; its keys are SummaryDocument's fields."""
    found, told = summary.recommendation, figures_by_title(make_columns(summary))
    document = SummaryDocument(
        name=summary.name,
        verdict="nothing_feasible" if found is None else found.verdict,
        headline=say_headline(summary),
        best=None if found is None else _measured(summary, found.config, found.number),
        baseline=_measured(summary, summary.baseline, 0),
        same_batch=None if found is None else _same_batch(summary, found),
        speedup=None if found is None else found.speedup,
        same_batch_speedup=None if found is None else found.same_batch_speedup,
        memory_limit_bytes=summary.limit_bytes,
        memory_source=summary.memory_source,
        outcomes=count_outcomes(summary),
        reasons=list_reasons(summary),
        lr_advice=list_advice(summary),
        device_remarks=(*say_doubts(told), *say_conditions(told)),
        notes=tuple(map(say, summary.notes)),
        stopped_because=say(summary.stopped_because),
        wall_s=summary.wall_s,
        files={name: str((run_dir / name).absolute()) for name in list_files(run_dir)},
        seed=summary.seed,
        fingerprint=summary.environment.fingerprint,
        autotune_version=summary.autotune_version,
    )
    return document.model_dump_json(indent=2)


def _measured(summary: RunSummary, config: TrainingConfig, number: int) -> MeasuredConfig:
    return MeasuredConfig(
        trial=number,
        settings=config,
        global_batch_size=config.global_batch_size,
        figures=summarise(summary, number),
    )


def _same_batch(summary: RunSummary, found: Recommendation) -> MeasuredConfig | None:
    if found.same_batch is None or found.same_batch_number is None:
        return None
    return _measured(summary, found.same_batch, found.same_batch_number)
