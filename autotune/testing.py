"""Fakes for tests of code that uses autotune: a launcher over a cost model, and made-up figures.

`autotune.search(model, dataset, launcher=FakeLauncher(cost_model))` runs a whole search in
milliseconds. Only the trials' processes are fake: the launcher reads each trial's job and writes
the report that a rank would write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from threading import Lock
from typing import Literal, TypeAlias

from autotune.config.environment import Environment
from autotune.config.plan import OptimizerFacts, WorkloadFacts
from autotune.config.training_config import (
    LOADER_SETTINGS,
    TORCH_BUCKET_CAP_MB,
    TrainingConfig,
)
from autotune.launch.launcher import Exit, Launch
from autotune.models.forecast import DEVICE_SETTINGS
from autotune.models.statistics import window_rate
from autotune.note import Note
from autotune.policy import WindowRules
from autotune.protocol.disk import write_model
from autotune.protocol.messages import (
    CurvesJob,
    DescribeJob,
    PrecisionJob,
    ProbeJob,
    RankReport,
    StressJob,
    TrialJob,
    read_job,
)
from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
from autotune.records.ceilings import Ceiling, host_ceiling_of
from autotune.records.measurement import (
    Block,
    Ceilings,
    Communication,
    DeviceConditions,
    HostLoad,
    Measurement,
    MemorySample,
    RankFigures,
    Window,
)
from autotune.records.result import CurvePoint, Curves, changed_settings
from autotune.records.trial import (
    GUARD_STEPS,
    Failure,
    Outcome,
    PrecisionFigures,
    StressFigures,
    TrialResult,
)
from autotune.settings_table import Side

__all__ = [
    "CostModel",
    "FakeLauncher",
    "FakeTrial",
    "analytic_cost",
    "fake_environment",
    "fake_facts",
]


# The cost model: the figures of a made-up trial of a configuration.


# about ResNet-18's gradients, over PCIe 4.0 x16
_GRADIENT_BYTES = 64 * 2**20
_LINK_BYTES_PER_S = 20 * 2**30
_BACKWARD_SHARE = 2 / 3
"""Share of a batch's time in the backward pass, which computes twice as much as the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTrial:
    """The figures of a made-up trial; of a distributed one, those of all ranks together."""

    samples_per_s: float = 0.0
    peak_memory_bytes: int = 0
    """Peak memory of each rank."""
    busy_fraction: float = 1.0
    outcome: Outcome = "ok"
    reason: str = ""
    failure: Failure | None = None
    startup_s: float = 0.1
    hangs: bool = False
    """True: the trial hangs until its deadline."""
    loader_ceiling: float | None = None
    """Throughput of the loader alone, in samples/s. None: twice that of the trial; unknown in
    curves."""
    device_ceiling: float | None = None
    """Throughput of the device alone, in samples/s. None: the trial's over its busy fraction;
    unknown in curves if that is 1."""
    copy_ceiling: float | None = None
    """Throughput of copies to the device alone, in samples/s; None: not measured."""
    host_ceiling: float | None = None
    """Throughput of the host's launches, in samples/s: an idle device waits for the host, or for data
    if the loader is slower. None: an idle device waits for data."""
    passes_guard: bool = True
    """True if the trial passes the precision guard; else its last loss is `broken_loss`."""
    broken_loss: float = inf
    stress_peak_bytes: int | None = None
    """Peak memory of a stress run; None: that of the trial."""
    alloc_retries: int | None = None
    """Retries of the allocator in the window and in a stress run; None: not counted."""
    communication: Communication | None = None
    """Times of exchanging gradients; None: not measured."""
    loader_cpu_s: float | None = None
    """CPU seconds per sample of the loader alone; None: not counted."""
    device_cpu_s: float | None = None
    """CPU seconds per sample of the device alone; None: not counted."""
    own_cores: float | None = None
    """Cores that the trial keeps busy; None: not counted."""
    others_cores: float = 0.0
    """Cores that other processes keep busy meanwhile."""


