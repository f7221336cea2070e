"""What holds the rate: the wall time attributed to bottlenecks, from one look's evidence. Pure.

Takes an Evidence; `find_bottlenecks` hands on the findings, the heaviest first, and `say_headline` the answer in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.analysis.expectation import (
    device_ceiling,
    device_options,
    loader_ceiling,
    runs_too_many_threads,
    threads_of,
    workers_run_too_many_threads,
)
from autotune.phrasing import say_bytes, say_gain, say_rate, say_seconds, say_settings, say_share
from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
from autotune.records.ceilings import Standing, standing_of
from autotune.records.diagnosis import Advice, Bottleneck, Evidence, Finding

__all__ = [
    "BOTTLENECKS",
    "HEALTHY_GAIN",
    "breakdown_of",
    "find_bottlenecks",
    "fixed_step_share",
    "is_healthy",
    "say_headline",
    "standing_today",
]

BOTTLENECKS: dict[Bottleneck, str] = {
    "data_cpu": "data-bound by CPU work",
    "data_io": "data-bound by waiting for I/O",
    "data_tail": "data-bound by a slow tail of items",
    "restart": "bound by restarts of the loader: epochs are too short",
    "copy": "copy-bound",
    "compute": "compute-bound",
    "launch": "launch-bound: the operations are too small",
    "synchronise": "launch-bound: the host waits for the device before it launches more",
    "memory": "memory-bound: its bandwidth is used up",
    "threads": "threads fight for the cores",
}
"""Each bottleneck in words."""
HEALTHY_GAIN = 0.05
"""From what expected gain on something is worth changing: our own convention, just above the 4 % that two runs of the
same settings may differ by on a CPU (1.96 * sqrt(2) * RUN_SPREAD)."""
_LEAST_SHARE = 0.10
"""Of the wall time, below which a finding is noise: our own convention, the least that two busy sources differ by."""
_TAIL_FRACTION = 0.4
"""Of the loading time in items over 8 times the median, from which on the tail is what makes loading slow."""
_WAITING_CPU_FRACTION = 0.5
"""Of an item's time on a core, below which it mostly waits."""
_SMALL_OPERATOR_S = 30e-6
"""Mean time of an operator, below which calling it costs as much as it works. An eager operator with its autograd takes
PyTorch 5 to 10 us on the host (pytorch.org, "CUDA graphs" and "PyTorch profiler"); three times that is our own line."""
_BANDWIDTH_FRACTION = 0.5
"""Of the measured copy bandwidth over a step. Source: Williams et al. 2009; half of the roof is our own line."""
_NOT_MEASURED = "not measured"
_NO_OTHERS = "Other settings were not measured."
_SLOWED_BY = 1.5
"""Computing in the loop against the device alone, from which on threads are taken to fight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The device's part of the wall time, its waits for a host that had waited for it left out."""

    compute: float
    idle: float

    @property
    def total(self) -> float:
        return self.compute + self.idle


def find_bottlenecks(evidence: Evidence) -> tuple[Finding, ...]:
    """What takes at least a tenth of the wall time, the heaviest first; at least one finding."""
    parts = breakdown_of(evidence)
    work = _Work(compute=parts.compute.fraction, idle=parts.idle.fraction)
    threads = _threads(evidence, work)
    fought = 0.0 if threads is None else threads.share / work.total
    work = _Work(compute=work.compute * (1 - fought), idle=work.idle * (1 - fought))
    launch = _launch(evidence, work)
    rest = _device_work(evidence, max(0.0, work.total - launch.share))
    found = [_data(evidence, parts), _restart(evidence, parts), _copy(parts), _synchronise(parts), launch, rest]
    found = _joined([*found, *([] if threads is None else [threads])])
    heavy = [one for one in found if one.share >= _LEAST_SHARE] or [max(found, key=lambda one: one.share)]
    return tuple(sorted(heavy, key=lambda one: -one.share))


def _joined(found: Sequence[Finding]) -> list[Finding]:
    """One finding for each bottleneck: workers' threads and those of computing may fight both."""
    joined: dict[Bottleneck, Finding] = {}
    for one in sorted(found, key=lambda one: -one.share):
        first = joined.get(one.bottleneck)
        joined[one.bottleneck] = one if first is None else _both(first, one)
    return list(joined.values())


