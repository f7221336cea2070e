"""Attribute the time of training to bottlenecks, and turn an Evidence into a Diagnosis. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autotune.diagnosis.advice import LEAST_GAIN, rank_advice
from autotune.diagnosis.memory_use import memory_warnings
from autotune.messages import diagnosis as messages
from autotune.models.forecast import (
    advisable_points,
    apply_changes,
    copy_ceilings,
    device_ceiling,
    loader_ceiling,
    loader_processes,
    runs_too_many_threads,
    threads_of,
    workers_run_too_many_threads,
)
from autotune.models.memory import growth_notes
from autotune.models.observations import points_by_side
from autotune.models.statistics import memory_fault
from autotune.note import Note
from autotune.records.breakdown import Share, TimeBreakdown
from autotune.records.ceilings import CeilingBook, Headroom, headroom_of
from autotune.records.measurement import MemoryLimits, keep_ceilings, note_on_load
from autotune.records.result import Advice, Bottleneck, Diagnosis, Evidence, Finding
from autotune.settings_table import BATCH_SETTINGS
from autotune.tuning.outcomes import busy_while_host_bound, is_host_bound
from autotune.tuning.probe import with_settled_ceilings
from autotune.version import __version__

# Findings: the wall time attributed to bottlenecks, the largest share first.

WAITING_CPU_FRACTION = 0.5
"""Share of an item's time on a core below which it mostly waits. Source: our convention."""
_LEAST_SHARE = 0.10
"""Share of the wall time below which a finding is noise: the least difference between two sources
of the busy fraction. Source: our convention."""
_TAIL_FRACTION = 0.4
"""Share of the loading time in items over 8 times the median from which on the tail is the
bottleneck. Source: our convention."""
_SMALL_OPERATOR_S = 30e-6
"""Mean seconds of an operator below which its call costs as much as its work: 3 times the 5 to 10
us that PyTorch takes on the host for an eager operator with autograd. Source: pytorch.org, "CUDA
graphs" and "PyTorch profiler"; the factor is our convention."""
_LONGEST_GAP_S = 100e-6
"""Mean seconds between two operators above which it is no launch: ten times PyTorch's time for an
operator on the host (see above). Source: our convention."""
_BANDWIDTH_FRACTION = 0.5
"""Share of the measured copy bandwidth from which on a step is bound by it. Source: Williams et al.
2009; half of the roof is our convention."""
_SLOWED_BY = 1.5
"""Factor by which computing is slower in the loop than alone from which on the CPU counts as
oversubscribed. Source: our convention."""
_DEVICE_WORK = frozenset[Bottleneck]({"compute", "memory"})
_FEWEST_BATCHES = 3
"""Points for a line of time over batch size; with two, any noise would be a fixed cost."""


def find_bottlenecks(evidence: Evidence) -> tuple[Finding, ...]:
    """Return the findings of at least a tenth of the wall time, largest first; at least one.

    If the device waits for its host, the host comes before the device's own work, which then delays
    nothing.
    """
    parts = breakdown_of(evidence)
    if evidence.measurement.data_wait_fraction is None and evidence.measurement.breakdown is None:
        return (_finding("unknown", 1.0, messages.unknown_evidence()),)
    compute = parts.compute.fraction
    idle = parts.idle.fraction
    waits = parts.synchronise.fraction
    threads = _threads(evidence, compute + idle)
    left = 1.0 if threads is None else 1 - threads.share / (compute + idle)
    between = _between_operators(evidence, compute * left, idle * left)
    found = [
        _data(evidence, parts),
        _restart(evidence, parts),
        _copy(evidence, parts.device_copy.fraction),
        _finding("synchronise", waits, messages.synchronise_evidence(share=waits)),
        between,
        _device_work(evidence, max(0.0, (compute + idle) * left - between.share)),
        *filter(None, [threads]),
    ]
    merged = _merged(found)
    heavy = [finding for finding in merged if finding.share >= _LEAST_SHARE]
    is_waiting = is_host_bound(evidence.measurement)

    def order(finding: Finding) -> tuple[float, bool]:
        is_behind = is_waiting and finding.bottleneck in _DEVICE_WORK
        return -(min(finding.share, between.share) if is_behind else finding.share), is_behind

    return tuple(sorted(heavy or [max(merged, key=lambda finding: finding.share)], key=order))


