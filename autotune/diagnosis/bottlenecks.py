"""The bottlenecks: the wall time attributed to what takes it, from one diagnosis' evidence. Pure.

Comes in: an Evidence. Goes out: findings, the largest share first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.analysis.forecast import expectation
from autotune.messages import diagnosis as messages
from autotune.note import Note
from autotune.records.breakdown import Share, TimeBreakdown
from autotune.records.diagnosis import Bottleneck, Evidence, Finding
from autotune.tuning.host_bound import is_host_bound

__all__ = ["WAITING_CPU_FRACTION", "breakdown_of", "find_bottlenecks", "fixed_step_share"]

WAITING_CPU_FRACTION = 0.5
"""Of an item's time on a core, below which it mostly waits: our own convention, the smaller part."""
_LEAST_SHARE = 0.10
"""Of the wall time, below which a finding is noise: our own convention, the least that two busy sources differ by."""
_TAIL_FRACTION = 0.4
"""Of the loading time in items over 8 times the median, from which on the tail makes loading slow: our own
convention."""
_SMALL_OPERATOR_S = 30e-6
"""Mean time of an operator, below which calling it costs as much as it works. An eager operator with its autograd takes
PyTorch 5 to 10 us on the host (pytorch.org, "CUDA graphs" and "PyTorch profiler"); three times that is our own
convention."""
_LONGEST_GAP_S = 100e-6
"""Mean time between two operators, above which it is no launch: ten times what PyTorch takes for an operator on the
host (see above) is our own convention."""
_BANDWIDTH_FRACTION = 0.5
"""Of the measured copy bandwidth over a step. Source: Williams et al. 2009; half of the roof is our own convention."""
_SLOWED_BY = 1.5
"""Computing in the loop against the device alone, from which on the CPU is taken to be oversubscribed: our own
convention."""
_DEVICE_WORK = frozenset[Bottleneck]({"compute", "memory"})
_FEWEST_BATCHES = 3
"""For a line through batch sizes and times: with two, any noise would be a fixed cost."""


def find_bottlenecks(evidence: Evidence) -> tuple[Finding, ...]:
    """Return what takes at least a tenth of the wall time, the largest share first; at least one finding.

    Where the device waits for its host, the host comes before what the device does meanwhile: that holds nothing up.
    """
    parts = breakdown_of(evidence)
    if evidence.measurement.data_wait_fraction is None and evidence.measurement.breakdown is None:
        return (_finding("unknown", 1.0, messages.unknown_evidence()),)
    compute, idle, waits = parts.compute.fraction, parts.idle.fraction, parts.synchronise.fraction
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
    heaviest = max(merged, key=lambda finding: finding.share)
    is_waiting = is_host_bound(evidence.measurement)

    def order(finding: Finding) -> tuple[float, bool]:
        is_behind = is_waiting and finding.bottleneck in _DEVICE_WORK
        return -(min(finding.share, between.share) if is_behind else finding.share), is_behind

    return tuple(sorted(heavy or [heaviest], key=order))


def _finding(bottleneck: Bottleneck, share: float, evidence: Note) -> Finding:
    return Finding(bottleneck=bottleneck, share=share, figures=evidence.figures, evidence=evidence.text)


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """One finding for each bottleneck: threads of the workers and of computing may both oversubscribe the CPU.

    The smaller share's evidence counts only where it would be a finding by itself.
    """
    merged: dict[Bottleneck, Finding] = {}
    for finding in sorted(found, key=lambda finding: -finding.share):
        first = merged.setdefault(finding.bottleneck, finding)
        if first is not finding:
            is_heavy = finding.share >= _LEAST_SHARE
            merged[finding.bottleneck] = Finding(
                bottleneck=finding.bottleneck,
                share=first.share + finding.share,
                figures=first.figures | finding.figures if is_heavy else first.figures,
                evidence=f"{first.evidence}; {finding.evidence}" if is_heavy else first.evidence,
            )
    return list(merged.values())


def breakdown_of(evidence: Evidence) -> TimeBreakdown:
    """Where the time goes; without a measured breakdown, the window's own waits for data, if known, against all else.

    All else then counts as computing, with "not measured" as its source.
    """
    run, nothing = evidence.measurement, Share(fraction=0.0, source="not measured")
    if run.breakdown is not None:
        return run.breakdown
    waiting = min(1.0, max(0.0, run.data_wait_fraction or 0.0))
    script = evidence.facts.script
    has_loader = script is None or script.loaders
    clock = "clock around the loader, in the window" if has_loader else "clock between a step and the next forward pass"
    wait = Share(fraction=waiting, source=clock)
    rest = Share(fraction=1.0 - waiting, source=nothing.source)
    return TimeBreakdown(data_wait=wait, compute=rest, device_copy=nothing, synchronise=nothing, idle=nothing)