def _both(first: Finding, second: Finding) -> Finding:
    """Two findings as one; the second's evidence counts where it would be a finding by itself."""
    said = f"{first.evidence}; {second.evidence}" if second.share >= _LEAST_SHARE else first.evidence
    return first.model_copy(update={"share": first.share + second.share, "evidence": said})


def is_healthy(evidence: Evidence, findings: Sequence[Finding], advice: Sequence[Advice]) -> bool:
    """Whether computing alone was found, by a measured breakdown, and nothing that was measured promises 5 % more."""
    if evidence.measurement.breakdown is None or [one.bottleneck for one in findings] != ["compute"]:
        return False
    return all((one.expected_gain or 0.0) < HEALTHY_GAIN for one in advice)


def standing_today(evidence: Evidence) -> Standing:
    """Where today's rate stands between the ceilings."""
    rate = evidence.measurement.samples_per_s
    return standing_of(rate, loader_ceiling=loader_ceiling(evidence), device_ceiling=device_ceiling(evidence))


def say_headline(evidence: Evidence, findings: Sequence[Finding], advice: Sequence[Advice], *, healthy: bool) -> str:
    """The answer in a sentence or two."""
    if healthy:
        head = f"Healthy: the device computes {say_share(findings[0].share)} of the time"
        rest = ", and nothing measured here gives 5 %." if _has_measured_others(evidence) else f". {_NO_OTHERS}"
        return f"{head}{rest}"
    head = _say_first(evidence, findings)
    best = next((one for one in advice if one.settings and one.expected_gain is not None), None)
    if best is not None and best.expected_gain is not None:
        return f"{head} {say_settings(best.settings)} should give {say_gain(best.expected_gain)}."
    if not _has_measured_others(evidence):
        return f"{head} {_NO_OTHERS}"
    return f"{head} No setting that was measured helps by more than 3 %."


def _say_first(evidence: Evidence, findings: Sequence[Finding]) -> str:
    """What holds the rate most; computing is no trouble by itself, so that what comes after it is named as well."""
    first, share = findings[0], say_share(findings[0].share)
    what = BOTTLENECKS[first.bottleneck]
    if first.bottleneck == "compute" and evidence.measurement.breakdown is None:
        return f"{share} of the time is not spent waiting for data; what it goes into was not measured."
    head = f"{what[0].upper()}{what[1:]} ({share} of the time)"
    if first.bottleneck == "compute" and len(findings) > 1:
        second = findings[1]
        return f"{head}, but also {BOTTLENECKS[second.bottleneck]} ({say_share(second.share)})."
    return f"{head}."


def _has_measured_others(evidence: Evidence) -> bool:
    points = (*evidence.curves.loader, *evidence.curves.device)
    return any(point.changes and point.ceiling is not None for point in points)


def breakdown_of(evidence: Evidence) -> TimeBreakdown:
    """Where the time goes; where that was not measured, the window's own waits for data against all else.

    All else then counts as computing, and its source says that nobody has looked.
    """
    run = evidence.measurement
    if run.breakdown is not None:
        return run.breakdown
    nothing, waiting = Share(fraction=0.0, source=_NOT_MEASURED), min(1.0, max(0.0, run.data_wait_fraction))
    return TimeBreakdown(
        data_wait=Share(fraction=waiting, source="clock around the loader, in the window"),
        device_copy=nothing,
        compute=Share(fraction=1.0 - waiting, source=_NOT_MEASURED),
        synchronise=nothing,
        idle=nothing,
    )


def fixed_step_share(evidence: Evidence) -> float:
    """Share of a batch's time on the device that does not grow with it: a / (a + k * batch), by least squares.

    The line is fitted to the batches of the device's curve, each weighted by its own time; 0 where fewer than three
    were measured.
    """
    points = _batch_times(evidence)
    if len(points) < 3:
        return 0.0
    # relative errors are alike: minimise sum of ((a + k b) / t - 1)^2 over a and k
    aa = sum(1 / t**2 for _, t in points)
    ab = sum(b / t**2 for b, t in points)
    bb = sum(b**2 / t**2 for b, t in points)
    ya, yb = sum(1 / t for _, t in points), sum(b / t for b, t in points)
    determinant = aa * bb - ab**2
    if determinant <= 0:
        return 0.0
    fixed, slope = (ya * bb - yb * ab) / determinant, (aa * yb - ab * ya) / determinant
    whole = fixed + slope * evidence.config.micro_batch_size
    return min(1.0, max(0.0, fixed / whole)) if whole > 0 else 0.0


