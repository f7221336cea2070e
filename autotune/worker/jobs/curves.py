"""Ceilings around a configuration: the loader alone and the device alone in settings that differ from it.

Takes a CurvesJob; hands on Curves. A setting that fails (out of memory, an exception of the user's code) leaves a
reason in its point and spares the others; near the deadline the rest is left out. Around each point the caller is given
the curves so far to keep, so that not even the death of the process loses them. After the failure of a kernel nothing
works in a process any more: the curves end there, for another process to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from autotune.analysis.expectation import DEVICE_SETTINGS, LOADER_SETTINGS
from autotune.protocol.jobs import CurvesJob
from autotune.records.ceilings import Ceiling
from autotune.records.diagnosis import CurvePoint, Curves, Roofline
from autotune.records.run_summary import changed_settings
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from autotune.worker.after_window.roofline import trace_roofline
from autotune.worker.failure.causes import cause_of
from autotune.worker.jobs.ahead import refuse_too_much_ahead
from autotune.worker.jobs.points import NO_TIME, DeviceLostError, Seen, Traced, guarded
from autotune.worker.measure.feed import Feed
from autotune.worker.measure.side_alone import collect, device_alone, loader_alone, resident
from autotune.worker.measure.step import Step, Trainer, count_samples, infer_step, make_trainer
from autotune.worker.setup.build import build_dataset, build_loader, build_model, build_optimizer
from autotune.worker.setup.device import Device
from autotune.worker.setup.weights import kept_weights, put_back

__all__ = ["combined_config", "resized", "trace_curves"]

_LOADER_SHARE = 0.5  # of the time, at the most; the device gets the rest
_BATCHES_HELD = 8
_HELD_BYTES = 256 * 2**20
_COLLECTING_S = 1.0
_WORTH = 1.03  # a setting that makes the device so much faster goes into the combined point
_RISE_MARGIN = 1.25


@dataclass(slots=True)
class _Bench:
    """What the points of both curves share."""

    workload: Workload
    job: CurvesJob
    device: Device
    scratch: Path
    dataset: Any
    ends_at: float
    batches: Sequence[Any] = ()
    """Batches of the job's own configuration, on the host."""
    peaks: dict[int, int] = field(default_factory=dict)
    """The highest peak memory in bytes that was seen with each micro batch."""


@dataclass(slots=True)
class _Training:
    """The model that every device point trains on, one after the other."""

    bench: _Bench
    model: nn.Module
    step: Step
    is_converted: bool
    """The model's layout is channels last."""
    initial: Mapping[str, Tensor]
    """Its weights and buffers before the first point, on the CPU."""


def trace_curves(
    workload: Workload, job: CurvesJob, device: Device, scratch: Path, ends_at: float, *, keep: Callable[[Curves], None]
) -> Curves:
    """Measure the job's own configuration and each variation alone, on the side that it changes.

    Where several device settings help, one more point has them all. `keep` is called with the curves so far around each
    point: they count should the process not outlive the next.

    Raises:
        WorkloadFault: something about the workload can't be used.
    """
    bench = _Bench(workload, job, device, scratch, build_dataset(workload), ends_at)
    traced = Traced(keep, job.known or Curves())
    try:
        _trace_loader(bench, traced, ends_at)
        return _trace_device(bench, traced)
    except DeviceLostError:
        return traced.cut()


def _trace_loader(bench: _Bench, traced: Traced, ends_at: float) -> None:
    """The loader's points, in a part of the time."""
    now = perf_counter()
    bench.ends_at = now + _LOADER_SHARE * (ends_at - now)
    bench.batches = _load_own(bench, traced)
    for config in _varying(bench.job, LOADER_SETTINGS):
        changes = _changes(config, bench.job, LOADER_SETTINGS | {"micro_batch_size"})
        traced.add("loader", changes, partial(_loader_point, bench, config))
    bench.ends_at = ends_at


def _trace_device(bench: _Bench, traced: Traced) -> Curves:
    """The device's points and the roofline; all curves."""
    job = bench.job
    model = build_model(bench.workload, job.config, bench.device)
    step = infer_step(bench.workload, bench.batches[0])
    training = _Training(bench, model, step, job.config.channels_last, kept_weights(model))
    for point in traced.known.device:
        batch = int(str(point.changes.get("micro_batch_size", job.config.micro_batch_size)))
        bench.peaks[batch] = max(point.peak_memory_bytes or 0, bench.peaks.get(batch, 0))
    for config in (job.config, *_varying_device(job)):
        traced.add("device", _changes(config, job, DEVICE_SETTINGS), partial(_device_point, training, config))
    combined = combined_config(job.config, traced.points["device"])
    if combined is not None:
        traced.add("device", _changes(combined, job, DEVICE_SETTINGS), partial(_device_point, training, combined))
    roofline, remarks = _roofline(training) if job.roofline else (None, ())
    return traced.curves(roofline, *remarks)


