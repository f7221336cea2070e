"""Model the throughput of every configuration from measurements, and judge which trial to run next.

Comes in: observations of loader, device, copies and host alone, and of runs. Goes out: a
`RateModel`, which forecasts the throughput of any configuration with its uncertainty, and the
criteria of a search: expected gain, redundancy, and the probability that a configuration runs. Pure
functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
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
from autotune.models.statistics import Floats, in_parts
from autotune.models.throughput_law import COSTS, Circumstances, Rates, law
from autotune.policy import POLICY, CostPrior, Throughput, Trials
from autotune.records.ceilings import device_key, loader_key, overlaps
from autotune.records.result import RunVariation
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord
from autotune.settings_table import BY_NAME, SETTINGS
from autotune.space.constraints import cores_within, hosts_of

# Gaussian processes observed through a nonlinear function: find the most likely state.
#
# The state is the prior mean plus the processes' covariance times weights at the observations. The
# maximum of its posterior density minimizes a sum of squares: residuals over their noise, and the
# state's distance from its prior mean. Gauss-Newton steps find it, each halved until it helps; a
# step factorizes only a matrix of the observations' size (an iterated Kalman update).
#
# Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 3.4
# (Laplace's approximation); Bell and Cathey 1993, "The iterated Kalman filter update as a Gauss-
# Newton method".


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Observations of processes, (observations,) each."""

    observed: Floats
    variances: Floats
    """Variances of the observations' noise."""
    prior_mean: Floats
    """Prior mean of the processes at the observations' places, (processes, observations)."""
    covariances: Floats
    """Prior covariances of the processes at these places, (processes, observations, observations)."""
    expect: Callable[[Floats], tuple[Floats, Callable[[], Floats]]]
    """Map a state, (processes, observations), to the expected observations, (observations,), and to
    a call that returns their derivatives by the state, (processes, observations), which not every
    state needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Most likely state, and the posterior linearized around it."""

    weights: Floats
    """Weights, (processes, observations): the state at any place is its prior mean plus its
    covariance with the observations' places times these."""
    jacobian: Floats
    """Derivatives at the most likely state, (processes, observations)."""
    cholesky: Floats
    """Cholesky factor of the observations' covariance including noise, (observations,
    observations)."""
    log_evidence: float
    """Log marginal likelihood up to a constant; compares noise levels."""


def most_likely(problem: Problem, start: Floats | None = None) -> Posterior:
    """Return the state that explains the observations best.

    Args:
        problem: The observations and their prior.
        start: Weights to start from, (processes, observations). Defaults to the prior mean's, 0.
    """

    def covered(jacobian: Floats) -> Floats:
        """Return the covariance of the observations, linearized."""
        parts = jacobian[:, :, None] * problem.covariances * jacobian[:, None, :]
        return np.asarray(parts.sum(axis=0) + np.diag(problem.variances), dtype=np.float64)

    def judge(weights: Floats) -> tuple[float, Floats, Floats, Callable[[], Floats]]:
        """Return the sum of squares, the residuals, the distance from the prior mean, and the slopes."""
        moved = np.einsum("pij,pj->pi", problem.covariances, weights)
        expected, slopes = problem.expect(problem.prior_mean + moved)
        apart = problem.observed - expected
        squares = float((apart**2 / problem.variances).sum() + (weights * moved).sum())
        return squares, apart, moved, slopes

    here = np.zeros_like(problem.prior_mean) if start is None else start
    squares, apart, moved, slopes = judge(here)
    for _ in range(100):
        jacobian = slopes()
        pull = np.linalg.solve(covered(jacobian), apart + (jacobian * moved).sum(axis=0))
        step = jacobian * pull - here

        # Halve the step until it helps
        before = squares
        for share in 0.5 ** np.arange(10):
            there = here + share * step
            judged = judge(there)
            if judged[0] < squares:
                here = there
                squares, apart, moved, slopes = judged
                break

        # Stop once a step gains less than a ten-thousandth
        if squares >= (1 - 1e-4) * before:
            break

    # Linearize around the minimum
    jacobian = slopes()
    cholesky = np.linalg.cholesky(covered(jacobian))
    return Posterior(
        weights=here,
        jacobian=jacobian,
        cholesky=np.asarray(cholesky, dtype=np.float64),
        log_evidence=-0.5 * squares - float(np.log(np.diag(cholesky)).sum()),
    )


