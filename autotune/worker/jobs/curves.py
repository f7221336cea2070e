"""Ceilings around a configuration: the loader alone and the device alone in settings that differ from it.

Takes a curves job; hands on Curves. A setting that fails (out of memory, an exception of the user's code) leaves a
reason in its point and spares the others; near the deadline the rest is left out. Around each point the caller is given
the curves so far to keep, so that not even the death of the process loses them. After a kernel has failed nothing works
in a process any more: the curves end there, and another process can go on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from autotune.analysis.expectation import DEVICE_SETTINGS, LOADER_SETTINGS
from autotune.note import Note, note
from autotune.protocol.jobs import CurvesJob
from autotune.records.ceilings import Ceiling
from autotune.records.diagnosis import CurvePoint, Curves, Roofline
from autotune.records.run_summary import changed_settings
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from autotune.worker.after_window.roofline import trace_roofline
from autotune.worker.failure.causes import cause_of
from autotune.worker.jobs.memory_bounds import refuse_too_full_a_queue, refuse_too_large_a_batch
from autotune.worker.jobs.points import CurvesSoFar, DeviceLostError, Figures, measure_point
from autotune.worker.measure.batch import Held, resized
from autotune.worker.measure.feed import Delivery, Feed
from autotune.worker.measure.side_alone import collect, device_alone, loader_alone, resident
from autotune.worker.measure.step import Step, Trainer, infer_step, make_trainer, torch_threads
from autotune.worker.setup.build import build_dataset, build_model, build_optimizer, kept_weights, put_back
from autotune.worker.setup.device import Device
from autotune.worker.setup.loader import build_loader

__all__ = ["combined_config", "trace_curves"]

_LOADER_SHARE = 0.5  # of the time, at the most; the device gets the rest: our own convention
_COLLECTING_S = 1.0  # a loader that needs longer for a few batches delivers too few to train on in turns anyway
_WORTH = 1.03
"""A setting that makes the device so much faster goes into the combined point: our own convention, above what two runs
of the same settings differ by (records.measurement.RUN_SPREAD)."""
_LOADER_CHANGES = LOADER_SETTINGS | {"micro_batch_size"}


@dataclass(slots=True)
class _Scene:
    """What the points of both curves share."""

    workload: Workload
    job: CurvesJob
    device: Device
    scratch: Path
    dataset: Any
    ends_at: float
    host: Sequence[Delivery] = ()
    """Batches of the job's own configuration, on the host."""
    peaks: dict[int, int] = field(default_factory=dict)
    """The highest peak memory in bytes that was measured with each micro batch."""

    def feed(self, config: TrainingConfig) -> Feed:
        """A feed of a configuration's loader, not started."""
        return Feed(build_loader(self.workload, self.dataset, config, self.scratch))

    def changes(self, config: TrainingConfig, settings: frozenset[str]) -> dict[str, object]:
        """Those of some settings that differ from the job's own, with their values."""
        changed = changed_settings(config, self.job.config)
        return {name: after for name, (_, after) in changed.items() if name in settings}


@dataclass(slots=True)
class _Training:
    """The model that every device point trains on, one after the other."""

    scene: _Scene
    model: nn.Module
    step: Step
    is_channels_last: bool
    """The model's present layout."""
    initial: Mapping[str, Tensor]
    """Its weights and buffers before the first point, on the CPU."""


def trace_curves(
    workload: Workload, job: CurvesJob, device: Device, scratch: Path, ends_at: float, *, keep: Callable[[Curves], None]
) -> Curves:
    """Measure the job's own configuration and each variation alone, on the side that it changes.

    Where several device settings help, a further point has them all. `keep` is called with the curves so far around
    each point: they count should the process not outlive the next.

    Raises:
        WorkloadFault: something about the workload can't be used.
    """
    scene = _Scene(workload, job, device, scratch, build_dataset(workload), ends_at)
    curves = CurvesSoFar(keep, job.known or Curves())
    try:
        _trace_loader(scene, curves)
        scene.ends_at = ends_at
        return _trace_device(scene, curves)
    except DeviceLostError:
        return curves.cut()


def _trace_loader(scene: _Scene, curves: CurvesSoFar) -> None:
    """The loader's points, in a part of the time; the batches of its own configuration are kept for the device."""
    now, own = perf_counter(), scene.job.config
    scene.ends_at = now + _LOADER_SHARE * (scene.ends_at - now)
    feed = scene.feed(own)
    try:
        first = feed.start()
        scene.host = collect(feed, seconds=_COLLECTING_S, first=first)
        curves.add("loader", {}, lambda: measure_point({}, lambda: _loader_alone(scene, feed, own), scene.ends_at))
    finally:
        feed.stop()
    for config in scene.job.variations:
        if scene.changes(config, LOADER_SETTINGS):
            curves.add("loader", scene.changes(config, _LOADER_CHANGES), partial(_loader_point, scene, config))


