"""Measure the ceilings around a configuration: loader, device, copies and host, each alone."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from operator import itemgetter
from time import perf_counter
from typing import Any, Literal

import psutil
import torch

from autotune.apply.precision import tf32_products
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
from autotune.worker.conditions import HostLoadProbe
from autotune.worker.device import Device, usable_ram_bytes
from autotune.worker.extras.roofline import trace_roofline
from autotune.worker.failures import cause_of, is_kernel_failure, shortage_of
from autotune.worker.feed import Delivery, Feed
from autotune.worker.jobs.bench import Bench
from autotune.worker.side_alone import collect, copy_alone, device_alone, loader_alone, resident
from autotune.worker.step import torch_threads

# What is not even tried, since it might fill the host's memory: loaders that hold too much ready,
# batches too large.
#
# Takes what was measured so far and a configuration to try; hands on a Note that says why not, or
# None. Where memory is the host's, nothing else refuses it until it is full and the system ends the
# whole job.


def refusal_of_queue(
    batches: Iterable[Any], config: TrainingConfig, job: CurvesJob, device: Device
) -> Note | None:
    """Why a loader whose workers might fill the memory is not tried; None where it is.

    They hold batches ready in shared memory, or page-locked; these may take no more than a part of
    what is free.

    Args:
        batches: Batches of the job's own configuration.
        config: The loader's settings: its batches are so much larger, and so many lie ready.
        job: The job; its limit counts where memory is the host's.
        device: What is trained on.
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
    """Why a configuration that might pass the limit is not tried; None where it is.

    `peaks` were measured in this process, which has no loader workers now; there is at least one.
    """
    if device.has_own_memory or limit_bytes is None:
        return None
    memory = MemoryModel(observed=peaks, has_workers_in_ram=False)
    if memory.chance_to_fit([config], limit_bytes)[0] >= POLICY.trials.sure_to_fit:
        return None
    expected, sd = memory.expect([config])
    might_be = float(
        expected[0] + t_quantile(POLICY.trials.sure_to_fit, memory.degrees_of_freedom) * sd[0]
    )
    return batch_too_large(expected_bytes=might_be, limit_bytes=limit_bytes)


def _batch_sizes(batch: Any, growth: float) -> tuple[int, int]:
    """Bytes of a batch with so many times the samples: in shared memory, and page-locked.

    torch's allocator of page-locked memory takes a power of two for each tensor, and keeps it once
    the batch has gone to the device; the batches that follow lie in shared memory meanwhile.
    Source: aten/src/ATen/core/CachingHostAllocator.h (allocate, free).
    """
    sizes = [ceil(growth * tensor.nbytes) for tensor in tensors_of(batch)]
    return sum(sizes), sum(1 << (size - 1).bit_length() for size in sizes if size > 0)


def _free_ram_bytes(job: CurvesJob, device: Device) -> int:
    """Bytes of RAM that are free now, and no more than may be used at all."""
    limit_bytes = None if device.has_own_memory else job.process.limit_bytes
    return min(psutil.virtual_memory().available, usable_ram_bytes(), limit_bytes or sys.maxsize)


def _free_shared_bytes() -> int:
    """Bytes of shared memory that are free now."""
    with suppress(OSError):  # not on Linux
        return shutil.disk_usage("/dev/shm").free  # noqa: S108 - where torch's workers put batches
    return sys.maxsize


# The points of curves as they come: each measured on its own, and kept before and after it is
# measured.
#
# Takes a function that measures a point; hands on CurvePoints, and the Curves so far. The caller is
# given these to keep: before each point with that point as one that the process did not outlive,
# then with its figures. A failed kernel ends them all.


