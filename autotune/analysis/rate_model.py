"""A model of the machine that learns during a search: what rate settings should reach that were not tried yet. Pure.

Comes in: sightings of the loader alone, of the device alone, and of whole runs. Goes out: a MachineModel, which
forecasts the rate of any configuration with its uncertainty, and what either side would reach by itself.

The rate is the lower of loader, device and cores, softened. The logarithms of both sides are sums of effects of single
settings (a Gaussian process each: smooth along numbers, free between categories) and of what settings do only together;
what runs fall short of the joint rate by is a third such sum. Runs see both sides through the softened minimum, which
is taken to be linear around the most likely state. How far the machine scatters from one measurement to the next is
learned as well. The scales below say how far settings are expected to carry a rate
before anything was measured: our own conventions, checked by benchmarks/regret.py.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 2; additive kernels: Duvenaud et
al. 2011, "Additive Gaussian Processes".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import log, log2
from statistics import fmean, median
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.floats import Floats
from autotune.analysis.laplace import Problem, Solution, most_likely
from autotune.records.ceilings import overlaps
from autotune.settings.environment import Environment
from autotune.settings.training_config import TORCH_PREFETCH_FACTOR, TrainingConfig
from autotune.space.constraints import hosts_of

__all__ = ["Forecast", "MachineModel", "Sighting", "fit_machine"]

_SOFTNESS = 8.0
"""Of the minimum: two equal sides reach 92 % of either together, as a queue of a few batches between them does."""
_LEVEL_SD = 1.5
_LEAST_CPU_S = 1e-12  # of a sample, where nothing was seen to take any
_SCATTERS = (0.16, 0.11, 0.07, 0.04, 0.02, 0.0)
"""Standard deviations of the scatter that are considered. The more, the easier to fit: each is a start for the next."""
_USUAL_SCATTER = 0.02
"""What is expected of a machine before anything was seen."""
_FEWEST_RUNS = 5  # fewer that contradict each other tell of settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A rate that was measured."""

    kind: Literal["loader", "device", "run"]
    """Either side alone, or both in a trial."""
    config: TrainingConfig
    samples_per_s: float
    relative_sd: float
    cpu_s_per_sample: float | None = None
    """CPU seconds for a sample, of all threads and workers; None where nobody looked."""


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
    """What measuring the same settings anew may differ by, beyond `sd` and what the measurement itself can tell."""


@dataclass(frozen=True, slots=True)
class _Effect:
    """How far one setting carries the logarithm of a rate by itself."""

    value: Callable[[TrainingConfig], object]
    sd: float
    length: float | None = None
    """Distance over which a number's effect changes; None: a category, each value free of the others."""


def _workers(config: TrainingConfig) -> float:
    return log2(1 + config.num_workers)


def _prefetch(config: TrainingConfig) -> float:
    return log2(config.prefetch_factor or TORCH_PREFETCH_FACTOR) if config.num_workers else 0.0


def _batch(config: TrainingConfig) -> float:
    return log2(config.micro_batch_size)


def _ranks(config: TrainingConfig) -> float:
    return log2(config.world_size)


