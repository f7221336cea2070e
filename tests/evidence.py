"""Evidence as a look would have it, for the tests of verdict and advice: every argument has a plain value."""

from __future__ import annotations

from typing import Any

from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
from autotune.records.ceilings import Ceiling
from autotune.records.diagnosis import CurvePoint, Curves, Evidence, Roofline
from autotune.records.measurement import Block, Measurement, MemorySample, Window
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import OptimizerFacts, WorkloadFacts

GPU = Environment(
    device="cuda:0",
    device_kind="cuda",
    device_name="NVIDIA H200",
    device_memory_bytes=2**37,
    device_count=1,
    native_amp_dtypes=("float32", "tf32", "bfloat16", "float16"),
    driver="570.1",
    cores=8,
    ram_bytes=2**36,
    platform="Linux-x86_64",
    python="3.11.9",
    torch="2.13.0",
    cuda="13.0",
    versions={},
)
CPU = GPU.model_copy(
    update={"device": "cpu", "device_kind": "cpu", "native_amp_dtypes": ("float32", "bfloat16"), "cores": 4}
)
FACTS = WorkloadFacts(
    dataset_length=10_000,
    is_iterable=False,
    has_4d_input=True,
    parameter_count=1_000,
    optimizer=OptimizerFacts(name="SGD"),
    step_source="cross-entropy, inferred",
)


def make_breakdown(
    *, wait: float = 0.0, copy: float = 0.0, synchronise: float = 0.0, idle: float = 0.0, restart: float = 0.0
) -> TimeBreakdown:
    compute = max(0.0, 1 - wait - copy - synchronise - idle)
    shares = {"data_wait": wait, "device_copy": copy, "compute": compute, "synchronise": synchronise, "idle": idle}
    parts = {name: Share(fraction=share, source="made up") for name, share in shares.items()}
    return TimeBreakdown(**parts, restart_fraction=restart)


def make_costs(item_s: float = 1e-3, **changes: Any) -> LoaderCosts:
    values = {
        "items": 100,
        "item_s": item_s,
        "item_cpu_s": item_s,
        "item_median_s": item_s,
        "item_p99_s": item_s,
        "item_slowest_s": item_s,
        "slow_tail_fraction": 0.0,
        "disk_bytes_per_item": 0.0,
        "item_bytes": 1024.0,
        "collate_s": 0.0,
    }
    return LoaderCosts.model_validate(values | changes)


def make_measurement(rate: float, **changes: Any) -> Measurement:
    block = Block(samples=int(rate), batches=10, seconds=1.0, data_wait_s=0.0)
    window = Window(
        blocks=(block,) * 10,
        whole_epochs=False,
        epoch_samples=10_000,
        queue_capacity=0,
        queue_at_start=0,
        queue_at_end=0,
        warm_up_batches=5,
        warm_up_s=0.5,
        is_drained=True,
        is_steady=True,
        stopped_by="precision",
    )
    values = {
        "samples_per_s": rate,
        "samples_per_s_ci": (0.99 * rate, 1.01 * rate),
        "busy_fraction": 0.5,
        "busy_source": "made up",
        "data_wait_fraction": 0.1,
        "peak_memory_bytes": 2**30,
        "startup_s": 1.0,
        "build_s": 0.2,
        "memory": MemorySample(peak_bytes=2**30, source="made up"),
        "window": window,
        "loss": 0.7,
        "breakdown": make_breakdown(),
        "loader_costs": make_costs(),
        "loader_ceiling": 10 * rate,
        "device_ceiling": rate,
    }
    return Measurement.model_validate(values | changes)


def make_point(rate: float | None, cpu_s: float | None = None, **changes: object) -> CurvePoint:
    ceiling = None if rate is None else Ceiling(samples_per_s=rate, samples=round(rate), seconds=1.0, batches=10)
    return CurvePoint(changes=changes, ceiling=ceiling, cpu_s_per_sample=cpu_s)


def make_roofline(**changes: float) -> Roofline:
    values = {"flops": 1e9, "moved_bytes": 1e6, "operators": 10, "peak_flops_per_s": 1e12, "peak_bytes_per_s": 1e11}
    return Roofline.model_validate(values | changes)


def make_evidence(
    rate: float = 1000.0,
    *,
    config: TrainingConfig | None = None,
    environment: Environment = GPU,
    curves: Curves | None = None,
    facts: WorkloadFacts = FACTS,
    **measured: Any,
) -> Evidence:
    return Evidence(
        config=config or TrainingConfig(),
        environment=environment,
        facts=facts,
        limit_bytes=2**36,
        free_ram_bytes=2**34,
        measurement=make_measurement(rate, **measured),
        curves=curves or Curves(),
    )
