"""Measure the ceilings around a configuration: loader, device and copies, each alone.

In: a bench (the workload's own parts, or a script's) and a curves job. Out: Curves, passed to the
caller around each point, so that even the death of the process loses none. A setting that fails (out of
memory, an exception of the user's code) leaves a reason in its point and spares the others; near
the deadline the rest is left out. After a failed kernel nothing works in this process any more: the
curves end there, and another process can continue them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol

import psutil
import torch
from torch import Tensor, nn

from autotune.apply.precision import tf32_products
from autotune.config.plan import Workload
from autotune.config.training_config import LOADER_SETTINGS, TrainingConfig
from autotune.messages.trials import (
    batch_too_large,
    curves_cut,
    left_to_smaller_batches,
    no_time_left,
    operators_not_counted,
    process_ended_at_point,
    queue_too_large,
)
from autotune.models.forecast import DEVICE_SETTINGS, PINNING_KINDS
from autotune.models.memory import MemoryModel, Peak
from autotune.models.observations import adds_workers_in_vain
from autotune.models.statistics import t_quantile
from autotune.note import Note
from autotune.policy import POLICY
from autotune.protocol.messages import CurvesJob
from autotune.records.ceilings import Ceiling
from autotune.records.result import CurvePoint, Curves, Roofline, changed_settings, is_single
from autotune.worker.batch import Held, copied, pinned, resized, tensors_of
from autotune.worker.build import (
    build_dataset,
    build_model,
    build_optimizer,
    kept_weights,
    put_back,
)
from autotune.worker.conditions import HostLoadProbe
from autotune.worker.device import Device, usable_ram_bytes
from autotune.worker.extras.roofline import trace_roofline
from autotune.worker.failures import cause_of, is_kernel_failure, shortage_of
from autotune.worker.feed import Delivery, Feed
from autotune.worker.loader import LOADER_INPUTS, build_loader
from autotune.worker.side_alone import collect, copy_alone, device_alone, loader_alone, resident
from autotune.worker.step import Step, StepTrainer, Trainer, infer_step, make_trainer, torch_threads

# The parts that are measured alone: feeds and trainers in any configuration, of a workload or a script
# (`worker.script.bench`).


class Bench(Protocol):
    """Source of the parts to measure: a workload's, or a script's."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that are kept aside."""
        ...

    def feed(self, config: TrainingConfig) -> Feed:
        """Return a feed of a configuration's loader, not started."""
        ...

    def prepare(self, batch: Any) -> None:
        """Prepare a model for the device's points, given a batch of the job's own configuration."""
        ...

    def trainer(self, config: TrainingConfig) -> StepTrainer:
        """Return a trainer of that model, in a configuration's layout and precision."""
        ...

    def after_point(self, *, is_failed: bool) -> None:
        """Free the gradients; if the point failed, put the initial weights back."""
        ...


@dataclass(slots=True)
class WorkloadBench:
    """Build loaders and a model from a workload; implements Bench."""

    workload: Workload
    job: CurvesJob
    device: Device
    scratch: Path
    dataset: Any = field(init=False)
    _model: nn.Module | None = None
    _step: Step | None = None
    _initial: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights and buffers before the first point, on the CPU."""
    _is_channels_last: bool = False

    def __post_init__(self) -> None:
        self.dataset = build_dataset(self.workload)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that are kept aside."""
        return sum(tensor.nbytes for tensor in self._initial.values())

    def feed(self, config: TrainingConfig) -> Feed:
        """Return a feed of a configuration's loader, not started."""
        return Feed(build_loader(self.workload, self.dataset, config, self.scratch))

    def prepare(self, batch: Any) -> None:
        """Build the model, and keep its weights."""
        self._model = build_model(self.workload, self.job.config, self.device)
        self._step = infer_step(self.workload, batch)
        self._is_channels_last = self.job.config.channels_last
        self._initial = kept_weights(self._model)

    def trainer(self, config: TrainingConfig) -> Trainer:
        """Return a trainer in a configuration's layout and precision, with its own optimizer."""
        model = self._model
        step = self._step
        assert model is not None and step is not None, "prepare() comes first"  # noqa: S101, PT018 - our own bug
        if config.channels_last != self._is_channels_last:
            layout = torch.channels_last if config.channels_last else torch.contiguous_format
            model.to(memory_format=layout)  # type: ignore[call-overload] # torch's stubs lack the keyword alone
            self._is_channels_last = config.channels_last
        optimizer = build_optimizer(self.workload, model, config.lr, fused=config.fused)
        return make_trainer(model, optimizer, step, config, self.device)

    def after_point(self, *, is_failed: bool) -> None:
        """Free the gradients; if the point failed, put the initial weights back.

        Weights may have diverged, and products of zeros would take less power.
        """
        if self._model is None:
            return
        self._model.zero_grad(set_to_none=True)
        if is_failed:
            put_back(self._model, self._initial)


