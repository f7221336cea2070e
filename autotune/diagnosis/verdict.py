"""The answer: an Evidence judged, with its findings, advice, headline and remarks. Pure.

Comes in: an Evidence. Goes out: a Diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autotune.analysis.forecast.expectation import copy_ceilings, device_ceiling, loader_ceiling
from autotune.analysis.memory.growth import creep_notes
from autotune.analysis.scoring import memory_fault
from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.diagnosis.gains import LEAST_GAIN
from autotune.messages import diagnosis as messages
from autotune.note import Note
from autotune.records.ceilings import SIDES, CeilingBook, Headroom, headroom_of
from autotune.records.diagnosis import Advice, CurvePoint, Diagnosis, Evidence, Finding
from autotune.records.host_load import note_on_load
from autotune.records.measurement import keep_ceilings
from autotune.records.memory import MemoryLimits
from autotune.tuning.extra_measurements import with_settled_ceilings
from autotune.tuning.host_bound import busy_while_host_bound
from autotune.version import __version__

__all__ = ["HEALTHY_GAIN", "headroom_today", "is_healthy", "judge", "make_headline"]

HEALTHY_GAIN = 0.05
"""Expected gain from which on a setting is worth changing: our own convention, the usual spread between runs
on a CPU that others use too."""


def judge(name: str, evidence: Evidence, notes: Iterable[Note] = (), *, wall_s: float = 0.0) -> Diagnosis:
    """Return why it is slow and what to do about it; the caller's notes come before the remarks on the evidence."""
    evidence = _with_credible_ceilings(evidence)
    findings = find_bottlenecks(evidence)
    advice = rank_advice(evidence, findings)
    headline = make_headline(evidence, findings, advice)
    return Diagnosis(
        name=name,
        verdict=findings[0].bottleneck,
        headline=" ".join(note.text for note in headline),
        headline_notes=headline,
        is_healthy=is_healthy(evidence, findings, advice),
        standing=headroom_today(evidence),
        findings=findings,
        advice=advice,
        evidence=evidence,
        remarks=(*notes, *_remarks(evidence)),
        wall_s=wall_s,
        autotune_version=__version__,
    )


def is_healthy(evidence: Evidence, findings: Sequence[Finding], advice: Sequence[Advice]) -> bool:
    """Whether computing is the only finding, by a measured breakdown, and nothing that was measured promises 5 %."""
    gains = [piece.expected_gain or 0.0 for piece in advice]
    is_computing = [finding.bottleneck for finding in findings] == ["compute"]
    return evidence.measurement.breakdown is not None and is_computing and max(gains, default=0.0) < HEALTHY_GAIN


def headroom_today(evidence: Evidence) -> Headroom:
    """Where today's rate stands between the ceilings."""
    run = evidence.measurement
    return headroom_of(
        run.samples_per_s,
        loader_ceiling=loader_ceiling(evidence),
        device_ceiling=device_ceiling(evidence),
        copy_ceiling=copy_ceilings(evidence).get(evidence.config.pin_memory),
        host_ceiling=run.host_ceiling,
        host_bound_busy=busy_while_host_bound(run),
    )


def make_headline(evidence: Evidence, findings: Sequence[Finding], advice: Sequence[Advice]) -> tuple[Note, ...]:
    """The bottleneck, then the setting that should help most; after computing the next finding is named as well."""
    first, second = findings[0], findings[1] if len(findings) > 1 else None
    points = (*evidence.curves.loader, *evidence.curves.device)
    has_others = any(point.changes and point.ceiling is not None for point in points)
    if is_healthy(evidence, findings, advice):
        return (messages.healthy(share=first.share, least_gain=HEALTHY_GAIN if has_others else None),)
    if first.bottleneck == "unknown":
        return (messages.time_unknown(),)
    head = messages.bottleneck(bottleneck=first.bottleneck, share=first.share)
    if first.bottleneck == "compute" and evidence.measurement.breakdown is None:
        head = messages.time_not_attributed(share=first.share)
    elif first.bottleneck == "compute" and second is not None:
        head = messages.bottleneck(
            bottleneck=first.bottleneck, share=first.share, second=second.bottleneck, second_share=second.share
        )
    best = next((piece for piece in advice if piece.settings and piece.expected_gain is not None), None)
    load = evidence.measurement.host_load
    if best is not None and load is not None and load.is_loaded:  # a factor might be the other programs' doing
        return head, messages.may_help(settings=best.settings, others_cores=load.others_cores, cores=load.cores)
    if best is not None and best.expected_gain is not None:
        write = messages.computed_setting if best.kind == "add_workers" else messages.best_setting
        return head, write(settings=best.settings, gain=best.expected_gain)
    return head, messages.no_setting_helps(least_gain=LEAST_GAIN) if has_others else messages.others_not_measured()


def _with_credible_ceilings(evidence: Evidence) -> Evidence:
    """Leave out ceilings that the run exceeds, and settle those that were measured twice, in the run and in curves."""
    config, run, book = evidence.config, evidence.measurement, CeilingBook()
    keep_ceilings(book, config, run)
    for side in SIDES:
        points: tuple[CurvePoint, ...] = getattr(evidence.curves, side)
        for point in points:
            if not point.changes:
                book.keep(side, config, point.ceiling)
    return evidence.model_copy(update={"measurement": with_settled_ceilings(run, config, book)})


def _remarks(evidence: Evidence) -> Iterator[Note]:
    """Yield what should be known about the evidence."""
    if evidence.measurement.breakdown is None:
        yield messages.breakdown_not_measured()
    fault = memory_fault(evidence.measurement, evidence.limit_bytes)
    if fault is not None:
        yield messages.search_would_refuse(fault=fault)
    load = note_on_load(evidence.measurement.host_load)
    if load is not None:
        yield load
    limits = MemoryLimits.on(evidence.environment, evidence.limit_bytes)
    yield from creep_notes([evidence.measurement], limits, "baseline")
    yield from evidence.measurement.remarks
    yield from evidence.curves.remarks
    curves = evidence.curves
    for side, points in (("loader", curves.loader), ("device", curves.device), ("copy", curves.copy)):
        for point in points:
            if point.ceiling is None and not point.is_left_out:
                yield messages.side_not_measured(side=side, settings=point.changes, reason=point.reason)
    left_out = {side: sum(point.is_left_out for point in getattr(curves, side)) for side in SIDES}
    counts: dict[str, int] = {side: count for side, count in left_out.items() if count}
    if counts:
        yield messages.no_time_for_points(counts=counts)