def _trace_device(scene: _Scene, curves: CurvesSoFar) -> Curves:
    """The device's points and the roofline; all curves."""
    own = scene.job.config
    model = build_model(scene.workload, own, scene.device)
    step = infer_step(scene.workload, scene.host[0].batch)
    training = _Training(scene, model, step, own.channels_last, kept_weights(model))
    for point in curves.known.device:
        batch = int(str(point.changes.get("micro_batch_size", own.micro_batch_size)))
        _note_peak(scene, batch, point.peak_memory_bytes)

    def add(config: TrainingConfig) -> None:
        curves.add("device", scene.changes(config, DEVICE_SETTINGS), partial(_device_point, training, config))

    for config in (own, *_device_variations(scene)):
        add(config)
    combined = combined_config(own, curves.points["device"])
    if combined is not None:
        add(combined)
    roofline, remarks = _roofline(training) if scene.job.roofline else (None, ())
    return curves.curves(roofline, *remarks)


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


def _device_variations(scene: _Scene) -> list[TrainingConfig]:
    """Variations that leave the loader as it is; not one that only names the number of threads that torch takes."""
    own = scene.job.config
    default = own.model_copy(update={"intra_op_threads": torch.get_num_threads()})
    redundant = default if own.intra_op_threads is None else None
    return [
        config
        for config in scene.job.variations
        if scene.changes(config, DEVICE_SETTINGS) and not scene.changes(config, LOADER_SETTINGS) and config != redundant
    ]


def _loader_point(scene: _Scene, config: TrainingConfig) -> CurvePoint:
    def measure() -> Figures:
        refuse_too_full_a_queue([delivery.batch for delivery in scene.host], config, scene.job, scene.device)
        feed = scene.feed(config)
        try:
            feed.start()
            return _loader_alone(scene, feed, config)
        finally:
            feed.stop()

    return measure_point(scene.changes(config, _LOADER_CHANGES), measure, scene.ends_at)


def _loader_alone(scene: _Scene, feed: Feed, config: TrainingConfig) -> Figures:
    seconds, ends_at = scene.job.stretch_s, scene.ends_at
    return _with_cpu_s(lambda: loader_alone(feed, config, seconds=seconds, ends_at=ends_at))


def _device_point(training: _Training, config: TrainingConfig) -> CurvePoint:
    scene = training.scene

    def measure() -> Figures:
        refuse_too_large_a_batch(scene.peaks, config.micro_batch_size, scene.job, scene.device)
        if config.compile:
            torch.compiler.reset()  # or a second batch size would be compiled for any, which no trial does
        scene.device.reset_peak()
        with _as_configured(config, scene.device):
            trainer = _trainer(training, config)
            held = resident(trainer, _batches_of(scene, config))
            seconds, ends_at = scene.job.stretch_s, scene.ends_at
            return _with_cpu_s(lambda: device_alone(trainer, held, seconds=seconds, ends_at=ends_at))

    point = measure_point(scene.changes(config, DEVICE_SETTINGS), measure, scene.ends_at)
    if point.ceiling is not None:
        # without the weights kept aside, where these lie in the memory that is judged
        kept = 0 if scene.device.has_own_memory else sum(tensor.nbytes for tensor in training.initial.values())
        peak = max(0, scene.device.peak_memory().peak_bytes - kept)
        _note_peak(scene, config.micro_batch_size, peak)
        point = point.model_copy(update={"peak_memory_bytes": peak})
    training.model.zero_grad(set_to_none=True)
    if point.ceiling is None:
        put_back(training.model, training.initial)  # weights that diverged: products of zeros would cost less power
    scene.device.give_back()
    return point


def _note_peak(scene: _Scene, batch: int, peak_bytes: int | None) -> None:
    scene.peaks[batch] = max(peak_bytes or 0, scene.peaks.get(batch, 0))


def _trainer(training: _Training, config: TrainingConfig) -> Trainer:
    """A trainer of the shared model, in the configuration's layout, with an optimizer of its own."""
    if config.channels_last != training.is_channels_last:
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        training.model.to(memory_format=layout)  # type: ignore[call-overload] # torch's stubs lack the keyword alone
        training.is_channels_last = config.channels_last
    optimizer = build_optimizer(training.scene.workload, training.model, config.lr)
    return make_trainer(training.model, optimizer, training.step, config, training.scene.device)


def _batches_of(scene: _Scene, config: TrainingConfig) -> Sequence[Held | Delivery]:
    size = config.micro_batch_size
    if size == scene.job.config.micro_batch_size:
        return scene.host
    return [Held(resized(delivery.batch, delivery.samples, size), size) for delivery in scene.host]


@contextmanager
def _as_configured(config: TrainingConfig, device: Device) -> Iterator[None]:
    """Threads and TF32 of this process as the configuration has them, and as before afterwards."""
    precision = config.autocast(device.torch_device) if config.amp_dtype == "tf32" else nullcontext()
    with torch_threads(config.intra_op_threads), precision:
        yield


def _roofline(training: _Training) -> tuple[Roofline | None, tuple[Note, ...]]:
    scene, config = training.scene, training.scene.job.config
    if config.compile:
        return None, (note("operators_not_counted_compiled"),)
    if perf_counter() > scene.ends_at:
        return None, (note("operators_not_counted_no_time"),)
    try:
        with _as_configured(config, scene.device):
            trainer = _trainer(training, config)
            return trace_roofline(trainer, resident(trainer, scene.host)[0].batch, scene.device), ()
    except Exception as error:  # noqa: BLE001 - the user's code runs in it; the curves are worth keeping
        return None, (note("operators_not_counted", cause=cause_of(error)),)


def _with_cpu_s(measure: Callable[[], Ceiling]) -> Figures:
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
