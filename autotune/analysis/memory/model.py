"""Peak memory as one law: what is fixed, what grows with the micro batch, and what loader workers hold in RAM.

Comes in: peaks that were measured, or passed. Goes out: a MemoryModel with its uncertainty, from which follow the
chance to fit of any configuration, a line over the micro batch for each kind of settings, and the largest batch that
the limit allows. Pure.

Each precision has a fixed part and a growth of its own. Other settings add something fixed, groups also to the growth.
The law is broken by workspaces that cuDNN takes where there is room, and by samples of varying length: such effects are
in the spread, which is learned.

Source: Bishop 2006, "Pattern Recognition and Machine Learning", section 3.3 (Bayesian linear regression: the first peak
is enough for a forecast with the uncertainty that it deserves) and 3.5 (the spread, by its effective number of
observations). The scales of the prior, in shares of the highest peak, are our own conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from autotune.analysis.statistics import Floats
from autotune.settings.training_config import TrainingConfig
from autotune.settings_table import SETTINGS

__all__ = ["MemoryModel", "Peak"]

_SPREAD = 0.02
"""Standard deviation of a peak, as a share of the highest, before it is learned: our own convention."""
_SPREAD_COUNTS = 4
"""Observations as which that counts: our own convention. Of the surfaces' peaks, 95 to 99 % lie within the interval of
95 % that three to ten trials with smaller batches give."""
_ALONE_SPREAD = 0.06
"""In addition where memory is the host's, of a device alone: its process keeps what earlier points took. Our own
convention."""

_AT_ONCE = 512
"""Configurations that are compared with all peaks at once: our own convention, which bounds what that takes."""


class Peak(NamedTuple):
    """Peak memory of a configuration."""

    config: TrainingConfig
    peak_bytes: int
    source: Literal["trial", "alone", "least"] = "trial"
    """"alone": of the device by itself, in RAM, where a process keeps what it once had; "least": it ran out of memory
    there, and needs as much or more."""


_Value = Callable[[TrainingConfig], float]


class _Term(NamedTuple):
    """A term of the law: its coefficient's prior, in shares of the highest peak, and what it multiplies."""

    mean: float
    sd: float
    value: _Value
    grows: bool = False
    """It also multiplies the batch, relative to the largest measured one."""
    of_workers: bool = False
    """It counts only where the limit is on RAM."""
    scale_bytes: int | None = None
    """What the prior is a share of, where not of the highest peak."""


_PRECISIONS: tuple[_Value, ...] = (
    lambda config: config.amp_dtype not in {"bfloat16", "float16"},
    lambda config: config.amp_dtype == "bfloat16",
    lambda config: config.amp_dtype == "float16",
)
_GROUPS: tuple[_Value, ...] = (lambda config: config.process_count > 1, lambda config: config.strategy == "dp")


def _workers(config: TrainingConfig) -> float:
    return config.num_workers


def _held(config: TrainingConfig) -> float:
    """Batches that workers hold: those that wait in the queue, and of each what it works on, samples and batch."""
    return config.num_workers * (config.batches_per_worker + 2)


def _ranks(config: TrainingConfig) -> float:
    return config.process_count


def _shared_pages(config: TrainingConfig) -> float:
    """A rank's part of the pages that a trial shares with the process it was forked from, less a rank's by itself.

    They are counted in equal shares (PSS): a trial of p processes has p of p + 1.
    """
    processes = config.process_count * (config.num_workers + 1)
    return processes / (processes + 1) / config.process_count - 0.5


def _denied(value: _Value) -> _Value:
    return lambda config: not value(config)