# The model of the machine that a search learns.
#
# throughput_law.py computes the throughput of each side and of a run from a few costs. Each cost is
# a Gaussian process over settings: a sum of effects of single settings (smooth along numbers,
# independent between categories) and of interactions. So a measurement in one precision informs the
# others, and one point of the device is enough to begin with. Probes and runs observe the costs
# through the law, linearized around the most likely state. Run-to-run variation is learned too.
#
# Priors state how far settings are expected to change a cost before anything is measured: those of
# single settings stand in settings_table, all others in policy.
#
# Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", chapter 2;
# additive kernels: Duvenaud et al. 2011, "Additive Gaussian Processes".


_SIDES = {
    "loader": "items",
    "device": "samples",
    "copy": "copies",
    "launch": "launching",
    "take": "taking",
}
"""Cost whose level a measurement of each side alone shows."""
_WARM_FROM = 30
"""Number of observations from which a fit starts at the previous optimum; with fewer, each fit may
find another optimum. Our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured throughput."""

    kind: Literal["loader", "device", "run", "copy", "launch", "take"]
    """One side alone, the host's launching or fetching of ready batches, or a whole run."""
    config: TrainingConfig
    samples_per_s: float
    relative_sd: float
    cpu_s_per_sample: float | None = None
    """CPU seconds per sample, all threads and workers; None if not measured."""
    is_steady: bool = False
    """Repeats differ by little more than `relative_sd`: the device set the pace, or one side was
    measured alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast of several configurations, element by element. Throughput in samples/s."""

    log_rate: Floats
    """Logarithm of a run's throughput."""
    sd: Floats
    """Standard deviation of `log_rate`."""
    loader: Floats
    """Throughput of the loader alone."""
    device: Floats
    """Throughput of the device alone."""
    loader_sd: Floats
    """Standard deviation of the logarithm, as the fields `*_sd` below."""
    device_sd: Floats
    copy: Floats
    """Throughput of copying batches alone; infinite if nothing is copied or no copy was
    measured."""
    host: Floats
    """Throughput of the host that launches and takes batches in a loop; infinite if not
    measured."""
    copy_sd: Floats
    host_sd: Floats
    scatter_sd: float
    """Standard deviation between repeats of the same settings, in addition to `sd` and a
    measurement's own interval."""


class _Effect(NamedTuple):
    """Effect of one setting on the logarithm of a cost."""

    value: Callable[[TrainingConfig], object]
    sd: float
    length: float | None = None
    """Length scale of a number's effect; None for a category, whose values are independent."""

    def kernel(self, left: Floats, right: Floats) -> Floats:
        """Return the correlation between two lists of values, (left, right)."""
        apart = left[:, None] - right
        if self.length is None:
            return np.asarray(apart == 0, dtype=np.float64)
        return np.asarray(np.exp(-0.5 * (apart / self.length) ** 2), dtype=np.float64)


_EFFECTS = {
    cost: tuple(
        _Effect(effect.of or attrgetter(setting.name), effect.sds[cost], effect.length)
        for setting in SETTINGS
        for effect in setting.effects
        if cost in effect.sds
    )
    for cost in COSTS
}
"""Effects of all settings on each cost, from the settings table."""


def _covariance(cost: str, prior: CostPrior, left: Floats, right: Floats) -> Floats:
    """Return a cost's prior covariance of two lists of places, (effects, places) each: (left, right)."""
    kernels = [
        effect.kernel(*values) for effect, *values in zip(_EFFECTS[cost], left, right, strict=True)
    ]
    total: Floats = np.full((left.shape[1], right.shape[1]), prior.level_sd**2)
    for effect, kernel in zip(_EFFECTS[cost], kernels, strict=True):
        total += effect.sd**2 * kernel
    if prior.interaction_sd:
        total += prior.interaction_sd**2 * prod(kernels)
    if prior.pair_sd:
        total += prior.pair_sd**2 * kernels[0] * kernels[1]
    return total


def _places(configs: Sequence[TrainingConfig]) -> list[Floats]:
    """Return the values of each cost's effects, (effects, configs)."""
    table = np.array([_values(config) for config in configs], dtype=np.float64).T
    return np.split(table, np.cumsum([len(_EFFECTS[cost]) for cost in COSTS])[:-1])


