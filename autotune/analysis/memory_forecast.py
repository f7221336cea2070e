"""Peak memory of configurations that did not run, with its uncertainty: a line in the batch plus terms for settings.

Comes in: observed peaks of configurations. Goes out: a MemoryForecast, by Bayesian linear regression, so that the first
observation is enough for a forecast with the uncertainty that it deserves. Pure.

Source: Bishop 2006, "Pattern Recognition and Machine Learning", section 3.3. The scales of the prior, in shares of the
highest observed peak, are our own conventions: before a second micro batch was measured, a batch twice as large is
expected to take half as much again, give or take as much. Each half precision has a line of its own; until both were
measured, they are expected to be much alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.statistics import Floats
from autotune.settings.training_config import TrainingConfig

__all__ = ["MemoryForecast"]

_NOISE = 0.03
"""Standard deviation of a peak, as a share of the highest: our own convention, as are all figures of the prior."""
_HALVES_CORRELATION = 0.97
"""Of what the two half precisions change."""


class _Term(NamedTuple):
    """A term of the regression: its coefficient's prior, in shares of the highest peak, and what it multiplies."""

    mean: float
    sd: float
    value: Callable[[TrainingConfig], float]
    grows: bool = False
    """It also multiplies the batch, relative to the smallest observed one."""


def _workers(config: TrainingConfig) -> float:
    return config.num_workers


def _queue(config: TrainingConfig) -> float:
    """Batches that wait in the loader's queue."""
    return config.num_workers * config.batches_per_worker


# Mean and standard deviation in shares of the highest peak seen: our own conventions.
_TERMS = (
    _Term(0.5, 1.0, lambda _: 1.0),
    _Term(0.5, 0.5, lambda _: 1.0, grows=True),
    _Term(0.0, 0.1, lambda config: config.amp_dtype == "bfloat16"),
    _Term(0.0, 0.1, lambda config: config.amp_dtype == "float16"),
    _Term(0.0, 0.3, lambda config: config.amp_dtype == "bfloat16", grows=True),
    _Term(0.0, 0.3, lambda config: config.amp_dtype == "float16", grows=True),
    _Term(0.03, 0.06, _workers),
    _Term(0.0, 0.01, _queue, grows=True),
    _Term(0.0, 0.1, lambda config: config.channels_last or config.compile),
    _Term(0.0, 0.1, lambda config: config.grad_accum_steps > 1),
    _Term(0.0, 0.3, lambda config: config.process_count > 1 or config.strategy == "dp"),
)
_HALVES = ((2, 3), (4, 5))  # terms of bfloat16 and of float16 that are alike
_DEMANDS: tuple[Callable[[TrainingConfig], float], ...] = (
    lambda config: config.micro_batch_size,
    lambda config: config.amp_dtype not in {"bfloat16", "float16"},
    _workers,
    _queue,
    lambda config: config.grad_accum_steps > 1,
    lambda config: config.process_count > 1,
    lambda config: config.strategy == "dp",
    lambda config: config.channels_last,
    lambda config: not config.channels_last,
    lambda config: config.compile,
    lambda config: not config.compile,
)
"""What memory grows with: no more of any demand means no more memory. Of two layouts, and of compiled and not, neither
is known to need more: they are demands against each other."""
_COLUMNS = (*(term.value for term in _TERMS), *_DEMANDS)
_OF_WORKERS = np.array([column in {_workers, _queue} for column in _COLUMNS])


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """What at least one observed peak says of the peak memory of other configurations."""

    observed: Sequence[tuple[TrainingConfig, int]]
    """Configurations and their peak memory in bytes."""
    has_workers_in_ram: bool
    """The limit is on RAM: loader workers and the batches in their queues take a part of it."""

    def expect(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """Expected peak memory and its standard deviation, in bytes."""
        mean, covariance, noise = self._posterior
        rows, _ = self._table(configs)
        return rows @ mean, np.sqrt((rows @ covariance * rows).sum(axis=1) + noise**2)

    def chance_to_fit(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        """The probability that each stays within a limit; 1 where one fitted that needs no less memory.

        Otherwise a batch that fits narrowly would stay uncertain after it was measured.
        """
        from scipy.special import ndtr

        expected, sd = self.expect(configs)
        (_, asked), (_, seen) = self._table(configs), self._table([config for config, _ in self.observed])
        is_within = np.array([peak <= limit_bytes for _, peak in self.observed])
        is_known_to_fit = _is_below_any(asked, seen[is_within]) & ~_is_below_any(-asked, -seen[~is_within])
        return np.where(is_known_to_fit, 1.0, ndtr((limit_bytes - expected) / sd))

    @cached_property
    def _posterior(self) -> tuple[Floats, Floats, float]:
        """Mean and covariance of the terms' coefficients, and the standard deviation of a peak, in bytes."""
        peaks = np.array([peak for _, peak in self.observed], dtype=np.float64)
        scale, (rows, _) = float(peaks.max()), self._table([config for config, _ in self.observed])
        noise, (prior_mean, sds) = _NOISE * scale, scale * np.array([(term.mean, term.sd) for term in _TERMS]).T
        correlation = np.eye(len(_TERMS))
        for pair in _HALVES:
            correlation[pair] = correlation[pair[::-1]] = _HALVES_CORRELATION
        prior_precision = np.linalg.inv(np.outer(sds, sds) * correlation)
        covariance = np.asarray(np.linalg.inv(prior_precision + rows.T @ rows / noise**2), dtype=np.float64)
        return covariance @ (prior_precision @ prior_mean + rows.T @ peaks / noise**2), covariance, noise

    def _table(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """The columns of all terms, (configs, terms), and all demands, (configs, demands)."""
        table = np.array([_values(config) for config in configs], dtype=np.float64)
        counts = np.where(_OF_WORKERS & (not self.has_workers_in_ram), 0.0, table)
        terms, demands = np.split(counts, [len(_TERMS)], axis=1)
        relative = demands[:, :1] / min(config.micro_batch_size for config, _ in self.observed)
        return np.where([term.grows for term in _TERMS], terms * relative, terms), demands


def _is_below_any(these: Floats, those: Floats) -> NDArray[np.bool_]:
    """Which of these demand no more than one of those; both are (configs, demands)."""
    return np.asarray(np.any(np.all(these[:, None] <= those, axis=2), axis=1), dtype=np.bool_)


@lru_cache(maxsize=16_384)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """The columns of one configuration; cached, since a proposal asks for thousands of the same ones."""
    return tuple(column(config) for column in _COLUMNS)
