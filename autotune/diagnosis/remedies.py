"""What would help where no setting does: cheaper items, caching, other formats, more cores, each with its figure. Pure.

Takes an Evidence, its findings and the best rate that settings alone should reach; hands on advice without settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from autotune.analysis.expectation import (
    apply_changes,
    device_ceiling,
    device_options,
    loader_ceiling,
    loader_cpu_s,
    loader_options,
    rate_without,
    threads_of,
    workers_run_too_many_threads,
)
from autotune.phrasing import say_bytes, say_gain, say_rate, say_seconds, say_share
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import joint_rate, overlaps
from autotune.records.diagnosis import Advice, Bottleneck, Evidence, Finding

__all__ = ["list_remedies"]

_NEAR = 0.97
"""Of a ceiling, from which on nothing is worth doing about the other side (rule 6 of measuring)."""
_MOSTLY = 0.5
"""Of a batch's bytes, from which on they are taken to be of one type."""


def list_remedies(evidence: Evidence, findings: Sequence[Finding], *, best_samples_per_s: float) -> list[Advice]:
    """Advice on what lies outside the settings, for each finding that settings alone don't remove."""
    found: list[Advice] = []
    is_held_by_data = best_samples_per_s < _NEAR * device_ceiling(evidence)
    for finding in findings:
        kind = finding.bottleneck
        if kind in _FOR_DATA:
            costs = evidence.measurement.loader_costs
            if is_held_by_data and costs is not None:
                found += _FOR_DATA[kind](evidence, costs)
        elif kind in _FOR_DEVICE:
            found += _FOR_DEVICE[kind](evidence, finding)
    return found + (_computing(evidence, findings[0]) if findings[0].bottleneck == "compute" else [])


def _cpu_work(evidence: Evidence, costs: LoaderCosts) -> list[Advice]:
    needed = _needed_item_s(evidence)
    cores = ceil(device_ceiling(evidence) * loader_cpu_s(evidence) + _device_cores(evidence))
    have = evidence.environment.cores
    if cores <= have and needed >= loader_cpu_s(evidence):  # the cores are enough: something else keeps them from work
        return [*_sharding(evidence, costs), *_cache(evidence, costs)]
    if needed > 0:
        text = (
            f"For the device to be the limit, make an item cheaper: at most {say_seconds(needed)} of CPU time instead "
            f"of {say_seconds(loader_cpu_s(evidence))} (cheaper decoding, pre-processing once and offline, "
            f"memory-mapped arrays instead of text or compressed files), or take {cores} cores instead of {have}"
        )
    else:
        text = (
            f"For the device to be the limit, take {cores} cores instead of {have}, or do without an item's CPU work "
            f"of {say_seconds(loader_cpu_s(evidence))} (decode and pre-process once and offline): computing alone "
            f"keeps the {have} cores here busy"
        )
    work = _up_to_the_device(evidence, text, f"an item's CPU time, {have} cores and the device's ceiling")
    return [work, *_sharding(evidence, costs), *_cache(evidence, costs)]


def _waiting(evidence: Evidence, costs: LoaderCosts) -> list[Advice]:
    """Items that wait are loaded side by side: by so many workers, or in fewer and larger reads."""
    wanted = device_ceiling(evidence)
    workers = ceil(wanted * costs.item_s)
    tried = [apply_changes(evidence, point).num_workers for point in loader_options(evidence)]
    most = max([1, evidence.config.num_workers, *tried])
    if most / wanted >= costs.item_s:  # so many workers are enough: something else keeps the items back
        return _cache(evidence, costs)
    side_by_side = f" with {most} workers" if most > 1 else ""
    text = (
        f"For the device to be the limit, let an item wait less: at most {say_seconds(most / wanted)}{side_by_side} "
        f"instead of {say_seconds(costs.item_s)} (shards that are read in one piece, larger sequential reads, local or "
        "faster storage)"
    )
    if workers > most and evidence.facts.is_sharded:
        text += f", or let about {workers} workers wait side by side"
    wait = _up_to_the_device(evidence, text, "an item's wall time and the device's ceiling")
    return [wait, *_sharding(evidence, costs), *_cache(evidence, costs)]


