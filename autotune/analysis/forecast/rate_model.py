"""A model of the machine, learned during a search: the rate to expect of settings that were not tried yet. Pure.

Comes in: observations of the loader, of the device and of copies alone, and of whole runs. Goes out: a RateModel, which
forecasts the rate of any configuration with its uncertainty, and the rate of each side alone.

rate_law.py says what each side and all together reach from a few costs, of which each has a prior that may differ
between settings: a Gaussian process, the sum of effects of single settings (smooth along numbers, free between
categories) and of interactions. So what was seen in one precision tells of another, and one point of the device is
enough to begin with. What the law does not explain is left to the same sums, with little room where the law explains.
Looks and runs observe the costs through the law, which is taken to be linear around the most likely state. How far the
machine scatters from one measurement to the next is learned too. The standard deviations and lengths below say how far
settings are expected to change a cost before anything was measured: our own conventions.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 2; additive kernels: Duvenaud et
al. 2011, "Additive Gaussian Processes".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import chain
from math import exp, log, prod
from operator import attrgetter
from statistics import fmean, median
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from autotune.analysis.decisions.run_spread import assumed_spread
from autotune.analysis.forecast.laplace import Posterior, Problem, factor_of, most_likely
from autotune.analysis.forecast.rate_law import COSTS, USUAL_SOFTNESS, Circumstances, law, rates_of
from autotune.analysis.statistics import Floats
from autotune.records.ceilings import overlaps
from autotune.records.run_spread import RunSpread
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings_table import SETTINGS
from autotune.space.constraints import cores_within, hosts_of

__all__ = ["Forecast", "Observation", "RateModel"]

_KINDS = ("loader", "device", "run", "copy", "launch", "take")
"""Kinds of observations, in the order of the law's Rates."""
_LEVEL_SD = 1.5
"""Prior standard deviation of a side's level: a factor of 4.5 either way, our own convention."""
_AT_ONCE = 512
"""Configurations whose covariances with all observations are held at once: our own convention. With two hundred
observations they take 10 MB, where those of four thousand configurations would take half a megabyte a trial."""
_WARM_FROM = 30
"""Observations from which on a fit begins where the last one ended: our own convention. Before, each fit may find
another optimum."""
_SCATTERS = (6.0, 3.5, 2.0, 1.4, 1.0, 0.7, 0.4)
"""Standard deviations of the scatter that are considered, over the learned spread between runs of a kind. The larger,
the easier to fit: each is a start for the next. Our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A rate that was measured."""

    kind: Literal["loader", "device", "run", "copy", "launch", "take"]
    """A side alone, of the host its launching or its taking of ready batches, or all in a trial."""
    config: TrainingConfig
    samples_per_s: float
    relative_sd: float
    cpu_s_per_sample: float | None = None
    """CPU seconds for a sample, of all threads and workers; None where they were not measured."""
    is_steady: bool = False
    """Another measurement hardly differs, beyond `relative_sd`: the device set the pace, or a side was alone."""


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
    copy: Floats
    """Rate of copying batches alone; infinite where nothing is copied, or no copy was measured."""
    host: Floats
    """Rate of the host that launches and takes batches in a loop; infinite where that was not measured."""
    copy_sd: Floats
    host_sd: Floats
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A Gaussian process over configurations: effects of single settings, and their interactions."""

    effects: tuple[_Effect, ...] = ()
    mean: float = 0.0
    mean_of: Callable[[TrainingConfig], float] | None = None
    """What a configuration's own mean has on top; None: nothing."""
    level_sd: float = _LEVEL_SD
    interaction_sd: float = 0.0
    """Of the interaction of all settings."""
    pair_sd: float = 0.0
    """Of the interaction of the first two effects, batch and workers, by themselves: the more workers share the items,
    the more the cost of a batch counts for a loader."""

    def covariance(self, left: Floats, right: Floats) -> Floats:
        """The prior covariance of two lists of places, (effects, places) each: (left places, right places)."""
        kernels = [effect.kernel(*values) for effect, *values in zip(self.effects, left, right, strict=True)]
        total: Floats = np.full((left.shape[1], right.shape[1]), self.level_sd**2)
        for effect, kernel in zip(self.effects, kernels, strict=True):
            total += effect.sd**2 * kernel
        if self.interaction_sd:
            total += self.interaction_sd**2 * prod(kernels)
        if self.pair_sd:
            total += self.pair_sd**2 * kernels[0] * kernels[1]
        return total

    def variance(self) -> float:
        """The prior variance at any place."""
        effects = sum(effect.sd**2 for effect in self.effects)
        return self.level_sd**2 + effects + self.interaction_sd**2 + self.pair_sd**2