_OF_SETTINGS = [setting.memory for setting in SETTINGS if setting.memory is not None]
_TERMS = (
    *(_Term(0.5, 1.0, value) for value in _PRECISIONS),
    *(_Term(0.5, 0.5, value, grows=True) for value in _PRECISIONS),
    _Term(0.03, 0.03, _workers, of_workers=True),
    _Term(0.003, 0.004, _held, grows=True, of_workers=True),
    _Term(1.0, 0.4, _shared_pages, of_workers=True, scale_bytes=280 * 2**20),
    *(_Term(0.0, memory.sd, memory.of) for memory in _OF_SETTINGS),
    *(_Term(0.0, 0.3, value) for value in _GROUPS),
    *(_Term(0.0, 0.3, value, grows=True) for value in _GROUPS),
)
"""Before a second micro batch was measured, one twice as large is expected to take half as much again, give or take as
much. Pages that are shared are torch's libraries: 270 MiB on the surfaces of benchmarks/."""
_ALONE = ((0.03, 0.05), (0.2, 0.3))
"""Prior mean and standard deviation of what a device alone takes in addition in RAM: fixed, and with the batch."""
_CHANGES_OF_HALVES = (0.1, 0.3)
"""Standard deviation of what half precision changes: of what is fixed, and of the growth."""
_HALVES = np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 0.97], [0.0, 0.97, 1.0]])
"""Correlation of these changes: until both half precisions were measured, they are expected to be much alike."""
_GROWS, _OF_WORKERS = (np.array([getattr(term, name) for term in _TERMS]) for name in ("grows", "of_workers"))
_RISING = np.flatnonzero(np.append(_GROWS | _OF_WORKERS, [False, False]))
"""Terms that can't take less than no memory."""

