"""What helps where no measured setting does: a table from bottleneck to remedies, each with its expected rate. Pure.

Comes in: an Evidence, its findings and the best rate that settings alone should reach. Goes out: advice without
settings but for one that was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, inf
from typing import cast

from autotune.analysis.forecast import expectation
from autotune.analysis.forecast.rate_law import joint_rate
from autotune.diagnosis.data_remedies import loader_without, remove_padding
from autotune.diagnosis.gains import advise
from autotune.messages import advice as messages
from autotune.messages.advice import AdviceText
from autotune.policy import POLICY
from autotune.records.breakdown import FormatCost, LoaderCosts
from autotune.records.diagnosis import Advice, Bottleneck, Evidence, Finding

__all__ = ["list_remedies"]

_LEAST_TAKING = 0.10
"""Of a batch's time, from which on taking it from the loader is worth changing: our own convention, as for findings."""
_LONGER_EPOCHS = 20
"""Times as long an epoch: our own convention, a restart then costs a twentieth of what it costs now."""
_BYTES_LEFT = 0.5
"""Of the bytes, at best, after fusing operations or narrowing types: our own convention, bfloat16 for float32."""
_UINT8_SAVES = 0.75
"""Of the bytes of float32: uint8 has one byte instead of four."""


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
        words = messages.make_items_cheaper(
            needed_s=needed_s,
            item_cpu_s=item_s,
            cores_needed=cores_needed,
            cores=cores,
            is_device_estimated=evidence.measurement.device_ceiling is None,
        )
        yield _expecting(evidence, words, expectation.device_ceiling(evidence))
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
        words = messages.shorten_waits(
            needed_s=workers / wanted,
            item_s=costs.item_s,
            workers=workers,
            workers_needed=more,
            is_device_estimated=evidence.measurement.device_ceiling is None,
        )
        yield _expecting(evidence, words, wanted)
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
        words = messages.shard_stream(workers_needed=workers)
        yield _expecting(evidence, words, expectation.device_ceiling(evidence) * share)


