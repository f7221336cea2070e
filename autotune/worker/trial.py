"""Run a trial in one rank: build, warm up, measure the window, then measure what explains it.

Comes in: a `TrialJob`, the workload and a device. Goes out: this rank's `RankReport`. A report is
kept while measurements that follow the window run: it counts, whatever becomes of the process.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Any

from autotune.apply.prepare import without_effect_here
from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.errors import RunFolderError
from autotune.models.evidence import assumed_variation, with_run_variation
from autotune.models.growing_memory import with_copies
from autotune.models.statistics import wait_fraction, window_rate
from autotune.policy import WindowRules
from autotune.protocol.disk import read_model, write_model
from autotune.protocol.messages import NO_EXTRAS, RankReport, TrialJob
from autotune.records.measurement import Block, Measurement, RankFigures, notes_on
from autotune.records.trial import TrialResult
from autotune.worker.batch import batch_fingerprint, token_count
from autotune.worker.build import WorkloadFault, build_dataset, build_model, is_stream
from autotune.worker.conditions import BusyProbe, ConditionsProbe, HostLoadProbe, open_memory_watch
from autotune.worker.device import Device
from autotune.worker.extras.extra_steps import measure_after_window
from autotune.worker.failures import HangDump, StopProbe
from autotune.worker.feed import Delivery, Feed, LoopMoved
from autotune.worker.group import Group
from autotune.worker.loader import build_loader
from autotune.worker.nvml import Gpu, gpus_of
from autotune.worker.place import Place, Start
from autotune.worker.step import Trainer, open_trainer
from autotune.worker.window import Run, measure_window, warm_up

_LONGEST_AFTER_S = 60.0
"""Seconds: besides its steps, what follows the window takes a few. Source: our own convention."""
_STEPS_AFTER = 70
"""Most optimizer steps that follow the window (extra_steps.py); the profiled ones are slower."""


class EndedEarly(Exception):  # noqa: N818 - an outcome, not an error of ours
    """The parent has seen enough of a trial; the process lives on."""


def run_trial(
    job: TrialJob, workload: Workload, device: Device, place: Place, dump: HangDump, start: Start
) -> RankReport:
    """Measure a configuration as one rank of its group.

    Args:
        job: The configuration, the rules of its window, and the measurements that follow it.
        workload: The user's workload.
        device: The device of this rank.
        place: The trial's folder, and this rank's group.
        dump: Writes the stacks if the trial hangs.
        start: When the process started, and the deadline.
    """
    with ExitStack() as at_end:
        # Build what is trained, and measure the window.
        trainer, feed, first = _build(workload, job, device, place)
        if place.is_shared:  # else the workers end with the process
            at_end.callback(feed.stop)
        run = Run(feed, trainer, feed.queue_capacity, start.ends_at, group=place.group)
        run.longest_s = feed.start_s + feed.first_wait_s  # an epoch's restart may take as long
        if place.earlier_trials > 0:  # one-time work of the process is done
            run.first_steps = 1
        after_block = after_block_of(job, place, dump, run)
        measurement = measure(run, job.window, first, start, after_block)

        # Measure what explains the window. Without blocks, only the deadline shows a hang.
        dump.before_deadline()
        if job.extras != NO_EXTRAS:
            with ended_when_stuck(longest_after_s(measurement, job.config), place.report):
                measurement = measure_after_window(
                    run,
                    job.extras,
                    measurement,
                    lambda known: place.keep(of_rank(known, place, device)),
                    place.folder.path,
                )
        return of_rank(measurement, place, device)


def gpus_used(device: Device) -> tuple[Gpu, ...]:
    """Return NVML's view of the GPUs that this process uses."""
    return gpus_of(device.devices) if device.kind == "cuda" else ()


def _build(
    workload: Workload, job: TrialJob, device: Device, place: Place
) -> tuple[Trainer, Feed, Delivery]:
    """Build what the trial trains, start its loader, and return both with the first batch."""
    data = build_dataset(workload)
    config = job.config
    model = build_model(workload, config, device)
    loader = build_loader(workload, data, config, place.folder.path, place.group)
    feed = Feed(loader, is_shallow=True)
    first = feed.start()
    _refuse_repeated(feed.loader.dataset, first.batch, place.group)
    return open_trainer(workload, model, first.batch, config, device), feed, first


def _refuse_repeated(dataset: Any, batch: Any, group: Group) -> None:
    """Refuse an iterable dataset that gives each rank the same items: they would count several times.

    Raises:
        WorkloadFault: All ranks got the same first batch.
    """
    if group.size > 1 and is_stream(dataset) and group.is_equal(batch_fingerprint(batch)):
        raise WorkloadFault(
            f"an iterable dataset must share its items out among ranks, but all {group.size} got "
            "the same first batch; shard it by the environment's RANK and WORLD_SIZE, which are "
            "set in groups alone, or set strategy: single"
        )


def after_block_of(
    job: TrialJob, place: Place, dump: HangDump, run: Run
) -> Callable[[Block], None]:
    """Return the function to call after each block of the window.

    It sends the block to a parent that asks for it, and restarts the hang timer of a group.

    Args:
        job: Whether to send blocks.
        place: The trial's folder.
        dump: The hang timer.
        run: The run, whose longest block sets the timer.

    Returns:
        A function that, in a shared process, raises EndedEarly once the parent has seen enough.
    """
    is_followed = job.streams_blocks and place.rank == 0
    if is_followed and place.channel is None:
        place.connect()

    def after_block(block: Block) -> None:
        if is_followed:
            place.send({"block": block.model_dump()})
            if place.is_shared and place.receive(0.0):
                raise EndedEarly
        if run.group.size > 1:
            dump.unless_a_block_ends(run.group.most(run.longest_s))

    return after_block


