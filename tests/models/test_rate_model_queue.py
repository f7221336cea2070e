"""Forecast a simulated queue of random items and steps, from curves and three runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import pytest

from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import assumed_variation
from autotune.models.throughput import Observation, RateModel
from tests.factories import CPU

ENVIRONMENT = CPU.model_copy(update={"cores": 32})
"""Enough cores for every worker: items wait, they don't compute."""
STEPS = 800
WARM_UP = 150


@dataclass(frozen=True, slots=True)
class Machine:
    """Loader and device as in queueing theory: random times, batches in order.

    A worker begins its next batch once the loop has taken the one that lies `workers * prefetch`
    before it. Without workers the loop loads and trains in turn.
    """

    item_s: float
    """Mean seconds of an item; exponentially distributed."""
    batch_s: float
    """Seconds of a worker for any batch, besides its items."""
    step_s: float
    """Seconds of the device for any step, besides its samples."""
    sample_s: float
    step_sd: float = 0.1
    """Standard deviation of the logarithm of a step's time."""

    def rate(
        self, config: TrainingConfig, seed: int, *, loads: bool = True, trains: bool = True
    ) -> float:
        """Return samples/s of loader and device together, or of one alone."""
        random = np.random.default_rng(seed)
        batch = config.micro_batch_size
        items = random.gamma(batch, self.item_s, STEPS)
        noise = random.normal(-(self.step_sd**2) / 2, self.step_sd, STEPS)
        load_s = loads * (self.batch_s + items)
        step_s = trains * (self.step_s + self.sample_s * batch) * np.exp(noise)

        workers = config.num_workers
        ahead = workers * (config.prefetch_factor or 2)
        loaded, taken, ended = list[float](), list[float](), [0.0]
        for number, (load, step) in enumerate(zip(load_s.tolist(), step_s.tolist(), strict=True)):
            if workers == 0:
                taken.append(ended[-1] + load)
            else:
                is_free_at = loaded[number - workers] if number >= workers else 0.0
                is_asked_at = taken[number - ahead] if number >= ahead else 0.0
                loaded.append(max(is_free_at, is_asked_at) + load)
                taken.append(max(loaded[-1], ended[-1]))
            ended.append(taken[-1] + step)
        return batch * (STEPS - WARM_UP) / (ended[-1] - ended[WARM_UP])


def config(workers: int, batch: int, prefetch: int = 2) -> TrainingConfig:
    return TrainingConfig(
        num_workers=workers,
        micro_batch_size=batch,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        intra_op_threads=1,
    )


RUNS = [config(0, 32), config(4, 128), config(2, 64)]
GRID = product((0, 1, 2, 3, 4, 6, 8), (16, 32, 64, 96, 128, 256), (2, 4))
UNSEEN = sorted({config(*point) for point in GRID} - {*RUNS}, key=repr)


def seen(
    kind: Literal["loader", "device", "run"], one: TrainingConfig, machine: Machine
) -> Observation:
    rate = machine.rate(one, 0, loads=kind != "device", trains=kind != "loader")
    sd, cpu_s = {"loader": (0.08, 1e-6), "device": (0.08, 1 / rate), "run": (0.015, None)}[kind]
    return Observation(
        kind=kind, config=one, samples_per_s=rate, relative_sd=sd, cpu_s_per_sample=cpu_s
    )


@pytest.mark.parametrize(
    ("machine", "coverage", "median_error"),
    [
        (Machine(2e-3, 5e-4, 2e-3, 1e-4), 0.9, 0.08),  # a slow loader
        (Machine(3e-4, 5e-4, 5e-3, 8e-4), 0.9, 0.08),  # a slow device
        (Machine(2e-3, 1e-3, 4e-3, 5e-4), 0.9, 0.08),  # now one, now the other
        (Machine(2e-3, 1e-3, 4e-3, 5e-4, step_sd=0.5), 0.9, 0.08),
        # What a batch costs besides its items holds the loader: one batch size can't tell
        (Machine(2e-5, 1e-3, 5e-4, 5e-6), 0.85, 0.25),
    ],
)
def test_forecasts_of_a_queue(machine: Machine, coverage: float, median_error: float) -> None:
    observed = [
        *(seen("loader", config(workers, 32), machine) for workers in (0, 1, 2, 4, 8)),
        *(seen("device", config(0, batch), machine) for batch in (16, 32, 64, 128, 256)),
        *(seen("run", one, machine) for one in RUNS),
    ]
    forecast = RateModel(observed, ENVIRONMENT, assumed_variation("cpu")).forecast(UNSEEN)
    truth = np.log([machine.rate(one, 1) for one in UNSEEN])
    errors = np.abs(forecast.log_rate - truth)
    assert np.mean(errors < 1.96 * forecast.sd) >= coverage
    assert np.median(errors) < median_error
    chosen = int(np.argmax(forecast.log_rate))
    assert truth.max() - truth[chosen] < 0.05
