"""What helps where no measured setting does: a table from bottleneck to remedies, each with its expected rate. Pure.

Comes in: an Evidence, its findings and the best rate that settings alone should reach. Goes out: advice as codes with
figures, without settings but for one that was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, inf

from pydantic import JsonValue

from autotune.analysis.forecast import expectation
from autotune.analysis.forecast.rate_law import joint_rate
from autotune.diagnosis.data_remedies import loader_without, remove_padding
from autotune.diagnosis.gains import advise, figures_of
from autotune.policy import POLICY
from autotune.records.breakdown import LoaderCosts
from autotune.records.diagnosis import Advice, Bottleneck, Evidence, Finding

__all__ = ["FORMAT_ADVICE", "list_remedies"]

_LEAST_TAKING = 0.10
"""Of a batch's time, from which on taking it from the loader is worth changing: our own convention, as for findings."""
_LONGER_EPOCHS = 20
"""Times as long an epoch: our own convention, a restart then costs a twentieth of what it costs now."""
_BYTES_LEFT = 0.5
"""Of the bytes, at best, after fusing operations or narrowing types: our own convention, bfloat16 for float32."""
FORMAT_ADVICE = {
    "text": "save_as_arrays",
    "image_draft": "decode_smaller",
    "image_copy": "store_smaller",
    "parquet": "read_row_groups",
}
"""The advice for each kind of FormatCost."""


def list_remedies(evidence: Evidence, findings: Sequence[Finding], *, best_samples_per_s: float) -> Iterator[Advice]:
    """Remedies for each finding that settings alone don't remove; for computing only where it comes first."""
    costs = evidence.measurement.loader_costs
    is_data_bound = best_samples_per_s < POLICY.trials.near_ceiling * expectation.device_ceiling(evidence)
    for finding in findings:
        code = finding.bottleneck
        if code in _FOR_LOADER:
            if is_data_bound and costs is not None:
                yield from _FOR_LOADER[code](evidence, costs)
        elif code in _FOR_DEVICE and (code != "compute" or finding is findings[0]):
            yield from _FOR_DEVICE[code](evidence, finding)
    yield from remove_padding(evidence)