_LOADER = (
    _Effect(_workers, sd=0.8, length=1.5),
    _Effect(lambda one: one.num_workers > 0, sd=0.5),
    _Effect(_prefetch, sd=0.15, length=2.0),
    _Effect(_batch, sd=0.6, length=3.0),
    _Effect(_ranks, sd=0.4, length=2.0),
    _Effect(lambda one: one.persistent_workers, sd=0.15),
    _Effect(lambda one: one.pin_memory, sd=0.1),
    _Effect(lambda one: one.strategy, sd=0.3),
)
_DEVICE = (
    _Effect(_batch, sd=0.7, length=3.0),
    _Effect(lambda one: log2(one.grad_accum_steps), sd=0.1, length=2.0),
    _Effect(lambda one: one.amp_dtype, sd=0.5),
    _Effect(lambda one: one.channels_last, sd=0.2),
    _Effect(lambda one: one.compile, sd=0.4),
    _Effect(lambda one: one.intra_op_threads, sd=0.5),
    _Effect(_ranks, sd=0.4, length=2.0),
    _Effect(lambda one: one.strategy, sd=0.3),
    _Effect(lambda one: one.ddp, sd=0.1),
)
_SHORTFALL = (
    _Effect(lambda one: (one.num_workers > 0, one.intra_op_threads), sd=0.15),
    _Effect(_workers, sd=0.1, length=1.5),
    _Effect(_batch, sd=0.07, length=2.0),
    _Effect(lambda one: one.amp_dtype, sd=0.05),
    _Effect(lambda one: (one.strategy, one.world_size), sd=0.1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A Gaussian process over configurations: effects, and what they do only together."""

    effects: tuple[_Effect, ...]
    level_sd: float
    together_sd: float
    """Of what all settings do only together."""
    pair: frozenset[Callable[[TrainingConfig], object]] = frozenset()
    """Numbers that do more together: what a batch costs a loader counts the more, the more workers share its items."""
    pair_sd: float = 0.0

    def covariance(self, one: Floats, other: Floats) -> Floats:
        """The prior covariance of two lists of places, (effects, places) each: (places of one, places of other)."""
        total: Floats = np.full((one.shape[1], other.shape[1]), self.level_sd**2)
        together = np.full_like(total, self.together_sd**2)
        pair = np.full_like(total, self.pair_sd**2)
        for effect, left, right in zip(self.effects, one, other, strict=True):
            alike = _alike(effect, left, right)
            total += effect.sd**2 * alike
            together *= alike
            pair *= alike if effect.value in self.pair else 1.0
        return np.asarray(total + together + pair, dtype=np.float64)

    def variance(self) -> float:
        """The prior variance at any place."""
        return self.level_sd**2 + sum(effect.sd**2 for effect in self.effects) + self.together_sd**2 + self.pair_sd**2


def _alike(effect: _Effect, left: Floats, right: Floats) -> Floats:
    if effect.length is None:
        return np.asarray(left[:, None] == right[None, :], dtype=np.float64)
    alike: Floats = np.exp(-0.5 * ((left[:, None] - right[None, :]) / effect.length) ** 2)
    return alike


_LOADER_PROCESS = _Process(
    effects=_LOADER, level_sd=_LEVEL_SD, together_sd=0.1, pair=frozenset({_workers, _batch}), pair_sd=0.4
)
_DEVICE_PROCESS = _Process(effects=_DEVICE, level_sd=_LEVEL_SD, together_sd=0.08)
_SHORTFALL_PROCESS = _Process(effects=_SHORTFALL, level_sd=0.1, together_sd=0.04)
_PROCESSES = (_LOADER_PROCESS, _DEVICE_PROCESS, _SHORTFALL_PROCESS)


def _places(configs: Sequence[TrainingConfig]) -> list[Floats]:
    """Configurations as each process sees them: the values of its effects, (effects, configs)."""
    table = np.array([_values(config) for config in configs], dtype=np.float64).T
    starts = np.cumsum([len(process.effects) for process in _PROCESSES])
    return np.split(table, starts[:-1])


@lru_cache(maxsize=16_384)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """The values of all processes' effects; thousands are asked for before each trial, of much the same settings."""
    return tuple(_value(effect, config) for process in _PROCESSES for effect in process.effects)


def _value(effect: _Effect, config: TrainingConfig) -> float:
    """A number as it is, a category as a number of its own."""
    value = effect.value(config)
    return value if isinstance(value, float) else float(crc32(repr(value).encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cores:
    """What sampling and training take of the machine's cores."""

    cores: int
    loader_cpu_s: float
    """CPU seconds of loading one sample in workers."""
    threads: dict[int | None, float]
    """Cores in use while a rank trains, by `intra_op_threads`."""

    def in_use(self, config: TrainingConfig) -> float:
        """Cores that a rank's training keeps busy."""
        known = self.threads.get(config.intra_op_threads)
        return known if known is not None else min(config.intra_op_threads or self.cores, self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joint:
    """How loader and device go together in some configurations."""

    is_overlapped: NDArray[np.bool_]
    """They run side by side; else one after the other."""
    busy: Floats
    """Cores that training keeps busy."""
    cores: Floats
    """Cores that there are."""
    loader_cpu_s: float

    def log_rate(self, log_loader: Floats, log_device: Floats) -> Floats:
        """Side by side, the slowest of loader, device and cores, softened; else the times of both together."""
        bounds = np.stack([log_loader, log_device, np.log(self.cores / self._cpu_s(log_device))])
        together = -np.logaddexp.reduce(-_SOFTNESS * bounds, axis=0) / _SOFTNESS
        in_turns = -np.logaddexp(-log_loader, -log_device)
        return np.where(self.is_overlapped, together, in_turns)

    def shares(self, log_loader: Floats, log_device: Floats) -> tuple[Floats, Floats]:
        """Derivatives of the logarithm of the joint rate by those of loader and device."""
        here, cpu_s = self.log_rate(log_loader, log_device), self._cpu_s(log_device)
        softness = np.where(self.is_overlapped, _SOFTNESS, 1.0)
        by_loader, by_device = (np.exp(softness * (here - side)) for side in (log_loader, log_device))
        by_cores = np.exp(softness * (here - np.log(self.cores / cpu_s))) * (1 - self.loader_cpu_s / cpu_s)
        return by_loader, by_device + np.where(self.is_overlapped, by_cores, 0.0)

    def _cpu_s(self, log_device: Floats) -> Floats:
        """CPU seconds that a sample takes in all."""
        return np.maximum(self.loader_cpu_s + self.busy * np.exp(-log_device), _LEAST_CPU_S)


@dataclass(frozen=True)
class MachineModel:
    """What is known of the machine. Made by `fit_machine`."""

    sightings: tuple[Sighting, ...]
    environment: Environment
    cores: _Cores
    loader_level: float
    """Mean of the logarithm of the loader's rate, before scaling by ranks."""
    device_level: float

    def forecast(self, configs: Sequence[TrainingConfig]) -> Forecast:
        """What configurations should reach. Takes milliseconds for thousands of them."""
        scatter_sd, solution = self._likeliest
        crossings = self._crossings(configs)
        log_loader, log_device, short = self._before(configs) + np.einsum("pij,pj->pi", crossings, solution.weights)
        joint = self._joint_of(configs)
        loader_share, device_share = joint.shares(log_loader, log_device)
        of_loader, of_device, of_shortfall = crossings * solution.pulls[:, None, :]
        of_joint = loader_share[:, None] * of_loader + device_share[:, None] * of_device + of_shortfall
        before = (
            loader_share**2 * _LOADER_PROCESS.variance()
            + device_share**2 * _DEVICE_PROCESS.variance()
            + _SHORTFALL_PROCESS.variance()
        )
        return Forecast(
            log_rate=joint.log_rate(log_loader, log_device) + short,
            sd=_sd(before, of_joint, solution.root),
            loader=np.exp(log_loader),
            device=np.exp(log_device),
            loader_sd=_sd(_LOADER_PROCESS.variance(), of_loader, solution.root),
            device_sd=_sd(_DEVICE_PROCESS.variance(), of_device, solution.root),
            scatter_sd=scatter_sd,
        )

    @cached_property
    def _likeliest(self) -> tuple[float, Solution]:
        """The scatter that explains best what was seen, and the state with it.

        A sighting tells how sure it is by itself; that neighbours take turns on the machine, and what no sum of effects
        can say, shows only in how sightings lie to each other.
        """
        configs = [one.config for one in self.sightings]
        expect, pulls = self._observers(configs)
        problem = Problem(
            seen=np.array([log(one.samples_per_s) for one in self.sightings]),
            variances=np.array([one.relative_sd**2 for one in self.sightings]),
            before=self._before(configs),
            covariances=self._crossings(configs),
            expect=expect,
            pulls=pulls,
        )
        fits = list[tuple[float, Solution]]()
        runs = sum(one.kind == "run" for one in self.sightings)
        for scatter_sd in _SCATTERS:
            scattered = replace(problem, variances=problem.variances + scatter_sd**2)
            fits.append((scatter_sd, most_likely(scattered, start=fits[-1][1] if fits else None)))
        return max(
            fits if runs >= _FEWEST_RUNS else fits[-1:],
            key=lambda fit: fit[1].log_evidence - 0.5 * (fit[0] / _USUAL_SCATTER) ** 2,
        )

    def _observers(
        self, configs: Sequence[TrainingConfig]
    ) -> tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]:
        """What the sightings should have shown in a state, and its derivatives by loader, device and shortfall."""
        joint = self._joint_of(configs)
        is_loader, is_device, is_run = (
            np.array([one.kind == kind for one in self.sightings], dtype=np.float64)
            for kind in ("loader", "device", "run")
        )

        def expect(state: Floats) -> Floats:
            log_loader, log_device, short = state
            together = joint.log_rate(log_loader, log_device)
            seen: Floats = is_loader * log_loader + is_device * log_device + is_run * (together + short)
            return seen

        def pulls(state: Floats) -> Floats:
            by_loader, by_device = joint.shares(state[0], state[1])
            return np.stack([is_loader + is_run * by_loader, is_device + is_run * by_device, is_run])

        return expect, pulls

    def _crossings(self, configs: Sequence[TrainingConfig]) -> Floats:
        """Prior covariances between configurations and sightings, (processes, configs, sightings)."""
        both = zip(_PROCESSES, _places(configs), self._places_seen, strict=True)
        return np.stack([process.covariance(asked, seen) for process, asked, seen in both])

    @cached_property
    def _places_seen(self) -> list[Floats]:
        return _places([one.config for one in self.sightings])

    def _before(self, configs: Sequence[TrainingConfig]) -> Floats:
        """Means of loader, device and shortfall: a group's rates grow with its ranks, as long as nothing was seen."""
        ranks = np.array([log(config.world_size) for config in configs])
        return np.stack([self.loader_level + ranks, self.device_level + ranks, np.zeros(len(configs))])

    def _joint_of(self, configs: Sequence[TrainingConfig]) -> _Joint:
        kind, known = self.environment.device_kind, self.cores
        return _Joint(
            is_overlapped=np.array([overlaps(config, kind) for config in configs], dtype=np.bool_),
            busy=np.array([known.in_use(config) * config.process_count for config in configs]),
            cores=np.array([known.cores * hosts_of(config, self.environment) for config in configs], dtype=np.float64),
            loader_cpu_s=known.loader_cpu_s,
        )


def fit_machine(sightings: Sequence[Sighting], environment: Environment) -> MachineModel:
    """A model of what was seen; there must be a run among it."""
    runs = [log(one.samples_per_s / one.config.world_size) for one in sightings if one.kind == "run"]
    return MachineModel(
        sightings=tuple(sightings),
        environment=environment,
        cores=_cores_of(sightings, environment),
        loader_level=_level(sightings, "loader", runs),
        device_level=_level(sightings, "device", runs),
    )


def _level(sightings: Sequence[Sighting], kind: str, runs: Sequence[float]) -> float:
    """Where a side was not looked at by itself, it is taken to be somewhat above the runs."""
    own = [log(one.samples_per_s / one.config.world_size) for one in sightings if one.kind == kind]
    return fmean(own) if own else fmean(runs) + log(2)


def _cores_of(sightings: Sequence[Sighting], environment: Environment) -> _Cores:
    loader = [
        one.cpu_s_per_sample
        for one in sightings
        if one.kind == "loader" and one.config.num_workers > 0 and one.cpu_s_per_sample
    ]
    training: dict[int | None, list[float]] = {}
    for one in sightings:
        if one.kind == "device" and one.cpu_s_per_sample is not None:
            in_use = one.cpu_s_per_sample * one.samples_per_s
            training.setdefault(one.config.intra_op_threads, []).append(in_use)
    return _Cores(
        cores=environment.cores,
        loader_cpu_s=median(loader) if loader else 0.0,
        threads={threads: median(values) for threads, values in training.items()},
    )


def _sd(before: Floats | float, crossing: Floats, root: Floats) -> Floats:
    """Standard deviations after what was seen."""
    explained = np.linalg.solve(root, crossing.T)
    sd: Floats = np.sqrt(np.maximum(before - (explained**2).sum(axis=0), 0.0))
    return sd
