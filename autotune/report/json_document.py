"""Write the result of a search, or a diagnosis, as one JSON document for scripts.

Takes a ReportModel or a Diagnosis; returns the text of a SummaryDocument or a DiagnosisDocument,
whose fields document the keys. `format` is raised when a key is removed or changes its meaning, not
when one is added. An infinite end of an interval is the text "Infinity", as in trials.jsonl.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.records.ceilings import Headroom
from autotune.records.measurement import Interval
from autotune.records.result import (
    Advice,
    Bottleneck,
    Diagnosis,
    Evidence,
    Finding,
    RunSummary,
)
from autotune.records.trial import Outcome
from autotune.records.watched_run import RunPart, RunShare
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


_SHARE_NAMES: dict[RunPart, str] = {
    "startup": "start_up",
    "waiting": "data",
    "copy": "copy",
    "compute": "compute",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "synchronise": "host_sync",
    "checkpoint": "checkpoint",
    "validation": "validation",
    "logging": "logging",
    "collection": "garbage_collection",
    "restart": "restart",
    "other": "other",
}
"""Keys of the shares in the document."""


_OF_RUN = frozenset(
    {
        "checkpoint",
        "collection",
        "communication",
        "cores",
        "debugging",
        "denormals",
        "logging",
        "repeats",
        "script",
        "startup",
        "validation",
    }
)
"""Bottlenecks that no setting removes, so that a piece of advice on settings is not against them."""


class Cause(FrozenModel):
    """A cause of lost time, with its remedy."""

    code: Bottleneck
    """The bottleneck."""
    share: float | None
    """Share of the whole run's time that the remedy saves, in 0..1; None if unknown. Of a cause
    without a remedy, the time that it takes."""
    location: str
    """File and line that it is about; empty if unknown."""
    remedy: str
    """The action in a sentence; empty if there is none."""
    change: dict[str, Any]
    """Settings to change, under TrainingConfig's names; empty if no setting helps."""


class DiagnosisDocument(FrozenModel):
    """The keys of a diagnosis' JSON document."""

    format: Literal[1] = 1
    """Version, raised when a key is removed or changes its meaning."""
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
    shares: dict[str, float]
    """Share of each part of an hour of training, in 0..1, with sum 1; 0 if it was not observed."""
    hour: tuple[RunShare, ...]
    """The same shares with their intervals and periods."""
    causes: tuple[Cause, ...]
    """Causes with their remedies in the order of the advice, then causes without a remedy."""
    findings: tuple[Finding, ...]
    """Bottlenecks, the verdict first."""
    advice: tuple[Advice, ...]
    """The remedies with all of their figures."""
    not_excluded: tuple[Note, ...]
    """Causes that could not be checked, each in a few words with the reason."""
    evidence: Evidence
    notes: tuple[Note, ...]
    """Notes on the evidence."""
    wall_s: float
    """Seconds that the diagnosis took."""
    autotune_version: str
    """Version of autotune that wrote it."""


def diagnosis_json(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as a JSON document with the fields of DiagnosisDocument."""
    shares = {name: 0.0 for part, name in _SHARE_NAMES.items() if part != "compute"}
    shares |= {_SHARE_NAMES[share.part]: share.fraction for share in diagnosis.shares}
    document = DiagnosisDocument(
        name=diagnosis.name,
        verdict=diagnosis.verdict,
        headline=diagnosis.headline,
        headline_notes=diagnosis.headline_notes,
        is_healthy=diagnosis.is_healthy,
        headroom=diagnosis.headroom,
        shares=shares,
        hour=diagnosis.shares,
        causes=_causes(diagnosis),
        findings=diagnosis.findings,
        advice=diagnosis.advice,
        not_excluded=diagnosis.not_excluded,
        evidence=diagnosis.evidence,
        notes=diagnosis.notes,
        wall_s=diagnosis.wall_s,
        autotune_version=diagnosis.autotune_version,
    )
    return document.model_dump_json(indent=2)


def _causes(diagnosis: Diagnosis) -> tuple[Cause, ...]:
    # Settings may help with several bottlenecks: name the first one of the steps
    of_steps = [one.bottleneck for one in diagnosis.findings if one.bottleneck not in _OF_RUN]
    settings = of_steps[0] if of_steps else "unknown"
    found = [
        Cause(
            code=piece.against or settings,
            share=None if piece.expected_gain is None else 1.0 - 1.0 / (1.0 + piece.expected_gain),
            location=piece.place,
            remedy=piece.text,
            change=piece.settings,
        )
        for piece in diagnosis.advice
    ]
    named = {cause.code for cause in found}
    for finding in diagnosis.findings:
        if finding.bottleneck not in named:
            cause = Cause(
                code=finding.bottleneck, share=finding.share, location="", remedy="", change={}
            )
            found.append(cause)
    return tuple(found)