def _sharding(evidence: Evidence, costs: LoaderCosts) -> list[Advice]:
    """A stream that every worker reads whole can't be loaded side by side until it is divided among them.

    Source: pytorch.org, torch.utils.data.IterableDataset.
    """
    workers = ceil(device_ceiling(evidence) * (costs.item_s + costs.collate_s / evidence.config.micro_batch_size))
    if evidence.facts.is_sharded or workers < 2:
        return []
    text = (
        "Divide the stream among the workers by torch.utils.data.get_worker_info(), which it does not do now: each "
        f"would read all of it; for the device to be the limit takes about {workers} workers"
    )
    cores = _needed_item_s(evidence) / max(loader_cpu_s(evidence), 1e-9)
    expected = device_ceiling(evidence) * min(1.0, cores)
    basis = "an item's wall time, its CPU time with the cores here, and the device's ceiling"
    return [_expecting(evidence, text, expected, basis)] if cores > 0 else []


def _slow_tail(evidence: Evidence, costs: LoaderCosts) -> list[Advice]:
    """The loader without its slowest items."""
    batch_size, workers = evidence.config.micro_batch_size, max(1, evidence.config.num_workers)
    sample_s = costs.item_s * (1.0 - costs.slow_tail_fraction) + costs.collate_s / batch_size
    loader = max(workers / max(sample_s, 1e-9), loader_ceiling(evidence))
    is_overlapped = overlaps(evidence.config, evidence.environment.device_kind)
    expected = joint_rate(loader, device_ceiling(evidence), is_overlapped=is_overlapped)
    text = (
        f"Look at the slowest items: they take up to {say_seconds(costs.item_slowest_s)}, where half of all take less "
        f"than {say_seconds(costs.item_median_s)}; without them the loader would reach {say_rate(loader)}"
    )
    basis = f"{say_share(costs.slow_tail_fraction)} of the loading time goes into items over 8 times the median"
    return [_expecting(evidence, text, expected, basis), *_cache(evidence, costs)]


def _worker_threads(evidence: Evidence, costs: LoaderCosts) -> list[Advice]:
    """One thread for each worker: what an item's CPU time then allows on the cores.

    Source: pytorch.org, torch.utils.data: workers limit torch's own threads alone.
    """
    if not workers_run_too_many_threads(evidence):
        return []
    cores, loaders = evidence.environment.cores, max(1, evidence.config.num_workers) * evidence.config.process_count
    today, device_s = loader_ceiling(evidence), 1.0 / device_ceiling(evidence)
    allowed = min(loaders, cores) / loader_cpu_s(evidence)
    shared = cores / (loader_cpu_s(evidence) + _device_cores(evidence) * device_s)
    is_overlapped = overlaps(evidence.config, evidence.environment.device_kind)
    expected = min(shared, joint_rate(max(allowed, today), 1.0 / device_s, is_overlapped=is_overlapped))
    text = (
        "Give each loader worker one thread, in worker_init_fn: cv2.setNumThreads(0) for OpenCV, "
        "threadpoolctl.threadpool_limits(1) for NumPy, torch.set_num_threads(1) where the dataset has set more; or set "
        "OMP_NUM_THREADS=1 before the start"
    )
    basis = f"an item's CPU time of {say_seconds(costs.item_cpu_s)} allows {say_rate(allowed)} on {cores} cores"
    if allowed * _NEAR <= today:  # what several threads burn while they wait for each other is in the CPU time
        fights = _without_figure(text, f"{basis}, and the loader alone reaches {say_rate(today)} today")
    else:
        fights = _expecting(evidence, text, expected, f"{basis}, and the device's ceiling")
    return [fights, *_cpu_work(evidence, costs)]