CostModel = Callable[[TrainingConfig], FakeTrial]
"""Returns the figures of a trial of a configuration."""


def analytic_cost(config: TrainingConfig) -> FakeTrial:
    """Return the figures of a simple machine: the slower of loader and device; memory linear in the micro batch.

    An item takes 1 ms to load, by up to eight workers of a process in parallel, and sixteen of all
    ranks together. A batch takes the device 2 ms and 20 us per sample, half of that in a 16-bit
    precision. A sample needs 4 MiB of memory, on top of 512 MiB.

    Ranks exchange 64 MiB of gradients per step over a ring of 20 GiB/s, bucket by bucket: all but
    the last bucket may overlap with the backward pass, two thirds of a batch's time. DataParallel
    copies the model to each device again for each batch, 1 ms per device.
    """
    processes = config.process_count
    devices = config.world_size
    micro = config.micro_batch_size
    loader = processes * 1000.0 * min(max(1, config.num_workers), 8, 16 / processes)
    speed = 2.0 if config.is_half else 1.0
    step_s = 0.002 + 20e-6 * micro / speed
    if config.is_dp:
        step_s += devices * 1e-3
    exchange = None
    exposed_s = 0.0
    if processes > 1:
        exchange = _communication(config, step_s)
        exposed_s = exchange.exposed_s / config.grad_accum_steps
    device = devices * (micro / step_s)
    group = devices * (micro / (step_s + exposed_s))
    rate = 1 / (1 / loader + 1 / group)  # without workers, loading and training take turns
    if config.has_workers:
        rate = min(loader, group)
    return FakeTrial(
        samples_per_s=rate,
        peak_memory_bytes=512 * 2**20 + micro * 4 * 2**20 + _bucket_bytes(config),
        busy_fraction=rate / device,
        loader_ceiling=loader,
        device_ceiling=device,
        communication=exchange,
    )


def _communication(config: TrainingConfig, batch_s: float) -> Communication:
    """Return the times of a ring all-reduce of the gradients, after the last of a step's batches."""
    ddp = config.ddp_settings
    ranks = config.world_size
    buckets = ceil(_GRADIENT_BYTES / 2**20 / (ddp.bucket_cap_mb or TORCH_BUCKET_CAP_MB))
    sent_bytes = _GRADIENT_BYTES if ddp.comm_hook is None else _GRADIENT_BYTES // 2
    exchange_s = buckets * 100e-6 + 2 * (ranks - 1) / ranks * sent_bytes / _LINK_BYTES_PER_S
    hidden_s = min(_BACKWARD_SHARE * batch_s, exchange_s * (1 - 1 / buckets))
    alone_s = batch_s * config.grad_accum_steps
    return Communication(
        step_s=alone_s + exchange_s - hidden_s,
        step_alone_s=alone_s,
        exchange_s=exchange_s,
        bytes_exchanged=sent_bytes,
    )


def _bucket_bytes(config: TrainingConfig) -> int:
    """Return the memory of a rank's buckets, unless gradients are views of them."""
    if config.process_count == 1 or config.ddp_settings.gradient_as_bucket_view:
        return 0
    return _GRADIENT_BYTES


# Made-up figures as a rank would report them: machine, workload, measurements, ceilings, checks.


BLOCKS = 10
"""Blocks of each made-up window, enough for an interval by batch means. Source: our own convention."""


def fake_environment(
    *, device_memory_bytes: int = 16 * 2**30, cores: int = 4, device_count: int = 1
) -> Environment:
    """Return a made-up machine with one CUDA device, or with several equal ones."""
    return Environment(
        device="cuda:0",
        device_kind="cuda",
        device_name="Fake GPU",
        device_memory_bytes=device_memory_bytes,
        device_count=device_count,
        native_amp_dtypes=("float32", "tf32", "bfloat16", "float16"),
        driver="0.0",
        cores=cores,
        ram_bytes=64 * 2**30,
        platform="fake",
        python="3",
        torch="2",
        cuda="0",
        versions={},
    )