@lru_cache(maxsize=8192)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """Return the values of all costs' effects. Cached: a proposal repeats thousands of configurations."""
    values = list[float]()
    for effect in chain.from_iterable(_EFFECTS.values()):
        value = effect.value(config)
        if not isinstance(value, float):  # a category gets a number of its own
            value = float(crc32(repr(value).encode()))
        values.append(value)
    return tuple(values)


@dataclass(frozen=True)
class RateModel:
    """Model of the machine, fitted to observations, of which at least one must be a run."""

    observations: Sequence[Observation]
    environment: Environment
    learned_variation: RunVariation
    """Learned run-to-run variation, the prior of the scatter."""
    model: Throughput = POLICY.throughput
    """Priors of the costs, and the law's own numbers."""
    start: tuple[float, Mapping[Observation, Floats]] | None = None
    """Scatter and weights of an earlier fit to start from; None: none."""

    def with_observations(
        self, observations: Sequence[Observation], learned_variation: RunVariation
    ) -> RateModel:
        """Return the model of more observations.

        With many observations its fit starts where this one's ended.
        """
        start = None
        if min(len(observations), len(self.observations)) >= _WARM_FROM:
            factor, posterior = self._fit
            start = factor, dict(zip(self._seen, posterior.weights.T, strict=True))
        return replace(
            self, observations=observations, learned_variation=learned_variation, start=start
        )

    def forecast(
        self, configs: Sequence[TrainingConfig], running: Sequence[TrainingConfig] = ()
    ) -> Forecast:
        """Forecast configurations. Takes milliseconds for thousands of them.

        Args:
            configs: Configurations to forecast.
            running: Configurations under measurement. Each counts as a run at its own forecast
                ("kriging believer"): means stay, but their future results are no longer uncertain.
                Source: Ginsbourger, Le Riche, Carraro 2010, "Kriging is well-suited to parallelize
                optimization".

        Returns:
            One element per configuration.
        """
        known = self._believing(running)
        parts = [self._forecast(part, *known) for part in in_parts(configs)]
        names = [one.name for one in fields(Forecast) if one.name != "scatter_sd"]
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return Forecast(**joined, scatter_sd=self._scatter_sd)

    def _forecast(
        self,
        configs: Sequence[TrainingConfig],
        places: Sequence[TrainingConfig],
        posterior: Posterior,
    ) -> Forecast:
        """Forecast configurations from a posterior at given places."""
        state, cross_covariance = self._state(configs, places, posterior)
        rates, slopes = law(state, self._circumstances(configs), self.model)

        # Propagate the state's uncertainty through the law's slopes
        informed = cross_covariance * posterior.jacobian[:, None, :]
        variances = self._covariance(configs[:1], configs[:1])[:, 0, 0]  # the same everywhere
        of = slopes()
        loader_sd, device_sd, sd, copy_sd, host_sd = (
            _sd(slope, variances, informed, posterior.cholesky)
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
        """Return the places of all observations and running trials, and the posterior as if these had ended."""
        seen = [observation.config for observation in self._seen]
        _, posterior = self._fit
        if not running:
            return seen, posterior

        # Covariance of the running trials' results with the observations, and among each other
        state, across = self._state(running, seen, posterior)
        among = self._covariance(running, running)
        slopes = law(state, self._circumstances(running), self.model)[1]().run
        known = np.einsum("pi,pij,pj->ij", slopes, across, posterior.jacobian)
        own = np.einsum("pi,pij,pj->ij", slopes, among, slopes) + self._scatter_sd**2 * np.eye(
            len(running)
        )

        # Append them to the Cholesky factor, block by block
        explained = _solved(posterior.cholesky, known.T).T
        left = np.linalg.cholesky(own - explained @ explained.T)
        above = np.zeros((len(seen), len(running)))
        believed = replace(
            posterior,
            # Each result is as expected, so it moves no mean
            weights=np.hstack([posterior.weights, np.zeros_like(slopes)]),
            jacobian=np.hstack([posterior.jacobian, slopes]),
            cholesky=np.block([[posterior.cholesky, above], [explained, left]]),
        )
        return [*seen, *running], believed

    def _state(
        self,
        configs: Sequence[TrainingConfig],
        places: Sequence[TrainingConfig],
        posterior: Posterior,
    ) -> tuple[Floats, Floats]:
        """Return the most likely state of configurations, and their covariance with the posterior's places."""
        covariance = self._covariance(configs, places)
        moved = np.einsum("pij,pj->pi", covariance, posterior.weights)
        return self._prior_means(configs) + moved, covariance

    @cached_property
    def _seen(self) -> list[Observation]:
        """Observations in a fixed order: with several optima, the fit depends on the order."""
        return sorted(self.observations, key=repr)

    @property
    def _scatter_sd(self) -> float:
        """Standard deviation between repeated runs, of the log throughput."""
        factor, _ = self._fit
        are_steady = [seen.is_steady for seen in self._seen if seen.kind == "run"]
        return factor * self.learned_variation.of(are_steady).sd

    @cached_property
    def _fit(self) -> tuple[float, Posterior]:
        """Scatter relative to the learned variation that explains the observations best, and the posterior with it.

        An observation knows its own uncertainty. The effect of other processes, and of all that no
        sum of effects expresses, shows only between observations. The variation learned from runs
        of the same settings is the prior (scaled inverse chi-squared on the variance).
        """
        configs = [observation.config for observation in self._seen]
        here = self._circumstances(configs)
        kinds = np.array([Rates._fields.index(seen.kind) for seen in self._seen])
        places = np.arange(len(configs))

        def expect(state: Floats) -> tuple[Floats, Callable[[], Floats]]:
            rates, slopes = law(state, here, self.model)
            return np.stack(rates)[kinds, places], lambda: np.stack(slopes())[kinds, :, places].T

        problem = Problem(
            observed=np.log([seen.samples_per_s for seen in self._seen]),
            variances=np.array([seen.relative_sd**2 for seen in self._seen]),
            prior_mean=self._prior_means(configs),
            covariances=self._covariance(configs, configs),
            expect=expect,
        )

        # Start at the prior mean or, where it helps, with a large cost of oversubscription: no step
        # gets there from a small one. After an earlier fit, start there, with scatters near its own
        nothing = np.zeros(len(COSTS))
        factors: Sequence[float] = self.model.scatter_factors
        starts = [np.zeros_like(problem.prior_mean)]
        if self.start is not None:
            place = factors.index(self.start[0])
            factors = factors[max(0, place - 1) : place + 2]
            starts = [np.array([self.start[1].get(seen, nothing) for seen in self._seen]).T]
        elif (here.is_crowded & (kinds == Rates._fields.index("run"))).any():
            row = COSTS.index("crowding")
            crowded = np.zeros_like(problem.prior_mean)
            crowded[row] = -problem.prior_mean[row] / problem.covariances[row].sum(axis=1)
            starts.append(crowded)

        # Fit with each scatter, from the largest on; each fit starts the next
        fits = list[tuple[float, Posterior]]()
        spreads = np.array([self.learned_variation.of([seen.is_steady]).sd for seen in self._seen])
        for factor in factors:
            scattered = replace(problem, variances=problem.variances + (factor * spreads) ** 2)
            tried = [most_likely(scattered, start) for start in starts]
            best = max(tried, key=lambda fit: fit.log_evidence)
            fits.append((factor, best))
            starts = [best.weights]

        # The log prior density of a scatter is that of the variation, on the log scale
        degrees = self.learned_variation.degrees_of_freedom
        return max(
            fits, key=lambda fit: fit[1].log_evidence - degrees * (log(fit[0]) + 0.5 / fit[0] ** 2)
        )

    def _covariance(
        self, left: Sequence[TrainingConfig], right: Sequence[TrainingConfig]
    ) -> Floats:
        """Return prior covariances of two lists of configurations, (costs, left, right).

        Costs that affect no throughput here have covariance 0, which saves most of the fit's time
        on them.
        """
        nothing = np.zeros((len(left), len(right)))
        return np.stack(
            [
                nothing
                if cost in self._idle_costs
                else _covariance(cost, self.model.costs[cost], *both)
                for cost, *both in zip(COSTS, _places(left), _places(right), strict=True)
            ]
        )

    @cached_property
    def _idle_costs(self) -> set[str]:
        """Costs of copies and of the host that no observation measured alone."""
        idle = set[str]()
        if "copy" not in self._kinds:
            idle |= {"copies", "hidden"}
        if "launch" not in self._kinds:
            idle |= {"launching", "slower", "taking"}
        elif "take" not in self._kinds:
            idle |= {"taking"}
        return idle

    def _prior_means(self, configs: Sequence[TrainingConfig]) -> Floats:
        """Return the prior mean of every cost in every configuration, (costs, configs)."""
        if_pinned = [self.model.costs[cost].if_pinned for cost in COSTS]
        is_pinned = [config.pin_memory for config in configs]
        return np.asarray(self._prior_mean[:, None] + np.outer(if_pinned, is_pinned), np.float64)

    @cached_property
    def _prior_mean(self) -> Floats:
        """Prior mean of every cost, (costs,); levels are those of the measurements.

        A side that was not measured alone is expected at a multiple of the throughput of the runs.
        """
        mean = np.array([self.model.costs[cost].mean for cost in COSTS])
        mean[COSTS.index("most_workers")] = log(self.environment.cores)
        mean[COSTS.index("softness")] = log(self.model.softness)
        here = self._circumstances([seen.config for seen in self._seen])

        # What the law expects of the observations with costs at their general prior
        means = np.repeat(mean[:, None], len(self._seen), axis=1)
        expected, _ = law(means, here, self.model)
        kernels, _ = law(means, replace(here, is_launched=False), self.model)
        expected = expected._replace(device=kernels.device)
        observed = np.log([seen.samples_per_s for seen in self._seen])
        kinds = np.array([seen.kind for seen in self._seen])

        # Shift each side's level to the mean of its measurements
        for side, cost in _SIDES.items():
            apart = observed - getattr(expected, side)
            if side in self._kinds:
                mean[COSTS.index(cost)] = apart[kinds == side].mean()
            elif side in {"loader", "device"}:
                mean[COSTS.index(cost)] = apart[kinds == "run"].mean() + log(
                    self.model.unmeasured_factor
                )
        return mean

    @cached_property
    def _kinds(self) -> frozenset[str]:
        """Kinds of observations; the time of a side that was not measured alone is part of the shortfall."""
        return frozenset(seen.kind for seen in self._seen)

    def _circumstances(self, configs: Sequence[TrainingConfig]) -> Circumstances:
        """Return the quantities besides the costs that the law depends on."""
        environment = self.environment
        cores = environment.cores

        def column(value: Callable[[TrainingConfig], float]) -> Floats:
            return np.array([value(config) for config in configs], dtype=np.float64)

        # Measured CPU time of loader and device, by their numbers of threads. Threads that wait for
        # each other spin: a sample's CPU time depends on how many a worker has
        cpu_s = defaultdict[int | None, list[float]](list)
        busy_cores = defaultdict[int | None, list[float]](list)
        for seen in self._seen:
            if seen.kind == "loader" and seen.config.has_workers and seen.cpu_s_per_sample:
                cpu_s[seen.config.worker_threads].append(seen.cpu_s_per_sample)
            elif seen.kind == "device" and seen.cpu_s_per_sample is not None:
                cores_of = busy_cores[seen.config.intra_op_threads]
                cores_of.append(seen.cpu_s_per_sample * seen.samples_per_s)
        usual_cpu_s = list(chain.from_iterable(cpu_s.values())) or [0.0]

        # If not measured: a CPU's threads keep their cores busy, an accelerator the launching one
        is_cpu = environment.device_kind == "cpu"
        unmeasured = cores if is_cpu else 1
        busy = column(
            lambda config: median(
                busy_cores.get(config.intra_op_threads)
                or [min(config.intra_op_threads or unmeasured, unmeasured)]
            )
        )

        workers = column(lambda config: config.num_workers)
        processes = column(lambda config: config.process_count)
        own_cores = column(lambda config: cores_within(config, environment))
        threads = column(lambda config: config.intra_op_threads or inf)
        threads = np.where(threads < inf, threads, own_cores)
        usual_batch = exp(fmean(log(seen.config.micro_batch_size) for seen in self._seen))
        return Circumstances(
            has_workers=workers > 0,
            log_processes=np.log(np.maximum(workers, 1)),
            log_ranks=np.log(column(lambda config: config.world_size)),
            log_batch=np.log(column(lambda config: config.micro_batch_size) / usual_batch),
            log_micro_batches=np.log(column(lambda config: config.grad_accum_steps)),
            is_overlapped=column(lambda config: overlaps(config, environment.device_kind)) == 1,
            # On an accelerator, threads wait for it
            is_crowded=is_cpu & ((threads + workers) * processes > own_cores),
            is_copied="copy" in self._kinds,
            is_blocking=("copy" in self._kinds) & (column(lambda config: config.pin_memory) == 0),
            is_launched="launch" in self._kinds,
            is_taken=("take" in self._kinds) & (workers > 0),
            busy=np.minimum(busy, own_cores) * processes,
            cores=own_cores * column(lambda config: hosts_of(config, environment)),
            loader_cpu_s=column(
                lambda config: median(cpu_s.get(config.worker_threads) or usual_cpu_s)
            ),
        )


def _sd(slopes: Floats, variances: Floats, informed: Floats, cholesky: Floats) -> Floats:
    """Return posterior standard deviations of a quantity, from its slopes, (costs, configs)."""
    if not slopes.any():
        return np.zeros(slopes.shape[1])
    cross_covariance = np.einsum("pi,pij->ij", slopes, informed)
    explained = _solved(cholesky, cross_covariance.T)
    variance = variances @ slopes**2 - (explained**2).sum(axis=0)
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)), dtype=np.float64)