def _batch_times(evidence: Evidence) -> list[tuple[int, float]]:
    """(micro batch, seconds of one) for the device alone."""
    own = evidence.config.micro_batch_size
    ceilings = {own: device_ceiling(evidence)}
    for point in evidence.curves.device:
        if point.ceiling is not None and set(point.changes) <= {"micro_batch_size"}:
            batch = point.changes.get("micro_batch_size", own)
            ceilings[batch if isinstance(batch, int) else own] = point.ceiling.samples_per_s
    return [(batch, batch / rate) for batch, rate in sorted(ceilings.items())]


def _data(evidence: Evidence, parts: TimeBreakdown) -> Finding:
    share = max(0.0, parts.data_wait.fraction - parts.restart_fraction)
    kind, why = _what_loading_does(evidence)
    said = f"{say_share(share)} of the time is spent waiting for data{why}"
    return Finding(bottleneck=kind, share=share, evidence=said)


def _what_loading_does(evidence: Evidence) -> tuple[Bottleneck, str]:
    costs = evidence.measurement.loader_costs
    if costs is None:
        return "data_cpu", "; what an item costs was not measured"
    if costs.slow_tail_fraction >= _TAIL_FRACTION:
        return "data_tail", f": {_say_tail(costs)}"
    if workers_run_too_many_threads(evidence):
        return "threads", f": {_say_worker_threads(evidence, costs)}"
    working = f"an item takes {say_seconds(costs.item_s)}, {say_share(min(1.0, costs.cpu_fraction))} of it CPU time"
    if costs.cpu_fraction < _WAITING_CPU_FRACTION:
        disk = f", and reads {say_bytes(costs.disk_bytes_per_item)} from the disk" if costs.disk_bytes_per_item else ""
        return "data_io", f": {working}{disk}"
    return "data_cpu", f": {working}; collating a batch takes {say_seconds(costs.collate_s)}"


def _say_worker_threads(evidence: Evidence, costs: LoaderCosts) -> str:
    loaders = max(1, evidence.config.num_workers) * evidence.config.process_count
    return (
        f"an item by itself keeps {costs.cpu_fraction:.1f} cores busy for {say_seconds(costs.item_s)}, in threads of a "
        f"library's own (OpenCV's, NumPy's) or in processes that it starts; {loaders} loader processes at once would "
        f"keep {loaders * costs.cpu_fraction:.1f} busy, but there are {evidence.environment.cores}"
    )


def _say_tail(costs: LoaderCosts) -> str:
    return (
        f"{say_share(costs.slow_tail_fraction)} of the loading time goes into items over 8 times the median of "
        f"{say_seconds(costs.item_median_s)}, up to {say_seconds(costs.item_slowest_s)}"
    )


def _restart(evidence: Evidence, parts: TimeBreakdown) -> Finding:
    share, window = parts.restart_fraction, evidence.measurement.window
    epoch = ""
    if window.epoch_samples is not None:
        epoch_s = window.epoch_samples / evidence.measurement.samples_per_s
        epoch = f": an epoch lasts {say_seconds(epoch_s)}, its restart {say_seconds(share * epoch_s)} of that"
    return Finding(
        bottleneck="restart", share=share, evidence=f"{say_share(share)} of the time starts the loader anew{epoch}"
    )


def _copy(parts: TimeBreakdown) -> Finding:
    share = parts.device_copy.fraction
    said = f"{say_share(share)} of the time copies batches to the device while nothing computes"
    return Finding(bottleneck="copy", share=share, evidence=said)


