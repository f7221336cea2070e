"""Judge configurations by their runs: run-to-run variation, proofs, contrasts, early stopping, the recommendation.

Comes in: the runs of a search. Goes out: intervals, proven and shrunk gains, the trial to stop
early, the configuration to recommend. Pure functions over records.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, hypot, inf, log, log1p, sqrt
from statistics import fmean, median, variance

import numpy as np

from autotune.config.environment import DeviceKind
from autotune.config.training_config import AMP_DTYPES, TrainingConfig
from autotune.messages.trials import stopped_early
from autotune.models.statistics import BATCH_MEANS, Floats, mean_rate, t_95, t_quantile, window_rate
from autotune.note import Note
from autotune.policy import POLICY, Policy, Proof, Spread, Stopping, WindowRules
from autotune.records.measurement import Block, Interval, Measurement
from autotune.records.result import MOST_SD, RunVariation
from autotune.records.trial import TrialRecord

# Run-to-run variation: its prior, how repeated runs update it, and how it widens intervals.
#
# All on the logarithm of throughput, since other processes slow a machine down by a factor.
#
# Sources: the scaled inverse chi-squared prior of a variance, Gelman et al., "Bayesian Data
# Analysis", 3rd ed., section 2.6; degrees of freedom of a sum of variances, Satterthwaite 1946, "An
# approximate distribution of estimates of variance components".


_WINDOW_DEGREES_OF_FREEDOM = BATCH_MEANS - 1


@dataclass(frozen=True, slots=True)
class Run:
    """One run, reduced to its log throughput and that one's error."""

    log_rate: float
    variance: float
    """Variance of `log_rate` by the run's own window."""
    is_held_by_device: bool = False
    number: int = 0
    """Number of its trial; 0 is the baseline."""
    at_s: float = 0.0
    """Seconds of the search at its end."""
    is_disturbed: bool = False
    """Other processes took part of the machine."""


def assumed_variation(device_kind: DeviceKind, prior: Spread = POLICY.spread) -> RunVariation:
    """Return the assumed run-to-run variation, before any repeats.

    Args:
        device_kind: Kind of the device; an accelerator has a variation for each kind of runs.
        prior: Standard deviations and degrees of freedom.
    """
    degrees = prior.degrees_of_freedom
    if device_kind == "cpu":
        return RunVariation(sd=prior.cpu_sd, degrees_of_freedom=degrees)
    device = RunVariation(sd=prior.device_sd, degrees_of_freedom=degrees)
    return RunVariation(sd=prior.host_sd, degrees_of_freedom=degrees, device=device)


def run_of(
    measurement: Measurement, policy: Policy = POLICY, *, number: int = 0, at_s: float = 0.0
) -> Run:
    """Reduce a measurement to a run.

    Args:
        measurement: What the run measured.
        policy: Rules of the window, and the largest standard deviation by it, which a window of one
            block has.
        number: Number of its trial.
        at_s: Seconds of the search at its end.
    """
    return Run(
        log(measurement.samples_per_s),
        _window_variance(measurement, policy.window, policy.spread.most_window_sd),
        measurement.window.is_held_by_device,
        number=number,
        at_s=at_s,
        is_disturbed=measurement.host_load is not None and measurement.host_load.is_loaded,
    )


def variance_of_a_second(measurement: Measurement, policy: Policy) -> float:
    """Return the variance of a log throughput measured for one second, by the window alone."""
    own = _window_variance(measurement, policy.window, policy.spread.most_second_sd)
    return own * sum(block.seconds for block in measurement.blocks)


def _window_variance(measurement: Measurement, rules: WindowRules, most_sd: float) -> float:
    """Return the variance of a run's log throughput by its own window."""
    rate = window_rate(measurement.window, rules)
    half = (rate.value - rate.low) / rate.value if rate.low > 0 else inf

    # Degrees of freedom of the batch means: a short window's interval is wide by Student's t alone
    blocks = len(measurement.window.blocks)
    batches = blocks if blocks < 2 * BATCH_MEANS else BATCH_MEANS
    own = most_sd**2
    if batches > 1:
        own = min(_variance(half, batches - 1), own)
    return own