def fake_facts(*, dataset_length: int | None = 100_000) -> WorkloadFacts:
    """Return a made-up map-style workload trained with SGD."""
    return WorkloadFacts(
        dataset_length=dataset_length,
        is_iterable=False,
        has_4d_input=False,
        parameter_count=1000,
        optimizer=OptimizerFacts(name="SGD"),
        step_source="made up",
    )


def fake_measurement(
    trial: FakeTrial,
    job: TrialJob,
    noise: Callable[[], float],
    environment: Environment,
    conditions: DeviceConditions | None,
) -> Measurement:
    """Return the measurement of a trial that runs well.

    Args:
        trial: Its figures.
        job: Its job, with the extras to measure.
        noise: Returns factors around 1.
        environment: Its machine.
        conditions: The device's conditions to report.
    """
    window = _window(trial.samples_per_s * noise(), noise, job)
    if environment.device_kind != "cpu":
        host_ahead_s = window.batch_s if trial.busy_fraction == 1 else 0.0
        window = window.model_copy(update={"host_ahead_s": host_ahead_s})
    rate = window_rate(window)
    extras = job.extras
    ceilings = Ceilings(
        loader=_alone(trial, "loader") if extras.loader_ceiling else None,
        device=_alone(trial, "device") if extras.device_ceiling else None,
        copy=_alone(trial, "copy") if extras.copy_ceiling else None,
    )
    has_batches = extras.device_ceiling or extras.breakdown
    measurement = Measurement(
        samples_per_s=rate.value,
        samples_per_s_ci=(rate.low, rate.high),
        busy_fraction=trial.busy_fraction,
        busy_source="made up",
        conditions=conditions,
        host_load=_host_load(trial, environment),
        data_wait_fraction=0.0 if _waits_for_host(trial) else 1 - trial.busy_fraction,
        peak_memory_bytes=trial.peak_memory_bytes,
        startup_s=trial.startup_s,
        build_s=0.0,
        memory=_memory(trial, trial.peak_memory_bytes),
        window=window,
        loss=1.0,
        ceilings=ceilings,
        loader_ceiling=ceilings.loader and ceilings.loader.samples_per_s,
        device_ceiling=ceilings.device and ceilings.device.samples_per_s,
        copy_ceiling=ceilings.copy and ceilings.copy.samples_per_s,
        host_ceiling=host_ceiling_of(ceilings.device, take_s=None),
        breakdown=_breakdown(trial) if extras.breakdown else None,
        loader_costs=_loader_costs(trial) if extras.breakdown else None,
        communication=trial.communication if has_batches else None,
    )
    ranks = job.config.process_count
    return measurement if ranks == 1 else _as_group(measurement, ranks, environment)


def _host_load(trial: FakeTrial, environment: Environment) -> HostLoad | None:
    if trial.own_cores is None:
        return None
    return HostLoad(
        seconds=1.0,
        cores=environment.cores,
        reachable_cores=environment.cores,
        busy_s=trial.own_cores + trial.others_cores,
        own_s=trial.own_cores,
        stolen_s=0.0,
    )


def _as_group(measurement: Measurement, ranks: int, environment: Environment) -> Measurement:
    """Return a group's measurement with the figures of its ranks, each with an equal part."""
    kind = environment.device.partition(":")[0]
    devices = ["cpu" if kind == "cpu" else f"{kind}:{rank}" for rank in range(ranks)]
    loader = measurement.loader_ceiling
    device = measurement.device_ceiling
    figures = tuple(
        RankFigures(
            rank=rank,
            device=name,
            samples_per_s=measurement.samples_per_s / ranks,
            data_wait_fraction=measurement.data_wait_fraction,
            busy_fraction=measurement.busy_fraction,
            peak_memory_bytes=measurement.peak_memory_bytes,
            loader_ceiling=loader and loader / ranks,
            device_ceiling=device and device / ranks,
        )
        for rank, name in enumerate(devices)
    )
    return measurement.model_copy(update={"ranks": figures})