def resized(batch: Any, size: int) -> Any:
    """A batch with so many samples, its own repeated as often as needed.

    Raises:
        ValueError: a tensor in it does not have the samples in its first dimension.
    """
    count = count_samples(batch, 0)
    if isinstance(batch, Tensor):
        return _repeated(batch, count, size)
    if isinstance(batch, Mapping):
        return {key: _resized_part(value, count, size) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_resized_part(value, count, size) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise ValueError(f"a batch of type {type(batch).__name__} can't be made larger or smaller here")


def combined_config(own: TrainingConfig, points: Sequence[CurvePoint]) -> TrainingConfig | None:
    """A configuration with the best value of each setting that makes the device faster; None for fewer than two."""
    level = next((point.ceiling.samples_per_s for point in points if not point.changes and point.ceiling), None)
    best: dict[str, tuple[float, object]] = {}
    for point in points:
        if level is None or point.ceiling is None or len(point.changes) != 1:
            continue
        ((name, value),) = point.changes.items()
        rate = point.ceiling.samples_per_s
        if rate >= _WORTH * level and (name not in best or rate > best[name][0]):
            best[name] = rate, value
    if len(best) < 2:
        return None
    return TrainingConfig.model_validate(own.model_dump() | {name: value for name, (_, value) in best.items()})


def _resized_part(value: Any, count: int, size: int) -> Any:
    if isinstance(value, Tensor):
        return value if value.ndim == 0 else _repeated(value, count, size)
    if isinstance(value, Mapping):
        return {key: _resized_part(one, count, size) for key, one in value.items()}
    if isinstance(value, tuple | list) and any(isinstance(one, Tensor | Mapping | tuple | list) for one in value):
        return type(value)(_resized_part(one, count, size) for one in value)
    return value


def _repeated(tensor: Tensor, count: int, size: int) -> Tensor:
    if tensor.ndim == 0 or tensor.shape[0] != count or count == 0:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not have the {count} samples in front")
    return tensor[torch.arange(size) % count]


def _varying(job: CurvesJob, settings: frozenset[str]) -> list[TrainingConfig]:
    return [config for config in job.variations if settings & set(changed_settings(config, job.config))]


def _varying_device(job: CurvesJob) -> list[TrainingConfig]:
    """Those that leave the loader as it is, without such as only spell out the threads that torch takes anyway."""
    own, threads = job.config, torch.get_num_threads()
    spelt = own.model_copy(update={"intra_op_threads": threads}) if own.intra_op_threads is None else None
    alone = [config for config in _varying(job, DEVICE_SETTINGS) if not LOADER_SETTINGS & _changed_names(config, job)]
    return [config for config in alone if config != spelt]


def _changed_names(config: TrainingConfig, job: CurvesJob) -> set[str]:
    return set(changed_settings(config, job.config))


def _changes(config: TrainingConfig, job: CurvesJob, settings: frozenset[str]) -> dict[str, object]:
    changed = changed_settings(config, job.config)
    return {name: after for name, (_, after) in changed.items() if name in settings}


def _load_own(bench: _Bench, traced: Traced) -> list[Any]:
    """Some batches of the job's own configuration, and its loader's point."""
    config = bench.job.config
    feed = Feed(build_loader(bench.workload, bench.dataset, config, bench.scratch))
    try:
        first = feed.start().batch
        more = collect(feed, count=_BATCHES_HELD - 1, limit_bytes=_HELD_BYTES, seconds=_COLLECTING_S)
        traced.add("loader", {}, lambda: guarded({}, lambda: _loader_alone(bench, feed, config), bench.ends_at))
    finally:
        feed.stop()
    return [first, *more]


def _loader_point(bench: _Bench, config: TrainingConfig) -> CurvePoint:
    def measure() -> Seen:
        refuse_too_much_ahead(bench.batches, config, bench.job, bench.device)
        feed = Feed(build_loader(bench.workload, bench.dataset, config, bench.scratch))
        try:
            feed.start()
            return _loader_alone(bench, feed, config)
        finally:
            feed.stop()

    return guarded(_changes(config, bench.job, LOADER_SETTINGS | {"micro_batch_size"}), measure, bench.ends_at)


def _loader_alone(bench: _Bench, feed: Feed, config: TrainingConfig) -> Seen:
    seconds, ends_at = bench.job.stretch_s, bench.ends_at
    return _with_cpu_s(lambda: loader_alone(feed, config, seconds=seconds, ends_at=ends_at))


def _device_point(training: _Training, config: TrainingConfig) -> CurvePoint:
    bench = training.bench

    def measure() -> Seen:
        _refuse_too_large(bench, config)
        if config.compile:
            torch.compiler.reset()  # or a second batch size would be compiled for any, which no trial does
        bench.device.reset_peak()
        with _as_configured(config, bench.device):
            trainer = _trainer(training, config)
            held = resident(trainer, _batches_of(bench, config))
            seconds, ends_at = bench.job.stretch_s, bench.ends_at
            return _with_cpu_s(lambda: device_alone(trainer, held, seconds=seconds, ends_at=ends_at))

    point = guarded(_changes(config, bench.job, DEVICE_SETTINGS), measure, bench.ends_at)
    if point.ceiling is not None:
        point = point.model_copy(update={"peak_memory_bytes": _noted_peak(training, config)})
    training.model.zero_grad(set_to_none=True)
    if point.ceiling is None:
        put_back(training.model, training.initial)  # what has diverged: products of zeros would cost less power
    bench.device.give_back()
    return point


def _noted_peak(training: _Training, config: TrainingConfig) -> int:
    """A point's peak memory, without the weights kept aside where these lie in the memory that is judged."""
    bench, batch = training.bench, config.micro_batch_size
    kept = 0 if bench.device.has_own_memory else sum(tensor.nbytes for tensor in training.initial.values())
    peak = max(0, bench.device.peak_memory().peak_bytes - kept)
    bench.peaks[batch] = max(peak, bench.peaks.get(batch, 0))
    return peak


def _trainer(training: _Training, config: TrainingConfig) -> Trainer:
    """A trainer of the shared model, in the configuration's layout, with an optimizer of its own."""
    bench = training.bench
    if config.channels_last != training.is_converted:
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        training.model.to(memory_format=layout)  # type: ignore[call-overload] # torch's stubs lack the keyword alone
        training.is_converted = config.channels_last
    optimizer = build_optimizer(bench.workload, training.model, config.lr)
    return make_trainer(training.model, optimizer, training.step, config, bench.device)


def _batches_of(bench: _Bench, config: TrainingConfig) -> list[Any]:
    if config.micro_batch_size == bench.job.config.micro_batch_size:
        return list(bench.batches)
    return [resized(batch, config.micro_batch_size) for batch in bench.batches]


def _refuse_too_large(bench: _Bench, config: TrainingConfig) -> None:
    """Where memory is RAM, nothing refuses a batch that is too large until the whole job is ended for it.

    Raises:
        ValueError: the memory seen so far, grown with the batch, would pass the limit.
    """
    batch, limit = config.micro_batch_size, bench.job.process.limit_bytes
    largest = max(bench.peaks, default=bench.job.config.micro_batch_size)
    if bench.device.has_own_memory or limit is None or batch <= largest:
        return
    expected = _expected_peak(bench, batch)
    if expected > limit:
        raise ValueError(f"it might take {expected / 2**20:,.0f} MiB, over the limit of {limit / 2**20:,.0f} MiB")


def _expected_peak(bench: _Bench, batch: int) -> float:
    """Memory of a batch larger than all so far: by the steepest rise so far, with a margin; in proportion before that.

    The margin is our own convention.
    """
    seen = sorted(bench.peaks.items())
    if len(seen) < 2:
        return bench.device.peak_memory().peak_bytes * batch / bench.job.config.micro_batch_size
    rise = max((after - before) / (larger - smaller) for (smaller, before), (larger, after) in pairwise(seen))
    largest, peak = seen[-1]
    return peak + _RISE_MARGIN * max(0.0, rise) * (batch - largest)


@contextmanager
def _as_configured(config: TrainingConfig, device: Device) -> Iterator[None]:
    """Threads and TF32 of this process as the configuration has them, and as before afterwards."""
    before = torch.get_num_threads()
    if config.intra_op_threads is not None:
        torch.set_num_threads(config.intra_op_threads)
    try:
        with config.autocast(device.torch_device) if config.amp_dtype == "tf32" else nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


def _roofline(training: _Training) -> tuple[Roofline | None, tuple[str, ...]]:
    bench = training.bench
    config = bench.job.config
    if config.compile:
        return None, ("Operators were not counted: the model is compiled.",)
    if perf_counter() > bench.ends_at:
        return None, (f"Operators were not counted: {NO_TIME}.",)
    try:
        with _as_configured(config, bench.device):
            trainer = _trainer(training, config)
            return trace_roofline(trainer, resident(trainer, bench.batches)[0], bench.device), ()
    except Exception as error:  # noqa: BLE001 - user code runs in it; the curves are worth keeping
        return None, (f"Operators were not counted: {cause_of(error)}.",)


def _with_cpu_s(measure: Callable[[], Ceiling]) -> Seen:
    """A ceiling, and the CPU seconds that a sample took: the cores in use over the rate, the warm-up included."""
    begun, cpu_s = perf_counter(), _spent_cpu_s()
    ceiling = measure()
    cores = (_spent_cpu_s() - cpu_s) / (perf_counter() - begun)
    return ceiling, max(0.0, cores) / ceiling.samples_per_s


def _spent_cpu_s() -> float:
    """CPU seconds so far of this process, of its living children, and of those that it has waited for."""
    own = psutil.Process()
    spent = sum(own.cpu_times()[:4])  # user, system, and both of the children waited for
    for child in own.children():
        with suppress(psutil.Error):
            spent += sum(child.cpu_times()[:2])
    return float(spent)