# The effects stand in settings_table, whose conventions these are too.
_PRIORS = {
    "items": _Process(interaction_sd=0.15, pair_sd=0.4),
    "per_batch": _Process(mean=-2.5, level_sd=1.5),
    "most_workers": _Process(level_sd=1.0),
    "samples": _Process(interaction_sd=0.08),
    "per_micro_batch": _Process(mean=-1.0, level_sd=1.5),
    "per_step": _Process(mean=-3.0, level_sd=1.5),
    "exchange": _Process(mean=-2.0, level_sd=1.0),
    "copies": _Process(),
    "hidden": _Process(
        mean=-2.0,  # an eighth of a copy that blocks; what a user's code copies ahead may be all of it
        mean_of=lambda config: float(config.pin_memory),  # a quarter of one that does not
        level_sd=2.5,
    ),
    "launching": _Process(interaction_sd=0.05),
    # 1.0 to 1.8 times as long as alone: docs/gpu.md, an H100's launching in tight loops and in loops with workers
    "slower": _Process(mean=log(1.2), level_sd=0.25),
    # The pinning thread takes batches from the workers. On an H200 1.0 ms became 0.11 ms, on an H100 1.6 ms 0.2 ms.
    "taking": _Process(mean_of=lambda config: log(8) * config.pin_memory),
    "softness": _Process(mean=log(USUAL_SOFTNESS), level_sd=1.0),
    "crowding": _Process(mean=log(0.01), level_sd=2.0),  # a per cent as a rule
    "shortfall": _Process(level_sd=0.1, interaction_sd=0.08),
}


def _effects_on(cost: str) -> tuple[_Effect, ...]:
    return tuple(
        _Effect(effect.of or attrgetter(setting.name), effect.sds[cost], effect.length)
        for setting in SETTINGS
        for effect in setting.effects
        if cost in effect.sds
    )


_PROCESSES = tuple(replace(_PRIORS[cost], effects=_effects_on(cost)) for cost in COSTS)


def _places(configs: Sequence[TrainingConfig]) -> list[Floats]:
    """For each process, the values of its effects, (effects, configs)."""
    table = np.array([_values(config) for config in configs], dtype=np.float64).T
    starts = np.cumsum([len(process.effects) for process in _PROCESSES])
    return np.split(table, starts[:-1])


