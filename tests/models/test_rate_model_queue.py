"""The model of the machine, from a look and three runs, tells what a queue of random items and steps will reach."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import pytest

from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import assumed_variation
from autotune.models.throughput import Forecast, Observation, RateModel
from tests.factories import CPU
from tests.models.queueing import Machine

ENVIRONMENT = CPU.model_copy(
    update={"cores": 32}
)  # enough for every worker: items wait, they don't compute
MACHINES = {
    "a slow loader": Machine(item_s=2e-3, batch_s=5e-4, step_s=2e-3, sample_s=1e-4),
    "a slow device": Machine(item_s=3e-4, batch_s=5e-4, step_s=5e-3, sample_s=8e-4),
    "now one, now the other": Machine(item_s=2e-3, batch_s=1e-3, step_s=4e-3, sample_s=5e-4),
    "unsteady steps": Machine(
        item_s=2e-3, batch_s=1e-3, step_s=4e-3, sample_s=5e-4, step_spread=0.5
    ),
}
CHEAP_ITEMS = Machine(item_s=2e-5, batch_s=1e-3, step_s=5e-4, sample_s=5e-6)
"""What a batch costs beside its items holds the loader, which looks at one batch size alone can't tell."""
LOOK_SD, RUN_SD = 0.08, 0.015


def config(workers: int, batch: int, prefetch: int = 2) -> TrainingConfig:
    return TrainingConfig(
        num_workers=workers,
        micro_batch_size=batch,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        intra_op_threads=1,
    )


LOADER_LOOKS = [config(workers, 32) for workers in (0, 1, 2, 4, 8)]
DEVICE_LOOKS = [config(0, batch) for batch in (16, 32, 64, 128, 256)]
RUNS = [config(0, 32), config(4, 128), config(2, 64)]
GRID = {
    config(workers, batch, prefetch)
    for workers, batch, prefetch in product(
        (0, 1, 2, 3, 4, 6, 8), (16, 32, 64, 96, 128, 256), (2, 4)
    )
}
UNSEEN = sorted(GRID - set(RUNS), key=repr)


def look(machine: Machine, seed: int) -> list[Observation]:
    def seen(
        kind: Literal["loader", "device"], one: TrainingConfig, rate: float, cpu_s: float
    ) -> Observation:
        return Observation(
            kind=kind, config=one, samples_per_s=rate, relative_sd=LOOK_SD, cpu_s_per_sample=cpu_s
        )

    rates = {one: machine.device_rate(one, seed) for one in DEVICE_LOOKS}
    return [
        *(seen("loader", one, machine.loader_rate(one, seed), 1e-6) for one in LOADER_LOOKS),
        *(seen("device", one, rate, 1 / rate) for one, rate in rates.items()),
    ]


def run(machine: Machine, one: TrainingConfig) -> Observation:
    return Observation(
        kind="run", config=one, samples_per_s=machine.rate(one, 0), relative_sd=RUN_SD
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was forecast of a machine, and what it does."""

    forecast: Forecast
    log_rate: np.ndarray[tuple[int], np.dtype[np.float64]]

    @property
    def errors(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.abs(self.forecast.log_rate - self.log_rate)

    @property
    def coverage(self) -> float:
        return float(np.mean(self.errors < 1.96 * self.forecast.sd))


def tell(machine: Machine) -> Comparison:
    seen = [*look(machine, 0), *(run(machine, one) for one in RUNS)]
    known = RateModel(seen, ENVIRONMENT, assumed_variation("cpu")).forecast(UNSEEN)
    return Comparison(known, np.log([machine.rate(one, 1) for one in UNSEEN]))


@pytest.fixture(scope="module", params=MACHINES)
def comparison(request: pytest.FixtureRequest) -> Comparison:
    return tell(MACHINES[request.param])


def test_unseen_rates_are_forecast_within_15_percent(
    comparison: Comparison,
) -> None:
    assert np.mean(comparison.errors < 0.15) >= 0.85
    assert np.median(comparison.errors) < 0.08
    assert comparison.coverage >= 0.9
    chosen = int(np.argmax(comparison.forecast.log_rate))
    assert comparison.log_rate.max() - comparison.log_rate[chosen] < 0.05


def test_the_interval_is_wide_where_the_curves_could_not_tell() -> None:
    cheap = tell(CHEAP_ITEMS)
    assert cheap.coverage >= 0.85
    assert np.median(cheap.errors) < 0.25


def test_where_the_loader_limits_the_rate_more_workers_help_and_a_lower_precision_does_not() -> (
    None
):
    machine = MACHINES["a slow loader"]
    seen = [*look(machine, 0), run(machine, RUNS[2])]
    asked = [RUNS[2], config(8, 64), RUNS[2].model_copy(update={"amp_dtype": "bfloat16"})]
    rates = np.exp(RateModel(seen, ENVIRONMENT, assumed_variation("cpu")).forecast(asked).log_rate)
    assert rates[1] > 2 * rates[0]
    assert rates[2] < 1.1 * rates[0]