def learn_variation(
    prior: RunVariation, groups: Iterable[Sequence[Run]], assumed: Spread = POLICY.spread
) -> RunVariation:
    """Update the run-to-run variation with repeated runs.

    Disturbed runs are left out: they are no evidence of the machine's own variation. So are groups
    of which the device limits only some runs.

    Args:
        prior: Variation known before.
        groups: Runs of one configuration each. The variances of each kind are pooled by degrees of
            freedom.
        assumed: Least variation, and outliers.
    """
    known = defaultdict[bool, list[tuple[int, float]]](list)
    for group in groups:
        slow = outliers_of([run.log_rate for run in group], assumed)
        runs = [run for place, run in enumerate(group) if not (run.is_disturbed or place in slow)]
        kinds = {run.is_held_by_device for run in runs}
        if len(runs) > 1 and len(kinds) == 1:
            # Sample variance, minus the windows' mean variance
            between = variance(run.log_rate for run in runs) - fmean(run.variance for run in runs)
            is_of_device = prior.device is not None and kinds == {True}
            known[is_of_device].append((len(runs) - 1, max(between, 0.0)))

    of_host = _pooled(prior, known[False], assumed.least_sd)
    if prior.device is None:
        return of_host
    return of_host.model_copy(
        update={"device": _pooled(prior.device, known[True], assumed.least_sd)}
    )


def _pooled(
    prior: RunVariation, known: Sequence[tuple[int, float]], least_sd: float
) -> RunVariation:
    """Pool variances by their degrees of freedom, which stand first."""
    if not known:
        return prior
    pieces = [(prior.degrees_of_freedom, prior.sd**2), *known]
    degrees = sum(own for own, _ in pieces)
    sd = sqrt(sum(own * square for own, square in pieces) / degrees)
    return RunVariation(
        sd=min(max(sd, least_sd), MOST_SD), degrees_of_freedom=degrees, source="workload"
    )


def rate_of_runs(runs: Sequence[Measurement], spread: RunVariation) -> Interval:
    """Return the geometric mean of the runs' throughput, with the 95 % prediction interval of another long run.

    Args:
        runs: Runs of the same settings, at least one.
        spread: Run-to-run variation.
    """
    spread = spread.of(run.window.is_held_by_device for run in runs)
    if len(runs) == 1:
        (run,) = runs
        window = with_run_variation(window_rate(run.window), spread)
        scale = run.samples_per_s / window.value if window.value > 0 else 0.0
        high = scale * window.high if scale > 0 else inf
        return Interval(value=run.samples_per_s, low=scale * window.low, high=high)
    mean, own = _mean_of(runs)
    half = _half_width(spread, 1 + 1 / len(runs), own)
    return Interval(value=exp(mean), low=exp(mean - half), high=exp(mean + half))


def ratio_of_runs(
    ours: Sequence[Measurement], theirs: Sequence[Measurement], spread: RunVariation
) -> Interval:
    """Return the ratio of two mean throughputs that were not measured interleaved, with its 95 % interval.

    Args:
        ours: Runs of the numerator.
        theirs: Runs of the denominator.
        spread: Run-to-run variation.
    """
    our_mean, our_variance = _mean_of(ours)
    their_mean, their_variance = _mean_of(theirs)
    spread = spread.of(run.window.is_held_by_device for run in (*ours, *theirs))
    half = _half_width(spread, 1 / len(ours) + 1 / len(theirs), our_variance + their_variance)
    value = our_mean - their_mean
    return Interval(value=exp(value), low=exp(value - half), high=exp(value + half))


def with_run_variation(rate: Interval, spread: RunVariation) -> Interval:
    """Widen a window's interval to the 95 % prediction interval of another long run of the same settings.

    Blocks of one window share what their process happens to get: memory layout, clock, other
    processes. So runs differ more than batch means show, and two runs differ twice as much.

    Args:
        rate: Throughput of a window, with its own interval.
        spread: Run-to-run variation; on an accelerator that of the run's kind, see `RunSpread.of`.
    """
    down = _log_distance(rate.value, rate.low, spread)
    up = _log_distance(rate.high, rate.value, spread)
    return Interval(value=rate.value, low=rate.value * exp(-down), high=rate.value * exp(up))