def measure(
    run: Run, rules: WindowRules, first: Delivery, start: Start, on_block: Callable[[Block], None]
) -> Measurement:
    """Warm up, measure the window and derive its figures, before anything else is measured.

    Args:
        run: A run that was just started.
        rules: The rules of its window.
        first: The loader's first batch.
        start: When the process started, and what was on its devices before.
        on_block: Called after each block of the warm-up and the window.
    """
    arrived = perf_counter()
    device = run.trainer.device
    device.reset_peak()
    run.scale = run.trainer.scaler.get_scale()

    # Prepare the probes; NVML first, since the queue fills while it starts.
    gpus = gpus_used(device)
    busy = BusyProbe(gpus)
    conditions = ConditionsProbe(gpus, start.before, has_cuda=device.kind == "cuda")
    host = HostLoadProbe()
    stops = StopProbe()

    def at_edge() -> None:
        if run.tokens is not None:
            run.tokens.begin_window()
        stops.start()
        host.start()
        conditions.start()
        busy.start()  # last; stopped first, so that its span has no other calls to NVML

    # Warm up and measure the window.
    with open_memory_watch(device, run.feed.worker_pids) as memory_watch:

        def after_block(block: Block) -> None:
            memory_watch.after(block)
            on_block(block)

        def after_warm_up_block(block: Block) -> None:
            if not memory_watch.has_read_in_warm_up:
                memory_watch.read_pages(block.samples)
            on_block(block)

        run.tokens = token_count(first.batch, first.samples)
        warmed = warm_up(run, rules, first, after_warm_up_block)
        # only retries in the window count: before it the allocator settles
        retries = device.alloc_retries()
        try:
            window = measure_window(run, rules, warmed, at_edge, after_block)
        except (EndedEarly, LoopMoved):
            tuple(stops.stop())
            busy.stop(0.0)
            raise

    # Derive the figures of the window.
    stopped = tuple(stops.stop())
    ddp = run.trainer.config.ddp
    waited = wait_fraction(window, rules)
    busy_readings, fullness = busy.stop(waited)
    found = conditions.stop()
    ineffective = () if ddp is None else without_effect_here(ddp)
    window_samples = sum(block.samples for block in window.blocks)
    memory_watch.read_pages(window.warm_up_batches * first.samples + window_samples)
    memory = with_copies(device.peak_memory(retries), memory_watch.copied(), window)
    spread = assumed_variation(device.kind).of([window.is_held_by_device])
    throughput = with_run_variation(window_rate(window, rules), spread)
    disturbances = () if found is None else notes_on(found)
    return Measurement(
        samples_per_s=throughput.value,
        samples_per_s_ci=(throughput.low, throughput.high),
        busy_fraction=busy_readings[0].fraction,
        busy_source=busy_readings[0].source,
        busy_readings=busy_readings,
        fullness=fullness,
        conditions=found,
        host_load=host.stop(),
        data_wait_fraction=waited,
        peak_memory_bytes=memory.peak_bytes,
        startup_s=arrived - start.started,
        build_s=arrived - start.built_from,
        memory=memory,
        window=window,
        loss=float(run.loss),
        skipped_steps=run.skipped_steps,
        tokens=None if run.tokens is None else run.tokens.figures(),
        growth=memory_watch.growth(),
        notes=(*ineffective, *stopped, *disturbances),
    )


def of_rank(measurement: Measurement, place: Place, device: Device) -> RankReport:
    """Return the report of a measurement.

    Args:
        measurement: This rank's measurement.
        place: Its group; with several ranks the report has this rank's own figures.
        device: Its device.
    """
    if place.group.size > 1:
        own = RankFigures(
            rank=place.rank,
            host=place.host,
            device=str(device.torch_device),
            samples_per_s=measurement.samples_per_s,
            data_wait_fraction=measurement.data_wait_fraction,
            busy_fraction=measurement.busy_fraction,
            peak_memory_bytes=measurement.peak_memory_bytes,
            loader_ceiling=measurement.loader_ceiling,
            device_ceiling=measurement.device_ceiling,
        )
        measurement = measurement.model_copy(update={"ranks": (own,)})
    return RankReport(result=TrialResult(outcome="ok", measurement=measurement))


def longest_after_s(measurement: Measurement, config: TrainingConfig) -> float:
    """Return the seconds after which measurements that follow a window count as hanging.

    Args:
        measurement: The window's measurement: longer steps take more time.
        config: The trial's settings.
    """
    step_s = config.grad_accum_steps * measurement.window.batch_s
    return _LONGEST_AFTER_S + _STEPS_AFTER * step_s


@contextmanager
def ended_when_stuck(longest_s: float, report: Path) -> Iterator[None]:
    """End the process, with the report that was kept, if the code in this context hangs.

    The trial's deadline may be much later.

    Args:
        longest_s: Seconds after which the process ends.
        report: The kept report.
    """
    begun = perf_counter()

    def end() -> None:
        try:
            with suppress(OSError, ValueError):  # the user's code may have closed it
                faulthandler.dump_traceback()
            # the user's code may have overwritten it
            with suppress(OSError, ValueError, RunFolderError):
                kept = read_model(report, RankReport)
                if kept.result.measurement is not None:
                    after = {"after_s": perf_counter() - begun}  # time in which the process hung
                    measurement = kept.result.measurement.model_copy(update=after)
                    write_model(report, kept.with_result(measurement=measurement))
        finally:
            os._exit(0)

    timer = Timer(longest_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
