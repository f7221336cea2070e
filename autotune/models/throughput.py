"""The throughput model: a Laplace approximation over the law's costs; and which trial to run next by it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import chain
from math import exp, inf, log, prod
from operator import attrgetter
from statistics import fmean, median
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from autotune.config.environment import Environment
from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import assumed_spread
from autotune.models.statistics import Floats
from autotune.models.throughput_law import COSTS, USUAL_SOFTNESS, Circumstances, law, rates_of
from autotune.records.ceilings import device_key, loader_key, overlaps
from autotune.records.result import RunSpread
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord
from autotune.settings_table import SETTINGS
from autotune.space.constraints import cores_within, hosts_of

# The most likely state of Gaussian processes that are observed through a nonlinear function.
#
# Comes in: a Problem, with the observations and factors of the processes' prior covariances. Goes
# out: a Posterior, from which the state at any other place follows, with its uncertainty. Pure.
#
# The state that maximises the posterior density minimises squared residuals: those of the
# observations over their noise, and the whitened state itself. Gauss and Newton's steps find it,
# each halved until it helps; with a penalty on each unknown a step takes a factorisation only as
# large as there are observations (an iterated Kalman update).
#
# Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 3.4
# (Laplace's approximation); Bell and Cathey 1993, "The iterated Kalman filter update as a
# Gauss-Newton method".


_Residuals = Callable[[Floats], tuple[Floats, Callable[[], Floats]]]
"""From unknowns, (unknowns,), to residuals, (observations,), and to a call for their derivatives
there, (observations, unknowns), which not every point needs."""
_LEAST_EIGENVALUE = 1e-6
"""Share of the largest one below which a direction is left out: its standard deviation is a
thousandth, less than any measurement resolves. Our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A matrix F with few columns so that F F' has the covariances of processes as diagonal blocks.

    Its columns are orthogonal to each other; each has entries for one process alone.
    """

    columns: Floats
    """Of each column the entries that are not 0, (places, coordinates)."""
    process: NDArray[np.intp]
    """Of each column, the number of its process, rising: every one has a column."""

    def of_states(self, coordinates: Floats) -> Floats:
        """F times what independent coordinates are, (processes, places)."""
        starts = np.searchsorted(self.process, np.arange(self.process[-1] + 1))
        return np.asarray(
            np.add.reduceat(self.columns * coordinates, starts, axis=1).T, dtype=np.float64
        )

    def weighted(self, slopes: Floats) -> Floats:
        """Derivatives by the states, (processes, places), as those by the coordinates, (places, coordinates)."""
        return np.asarray(slopes[self.process].T * self.columns, dtype=np.float64)

    @property
    def squares(self) -> Floats:
        """Of each column's length."""
        return np.asarray(np.square(self.columns).sum(axis=0), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Observations of processes, (observations,) each."""

    observed: Floats
    variances: Floats
    """Of the observations' noise."""
    prior_mean: Floats
    """Of the processes at the observations' places, (processes, observations)."""
    factor: Factor
    """Of the processes' covariances there, see `factor_of`."""
    expect: Callable[[Floats], tuple[Floats, Callable[[], Floats]]]
    """From a state, (processes, observations), to the expected observations, (observations,), and
    to a call for their derivatives by the state, (processes, observations)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """The most likely state, around which the function is taken to be linear."""

    whitened: Floats
    """The state less its prior mean, in independent standard normal coordinates, (coordinates,)."""
    weights: Floats
    """(processes, observations): the state at any place is its prior mean there plus its covariance
    with the observations' places times these."""
    jacobian: Floats
    """At the most likely state, (processes, observations)."""
    cholesky: Floats
    """Of the observations' covariance, noise included, (observations, observations)."""
    log_evidence: float
    """Logarithm of the observations' probability, but for a constant: compares one noise with
    another."""


def factor_of(covariances: Floats) -> Factor:
    """The factor of some processes' covariances, (processes, places, places)."""
    values, vectors = np.linalg.eigh(covariances)
    process, kept = np.nonzero(values > _LEAST_EIGENVALUE * values[:, -1:])
    scaled = vectors * np.sqrt(np.maximum(values, 0.0))[:, None]
    return Factor(columns=np.ascontiguousarray(scaled[process, :, kept].T), process=process)


def most_likely(
    problem: Problem, start: Posterior | None = None, *, begin: Floats | None = None
) -> Posterior:
    """The state that explains the observations best.

    Args:
        problem: what was observed.
        start: the posterior of the same problem with another noise, from which fewer steps are
            needed.
        begin: a state, (processes, observations), near which the best one may lie as well; the
            prior mean where neither is given.
    """
    factor = problem.factor
    sd = np.sqrt(problem.variances)

    def state(whitened: Floats) -> Floats:
        return problem.prior_mean + factor.of_states(whitened)

    def residuals(whitened: Floats) -> tuple[Floats, Callable[[], Floats]]:
        expected, slopes = problem.expect(state(whitened))
        return (expected - problem.observed) / sd, lambda: factor.weighted(slopes()) / sd[:, None]

    begun = _coordinates(problem, begin) if start is None else start.whitened
    whitened = _minimum(residuals, begun)
    expected, slopes = problem.expect(state(whitened))
    jacobian = slopes()
    around = factor.weighted(jacobian)
    cholesky = np.asarray(
        np.linalg.cholesky(around @ around.T + np.diag(problem.variances)), dtype=np.float64
    )
    misfit = np.square((expected - problem.observed) / sd).sum() + np.square(whitened).sum()
    return Posterior(
        whitened=whitened,
        weights=factor.of_states(whitened / factor.squares),
        jacobian=jacobian,
        cholesky=cholesky,
        log_evidence=-0.5 * float(misfit) - float(np.log(np.diag(cholesky)).sum()),
    )


def _minimum(residuals: _Residuals, start: Floats) -> Floats:
    """Return where the sum of squared residuals and squared unknowns is least, near the start."""
    here = start
    apart, slopes_of = residuals(start)
    squares = apart @ apart + here @ here
    for _ in range(100):
        slopes = slopes_of()
        inner = slopes @ slopes.T + np.eye(len(apart))
        step = slopes.T @ np.linalg.solve(inner, slopes @ here - apart) - here
        before = squares
        share = 1.0
        while share >= 1e-3:
            there = here + share * step
            apart_there, slopes_there = residuals(there)
            squares_there = apart_there @ apart_there + there @ there
            if squares_there < squares:
                here = there
                apart = apart_there
                slopes_of = slopes_there
                squares = squares_there
                break
            share /= 2
        if squares >= (1 - 1e-4) * before:
            break
    return here


def _coordinates(problem: Problem, begin: Floats | None) -> Floats:
    """Of a state; of the prior mean where there is none."""
    factor = problem.factor
    if begin is None:
        return np.zeros(len(factor.process))
    along = factor.weighted(begin - problem.prior_mean).sum(axis=0)
    return np.asarray(along / factor.squares, dtype=np.float64)


# A model of the machine, learned during a search: the rate to expect of settings that were not
# tried yet. Pure.
#
# Comes in: observations of the loader, of the device and of copies alone, and of whole runs. Goes
# out: a RateModel, which forecasts the rate of any configuration with its uncertainty, and the rate
# of each side alone.
#
# rate_law.py says what each side and all together reach from a few costs, of which each has a prior
# that may differ between settings: a Gaussian process, the sum of effects of single settings
# (smooth along numbers, free between categories) and of interactions. So what was seen in one
# precision tells of another, and one point of the device is enough to begin with. What the law does
# not explain is left to the same sums, with little room where the law explains. Looks and runs
# observe the costs through the law, which is taken to be linear around the most likely state. How
# far the machine scatters from one measurement to the next is learned too. The standard deviations
# and lengths below say how far settings are expected to change a cost before anything was measured:
# our own conventions.
#
# Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 2;
# additive kernels: Duvenaud et al. 2011, "Additive Gaussian Processes".


_KINDS = ("loader", "device", "run", "copy", "launch", "take")
"""Kinds of observations, in the order of the law's Rates."""
_LEVEL_SD = 1.5
"""Prior standard deviation of a side's level: a factor of 4.5 either way, our own convention."""
_AT_ONCE = 512
"""Configurations whose covariances with all observations are held at once: our own convention. With
two hundred observations they take 10 MB, where those of four thousand configurations would take
half a megabyte a trial."""
_WARM_FROM = 30
"""Observations from which on a fit begins where the last one ended: our own convention. Before,
each fit may find another optimum."""
_SCATTERS = (6.0, 3.5, 2.0, 1.4, 1.0, 0.7, 0.4)
"""Standard deviations of the scatter that are considered, over the learned spread between runs of a
kind. The larger, the easier to fit: each is a start for the next. Our own convention."""


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
    """Another measurement hardly differs, beyond `relative_sd`: the device set the pace, or a side
    was alone."""


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
    """Rate of the host that launches and takes batches in a loop; infinite where that was not
    measured."""
    copy_sd: Floats
    host_sd: Floats
    scatter_sd: float
    """By how much repeated measurements of the same settings differ, beyond `sd` and a
    measurement's own interval."""


class _Effect(NamedTuple):
    """How much one setting changes the logarithm of a rate by itself."""

    value: Callable[[TrainingConfig], object]
    sd: float
    length: float | None = None
    """Distance over which a number's effect changes; None: a category, each value free of the
    others."""

    def kernel(self, left: Floats, right: Floats) -> Floats:
        """Correlation of the effect between two lists of values, (left, right)."""
        apart = left[:, None] - right
        return (
            (apart == 0).astype(np.float64)
            if self.length is None
            else np.exp(-0.5 * (apart / self.length) ** 2)
        )


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
    """Of the interaction of the first two effects, batch and workers, by themselves: the more
    workers share the items, the more the cost of a batch counts for a loader."""

    def covariance(self, left: Floats, right: Floats) -> Floats:
        """The prior covariance of two lists of places, (effects, places) each: (left places, right places)."""
        kernels = [
            effect.kernel(*values)
            for effect, *values in zip(self.effects, left, right, strict=True)
        ]
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
        # An eighth of a copy that blocks; what a user's code copies ahead may be all of it.
        mean=-2.0,
        mean_of=lambda config: float(config.pin_memory),  # a quarter of one that does not
        level_sd=2.5,
    ),
    "launching": _Process(interaction_sd=0.05),
    # 1.0 to 1.8 times as long as alone: docs/gpu.md, an H100's launching in tight loops and in
    # loops with workers
    "slower": _Process(mean=log(1.2), level_sd=0.25),
    # The pinning thread takes batches from the workers. On an H200 1.0 ms became 0.11 ms, on an
    # H100 1.6 ms 0.2 ms.
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
    return tuple(
        value if isinstance(value, float) else float(crc32(repr(value).encode()))
        for value in values
    )


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
    """Between runs of the same settings, which the scatter is expected to be; None: as is usual on
    such a device."""
    start: _Start | None = None
    """Near which the fit is sought; None: anywhere."""

    def with_observations(
        self, observations: Sequence[Observation], learned_spread: RunSpread | None
    ) -> RateModel:
        """Return the model of more observations; of many its fit begins where this one's has ended."""
        model = RateModel(observations, self.environment, learned_spread)
        if min(len(observations), len(self.observations)) < _WARM_FROM:
            return model
        configs = [seen.config for seen in model._seen]
        state, _ = self._state(configs, *self._believing(()))
        return replace(model, start=_Start(factor=self._fit[0], state=state))

    def forecast(
        self, configs: Sequence[TrainingConfig], running: Sequence[TrainingConfig] = ()
    ) -> Forecast:
        """Return what configurations should reach. Takes milliseconds for thousands of them.

        Args:
            configs: What to forecast.
            running: Configurations whose runs have not ended. Each counts as a run at its own
                forecast ("kriging believer"): no mean changes, but what they will tell is no longer
                uncertain. Source: Ginsbourger, Le Riche, Carraro 2010, "Kriging is well-suited to
                parallelize optimization".
        """
        known = self._believing(running)
        parts = [
            self._forecast(configs[begin : begin + _AT_ONCE], *known)
            for begin in range(0, len(configs), _AT_ONCE)
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _forecast(
        self,
        configs: Sequence[TrainingConfig],
        places: Sequence[TrainingConfig],
        posterior: Posterior,
    ) -> Forecast:
        """Return a forecast from what a posterior knows at some places."""
        state, cross_covariance = self._state(configs, places, posterior)
        rates, slopes = law(state, self._circumstances(configs))
        informed = cross_covariance * posterior.jacobian[:, None, :]
        of = slopes()
        loader_sd, device_sd, sd, copy_sd, host_sd = (
            _sd(slope, informed, posterior.cholesky)
            for slope in (of.loader, of.device, of.run, of.copy, of.host)
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

    def _believing(
        self, running: Sequence[TrainingConfig]
    ) -> tuple[Sequence[TrainingConfig], Posterior]:
        """Return the places of all observations and of running trials, and the posterior once these have ended."""
        seen = [observation.config for observation in self._seen]
        _, posterior = self._fit
        if not running:
            return seen, posterior
        state, across = self._state(running, seen, posterior)
        among = self._covariance(running, running)
        slopes = law(state, self._circumstances(running))[1]().run
        known = np.einsum("pi,pij,pj->ij", slopes, across, posterior.jacobian)
        own = np.einsum("pi,pij,pj->ij", slopes, among, slopes) + self._scatter_sd**2 * np.eye(
            len(running)
        )
        explained = _solved(posterior.cholesky, known.T).T
        left = np.linalg.cholesky(own - explained @ explained.T)
        above = np.zeros((len(seen), len(running)))
        return [*seen, *running], replace(
            posterior,
            weights=np.hstack(
                [posterior.weights, np.zeros_like(slopes)]
            ),  # each is as expected, which moves nothing
            jacobian=np.hstack([posterior.jacobian, slopes]),
            cholesky=np.block([[posterior.cholesky, above], [explained, left]]),
        )

    def _state(
        self,
        configs: Sequence[TrainingConfig],
        places: Sequence[TrainingConfig],
        posterior: Posterior,
    ) -> tuple[Floats, Floats]:
        """Return the most likely state at configurations, and their covariance with the posterior's places."""
        covariance = self._covariance(configs, places)
        return self._prior_means(configs) + np.einsum(
            "pij,pj->pi", covariance, posterior.weights
        ), covariance

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
        return (
            factor * self._spread.of(seen.is_steady for seen in self._seen if seen.kind == "run").sd
        )

    @cached_property
    def _fit(self) -> tuple[float, Posterior]:
        """The scatter that explains the observations best, over the learned spread, and the state with it.

        An observation knows its own uncertainty. That neighbours take turns on the machine, and
        what no sum of effects can express, shows only when observations are compared with each
        other. What was learned from runs of the same settings is its prior (a scaled inverse
        chi-squared one of the variance).
        """
        configs = [observation.config for observation in self._seen]
        here = self._circumstances(configs)
        kinds = np.array([_KINDS.index(seen.kind) for seen in self._seen])
        places = np.arange(len(configs))

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

    def _covariance(
        self, left: Sequence[TrainingConfig], right: Sequence[TrainingConfig]
    ) -> Floats:
        """Return prior covariances of two lists of configurations, (processes, left, right).

        Costs on which no rate depends here have none, which spares the fit most of its time for
        them.
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
        own = [
            [0.0 if one.mean_of is None else one.mean_of(config) for config in configs]
            for one in _PROCESSES
        ]
        return np.asarray(self._prior_mean[:, None] + np.array(own), dtype=np.float64)

    @cached_property
    def _prior_mean(self) -> Floats:
        """Of every cost, (costs,): the levels of all sides are those of what was measured of them.

        Where a side was not measured alone, it is expected at twice the rate of the runs: our own
        convention.
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
        others = (
            ("copy", "copies", usual.copy),
            ("launch", "launching", usual.launch),
            ("take", "taking", usual.take),
        )
        costs += [(side, cost, expected) for side, cost, expected in others if self._knows(side)]
        for side, cost, expected in costs:
            is_own = np.array([seen.kind == side for seen in self._seen])
            apart = observed - expected
            mean[COSTS.index(cost)] = (
                apart[is_own].mean() if is_own.any() else apart[is_run].mean() + log(2)
            )
        return mean

    def _knows(self, kind: str) -> bool:
        """Return True where a side was measured alone. Else what copies and host take is a part of the shortfall."""
        return kind in self._kinds

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(seen.kind for seen in self._seen)

    def _circumstances(self, configs: Sequence[TrainingConfig]) -> Circumstances:
        environment = self.environment
        cores = self.environment.cores
        loader_cpu_s = dict[int | None, list[float]]()
        busy_cores = dict[int | None, list[float]]()
        for seen in self._seen:
            if seen.kind == "loader" and seen.config.num_workers > 0 and seen.cpu_s_per_sample:
                loader_cpu_s.setdefault(seen.config.worker_threads, []).append(
                    seen.cpu_s_per_sample
                )
            elif seen.kind == "device" and seen.cpu_s_per_sample is not None:
                cores_of = busy_cores.setdefault(seen.config.intra_op_threads, [])
                cores_of.append(seen.cpu_s_per_sample * seen.samples_per_s)
        busy_of = {threads: median(values) for threads, values in busy_cores.items()}
        # threads that wait for each other spin: a sample's CPU time depends on how many a worker
        # has
        cpu_s_of = {threads: median(values) for threads, values in loader_cpu_s.items()}
        usual_cpu_s = median(list(chain.from_iterable(loader_cpu_s.values())) or [0.0])
        threads = [config.intra_op_threads for config in configs]
        # unmeasured, a CPU's threads keep their cores busy, and an accelerator the one that
        # launches
        unmeasured = cores if environment.device_kind == "cpu" else 1
        busy = np.array(
            [busy_of.get(count, min(count or unmeasured, unmeasured)) for count in threads],
            dtype=np.float64,
        )
        own_cores = _own_cores(configs, environment)
        usual_batch = exp(fmean(log(seen.config.micro_batch_size) for seen in self._seen))
        return Circumstances(
            workers=np.array([config.num_workers for config in configs], dtype=np.float64),
            ranks=np.array([config.world_size for config in configs], dtype=np.float64),
            relative_batch=np.array(
                [config.micro_batch_size / usual_batch for config in configs], dtype=np.float64
            ),
            micro_batches=np.array(
                [config.grad_accum_steps for config in configs], dtype=np.float64
            ),
            is_overlapped=np.array(
                [overlaps(config, environment.device_kind) for config in configs], dtype=np.bool_
            ),
            is_crowded=_are_crowded(configs, own_cores, environment),
            is_copied=np.full(len(configs), self._knows("copy")),
            is_blocking=np.array(
                [self._knows("copy") and not config.pin_memory for config in configs],
                dtype=np.bool_,
            ),
            is_launched=np.full(len(configs), self._knows("launch")),
            is_taken=np.array(
                [self._knows("take") and config.num_workers > 0 for config in configs],
                dtype=np.bool_,
            ),
            busy=np.minimum(busy, own_cores) * [config.process_count for config in configs],
            cores=own_cores * [hosts_of(config, environment) for config in configs],
            loader_cpu_s=np.array(
                [cpu_s_of.get(config.worker_threads, usual_cpu_s) for config in configs]
            ),
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


def _are_crowded(
    configs: Sequence[TrainingConfig], cores: Floats, environment: Environment
) -> NDArray[np.bool_]:
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
    prior_variance = sum(
        slope**2 * process.variance() for slope, process in zip(slopes, _PROCESSES, strict=True)
    )
    cross_covariance = np.einsum("pi,pij->ij", slopes, informed)
    explained = _solved(cholesky, cross_covariance.T)
    return np.asarray(
        np.sqrt(np.maximum(prior_variance - (explained**2).sum(axis=0), 0.0)), dtype=np.float64
    )


def _solved(cholesky: Floats, right: Floats) -> Floats:
    """Return what a lower triangular matrix has to be multiplied by for the right-hand sides."""
    from scipy.linalg import solve_triangular

    return np.asarray(
        solve_triangular(cholesky, right, lower=True, check_finite=False), dtype=np.float64
    )


# Which trial to run next: how much each is expected to gain, whether it is redundant, and whether
# it is likely to run.
#
# Comes in: a Forecast of the rate model, and the trials so far. Goes out: one value per
# configuration. Pure.


AMPLE = 1.25
"""A side that is this many times as fast as the other, uncertainty included, does not limit the
rate: our own convention."""
_SHORT_COPY = 0.01
"""Share of a run's time, uncertainty included, below which its copies can't matter, however they
are made: our own convention, as little as a search expects to win before it ends."""
_INTERVAL_SDS = (-2, 2)
"""Standard deviations of a log-normal rate: about its 95 % interval."""
_SETTINGS = tuple(name for name in TrainingConfig.model_fields if name != "lr")


def expected_gain(forecast: Forecast, best_samples_per_s: float) -> Floats:
    """Expected improvement over the best rate so far, as a share of it: 0.04 = 4 %.

    Rates are log-normal: E[max(rate / best - 1, 0)], as the value of a call option. Source: Jones,
    Schonlau, Welch 1998, "Efficient global optimization of expensive black-box functions"; for the
    log-normal, Black and Scholes 1973.
    """
    from scipy.special import ndtr

    sd = np.maximum(forecast.sd, 1e-9)  # keeps a division finite
    above = forecast.log_rate - np.log(best_samples_per_s)
    mean = np.exp(np.minimum(above + sd**2 / 2, 50.0))  # keeps the exponential finite
    gain: Floats = mean * ndtr(above / sd + sd) - ndtr(above / sd)
    return np.maximum(gain, 0.0)


def most_gain(forecast: Forecast, best_samples_per_s: float) -> Floats:
    """The most that each can gain: the rate of its slowest side, at the upper end of its interval.

    Even copies that computing hides wholly hold a run up to their own rate.
    """
    _, fast = _sides(forecast)
    gain: Floats = np.maximum(np.min(fast, axis=0) / best_samples_per_s - 1, 0.0)
    return gain


def redundant_among(
    configs: Sequence[TrainingConfig], forecast: Forecast, tried: Sequence[TrainingConfig]
) -> NDArray[np.bool_]:
    """Which configurations are redundant: they differ from one that was tried only on a side that limits neither.

    More workers than a slow device needs change nothing, nor does a faster device with as many
    threads behind a slow loader; with fewer threads workers have more of the cores. Without workers
    both sides may limit the rate, one after the other. Copies that are short change nothing, from
    memory that is pinned or not, unless the host may be the limit, which takes pinned batches in
    less time. A tried configuration counts only if it is among `configs`.
    """
    (slow_loader, slow_device, slow_copy, slow_host), fast = _sides(forecast)
    fast_loader = fast[0]
    fast_training = np.min(fast[1:], axis=0)
    # at worst nothing of a copy is hidden, at best all of it
    slow_training = np.minimum(1 / (1 / slow_device + 1 / slow_copy), slow_host)
    has_ample_loader = slow_loader > AMPLE * fast_training
    has_ample_device = slow_training > AMPLE * fast_loader
    has_ample_host = slow_host > AMPLE * np.min(fast[:3], axis=0)
    has_short_copy = (fast_training <= _SHORT_COPY * slow_copy) & has_ample_host
    places = {config: place for place, config in enumerate(configs)}
    tried_places = [
        places[config] for config in tried if config in places and config.num_workers > 0
    ]

    def trained(place: int) -> tuple[object, ...]:
        """What the rate depends on of a configuration whose loader is ample."""
        return (
            device_key(configs[place]),
            None if has_short_copy[place] else configs[place].pin_memory,
        )

    devices = {trained(place) for place in tried_places if has_ample_loader[place]}
    loaders = {
        _loader_with_threads(configs[place]) for place in tried_places if has_ample_device[place]
    }
    redundant = [
        config.num_workers > 0
        and (
            (loads and trained(place) in devices)
            or (trains and _loader_with_threads(config) in loaders)
        )
        for place, (config, loads, trains) in enumerate(
            zip(configs, has_ample_loader, has_ample_device, strict=True)
        )
    ]
    return np.array(redundant, dtype=np.bool_) | _pins_in_vain(configs, forecast, tried)


def has_failed(record: TrialRecord) -> bool:
    """Whether a trial ended without a rate, for another reason than memory."""
    has_rate = record.measurement is not None or bool(record.result.blocks)
    return not has_rate and record.outcome not in OUT_OF_MEMORY | {"pruned"}


def chance_to_run(
    configs: Sequence[TrainingConfig],
    failed: Collection[TrainingConfig],
    ran: Collection[TrainingConfig],
) -> Floats:
    """The probability that each does not fail for the same reason as another.

    A failure is blamed on one of the settings in which it differs from everything that ran, each
    with equal probability: a configuration that shares half of these values has half a chance.
    """
    chances: Floats = np.ones(len(configs))
    values = {name: {getattr(config, name) for config in ran} for name in _SETTINGS}
    for failure in failed:
        suspects = {
            name: getattr(failure, name)
            for name in _SETTINGS
            if getattr(failure, name) not in values[name]
        }
        if suspects:
            shared = [
                sum(getattr(config, name) == suspects[name] for name in suspects)
                for config in configs
            ]
            # almost certainly one of the suspects failed, not the machine
            chances *= 1 - 0.99 * np.array(shared) / len(suspects)
    return chances


def _pins_in_vain(
    configs: Sequence[TrainingConfig], forecast: Forecast, tried: Sequence[TrainingConfig]
) -> NDArray[np.bool_]:
    """Which have a value of `pin_memory` that was not tried, and copies that can't limit them with either.

    The same with a value that was tried tells as much, or has told it. Where copies were not
    measured, or all that is left has other values and was not tried otherwise, none.
    """
    (_, _, slow_copy, slow_host), (fast_loader, fast_device, _, _) = _sides(forecast)
    known = {config.pin_memory for config in tried}
    has_run = set(tried)
    slowest = min(
        (
            rate
            for config, rate in zip(configs, slow_copy, strict=True)
            if config.pin_memory in known
        ),
        default=inf,
    )
    fastest = np.minimum(fast_loader, fast_device)
    is_short = (fastest <= _SHORT_COPY * np.minimum(slow_copy, slowest)) & (
        slow_host > AMPLE * fastest
    )
    are_left = any(config.pin_memory in known and config not in has_run for config in configs)
    is_other = [
        config.pin_memory not in known
        and (are_left or config.model_copy(update={"pin_memory": not config.pin_memory}) in has_run)
        for config in configs
    ]
    return np.asarray(
        np.isfinite(forecast.copy) & is_short & np.array(is_other, dtype=np.bool_), dtype=np.bool_
    )


def _sides(forecast: Forecast) -> tuple[Floats, Floats]:
    """Rates of loader, device, copies and host at the lower and at the upper end of their intervals, (4, configs)."""
    rates = np.stack([forecast.loader, forecast.device, forecast.copy, forecast.host])
    spread = _INTERVAL_SDS[1] * np.stack(
        [forecast.loader_sd, forecast.device_sd, forecast.copy_sd, forecast.host_sd]
    )
    return rates * np.exp(-spread), rates * np.exp(spread)


def _loader_with_threads(config: TrainingConfig) -> tuple[object, ...]:
    """What the loader's rate depends on during training, whose threads may use the workers' cores."""
    return (*loader_key(config), config.intra_op_threads)