def _alone(trial: FakeTrial, side: Side) -> Ceiling | None:
    """Return the ceiling of a side; None for a copy's if the trial has none."""
    if side == "loader":
        return _ceiling(trial.loader_ceiling or 2 * trial.samples_per_s)
    if side == "copy":
        return _ceiling(trial.copy_ceiling) if trial.copy_ceiling else None
    on_device = trial.device_ceiling or trial.samples_per_s / max(trial.busy_fraction, 1e-9)
    ceiling = _ceiling(on_device)
    if trial.host_ceiling is None:
        return ceiling
    host_s = on_device / trial.host_ceiling  # seconds to launch its single batch
    return ceiling.model_copy(update={"host_s": host_s})


def _ceiling(samples_per_s: float) -> Ceiling:
    return Ceiling(
        samples_per_s=samples_per_s, samples=max(1, round(samples_per_s)), seconds=1.0, batches=1
    )


def _waits_for_host(trial: FakeTrial) -> bool:
    loader = trial.loader_ceiling or 2 * trial.samples_per_s
    return trial.host_ceiling is not None and trial.host_ceiling < loader


def _breakdown(trial: FakeTrial) -> TimeBreakdown:
    idle = Share(fraction=1 - trial.busy_fraction, source="made up")
    busy = Share(fraction=trial.busy_fraction, source="made up")
    nothing = Share(fraction=0.0, source="made up")
    is_host_bound = _waits_for_host(trial)
    return TimeBreakdown(
        data_wait=nothing if is_host_bound else idle,
        idle=idle if is_host_bound else nothing,
        device_copy=nothing,
        compute=busy,
        synchronise=nothing,
    )


def _loader_costs(trial: FakeTrial) -> LoaderCosts:
    item_s = 1 / (trial.loader_ceiling or 2 * trial.samples_per_s)
    return LoaderCosts(
        items=100,
        item_s=item_s,
        item_cpu_s=item_s,
        item_median_s=item_s,
        item_p99_s=item_s,
        item_slowest_s=item_s,
        slow_tail_fraction=0.0,
        disk_bytes_per_item=0.0,
        item_bytes=1024.0,
        collate_s=1e-4,
    )


def fake_guard(trial: FakeTrial, config: TrainingConfig) -> PrecisionFigures:
    """Return the figures of the precision guard."""
    losses = tuple(1.0 / (step + 1) for step in range(GUARD_STEPS))
    return PrecisionFigures(
        steps=GUARD_STEPS,
        micro_batch_size=config.micro_batch_size,
        reference_losses=losses,
        losses=losses if trial.passes_guard else (*losses[:-1], trial.broken_loss),
        gradient_cosine=1.0,
        repeat_cosine=1.0,
        repeat_deviation=0.0,
    )


def fake_stress(trial: FakeTrial) -> StressFigures:
    """Return the figures of a run on the largest samples."""
    return StressFigures(
        steps=10,
        seconds=1.0,
        items_seen=100,
        median_item_bytes=1024.0,
        largest_item_bytes=1024,
        memory=_memory(trial, trial.stress_peak_bytes or trial.peak_memory_bytes),
    )


def _memory(trial: FakeTrial, peak_bytes: int) -> MemorySample:
    return MemorySample(peak_bytes=peak_bytes, source="made up", alloc_retries=trial.alloc_retries)


