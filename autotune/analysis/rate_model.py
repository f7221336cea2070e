"""A model of the machine, learned during a search: the rate to expect of settings that were not tried yet. Pure.

Comes in: observations of the loader alone, of the device alone, and of whole runs. Goes out: a RateModel, which
forecasts the rate of any configuration with its uncertainty, and the rate of either side alone.

The rate is a softened minimum of loader, device and cores. The logarithms of both sides are sums of effects of single
settings (a Gaussian process each: smooth along numbers, free between categories) and of interactions. What runs fall
short of the joint rate by is a third such sum. Runs observe both sides through the softened minimum, which is taken to
be linear around the most likely state. How far the machine scatters from one measurement to the next is learned too.
The standard deviations and lengths below say how far settings are expected to change a rate before anything was
measured: our own conventions, checked by benchmarks/regret.py.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 2; additive kernels: Duvenaud et
al. 2011, "Additive Gaussian Processes".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import log, log2, prod
from statistics import fmean, median
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.laplace import Posterior, Problem, factor_of, most_likely
from autotune.analysis.statistics import Floats
from autotune.records.ceilings import overlaps
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.space.constraints import hosts_of

__all__ = ["Forecast", "Observation", "RateModel"]

_KINDS = ("loader", "device", "run")
_SOFTNESS = 8.0
"""Of the minimum: two equal sides reach 92 % of either together, as a queue of a few batches between them does. Our own
convention."""
_LEVEL_SD = 1.5
"""Prior standard deviation of a side's level: a factor of 4.5 either way, our own convention."""
_LEAST_CPU_S = 1e-12
"""CPU seconds of a sample where none were observed: only keeps the logarithm finite."""
_SCATTERS = (0.16, 0.11, 0.07, 0.04, 0.02, 0.0)
"""Standard deviations of the scatter that are considered. The larger, the easier to fit: each is a start for the next.
Our own convention."""
_USUAL_SCATTER = 0.02
"""Prior standard deviation of the scatter: our own convention."""
_FEWEST_RUNS = 5
"""Runs from which on the scatter is learned: fewer that contradict each other show effects of settings. Our own
convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A rate that was measured."""

    kind: Literal["loader", "device", "run"]
    """Either side alone, or both in a trial."""
    config: TrainingConfig
    samples_per_s: float
    relative_sd: float
    cpu_s_per_sample: float | None = None
    """CPU seconds for a sample, of all threads and workers; None where they were not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What some configurations should reach, element by element."""

    log_rate: Floats
    sd: Floats
    """Standard deviation of the logarithm of the rate."""
    loader: Floats
    """Rate of the loader alone, in samples per second."""
    device: Floats
    """Rate of the device alone."""
    loader_sd: Floats
    """Standard deviation of its logarithm."""
    device_sd: Floats
    scatter_sd: float
    """By how much repeated measurements of the same settings differ, beyond `sd` and a measurement's own interval."""


class _Effect(NamedTuple):
    """How much one setting changes the logarithm of a rate by itself."""

    value: Callable[[TrainingConfig], object]
    sd: float
    length: float | None = None
    """Distance over which a number's effect changes; None: a category, each value free of the others."""

    def kernel(self, left: Floats, right: Floats) -> Floats:
        """Correlation of the effect between two lists of values, (left, right)."""
        apart = left[:, None] - right
        return (apart == 0).astype(np.float64) if self.length is None else np.exp(-0.5 * (apart / self.length) ** 2)


def _workers(config: TrainingConfig) -> float:
    return log2(1 + config.num_workers)


def _batch(config: TrainingConfig) -> float:
    return log2(config.micro_batch_size)