def _slow_tail(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """The loader without its slowest items."""
    sample_s = expectation.with_collating(evidence, costs, costs.item_s * (1.0 - costs.slow_tail_fraction))
    loader = max(max(1, evidence.config.num_workers) / max(sample_s, 1e-9), expectation.loader_ceiling(evidence))
    expected = expectation.join_rates(evidence, loader, expectation.device_ceiling(evidence))
    words = messages.fix_slowest_items(
        item_slowest_s=costs.item_slowest_s,
        item_median_s=costs.item_median_s,
        slow_tail_fraction=costs.slow_tail_fraction,
        loader_samples_per_s=loader,
    )
    yield _expecting(evidence, words, expected)
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
    is_gain_known = allowed * POLICY.trials.near_ceiling > today
    words = messages.one_thread_per_worker(
        settings={"worker_threads": 1} if evidence.config.num_workers else {},
        item_cpu_s=costs.item_cpu_s,
        allowed_samples_per_s=allowed,
        cores=cores,
        loader_samples_per_s=None if is_gain_known else today,
    )
    if not any("worker_threads" in point.changes for point in expectation.advisable_points(evidence, "loader")):
        yield _expecting(evidence, words, expected if is_gain_known else None)
    yield from _cpu_work(evidence, costs)


def _formats(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Formats that are read faster here: what an item saves is saved of a sample's time in the loader."""
    for cost in costs.formats if expectation.loader_ceiling(evidence) < inf else ():
        loader = loader_without(evidence, costs, cost.saved_fraction)
        expected = expectation.join_rates(evidence, loader, expectation.device_ceiling(evidence))
        yield _expecting(evidence, _format_words(cost, loader), expected)


def _format_words(cost: FormatCost, loader_samples_per_s: float) -> AdviceText:
    """Return the advice for a kind of format; the sizes of its data are in the cost's figures."""
    return _FORMATS[cost.kind](
        now_s=cost.now_s,
        better_s=cost.better_s,
        calls_per_item=cost.calls_per_item,
        item_fraction=cost.item_fraction,
        loader_samples_per_s=loader_samples_per_s,
        **cost.figures,
    )


def _cache_items(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Items kept in RAM: only collating them is left."""
    length, free = evidence.facts.dataset_length, evidence.free_ram_bytes
    if length is None or free is None or evidence.facts.is_iterable or length * costs.item_bytes > free:
        return
    collating = evidence.config.micro_batch_size / costs.collate_s if costs.collate_s > 0 else float("inf")
    device, is_overlapped = expectation.device_ceiling(evidence), evidence.environment.device_kind != "cpu"
    expected = joint_rate(collating, device, is_overlapped=is_overlapped)
    words = messages.cache_items(items=length, item_bytes=costs.item_bytes, free_bytes=free, collate_s=costs.collate_s)
    yield _expecting(evidence, words, expected)


def _small_operations(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    roofline, has_graphs = evidence.curves.roofline, evidence.environment.device_kind in {"cuda", "rocm"}
    operators = None if roofline is None else roofline.operators
    words = messages.fuse_operations(share=finding.share, operators=operators, has_cuda_graphs=has_graphs)
    yield _saving(evidence, words, finding.share)
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
    words = messages.hand_over_less(
        share=take_s / batch_s,
        take_s=take_s,
        batch_s=batch_s,
        batch_tensors=None if costs is None else costs.batch_tensors,
        is_pinned=evidence.config.pin_memory,
    )
    yield _saving(evidence, words, min(finding.share, take_s / batch_s))


def _own_code(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    outside_s = cast("float", finding.figures["outside_s"])
    yield _saving(evidence, messages.shorten_own_code(share=finding.share, outside_s=outside_s), finding.share)


def _host_waits(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """At best none of the gaps after the host's waits is left; where it is slow to launch, it then shows in others.

    Source: pytorch.org, "Performance Tuning Guide", "Avoid unnecessary CPU-GPU synchronization".
    """
    words = messages.avoid_synchronisation(share=finding.share, is_pinned=evidence.config.pin_memory)
    yield _saving(evidence, words, finding.share)


def _bandwidth(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    is_dtype_known = any("amp_dtype" in point.changes for point in expectation.advisable_points(evidence, "device"))
    words = messages.move_fewer_bytes(share=finding.share, is_dtype_known=is_dtype_known)
    yield _saving(evidence, words, (1 - _BYTES_LEFT) * finding.share)


def _copies(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """Advise copies of fewer bytes; on the CPU, which needs none, moving a batch converts its memory format."""
    costs, share = evidence.measurement.loader_costs, finding.share
    float32, item_bytes = (None, None) if costs is None else (costs.float32_fraction, costs.item_bytes)
    if evidence.environment.device_kind == "cpu":
        yield _saving(evidence, messages.convert_batches_in_collate(share=share), share)
    elif float32 is not None and float32 < 0.5:
        words = messages.copy_narrower_types(share=share, item_bytes=item_bytes)
        yield _saving(evidence, words, (1 - _BYTES_LEFT) * share)
    else:
        words = messages.copy_uint8(share=share, item_bytes=item_bytes, float32_fraction=float32)
        yield _saving(evidence, words, _UINT8_SAVES * (1.0 if float32 is None else float32) * share)


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
    peak = cast("float | None", finding.figures.get("peak_fraction"))
    words = messages.make_step_cheaper(share=finding.share, peak_fraction=peak, most_gain=most)
    yield _expecting(evidence, words, None)


def _short_epochs(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    length = evidence.measurement.window.epoch_samples
    if evidence.config.persistent_workers and length is not None:
        expected = evidence.measurement.samples_per_s / (1.0 - finding.share * (1 - 1 / _LONGER_EPOCHS))
        words = messages.lengthen_epochs(
            share=finding.share, epoch_samples=length, wanted_samples=length * _LONGER_EPOCHS
        )
        yield _expecting(evidence, words, expected)


_FORMATS: dict[str, Callable[..., AdviceText]] = {
    "text": messages.save_as_arrays,
    "image_draft": messages.decode_smaller,
    "image_copy": messages.store_smaller,
    "parquet": messages.read_row_groups,
}
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


def _expecting(evidence: Evidence, words: AdviceText, expected: float | None) -> Advice:
    return advise(words, evidence.measurement.samples_per_s, expected)


def _saving(evidence: Evidence, words: AdviceText, saved: float) -> Advice:
    """Return advice that saves this share of the time; no figure where the loader has to become faster first."""
    expected, loader = expectation.rate_without(evidence, saved), expectation.loader_ceiling(evidence)
    if expected < loader:
        return _expecting(evidence, words, expected)
    is_loader_first = evidence.measurement.samples_per_s >= POLICY.trials.near_ceiling * loader
    limited = messages.limited_by_loader(words, loader_samples_per_s=loader, is_loader_first=is_loader_first)
    return _expecting(evidence, limited, None if is_loader_first else expected)
