"""The result of a search as one JSON document for scripts.

Comes in: a ReportModel. Goes out: the text of a SummaryDocument, whose fields document its keys.
Keys may be added under the same `format`; a key that changes its meaning, or goes, raises it. An
infinite end of an interval is the text "Infinity", as in trials.jsonl.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from autotune.frozen import FrozenModel
from autotune.records.measurement import Interval
from autotune.records.result import RunSummary
from autotune.records.trial import Outcome
from autotune.report.figures import Column
from autotune.report.model import ReportModel, Verdict

_RAW: dict[str, Any] = {
    "summary": {"trials": True, "recommendation": {"confirmations"}},
    "columns": {"__all__": {"figures": {"window"}, "runs": {"__all__": {"window"}}}},
}
"""What the document leaves out: trials.jsonl has it."""


class SummaryDocument(FrozenModel):
    """The keys of the JSON document."""

    format: Literal[2] = 2
    """Raised when a key goes or changes its meaning."""
    verdict: Verdict
    """In a word: see the headline."""
    headline: str
    """The verdict in a sentence or two, for people."""
    speedup: Interval | None
    """Claimed of the recommended settings over the baseline, as in the recommendation."""
    columns: tuple[Column, ...]
    """What was measured of the baseline, the recommended settings, and the best at its batch and at
    a larger one; each configuration once, without the raw windows of its runs."""
    outcomes: dict[Outcome, int]
    """Trials by outcome."""
    reasons: tuple[str, ...]
    """Why this configuration is recommended."""
    lr_advice: tuple[str, ...]
    """What to do about the learning rate and what goes with it."""
    device_remarks: tuple[str, ...]
    """What the device did during the windows that makes throughput doubtful: throttling, a changed
    clock, others."""
    notes: tuple[str, ...]
    """What the user should know of this run; as codes with their figures in the summary."""
    files: dict[str, str]
    """The run folder's files that are there: {name: absolute path}."""
    summary: RunSummary
    """As in summary.json, without the trials and confirmations."""


def summary_json(report: ReportModel) -> str:
    """Return one JSON document with the result of a search; its keys are SummaryDocument's fields."""
    found = report.summary.recommendation
    document = SummaryDocument(
        verdict=report.verdict,
        headline=report.headline,
        speedup=None if found is None else found.speedup,
        columns=report.columns,
        outcomes=dict(Counter(trial.outcome for trial in report.summary.trials).most_common()),
        reasons=report.reasons,
        lr_advice=report.lr_advice,
        device_remarks=(*report.doubts, *report.conditions),
        notes=report.notes,
        files={name: str((report.run_dir / name).absolute()) for name in report.files},
        summary=report.summary,
    )
    return document.model_dump_json(indent=2, exclude=_RAW)