def _solved(cholesky: Floats, right: Floats) -> Floats:
    """Solve a lower triangular system."""
    from scipy.linalg import solve_triangular

    return np.asarray(
        solve_triangular(cholesky, right, lower=True, check_finite=False), dtype=np.float64
    )


# Criteria for the next trial: expected gain, redundancy, and the probability that it runs.


_SETTINGS = tuple(name for name in TrainingConfig.model_fields if BY_NAME[name].sides)


def expected_gain(forecast: Forecast, best_samples_per_s: float) -> Floats:
    """Return the expected improvement over the best throughput so far, as a share of it: 0.04 = 4 %.

    Throughput is log-normal: E[max(rate / best - 1, 0)], as the value of a call option. Source:
    Jones, Schonlau, Welch 1998, "Efficient global optimization of expensive black-box functions";
    for the log-normal, Black and Scholes 1973.

    Args:
        forecast: Forecast of the configurations.
        best_samples_per_s: Best throughput so far, in samples/s.

    Returns:
        One value per configuration.
    """
    from scipy.special import ndtr

    sd = np.maximum(forecast.sd, 1e-9)  # keeps a division finite
    above = forecast.log_rate - np.log(best_samples_per_s)
    mean = np.exp(np.minimum(above + sd**2 / 2, 50.0))  # keeps the exponential finite
    gain: Floats = mean * ndtr(above / sd + sd) - ndtr(above / sd)
    return np.maximum(gain, 0.0)