_Side = Literal["loader", "device", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFigures:
    """What a point has shown: a ceiling, or the reason why it has none; for the rest see CurvePoint."""

    ceiling: Ceiling | None = None
    cpu_s_per_sample: float | None = None
    peak_memory_bytes: int | None = None
    reason: Note | str = ""


class DeviceLostError(Exception):
    """A kernel has failed: everything measured in this process from here on would fail too."""


@dataclass(slots=True)
class CurvesSoFar:
    """The points so far, each kept before and after it is measured."""

    keep: Callable[[Curves], None]
    known: Curves
    """What an earlier process has left."""
    points: dict[_Side, tuple[CurvePoint, ...]] = field(
        default_factory=lambda: {"loader": (), "device": (), "copy": ()}
    )

    def add(
        self,
        side: _Side,
        changes: dict[str, object],
        measure: Callable[[], PointFigures],
        ends_at: float,
    ) -> CurvePoint:
        """Take over a point of an earlier process, or measure it; a failure becomes the point's reason.

        Raises:
            DeviceLostError: nothing can be measured in this process any more; the point is kept,
                with its reason.
        """
        before = self.points[side]
        earlier = getattr(self.known, side)
        point = next((point for point in earlier if point.changes == changes), None)
        is_lost = False
        if point is None:
            died = CurvePoint(changes=changes, ceiling=None, reason=process_ended_at_point())
            self._take(side, (*before, died))
            point, is_lost = _measure(changes, measure, ends_at)
        self._take(side, (*before, point))
        if is_lost:
            raise DeviceLostError
        return point

    def curves(self, roofline: Roofline | None, *remarks: Note, is_cut: bool = False) -> Curves:
        """All that is known."""
        threads = torch.get_num_threads()
        return Curves(
            **self.points, roofline=roofline, threads=threads, remarks=remarks, is_cut=is_cut
        )

    def cut(self) -> Curves:
        """All that is known where the process ends here."""
        return self.curves(None, curves_cut(), is_cut=True)

    def _take(self, side: _Side, points: tuple[CurvePoint, ...]) -> None:
        self.points[side] = points
        self.keep(self.cut())


def _measure(
    changes: dict[str, object], measure: Callable[[], PointFigures], ends_at: float
) -> tuple[CurvePoint, bool]:
    """Measure a point where there is time; the point, with the reason where it failed; and whether a kernel has."""
    begun = perf_counter()
    is_lost = False
    if begun > ends_at:
        return CurvePoint(changes=changes, ceiling=None, reason=no_time_left()), False
    try:
        figures = measure()
    except Exception as error:  # noqa: BLE001 - the user's code runs in it: one point fails, not the curve
        shortage = shortage_of(error)
        is_lost = is_kernel_failure(error)
        figures = PointFigures(reason=cause_of(error) if shortage is None else shortage.reason)
    point = CurvePoint(
        changes=changes,
        ceiling=figures.ceiling,
        cpu_s_per_sample=figures.cpu_s_per_sample,
        peak_memory_bytes=figures.peak_memory_bytes,
        took_s=perf_counter() - begun,
        reason=figures.reason,
    )
    return point, is_lost


# Ceilings around a configuration: loader, device and copy alone, each in settings that differ from
# it.
#
# Takes a curves job; hands on Curves. A setting that fails (out of memory, an exception of the
# user's code) leaves a reason in its point and spares the others; near the deadline the rest is
# left out. Around each point the caller is given the curves so far to keep, so that not even the
# death of the process loses them. After a kernel has failed nothing works in a process any more:
# the curves end there, and another process can go on with them.


_SLOWER_SHARE = 0.75
"""Of the time, for the side that is known to be the slower one of today's settings: our own
convention, since it is what other settings can make faster."""
_COLLECTING_S = (
    1.0  # a loader that needs longer for a few batches delivers too few to train on in turns anyway
)
_MOST_AGAIN = 3
"""Points that are measured again because other processes took cores: our own convention; where
these stay, a second measurement is no better."""
_WORTH = 1.03
"""A setting that makes the device so much faster goes into the combined point: our own convention."""
_LONG_S = 4.0
"""Of a point's two steps, from which on a larger batch is left out: our own convention, half of a
trial's window."""
_LOADER_CHANGES = {*LOADER_SETTINGS, "micro_batch_size", "max_tokens"}


@dataclass(slots=True)
class _Scene:
    """What the points of all curves share."""

    bench: Bench
    job: CurvesJob
    device: Device
    curves: CurvesSoFar
    ends_at: float
    host: Sequence[Delivery] = ()
    """Batches of the job's own configuration, on the host."""
    peaks: list[Peak] = field(default_factory=list)
    """What the device's points took."""
    again_left: int = _MOST_AGAIN
    """Points that may still be measured again because other processes took cores meanwhile."""

    @contextmanager
    def feed(self, config: TrainingConfig) -> Iterator[Feed]:
        """A feed of a configuration's loader, not started; its workers are ended behind it."""
        feed = self.bench.feed(config)
        try:
            yield feed
        finally:
            feed.stop()

    def changes(self, config: TrainingConfig, settings: Collection[str]) -> dict[str, object]:
        """Those of some settings that differ from the job's own, with their values."""
        changed = changed_settings(config, self.job.config)
        return {name: after for name, (_, after) in changed.items() if name in settings}

    def figures(self, alone: Callable[..., Ceiling], *arguments: object) -> PointFigures:
        """A side's ceiling, and the CPU seconds that a sample took: the cores in use over the rate, warm-up included.

        Where other processes took cores meanwhile, it is measured once more, and the faster of the
        two counts: other processes only slow a side down.

        Args:
            alone: `loader_alone`, `device_alone` or `copy_alone`.
            arguments: What it is to measure.
        """
        host = HostLoadProbe()
        host.start()
        first = self._figures(alone, *arguments)
        load = host.stop()
        if (
            load is None
            or not load.is_loaded
            or self.again_left == 0
            or perf_counter() > self.ends_at
        ):
            return first
        self.again_left -= 1
        second = self._figures(alone, *arguments)
        return max(
            first, second, key=lambda one: 0.0 if one.ceiling is None else one.ceiling.samples_per_s
        )

    def _figures(self, alone: Callable[..., Ceiling], *arguments: object) -> PointFigures:
        begun = perf_counter()
        cpu_s = _spent_cpu_s()
        ceiling = alone(*arguments, seconds=self.job.stretch_s, ends_at=self.ends_at)
        cores = (_spent_cpu_s() - cpu_s) / (perf_counter() - begun)
        return PointFigures(
            ceiling=ceiling, cpu_s_per_sample=max(0.0, cores) / ceiling.samples_per_s
        )


def trace_curves(
    bench: Bench, job: CurvesJob, device: Device, ends_at: float, *, keep: Callable[[Curves], None]
) -> Curves:
    """Measure the job's own configuration and each variation alone, on the side that it changes.

    Where several device settings help, a further point has them all. `keep` is called with the
    curves so far around each point: they count should the process not outlive the next.

    Raises:
        WorkloadFault: something about the workload can't be used.
    """
    curves = CurvesSoFar(keep, job.known or Curves())
    scene = _Scene(bench, job, device, curves, ends_at)
    try:
        _trace_loader(scene)
        scene.ends_at = ends_at
        return _trace_device(scene)
    except DeviceLostError:
        return curves.cut()


def _trace_loader(scene: _Scene) -> None:
    """The loader's points, in a part of the time; the batches of its own configuration are kept for the device."""
    now = perf_counter()
    own = scene.job.config
    if (
        _device_variations(scene) or scene.device.kind == "cpu"
    ):  # there its own point shows the cores that it takes
        scene.ends_at = now + loader_share(scene.curves.known) * (scene.ends_at - now)
    with scene.feed(own) as feed:
        scene.host = collect(feed, seconds=_COLLECTING_S, first=feed.start())
        scene.curves.add(
            "loader", {}, lambda: scene.figures(loader_alone, feed, own), scene.ends_at
        )
    for config in scene.job.variations:
        if scene.changes(config, LOADER_SETTINGS):
            changes = scene.changes(config, _LOADER_CHANGES)
            measure = partial(_loader_figures, scene, config)
            if scene.job.ends_early and adds_workers_in_vain(
                scene.curves.points["loader"], changes
            ):
                continue
            scene.curves.add("loader", changes, measure, scene.ends_at)


def loader_share(known: Curves) -> float:
    """Return the share of the time that the loader's points may take; half, where the slower side is not known."""
    loader = _own_rate(known.loader)
    device = _own_rate(known.device)
    if loader is None or device is None:
        return 0.5
    return _SLOWER_SHARE if loader < device else 1 - _SLOWER_SHARE


def _own_rate(points: Sequence[CurvePoint]) -> float | None:
    return next(
        (point.ceiling.samples_per_s for point in points if not point.changes and point.ceiling),
        None,
    )


def _loader_figures(scene: _Scene, config: TrainingConfig) -> PointFigures:
    refusal = refusal_of_queue(
        [delivery.batch for delivery in scene.host], config, scene.job, scene.device
    )
    if refusal is not None:
        return PointFigures(reason=refusal)
    with scene.feed(config) as feed:
        feed.start()
        return scene.figures(loader_alone, feed, config)


def _trace_device(scene: _Scene) -> Curves:
    """The copies' points, the device's and the roofline; all curves."""
    own = scene.job.config
    scene.bench.prepare(scene.host[0].batch)
    _trace_copy(scene)
    for config in (own, *_device_variations(scene)):
        if scene.job.is_brief and _takes_long(scene, config):
            left_out = partial(PointFigures, reason=left_to_smaller_batches())
            scene.curves.add(
                "device", scene.changes(config, DEVICE_SETTINGS), left_out, ends_at=inf
            )
        else:
            _add_device_point(scene, config)
    combined = combined_config(own, scene.curves.points["device"])
    if combined is not None:
        _add_device_point(scene, combined)
    roofline, remarks = _roofline(scene) if scene.job.roofline else (None, ())
    return scene.curves.curves(roofline, *remarks)


def _trace_copy(scene: _Scene) -> None:
    """Copies from pageable and from pinned memory, where the device has memory that pinning is for."""
    if scene.device.kind not in PINNING_KINDS:
        return
    own = scene.job.config
    for config in (own, own.model_copy(update={"pin_memory": not own.pin_memory})):
        measure = partial(_copy_figures, scene, config)
        scene.curves.add("copy", scene.changes(config, {"pin_memory"}), measure, scene.ends_at)


def _copy_figures(scene: _Scene, config: TrainingConfig) -> PointFigures:
    lie = pinned if config.pin_memory else copied
    is_own = config.pin_memory == scene.job.config.pin_memory
    host = [kept if is_own else Held(lie(kept.batch), kept.samples) for kept in scene.host]
    with _as_configured(config):  # a trainer sets TF32 for good
        return scene.figures(copy_alone, scene.bench.trainer(config), host)


def combined_config(own: TrainingConfig, points: Sequence[CurvePoint]) -> TrainingConfig | None:
    """A configuration with the best value of each setting that makes the device faster; None for fewer than two."""
    rates = [
        (point.changes, point.ceiling.samples_per_s)
        for point in points
        if point.ceiling is not None
    ]
    level = next((rate for changes, rate in rates if not changes), inf)
    helping = [
        (changes, rate) for changes, rate in rates if is_single(changes) and rate >= _WORTH * level
    ]
    best: dict[str, object] = {}
    for changes, _ in sorted(helping, key=itemgetter(1)):
        best |= changes  # the fastest value of a setting comes last
    return (
        TrainingConfig.model_validate(own.model_dump() | best)
        if best and not is_single(best)
        else None
    )


def _device_variations(scene: _Scene) -> list[TrainingConfig]:
    """Variations that leave the loader as it is; not one that only names the number of threads that torch takes."""
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
    """Whether a larger batch is left to what smaller ones tell of a batch's seconds: its two steps would take long."""
    own = scene.job.config
    if config.micro_batch_size <= own.micro_batch_size:
        return False
    known = scene.curves.points["device"][0].ceiling  # the job's own configuration comes first
    return known is not None and 2 * config.micro_batch_size / known.samples_per_s > _LONG_S


def _add_device_point(scene: _Scene, config: TrainingConfig) -> None:
    changes = scene.changes(config, DEVICE_SETTINGS)
    measure = partial(_device_figures, scene, config)
    point = scene.curves.add("device", changes, measure, scene.ends_at)
    if point.peak_memory_bytes is not None:
        scene.peaks.append(Peak(config, point.peak_memory_bytes))
    scene.bench.after_point(is_failed=point.ceiling is None)
    scene.device.give_back()


def _device_figures(scene: _Scene, config: TrainingConfig) -> PointFigures:
    device = scene.device
    peaks = scene.peaks or [Peak(scene.job.config, device.peak_memory().peak_bytes)]
    refusal = refusal_of_batch(peaks, config, scene.job.process.limit_bytes, device)
    if refusal is not None:
        return PointFigures(reason=refusal)
    if config.compile:
        # Or a second batch size would be compiled for any, which no trial does.
        torch.compiler.reset()
    device.reset_peak()
    with _as_configured(config):
        trainer = scene.bench.trainer(config)
        figures = scene.figures(
            device_alone, trainer, resident(trainer, _batches_of(scene, config))
        )
    # without the weights kept aside, where these lie in the memory that is judged
    kept = 0 if device.has_own_memory else scene.bench.kept_bytes
    return replace(figures, peak_memory_bytes=max(0, device.peak_memory().peak_bytes - kept))


def _batches_of(scene: _Scene, config: TrainingConfig) -> Sequence[Held | Delivery]:
    """Batches of the configuration's size: each with so many times its samples, of whatever length they are."""
    own = scene.job.config
    if (config.micro_batch_size, config.max_tokens) == (own.micro_batch_size, own.max_tokens):
        return scene.host
    growth = config.micro_batch_size / own.micro_batch_size
    if config.max_tokens is not None and own.max_tokens is not None:
        growth = config.max_tokens / own.max_tokens
    sizes = [max(1, round(delivery.samples * growth)) for delivery in scene.host]
    batches = zip(scene.host, sizes, strict=True)
    return [
        Held(resized(delivery.batch, delivery.samples, size), size) for delivery, size in batches
    ]


@contextmanager
def _as_configured(config: TrainingConfig) -> Iterator[None]:
    """Threads and TF32 of this process as the configuration has them, and as before afterwards."""
    with (
        torch_threads(config.intra_op_threads),
        tf32_products() if config.amp_dtype == "tf32" else nullcontext(),
    ):
        yield


def _roofline(scene: _Scene) -> tuple[Roofline | None, tuple[Note, ...]]:
    config = scene.job.config
    if config.compile:
        return None, (operators_not_counted("the model is compiled"),)
    if perf_counter() > scene.ends_at:
        return None, (operators_not_counted("no time was left"),)
    try:
        with _as_configured(config):
            trainer = scene.bench.trainer(config)
            return trace_roofline(trainer, resident(trainer, scene.host)[0].batch, scene.device), ()
    except Exception as error:  # noqa: BLE001 - the user's code runs in it; the curves are worth keeping
        return None, (operators_not_counted(cause_of(error)),)


def _spent_cpu_s() -> float:
    """CPU seconds so far of this process, of its living children, and of those that it has waited for."""
    own = psutil.Process()
    spent = sum(own.cpu_times()[:4])  # user, system, and both of the children waited for
    for child in own.children():
        with suppress(psutil.Error):
            spent += sum(child.cpu_times()[:2])
    return float(spent)