# Configurations that are refused, since they might fill the host's memory: the system would end the
# whole job


def refusal_of_queue(
    batches: Iterable[Any], config: TrainingConfig, job: CurvesJob, device: Device
) -> Note | None:
    """Return the reason not to try a loader whose queue might fill the memory; None to try it.

    Workers hold finished batches in shared memory, or page-locked; these may take only a part of
    the free memory.

    Args:
        batches: Batches of the job's own configuration.
        config: The loader's settings, with its batch size and queue length.
        job: The job; its memory limit counts if the device uses the host's memory.
        device: The device that trains.
    """
    ready = config.num_workers * config.batches_per_worker
    growth = config.micro_batch_size / job.config.micro_batch_size
    sizes = [_batch_sizes(batch, growth) for batch in batches]
    shared = ready * max(shared for shared, _ in sizes)
    pins = config.pin_memory and device.kind in PINNING_KINDS
    pinned = ready * max(pinned for _, pinned in sizes) if pins else 0
    for expected, free in (
        (shared, _free_shared_bytes()),
        (shared + pinned, _free_ram_bytes(job, device)),
    ):
        if expected > POLICY.trials.queue_share * free:
            return queue_too_large(expected_bytes=expected, free_bytes=free)
    return None


def refusal_of_batch(
    peaks: Sequence[Peak], config: TrainingConfig, limit_bytes: int | None, device: Device
) -> Note | None:
    """Return the reason not to try a configuration that might exceed the limit; None to try it.

    Args:
        peaks: Peaks measured in this process, which has no loader workers now; at least one.
        config: The configuration to try.
        limit_bytes: Limit of the host's memory; None if there is none.
        device: The device that trains.
    """
    if device.has_own_memory or limit_bytes is None:
        return None
    memory = MemoryModel(observed=peaks, has_workers_in_ram=False)
    if memory.chance_to_fit([config], limit_bytes)[0] >= POLICY.trials.sure_to_fit:
        return None
    expected, sd = memory.expect([config])
    quantile = t_quantile(POLICY.trials.sure_to_fit, memory.degrees_of_freedom)
    upper_bound = float(expected[0] + quantile * sd[0])
    return batch_too_large(expected_bytes=upper_bound, limit_bytes=limit_bytes)


def _batch_sizes(batch: Any, growth: float) -> tuple[int, int]:
    """Return the bytes of a batch with `growth` times the samples, shared and page-locked.

    torch's allocator of page-locked memory rounds each tensor up to a power of two, and keeps the
    memory once the batch is on the device; the next batches lie in shared memory meanwhile.
    Source: aten/src/ATen/core/CachingHostAllocator.h (allocate, free).
    """
    sizes = [ceil(growth * tensor.nbytes) for tensor in tensors_of(batch)]
    return sum(sizes), sum(1 << (size - 1).bit_length() for size in sizes if size > 0)


def _free_ram_bytes(job: CurvesJob, device: Device) -> int:
    """Return the bytes of RAM that are free now, within the limits of the host and of the job."""
    limit_bytes = None if device.has_own_memory else job.process.limit_bytes
    return min(psutil.virtual_memory().available, usable_ram_bytes(), limit_bytes or sys.maxsize)