def _log_distance(high: float, low: float, spread: RunVariation) -> float:
    """Return the log distance of two ends, with the variation of two runs added; infinite for an open end."""
    if low <= 0 or high == inf:
        return inf
    return _half_width(spread, 2, _variance(log(high / low)))


def _mean_of(runs: Sequence[Measurement]) -> tuple[float, float]:
    """Return the mean of the runs' log throughput, and its variance by the windows."""
    known = [run_of(run) for run in runs]
    own = sum(run.variance for run in known) / len(known) ** 2
    return fmean(run.log_rate for run in known), own


def _variance(distance: float, degrees_of_freedom: int = _WINDOW_DEGREES_OF_FREEDOM) -> float:
    """Return the variance of a logarithm, from the distance to the end of its 95 % batch-means interval."""
    return (distance / t_95(degrees_of_freedom)) ** 2


def _half_width(spread: RunVariation, runs: float, own: float) -> float:
    """Return half of a logarithm's 95 % interval: `runs` times the variation's variance, plus the windows' own."""
    between = runs * spread.sd**2
    degrees = (between + own) ** 2 / (
        between**2 / spread.degrees_of_freedom + own**2 / _WINDOW_DEGREES_OF_FREEDOM
    )
    return t_95(degrees) * sqrt(between + own)


_SD_OF_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def outliers_of(log_rates: Sequence[float], assumed: Spread = POLICY.spread) -> frozenset[int]:
    """Find runs that other processes disturbed, by throughput alone.

    Such a run lies several robust standard deviations, and a factor, below the other runs, of which
    at least two agree.

    Args:
        log_rates: Log throughput of all runs of one configuration.
        assumed: These standard deviations and factors.

    Returns:
        Indices of the disturbed runs.
    """
    slow = set[int]()
    for place, own in enumerate(log_rates):
        # Of the other runs, at least two must agree
        others = sorted([*log_rates[:place], *log_rates[place + 1 :]])
        if not any(
            upper - lower <= log(assumed.agreeing_factor) for lower, upper in pairwise(others)
        ):
            continue
        middle = median(others)
        sd = _SD_OF_MAD * median(abs(other - middle) for other in others)
        if middle - own > max(assumed.outlier_sds * sd, log(assumed.outlier_factor)):
            slow.add(place)
    return frozenset(slow)


# Shrink measured gains towards zero, since most changes bring little.
#
# The prior of a gain is a mixture of normal distributions around 0, from narrow to very wide: small
# gains, which noise could explain, shrink to almost nothing, large ones hardly at all. Posteriors
# under such a prior need no further correction for choosing the best of several, nor for repeated
# interim analyses.
#
# Sources: spike and slab, George and McCulloch 1993, "Variable selection via Gibbs sampling";
# shrinkage instead of a correction for multiple comparisons, Gelman, Hill and Yajima 2012; mixtures
# fitted to many experiments of the same kind (adaptive shrinkage), Stephens 2017, "False discovery
# rates: a new deal".


def believe(measured: Contrast, proof: Proof) -> Contrast:
    """Return the posterior of a gain under the prior."""
    scales = np.array(proof.gain_sds)
    variances = measured.sds[:, None] ** 2
    total = variances + scales**2
    log_weights = (
        np.log(np.maximum(measured.weights, 1e-300))[:, None]
        + np.log(proof.gain_weights)
        - 0.5 * np.log(total)
        - 0.5 * measured.means[:, None] ** 2 / total
    )
    weights = np.exp(log_weights - log_weights.max())
    return Contrast(
        (weights / weights.sum()).ravel(),
        (measured.means[:, None] * scales**2 / total).ravel(),
        np.sqrt(scales**2 * variances / total).ravel(),
    )


def chance_worthwhile(measured: Contrast, proof: Proof) -> float:
    """Return the probability that a gain is worth a change of settings."""
    return max(0.0, 1 - believe(measured, proof).chance_below(log1p(proof.worthwhile)))