def fixed_step_share(evidence: Evidence) -> float:
    """Share of a batch's time on the device that does not grow with it: a / (a + k * batch), by least squares.

    The line is fitted to the batches of the device's curve, each weighted by its own time; 0 where fewer than three
    were measured.
    """
    own = evidence.config.micro_batch_size
    points = [point for point in evidence.curves.device if point.changes.keys() <= {"micro_batch_size", "max_tokens"}]
    ceilings: dict[object, float] = {own: expectation.device_ceiling(evidence)} | {
        point.changes.get("micro_batch_size", own): point.ceiling.samples_per_s for point in points if point.ceiling
    }
    if len(ceilings) < _FEWEST_BATCHES:
        return 0.0
    batches, rates = np.array([*ceilings.items()], dtype=np.float64).T
    slope, fixed = np.polyfit(batches, batches / rates, 1, w=rates / batches)  # relative errors are alike
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
    if expectation.workers_run_too_many_threads(evidence):
        threads = messages.loader_threads_evidence(
            item_s=costs.item_s,
            cores_per_item=costs.cpu_fraction,
            loader_processes=expectation.loader_processes(evidence.config),
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
    share, samples = parts.restart_fraction, evidence.measurement.window.epoch_samples
    epoch_s = None if samples is None else samples / evidence.measurement.samples_per_s
    return _finding("restart", share, messages.restart_evidence(share=share, epoch_s=epoch_s))


def _copy(evidence: Evidence, share: float) -> Finding:
    """Return copies that nothing hides, with what copying alone reaches where that was measured."""
    known, is_pinned = expectation.copy_ceilings(evidence), evidence.config.pin_memory
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
    """Computing in the loop, in this share of the time, against the device alone in at most a thread for each core."""
    if work <= 0 or not expectation.runs_too_many_threads(evidence, evidence.config):
        return None
    points = [
        point
        for point in expectation.advisable_points(evidence, "device")
        if set(point.changes) == {"intra_op_threads"}
    ]
    rates = [point.ceiling.samples_per_s for point in points if point.ceiling is not None]
    alone = max([expectation.device_ceiling(evidence), *rates])
    slowdown = alone / (evidence.measurement.samples_per_s / work)
    if slowdown < _SLOWED_BY:
        return None
    threads = messages.threads_evidence(
        threads=expectation.threads_of(evidence, evidence.config),
        num_workers=evidence.config.num_workers,
        cores=evidence.environment.cores,
        slowdown=slowdown,
        device_samples_per_s=alone,
    )
    return _finding("threads", work * (1 - 1 / slowdown), threads)


def _between_operators(evidence: Evidence, compute: float, idle: float) -> Finding:
    """Gaps in which the device waits for the next operation; on the CPU the fixed cost of small operators too.

    Gaps that are far longer than any launch are time that the script spends otherwise, in Python or asleep. Taking a
    batch that lies ready from the loader is the host's work as launching is.
    """
    run, roofline = evidence.measurement, evidence.curves.roofline
    if roofline is not None and roofline.operators:
        outside_s = idle * _loop_batch_s(evidence) - (run.window.take_s or 0.0)
        if outside_s / roofline.operators > _LONGEST_GAP_S:
            own = messages.script_evidence(share=idle, outside_s=outside_s, operators=roofline.operators)
            return _finding("script", idle, own)
    if evidence.environment.device_kind == "cpu" and roofline is not None and roofline.operators:
        operator_s, fixed = _batch_s(evidence) / roofline.operators, fixed_step_share(evidence)
        if operator_s < _SMALL_OPERATOR_S:
            small = messages.operators_evidence(
                operators=roofline.operators, operator_s=operator_s, fixed_fraction=fixed
            )
            return _finding("launch", idle + compute * fixed, small)
    alone = None if run.ceilings is None else run.ceilings.device
    gaps = messages.launch_evidence(
        share=idle,
        launch_s=None if alone is None else alone.host_s,
        take_s=run.window.take_s,
        batch_s=_loop_batch_s(evidence),
    )
    return _finding("launch", idle, gaps)


def _loop_batch_s(evidence: Evidence) -> float:
    """Return the seconds of one micro batch in the loop."""
    return evidence.config.micro_batch_size * evidence.config.world_size / evidence.measurement.samples_per_s


def _device_work(evidence: Evidence, share: float) -> Finding:
    """What is left: the device works, limited by its memory's bandwidth or by its arithmetic."""
    memory = _memory_evidence(evidence)
    if memory is not None:
        return _finding("memory", share, memory)
    roofline, peak = evidence.curves.roofline, None
    if roofline is not None and roofline.flops > 0:
        batches_per_s = 1.0 / _batch_s(evidence) / evidence.config.world_size
        peak = roofline.flops * batches_per_s / roofline.peak_flops_per_s
    is_measured = evidence.measurement.breakdown is not None
    computing = messages.compute_evidence(share=share, is_measured=is_measured, peak_fraction=peak)
    return _finding("compute", share, computing)


def _memory_evidence(evidence: Evidence) -> Note | None:
    """Return what shows a use of half the memory's bandwidth, and more of it than of arithmetic; else None."""
    run, roofline = evidence.measurement, evidence.curves.roofline
    fullness = run.fullness
    if fullness is not None and fullness.dram_fraction is not None:
        dram = fullness.dram_fraction / max(run.busy_fraction or 1.0, 0.01)
        is_full = dram >= _BANDWIDTH_FRACTION and dram > (fullness.tensor_fraction or 0.0)
        return messages.memory_evidence(dram_fraction=min(1.0, dram)) if is_full else None
    if roofline is None:
        return None
    batch_s, moving_s = _batch_s(evidence), roofline.moved_bytes / roofline.peak_bytes_per_s
    if moving_s < _BANDWIDTH_FRACTION * batch_s or moving_s <= roofline.flops / roofline.peak_flops_per_s:
        return None
    return messages.memory_evidence(moved_bytes=roofline.moved_bytes, batch_s=batch_s, copy_s=moving_s)


def _batch_s(evidence: Evidence) -> float:
    """Seconds of one micro batch on the device alone."""
    return evidence.config.micro_batch_size / expectation.device_ceiling(evidence)
