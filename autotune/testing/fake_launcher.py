"""A fake launcher over an analytic cost model: whole studies in milliseconds, through the ordinary launcher seam.

`autotune.search(model, dataset, launcher=FakeLauncher(cost_model))` runs the product as it is, but for the trials'
processes: the launcher reads each trial's job and writes the report that a rank would write. For tests of what is built
on autotune, and for simulations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf
from threading import Lock

from autotune.analysis.expectation import DEVICE_SETTINGS, LOADER_SETTINGS
from autotune.analysis.rates import rate_of
from autotune.launch.launcher import Exit, Launch
from autotune.protocol.messages import Job, RankReport, read_model, write_model
from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
from autotune.records.ceilings import Ceiling
from autotune.records.conditions import DeviceConditions
from autotune.records.diagnosis import CurvePoint, Curves
from autotune.records.measurement import Block, Ceilings, Measurement, MemorySample, Window
from autotune.records.precision_check import GuardFigures
from autotune.records.ranks import Communication, RankFigures
from autotune.records.run_summary import changed_settings
from autotune.records.stress_check import StressFigures
from autotune.records.trial import Failure, Outcome, TrialResult
from autotune.settings.ddp_config import TORCH_BUCKET_CAP_MB, DdpConfig
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import OptimizerFacts, WorkloadFacts

__all__ = ["CostModel", "FakeLauncher", "FakeTrial", "analytic_cost", "fake_environment", "fake_facts"]

_BLOCKS = 10
_GUARD_STEPS = 20
_GRADIENT_BYTES = 64 * 2**20
_LINK_BYTES_PER_S = 20 * 2**30
_BUCKET_S = 100e-6
_BACKWARD_SHARE = 2 / 3
_REPLICATE_S = 1e-3
_UNSAID = "the cost model does not say"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTrial:
    """What a made-up trial of a configuration comes to; of a group, what all its ranks come to together."""

    samples_per_s: float = 0.0
    peak_memory_bytes: int = 0
    """Of each rank."""
    busy_fraction: float = 1.0
    outcome: Outcome = "ok"
    reason: str = ""
    failure: Failure | None = None
    startup_s: float = 0.1
    hangs: bool = False
    """It never ends: the deadline does."""
    loader_ceiling: float | None = None
    """Rate of the loader alone; None: beside a trial twice its rate, and a look at the loader finds none."""
    device_ceiling: float | None = None
    """Rate of the device alone; None: the rate over the busy fraction, where that is 1 as with the loader's."""
    passes_guard: bool = True
    """Whether the precision guard lets it win; otherwise its loss becomes `broken_loss`."""
    broken_loss: float = inf
    stress_peak_bytes: int | None = None
    """Peak memory of a stress run; None: that of the trial."""
    alloc_retries: int | None = None
    """Times that the allocator found no room, in the window and in a stress run; None: not counted."""
    communication: Communication | None = None
    """What exchanging gradients takes; None: not measured."""


CostModel = Callable[[TrainingConfig], FakeTrial]


def analytic_cost(config: TrainingConfig) -> FakeTrial:
    """A plain machine: the slower of loader and device, memory linear in the micro batch.

    An item takes 1 ms to load, by up to eight workers of a process side by side, and sixteen of all ranks together; a
    batch takes the device 2 ms and 20 us a sample, half of that in a 16-bit precision. A sample needs 4 MiB of memory
    beside 512 MiB.

    Ranks exchange 64 MiB of gradients a step over a ring of 20 GiB/s, bucket by bucket: all but the last bucket may
    hide behind the backward pass, two thirds of a batch's time. DataParallel copies the model to each device anew for
    each batch, 1 ms a device.
    """
    processes, devices, micro = config.process_count, config.world_size, config.micro_batch_size
    loader = processes * 1000.0 * min(max(1, config.num_workers), 8, 16 / processes)
    speed = 2.0 if config.amp_dtype in {"bfloat16", "float16"} else 1.0
    step_s = 0.002 + 20e-6 * micro / speed + (devices * _REPLICATE_S if config.strategy == "dp" else 0.0)
    talk = _communication(config, step_s) if processes > 1 else None
    exposed_s = 0.0 if talk is None else talk.exposed_s / config.grad_accum_steps
    device, group = devices * (micro / step_s), devices * (micro / (step_s + exposed_s))
    rate = min(loader, group) if config.num_workers else 1 / (1 / loader + 1 / group)
    return FakeTrial(
        samples_per_s=rate,
        peak_memory_bytes=512 * 2**20 + micro * 4 * 2**20 + _bucket_bytes(config),
        busy_fraction=rate / device,
        loader_ceiling=loader,
        device_ceiling=device,
        communication=talk,
    )