# Spend an error budget on proofs that a configuration is faster.
#
# A search analyzes its data after every run, and picks the best of many configurations. Both would
# make luck look like a gain. So every interim analysis spends a part of the allowed error, and all
# of them together keep it, whatever the data and however long the search (Bonferroni over
# configurations and analyses):
#
# - during the search, the j-th configuration tried has SEARCH_ERROR / (j (j + 1)), and its n-th
# analysis 2^-n of that;
# - once the search has settled on a leader, only later runs count, on which the choice does not
# depend. Analyses are few, and spend more the later they come (Lan and DeMets 1983, Kim and DeMets
# 1987). If a leader falls, the next one has a quarter of the remaining error.
#
# A proof is never withdrawn. Both configurations must have run twice, and the baseline once after
# the other: a stretch in which other processes slowed the machine down fakes any gain.


@dataclass(slots=True)
class Ledger:
    """Runs in order, the error spent on interim analyses, and the gains these have proven."""

    spread: RunVariation
    """Run-to-run variation known before these runs."""
    policy: Policy = POLICY
    """Error budget, and numbers of the evidence."""
    runs: list[Run] = field(default_factory=list)
    proven: dict[int, float] = field(default_factory=dict)
    """Largest proven log gain over the baseline (number 0), by configuration."""
    _order: list[int] = field(default_factory=list)
    """Configurations in the order in which they were tried."""
    _analyses: Counter[int] = field(default_factory=Counter)
    _leader: int | None = None
    _since: int = 0
    """Index of the first run that counts for the leader."""
    _left: float = field(init=False)
    _budget: float = 0.0
    """Error that may be spent on the leader."""
    _used: float = 0.0
    """Share of the settling time at the last interim analysis."""
    _evidence: Evidence | None = None

    def __post_init__(self) -> None:
        """Start with all of the error unspent."""
        self._left = self.policy.proof.settle_error

    @classmethod
    def going_on(
        cls, spread: RunVariation, records: Iterable[TrialRecord], policy: Policy
    ) -> Ledger:
        """Rebuild the ledger of a resumed search: analyze its runs in the order in which they ended.

        The error that the interrupted search spent on settling is not known. If it repeated a
        trial, it counts as having settled once.

        Args:
            spread: Run-to-run variation known before.
            records: Trials so far.
            policy: Error budget, and numbers of the evidence.
        """
        ledger = cls(spread, policy)
        known = list(records)
        for run in evidence_of_runs(known, spread, policy).runs:
            ledger.add(run)
        if any(record.repeats for record in known if record.number != 0):
            ledger._left *= 1 - policy.proof.first_share
        return ledger

    @property
    def evidence(self) -> Evidence:
        """All runs so far."""
        if self._evidence is None or len(self._evidence.runs) < len(self.runs):
            self._evidence = Evidence(tuple(self.runs), self.spread, self.policy.spread)
        return self._evidence

    def add(self, run: Run) -> None:
        """Add a run, and analyze its configuration; after a run of the baseline, the leader."""
        self.runs.append(run)
        number = self._leader if run.number == 0 else run.number
        if number is None:
            return
        if number not in self._order:
            self._order.append(number)
        if self._may_prove(number):
            self._analyses[number] += 1
            place = 1 + self._order.index(number)
            error = (
                self.policy.proof.search_error
                / (place * (place + 1))
                * 0.5 ** self._analyses[number]
            )
            self._prove(number, error)

    def settle(self, number: int) -> None:
        """Settle on a leader: only later runs count for it, so that they can't bias the choice."""
        self._leader = number
        self._since = len(self.runs)
        self._used = 0.0
        self._budget = self.policy.proof.first_share * self._left
        self._left *= 1 - self.policy.proof.first_share

    @property
    def pairs(self) -> int:
        """Number of pairs of leader and baseline runs since settling."""
        late = Counter(run.number for run in self.runs[self._since :])
        return 0 if self._leader is None else min(late[self._leader], late[0])

    def analyze(self, used: float, *, is_last: bool = False) -> None:
        """Analyze the leader, if enough pairs have come since the last interim analysis.

        Args:
            used: Share of the settling time that is over.
            is_last: No further analysis follows.
        """
        if self._leader is None or self.pairs == 0:
            return
        if not is_last and self.pairs not in self.policy.proof.analyses_after:
            return

        # Spend error with the square of the time used: little at first, most of it late
        used = 1.0 if is_last else min(used, 1.0)
        error = self._budget * (used**2 - self._used**2)
        self._used = max(used, self._used)
        self._prove(self._leader, error, since=self._since)

    def _may_prove(self, number: int) -> bool:
        """Return True if both ran twice, and the baseline once after the configuration: slow stretches end."""
        numbers = [run.number for run in self.runs]
        if number not in numbers or 0 not in numbers[numbers.index(number) :]:
            return False
        return (
            min(self.evidence.count(number), self.evidence.count(0))
            >= self.policy.proof.fewest_runs
        )

    def _prove(self, number: int, error: float, *, since: int = 0) -> None:
        if error < 1e-9 or not self._may_prove(number):
            return
        contrast = self.evidence.contrast(number, 0, since=since)
        if contrast is not None and contrast.chance_below(0.0) < error:
            self.proven[number] = max(self.proven.get(number, 0.0), contrast.quantile(error))