def _ranks(config: TrainingConfig) -> float:
    return log2(config.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A Gaussian process over configurations: effects of single settings, and their interactions."""

    effects: tuple[_Effect, ...]
    level_sd: float
    interaction_sd: float
    """Of the interaction of all settings."""
    pair_sd: float = 0.0
    """Of the interaction of the first two effects by themselves: the more workers share the items, the more the cost of
    a batch counts for a loader."""

    def covariance(self, left: Floats, right: Floats) -> Floats:
        """The prior covariance of two lists of places, (effects, places) each: (left places, right places)."""
        kernels = [effect.kernel(*values) for effect, *values in zip(self.effects, left, right, strict=True)]
        total: Floats = np.full_like(kernels[0], self.level_sd**2)
        for effect, kernel in zip(self.effects, kernels, strict=True):
            total += effect.sd**2 * kernel
        return total + self.interaction_sd**2 * prod(kernels) + self.pair_sd**2 * kernels[0] * kernels[1]

    def variance(self) -> float:
        """The prior variance at any place."""
        effects = sum(effect.sd**2 for effect in self.effects)
        return self.level_sd**2 + effects + self.interaction_sd**2 + self.pair_sd**2


# Standard deviations of the logarithm of a rate, and lengths in doublings: our own conventions, which
# benchmarks/regret.py judges together. The first two effects of a side may interact (pair_sd).
_LOADER = _Process(
    effects=(
        _Effect(_workers, sd=0.8, length=1.5),
        _Effect(_batch, sd=0.6, length=3.0),
        _Effect(lambda config: config.num_workers > 0, sd=0.5),
        _Effect(lambda config: log2(config.batches_per_worker) if config.num_workers else 0.0, sd=0.15, length=2.0),
        _Effect(_ranks, sd=0.4, length=2.0),
        _Effect(lambda config: (config.persistent_workers, config.in_order), sd=0.15),  # both are switches of workers
        _Effect(lambda config: config.pin_memory, sd=0.1),
        _Effect(lambda config: config.strategy, sd=0.3),
    ),
    level_sd=_LEVEL_SD,
    interaction_sd=0.1,
    pair_sd=0.4,
)
_DEVICE = _Process(
    effects=(
        _Effect(_batch, sd=0.7, length=3.0),
        _Effect(lambda config: log2(config.grad_accum_steps), sd=0.1, length=2.0),
        _Effect(lambda config: config.amp_dtype, sd=0.5),
        _Effect(lambda config: config.channels_last, sd=0.2),
        _Effect(lambda config: config.compile, sd=0.4),
        _Effect(lambda config: config.intra_op_threads, sd=0.5),
        _Effect(_ranks, sd=0.4, length=2.0),
        _Effect(lambda config: config.strategy, sd=0.3),
        _Effect(lambda config: config.ddp, sd=0.1),
    ),
    level_sd=_LEVEL_SD,
    interaction_sd=0.08,
)
_SHORTFALL = _Process(
    effects=(
        _Effect(lambda config: (config.num_workers > 0, config.intra_op_threads), sd=0.15),
        _Effect(_workers, sd=0.1, length=1.5),
        _Effect(_batch, sd=0.07, length=2.0),
        _Effect(lambda config: config.amp_dtype, sd=0.05),
        _Effect(lambda config: (config.strategy, config.world_size), sd=0.1),
    ),
    level_sd=0.1,
    interaction_sd=0.04,
)
_PROCESSES = (_LOADER, _DEVICE, _SHORTFALL)


def _places(configs: Sequence[TrainingConfig]) -> list[Floats]:
    """For each process, the values of its effects, (effects, configs)."""
    table = np.array([_values(config) for config in configs], dtype=np.float64).T
    starts = np.cumsum([len(process.effects) for process in _PROCESSES])
    return np.split(table, starts[:-1])


@lru_cache(maxsize=16_384)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """The values of all processes' effects; cached, since a proposal asks for thousands of the same configurations."""
    values = (effect.value(config) for process in _PROCESSES for effect in process.effects)
    # a number as it is, a category as a number of its own
    return tuple(value if isinstance(value, float) else float(crc32(repr(value).encode())) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joint:
    """How loader and device work together in some configurations."""

    is_overlapped: NDArray[np.bool_]
    """They run side by side; else one after the other."""
    busy: Floats
    """Cores that training keeps busy."""
    cores: Floats
    """Cores that there are."""
    loader_cpu_s: float

    def log_rate(self, log_loader: Floats, log_device: Floats) -> Floats:
        """Side by side, the slowest of loader, device and cores, softened; else the times of both added up."""
        bounds = np.stack([log_loader, log_device, np.log(self.cores / self._cpu_s(log_device))])
        side_by_side = -np.logaddexp.reduce(-_SOFTNESS * bounds, axis=0) / _SOFTNESS
        in_turns = -np.logaddexp(-log_loader, -log_device)
        return np.where(self.is_overlapped, side_by_side, in_turns)

    def slopes(self, log_loader: Floats, log_device: Floats) -> tuple[Floats, Floats]:
        """Derivatives of the logarithm of the joint rate by those of loader and device."""
        here, cpu_s = self.log_rate(log_loader, log_device), self._cpu_s(log_device)
        softness = np.where(self.is_overlapped, _SOFTNESS, 1.0)
        by_loader, by_device = (np.exp(softness * (here - side)) for side in (log_loader, log_device))
        by_cores = np.exp(softness * (here - np.log(self.cores / cpu_s))) * (1 - self.loader_cpu_s / cpu_s)
        return by_loader, by_device + np.where(self.is_overlapped, by_cores, 0.0)

    def _cpu_s(self, log_device: Floats) -> Floats:
        """CPU seconds of a sample in all."""
        return np.maximum(self.loader_cpu_s + self.busy * np.exp(-log_device), _LEAST_CPU_S)


@dataclass(frozen=True)
class RateModel:
    """What is known of the machine from observations, of which at least one must be a run."""

    observations: Sequence[Observation]
    environment: Environment

    def forecast(self, configs: Sequence[TrainingConfig]) -> Forecast:
        """What configurations should reach. Takes milliseconds for thousands of them."""
        scatter_sd, posterior = self._most_likely
        cross_covariance = self._cross_covariance(configs)
        moved = np.einsum("pij,pj->pi", cross_covariance, posterior.weights)
        log_loader, log_device, shortfall = self._prior_mean(configs) + moved
        joint = self._joint_of(configs)
        loader_slope, device_slope = joint.slopes(log_loader, log_device)
        loader, device, short = cross_covariance * posterior.jacobian[:, None, :]
        prior_variance = (
            loader_slope**2 * _LOADER.variance() + device_slope**2 * _DEVICE.variance() + _SHORTFALL.variance()
        )
        run = loader_slope[:, None] * loader + device_slope[:, None] * device + short
        return Forecast(
            log_rate=joint.log_rate(log_loader, log_device) + shortfall,
            sd=_sd(prior_variance, run, posterior.cholesky),
            loader=np.exp(log_loader),
            device=np.exp(log_device),
            loader_sd=_sd(_LOADER.variance(), loader, posterior.cholesky),
            device_sd=_sd(_DEVICE.variance(), device, posterior.cholesky),
            scatter_sd=scatter_sd,
        )

    @cached_property
    def _seen(self) -> list[Observation]:
        """In an order of their own: where the fit has several optima, that which it finds depends on the order."""
        return sorted(self.observations, key=repr)

    @cached_property
    def _most_likely(self) -> tuple[float, Posterior]:
        """The scatter that explains the observations best, and the state with it.

        An observation knows its own uncertainty. That neighbours take turns on the machine, and what no sum of effects
        can express, shows only when observations are compared with each other.
        """
        configs = [observation.config for observation in self._seen]
        joint = self._joint_of(configs)
        is_of_kind = np.array([[seen.kind == kind for seen in self._seen] for kind in _KINDS], dtype=np.float64)

        def expect(state: Floats) -> Floats:
            run = joint.log_rate(state[0], state[1]) + state[2]
            return np.asarray((is_of_kind * np.stack([state[0], state[1], run])).sum(axis=0), dtype=np.float64)

        def jacobian(state: Floats) -> Floats:
            by_loader, by_device = joint.slopes(state[0], state[1])
            is_loader, is_device, is_run = is_of_kind
            return np.stack([is_loader + is_run * by_loader, is_device + is_run * by_device, is_run])

        problem = Problem(
            observed=np.array([log(observation.samples_per_s) for observation in self._seen]),
            variances=np.array([observation.relative_sd**2 for observation in self._seen]),
            prior_mean=self._prior_mean(configs),
            factor=factor_of(self._cross_covariance(configs)),
            expect=expect,
            jacobian=jacobian,
        )
        fits = list[tuple[float, Posterior]]()
        for scatter_sd in _SCATTERS if is_of_kind[2].sum() >= _FEWEST_RUNS else _SCATTERS[-1:]:
            scattered = replace(problem, variances=problem.variances + scatter_sd**2)
            fits.append((scatter_sd, most_likely(scattered, start=fits[-1][1] if fits else None)))
        return max(fits, key=lambda fit: fit[1].log_evidence - 0.5 * (fit[0] / _USUAL_SCATTER) ** 2)

    def _cross_covariance(self, configs: Sequence[TrainingConfig]) -> Floats:
        """Prior covariances between configurations and observations, (processes, configs, observations)."""
        both = zip(_PROCESSES, _places(configs), _places([seen.config for seen in self._seen]), strict=True)
        return np.stack([process.covariance(places, observed) for process, places, observed in both])

    def _prior_mean(self, configs: Sequence[TrainingConfig]) -> Floats:
        """Of loader, device and shortfall: the rates of a group grow with its ranks until one was measured.

        Where a side was not measured alone, it is expected at twice the rate of the runs: our own convention.
        """
        loaders, devices, runs = (
            [log(seen.samples_per_s / seen.config.world_size) for seen in self._seen if seen.kind == kind]
            for kind in _KINDS
        )
        loader, device = (fmean(side) if side else fmean(runs) + log(2) for side in (loaders, devices))
        ranks = np.array([log(config.world_size) for config in configs])
        return np.stack([loader + ranks, device + ranks, np.zeros(len(configs))])

    def _joint_of(self, configs: Sequence[TrainingConfig]) -> _Joint:
        environment, cores = self.environment, self.environment.cores
        loader_cpu_s, busy_cores = list[float](), dict[int | None, list[float]]()
        for seen in self._seen:
            if seen.kind == "loader" and seen.config.num_workers > 0 and seen.cpu_s_per_sample:
                loader_cpu_s.append(seen.cpu_s_per_sample)
            elif seen.kind == "device" and seen.cpu_s_per_sample is not None:
                cores_of = busy_cores.setdefault(seen.config.intra_op_threads, [])
                cores_of.append(seen.cpu_s_per_sample * seen.samples_per_s)
        busy_of = {threads: median(values) for threads, values in busy_cores.items()}
        threads = [config.intra_op_threads for config in configs]
        busy = np.array([busy_of.get(count, min(count or cores, cores)) for count in threads], dtype=np.float64)
        return _Joint(
            is_overlapped=np.array([overlaps(config, environment.device_kind) for config in configs], dtype=np.bool_),
            busy=busy * [config.process_count for config in configs],
            cores=np.array([cores * hosts_of(config, environment) for config in configs], dtype=np.float64),
            loader_cpu_s=median(loader_cpu_s or [0.0]),
        )


def _sd(prior_variance: Floats | float, cross_covariance: Floats, cholesky: Floats) -> Floats:
    """Posterior standard deviations."""
    explained = np.linalg.solve(cholesky, cross_covariance.T)
    return np.asarray(np.sqrt(np.maximum(prior_variance - (explained**2).sum(axis=0), 0.0)), dtype=np.float64)