def _communication(config: TrainingConfig, batch_s: float) -> Communication:
    """A ring all-reduce of the gradients, after the last of a step's batches."""
    ddp, ranks = config.ddp or DdpConfig(), config.world_size
    buckets = ceil(_GRADIENT_BYTES / 2**20 / (ddp.bucket_cap_mb or TORCH_BUCKET_CAP_MB))
    on_their_way = _GRADIENT_BYTES if ddp.comm_hook is None else _GRADIENT_BYTES // 2
    exchange_s = buckets * _BUCKET_S + 2 * (ranks - 1) / ranks * on_their_way / _LINK_BYTES_PER_S
    hidden_s = min(_BACKWARD_SHARE * batch_s, exchange_s * (1 - 1 / buckets))
    alone_s = batch_s * config.grad_accum_steps
    return Communication(
        step_s=alone_s + exchange_s - hidden_s,
        step_alone_s=alone_s,
        exchange_s=exchange_s,
        bytes_exchanged=on_their_way,
    )


def _bucket_bytes(config: TrainingConfig) -> int:
    """Memory of a rank's buckets, which gradients may be views of."""
    has_buckets = config.process_count > 1 and not (config.ddp or DdpConfig()).gradient_as_bucket_view
    return _GRADIENT_BYTES if has_buckets else 0


def fake_environment(*, device_memory_bytes: int = 16 * 2**30, cores: int = 4, device_count: int = 1) -> Environment:
    """A made-up machine with one CUDA device, or several of a kind."""
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
    """A made-up map-style workload trained by SGD."""
    return WorkloadFacts(
        dataset_length=dataset_length,
        is_iterable=False,
        has_4d_input=False,
        parameter_count=1000,
        optimizer=OptimizerFacts(name="SGD"),
        step_source="made up",
    )