def _synchronise(parts: TimeBreakdown) -> Finding:
    """Gaps that no launch of operations explains: nothing was queued, since the host had waited. None on the CPU."""
    share = parts.synchronise.fraction
    said = (
        f"{say_share(share)} of the time the device has nothing to do because the host had waited for it before it "
        "launched more (loss.item(), a copy that blocks)"
    )
    return Finding(bottleneck="synchronise", share=share, evidence=said)


def _threads(evidence: Evidence, work: _Work) -> Finding | None:
    """Computing in the loop against the device alone in at most as many threads as there are cores."""
    if work.total <= 0 or not runs_too_many_threads(evidence, evidence.config):
        return None
    alone = [device_ceiling(evidence)]
    alone += [
        point.ceiling.samples_per_s
        for point in device_options(evidence)
        if point.ceiling is not None and set(point.changes) == {"intra_op_threads"}
    ]
    in_loop = evidence.measurement.samples_per_s / work.total
    slowed = max(alone) / in_loop
    if slowed < _SLOWED_BY:
        return None
    threads, cores = threads_of(evidence, evidence.config), evidence.environment.cores
    said = (
        f"{threads} threads and {evidence.config.num_workers} loader workers share {cores} cores: computing is "
        f"{slowed:.1f} times slower in the loop than the device alone can ({say_rate(max(alone))})"
    )
    return Finding(bottleneck="threads", share=work.total * (1 - 1 / slowed), evidence=said)


def _launch(evidence: Evidence, work: _Work) -> Finding:
    """Gaps in which the device waits for the next operation; on the CPU the fixed cost of small operators too."""
    share, roofline = work.idle, evidence.curves.roofline
    said = f"{say_share(work.idle)} of the time passes between operations"
    if evidence.environment.device_kind == "cpu" and roofline is not None and roofline.operators:
        operator_s = evidence.config.micro_batch_size / device_ceiling(evidence) / roofline.operators
        fixed = fixed_step_share(evidence)
        if operator_s < _SMALL_OPERATOR_S:
            share += work.compute * fixed
            said = (
                f"a batch takes {roofline.operators:,} operators of {say_seconds(operator_s)} each, and "
                f"{say_share(fixed)} of its time does not depend on the batch's size"
            )
    return Finding(bottleneck="launch", share=share, evidence=said)


def _device_work(evidence: Evidence, share: float) -> Finding:
    """What is left: the device works, held by its memory's bandwidth or by its arithmetic."""
    memory = _memory_evidence(evidence)
    if memory is not None:
        return Finding(bottleneck="memory", share=share, evidence=memory)
    said, roofline = f"the device computes {say_share(share)} of the time", evidence.curves.roofline
    if evidence.measurement.breakdown is None:
        said = f"{say_share(share)} of the time is not spent waiting for data; what it goes into was not measured"
    if roofline is not None and roofline.flops > 0:
        batches_per_s = device_ceiling(evidence) / evidence.config.micro_batch_size / evidence.config.world_size
        achieved = roofline.flops * batches_per_s
        peak = say_share(achieved / roofline.peak_flops_per_s)
        said += f", at {peak} of the rate of a large matrix product in the same precision"
    return Finding(bottleneck="compute", share=share, evidence=said)


def _memory_evidence(evidence: Evidence) -> str | None:
    run, roofline = evidence.measurement, evidence.curves.roofline
    fullness = run.fullness
    if fullness is not None and fullness.dram_fraction is not None:
        dram = fullness.dram_fraction / max(run.busy_fraction or 1.0, 0.01)
        said = f"the memory's bandwidth is {say_share(min(1.0, dram))} used while the device is busy (GPM)"
        return said if dram >= _BANDWIDTH_FRACTION and dram > (fullness.tensor_fraction or 0.0) else None
    if roofline is None:
        return None
    batch_s = evidence.config.micro_batch_size / device_ceiling(evidence)
    moving_s = roofline.moved_bytes / roofline.peak_bytes_per_s
    if moving_s < _BANDWIDTH_FRACTION * batch_s or moving_s <= roofline.flops / roofline.peak_flops_per_s:
        return None
    return (
        f"a batch moves {say_bytes(roofline.moved_bytes)} in {say_seconds(batch_s)}; a large copy, which does nothing "
        f"else, would take {say_seconds(moving_s)}"
    )
