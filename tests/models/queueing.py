"""A loader and a device as queueing theory has them, to hold the model of the machine against what it does not know.

Batches go to the workers in turns and come in order; a worker begins its next one once the loop has taken the batch
that lies `workers * prefetch` before it. Without workers the loop loads and trains in turns. Items and steps take
random times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.config.training_config import TrainingConfig

_BATCHES = 800
_WARM_UP = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What items, batches and steps take, in seconds."""

    item_s: float
    """Mean of an item; exponentially distributed."""
    batch_s: float
    """A worker's cost of any batch, beside its items."""
    step_s: float
    """The device's cost of any step, beside its samples."""
    sample_s: float
    step_spread: float = 0.1
    """Standard deviation of the logarithm of a step's time."""

    def loader_rate(self, config: TrainingConfig, seed: int) -> float:
        """Samples per second of the loader alone: nothing is done with a batch."""
        return self._rate(config, seed, self._loads(config, seed), np.zeros(_BATCHES))

    def device_rate(self, config: TrainingConfig, seed: int) -> float:
        """Samples per second of the device alone: a batch is always there."""
        return config.micro_batch_size / float(np.mean(self._steps(config, seed)))

    def rate(self, config: TrainingConfig, seed: int) -> float:
        """Samples per second of both together."""
        return self._rate(config, seed, self._loads(config, seed), self._steps(config, seed))

    def _loads(
        self, config: TrainingConfig, seed: int
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        items = np.random.default_rng([seed, 0]).gamma(
            config.micro_batch_size, self.item_s, _BATCHES
        )
        return self.batch_s + items

    def _steps(
        self, config: TrainingConfig, seed: int
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        noise = np.random.default_rng([seed, 1]).normal(
            -(self.step_spread**2) / 2, self.step_spread, _BATCHES
        )
        return (self.step_s + self.sample_s * config.micro_batch_size) * np.exp(noise)

    @staticmethod
    def _rate(
        config: TrainingConfig,
        seed: int,
        loads: np.ndarray[tuple[int], np.dtype[np.float64]],
        steps: np.ndarray[tuple[int], np.dtype[np.float64]],
    ) -> float:
        workers, ahead = config.num_workers, config.num_workers * (config.prefetch_factor or 2)
        loaded, taken, ended = list[float](), list[float](), [0.0]
        for number, (load, step) in enumerate(zip(loads.tolist(), steps.tolist(), strict=True)):
            if workers == 0:
                taken.append(ended[-1] + load)
            else:
                is_free_at = loaded[number - workers] if number >= workers else 0.0
                is_asked_at = taken[number - ahead] if number >= ahead else 0.0
                loaded.append(max(is_free_at, is_asked_at) + load)
                taken.append(max(loaded[-1], ended[-1]))
            ended.append(taken[-1] + step)
        return config.micro_batch_size * (_BATCHES - _WARM_UP) / (ended[-1] - ended[_WARM_UP])