def most_gain(forecast: Forecast, best_samples_per_s: float, side_sds: float) -> Floats:
    """Return an upper bound of each gain: the slowest side at the upper end of its interval, over the best.

    Copies bound a run even if computing hides them completely.

    Args:
        forecast: Forecast of the configurations.
        best_samples_per_s: Best throughput so far, in samples/s.
        side_sds: Standard deviations from the forecast to the end of the interval.

    Returns:
        One share per configuration: 0.04 = 4 %.
    """
    _, fast = _sides(forecast, side_sds)
    gain: Floats = np.maximum(np.min(fast, axis=0) / best_samples_per_s - 1, 0.0)
    return gain


def redundant_among(
    configs: Sequence[TrainingConfig],
    forecast: Forecast,
    tried: Sequence[TrainingConfig],
    trials: Trials,
) -> NDArray[np.bool_]:
    """Return which configurations differ from a tried one only on a side that limits neither.

    More workers than a slow device needs change nothing, nor does a faster device with as many
    threads behind a slow loader; with fewer threads, workers have more of the cores. Without
    workers both sides may limit, one after the other. Short copies change nothing, pinned or not,
    unless the host may be the limit: it takes pinned batches in less time.

    Args:
        configs: Configurations to judge.
        forecast: Their forecast.
        tried: Configurations that were tried; only those among `configs` count.
        trials: Ratio from which a side is ample; a copy is short if it takes less than a gain that
            is worth a trial.
    """
    # Sides that limit nothing, even at the unfavorable ends of all intervals
    (slow_loader, slow_device, slow_copy, slow_host), fast = _sides(forecast, trials.side_sds)
    fast_loader = fast[0]
    fast_training = np.min(fast[1:], axis=0)
    # At worst no part of a copy is hidden, at best all of it
    slow_training = np.minimum(1 / (1 / slow_device + 1 / slow_copy), slow_host)
    has_ample_loader = slow_loader > trials.ample * fast_training
    has_ample_device = slow_training > trials.ample * fast_loader
    has_ample_host = slow_host > trials.ample * np.min(fast[:3], axis=0)
    has_short_copy = (fast_training <= trials.least_gain * slow_copy) & has_ample_host

    def trained(place: int) -> tuple[object, ...]:
        """Return the settings that matter behind an ample loader."""
        pinning = None if has_short_copy[place] else configs[place].pin_memory
        return device_key(configs[place]), pinning

    # Settings of the limiting side that were tried
    places = {config: place for place, config in enumerate(configs)}
    known = [places[config] for config in tried if config in places and config.has_workers]
    devices = {trained(place) for place in known if has_ample_loader[place]}
    loaders = {_loader_with_threads(configs[place]) for place in known if has_ample_device[place]}

    # Configurations that have the same settings there
    redundant = _pins_in_vain(configs, forecast, tried, trials)
    for place, config in enumerate(configs):
        if config.has_workers:
            trains_alike = has_ample_loader[place] and trained(place) in devices
            loads_alike = has_ample_device[place] and _loader_with_threads(config) in loaders
            redundant[place] |= trains_alike or loads_alike
    return redundant