# Compare two configurations by all runs of a search, with the run-to-run variation integrated out.
#
# Every run counts: trials, repeats and the baseline in between. The model of a run's log
# throughput:
#
#     configuration's mean + run-to-run variation + window's error
#
# The variation is integrated over a grid under a scaled inverse chi-squared prior. So a contrast is
# a mixture of normal distributions, with heavy tails while few repeats have been made.
# Configurations limited by the device hardly vary from run to run; they inform each other only, and
# two of unlike kinds are compared by their own runs alone. Slow drift is not modelled: noise
# decorrelates within seconds (benchmarks/warm_process.py), and interleaved runs share what lasts
# for minutes, which makes the intervals slightly too wide.
#
# Sources: restricted likelihood of variance components, Patterson and Thompson 1971; the prior of a
# variance, Gelman et al., "Bayesian Data Analysis", 3rd ed., section 2.6; runs as the unit of
# repetition, Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time".


_POINTS = 31
"""Points of the grid of run-to-run variations."""
_LEAST_VARIANCE = 1e-12  # keeps a division finite


@dataclass(frozen=True, slots=True)
class Contrast:
    """Logarithm of a ratio of two throughputs: a mixture of normal distributions."""

    weights: Floats
    """Weights of the components, (components,), with sum 1."""
    means: Floats
    """Means, (components,)."""
    sds: Floats
    """Standard deviations, (components,)."""

    @property
    def value(self) -> float:
        """Mean."""
        return float(self.weights @ self.means)

    @property
    def sd(self) -> float:
        """Standard deviation."""
        return sqrt(float(self.weights @ (self.sds**2 + (self.means - self.value) ** 2)))

    def chance_below(self, bound: float) -> float:
        """Return the probability below a bound."""
        from scipy.special import ndtr

        return float(self.weights @ ndtr((bound - self.means) / self.sds))

    def quantile(self, probability: float) -> float:
        """Return the quantile of a probability, by bisection."""
        low = float((self.means - 40 * self.sds).min())
        high = float((self.means + 40 * self.sds).max())
        for _ in range(60):
            middle = (low + high) / 2
            if self.chance_below(middle) < probability:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def ratio(self, one_sided_error: float = 0.025) -> Interval:
        """Return the ratio of the two throughputs: the median and an interval.

        Args:
            one_sided_error: Probability beyond either end of the interval.
        """
        return Interval(
            value=exp(self.quantile(0.5)),
            low=exp(self.quantile(one_sided_error)),
            high=exp(self.quantile(1 - one_sided_error)),
        )