def _free_shared_bytes() -> int:
    """Return the bytes of shared memory that are free now; unlimited if there is no /dev/shm."""
    with suppress(OSError):  # not on Linux
        return shutil.disk_usage("/dev/shm").free  # noqa: S108 - where torch's workers put batches
    return sys.maxsize


# The curves


_SLOWER_SHARE = 0.75
"""Share of the time for the slower side of the baseline: other settings can make that one faster.
Source: our convention."""
_COLLECTING_S = 1.0
"""Seconds to collect batches for the device. A slower loader gives too few to train on in turn
anyway."""
_MOST_AGAIN = 3
"""Number of points measured again because other processes took cores. If these persist, a second
measurement is no better. Source: our convention."""
_WORTH = 1.03
"""Ratio of throughputs from which a setting goes into the combined point. Source: our convention."""
_LONG_S = 4.0
"""Seconds of two steps from which a larger batch is left out: half of a trial's window. Source: our
convention."""
_Side = Literal["loader", "device", "copy"]


class DeviceLostError(Exception):
    """A kernel failed; everything measured in this process afterwards would fail too."""


class _Figures(NamedTuple):
    """Figures of one point, see CurvePoint."""

    ceiling: Ceiling
    cpu_s_per_sample: float
    peak_memory_bytes: int | None = None