def _window(level: float, noise: Callable[[], float], job: TrialJob) -> Window:
    """Return a window of blocks around a throughput, in samples/s."""
    together = job.config.micro_batch_size * job.config.world_size
    batches = max(1, round(level * job.window.block_s / together))
    samples = batches * together
    durations = [samples / (level * noise()) for _ in range(BLOCKS)]
    blocks = [
        Block(samples=samples, batches=batches, seconds=took, data_wait_s=0.0) for took in durations
    ]
    return fake_window(blocks, "precision")


def fake_window(
    blocks: Sequence[Block], stopped_by: Literal["precision", "time", "deadline"]
) -> Window:
    """Return an undisturbed window of these blocks, without prefetched batches and without an epoch's end."""
    return Window(
        blocks=tuple(blocks),
        whole_epochs=False,
        epoch_samples=None,
        queue_capacity=0,
        queue_at_start=0,
        queue_at_end=0,
        warm_up_batches=1,
        warm_up_s=0.0,
        is_drained=True,
        is_steady=True,
        stopped_by=stopped_by,
    )


# The fake launcher.


_SETTINGS: dict[Side, Iterable[str]] = {
    "loader": {*LOADER_SETTINGS, "micro_batch_size", "max_tokens"},
    "device": DEVICE_SETTINGS,
    "copy": {"pin_memory"},
}
"""Settings in which the points of a side's curve may differ."""
_DONE = TrialResult(outcome="ok")
_AnyJob: TypeAlias = TrialJob | PrecisionJob | CurvesJob | StressJob


