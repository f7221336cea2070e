"""The figures of made-up trials, as a rank would report them: measurements, ceilings, checks; machine and workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from autotune.analysis.rates import window_rate
from autotune.protocol.jobs import TrialJob
from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
from autotune.records.ceilings import Ceiling, host_ceiling_of
from autotune.records.conditions import DeviceConditions
from autotune.records.host_load import HostLoad
from autotune.records.measurement import Block, Ceilings, Measurement, MemorySample, Window
from autotune.records.precision_check import GUARD_STEPS, PrecisionFigures
from autotune.records.ranks import RankFigures
from autotune.records.stress_check import StressFigures
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import OptimizerFacts, WorkloadFacts
from autotune.testing.cost_model import FakeTrial

__all__ = [
    "BLOCKS",
    "fake_ceilings",
    "fake_environment",
    "fake_facts",
    "fake_guard",
    "fake_measurement",
    "fake_stress",
    "fake_window",
]

BLOCKS = 10
"""Of each made-up window: our convention, enough for an interval by batch means."""


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


def fake_measurement(
    trial: FakeTrial,
    job: TrialJob,
    noise: Callable[[], float],
    environment: Environment,
    conditions: DeviceConditions | None,
) -> Measurement:
    """The measurement of a trial that runs well; `noise` gives factors around 1."""
    window = _window(trial.samples_per_s * noise(), noise, job)
    if environment.device_kind != "cpu":
        window = window.model_copy(update={"host_ahead_s": window.batch_s if trial.busy_fraction == 1 else 0.0})
    rate, extras = window_rate(window), job.extras
    asked = {"loader": extras.loader_ceiling, "device": extras.device_ceiling, "copy": extras.copy_ceiling}
    ceilings = fake_ceilings(trial, **asked)
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
    """A group's measurement with the figures of its ranks, each with an equal part."""
    kind = environment.device.partition(":")[0]
    loader, device = measurement.loader_ceiling, measurement.device_ceiling
    figures = tuple(
        RankFigures(
            rank=rank,
            device=kind if kind == "cpu" else f"{kind}:{rank}",
            samples_per_s=measurement.samples_per_s / ranks,
            data_wait_fraction=measurement.data_wait_fraction,
            busy_fraction=measurement.busy_fraction,
            peak_memory_bytes=measurement.peak_memory_bytes,
            loader_ceiling=loader and loader / ranks,
            device_ceiling=device and device / ranks,
        )
        for rank in range(ranks)
    )
    return measurement.model_copy(update={"ranks": figures})


def fake_ceilings(trial: FakeTrial, *, loader: bool, device: bool, copy: bool = False) -> Ceilings:
    """The ceilings that are asked for; no copy's where none is known."""
    alone = trial.loader_ceiling or 2 * trial.samples_per_s
    on_device = trial.device_ceiling or trial.samples_per_s / max(trial.busy_fraction, 1e-9)
    launch_s = None if trial.host_ceiling is None else on_device / trial.host_ceiling  # of its single batch
    return Ceilings(
        loader=_ceiling(alone) if loader else None,
        device=_ceiling(on_device).model_copy(update={"host_s": launch_s}) if device else None,
        copy=_ceiling(trial.copy_ceiling) if copy and trial.copy_ceiling else None,
    )


def _ceiling(samples_per_s: float) -> Ceiling:
    return Ceiling(samples_per_s=samples_per_s, samples=max(1, round(samples_per_s)), seconds=1.0, batches=1)


def _waits_for_host(trial: FakeTrial) -> bool:
    loader = trial.loader_ceiling or 2 * trial.samples_per_s
    return trial.host_ceiling is not None and trial.host_ceiling < loader


def _breakdown(trial: FakeTrial) -> TimeBreakdown:
    idle, busy, nothing = (
        Share(fraction=fraction, source="made up") for fraction in (1 - trial.busy_fraction, trial.busy_fraction, 0.0)
    )
    waits = {"data_wait": nothing, "idle": idle} if _waits_for_host(trial) else {"data_wait": idle, "idle": nothing}
    return TimeBreakdown(**waits, device_copy=nothing, compute=busy, synchronise=nothing)


def _loader_costs(trial: FakeTrial) -> LoaderCosts:
    item_s = 1 / (trial.loader_ceiling or 2 * trial.samples_per_s)
    names = ("item_s", "item_cpu_s", "item_median_s", "item_p99_s", "item_slowest_s")
    sizes = {"items": 100, "slow_tail_fraction": 0.0, "disk_bytes_per_item": 0.0, "item_bytes": 1024.0}
    return LoaderCosts.model_validate({**sizes, **dict.fromkeys(names, item_s), "collate_s": 1e-4})


def fake_guard(trial: FakeTrial, config: TrainingConfig) -> PrecisionFigures:
    """The figures of the precision guard."""
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
    """The figures of a run on the largest samples."""
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
    together = job.config.micro_batch_size * job.config.world_size
    batches = max(1, round(level * job.window.block_s / together))
    samples = batches * together
    durations = [samples / (level * noise()) for _ in range(BLOCKS)]
    blocks = [Block(samples=samples, batches=batches, seconds=took, data_wait_s=0.0) for took in durations]
    return fake_window(blocks, "precision")


def fake_window(blocks: Sequence[Block], stopped_by: Literal["precision", "time", "deadline"]) -> Window:
    """A window of these blocks that nothing has disturbed, without a queue of workers and without an epoch's end."""
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