def _finding(bottleneck: Bottleneck, share: float, evidence: Note) -> Finding:
    return Finding(
        bottleneck=bottleneck, share=share, figures=evidence.figures, evidence=evidence.text
    )


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """Merge findings of the same bottleneck: workers and computing may both oversubscribe the CPU.

    The smaller share's evidence counts only where it would be a finding by itself.
    """
    merged: dict[Bottleneck, Finding] = {}
    for finding in sorted(found, key=lambda finding: -finding.share):
        first = merged.get(finding.bottleneck)
        if first is None:
            merged[finding.bottleneck] = finding
            continue
        share = first.share + finding.share
        figures = first.figures
        evidence = first.evidence
        if finding.share >= _LEAST_SHARE:
            figures = figures | finding.figures
            evidence += f"; {finding.evidence}"
        merged[finding.bottleneck] = Finding(
            bottleneck=finding.bottleneck, share=share, figures=figures, evidence=evidence
        )
    return list(merged.values())


def breakdown_of(evidence: Evidence) -> TimeBreakdown:
    """Return the time breakdown; if not measured, the window's waits for data against all else.

    All else then counts as computing, with "not measured" as its source.
    """
    run = evidence.measurement
    nothing = Share(fraction=0.0, source="not measured")
    if run.breakdown is not None:
        return run.breakdown
    waiting = min(1.0, max(0.0, run.data_wait_fraction or 0.0))
    script = evidence.facts.script
    clock = "clock around the loader, in the window"
    if script is not None and not script.loaders:
        clock = "clock between a step and the next forward pass"
    wait = Share(fraction=waiting, source=clock)
    rest = Share(fraction=1.0 - waiting, source=nothing.source)
    return TimeBreakdown(
        data_wait=wait, compute=rest, device_copy=nothing, synchronise=nothing, idle=nothing
    )


def fixed_step_share(evidence: Evidence) -> float:
    """Return the share of a step that does not grow with the batch: a / (a + k * batch).

    The line is a least-squares fit to the device's curve with equal relative errors; 0 if fewer
    than three batches were measured.
    """
    own = evidence.config.micro_batch_size
    ceilings = {own: device_ceiling(evidence)} | {
        apply_changes(evidence, point).micro_batch_size: point.ceiling.samples_per_s
        for point in evidence.curves.device
        if point.ceiling and point.changes.keys() <= BATCH_SETTINGS
    }
    if len(ceilings) < _FEWEST_BATCHES:
        return 0.0
    batches, rates = np.array([*ceilings.items()], dtype=np.float64).T
    # times have equal relative errors
    slope, fixed = np.polyfit(batches, batches / rates, 1, w=rates / batches)
    whole = fixed + slope * own
    return float(np.clip(fixed / whole, 0.0, 1.0)) if whole > 0 else 0.0


def _data(evidence: Evidence, parts: TimeBreakdown) -> Finding:
    share = max(0.0, parts.data_wait.fraction - parts.restart_fraction)
    costs = evidence.measurement.loader_costs
    if costs is None:
        return _finding("data_cpu", share, messages.data_cpu_evidence())
    if costs.slow_tail_fraction >= _TAIL_FRACTION:
        tail = messages.data_tail_evidence(
            slow_tail_fraction=costs.slow_tail_fraction,
            item_median_s=costs.item_median_s,
            item_slowest_s=costs.item_slowest_s,
        )
        return _finding("data_tail", share, tail)
    if workers_run_too_many_threads(evidence):
        threads = messages.loader_threads_evidence(
            item_s=costs.item_s,
            cores_per_item=costs.cpu_fraction,
            loader_processes=loader_processes(evidence.config),
            cores=evidence.environment.cores,
        )
        return _finding("threads", share, threads)
    if costs.cpu_fraction < WAITING_CPU_FRACTION:
        waits = messages.data_io_evidence(
            item_s=costs.item_s,
            cpu_fraction=costs.cpu_fraction,
            disk_bytes_per_item=costs.disk_bytes_per_item,
        )
        return _finding("data_io", share, waits)
    work = messages.data_cpu_evidence(
        item_s=costs.item_s,
        cpu_fraction=min(1.0, costs.cpu_fraction),
        collate_s=costs.collate_s,
    )
    return _finding("data_cpu", share, work)


def _restart(evidence: Evidence, parts: TimeBreakdown) -> Finding:
    share = parts.restart_fraction
    samples = evidence.measurement.window.epoch_samples
    epoch_s = None if samples is None else samples / evidence.measurement.samples_per_s
    return _finding("restart", share, messages.restart_evidence(share=share, epoch_s=epoch_s))


def _copy(evidence: Evidence, share: float) -> Finding:
    """Return exposed copies, with the ceilings of copying alone if measured."""
    known = copy_ceilings(evidence)
    is_pinned = evidence.config.pin_memory
    if is_pinned not in known:
        return _finding("copy", share, messages.copy_evidence(share=share))
    copies = messages.copy_evidence(
        share=share,
        is_pinned=is_pinned,
        pageable_samples_per_s=known.get(False),
        pinned_samples_per_s=known.get(True),
        exposed_fraction=min(1.0, share * known[is_pinned] / evidence.measurement.samples_per_s),
    )
    return _finding("copy", share, copies)


