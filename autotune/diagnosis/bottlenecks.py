"""The bottlenecks: the wall time attributed to what takes it, from one diagnosis' evidence. Pure.

Comes in: an Evidence. Goes out: findings as codes with figures, the largest share first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import JsonValue

from autotune.analysis.forecast import expectation
from autotune.diagnosis.gains import figures_of
from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
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
        return (Finding(bottleneck="unknown", share=1.0),)
    compute, idle = parts.compute.fraction, parts.idle.fraction
    threads = _threads(evidence, compute + idle)
    left = 1.0 if threads is None else 1 - threads.share / (compute + idle)
    between = _between_operators(evidence, compute * left, idle * left)
    found = [
        _data(evidence, parts),
        _restart(evidence, parts),
        _copy(evidence, parts.device_copy.fraction),
        Finding(bottleneck="synchronise", share=parts.synchronise.fraction),
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


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """One finding for each bottleneck: threads of the workers and of computing may both oversubscribe the CPU.

    The smaller share's figures count only where it would be a finding by itself.
    """
    merged: dict[Bottleneck, Finding] = {}
    for finding in sorted(found, key=lambda finding: -finding.share):
        first = merged.setdefault(finding.bottleneck, finding)
        if first is not finding:
            figures = first.figures | (finding.figures if finding.share >= _LEAST_SHARE else {})
            update = {"share": first.share + finding.share, "figures": figures}
            merged[finding.bottleneck] = first.model_copy(update=update)
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
    code, figures = _what_loading_does(evidence, evidence.measurement.loader_costs)
    return Finding(bottleneck=code, share=share, figures={"waiting_fraction": share, **figures})


def _what_loading_does(evidence: Evidence, costs: LoaderCosts | None) -> tuple[Bottleneck, dict[str, JsonValue]]:
    if costs is None:
        return "data_cpu", {}
    if costs.slow_tail_fraction >= _TAIL_FRACTION:
        return "data_tail", figures_of(costs, "slow_tail_fraction", "item_median_s", "item_slowest_s")
    work: dict[str, JsonValue] = {"item_s": costs.item_s}
    if expectation.workers_run_too_many_threads(evidence):
        loaders, cores = expectation.loader_processes(evidence.config), evidence.environment.cores
        return "threads", work | {"cores_per_item": costs.cpu_fraction, "loader_processes": loaders, "cores": cores}
    work["cpu_fraction"] = min(1.0, costs.cpu_fraction)
    if costs.cpu_fraction < WAITING_CPU_FRACTION:
        return "data_io", work | {"disk_bytes_per_item": costs.disk_bytes_per_item}
    return "data_cpu", work | {"collate_s": costs.collate_s}


def _restart(evidence: Evidence, parts: TimeBreakdown) -> Finding:
    share, samples = parts.restart_fraction, evidence.measurement.window.epoch_samples
    epoch_s = None if samples is None else samples / evidence.measurement.samples_per_s
    return Finding(bottleneck="restart", share=share, figures={"epoch_s": epoch_s})


def _copy(evidence: Evidence, share: float) -> Finding:
    """Copies that nothing hides, beside what copying alone reaches, pageable and pinned, where that was measured.

    `exposed_fraction`: of the time that copies take by themselves.
    """
    known, is_pinned = expectation.copy_ceilings(evidence), evidence.config.pin_memory
    if is_pinned not in known:
        return Finding(bottleneck="copy", share=share)
    figures: dict[str, JsonValue] = {
        "is_pinned": is_pinned,
        "pageable_samples_per_s": known.get(False),
        "pinned_samples_per_s": known.get(True),
        "exposed_fraction": min(1.0, share * known[is_pinned] / evidence.measurement.samples_per_s),
    }
    return Finding(bottleneck="copy", share=share, figures=figures)


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
    threads, workers = expectation.threads_of(evidence, evidence.config), evidence.config.num_workers
    figures: dict[str, JsonValue] = {"threads": threads, "num_workers": workers, "cores": evidence.environment.cores}
    figures |= {"slowdown": slowdown, "device_samples_per_s": alone}
    share = work * (1 - 1 / slowdown)
    return Finding(bottleneck="threads", share=share, figures=figures) if slowdown >= _SLOWED_BY else None


def _between_operators(evidence: Evidence, compute: float, idle: float) -> Finding:
    """Gaps in which the device waits for the next operation; on the CPU the fixed cost of small operators too.

    Gaps that are far longer than any launch are time that the script spends otherwise, in Python or asleep. Taking a
    batch that lies ready from the loader is the host's work as launching is.
    """
    roofline, host = evidence.curves.roofline, _host_figures(evidence)
    if roofline is not None and roofline.operators:
        outside_s = idle * _loop_batch_s(evidence) - (evidence.measurement.window.take_s or 0.0)
        if outside_s / roofline.operators > _LONGEST_GAP_S:
            figures: dict[str, JsonValue] = {"outside_s": outside_s, "operators": roofline.operators}
            return Finding(bottleneck="script", share=idle, figures=figures)
    if evidence.environment.device_kind == "cpu" and roofline is not None and roofline.operators:
        operator_s, fixed = _batch_s(evidence) / roofline.operators, fixed_step_share(evidence)
        if operator_s < _SMALL_OPERATOR_S:
            figures = {"operators": roofline.operators, "operator_s": operator_s, "fixed_fraction": fixed}
            return Finding(bottleneck="launch", share=idle + compute * fixed, figures=figures)
    return Finding(bottleneck="launch", share=idle, figures=host)


def _host_figures(evidence: Evidence) -> dict[str, JsonValue]:
    """Return what a batch takes of the host, by name, where that was measured."""
    run = evidence.measurement
    alone = None if run.ceilings is None else run.ceilings.device
    launch_s, take_s = None if alone is None else alone.host_s, run.window.take_s
    if launch_s is None and take_s is None:
        return {}
    return {"launch_s": launch_s, "take_s": take_s, "batch_s": _loop_batch_s(evidence)}


def _loop_batch_s(evidence: Evidence) -> float:
    """Return the seconds of one micro batch in the loop."""
    return evidence.config.micro_batch_size * evidence.config.world_size / evidence.measurement.samples_per_s


def _device_work(evidence: Evidence, share: float) -> Finding:
    """What is left: the device works, limited by its memory's bandwidth or by its arithmetic."""
    memory = _memory_figures(evidence)
    if memory is not None:
        return Finding(bottleneck="memory", share=share, figures=memory)
    roofline, peak = evidence.curves.roofline, None
    if roofline is not None and roofline.flops > 0:
        batches_per_s = 1.0 / _batch_s(evidence) / evidence.config.world_size
        peak = roofline.flops * batches_per_s / roofline.peak_flops_per_s
    is_measured = evidence.measurement.breakdown is not None
    return Finding(bottleneck="compute", share=share, figures={"is_measured": is_measured, "peak_fraction": peak})


def _memory_figures(evidence: Evidence) -> dict[str, JsonValue] | None:
    """The figures that show a use of half the memory's bandwidth, and more of it than of arithmetic; else None."""
    run, roofline = evidence.measurement, evidence.curves.roofline
    fullness = run.fullness
    if fullness is not None and fullness.dram_fraction is not None:
        dram = fullness.dram_fraction / max(run.busy_fraction or 1.0, 0.01)
        is_full = dram >= _BANDWIDTH_FRACTION and dram > (fullness.tensor_fraction or 0.0)
        return {"dram_fraction": min(1.0, dram)} if is_full else None
    if roofline is None:
        return None
    batch_s, moving_s = _batch_s(evidence), roofline.moved_bytes / roofline.peak_bytes_per_s
    if moving_s < _BANDWIDTH_FRACTION * batch_s or moving_s <= roofline.flops / roofline.peak_flops_per_s:
        return None
    return {"moved_bytes": roofline.moved_bytes, "batch_s": batch_s, "copy_s": moving_s}


def _batch_s(evidence: Evidence) -> float:
    """Seconds of one micro batch on the device alone."""
    return evidence.config.micro_batch_size / expectation.device_ceiling(evidence)