def _cache(evidence: Evidence, costs: LoaderCosts) -> list[Advice]:
    """Items kept in RAM: what is left is collating them."""
    length, free = evidence.facts.dataset_length, evidence.free_ram_bytes
    if length is None or free is None or evidence.facts.is_iterable:
        return []
    size = length * costs.item_bytes
    if size > free:
        return []
    collating = evidence.config.micro_batch_size / costs.collate_s if costs.collate_s > 0 else float("inf")
    expected = joint_rate(collating, device_ceiling(evidence), is_overlapped=evidence.environment.device_kind != "cpu")
    text = (
        f"Keep the items in RAM, where they are the same in every epoch: {length:,} items of "
        f"{say_bytes(costs.item_bytes)} take {say_bytes(size)}, and {say_bytes(free)} are free"
    )
    basis = f"a batch then costs its collating ({say_seconds(costs.collate_s)}) and the device's own time"
    return [_expecting(evidence, text, expected, basis)]


def _small_operations(evidence: Evidence, finding: Finding) -> list[Advice]:
    roofline = evidence.curves.roofline
    count = "" if roofline is None else f" the {roofline.operators:,} operators of a batch by"
    graphs = ", CUDA graphs" if evidence.environment.device_kind in {"cuda", "rocm"} else ""
    text = (
        f"Replace{count or ' many small operations by'} fewer and larger ones: torch.compile{graphs}, batched instead "
        "of looped tensor code, a fused optimizer"
    )
    return [_saving(evidence, text, finding.share, f"at best, nothing is left of it: {finding.evidence}")]


def _host_waits(evidence: Evidence, finding: Finding) -> list[Advice]:
    """At best nothing is left of the gaps after the host's waits; where it is slow to launch, it then shows in others.

    Source: pytorch.org, "Performance Tuning Guide", "Avoid unnecessary CPU-GPU synchronization".
    """
    is_blocking = not evidence.config.pin_memory
    copies = "without blocking (pin_memory=True)" if is_blocking else "without blocking (non_blocking=True)"
    text = (
        "Let the host run ahead of the device: read the loss every so many steps instead of after each (.item(), "
        f".cpu(), print), and copy {copies}"
    )
    basis = f"at best, the {say_share(finding.share)} of the time after the host's waits is gone"
    return [_saving(evidence, text, finding.share, basis)]


def _bandwidth(evidence: Evidence, finding: Finding) -> list[Advice]:
    best_dtype = [point for point in device_options(evidence) if "amp_dtype" in point.changes]
    narrower = "" if best_dtype else ", a narrower precision"
    text = f"Move fewer bytes: let element-wise operations be fused (torch.compile), work in place{narrower}"
    return [_saving(evidence, text, finding.share / 2, f"at best, half of the bytes are left: {finding.evidence}")]


def _copies(evidence: Evidence, finding: Finding) -> list[Advice]:
    """Fewer bytes. On the CPU, which needs no copies, what moving a batch does is to lay it out anew."""
    share, said = finding.share, say_share(finding.share)
    if evidence.environment.device_kind == "cpu":
        text = (
            "Lay batches out as training wants them (channels_last) in collate_fn, so that nothing is converted later"
        )
        return [_saving(evidence, text, share, f"at best, the {said} of the time that moving batches takes is gone")]
    costs = evidence.measurement.loader_costs
    size = "" if costs is None else f" (an item has {say_bytes(costs.item_bytes)} now)"
    wide = None if costs is None else costs.float32_fraction
    if wide is not None and wide < _MOSTLY:
        text = f"Send fewer bytes{size}: narrower types, smaller items; make on the device what it can make itself"
        return [_saving(evidence, text, share / 2, f"at best, half of the bytes that take {said} of the time are left")]
    text = f"Send fewer bytes{size}: uint8 images instead of float32, converted and normalised on the device"
    basis = f"at best, a quarter is left of float32, and copies take {said} of the time"
    told = "at most, were all of it float32" if wide is None else f"{say_share(wide)} of the bytes are float32"
    return [_saving(evidence, text, 0.75 * share * (1.0 if wide is None else wide), f"{basis}; {told}")]