def _cpu_work(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Cheaper items or more cores, unless the cores suffice: then something else keeps the loader from them."""
    needed_s, item_s, cores = _needed_item_s(evidence), expectation.loader_cpu_s(evidence), evidence.environment.cores
    cores_needed = ceil(expectation.device_ceiling(evidence) * item_s + expectation.device_cores(evidence))
    if cores_needed > cores or needed_s < item_s:
        figures = {"needed_s": needed_s, "item_cpu_s": item_s, "cores_needed": cores_needed, "cores": cores}
        yield _up_to_the_device(evidence, "make_items_cheaper", **figures)
    yield from _formats(evidence, costs)
    yield from _shard_stream(evidence, costs)
    yield from _cache_items(evidence, costs)


def _waiting(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Shorter waits, or more of them side by side, unless the workers suffice."""
    wanted = expectation.device_ceiling(evidence)
    tried = [expectation.apply_changes(evidence, point) for point in expectation.advisable_points(evidence, "loader")]
    workers = max(1, *(config.num_workers for config in (evidence.config, *tried)))
    workers_needed = ceil(wanted * costs.item_s)
    if workers / wanted < costs.item_s:
        more = workers_needed if workers_needed > workers and evidence.facts.is_sharded else None
        figures = {"needed_s": workers / wanted, "item_s": costs.item_s, "workers": workers, "workers_needed": more}
        yield _up_to_the_device(evidence, "shorten_waits", **figures)
        yield from _shard_stream(evidence, costs)
    yield from _formats(evidence, costs)
    yield from _cache_items(evidence, costs)


def _shard_stream(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """A stream that every worker reads whole can't be loaded in parallel until it is divided among them.

    Source: pytorch.org, torch.utils.data.IterableDataset.
    """
    workers = ceil(expectation.device_ceiling(evidence) * expectation.with_collating(evidence, costs, costs.item_s))
    share = min(1.0, _needed_item_s(evidence) / max(expectation.loader_cpu_s(evidence), 1e-9))
    if not evidence.facts.is_sharded and workers >= 2 and share > 0:
        yield _expecting(evidence, "shard_stream", expectation.device_ceiling(evidence) * share, workers_needed=workers)


def _slow_tail(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """The loader without its slowest items."""
    sample_s = expectation.with_collating(evidence, costs, costs.item_s * (1.0 - costs.slow_tail_fraction))
    loader = max(max(1, evidence.config.num_workers) / max(sample_s, 1e-9), expectation.loader_ceiling(evidence))
    expected = expectation.join_rates(evidence, loader, expectation.device_ceiling(evidence))
    figures = figures_of(costs, "item_slowest_s", "item_median_s", "slow_tail_fraction")
    yield _expecting(evidence, "fix_slowest_items", expected, loader_samples_per_s=loader, **figures)
    yield from _cache_items(evidence, costs)


def _worker_threads(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """One thread for each worker: the rate that an item's CPU time then allows on the cores.

    Where one was measured, it stands among the settings. No figure where that is no more than today: threads that spin
    while they wait for each other add to the CPU time.
    Source: pytorch.org, torch.utils.data: in workers torch limits only its own threads.
    """
    if not expectation.workers_run_too_many_threads(evidence):
        return
    cores, loaders = evidence.environment.cores, expectation.loader_processes(evidence.config)
    today, device = expectation.loader_ceiling(evidence), expectation.device_ceiling(evidence)
    allowed = min(loaders, cores) / expectation.loader_cpu_s(evidence)
    expected = min(expectation.cores_ceiling(evidence), expectation.join_rates(evidence, max(allowed, today), device))
    known, unknown = (expected, None) if allowed * POLICY.trials.near_ceiling > today else (None, today)
    figures: dict[str, JsonValue] = {"item_cpu_s": costs.item_cpu_s, "allowed_samples_per_s": allowed, "cores": cores}
    setting = {"worker_threads": 1} if evidence.config.num_workers else {}
    figures |= {"loader_samples_per_s": unknown, "has_workers": bool(setting)}
    if not any("worker_threads" in point.changes for point in expectation.advisable_points(evidence, "loader")):
        yield advise("one_thread_per_worker", evidence.measurement.samples_per_s, known, setting, **figures)
    yield from _cpu_work(evidence, costs)


def _formats(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Formats that are read faster here: what an item saves is saved of a sample's time in the loader."""
    for cost in costs.formats if expectation.loader_ceiling(evidence) < inf else ():
        loader = loader_without(evidence, costs, cost.saved_fraction)
        expected = expectation.join_rates(evidence, loader, expectation.device_ceiling(evidence))
        figures = figures_of(cost, "calls_per_item", "item_fraction", "now_s", "better_s") | cost.figures
        yield _expecting(evidence, FORMAT_ADVICE[cost.kind], expected, loader_samples_per_s=loader, **figures)


def _cache_items(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Items kept in RAM: only collating them is left."""
    length, free = evidence.facts.dataset_length, evidence.free_ram_bytes
    if length is None or free is None or evidence.facts.is_iterable or length * costs.item_bytes > free:
        return
    collating = evidence.config.micro_batch_size / costs.collate_s if costs.collate_s > 0 else float("inf")
    device, is_overlapped = expectation.device_ceiling(evidence), evidence.environment.device_kind != "cpu"
    expected = joint_rate(collating, device, is_overlapped=is_overlapped)
    figures = figures_of(costs, "item_bytes", "collate_s")
    yield _expecting(evidence, "cache_items", expected, items=length, free_bytes=free, **figures)


def _small_operations(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    roofline, has_graphs = evidence.curves.roofline, evidence.environment.device_kind in {"cuda", "rocm"}
    operators = None if roofline is None else roofline.operators
    yield _saving(evidence, "fuse_operations", finding, operators=operators, has_cuda_graphs=has_graphs)
    yield from _hand_over(evidence, finding)


def _hand_over(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """Batches of fewer tensors, where taking one that lies ready costs the training process much of a step.

    Each tensor in shared memory comes with a file descriptor, received over a socket of its own. Sources:
    torch/multiprocessing/reductions.py, rebuild_storage_fd; pytorch.org, torch.multiprocessing, "Sharing strategies".
    """
    take_s, batch_s = finding.figures.get("take_s"), finding.figures.get("batch_s")
    if not isinstance(take_s, float) or not isinstance(batch_s, float) or take_s < _LEAST_TAKING * batch_s:
        return
    costs = evidence.measurement.loader_costs
    figures: dict[str, JsonValue] = {"take_s": take_s, "batch_s": batch_s, "is_pinned": evidence.config.pin_memory}
    figures["batch_tensors"] = None if costs is None else costs.batch_tensors
    part = min(1.0, take_s / batch_s / finding.share) if finding.share > 0 else 1.0
    yield _saving(evidence, "hand_over_less", finding, part, **figures)


def _own_code(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    yield _saving(evidence, "shorten_own_code", finding, outside_s=finding.figures["outside_s"])


def _host_waits(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """At best none of the gaps after the host's waits is left; where it is slow to launch, it then shows in others.

    Source: pytorch.org, "Performance Tuning Guide", "Avoid unnecessary CPU-GPU synchronization".
    """
    yield _saving(evidence, "avoid_synchronisation", finding, is_pinned=evidence.config.pin_memory)


def _bandwidth(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    is_dtype_known = any("amp_dtype" in point.changes for point in expectation.advisable_points(evidence, "device"))
    yield _saving(evidence, "move_fewer_bytes", finding, 1 - _BYTES_LEFT, is_dtype_known=is_dtype_known)


def _copies(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """Advise copies of fewer bytes; on the CPU, which needs none, moving a batch converts its memory format."""
    costs = evidence.measurement.loader_costs
    float32, item_bytes = (None, None) if costs is None else (costs.float32_fraction, costs.item_bytes)
    if evidence.environment.device_kind == "cpu":
        yield _saving(evidence, "convert_batches_in_collate", finding)
    elif float32 is not None and float32 < 0.5:
        yield _saving(evidence, "copy_narrower_types", finding, 1 - _BYTES_LEFT, item_bytes=item_bytes)
    else:
        part = 0.75 * (1.0 if float32 is None else float32)  # one byte in place of four
        yield _saving(evidence, "copy_uint8", finding, part, item_bytes=item_bytes, float32_fraction=float32)


def _computing(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """A cheaper step, beside the most that the device could give: the rate of a large matrix product.

    Without an expected gain, since steps with small and element-wise operations don't reach that rate.
    Source: Williams et al. 2009.
    """
    if evidence.measurement.breakdown is None:  # it may not compute at all
        return
    roofline, present, most = evidence.curves.roofline, evidence.measurement.samples_per_s, None
    if roofline is not None and roofline.flops > 0:
        batch = evidence.config.micro_batch_size * evidence.config.world_size  # the rate is that of all devices
        product_s = roofline.flops / roofline.peak_flops_per_s / batch
        most = max(0.0, 1.0 / max(1.0 - finding.share + present * product_s, 1e-3) - 1.0)
    yield _expecting(evidence, "make_step_cheaper", None, share=finding.share, most_gain=most, **finding.figures)


def _short_epochs(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    length = evidence.measurement.window.epoch_samples
    if evidence.config.persistent_workers and length is not None:
        expected = evidence.measurement.samples_per_s / (1.0 - finding.share * (1 - 1 / _LONGER_EPOCHS))
        longer = {"epoch_samples": length, "wanted_samples": length * _LONGER_EPOCHS}
        yield _expecting(evidence, "lengthen_epochs", expected, share=finding.share, **longer)


_FOR_LOADER: dict[Bottleneck, Callable[[Evidence, LoaderCosts], Iterator[Advice]]] = {
    "data_cpu": _cpu_work,
    "data_io": _waiting,
    "data_tail": _slow_tail,
    "threads": _worker_threads,
}
_FOR_DEVICE: dict[Bottleneck, Callable[[Evidence, Finding], Iterator[Advice]]] = {
    "launch": _small_operations,
    "script": _own_code,
    "synchronise": _host_waits,
    "memory": _bandwidth,
    "copy": _copies,
    "restart": _short_epochs,
    "compute": _computing,
}


def _needed_item_s(evidence: Evidence) -> float:
    """CPU seconds that a sample may take in the loader for the device to be the limit; 0 where no core is left."""
    return max(
        0.0, (evidence.environment.cores - expectation.device_cores(evidence)) / expectation.device_ceiling(evidence)
    )


def _expecting(evidence: Evidence, kind: str, expected: float | None, **figures: JsonValue) -> Advice:
    return advise(kind, evidence.measurement.samples_per_s, expected, {}, **figures)


def _up_to_the_device(evidence: Evidence, kind: str, **figures: JsonValue) -> Advice:
    """Advice that should make the device the limit."""
    is_estimated = evidence.measurement.device_ceiling is None
    return _expecting(evidence, kind, expectation.device_ceiling(evidence), is_device_estimated=is_estimated, **figures)


def _saving(evidence: Evidence, kind: str, finding: Finding, part: float = 1.0, **figures: JsonValue) -> Advice:
    """Advice that saves a part of what a finding takes; no figure where the loader has to become faster first."""
    expected, loader = expectation.rate_without(evidence, part * finding.share), expectation.loader_ceiling(evidence)
    figures |= {"share": finding.share}
    if expected < loader:
        return _expecting(evidence, kind, expected, **figures)
    is_loader_first = evidence.measurement.samples_per_s >= POLICY.trials.near_ceiling * loader
    figures |= {"loader_samples_per_s": loader, "is_loader_first": is_loader_first}
    return _expecting(evidence, kind, None if is_loader_first else expected, **figures)