_DEMANDS: tuple[_Value, ...] = (
    lambda config: config.micro_batch_size,
    _PRECISIONS[0],
    _ranks,
    _workers,
    _held,
    *_GROUPS,
    *(memory.of for memory in _OF_SETTINGS),
    *(_denied(memory.of) for memory in _OF_SETTINGS if memory.is_either),
)
"""What memory grows with: no more of any demand means no more memory. Of two layouts, and of compiled and not, neither
is known to need more: they are demands against each other. cuDNN's benchmark tries algorithms of any workspace, and
CUDA graphs keep a pool of their own."""
_BATCH, _RANKS = 0, 2
"""Where these demands stand."""
_COLUMNS = (*(term.value for term in _TERMS), *_DEMANDS)
_IN_RAM_ALONE = np.array([*_OF_WORKERS, *(demand in {_ranks, _workers, _held} for demand in _DEMANDS)])


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What at least one peak says of the peak memory of other configurations."""

    observed: Sequence[Peak]
    has_workers_in_ram: bool
    """The limit is on RAM: every rank, loader workers and the batches that they hold take a part of it."""

    def expect(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """Expected peak memory and its standard deviation, in bytes."""
        mean, covariance, spread, _ = self._posterior
        rows, _ = self._table(configs)
        return rows @ mean, np.sqrt((rows @ covariance * rows).sum(axis=1) + spread**2)

    @property
    def degrees_of_freedom(self) -> float:
        """With which the spread is known, as in Student's t of an interval."""
        return self._posterior[3]

    def chance_to_fit(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        """The probability that each stays within a limit; 1 where a measured peak leaves no doubt.

        Otherwise a batch that fits narrowly would stay uncertain after it was measured. A batch of k times the samples
        takes k times the memory at the most.
        """
        parts = (configs[begin : begin + _AT_ONCE] for begin in range(0, len(configs), _AT_ONCE))
        return np.concatenate([np.empty(0), *(self._chances(part, limit_bytes) for part in parts)])

    def _chances(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        from scipy.special import stdtr

        expected, sd = self.expect(configs)
        (_, asked), (_, seen) = self._table(configs), self._seen
        peaks = np.array([inf if peak.source == "least" else peak.peak_bytes for peak in self.observed])
        growth = np.maximum(1.0, asked[:, None, _BATCH] / seen[:, _BATCH])
        fits = np.all(asked[:, None, 1:] <= seen[:, 1:], axis=2) & (growth * peaks <= limit_bytes)
        fails = np.all(asked[:, None] >= seen, axis=2) & (peaks > limit_bytes)
        chances = np.where(
            fits.any(axis=1) & ~fails.any(axis=1), 1.0, stdtr(self.degrees_of_freedom, (limit_bytes - expected) / sd)
        )
        return np.asarray(chances, dtype=np.float64)

    @cached_property
    def _seen(self) -> tuple[Floats, Floats]:
        return self._table([peak.config for peak in self.observed])

    @cached_property
    def _units(self) -> tuple[float, int]:
        """The highest peak and the largest batch that were measured; of all, where none was."""
        known = [peak for peak in self.observed if peak.source != "least"] or self.observed
        return max(float(peak.peak_bytes) for peak in known), max(peak.config.micro_batch_size for peak in known)

    @cached_property
    def _posterior(self) -> tuple[Floats, Floats, float, float]:
        """Mean and covariance of the terms' coefficients, and the spread of a peak with its degrees of freedom.

        A peak that was only passed counts as one where less would be expected there.
        """
        (scale, unit), peaks = self._units, np.array([peak.peak_bytes for peak in self.observed], dtype=np.float64)
        is_least, is_alone = (np.array([peak.source == name for peak in self.observed]) for name in ("least", "alone"))
        rows, demands = self._seen
        rows = np.column_stack([rows, is_alone, is_alone * demands[:, _BATCH] / unit])
        prior_mean, prior_precision = _prior(scale)
        counts, variance, extra = ~is_least, (_SPREAD * scale) ** 2, is_alone * (_ALONE_SPREAD * scale) ** 2
        for _ in range(6):  # on the surfaces nothing changes by 1 % after six rounds
            weighted = rows.T * counts / (variance + extra)
            precision, pull = prior_precision + weighted @ rows, prior_precision @ prior_mean + weighted @ peaks
            covariance = np.linalg.inv(precision)
            expected, shares = rows @ covariance @ pull, counts * variance / (variance + extra)
            counts = ~is_least | (expected < peaks)
            freedom = _SPREAD_COUNTS + (shares * (1 - (weighted.T @ covariance * rows).sum(axis=1))).sum()
            variance = (
                _SPREAD_COUNTS * (_SPREAD * scale) ** 2 + np.square(shares * (peaks - expected)).sum()
            ) / freedom
        terms = len(_TERMS)
        mean = _rising_mean(precision, pull)[:terms]
        return mean, covariance[:terms, :terms], float(np.sqrt(variance)), float(freedom)

    def _table(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """The columns of all terms, (configs, terms), and all demands, (configs, demands).

        Each rank takes its own, where the limit is on the RAM that they share.
        """
        table = np.array([_values(config) for config in configs], dtype=np.float64)
        counts = np.where(_IN_RAM_ALONE & (not self.has_workers_in_ram), 0.0, table)
        terms, demands = np.split(counts, [len(_TERMS)], axis=1)
        growth = np.where(_GROWS, demands[:, [_BATCH]] / self._units[1], 1.0)
        return terms * growth * np.maximum(1.0, demands[:, [_RANKS]]), demands


def _prior(scale_bytes: float) -> tuple[Floats, Floats]:
    """Mean and inverse covariance of all coefficients, those of a device alone last."""
    scales = np.array([term.scale_bytes or scale_bytes for term in _TERMS] + [scale_bytes] * len(_ALONE))
    means, sds = np.array([(term.mean, term.sd) for term in _TERMS] + list(_ALONE)).T
    covariance = np.diag(np.square(sds))
    for first, change in zip((0, 3), _CHANGES_OF_HALVES, strict=True):
        covariance[first : first + 3, first : first + 3] = sds[first] ** 2 + change**2 * _HALVES
    return means * scales, np.asarray(np.linalg.inv(covariance * np.outer(scales, scales)), dtype=np.float64)


def _rising_mean(precision: Floats, pull: Floats) -> Floats:
    """The posterior mean where no rising term is negative: those that would be are 0, the most negative first."""
    kept = np.arange(len(pull))
    while True:
        mean = np.zeros(len(pull))
        mean[kept] = np.linalg.solve(precision[np.ix_(kept, kept)], pull[kept])
        lowest = _RISING[np.argmin(mean[_RISING])]
        if mean[lowest] >= 0:
            return mean
        kept = kept[kept != lowest]


@lru_cache(maxsize=8192)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """The columns of one configuration; cached, since a proposal asks for thousands of the same ones."""
    return tuple(column(config) for column in _COLUMNS)
