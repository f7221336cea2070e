"""A rank's whole life: read the job, build, warm up, measure, answer. Whatever happens becomes one RankReport."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import IterableDataset

from autotune.analysis.rates import between_runs, rate_of
from autotune.errors import RunFolderError
from autotune.protocol.messages import (
    NO_EXTRAS,
    TRIAL_VARIABLE,
    Job,
    RankReport,
    TrialFolder,
    WindowRules,
    read_model,
    read_payload,
    write_model,
)
from autotune.records.conditions import DeviceConditions, remarks_on
from autotune.records.diagnosis import Curves
from autotune.records.measurement import Block, Measurement
from autotune.records.ranks import RankFigures
from autotune.records.trial import TrialResult
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from autotune.worker.after_window.extra_steps import measure_after
from autotune.worker.failure.hang_dump import LastWords
from autotune.worker.failure.kernel_failures import block_launches
from autotune.worker.failure.outcome import outcome_of
from autotune.worker.forks import refuse_bad_fork
from autotune.worker.jobs.curves import trace_curves
from autotune.worker.jobs.precision import compare_to_float32
from autotune.worker.jobs.probe import probe
from autotune.worker.jobs.stress import train_on_largest
from autotune.worker.measure.conditions import BEFORE_S, ConditionsProbe, Others, conditions_before, others_before
from autotune.worker.measure.feed import Delivery, Feed
from autotune.worker.measure.loop import Run, measure_window, warm_up
from autotune.worker.measure.nvml import Gpu, gpus_of
from autotune.worker.measure.step import Trainer, batch_fingerprint, infer_step, make_trainer
from autotune.worker.measure.utilization import BusyProbe
from autotune.worker.setup.build import (
    WorkloadFault,
    build_dataset,
    build_loader,
    build_model,
    build_optimizer,
    resolved,
    seed_all,
)
from autotune.worker.setup.device import Device, describe, open_device
from autotune.worker.setup.machine import usable_cores
from autotune.worker.setup.parallel import without_effect_here
from autotune.worker.setup.process_group import ALONE, Group, open_group

__all__ = ["run_rank"]

_LONGEST_AFTER_S = 60.0  # what follows the window takes a few seconds beside its steps, unless the user's code hangs
_STEPS_AFTER = 40  # optimizer steps that it takes at the most, the profiled ones slower than others
_DEADLINE_SHARE = 0.85  # of the deadline: a window that is late is ended, not lost


@dataclass(slots=True)
class _Place:
    """Where this rank stands: its trial's folder, its numbers, and the ranks beside it once they have met."""

    folder: TrialFolder
    rank: int
    local_rank: int
    """Its number among the ranks on this host: that of its device."""
    host: int = 0
    group: Group = ALONE

    @property
    def report(self) -> Path:
        """This rank's report."""
        return self.folder.report_of(self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartTimes:
    """How long a trial took to its first batch, and the user's own part of that."""

    startup_s: float
    build_s: float


def run_rank(folder: TrialFolder, started: float, local_rank: int = 0) -> int:
    """Do the job in a trial's folder and write the report; the exit code says only whether a report was written.

    `local_rank` counts the ranks on this host, which are all that there are unless the job says otherwise. `started` is
    when the process began, by perf_counter: a fresh interpreter spends seconds of its deadline on imports.
    """
    job = read_model(folder.job, Job)
    _enter_callers_world(job)
    faulthandler.enable()
    first, host = (0, 0) if job.part is None else (job.part.first_rank, job.part.host)
    rank = first + local_rank
    stack = folder.stack_of(rank).open("w") if job.config.process_count > 1 else sys.stderr
    words = LastWords(file=stack, ends_at=started + job.deadline_s)
    words.before_deadline()
    place = _Place(folder, rank, local_rank, host)
    report = outcome_of(lambda: _work(job, place, words, started))
    write_model(place.report, report.model_copy(update={"rank": place.rank}))
    if report.result.outcome == "ok":
        with suppress(RuntimeError):  # another rank has failed meanwhile, and says so itself
            place.group.wait()  # who is done first stays: the end of a rank is the end of its group
    return 0


def _work(job: Job, place: _Place, words: LastWords, started: float) -> RankReport:
    refuse_bad_fork(job.device)
    folder, ranks = place.folder, job.config.process_count if job.kind == "trial" else 1
    nearest = place.local_rank if ranks > 1 else 0
    count = job.config.world_size if job.config.strategy == "dp" and job.kind == "trial" else 1
    before = _others_before(job, nearest, count, started)
    device = open_device(job.device, nearest, count=count, limit_bytes=job.limit_bytes)
    if job.kind == "describe":
        return RankReport(
            result=TrialResult(outcome="ok"), environment=describe(device, job_blocks=job.blocks_launches)
        )
    threads = job.config.intra_op_threads
    if threads is not None or ranks > 1:
        here = ranks if job.part is None else job.part.ranks
        torch.set_num_threads(threads or max(1, usable_cores() // here))
    if job.kind == "trial":
        place.group = open_group(job, place.rank, device)
    device.cap_memory()  # after the group has met: NCCL's buffers lie outside torch
    seed_all(job.seed)
    built_from = perf_counter()
    workload = resolved(read_payload(job.payload))
    if job.kind == "probe":
        facts = probe(workload, job.config, device, folder.path)
        return RankReport(
            result=TrialResult(outcome="ok"),
            environment=describe(device, job_blocks=job.blocks_launches),
            facts=facts,
            conditions=conditions_before(_gpus_of(device), before),
        )
    ends_at = started + _DEADLINE_SHARE * job.deadline_s
    if job.kind == "guard":
        figures = compare_to_float32(workload, job, device, folder.path, ends_at)
        return RankReport(result=TrialResult(outcome="ok"), guard=figures)
    if job.kind == "curves":
        curves = trace_curves(
            workload, job, device, folder.path, ends_at, keep=lambda known: _keep(place, _traced(known))
        )
        return _traced(curves)
    if job.kind == "stress":
        return RankReport(
            result=TrialResult(outcome="ok"), stress=train_on_largest(workload, job, device, folder.path, ends_at)
        )
    trainer, feed, first = _build(workload, job.config, device, place)
    arrived = perf_counter()
    run = Run(feed, trainer, feed.queue_capacity, ends_at, group=place.group)
    run.longest_s = feed.start_s + feed.first_wait_s  # an epoch's restart may take as long
    times = _StartTimes(startup_s=arrived - started, build_s=arrived - built_from)
    measurement = _measure(run, job.window, first, times, _after_block(job, place, words, run), before)
    words.before_deadline()  # what follows has no blocks
    if job.extras != NO_EXTRAS:
        with _ended_when_stuck(_longest_after_s(measurement, job.config), place.report):
            measurement = measure_after(
                run, trainer, job.extras, measurement, lambda known: _keep(place, _of_rank(known, place, device))
            )
    return _of_rank(measurement, place, device)


def _others_before(job: Job, first: int, count: int, started: float) -> Mapping[str, Others]:
    """What uses this rank's devices, so many from `first` on, before it opens them.

    A probe is the first of a search to do so; a trial comes right after another one, whose kernels are not others'.
    """
    if job.kind not in {"probe", "trial"}:
        return {}
    quiet_s = BEFORE_S if job.kind == "probe" else perf_counter() - started
    return others_before(job.device, first, count, quiet_s)


def _build(workload: Workload, config: TrainingConfig, device: Device, place: _Place) -> tuple[Trainer, Feed, Delivery]:
    dataset = build_dataset(workload)
    model = build_model(workload, config, device)
    optimizer = build_optimizer(workload, model, config.lr)
    feed = Feed(build_loader(workload, dataset, config, place.folder.path, place.group))
    first = feed.start()
    _refuse_repeated(dataset, first.batch, place.group)
    return make_trainer(model, optimizer, infer_step(workload, first.batch), config, device), feed, first


def _refuse_repeated(dataset: Any, batch: Any, group: Group) -> None:
    """Refuse an iterable dataset that gives each rank the same items: its rate would count them several times."""
    is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if group.size > 1 and is_iterable and group.is_equal(batch_fingerprint(batch)):
        raise WorkloadFault(
            f"an iterable dataset must share its items out among ranks, but all {group.size} got the same first batch; "
            "shard it by the environment's RANK and WORLD_SIZE, which are set in groups alone, or set strategy: single"
        )


def _after_block(job: Job, place: _Place, words: LastWords, run: Run) -> Callable[[Block], None]:
    """What is done after each block of the window: the parent is told, and a group's next one is waited for."""
    tell = _block_teller(job, place)

    def after_block(block: Block) -> None:
        tell(block)
        words.unless_a_block_ends(run.group.most(run.longest_s))

    return tell if run.group.size == 1 else after_block


def _block_teller(job: Job, place: _Place) -> Callable[[Block], None]:
    """A function that tells the parent of a block, where it has asked for them and this is the rank to do so.

    The file stays open: opened and closed for each block, it would hold up the loop where the folder is far away.
    """
    if not job.streams_blocks or place.rank != 0:
        return lambda _: None
    try:
        descriptor = os.open(place.folder.blocks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:  # a full disk: nobody stops the trial early, that is all
        return lambda _: None

    def tell(block: Block) -> None:
        with suppress(OSError):  # as above; a line may be cut off
            os.write(descriptor, f"{block.model_dump_json()}\n".encode())

    return tell


def _measure(
    run: Run,
    rules: WindowRules,
    first: Delivery,
    times: _StartTimes,
    on_block: Callable[[Block], None],
    before: Mapping[str, Others],
) -> Measurement:
    """Warm up, measure, and derive. What is read of the window is read here, before anything else is measured."""
    device = run.trainer.device
    device.reset_peak()
    run.scale = run.trainer.scaler.get_scale()
    gpus = _gpus_of(device)  # NVML first: its start lets the queue fill
    busy, conditions = BusyProbe(gpus), ConditionsProbe(gpus, before, has_cuda=device.kind == "cuda")
    warmth = warm_up(run, rules, first)
    retries = device.alloc_retries()  # of the window alone: what it took to settle down is no fault

    def at_edge() -> None:
        conditions.start()
        busy.start()  # last, as it is first to end: what NVML is asked beside lies outside of its span

    window = measure_window(run, rules, warmth, at_edge, on_block)
    wait_fraction = _data_wait_fraction(window.blocks)
    busyness, found = busy.stop(wait_fraction), conditions.stop()
    memory, rate = device.peak_memory(retries), between_runs(rate_of(window), device.kind)
    return Measurement(
        samples_per_s=rate.value,
        samples_per_s_ci=(rate.low, rate.high),
        busy_fraction=busyness.reading.fraction,
        busy_source=busyness.reading.source,
        busy_readings=busyness.readings,
        fullness=busyness.fullness,
        conditions=found,
        data_wait_fraction=wait_fraction,
        peak_memory_bytes=memory.peak_bytes,
        startup_s=times.startup_s,
        build_s=times.build_s,
        memory=memory,
        window=window,
        loss=float(run.loss),
        skipped_steps=run.skipped_steps,
        remarks=_remarks(run.trainer.config, found),
    )


def _gpus_of(device: Device) -> tuple[Gpu, ...]:
    """Those that this process drives, as NVML knows them."""
    return gpus_of(device.devices) if device.kind == "cuda" else ()


def _remarks(config: TrainingConfig, conditions: DeviceConditions | None) -> tuple[str, ...]:
    """What had no effect, and what disturbed the window."""
    ineffective = () if config.ddp is None else without_effect_here(config.ddp)
    return (*ineffective, *(() if conditions is None else remarks_on(conditions)))


def _success(measurement: Measurement) -> RankReport:
    return RankReport(result=TrialResult(outcome="ok", measurement=measurement))


def _traced(curves: Curves) -> RankReport:
    return RankReport(result=TrialResult(outcome="ok"), curves=curves)


def _of_rank(measurement: Measurement, place: _Place, device: Device) -> RankReport:
    """A success; where there are several ranks, with this one's own figures beside what becomes the group's."""
    if place.group.size == 1:
        return _success(measurement)
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
    return _success(measurement.model_copy(update={"ranks": (own,)}))


def _keep(place: _Place, report: RankReport) -> None:
    """Write what is known so far: it counts, whatever becomes of this process."""
    with suppress(RunFolderError):  # a full disk: the last report may still find room
        write_model(place.report, report.model_copy(update={"rank": place.rank}))


def _keep_after_s(report: Path, after_s: float) -> None:
    """Put the time since the window into the report that was kept: what hangs is none of the trial's own."""
    with suppress(OSError, ValueError, RunFolderError):  # the user's code may have written over it
        kept = read_model(report, RankReport)
        if kept.result.measurement is not None:
            measurement = kept.result.measurement.model_copy(update={"after_s": after_s})
            write_model(report, kept.model_copy(update={"result": _success(measurement).result}))


def _longest_after_s(measurement: Measurement, config: TrainingConfig) -> float:
    """Seconds after which what follows a window is taken to hang: long steps have longer."""
    blocks = measurement.blocks
    batch_s = sum(block.seconds for block in blocks) / sum(block.batches for block in blocks)
    return _LONGEST_AFTER_S + _STEPS_AFTER * config.grad_accum_steps * batch_s


@contextmanager
def _ended_when_stuck(longest_s: float, report: Path) -> Iterator[None]:
    """End the process, with the report that was kept, where what follows a window hangs: a deadline may be far off."""
    begun = perf_counter()

    def end() -> None:
        try:
            with suppress(OSError, ValueError):  # the user's code may have closed it
                faulthandler.dump_traceback()
            _keep_after_s(report, perf_counter() - begun)
        finally:
            os._exit(0)

    timer = Timer(longest_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _enter_callers_world(job: Job) -> None:
    """The caller's folder, search path and environment, as his own run would have them, before any call to a device."""
    os.environ[TRIAL_VARIABLE] = "1"
    if job.blocks_launches:
        block_launches()
    os.environ.pop("PYTHONPATH", None)
    if job.python_path is not None:
        os.environ["PYTHONPATH"] = job.python_path
    sys.path[:] = job.sys_path
    os.chdir(job.working_directory)


def _data_wait_fraction(blocks: tuple[Block, ...]) -> float:
    return min(1.0, sum(block.data_wait_s for block in blocks) / sum(block.seconds for block in blocks))
