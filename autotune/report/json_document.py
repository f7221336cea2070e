"""Write the result of a search as one JSON document for scripts.

Takes a ReportModel; returns the text of a SummaryDocument, whose fields document the keys. `format`
is raised when a key is removed or changes its meaning, not when one is added. An infinite end of an
interval is the text "Infinity", as in trials.jsonl.
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
"""Fields to leave out, since trials.jsonl has them."""


class SummaryDocument(FrozenModel):
    """The keys of the JSON document."""

    format: Literal[2] = 2
    """Version, raised when a key is removed or changes its meaning."""
    verdict: Verdict
    """The verdict in a word."""
    headline: str
    """The verdict in a sentence or two, for people."""
    speedup: Interval | None
    """Speed-up of the recommended settings over the baseline, as in the recommendation."""
    columns: tuple[Column, ...]
    """Measurements of the baseline, the recommended settings, and the best at the same and at a
    larger batch; each configuration once, without the raw windows of its runs."""
    outcomes: dict[Outcome, int]
    """Number of trials by outcome."""
    reasons: tuple[str, ...]
    """Reasons for the recommendation."""
    lr_advice: tuple[str, ...]
    """Changes of the learning rate, betas and eps."""
    device_notes: tuple[str, ...]
    """Conditions during the windows that make throughput doubtful: throttling, a changed clock,
    other processes."""
    notes: tuple[str, ...]
    """Notes on this run; the summary has them as codes with figures."""
    files: dict[str, str]
    """Files in the run folder: {name: absolute path}."""
    summary: RunSummary
    """The content of summary.json, without trials and confirmations."""


def summary_json(report: ReportModel) -> str:
    """Return the result of a search as a JSON document with the fields of SummaryDocument."""
    found = report.summary.recommendation
    document = SummaryDocument(
        verdict=report.verdict,
        headline=report.headline,
        speedup=None if found is None else found.speedup,
        columns=report.columns,
        outcomes=dict(Counter(trial.outcome for trial in report.summary.trials).most_common()),
        reasons=report.reasons,
        lr_advice=report.lr_advice,
        device_notes=(*report.doubts, *report.conditions),
        notes=report.notes,
        files={name: str((report.run_dir / name).absolute()) for name in report.files},
        summary=report.summary,
    )
    return document.model_dump_json(indent=2, exclude=_RAW)