@dataclass(slots=True)
class FakeLauncher:
    """Answers trials from a cost model, with a relative noise between trials and between blocks.

    Rank 0 answers for all ranks of a group, which are equal. It is a Cluster of `slots` machines of a kind, and may be
    called from several threads. A trial takes no time: what it is said to have taken (`Exit.wall_s`) is its own, as if
    it had a machine to itself. Its noise follows from the seed and its place among the trials launched, which with
    several slots depends on the threads.
    """

    cost: CostModel = analytic_cost
    noise: float = 0.005
    seed: int = 0
    environment: Environment = field(default_factory=fake_environment)
    facts: WorkloadFacts = field(default_factory=fake_facts)
    launched: list[TrainingConfig] = field(default_factory=list)
    """Configurations of all trials so far, confirmations included."""
    jobs: list[Job] = field(default_factory=list)
    """Everything that it was asked for, the probe apart: trials, guards, curves, stress runs."""
    slots: int = 1
    """Trials that it runs at once."""
    notes: tuple[str, ...] = ()
    """Sentences about machines that are not used; there are none."""
    conditions: DeviceConditions | None = None
    """What a probe, and each trial, tells of the device."""
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def launch(self, launch: Launch) -> Exit:
        """Write the report of a made-up trial."""
        job = read_model(launch.folder.job, Job)
        launch.log.touch(mode=0o600)
        if job.kind in {"describe", "probe"}:
            report = RankReport(
                result=TrialResult(outcome="ok"),
                environment=self.environment,
                facts=self.facts,
                conditions=self.conditions,
            )
            write_model(launch.folder.report, report)
            return Exit(code=0, wall_s=0.0)
        with self._lock:
            self.jobs.append(job)
            if job.kind == "trial":
                self.launched.append(job.config)
            place = len(self.launched)
        trial = self.cost(job.config)
        if trial.hangs or trial.startup_s > launch.deadline_s:
            return Exit(code=None, ended_for="deadline", wall_s=launch.deadline_s)
        if job.streams_blocks and trial.outcome == "ok":
            lost_after = self._stream(trial, job, launch, place)
            if lost_after is not None:
                return Exit(code=None, ended_for="called_off", wall_s=trial.startup_s + lost_after * job.window.block_s)
        if trial.outcome == "ok":
            report = self._answer(trial, job, place)
        else:
            result = TrialResult(outcome=trial.outcome, reason=trial.reason, failure=trial.failure)
            report = RankReport(result=result)
        write_model(launch.folder.report, report)
        return Exit(code=0, wall_s=trial.startup_s + job.window.block_s * _BLOCKS)

    def close(self) -> None:
        """Nothing is held."""

    def _stream(self, trial: FakeTrial, job: Job, launch: Launch, place: int) -> int | None:
        """Write the window's blocks as a rank would; after how many of them the parent has the trial ended."""
        blocks = self._measure(trial, job, place).blocks
        with launch.folder.blocks.open("a", buffering=1) as file:
            for number, block in enumerate(blocks, start=1):
                own = block.model_copy(update={"samples": block.samples // job.config.process_count})
                file.write(f"{own.model_dump_json()}\n")
                if launch.should_end is not None and launch.should_end():
                    return number
        return None

    def _answer(self, trial: FakeTrial, job: Job, place: int) -> RankReport:
        done = TrialResult(outcome="ok")
        if job.kind == "guard":
            return RankReport(result=done, guard=_guard_figures(trial, job.config))
        if job.kind == "stress":
            return RankReport(result=done, stress=_stress_figures(trial))
        if job.kind == "curves":
            return RankReport(result=done, curves=self._curves(job))
        return RankReport(result=TrialResult(outcome="ok", measurement=self._measure(trial, job, place)))

    def _curves(self, job: Job) -> Curves:
        """Points of the sides that a variation changes, the job's own configuration first, as a rank has them."""
        changed = {config: changed_settings(config, job.config).keys() for config in job.variations}
        loader = [config for config, names in changed.items() if names & LOADER_SETTINGS]
        device = [
            config for config, names in changed.items() if names & DEVICE_SETTINGS and not names & LOADER_SETTINGS
        ]
        return Curves(
            loader=tuple(self._loader_point(job, config) for config in (job.config, *loader)),
            device=tuple(self._device_point(job, config) for config in (job.config, *device)),
        )

    def _loader_point(self, job: Job, config: TrainingConfig) -> CurvePoint:
        trial, changes = self.cost(config), _changes(config, job, LOADER_SETTINGS | {"micro_batch_size"})
        if not _runs(trial):
            return CurvePoint(changes=changes, ceiling=None, reason=trial.reason or trial.outcome)
        if trial.loader_ceiling is None:
            return CurvePoint(changes=changes, ceiling=None, reason=_UNSAID)
        return CurvePoint(changes=changes, ceiling=_ceilings(trial, loader=True, device=False).loader)

    def _device_point(self, job: Job, config: TrainingConfig) -> CurvePoint:
        trial, changes = self.cost(config), _changes(config, job, DEVICE_SETTINGS)
        if not _runs(trial):
            return CurvePoint(changes=changes, ceiling=None, reason=trial.reason or trial.outcome)
        if job.limit_bytes is not None and trial.peak_memory_bytes > job.limit_bytes:
            return CurvePoint(changes=changes, ceiling=None, reason="the device ran out of memory")
        peak = trial.peak_memory_bytes
        if trial.device_ceiling is None and trial.busy_fraction == 1:
            return CurvePoint(changes=changes, ceiling=None, reason=_UNSAID, peak_memory_bytes=peak)
        ceiling = _ceilings(trial, loader=False, device=True).device
        return CurvePoint(changes=changes, ceiling=ceiling, peak_memory_bytes=peak)

    def _measure(self, trial: FakeTrial, job: Job, place: int) -> Measurement:
        numbers = random.Random(f"{self.seed}/{place}")  # noqa: S311 - made-up noise
        level = trial.samples_per_s * numbers.gauss(1, self.noise)
        window = _window(level, self.noise, job, numbers)
        rate, extras = rate_of(window), job.extras
        ceilings = _ceilings(trial, loader=extras.loader_ceiling, device=extras.device_ceiling)
        has_batches = extras.device_ceiling or extras.breakdown
        measurement = Measurement(
            samples_per_s=rate.value,
            samples_per_s_ci=(rate.low, rate.high),
            busy_fraction=trial.busy_fraction,
            busy_source="made up",
            conditions=self.conditions,
            data_wait_fraction=1 - trial.busy_fraction,
            peak_memory_bytes=trial.peak_memory_bytes,
            startup_s=trial.startup_s,
            build_s=0.0,
            memory=_memory(trial, trial.peak_memory_bytes),
            window=window,
            loss=1.0,
            ceilings=ceilings,
            loader_ceiling=None if ceilings.loader is None else ceilings.loader.samples_per_s,
            device_ceiling=None if ceilings.device is None else ceilings.device.samples_per_s,
            breakdown=_breakdown(trial) if extras.breakdown else None,
            loader_costs=_loader_costs(trial) if extras.breakdown else None,
            communication=trial.communication if has_batches else None,
        )
        ranks = job.config.process_count
        return measurement if ranks == 1 else _as_group(measurement, ranks, self.environment)


def _runs(trial: FakeTrial) -> bool:
    """Whether a side of it can be looked at alone."""
    return trial.outcome == "ok" and not trial.hangs


def _changes(config: TrainingConfig, job: Job, settings: frozenset[str]) -> dict[str, object]:
    return {name: after for name, (_, after) in changed_settings(config, job.config).items() if name in settings}


def _as_group(measurement: Measurement, ranks: int, environment: Environment) -> Measurement:
    """A group's measurement with the figures of its ranks, each with an equal part."""
    kind = environment.device.partition(":")[0]
    loader, device = measurement.loader_ceiling, measurement.device_ceiling
    own = RankFigures(
        rank=0,
        device=kind,
        samples_per_s=measurement.samples_per_s / ranks,
        data_wait_fraction=measurement.data_wait_fraction,
        busy_fraction=measurement.busy_fraction,
        peak_memory_bytes=measurement.peak_memory_bytes,
        loader_ceiling=None if loader is None else loader / ranks,
        device_ceiling=None if device is None else device / ranks,
    )
    figures = tuple(
        own.model_copy(update={"rank": rank, "device": kind if kind == "cpu" else f"{kind}:{rank}"})
        for rank in range(ranks)
    )
    return measurement.model_copy(update={"ranks": figures})


def _ceilings(trial: FakeTrial, *, loader: bool, device: bool) -> Ceilings:
    alone = trial.loader_ceiling or 2 * trial.samples_per_s
    held = trial.device_ceiling or trial.samples_per_s / max(trial.busy_fraction, 1e-9)
    return Ceilings(loader=_ceiling(alone) if loader else None, device=_ceiling(held) if device else None)


def _ceiling(samples_per_s: float) -> Ceiling:
    return Ceiling(samples_per_s=samples_per_s, samples=max(1, round(samples_per_s)), seconds=1.0, batches=1)


def _breakdown(trial: FakeTrial) -> TimeBreakdown:
    nothing = Share(fraction=0.0, source="made up")
    return TimeBreakdown(
        data_wait=Share(fraction=1 - trial.busy_fraction, source="made up"),
        device_copy=nothing,
        compute=Share(fraction=trial.busy_fraction, source="made up"),
        synchronise=nothing,
        idle=nothing,
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


def _guard_figures(trial: FakeTrial, config: TrainingConfig) -> GuardFigures:
    losses = tuple(1.0 / (step + 1) for step in range(_GUARD_STEPS))
    return GuardFigures(
        steps=_GUARD_STEPS,
        micro_batch_size=config.micro_batch_size,
        reference_losses=losses,
        losses=losses if trial.passes_guard else (*losses[:-1], trial.broken_loss),
        gradient_cosine=1.0,
        repeat_cosine=1.0,
        repeat_deviation=0.0,
    )


def _stress_figures(trial: FakeTrial) -> StressFigures:
    peak = trial.stress_peak_bytes or trial.peak_memory_bytes
    return StressFigures(
        steps=10,
        seconds=1.0,
        items_seen=100,
        median_item_bytes=1024.0,
        largest_item_bytes=1024,
        memory=_memory(trial, peak),
    )


def _memory(trial: FakeTrial, peak_bytes: int) -> MemorySample:
    return MemorySample(peak_bytes=peak_bytes, source="made up", alloc_retries=trial.alloc_retries)


def _window(level: float, noise: float, job: Job, numbers: random.Random) -> Window:
    blocks, together = [], job.config.micro_batch_size * job.config.world_size
    for _ in range(_BLOCKS):
        batches = max(1, round(level * job.window.block_s / together))
        samples = batches * together
        seconds = samples / (level * numbers.gauss(1, noise))
        blocks.append(Block(samples=samples, batches=batches, seconds=seconds, data_wait_s=0.0))
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
        stopped_by="precision",
    )