@dataclass(slots=True)
class Evidence:
    """Runs, and the run-to-run variation known before.

    Args:
        runs: In the order in which they ended.
        spread: Run-to-run variation before these runs.
        assumed: Smallest and largest variation considered, and disturbed runs.
    """

    runs: Sequence[Run]
    spread: RunVariation
    assumed: Spread = POLICY.spread
    _steady: frozenset[int] = field(init=False)
    """Configurations whose runs were all limited by the device."""
    _runs_of: dict[int, list[Run]] = field(init=False)
    _variations: dict[tuple[frozenset[int], RunVariation], tuple[Floats, Floats]] = field(
        default_factory=dict
    )
    """Grid of run-to-run variations and their weights, by the configurations that inform it and the
    prior."""

    def __post_init__(self) -> None:
        """Group the runs by configuration, and configurations by kind."""
        self.runs = _marked(self.runs, self.assumed)
        self._runs_of = _sorted(self.runs)
        by_host = {run.number for run in self.runs if not run.is_held_by_device}
        self._steady = frozenset(self._runs_of) - by_host

    def count(self, number: int) -> int:
        """Return the number of a configuration's runs."""
        return len(self._runs_of.get(number, ()))

    def log_rate(self, number: int) -> float:
        """Return the mean log throughput of a configuration, by its undisturbed runs if there are any."""
        runs = self._runs_of[number]
        undisturbed = [run for run in runs if not run.is_disturbed]
        return fmean(run.log_rate for run in undisturbed or runs)

    def contrast(self, number: int, other: int, *, since: int = 0) -> Contrast | None:
        """Compare the log throughput of two configurations.

        Args:
            number: The configuration.
            other: The one that it is compared with.
            since: Index of the first run that counts for the two; all runs inform the variation.

        Returns:
            The first minus the second; None if one of them has no run.
        """
        late = _sorted(self.runs[since:]) if since else self._runs_of
        if number not in late or other not in late:
            return None
        sds, weights = self._variation(number, other)
        mean, own = self._posterior_mean(late[number], sds)
        other_mean, others = self._posterior_mean(late[other], sds)
        sd = np.sqrt(own + others + _LEAST_VARIANCE)
        return Contrast(weights, mean - other_mean, sd)

    def _variation(self, number: int, other: int) -> tuple[Floats, Floats]:
        """Return the grid of run-to-run variations for a comparison of two configurations, and their weights."""
        is_steady = number in self._steady
        is_alike = is_steady == (other in self._steady)

        # Configurations that inform the variation: the two, and all of their kind if they share it.
        # One that ran once does not: its mean explains all of its run.
        informing = {number, other}
        if is_alike:
            informing.update(one for one in self._runs_of if (one in self._steady) == is_steady)
        known = frozenset(
            one for one, runs in self._runs_of.items() if one in informing and len(runs) > 1
        )
        spread = self.spread.of([is_steady, other in self._steady])
        if (known, spread) in self._variations:
            return self._variations[known, spread]

        # Prior times likelihood on a grid
        most_sd = max(self.assumed.most_factor * spread.sd, self.assumed.most_sd)
        sds = np.geomspace(self.assumed.least_factor * spread.sd, most_sd, _POINTS)
        times = sds / spread.sd
        log_weights = -spread.degrees_of_freedom * (np.log(times) + 0.5 / times**2)
        for one in known:
            log_weights += self._log_likelihood(self._runs_of[one], sds)
        weights = np.exp(log_weights - log_weights.max())
        self._variations[known, spread] = sds, weights / weights.sum()
        return self._variations[known, spread]

    def _precisions(self, runs: Sequence[Run], sds: Floats) -> Floats:
        """Return the precision of each run's log throughput for each variation, (variations, runs)."""
        own = [
            run.variance
            + (self.assumed.disturbed_sd**2 if run.is_disturbed else 0.0)
            + _LEAST_VARIANCE
            for run in runs
        ]
        precisions: Floats = np.reciprocal(sds[:, None] ** 2 + np.array(own))
        return precisions

    def _posterior_mean(self, runs: Sequence[Run], sds: Floats) -> tuple[Floats, Floats]:
        """Return a configuration's mean log throughput and its variance, for each variation."""
        precisions = self._precisions(runs, sds)
        total = precisions.sum(axis=1)
        return precisions @ np.array([run.log_rate for run in runs]) / total, 1 / total

    def _log_likelihood(self, runs: Sequence[Run], sds: Floats) -> Floats:
        """Return the log likelihood of each variation by one configuration's runs; 0 for one run.

        The configuration's mean is integrated out.
        """
        precisions = self._precisions(runs, sds)
        means, variances = self._posterior_mean(runs, sds)
        left = np.array([run.log_rate for run in runs]) - means[:, None]
        likelihood: Floats = (
            np.log(precisions).sum(axis=1) + np.log(variances) - (precisions * left**2).sum(axis=1)
        )
        return 0.5 * likelihood


