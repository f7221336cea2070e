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
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.statistics import Floats
from autotune.settings.training_config import TrainingConfig

__all__ = ["MemoryForecast", "forecast_memory"]

_NOISE = 0.03
"""Standard deviation of a peak, as a share of the highest: our own convention, as are all figures of the prior."""
_HALVES_CORRELATION = 0.97
"""Of what the two half precisions change."""


class _Features(NamedTuple):
    """What memory depends on, (configs,) each."""

    batch: Floats
    queue: Floats
    """Batches that wait in the loader's queue; 0 where workers do not count."""
    workers: Floats
    bfloat16: Floats
    float16: Floats
    channels_last: Floats
    compiled: Floats
    accumulates: Floats
    is_group: Floats
    is_dp: Floats


class _Term(NamedTuple):
    """A term of the regression: its coefficient's prior, in shares of the highest peak, and what it multiplies."""

    mean: float
    sd: float
    column: Callable[[_Features, Floats], Floats]
    """Of the features, and of the batch relative to the smallest observed one."""


_TERMS = (
    _Term(0.5, 1.0, lambda _, relative: np.ones_like(relative)),
    _Term(0.5, 0.5, lambda _, relative: relative),
    _Term(0.0, 0.1, lambda features, _: features.bfloat16),
    _Term(0.0, 0.1, lambda features, _: features.float16),
    _Term(0.0, 0.3, lambda features, relative: features.bfloat16 * relative),
    _Term(0.0, 0.3, lambda features, relative: features.float16 * relative),
    _Term(0.03, 0.06, lambda features, _: features.workers),
    _Term(0.0, 0.01, lambda features, relative: features.queue * relative),
    _Term(0.0, 0.1, lambda features, _: np.maximum(features.channels_last, features.compiled)),
    _Term(0.0, 0.1, lambda features, _: features.accumulates),
    _Term(0.0, 0.3, lambda features, _: np.maximum(features.is_group, features.is_dp)),
)
_HALVES = ((2, 3), (4, 5))  # terms of bfloat16 and of float16 that are alike


@dataclass(frozen=True)
class MemoryForecast:
    """What is known of peak memory."""

    mean: Floats
    covariance: Floats
    noise_bytes: float
    reference_batch: int
    has_workers_in_ram: bool
    observed: tuple[tuple[TrainingConfig, int], ...]
    """The peaks that it was fitted to."""

    def expect(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """Expected peak memory and its standard deviation, in bytes."""
        rows = _rows(configs, self.reference_batch, has_workers=self.has_workers_in_ram)
        variance = (rows @ self.covariance * rows).sum(axis=1) + self.noise_bytes**2
        return rows @ self.mean, np.sqrt(variance)

    def chance_to_fit(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        """The probability that each stays within a limit; 1 where one fitted that needs no less memory.

        Otherwise a batch that fits narrowly would stay uncertain after it was measured.
        """
        from scipy.special import ndtr

        expected, sd = self.expect(configs)
        return np.where(self._is_known_to_fit(configs, limit_bytes), 1.0, ndtr((limit_bytes - expected) / sd))

    def _is_known_to_fit(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> NDArray[np.bool_]:
        demands = self._demands(configs)
        within = self._demands([config for config, peak in self.observed if peak <= limit_bytes])
        over = self._demands([config for config, peak in self.observed if peak > limit_bytes])
        return _is_below_any(demands, within) & ~_is_below_any(-demands, -over)

    def _demands(self, configs: Sequence[TrainingConfig]) -> Floats:
        """What memory grows with, (demands, configs): no more of any demand means no more memory.

        Of two layouts, and of compiled and not, neither is known to need more: they are demands against each other.
        """
        features = _features(configs, has_workers=self.has_workers_in_ram)
        full = 1 - features.bfloat16 - features.float16
        growing = (features.batch, full, features.queue, features.workers, *features[7:])
        either = (features.channels_last, features.compiled)
        return np.stack([*growing, *either, *(1 - feature for feature in either)])


def forecast_memory(observed: Sequence[tuple[TrainingConfig, int]], *, has_workers_in_ram: bool) -> MemoryForecast:
    """Fit at least one pair of a configuration and its peak memory in bytes.

    Where the limit is on RAM, loader workers and the batches in their queues take a part of it.
    """
    scale, reference = float(max(peak for _, peak in observed)), min(config.micro_batch_size for config, _ in observed)
    rows = _rows([config for config, _ in observed], reference, has_workers=has_workers_in_ram)
    peaks, noise = np.array([peak for _, peak in observed], dtype=np.float64), _NOISE * scale
    prior_mean, sds = scale * np.array([(term.mean, term.sd) for term in _TERMS]).T
    correlation = np.eye(len(_TERMS))
    for pair in _HALVES:
        correlation[pair] = correlation[pair[::-1]] = _HALVES_CORRELATION
    prior_precision = np.linalg.inv(np.outer(sds, sds) * correlation)
    covariance = np.asarray(np.linalg.inv(prior_precision + rows.T @ rows / noise**2), dtype=np.float64)
    return MemoryForecast(
        mean=covariance @ (prior_precision @ prior_mean + rows.T @ peaks / noise**2),
        covariance=covariance,
        noise_bytes=noise,
        reference_batch=reference,
        has_workers_in_ram=has_workers_in_ram,
        observed=tuple(observed),
    )


def _is_below_any(these: Floats, those: Floats) -> NDArray[np.bool_]:
    """Which of these demand no more than one of those; both are (demands, configs)."""
    return np.asarray(np.any(np.all(these[:, :, None] <= those[:, None, :], axis=0), axis=1), dtype=np.bool_)


def _rows(configs: Sequence[TrainingConfig], reference_batch: int, *, has_workers: bool) -> Floats:
    """The columns of all terms, (configs, terms)."""
    features = _features(configs, has_workers=has_workers)
    relative = features.batch / reference_batch
    return np.column_stack([term.column(features, relative) for term in _TERMS])


def _features(configs: Sequence[TrainingConfig], *, has_workers: bool) -> _Features:
    table = np.array([_values(config) for config in configs], dtype=np.float64)
    features = _Features(*table.reshape(-1, len(_Features._fields)).T)
    return features._replace(queue=has_workers * features.queue, workers=has_workers * features.workers)


@lru_cache(maxsize=16_384)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """The features of one configuration; cached, since a proposal asks for thousands of the same ones."""
    return (
        config.micro_batch_size,
        config.num_workers * config.batches_per_worker,
        config.num_workers,
        config.amp_dtype == "bfloat16",
        config.amp_dtype == "float16",
        config.channels_last,
        config.compile,
        config.grad_accum_steps > 1,
        config.process_count > 1,
        config.strategy == "dp",
    )