def _threads(evidence: Evidence, work: float) -> Finding | None:
    """Return CPU oversubscription: computing in the loop is slower than alone; None if it is not."""
    if work <= 0 or not runs_too_many_threads(evidence):
        return None
    rates = [
        point.ceiling.samples_per_s
        for point in advisable_points(evidence, "device")
        if point.ceiling is not None and set(point.changes) == {"intra_op_threads"}
    ]
    alone = max([device_ceiling(evidence), *rates])
    slowdown = alone / (evidence.measurement.samples_per_s / work)
    if slowdown < _SLOWED_BY:
        return None
    threads = messages.threads_evidence(
        threads=threads_of(evidence),
        num_workers=evidence.config.num_workers,
        cores=evidence.environment.cores,
        slowdown=slowdown,
        device_samples_per_s=alone,
    )
    return _finding("threads", work * (1 - 1 / slowdown), threads)


def _between_operators(evidence: Evidence, compute: float, idle: float) -> Finding:
    """Return gaps in which the device waits for the next operation; on a CPU, small operators too.

    Gaps far longer than any launch are the script's own code. Fetching a prefetched batch is work
    of the host, as launching is.
    """
    run = evidence.measurement
    loop_batch_s = evidence.config.group_batch_size / run.samples_per_s
    operators = 0 if evidence.curves.roofline is None else evidence.curves.roofline.operators
    if operators:
        outside_s = idle * loop_batch_s - (run.window.take_s or 0.0)
        if outside_s / operators > _LONGEST_GAP_S:
            own = messages.script_evidence(share=idle, outside_s=outside_s, operators=operators)
            return _finding("script", idle, own)
        operator_s = _batch_s(evidence) / operators
        if evidence.environment.device_kind == "cpu" and operator_s < _SMALL_OPERATOR_S:
            fixed = fixed_step_share(evidence)
            small = messages.operators_evidence(
                operators=operators, operator_s=operator_s, fixed_fraction=fixed
            )
            return _finding("launch", idle + compute * fixed, small)
    alone = None if run.ceilings is None else run.ceilings.device
    gaps = messages.launch_evidence(
        share=idle,
        launch_s=None if alone is None else alone.host_s,
        take_s=run.window.take_s,
        batch_s=loop_batch_s,
    )
    return _finding("launch", idle, gaps)


def _device_work(evidence: Evidence, share: float) -> Finding:
    """Return the rest: the device works, limited by memory bandwidth or by arithmetic."""
    memory = _memory_evidence(evidence)
    if memory is not None:
        return _finding("memory", share, memory)
    roofline = evidence.curves.roofline
    peak = None
    if roofline is not None and roofline.flops > 0:
        batches_per_s = device_ceiling(evidence) / evidence.config.group_batch_size
        peak = roofline.flops * batches_per_s / roofline.peak_flops_per_s
    is_measured = evidence.measurement.breakdown is not None
    computing = messages.compute_evidence(share=share, is_measured=is_measured, peak_fraction=peak)
    return _finding("compute", share, computing)


def _memory_evidence(evidence: Evidence) -> Note | None:
    """Return the evidence that memory bandwidth limits the device; None if it does not."""
    run = evidence.measurement
    roofline = evidence.curves.roofline
    fullness = run.fullness
    if fullness is not None and fullness.dram_fraction is not None:
        dram = fullness.dram_fraction / max(run.busy_fraction or 1.0, 0.01)
        is_full = dram >= _BANDWIDTH_FRACTION and dram > (fullness.tensor_fraction or 0.0)
        return messages.memory_evidence(dram_fraction=min(1.0, dram)) if is_full else None
    if roofline is None:
        return None
    batch_s = _batch_s(evidence)
    moving_s = roofline.moved_bytes / roofline.peak_bytes_per_s
    if (
        moving_s < _BANDWIDTH_FRACTION * batch_s
        or moving_s <= roofline.flops / roofline.peak_flops_per_s
    ):
        return None
    return messages.memory_evidence(
        moved_bytes=roofline.moved_bytes, batch_s=batch_s, copy_s=moving_s
    )


def _batch_s(evidence: Evidence) -> float:
    """Return the seconds of one micro batch on the device alone."""
    return evidence.config.micro_batch_size / device_ceiling(evidence)


# The diagnosis: findings, advice, headline and notes.

HEALTHY_GAIN = 0.05
"""Expected gain from which on a setting is worth changing: the usual run-to-run variation on a
shared CPU. Source: our convention."""