def evidence_of_runs(
    records: Iterable[TrialRecord], spread: RunVariation, policy: Policy = POLICY
) -> Evidence:
    """Return the evidence of all runs that ended well, in the order in which they ended.

    Args:
        records: Trials with their repeats.
        spread: Run-to-run variation known before.
        policy: Numbers of the evidence.
    """
    runs = list[Run]()
    for record in records:
        for result in record.results:
            if result.measurement is not None and result.outcome == "ok":
                runs.append(
                    run_of(result.measurement, policy, number=record.number, at_s=result.at_s)
                )
    return Evidence(sorted(runs, key=lambda run: run.at_s), spread, policy.spread)


def _sorted(runs: Iterable[Run]) -> dict[int, list[Run]]:
    """Group runs by configuration."""
    by_number: dict[int, list[Run]] = {}
    for run in runs:
        by_number.setdefault(run.number, []).append(run)
    return by_number


def _marked(runs: Sequence[Run], assumed: Spread) -> list[Run]:
    """Return all runs, with outliers marked as disturbed."""
    slow = set[int]()
    for number in {run.number for run in runs}:
        places = [place for place, run in enumerate(runs) if run.number == number]
        outliers = outliers_of([runs[place].log_rate for place in places], assumed)
        slow.update(places[one] for one in outliers)
    return [
        replace(run, is_disturbed=True) if place in slow else run for place, run in enumerate(runs)
    ]


# Early stopping: prune a trial whose throughput can't come near the best so far.


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningThreshold:
    """Throughput that a trial has to come near to continue."""

    number: int
    """Trial that sets it."""
    low_samples_per_s: float
    """Estimated throughput of that trial, minus the possible difference between two runs of the
    same settings."""


def luck_of(best: RunVariation, running: RunVariation, stopping: Stopping) -> float:
    """Return the difference that two log throughputs of the same settings may have by chance.

    Hosts of accelerators vary more than CPUs, so there the degrees of freedom count too.

    Args:
        best: Run-to-run variation of the best trial's kind of runs.
        running: Variation of the running trial, the host's.
        stopping: Numbers of the search.
    """
    lucky_sds = stopping.lucky_sds
    if running.device is not None:
        lucky_sds = t_quantile(stopping.not_lucky, running.degrees_of_freedom)
    return lucky_sds * hypot(best.sd, running.sd)


def behind_threshold(
    blocks: Sequence[Block], bar: PruningThreshold, stopping: Stopping
) -> Note | None:
    """Return a note on why a trial can be stopped; None while it may still come near the threshold.

    Both corrections of the final throughput, for restarts and for a queue filled before the window,
    only lower it. So an upper end below the threshold stays below it. Warm-up blocks count only if
    they are far below it: they have no interval, but prefetched batches can only make them faster.

    Args:
        blocks: Blocks so far, including the warm-up.
        bar: The threshold.
        stopping: Numbers of the search.
    """
    in_window = [block for block in blocks if not block.is_warm_up]
    if len(in_window) < stopping.fewest_blocks:
        if not _is_hopeless(blocks, bar, stopping):
            return None
        return _stopped(blocks, 0.0, bar)
    rate, half_width = mean_rate(in_window)
    if (1 + stopping.busy_margin) * (rate + half_width) >= bar.low_samples_per_s:
        return None
    return _stopped(in_window, half_width, bar)