def _computing(evidence: Evidence, finding: Finding) -> list[Advice]:
    """What would help where the device computes, beside a large matrix product, which does little else.

    Without an expected gain, since nobody reaches that rate with small and element-wise operations between.
    Source: Williams et al. 2009.
    """
    if evidence.measurement.breakdown is None:  # nobody knows whether it computes
        return []
    text = "Make a step cheaper: fused operations (torch.compile), fewer operations per sample, or a faster device"
    roofline, present = evidence.curves.roofline, evidence.measurement.samples_per_s
    if roofline is None or roofline.flops <= 0:
        basis = f"{finding.evidence}; how far that is from a large matrix product's rate was not measured"
        return [_without_figure(text, basis)]
    batch = evidence.config.micro_batch_size * evidence.config.world_size  # the rate is that of all devices
    product_s = roofline.flops / roofline.peak_flops_per_s / batch
    most = 1.0 / max(1.0 - finding.share + present * product_s, 1e-3) - 1.0
    text += (
        f"; on this device the same arithmetic at the rate of a large matrix product would give at most "
        f"{say_gain(max(0.0, most))}"
    )
    return [_without_figure(text, finding.evidence)]


def _short_epochs(evidence: Evidence, finding: Finding) -> list[Advice]:
    if not evidence.config.persistent_workers:
        return []
    length = evidence.measurement.window.epoch_samples
    wanted = 20  # epochs in one: a restart then takes a twentieth of what it takes now
    if length is None:
        return []
    text = (
        f"Make epochs longer: one of {length * wanted:,} samples instead of {length:,} (a sampler that goes over the "
        "data several times) pays for a restart once"
    )
    present = evidence.measurement.samples_per_s
    expected = present / (1.0 - finding.share * (1 - 1 / wanted))
    return [_expecting(evidence, text, expected, f"restarts take {say_share(finding.share)} of the time now")]


_FOR_DATA: dict[Bottleneck, Callable[[Evidence, LoaderCosts], list[Advice]]] = {
    "data_cpu": _cpu_work,
    "data_io": _waiting,
    "data_tail": _slow_tail,
    "threads": _worker_threads,
}
_FOR_DEVICE: dict[Bottleneck, Callable[[Evidence, Finding], list[Advice]]] = {
    "launch": _small_operations,
    "synchronise": _host_waits,
    "memory": _bandwidth,
    "copy": _copies,
    "restart": _short_epochs,
}


def _needed_item_s(evidence: Evidence) -> float:
    """CPU seconds that a sample may take in the loader for the device to be the limit; 0 where no core is left."""
    return max(0.0, (evidence.environment.cores - _device_cores(evidence)) / device_ceiling(evidence))


def _device_cores(evidence: Evidence) -> float:
    """Cores that computing keeps busy at the device's ceiling, in the most economical number of threads measured."""
    if evidence.environment.device_kind != "cpu":
        return 0.0
    seen = [
        point.cpu_s_per_sample
        for point in evidence.curves.device
        if point.cpu_s_per_sample is not None and set(point.changes) <= {"intra_op_threads"}
    ]
    if seen:
        return min(seen) * device_ceiling(evidence)
    return float(min(threads_of(evidence, evidence.config), evidence.environment.cores))


def _up_to_the_device(evidence: Evidence, text: str, basis: str) -> Advice:
    if evidence.measurement.device_ceiling is None:
        basis += ", which was not measured but estimated from the waits for data"
    return _expecting(evidence, text, device_ceiling(evidence), basis)


def _expecting(evidence: Evidence, text: str, expected: float, basis: str) -> Advice:
    gain = expected / evidence.measurement.samples_per_s - 1.0
    return Advice(text=text, settings={}, expected_samples_per_s=expected, expected_gain=gain, basis=basis)


def _saving(evidence: Evidence, text: str, share: float, basis: str) -> Advice:
    """Advice that takes a share of the wall time away; without a figure where the loader has to become faster first."""
    expected, loader = rate_without(evidence, share), loader_ceiling(evidence)
    if expected < loader:
        return _expecting(evidence, text, expected, basis)
    basis += f"; the loader alone reaches {say_rate(loader)}"
    if evidence.measurement.samples_per_s >= _NEAR * loader:
        return _without_figure(text, f"{basis}, which has to become more first")
    return _expecting(evidence, text, expected, basis)


def _without_figure(text: str, basis: str) -> Advice:
    return Advice(text=text, settings={}, expected_samples_per_s=None, expected_gain=None, basis=basis)