def judge(
    name: str, evidence: Evidence, notes: Iterable[Note] = (), *, wall_s: float = 0.0
) -> Diagnosis:
    """Judge an evidence: why training is slow, and what to do about it.

    Args:
        name: Name of the job.
        evidence: Measurement, curves, machine and workload.
        notes: Notes to put before those on the evidence.
        wall_s: Seconds that the diagnosis took.
    """
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
        headroom=current_headroom(evidence),
        findings=findings,
        advice=advice,
        evidence=evidence,
        notes=(*notes, *_notes(evidence)),
        wall_s=wall_s,
        autotune_version=__version__,
    )


def is_healthy(evidence: Evidence, findings: Sequence[Finding], advice: Sequence[Advice]) -> bool:
    """Return whether computing is the only finding, with a breakdown, and no advice gains 5 %."""
    gains = [piece.expected_gain or 0.0 for piece in advice]
    is_computing = [finding.bottleneck for finding in findings] == ["compute"]
    return (
        evidence.measurement.breakdown is not None
        and is_computing
        and max(gains, default=0.0) < HEALTHY_GAIN
    )


def current_headroom(evidence: Evidence) -> Headroom:
    """Return the headroom of the current settings."""
    run = evidence.measurement
    return headroom_of(
        run.samples_per_s,
        loader_ceiling=loader_ceiling(evidence),
        device_ceiling=device_ceiling(evidence),
        copy_ceiling=copy_ceilings(evidence).get(evidence.config.pin_memory),
        host_ceiling=run.host_ceiling,
        host_bound_busy=busy_while_host_bound(run),
    )


def make_headline(
    evidence: Evidence, findings: Sequence[Finding], advice: Sequence[Advice]
) -> tuple[Note, ...]:
    """Return the headline: the bottleneck, then the setting that should help most."""
    first = findings[0]
    points = (*evidence.curves.loader, *evidence.curves.device)
    has_others = any(point.changes and point.ceiling is not None for point in points)
    if is_healthy(evidence, findings, advice):
        least_gain = HEALTHY_GAIN if has_others else None
        return (messages.healthy(share=first.share, least_gain=least_gain),)
    if first.bottleneck == "unknown":
        return (messages.time_unknown(),)
    head = messages.bottleneck(bottleneck=first.bottleneck, share=first.share)
    if first.bottleneck == "compute" and evidence.measurement.breakdown is None:
        head = messages.time_not_attributed(share=first.share)
    elif first.bottleneck == "compute" and len(findings) > 1:
        head = messages.bottleneck(
            bottleneck=first.bottleneck,
            share=first.share,
            second=findings[1].bottleneck,
            second_share=findings[1].share,
        )
    for piece in advice:
        if piece.settings and piece.expected_gain is not None:
            return head, _headline_of(evidence, piece, piece.expected_gain)
    if has_others:
        return head, messages.no_setting_helps(least_gain=LEAST_GAIN)
    return head, messages.others_not_measured()


def _headline_of(evidence: Evidence, best: Advice, gain: float) -> Note:
    """Return the setting that should help most; its gain may be an effect of other programs."""
    load = evidence.measurement.host_load
    if load is not None and load.is_loaded:
        return messages.may_help(
            settings=best.settings, others_cores=load.others_cores, cores=load.cores
        )
    write = messages.computed_setting if best.kind == "add_workers" else messages.best_setting
    return write(settings=best.settings, gain=gain)


def _with_credible_ceilings(evidence: Evidence) -> Evidence:
    """Drop ceilings that the run exceeds, and join those measured both in the run and in curves."""
    config = evidence.config
    run = evidence.measurement
    book = CeilingBook()
    keep_ceilings(book, config, run)
    for side, points in points_by_side(evidence.curves):
        for point in points:
            if not point.changes:
                book.keep(side, config, point.ceiling)
    return evidence.model_copy(update={"measurement": with_settled_ceilings(run, config, book)})


def _notes(evidence: Evidence) -> Iterator[Note]:
    """Yield notes on the evidence."""
    if evidence.measurement.breakdown is None:
        yield messages.breakdown_not_measured()
    fault = memory_fault(evidence.measurement, evidence.limit_bytes)
    if fault is not None:
        yield messages.search_would_refuse(fault=fault)
    load = note_on_load(evidence.measurement.host_load)
    if load is not None:
        yield load
    limits = MemoryLimits.on(evidence.environment, evidence.limit_bytes)
    yield from memory_warnings(evidence)
    yield from growth_notes([evidence.measurement], limits, "baseline")
    yield from evidence.measurement.notes
    yield from evidence.curves.notes
    left_out = Counter[str]()
    for side, points in points_by_side(evidence.curves):
        left_out[side] = sum(point.is_left_out for point in points)
        for point in points:
            if point.ceiling is None and not point.is_left_out:
                yield messages.side_not_measured(
                    side=side, settings=point.changes, reason=point.reason
                )
    if counts := dict(+left_out):
        yield messages.no_time_for_points(counts=counts)