def _is_hopeless(blocks: Sequence[Block], bar: PruningThreshold, stopping: Stopping) -> bool:
    """Return whether blocks together are below half of the threshold, and not because of a single pause.

    Each block must be below the threshold, by what came or by what was made: a pause leaves the
    other blocks fast.
    """
    if len(blocks) < stopping.hopeless_blocks:
        return False
    if sum(block.seconds for block in blocks) < stopping.hopeless_s:
        return False
    for block in blocks:
        samples = float(block.samples)
        if block.made is not None:
            samples = min(samples, block.made)
        if samples >= bar.low_samples_per_s * block.seconds:
            return False
    return mean_rate(blocks)[0] < stopping.hopeless * bar.low_samples_per_s


def _stopped(blocks: Sequence[Block], half_width: float, bar: PruningThreshold) -> Note:
    return stopped_early(mean_rate(blocks)[0], half_width, bar.number, bar.low_samples_per_s)


# The recommendation: the simplest of the best, and a larger batch only for a gain.


_FIRST = "compile"
_SWITCHES = sorted(
    [
        (name, field.default)
        for name, field in reversed(TrainingConfig.model_fields.items())
        if isinstance(field.default, bool)
    ],
    key=lambda switch: switch[0] != _FIRST,
)
"""Boolean settings with their defaults, the one that counts most first: compilation, then from the
last field of `TrainingConfig` to the first."""


def simplicity(config: TrainingConfig) -> tuple[int, ...]:
    """Return a sort key: fewest devices and workers, smallest batch, plainest precision, fewest switches first."""
    return (
        config.world_size,
        config.num_workers * config.process_count,
        config.global_batch_size,
        AMP_DTYPES.index(config.amp_dtype),
        config.grad_accum_steps,
        *(int(getattr(config, name) != default) for name, default in _SWITCHES),
        int(config.compile_mode != "default"),
        ("node", "exclusive").index(config.numa_binding) + 1 if config.numa_binding else 0,
        config.prefetch_factor or 0,
        config.intra_op_threads or 0,
        config.worker_threads or 0,
        0 if config.ddp is None else len(config.ddp.model_dump(exclude_defaults=True)),
    )


def worth_its_batch(over: Interval, least: float) -> bool | None:
    """Return whether a larger batch is faster beyond noise, and by enough as measured.

    Args:
        over: Its throughput over that of the fastest with the baseline's global batch.
        least: Ratio that is enough.

    Returns:
        None if undecided: further runs may show it.
    """
    if over.low > 1 and over.value >= least:
        return True
    if over.high < least or over.high <= 1:
        return False
    return None


def break_even_noise_scale(batch: float, larger: float, ratio: float) -> float | None:
    """Return the gradient noise scale, in samples, above which a larger batch reaches a loss sooner.

    Source: Qiao et al., "Pollux" (OSDI 2021), section 3.1: at a noise scale S (McCandlish et al.
    2018, arXiv 1812.06162), a sample in a batch of M is worth (S + M0) / (S + M) of one in a batch
    of M0.

    Args:
        batch: Samples of an optimizer step.
        larger: Samples of an optimizer step with the larger batch.
        ratio: The larger batch's throughput over the other's, in samples/s.

    Returns:
        0 if at any noise scale; None if at none, since the larger batch is not faster.
    """
    if ratio <= 1:
        return None
    return max(0.0, (larger - ratio * batch) / (ratio - 1))


def choose(
    candidates: Sequence[TrialRecord],
    score: Callable[[TrialRecord], float],
    *,
    settled: int | None = None,
    worthwhile: float,
) -> TrialRecord:
    """Return the trial to recommend.

    The simplest of those within 2 % of the best wins, except that the baseline comes first, and
    then the trial that the search has settled on.

    Args:
        candidates: Feasible trials that may be recommended, at least one.
        score: Score of a trial.
        settled: Number of the trial that the search has settled on, if any.
        worthwhile: Gains below this share count as none.
    """
    least = (1 - worthwhile) * max(map(score, candidates))
    near = [record for record in candidates if score(record) >= least]
    return min(
        near,
        key=lambda record: (
            record.number != 0,
            record.number != settled,
            simplicity(record.config),
            record.number,
        ),
    )