def has_failed(record: TrialRecord) -> bool:
    """Return whether a trial ended without a throughput, for another reason than memory."""
    has_rate = record.measurement is not None or bool(record.result.blocks)
    return not has_rate and record.outcome not in OUT_OF_MEMORY | {"pruned"}


def chance_to_run(
    configs: Sequence[TrainingConfig],
    failed: Collection[TrainingConfig],
    ran: Collection[TrainingConfig],
    blamed: float,
) -> Floats:
    """Return the probability that each configuration does not fail for the same reason as another.

    A failure is blamed on one of the settings in which it differs from everything that ran, with
    equal probability: a configuration that shares half of these values has half a chance.

    Args:
        configs: Configurations to judge.
        failed: Configurations that failed.
        ran: Configurations that ran.
        blamed: Probability that these values failed, not the machine.
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
            chances *= 1 - blamed * np.array(shared) / len(suspects)
    return chances


def _pins_in_vain(
    configs: Sequence[TrainingConfig],
    forecast: Forecast,
    tried: Sequence[TrainingConfig],
    trials: Trials,
) -> NDArray[np.bool_]:
    """Return which configurations change `pin_memory` to an untried value although copies limit neither value.

    The same configuration with a tried value is as informative. None if copies were not measured,
    or if all remaining configurations have the untried value and no tried twin.
    """
    (_, _, slow_copy, slow_host), (fast_loader, fast_device, _, _) = _sides(
        forecast, trials.side_sds
    )
    known = {config.pin_memory for config in tried}
    has_run = set(tried)
    is_known = np.array([config.pin_memory in known for config in configs], dtype=np.bool_)

    # Copies that limit the run with neither value
    slowest = slow_copy[is_known].min(initial=inf)
    fastest = np.minimum(fast_loader, fast_device)
    is_short = fastest <= trials.least_gain * np.minimum(slow_copy, slowest)
    is_short &= slow_host > trials.ample * fastest
    is_short &= np.isfinite(forecast.copy)

    # Configurations with an untried value, as long as a tried one is equally informative
    are_left = any(config.pin_memory in known and config not in has_run for config in configs)
    has_twin = [
        are_left or config.model_copy(update={"pin_memory": not config.pin_memory}) in has_run
        for config in configs
    ]
    return np.asarray(~is_known & is_short & has_twin, dtype=np.bool_)


def _sides(forecast: Forecast, sds: float) -> tuple[Floats, Floats]:
    """Return loader, device, copy and host throughput at both ends of their intervals, (4, configs) each."""
    rates = np.stack([forecast.loader, forecast.device, forecast.copy, forecast.host])
    spread = sds * np.stack(
        [forecast.loader_sd, forecast.device_sd, forecast.copy_sd, forecast.host_sd]
    )
    return rates * np.exp(-spread), rates * np.exp(spread)


def _loader_with_threads(config: TrainingConfig) -> tuple[object, ...]:
    """Return the settings that a loader's throughput in training depends on: its own, and threads next to it."""
    return (*loader_key(config), config.intra_op_threads)