@dataclass(slots=True)
class _Scene:
    """Shared state of the points of all curves, with the points so far."""

    bench: Bench
    job: CurvesJob
    device: Device
    ends_at: float
    """Time of perf_counter after which no point is begun."""
    keep: Callable[[Curves], None]
    points: dict[_Side, tuple[CurvePoint, ...]] = field(
        default_factory=lambda: {"loader": (), "device": (), "copy": ()}
    )
    host: Sequence[Delivery] = ()
    """Batches of the job's own configuration, on the host."""
    peaks: list[Peak] = field(default_factory=list)
    """Peak memory of the device's points."""
    again_left: int = _MOST_AGAIN
    """Number of points that may still be measured again because other processes took cores."""

    @property
    def known(self) -> Curves:
        """Curves of an earlier process that did not survive; empty if there was none."""
        return self.job.known or Curves()

    def add(
        self,
        side: _Side,
        changes: dict[str, object],
        measure: Callable[[], _Figures | Note] | Note,
    ) -> CurvePoint:
        """Reuse a point of an earlier process, or measure it; a failure becomes its reason.

        Until it is measured the curves hold it as one that ended the process, in case it does.

        Args:
            side: The curve that the point belongs to.
            changes: Settings that differ from the job's own configuration, with their values.
            measure: Function that measures the point, or returns the reason not to; or that reason.

        Raises:
            DeviceLostError: Nothing can be measured in this process any more; the point is kept,
                with its reason.
        """
        before = self.points[side]
        earlier: tuple[CurvePoint, ...] = getattr(self.known, side)
        for known in earlier:
            if known.changes == changes:
                self._take(side, (*before, known))
                return known
        died = CurvePoint(changes=changes, ceiling=None, reason=process_ended_at_point())
        self._take(side, (*before, died))
        begun = perf_counter()
        found: _Figures | Note | str
        is_lost = False
        if isinstance(measure, Note):
            found = measure
        elif begun > self.ends_at:
            found = no_time_left()
        else:
            try:
                found = measure()
            except Exception as error:  # noqa: BLE001 - it runs the user's code: one point fails, not the curve
                shortage = shortage_of(error)
                found = cause_of(error) if shortage is None else shortage.reason
                is_lost = is_kernel_failure(error)
        took_s = perf_counter() - begun
        if isinstance(found, _Figures):
            point = CurvePoint(
                changes=changes,
                ceiling=found.ceiling,
                cpu_s_per_sample=found.cpu_s_per_sample,
                peak_memory_bytes=found.peak_memory_bytes,
                took_s=took_s,
            )
        else:
            point = CurvePoint(changes=changes, ceiling=None, took_s=took_s, reason=found)
        self._take(side, (*before, point))
        if is_lost:
            raise DeviceLostError
        return point

    def curves(self, roofline: Roofline | None, *notes: Note, is_cut: bool = False) -> Curves:
        """Return the curves with all points so far."""
        threads = torch.get_num_threads()
        return Curves(**self.points, roofline=roofline, threads=threads, notes=notes, is_cut=is_cut)

    def cut(self) -> Curves:
        """Return the curves so far, marked as cut short."""
        return self.curves(None, curves_cut(), is_cut=True)

    def _take(self, side: _Side, points: tuple[CurvePoint, ...]) -> None:
        self.points[side] = points
        self.keep(self.cut())

    @contextmanager
    def feed(self, config: TrainingConfig) -> Iterator[Feed]:
        """Yield a feed of a configuration's loader, not started, and end its workers afterwards."""
        feed = self.bench.feed(config)
        try:
            yield feed
        finally:
            feed.stop()

    def changes(self, config: TrainingConfig, settings: Collection[str]) -> dict[str, object]:
        """Return those of the settings that differ from the job's own configuration, with values."""
        changed = changed_settings(config, self.job.config)
        return {name: after for name, (_, after) in changed.items() if name in settings}

    def figures(self, alone: Callable[..., Ceiling], *arguments: object) -> _Figures:
        """Return a side's ceiling, and the CPU seconds per sample (cores in use per throughput).

        If other processes took cores meanwhile, measure again and return the faster one: other
        processes only slow a side down.

        Args:
            alone: `loader_alone`, `device_alone` or `copy_alone`.
            arguments: The arguments of that function.
        """
        host = HostLoadProbe()
        host.start()
        first = self._figures(alone, *arguments)
        load = host.stop()
        if load is None or not load.is_loaded:
            return first
        if self.again_left == 0 or perf_counter() > self.ends_at:
            return first
        self.again_left -= 1
        second = self._figures(alone, *arguments)
        return max(first, second, key=lambda figures: figures.ceiling.samples_per_s)

    def _figures(self, alone: Callable[..., Ceiling], *arguments: object) -> _Figures:
        begun = perf_counter()
        cpu_s = _spent_cpu_s()
        ceiling = alone(*arguments, seconds=self.job.stretch_s, ends_at=self.ends_at)
        cores = (_spent_cpu_s() - cpu_s) / (perf_counter() - begun)
        return _Figures(ceiling, max(0.0, cores) / ceiling.samples_per_s)


def trace_curves(
    bench: Bench, job: CurvesJob, device: Device, ends_at: float, *, keep: Callable[[Curves], None]
) -> Curves:
    """Measure the job's own configuration and each variation alone, on the side that it changes.

    If several device settings help, one more point combines them.

    Args:
        bench: Source of feeds and trainers.
        job: The job, with its configuration and the variations.
        device: The device that trains.
        ends_at: Time of perf_counter after which no point is begun.
        keep: Called with the curves so far around each point; they count if the process dies.

    Raises:
        WorkloadFault: Something about the workload can't be used.
    """
    scene = _Scene(bench, job, device, ends_at, keep)
    try:
        _trace_loader(scene)
        scene.ends_at = ends_at
        return _trace_device(scene)
    except DeviceLostError:
        return scene.cut()


def _trace_loader(scene: _Scene) -> None:
    """Measure the loader's points in a part of the time; keep their batches for the device."""
    # Leave time to the device if it has points: a CPU's own point shows the cores that it takes.
    now = perf_counter()
    own = scene.job.config
    if _device_variations(scene) or scene.device.kind == "cpu":
        scene.ends_at = now + loader_share(scene.known) * (scene.ends_at - now)

    with scene.feed(own) as feed:
        scene.host = collect(feed, seconds=_COLLECTING_S, first=feed.start())
        scene.add("loader", {}, partial(scene.figures, loader_alone, feed, own))
    for config in scene.job.variations:
        if not scene.changes(config, LOADER_SETTINGS):
            continue
        changes = scene.changes(config, LOADER_INPUTS)
        if scene.job.ends_early and adds_workers_in_vain(scene.points["loader"], changes):
            continue
        scene.add("loader", changes, partial(_loader_figures, scene, config))