@lru_cache(maxsize=8192)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """The values of all processes' effects; cached, since a proposal asks for thousands of the same configurations."""
    values = (effect.value(config) for process in _PROCESSES for effect in process.effects)
    # a number as it is, a category as a number of its own
    return tuple(value if isinstance(value, float) else float(crc32(repr(value).encode())) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What an earlier fit has found."""

    factor: float
    """The scatter over the learned spread, one of `_SCATTERS`."""
    state: Floats
    """Of the processes at the observations' places, (processes, observations)."""


@dataclass(frozen=True)
class RateModel:
    """What is known of the machine from observations, of which at least one must be a run."""

    observations: Sequence[Observation]
    environment: Environment
    learned_spread: RunSpread | None = None
    """Between runs of the same settings, which the scatter is expected to be; None: as is usual on such a device."""
    start: _Start | None = None
    """Near which the fit is sought; None: anywhere."""

    def with_observations(self, observations: Sequence[Observation], learned_spread: RunSpread | None) -> RateModel:
        """Return the model of more observations; of many its fit begins where this one's has ended."""
        model = RateModel(observations, self.environment, learned_spread)
        if min(len(observations), len(self.observations)) < _WARM_FROM:
            return model
        configs = [seen.config for seen in model._seen]
        state, _ = self._state(configs, *self._believing(()))
        return replace(model, start=_Start(factor=self._fit[0], state=state))

    def forecast(self, configs: Sequence[TrainingConfig], running: Sequence[TrainingConfig] = ()) -> Forecast:
        """Return what configurations should reach. Takes milliseconds for thousands of them.

        Args:
            configs: What to forecast.
            running: Configurations whose runs have not ended. Each counts as a run at its own forecast ("kriging
                believer"): no mean changes, but what they will tell is no longer uncertain. Source: Ginsbourger, Le
                Riche, Carraro 2010, "Kriging is well-suited to parallelize optimization".
        """
        known = self._believing(running)
        parts = [
            self._forecast(configs[begin : begin + _AT_ONCE], *known) for begin in range(0, len(configs), _AT_ONCE)
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _forecast(
        self, configs: Sequence[TrainingConfig], places: Sequence[TrainingConfig], posterior: Posterior
    ) -> Forecast:
        """Return a forecast from what a posterior knows at some places."""
        state, cross_covariance = self._state(configs, places, posterior)
        rates, slopes = law(state, self._circumstances(configs))
        informed = cross_covariance * posterior.jacobian[:, None, :]
        of = slopes()
        loader_sd, device_sd, sd, copy_sd, host_sd = (
            _sd(slope, informed, posterior.cholesky) for slope in (of.loader, of.device, of.run, of.copy, of.host)
        )
        return Forecast(
            log_rate=rates.run,
            sd=sd,
            loader=np.exp(rates.loader),
            device=np.exp(rates.device),
            loader_sd=loader_sd,
            device_sd=device_sd,
            copy=np.exp(rates.copy),
            copy_sd=copy_sd,
            host=np.exp(rates.host),
            host_sd=host_sd,
            scatter_sd=self._scatter_sd,
        )

    def _believing(self, running: Sequence[TrainingConfig]) -> tuple[Sequence[TrainingConfig], Posterior]:
        """Return the places of all observations and of running trials, and the posterior once these have ended."""
        seen = [observation.config for observation in self._seen]
        _, posterior = self._fit
        if not running:
            return seen, posterior
        state, across = self._state(running, seen, posterior)
        among = self._covariance(running, running)
        slopes = law(state, self._circumstances(running))[1]().run
        known = np.einsum("pi,pij,pj->ij", slopes, across, posterior.jacobian)
        own = np.einsum("pi,pij,pj->ij", slopes, among, slopes) + self._scatter_sd**2 * np.eye(len(running))
        explained = _solved(posterior.cholesky, known.T).T
        left = np.linalg.cholesky(own - explained @ explained.T)
        above = np.zeros((len(seen), len(running)))
        return [*seen, *running], replace(
            posterior,
            weights=np.hstack([posterior.weights, np.zeros_like(slopes)]),  # each is as expected, which moves nothing
            jacobian=np.hstack([posterior.jacobian, slopes]),
            cholesky=np.block([[posterior.cholesky, above], [explained, left]]),
        )

    def _state(
        self, configs: Sequence[TrainingConfig], places: Sequence[TrainingConfig], posterior: Posterior
    ) -> tuple[Floats, Floats]:
        """Return the most likely state at configurations, and their covariance with the posterior's places."""
        covariance = self._covariance(configs, places)
        return self._prior_means(configs) + np.einsum("pij,pj->pi", covariance, posterior.weights), covariance

    @cached_property
    def _spread(self) -> RunSpread:
        return self.learned_spread or assumed_spread(self.environment.device_kind)

    @cached_property
    def _seen(self) -> list[Observation]:
        """In an order of their own: where the fit has several optima, that which it finds depends on the order."""
        return sorted(self.observations, key=repr)

    @property
    def _scatter_sd(self) -> float:
        """Of runs."""
        factor, _ = self._fit
        return factor * self._spread.of(seen.is_steady for seen in self._seen if seen.kind == "run").sd

    @cached_property
    def _fit(self) -> tuple[float, Posterior]:
        """The scatter that explains the observations best, over the learned spread, and the state with it.

        An observation knows its own uncertainty. That neighbours take turns on the machine, and what no sum of effects
        can express, shows only when observations are compared with each other. What was learned from runs of the same
        settings is its prior (a scaled inverse chi-squared one of the variance).
        """
        configs = [observation.config for observation in self._seen]
        here = self._circumstances(configs)
        kinds, places = np.array([_KINDS.index(seen.kind) for seen in self._seen]), np.arange(len(configs))

        def expect(state: Floats) -> tuple[Floats, Callable[[], Floats]]:
            rates, slopes = law(state, here)
            return np.stack(rates)[kinds, places], lambda: np.stack(slopes())[kinds, :, places].T

        problem = Problem(
            observed=np.array([log(observation.samples_per_s) for observation in self._seen]),
            variances=np.array([observation.relative_sd**2 for observation in self._seen]),
            prior_mean=self._prior_means(configs),
            factor=factor_of(self._covariance(configs, configs)),
            expect=expect,
        )
        fits = list[tuple[float, Posterior]]()
        spreads = np.array([self._spread.of([seen.is_steady]).sd for seen in self._seen])
        may_be_crowded = (here.is_crowded & (kinds == _KINDS.index("run"))).any()
        for factor in self._factors:
            scattered = replace(problem, variances=problem.variances + (factor * spreads) ** 2)
            begin = None if self.start is None else self.start.state
            starts = [most_likely(scattered, start=fits[-1][1] if fits else None, begin=begin)]
            if not fits and self.start is None and may_be_crowded:
                starts.append(most_likely(scattered, begin=_with_crowding(problem.prior_mean)))
            fits.append((factor, max(starts, key=lambda fit: fit.log_evidence)))
        return max(fits, key=lambda fit: fit[1].log_evidence + self._log_prior(fit[0]))

    @property
    def _factors(self) -> Sequence[float]:
        """Those that are considered: after an earlier fit its own and the two next to it."""
        if self.start is None:
            return _SCATTERS
        place = _SCATTERS.index(self.start.factor)
        return _SCATTERS[max(0, place - 1) : place + 2]

    def _log_prior(self, factor: float) -> float:
        """Of a scatter, over the learned spread, on the log scale."""
        return -self._spread.degrees_of_freedom * (log(factor) + 0.5 / factor**2)

    def _covariance(self, left: Sequence[TrainingConfig], right: Sequence[TrainingConfig]) -> Floats:
        """Return prior covariances of two lists of configurations, (processes, left, right).

        Costs on which no rate depends here have none, which spares the fit most of its time for them.
        """
        both = zip(COSTS, _PROCESSES, _places(left), _places(right), strict=True)
        nothing = np.zeros((len(left), len(right)))
        return np.stack(
            [
                nothing if cost in self._idle_costs else process.covariance(own, others)
                for cost, process, own, others in both
            ]
        )

    @cached_property
    def _idle_costs(self) -> frozenset[str]:
        """Those of copies and of the host, as far as these were not measured alone."""
        idle = set[str]() if self._knows("copy") else {"copies", "hidden"}
        if not self._knows("launch"):
            idle |= {"launching", "slower", "taking"}
        elif not self._knows("take"):
            idle |= {"taking"}
        return frozenset(idle)

    def _prior_means(self, configs: Sequence[TrainingConfig]) -> Floats:
        """Of every cost in every configuration, (costs, configs)."""
        own = [[0.0 if one.mean_of is None else one.mean_of(config) for config in configs] for one in _PROCESSES]
        return np.asarray(self._prior_mean[:, None] + np.array(own), dtype=np.float64)

    @cached_property
    def _prior_mean(self) -> Floats:
        """Of every cost, (costs,): the levels of all sides are those of what was measured of them.

        Where a side was not measured alone, it is expected at twice the rate of the runs: our own convention.
        """
        mean = np.array([process.mean for process in _PROCESSES])
        mean[COSTS.index("most_workers")] = log(self.environment.cores)
        here = self._circumstances([seen.config for seen in self._seen])
        means = np.repeat(mean[:, None], len(self._seen), axis=1)
        usual = rates_of(means, here)
        observed = np.array([log(seen.samples_per_s) for seen in self._seen])
        is_run = np.array([seen.kind == "run" for seen in self._seen])
        kernels = rates_of(means, replace(here, is_launched=np.zeros_like(here.is_launched))).device
        costs = [("loader", "items", usual.loader), ("device", "samples", kernels)]
        others = (("copy", "copies", usual.copy), ("launch", "launching", usual.launch), ("take", "taking", usual.take))
        costs += [(side, cost, expected) for side, cost, expected in others if self._knows(side)]
        for side, cost, expected in costs:
            is_own = np.array([seen.kind == side for seen in self._seen])
            apart = observed - expected
            mean[COSTS.index(cost)] = apart[is_own].mean() if is_own.any() else apart[is_run].mean() + log(2)
        return mean

    def _knows(self, kind: str) -> bool:
        """Return True where a side was measured alone. Else what copies and host take is a part of the shortfall."""
        return kind in self._kinds

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(seen.kind for seen in self._seen)

    def _circumstances(self, configs: Sequence[TrainingConfig]) -> Circumstances:
        environment, cores = self.environment, self.environment.cores
        loader_cpu_s, busy_cores = dict[int | None, list[float]](), dict[int | None, list[float]]()
        for seen in self._seen:
            if seen.kind == "loader" and seen.config.num_workers > 0 and seen.cpu_s_per_sample:
                loader_cpu_s.setdefault(seen.config.worker_threads, []).append(seen.cpu_s_per_sample)
            elif seen.kind == "device" and seen.cpu_s_per_sample is not None:
                cores_of = busy_cores.setdefault(seen.config.intra_op_threads, [])
                cores_of.append(seen.cpu_s_per_sample * seen.samples_per_s)
        busy_of = {threads: median(values) for threads, values in busy_cores.items()}
        # threads that wait for each other spin: a sample's CPU time depends on how many a worker has
        cpu_s_of = {threads: median(values) for threads, values in loader_cpu_s.items()}
        usual_cpu_s = median(list(chain.from_iterable(loader_cpu_s.values())) or [0.0])
        threads = [config.intra_op_threads for config in configs]
        # unmeasured, a CPU's threads keep their cores busy, and an accelerator the one that launches
        unmeasured = cores if environment.device_kind == "cpu" else 1
        busy = np.array(
            [busy_of.get(count, min(count or unmeasured, unmeasured)) for count in threads], dtype=np.float64
        )
        own_cores = _own_cores(configs, environment)
        usual_batch = exp(fmean(log(seen.config.micro_batch_size) for seen in self._seen))
        return Circumstances(
            workers=np.array([config.num_workers for config in configs], dtype=np.float64),
            ranks=np.array([config.world_size for config in configs], dtype=np.float64),
            relative_batch=np.array([config.micro_batch_size / usual_batch for config in configs], dtype=np.float64),
            micro_batches=np.array([config.grad_accum_steps for config in configs], dtype=np.float64),
            is_overlapped=np.array([overlaps(config, environment.device_kind) for config in configs], dtype=np.bool_),
            is_crowded=_are_crowded(configs, own_cores, environment),
            is_copied=np.full(len(configs), self._knows("copy")),
            is_blocking=np.array([self._knows("copy") and not config.pin_memory for config in configs], dtype=np.bool_),
            is_launched=np.full(len(configs), self._knows("launch")),
            is_taken=np.array([self._knows("take") and config.num_workers > 0 for config in configs], dtype=np.bool_),
            busy=np.minimum(busy, own_cores) * [config.process_count for config in configs],
            cores=own_cores * [hosts_of(config, environment) for config in configs],
            loader_cpu_s=np.array([cpu_s_of.get(config.worker_threads, usual_cpu_s) for config in configs]),
        )


def _joined(parts: Sequence[Forecast]) -> Forecast:
    """The forecasts of lists of configurations as that of all of them."""
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (one.name for one in fields(Forecast))
        if name != "scatter_sd"
    }
    return Forecast(**joined, scatter_sd=parts[0].scatter_sd)


def _own_cores(configs: Sequence[TrainingConfig], environment: Environment) -> Floats:
    """Cores of a host that each may run on: found once for all that lie on it alike."""
    layouts = [(config.numa_binding, config.strategy, config.world_size) for config in configs]
    one_of = dict(zip(layouts, configs, strict=True))
    found = {layout: cores_within(config, environment) for layout, config in one_of.items()}
    return np.array([found[layout] for layout in layouts], dtype=np.float64)


def _are_crowded(configs: Sequence[TrainingConfig], cores: Floats, environment: Environment) -> NDArray[np.bool_]:
    """Which have more threads than cores; on an accelerator none, whose threads wait for it."""
    if environment.device_kind != "cpu":
        return np.zeros(len(configs), dtype=np.bool_)
    taken = [
        ((config.intra_op_threads or own) + config.num_workers) * config.process_count
        for config, own in zip(configs, cores, strict=True)
    ]
    return np.array(taken) > cores


def _with_crowding(state: Floats) -> Floats:
    """A state in which more threads than cores cost most of the rate: from a small cost no step of a fit gets there."""
    crowded = state.copy()
    crowded[COSTS.index("crowding")] = 0.0
    return crowded


def _sd(slopes: Floats, informed: Floats, cholesky: Floats) -> Floats:
    """Posterior standard deviations of what has these slopes, (costs, configs)."""
    if not slopes.any():
        return np.zeros(slopes.shape[1])
    prior_variance = sum(slope**2 * process.variance() for slope, process in zip(slopes, _PROCESSES, strict=True))
    cross_covariance = np.einsum("pi,pij->ij", slopes, informed)
    explained = _solved(cholesky, cross_covariance.T)
    return np.asarray(np.sqrt(np.maximum(prior_variance - (explained**2).sum(axis=0), 0.0)), dtype=np.float64)


def _solved(cholesky: Floats, right: Floats) -> Floats:
    """Return what a lower triangular matrix has to be multiplied by for the right-hand sides."""
    from scipy.linalg import solve_triangular

    return np.asarray(solve_triangular(cholesky, right, lower=True, check_finite=False), dtype=np.float64)
