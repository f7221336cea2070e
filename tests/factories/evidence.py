"""Evidence as a diagnosis has it, for the tests of verdict and advice."""

from __future__ import annotations

from typing import Any

from autotune.config.environment import Environment
from autotune.config.plan import WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import assumed_variation
from autotune.records.ceilings import Ceiling
from autotune.records.result import CurvePoint, Curves, Evidence, Roofline
from tests.factories.machines import GPU, make_facts
from tests.factories.measurements import (
    make_breakdown,
    make_loader_costs,
    make_measurement,
    make_window,
)


def make_point(
    rate: float | None,
    cpu_s: float | None = None,
    relative_sd: float | None = None,
    **changes: object,
) -> CurvePoint:
    """Return a curve's point at a rate in samples/s; keywords are the settings that it changes."""
    ceiling = None
    if rate is not None:
        ceiling = Ceiling(
            samples_per_s=rate,
            samples=round(rate),
            seconds=1.0,
            batches=10,
            relative_sd=relative_sd,
        )
    return CurvePoint(changes=changes, ceiling=ceiling, cpu_s_per_sample=cpu_s)


def make_roofline(**changes: Any) -> Roofline:
    """Return a step of 1 GFLOP that moves 1 MB; keywords change fields."""
    values: dict[str, Any] = {
        "flops": 1e9,
        "moved_bytes": 1e6,
        "operators": 10,
        "peak_flops_per_s": 1e12,
        "peak_bytes_per_s": 1e11,
    }
    return Roofline.model_validate(values | changes)


def make_evidence(
    rate: float = 1000.0,
    *,
    config: TrainingConfig | None = None,
    environment: Environment = GPU,
    curves: Curves | None = None,
    facts: WorkloadFacts | None = None,
    **measured: Any,
) -> Evidence:
    """Return a step that only computes, whose loader is ten times as fast; further keywords change the measurement."""
    values: dict[str, Any] = {
        "loader_ceiling": 10 * rate,
        "device_ceiling": rate,
        "data_wait_fraction": 0.1,
        "breakdown": make_breakdown(),
        "loader_costs": make_loader_costs(),
        "window": make_window(rate, epoch_samples=10_000),
    }
    return Evidence(
        config=config or TrainingConfig(),
        environment=environment,
        run_variation=assumed_variation(environment.device_kind),
        facts=facts or make_facts(),
        limit_bytes=2**36,
        free_ram_bytes=2**34,
        measurement=make_measurement(rate, **values | measured),
        curves=curves or Curves(),
    )