def loader_share(known: Curves) -> float:
    """Return the share of the time for the loader's points; half if the slower side is unknown."""
    loader = _own_throughput(known.loader)
    device = _own_throughput(known.device)
    if loader is None or device is None:
        return 0.5
    return _SLOWER_SHARE if loader < device else 1 - _SLOWER_SHARE


def _own_throughput(points: Sequence[CurvePoint]) -> float | None:
    """Return the samples/s of the job's own configuration; None if unknown."""
    for point in points:
        if not point.changes and point.ceiling:
            return point.ceiling.samples_per_s
    return None


def _loader_figures(scene: _Scene, config: TrainingConfig) -> _Figures | Note:
    batches = [delivery.batch for delivery in scene.host]
    refusal = refusal_of_queue(batches, config, scene.job, scene.device)
    if refusal is not None:
        return refusal
    with scene.feed(config) as feed:
        feed.start()
        return scene.figures(loader_alone, feed, config)


def _trace_device(scene: _Scene) -> Curves:
    """Measure the points of copies and device, and the roofline; return all curves."""
    own = scene.job.config
    scene.bench.prepare(scene.host[0].batch)

    # Copies from pageable and from pinned memory, if pinning can help the device.
    if scene.device.kind in PINNING_KINDS:
        for config in (own, own.model_copy(update={"pin_memory": not own.pin_memory})):
            changes = scene.changes(config, {"pin_memory"})
            scene.add("copy", changes, partial(_copy_figures, scene, config))

    # Each device setting alone, then the ones that help together.
    for config in (own, *_device_variations(scene)):
        if scene.job.is_short_search and _takes_long(scene, config):
            scene.add("device", scene.changes(config, DEVICE_SETTINGS), left_to_smaller_batches())
        else:
            _add_device_point(scene, config)
    combined = combined_config(own, scene.points["device"])
    if combined is not None:
        _add_device_point(scene, combined)

    if not scene.job.roofline:
        return scene.curves(None)
    roofline = _roofline(scene)
    if isinstance(roofline, Note):
        return scene.curves(None, roofline)
    return scene.curves(roofline)


def _copy_figures(scene: _Scene, config: TrainingConfig) -> _Figures:
    lie = pinned if config.pin_memory else copied
    host: Sequence[Held | Delivery] = scene.host
    if config != scene.job.config:
        host = [Held(lie(kept.batch), kept.samples) for kept in scene.host]
    with _as_configured(config):  # a trainer leaves TF32 switched on
        return scene.figures(copy_alone, scene.bench.trainer(config), host)


def combined_config(own: TrainingConfig, points: Sequence[CurvePoint]) -> TrainingConfig | None:
    """Combine the fastest values of all settings that make the device faster.

    Args:
        own: The job's own configuration.
        points: The device's points.

    Returns:
        The combined configuration; None if fewer than two settings help.
    """
    least = _WORTH * (_own_throughput(points) or inf)
    helping = [
        (point.ceiling.samples_per_s, point.changes)
        for point in points
        if point.ceiling is not None and is_single(point.changes)
    ]
    best: dict[str, object] = {}
    for throughput, changes in sorted(helping, key=itemgetter(0)):
        if throughput >= least:
            best |= changes  # the fastest value of a setting comes last
    if not best or is_single(best):
        return None
    return TrainingConfig.model_validate(own.model_dump() | best)