@dataclass(slots=True)
class FakeLauncher:
    """Launcher that reports the figures of a cost model, with relative noise between trials and between blocks.

    Rank 0 reports for all ranks of a group, which are equal. A trial takes no real time;
    `Exit.wall_s` is the time it would take on a machine of its own. Its noise depends on the seed
    and on its place among the trials launched, which with several slots depends on the threads.
    The launcher may be called from several threads.
    """

    cost: CostModel = analytic_cost
    noise: float = 0.005
    seed: int = 0
    environment: Environment = field(default_factory=fake_environment)
    facts: WorkloadFacts = field(default_factory=fake_facts)
    launched: list[TrainingConfig] = field(default_factory=list)
    """Configurations of all trials so far, repeats included."""
    jobs: list[_AnyJob] = field(default_factory=list)
    """All jobs but probes and descriptions: trials, guards, curves, stress runs."""
    slots: int = 1
    """Trials that may run at once, as if on as many equal machines."""
    notes: tuple[Note, ...] = ()
    """Notes of machines that are not used; there are none."""
    conditions: DeviceConditions | None = None
    """Conditions of the device that the probe and each trial report."""
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def launch(self, launch: Launch) -> Exit:
        """Write the report of a made-up job."""
        job = read_job(launch.folder.job)
        launch.log.touch(mode=0o600)
        if isinstance(job, DescribeJob | ProbeJob):
            report = RankReport(
                result=_DONE,
                environment=self.environment,
                facts=self.facts,
                conditions=self.conditions,
            )
            write_model(launch.folder.report, report)
            return Exit(code=0, wall_s=0.0)
        with self._lock:
            self.jobs.append(job)
            if isinstance(job, TrialJob):
                self.launched.append(job.config)
            place = len(self.launched)
        trial = self.cost(job.config)
        if trial.hangs or trial.startup_s > launch.deadline_s:
            return Exit(code=None, ended_for="deadline", wall_s=launch.deadline_s)
        report = self._answer(trial, job, place)
        block_s = WindowRules().block_s
        if isinstance(job, TrialJob):
            block_s = job.window.block_s
            measurement = report.result.measurement
            if job.streams_blocks and measurement is not None:
                lost_after = _stream(measurement, job, launch)
                if lost_after is not None:
                    wall_s = trial.startup_s + lost_after * block_s
                    return Exit(code=None, ended_for="cancelled", wall_s=wall_s)
        write_model(launch.folder.report, report)
        return Exit(code=0, wall_s=trial.startup_s + block_s * BLOCKS)

    def close(self) -> None:
        """Do nothing; no process runs."""

    def _answer(self, trial: FakeTrial, job: _AnyJob, place: int) -> RankReport:
        if trial.outcome != "ok":
            failed = TrialResult(outcome=trial.outcome, reason=trial.reason, failure=trial.failure)
            return RankReport(result=failed)
        match job:
            case TrialJob():
                noise = partial(random.Random(f"{self.seed}/{place}").gauss, 1, self.noise)  # noqa: S311 - made-up noise
                measurement = fake_measurement(trial, job, noise, self.environment, self.conditions)
                return RankReport(result=TrialResult(outcome="ok", measurement=measurement))
            case PrecisionJob():
                return RankReport(result=_DONE, guard=fake_guard(trial, job.config))
            case StressJob():
                return RankReport(result=_DONE, stress=fake_stress(trial))
            case CurvesJob():
                return RankReport(result=_DONE, curves=self._curves(job))

    def _curves(self, job: CurvesJob) -> Curves:
        """Return the points of the sides that each variation changes, the job's own configuration first."""
        loader = {job.config: self._point("loader", job.config, job)}
        device = {job.config: self._point("device", job.config, job)}
        for config in job.variations:
            names = changed_settings(config, job.config).keys()
            if not names.isdisjoint(LOADER_SETTINGS):
                loader[config] = self._point("loader", config, job)
            elif names & DEVICE_SETTINGS:
                device[config] = self._point("device", config, job)
        return Curves(
            loader=tuple(loader.values()), device=tuple(device.values()), copy=self._copies(job)
        )

    def _copies(self, job: CurvesJob) -> tuple[CurvePoint, ...]:
        """Return the points of copies from pageable and from pinned memory, if the cost model has any."""
        other = job.config.model_copy(update={"pin_memory": not job.config.pin_memory})
        known = [config for config in (job.config, other) if self.cost(config).copy_ceiling]
        return tuple(self._point("copy", config, job) for config in known)

    def _point(self, side: Side, config: TrainingConfig, job: CurvesJob) -> CurvePoint:
        """Return a side's point: a known one, else that of the cost model, else the reason why it has none."""
        changed = changed_settings(config, job.config).items()
        changes: dict[str, object] = {
            name: after for name, (_, after) in changed if name in _SETTINGS[side]
        }
        if job.known is not None:
            points: tuple[CurvePoint, ...] = getattr(job.known, side)
            for known in points:
                if known.changes == changes:
                    return known
        trial = self.cost(config)
        limit = job.process.limit_bytes
        peak = trial.peak_memory_bytes if side == "device" else None
        is_unknown = {
            "loader": trial.loader_ceiling is None,
            "device": trial.device_ceiling is None and trial.busy_fraction == 1,
            "copy": False,
        }
        ceiling = None
        reason = ""
        if trial.outcome != "ok" or trial.hangs:
            peak = None
            reason = trial.reason or trial.outcome
        elif peak is not None and limit is not None and peak > limit:
            peak = None
            reason = "the device ran out of memory"
        elif is_unknown[side]:
            reason = "the cost model does not say"
        else:
            ceiling = _alone(trial, side)
        cpu_s = None
        if ceiling is not None:
            cpu_s = {"loader": trial.loader_cpu_s, "device": trial.device_cpu_s}.get(side)
        return CurvePoint(
            changes=changes,
            ceiling=ceiling,
            cpu_s_per_sample=cpu_s,
            reason=reason,
            peak_memory_bytes=peak,
        )


def _stream(measurement: Measurement, job: TrialJob, launch: Launch) -> int | None:
    """Add the window's blocks as rank 0 would; return the number after which the parent ends the trial."""
    for number, block in enumerate(measurement.blocks, start=1):
        own = block.model_copy(update={"samples": block.samples // job.config.process_count})
        launch.blocks.append(own)
        if launch.should_end is not None and launch.should_end():
            return number
    return None