def _device_variations(scene: _Scene) -> list[TrainingConfig]:
    """Return the variations that leave the loader as it is.

    One that only names the number of threads that torch takes anyway is left out.
    """
    own = scene.job.config
    unchanged = own.model_copy(
        update={"intra_op_threads": own.intra_op_threads or torch.get_num_threads()}
    )
    return [
        config
        for config in scene.job.variations
        if scene.changes(config, DEVICE_SETTINGS)
        and not scene.changes(config, LOADER_SETTINGS)
        and config != unchanged
    ]


def _takes_long(scene: _Scene, config: TrainingConfig) -> bool:
    """Return whether two steps of a larger batch would take long; smaller batches predict them."""
    if config.micro_batch_size <= scene.job.config.micro_batch_size:
        return False
    known = scene.points["device"][0].ceiling  # the job's own configuration comes first
    return known is not None and 2 * config.micro_batch_size / known.samples_per_s > _LONG_S


def _add_device_point(scene: _Scene, config: TrainingConfig) -> None:
    changes = scene.changes(config, DEVICE_SETTINGS)
    point = scene.add("device", changes, partial(_device_figures, scene, config))
    if point.peak_memory_bytes is not None:
        scene.peaks.append(Peak(config, point.peak_memory_bytes))
    scene.bench.after_point(is_failed=point.ceiling is None)
    scene.device.give_back()


def _device_figures(scene: _Scene, config: TrainingConfig) -> _Figures | Note:
    device = scene.device
    peaks = scene.peaks or [Peak(scene.job.config, device.peak_memory().peak_bytes)]
    refusal = refusal_of_batch(peaks, config, scene.job.process.limit_bytes, device)
    if refusal is not None:
        return refusal
    if config.compile:
        # Without it a second batch size is compiled for dynamic shapes, which no trial does.
        torch.compiler.reset()
    device.reset_peak()
    with _as_configured(config):
        trainer = scene.bench.trainer(config)
        batches = resident(trainer, _batches_of(scene, config))
        figures = scene.figures(device_alone, trainer, batches)
    # Leave out the weights kept aside, if they lie in the memory that is judged.
    kept = 0 if device.has_own_memory else scene.bench.kept_bytes
    return figures._replace(peak_memory_bytes=max(0, device.peak_memory().peak_bytes - kept))


def _batches_of(scene: _Scene, config: TrainingConfig) -> Sequence[Held | Delivery]:
    """Return batches of the configuration's size: the job's own ones, resized."""
    own = scene.job.config
    if (config.micro_batch_size, config.max_tokens) == (own.micro_batch_size, own.max_tokens):
        return scene.host
    growth = config.micro_batch_size / own.micro_batch_size
    if config.max_tokens is not None and own.max_tokens is not None:
        growth = config.max_tokens / own.max_tokens
    batches = []
    for delivery in scene.host:
        size = max(1, round(delivery.samples * growth))
        batches.append(Held(resized(delivery.batch, delivery.samples, size), size))
    return batches


@contextmanager
def _as_configured(config: TrainingConfig) -> Iterator[None]:
    """Set this process's threads and TF32 as configured, and restore them afterwards."""
    products = tf32_products() if config.amp_dtype == "tf32" else nullcontext()
    with torch_threads(config.intra_op_threads), products:
        yield


def _roofline(scene: _Scene) -> Roofline | Note:
    """Return the roofline of the job's own configuration, or a note on why there is none."""
    config = scene.job.config
    if config.compile:
        return operators_not_counted("the model is compiled")
    if perf_counter() > scene.ends_at:
        return operators_not_counted("no time was left")
    try:
        with _as_configured(config):
            trainer = scene.bench.trainer(config)
            return trace_roofline(trainer, resident(trainer, scene.host)[0].batch)
    except Exception as error:  # noqa: BLE001 - it runs the user's code; the curves are worth keeping
        return operators_not_counted(cause_of(error))


def _spent_cpu_s() -> float:
    """Return the CPU seconds of this process and its children, ended ones included."""
    own = psutil.Process()
    spent = sum(own.cpu_times()[:4])  # user, system, and both of the children waited for
    for child in own.children():
        with suppress(psutil.Error):
            spent += sum(child.cpu_times()[:2])
    return float(spent)
