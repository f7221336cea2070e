"""What runs prove: run-to-run variation, the error budget of claims, and how far two configurations lie apart.

Comes in: the runs of a search. Goes out: intervals, proofs, shrunk gains, which trial to stop
early, and the simplest of the best. Pure functions over records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, hypot, inf, log, log1p, sqrt
from statistics import fmean, median

import numpy as np

from autotune.config.environment import DeviceKind
from autotune.config.training_config import AMP_DTYPES, TrainingConfig
from autotune.messages.trials import stopped_early
from autotune.models.statistics import BATCH_MEANS, Floats, mean_rate, t_95, t_quantile, window_rate
from autotune.note import Note
from autotune.policy import POLICY, Proof, Spread, Stopping
from autotune.records.measurement import Block, Interval, Measurement
from autotune.records.result import MOST_SD, RunSpread
from autotune.records.trial import TrialRecord

# The spread between runs of the same settings: what is assumed, how runs teach it, and how it
# widens an interval.
#
# Comes in: runs that share their settings, each with what its own window tells of its error. Goes
# out: a RunSpread, and intervals. All on the logarithm of the rate, since neighbours slow a machine
# down by a factor. Pure.
#
# Sources: the scaled inverse chi-squared prior of a variance, Gelman et al., "Bayesian Data
# Analysis", 3rd ed., section 2.6; degrees of freedom of a sum of variances, Satterthwaite 1946, "An
# approximate distribution of estimates of variance components".


_LEAST_SD = 0.002
"""No machine is known to be steadier: our own convention, which keeps intervals from closing."""
_MOST_WINDOW_SD = 0.1
"""Of the logarithm of a run's rate by its own window: where a loader pauses at regular times,
batches differ far more than windows do. Source: benchmarks/surfaces, `bursty`: batch means say
26 %, repeats differ by 7 %."""
_MOST_SECOND_SD = 0.5
"""The same where a window's length is planned: a window must hold a pause of its loader. Our own
convention."""
_WINDOW_DEGREES_OF_FREEDOM = BATCH_MEANS - 1


@dataclass(frozen=True, slots=True)
class Run:
    """What a run tells of its settings' rate."""

    log_rate: float
    variance: float
    """Of the logarithm, by the run's own window."""
    is_held_by_device: bool = False
    number: int = 0
    """Of its trial; 0 is the baseline."""
    at_s: float = 0.0
    """Seconds of the search at which it ended."""
    is_disturbed: bool = False
    """Other programs took part of the machine meanwhile."""


@dataclass(frozen=True, slots=True)
class SpreadEvidence:
    """A variance between runs, as some runs have shown it."""

    variance: float
    degrees_of_freedom: float
    is_of_device: bool = False
    """The device held these runs."""


def assumed_spread(device_kind: DeviceKind, prior: Spread = POLICY.spread) -> RunSpread:
    """Return the spread that is assumed before anything was learned, of both kinds of runs where there are two."""
    degrees = prior.degrees_of_freedom
    if device_kind == "cpu":
        return RunSpread(sd=prior.cpu_sd, degrees_of_freedom=degrees)
    device = RunSpread(sd=prior.device_sd, degrees_of_freedom=degrees)
    return RunSpread(sd=prior.host_sd, degrees_of_freedom=degrees, device=device)


def run_of(
    measurement: Measurement,
    *,
    number: int = 0,
    at_s: float = 0.0,
    most_sd: float = _MOST_WINDOW_SD,
) -> Run:
    """Return a measurement as a run. A window of a single block says nothing of its own error: the most is assumed."""
    rate = window_rate(measurement.window)
    load = measurement.host_load
    half = (rate.value - rate.low) / rate.value if rate.low > 0 else inf
    # as many batches as batch means were made of: a short window's interval is wide by Student's t
    # alone
    blocks = len(measurement.window.blocks)
    batches = blocks if blocks < 2 * BATCH_MEANS else BATCH_MEANS
    variance = min(_variance(half, batches - 1), most_sd**2) if batches > 1 else most_sd**2
    return Run(
        log(measurement.samples_per_s),
        variance,
        measurement.window.is_held_by_device,
        number=number,
        at_s=at_s,
        is_disturbed=load is not None and load.is_loaded,
    )


def evidence_of(runs: Sequence[Run]) -> SpreadEvidence | None:
    """Return the variance between runs of the same settings, less what windows explain; None of a single run.

    Runs that other programs disturbed are left out: they say nothing of the machine by itself.
    """
    slow = outliers_of([run.log_rate for run in runs])
    runs = [run for place, run in enumerate(runs) if place not in slow and not run.is_disturbed]
    if len(runs) < 2 or len({run.is_held_by_device for run in runs}) > 1:
        return None
    mean = fmean(run.log_rate for run in runs)
    variance = sum((run.log_rate - mean) ** 2 for run in runs) / (len(runs) - 1)
    between = max(variance - fmean(run.variance for run in runs), 0.0)
    return SpreadEvidence(
        between, len(runs) - 1, is_of_device=all(run.is_held_by_device for run in runs)
    )


def variance_of_a_second(measurement: Measurement) -> float:
    """Return the variance of the logarithm of a rate that was measured for one second, by the window alone."""
    own = run_of(measurement, most_sd=inf).variance
    return min(own, _MOST_SECOND_SD**2) * sum(block.seconds for block in measurement.blocks)


def learn_spread(prior: RunSpread, evidence: Iterable[SpreadEvidence | None]) -> RunSpread:
    """Return the spread once runs were repeated: variances of each kind, pooled by their degrees of freedom."""
    known = [piece for piece in evidence if piece is not None]
    device = prior.device
    if device is None:
        return _pooled(prior, known)
    host = _pooled(prior, [piece for piece in known if not piece.is_of_device])
    return host.model_copy(
        update={"device": _pooled(device, [piece for piece in known if piece.is_of_device])}
    )


def _pooled(prior: RunSpread, evidence: Sequence[SpreadEvidence]) -> RunSpread:
    if not evidence:
        return prior
    degrees = prior.degrees_of_freedom + sum(piece.degrees_of_freedom for piece in evidence)
    squares = prior.degrees_of_freedom * prior.sd**2 + sum(
        one.degrees_of_freedom * one.variance for one in evidence
    )
    sd = min(max(sqrt(squares / degrees), _LEAST_SD), MOST_SD)
    return RunSpread(sd=sd, degrees_of_freedom=degrees, source="workload")


def spread_of_repeats(prior: RunSpread, groups: Iterable[Sequence[Measurement]]) -> RunSpread:
    """What is known once groups of runs, each of the same settings, were measured."""
    return learn_spread(
        prior, (evidence_of(list(map(run_of, group))) for group in groups if len(group) > 1)
    )


def rate_of_runs(runs: Sequence[Measurement], spread: RunSpread) -> Interval:
    """The geometric mean of runs' rates, with the 95 % interval in which another long run of the settings lies now."""
    if len(runs) == 1:
        return _rate_of_one(runs[0], spread)
    mean, variance = _mean_of(runs)
    spread = spread.of(run.window.is_held_by_device for run in runs)
    half = _half_width(spread, 1 + 1 / len(runs), variance)
    return Interval(value=exp(mean), low=exp(mean - half), high=exp(mean + half))


def ratio_of_runs(
    ours: Sequence[Measurement], theirs: Sequence[Measurement], spread: RunSpread
) -> Interval:
    """The ratio of two mean rates that were not measured in turns, with its 95 % interval."""
    (our_mean, our_variance), (their_mean, their_variance) = map(_mean_of, (ours, theirs))
    spread = spread.of(run.window.is_held_by_device for run in (*ours, *theirs))
    half = _half_width(spread, 1 / len(ours) + 1 / len(theirs), our_variance + their_variance)
    value = our_mean - their_mean
    return Interval(value=exp(value), low=exp(value - half), high=exp(value + half))


def with_run_spread(rate: Interval, spread: RunSpread) -> Interval:
    """A window's rate with the 95 % interval in which another long run of the same settings lies by now.

    Blocks of one window share what a process happens to get: its memory's layout, the clock, the
    neighbours of the minute. Runs of the same settings therefore spread more than batch means can
    tell. Two runs do so twice. On an accelerator the spread must be that of the run's kind, see
    `RunSpread.of`.
    """
    down, up = (
        distance if distance == inf else _half_width(spread, 2, _variance(distance))
        for distance in (_log_distance(rate.value, rate.low), _log_distance(rate.high, rate.value))
    )
    return Interval(value=rate.value, low=rate.value * exp(-down), high=rate.value * exp(up))


def _mean_of(runs: Sequence[Measurement]) -> tuple[float, float]:
    """The mean logarithm of runs' rates, and its variance by the windows."""
    known = [run_of(run) for run in runs]
    return fmean(run.log_rate for run in known), sum(run.variance for run in known) / len(
        known
    ) ** 2


def with_interval(measurement: Measurement, spread: RunSpread) -> Measurement:
    """The measurement with the interval of its rate by what is known of the spread by now."""
    rate = _rate_of_one(measurement, spread)
    return measurement.model_copy(update={"samples_per_s_ci": (rate.low, rate.high)})


def _rate_of_one(measurement: Measurement, spread: RunSpread) -> Interval:
    rate = with_run_spread(
        window_rate(measurement.window), spread.of([measurement.window.is_held_by_device])
    )
    scale = measurement.samples_per_s / rate.value if rate.value > 0 else 0.0
    return Interval(
        value=measurement.samples_per_s,
        low=scale * rate.low,
        high=scale * rate.high if scale > 0 else inf,
    )


def _log_distance(high: float, low: float) -> float:
    return log(high / low) if low > 0 and high < inf else inf


def _variance(distance: float, degrees_of_freedom: int = _WINDOW_DEGREES_OF_FREEDOM) -> float:
    """The variance of a logarithm whose 95 % interval, by batch means, ends at a distance."""
    return (distance / t_95(degrees_of_freedom)) ** 2


def _half_width(spread: RunSpread, runs: float, own: float) -> float:
    """Half of the 95 % interval of a logarithm: so many variances between runs, and a variance that windows tell."""
    between = runs * spread.sd**2
    degrees = (between + own) ** 2 / (
        between**2 / spread.degrees_of_freedom + own**2 / _WINDOW_DEGREES_OF_FREEDOM
    )
    return t_95(degrees) * sqrt(between + own)


# Runs of one configuration that other processes slowed down.
#
# Comes in: the runs of a configuration. Goes out: which of them say little about it. Pure.


_MOST_SDS = 4.0
"""Robust standard deviations below the other runs: our own convention; of normal runs one in 30,000
lies there."""
_LEAST_FACTOR = 1.8
"""Times that the others must be as fast at the least. Where runs differ by 20 %, that is three
standard deviations: with less, runs that were merely unlucky would be left out, and what is left
would look faster than it is (benchmarks/decisions.py)."""
_AGREEING_FACTOR = 1.3
"""Within which two of the others agree: our own convention; runs of the same settings differ by 1
to 20 %."""
_SD_OF_MAD = 1.4826
"""Standard deviation of a normal law over its median absolute deviation."""


def outliers_of(log_rates: Sequence[float]) -> frozenset[int]:
    """Return the places of the runs that other processes disturbed, to judge by their rates alone.

    Such a rate lies more than four robust standard deviations and a factor of 1.8 below the other
    runs of its configuration, of which at least two agree within a factor of 1.3.

    Args:
        log_rates: Of all runs of one configuration.
    """
    slow = set[int]()
    for place, own in enumerate(log_rates):
        others = sorted([*log_rates[:place], *log_rates[place + 1 :]])
        if not any(upper - lower <= log(_AGREEING_FACTOR) for lower, upper in pairwise(others)):
            continue
        middle = median(others)
        sd = _SD_OF_MAD * median(abs(other - middle) for other in others)
        if middle - own > max(_MOST_SDS * sd, log(_LEAST_FACTOR)):
            slow.add(place)
    return frozenset(slow)


# Shrink a measured gain as far as luck goes, since most changes bring little. Pure.
#
# The prior of a gain is a mixture of normal distributions around none, from a narrow one to a very
# wide one: small gains that the noise could make are shrunk to almost nothing, large ones hardly at
# all. Beliefs under such a prior need no further correction for the choice of the best of several,
# nor for having looked at them several times.
#
# Sources: spike and slab, George and McCulloch 1993, "Variable selection via Gibbs sampling";
# shrinkage instead of a correction for many comparisons, Gelman, Hill and Yajima 2012; mixtures
# fitted to many experiments of the same kind (adaptive shrinkage), Stephens 2017, "False discovery
# rates: a new deal".


def believe(measured: Contrast, proof: Proof = POLICY.proof) -> Contrast:
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


def chance_worthwhile(measured: Contrast, proof: Proof = POLICY.proof) -> float:
    """Return how likely a gain is to be worth a change of settings."""
    return 1 - believe(measured, proof).chance_below(log1p(proof.worthwhile))


# The error that a search may spend on saying "faster", and what it has bought: the proofs. Pure.
#
# A search looks at its figures after every run, and chooses the best of many configurations. Both
# would make luck look like a gain. So every look has an error of its own, and all of them together
# stay within what is allowed, whatever the data say and however long the search goes on (Bonferroni
# over configurations and looks):
#
# - while it searches: the j-th configuration tried has SEARCH_ERROR / (j (j + 1)), and its n-th
#   look 2^-n of that;
# - once it has settled on a leader: only runs made since then count, which the choice does not
#   depend on. Looks are few, and spend more the later they come (Lan and DeMets 1983, Kim and
#   DeMets 1987). Where a leader falls later on, the next one has a quarter of what was left.
#
# A proof is never taken back. Both configurations must have run twice, the baseline once after the
# other: a stretch in which a neighbour slowed the machine down fakes any gain.


@dataclass(slots=True)
class Ledger:
    """Runs as they come, looks at them, and what these have proven."""

    spread: RunSpread
    """Between runs of the same settings, before these."""
    proof: Proof = POLICY.proof
    runs: list[Run] = field(default_factory=list)
    proven: dict[int, float] = field(default_factory=dict)
    """By configuration, the logarithm of the gain over the baseline (number 0) that is proven, the
    largest so far."""
    _order: list[int] = field(default_factory=list)
    """Configurations in the order in which they were tried."""
    _looks: Counter[int] = field(default_factory=Counter)
    _leader: int | None = None
    _since: int = 0
    """Place of the first run that counts for the leader."""
    _left: float = field(init=False)
    _budget: float = 0.0
    """Error of the leader."""
    _used: float = 0.0
    """Share of the settling that was over at the last look."""
    _evidence: Evidence | None = None

    def __post_init__(self) -> None:
        """Begin with all of the error to spend."""
        self._left = self.proof.settle_error

    @classmethod
    def going_on(
        cls, spread: RunSpread, records: Iterable[TrialRecord], proof: Proof = POLICY.proof
    ) -> Ledger:
        """Return the ledger of a search that goes on: its runs are looked at again in the order in which they ended.

        What an interrupted search spent on settling is not known. One that had repeated a trial
        counts as having settled on it once.
        """
        ledger = cls(spread, proof)
        known = list(records)
        for run in evidence_of_runs(known, spread).runs:
            ledger.add(run)
        if any(record.repeats for record in known if record.number != 0):
            ledger._left *= 1 - proof.first_share
        return ledger

    @property
    def evidence(self) -> Evidence:
        """All runs so far."""
        if self._evidence is None or len(self._evidence.runs) < len(self.runs):
            self._evidence = Evidence(tuple(self.runs), self.spread)
        return self._evidence

    def add(self, run: Run) -> None:
        """Take a run, and look at its configuration; after a run of the baseline, at the leader."""
        self.runs.append(run)
        number = self._leader if run.number == 0 else run.number
        if number is None:
            return
        if number not in self._order:
            self._order.append(number)
        self._look_at(number)

    def settle(self, number: int) -> None:
        """Count only what comes from here on for a leader; it can't be chosen by that."""
        self._leader = number
        self._since = len(self.runs)
        self._used = 0.0
        self._budget = self.proof.first_share * self._left
        self._left *= 1 - self.proof.first_share

    @property
    def pairs(self) -> int:
        """Runs of the leader and of the baseline, in pairs, since it was settled on."""
        late = Counter(run.number for run in self.runs[self._since :])
        return 0 if self._leader is None else min(late[self._leader], late[0])

    def look(self, used: float, *, is_last: bool = False) -> None:
        """Look at the leader, if enough pairs have come since the last look.

        Args:
            used: Share of the time for settling that is over.
            is_last: No further look follows.
        """
        if (
            self._leader is None
            or self.pairs == 0
            or not (is_last or self.pairs in self.proof.analyses_after)
        ):
            return
        used = 1.0 if is_last else min(used, 1.0)
        error = self._budget * (used**2 - self._used**2)
        self._used = max(used, self._used)
        self._prove(self._leader, error, since=self._since)

    def _look_at(self, number: int) -> None:
        if not self._may_prove(number):
            return
        self._looks[number] += 1
        place = 1 + self._order.index(number)
        self._prove(
            number, self.proof.search_error / (place * (place + 1)) * 0.5 ** self._looks[number]
        )

    def _may_prove(self, number: int) -> bool:
        """Return True where both ran twice, and the baseline once after the configuration: a slow stretch ends."""
        first = next(
            (place for place, run in enumerate(self.runs) if run.number == number), len(self.runs)
        )
        runs_after = any(run.number == 0 for run in self.runs[first:])
        return (
            runs_after
            and min(self.evidence.count(number), self.evidence.count(0)) >= self.proof.fewest_runs
        )

    def _prove(self, number: int, error: float, *, since: int = 0) -> None:
        contrast = (
            self.evidence.contrast(number, 0, since=since) if self._may_prove(number) else None
        )
        if contrast is None or error < 1e-9:
            return
        if contrast.chance_below(0.0) < error:
            self.proven[number] = max(self.proven.get(number, 0.0), contrast.quantile(error))


# The runs of a search as evidence: how far two configurations lie apart, with the run-to-run
# variation integrated out.
#
# Every run counts, whenever it was made and whatever for: trials, repeats and the baseline in
# between. The model of the logarithm of a run's rate:
#
#     log rate = the configuration's own + run-to-run variation + the window's error
#
# The variation is not known: it is integrated over a grid under a scaled inverse chi-squared prior,
# so that a contrast is a mixture of normal distributions with heavy tails while few repeats have
# shown how far runs differ. Configurations that the device holds hardly differ from run to run;
# they are compared among themselves, and two of unlike kinds by their own runs alone. A slow drift
# of the machine is not modelled: noise decorrelates within seconds (benchmarks/warm_process.py),
# and interleaved runs share what lasts for minutes, which makes the intervals a little too wide.
#
# Sources: restricted likelihood of variance components, Patterson and Thompson 1971; the prior of a
# variance, Gelman et al., "Bayesian Data Analysis", 3rd ed., section 2.6; runs as the unit of
# repetition, Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time". Pure.


_LEAST_SD_FACTOR = 1 / 20
_MOST_SD = 6.0
_MOST_ANYWHERE_SD = 0.5
_POINTS = 31
"""Run-to-run variations that are considered: from a share of what is expected to a multiple of it,
or to a half where that is more, since a device that others slow down differs by more than it ever
does alone. Our own conventions."""
_DISTURBED_SD = 1.0
"""Standard deviation that is added to a run that other programs disturbed: neighbours slow a
machine down by factors. Our own convention."""
_LEAST_VARIANCE = 1e-12  # keeps a division finite


@dataclass(frozen=True, slots=True)
class Contrast:
    """The logarithm of one configuration's rate over another's: a mixture of normal distributions."""

    weights: Floats
    """Of the components, shape (components,); their sum is 1."""
    means: Floats
    """(components,)."""
    sds: Floats
    """(components,)."""

    @property
    def value(self) -> float:
        """The mean."""
        return float(self.weights @ self.means)

    @property
    def sd(self) -> float:
        """The standard deviation."""
        return sqrt(float(self.weights @ (self.sds**2 + (self.means - self.value) ** 2)))

    def chance_below(self, bound: float) -> float:
        """Return the probability that it lies below a bound."""
        from scipy.special import ndtr

        return float(self.weights @ ndtr((bound - self.means) / self.sds))

    def quantile(self, probability: float) -> float:
        """Return what it stays below with a probability."""
        low = float((self.means - 40 * self.sds).min())
        high = float((self.means + 40 * self.sds).max())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.chance_below(middle) < probability else (low, middle)
        return (low + high) / 2

    def ratio(self, one_sided_error: float = 0.025) -> Interval:
        """Return the ratio of the two rates: the median, and an interval that errs by so much at either end."""
        value, low, high = (
            exp(self.quantile(part)) for part in (0.5, one_sided_error, 1 - one_sided_error)
        )
        return Interval(value=value, low=low, high=high)


@dataclass(slots=True)
class Evidence:
    """Runs, and what was known of their variation before.

    Args:
        runs: In the order in which they ended.
        spread: Between runs of the same settings, before these runs.
    """

    runs: Sequence[Run]
    spread: RunSpread
    _steady: frozenset[int] = field(init=False)
    """Configurations that the device holds in all of their runs."""
    _runs_of: dict[int, list[Run]] = field(init=False)
    _variations: dict[tuple[frozenset[int], RunSpread], tuple[Floats, Floats]] = field(
        default_factory=dict
    )
    """By the configurations whose runs teach it, and what was known before: run-to-run variations
    and their weights."""

    def __post_init__(self) -> None:
        """Sort the runs by configuration, and configurations by who holds them."""
        self.runs = _marked(self.runs)
        self._runs_of = _sorted(self.runs)
        by_host = {run.number for run in self.runs if not run.is_held_by_device}
        self._steady = frozenset(self._runs_of) - by_host

    def count(self, number: int) -> int:
        """Return how many runs of a configuration there are."""
        return len(self._runs_of.get(number, ()))

    def log_rate(self, number: int) -> float:
        """Return the mean logarithm of a configuration's rate, by the runs that nothing disturbed if there are some."""
        runs = self._runs_of[number]
        return fmean(run.log_rate for run in [run for run in runs if not run.is_disturbed] or runs)

    def contrast(self, number: int, other: int, *, since: int = 0) -> Contrast | None:
        """Return how far one configuration's rate lies above another's; None where one of them has no run.

        Args:
            number: The configuration.
            other: What it is compared with.
            since: Only runs from this place on count for the two; all of them teach the variation.
        """
        late = _sorted(self.runs[since:]) if since else self._runs_of
        if number not in late or other not in late:
            return None
        sds, weights = self._variation(number, other)
        (mean, variance), (other_mean, other_variance) = (
            _posterior_mean(late[number], sds),
            _posterior_mean(late[other], sds),
        )
        return Contrast(
            weights, mean - other_mean, np.sqrt(variance + other_variance + _LEAST_VARIANCE)
        )

    def _variation(self, number: int, other: int) -> tuple[Floats, Floats]:
        """The run-to-run variations that are possible where two configurations are compared, and their weights."""
        is_alike = (number in self._steady) == (other in self._steady)
        # A configuration that ran once says nothing of the variation: its own rate takes up all of
        # its run.
        known = frozenset(
            one
            for one, runs in self._runs_of.items()
            if len(runs) > 1
            and (
                one in {number, other}
                or (is_alike and (one in self._steady) == (number in self._steady))
            )
        )
        spread = self.spread.of([one in self._steady for one in (number, other)])
        if (known, spread) not in self._variations:
            sds = np.geomspace(
                _LEAST_SD_FACTOR * spread.sd, max(_MOST_SD * spread.sd, _MOST_ANYWHERE_SD), _POINTS
            )
            times = sds / spread.sd
            log_weights = -spread.degrees_of_freedom * (np.log(times) + 0.5 / times**2)
            for one in known:
                log_weights += _log_likelihood(self._runs_of[one], sds)
            weights = np.exp(log_weights - log_weights.max())
            self._variations[known, spread] = sds, weights / weights.sum()
        return self._variations[known, spread]


def evidence_of_runs(records: Iterable[TrialRecord], spread: RunSpread | None = None) -> Evidence:
    """Return the evidence of all runs that ended well, by the time at which they ended.

    Args:
        records: The trials, with their repeats.
        spread: Known before; None: what is assumed of a CPU.
    """
    runs = [
        run_of(result.measurement, number=record.number, at_s=result.at_s)
        for record in records
        for result in record.results
        if result.measurement is not None and result.outcome == "ok"
    ]
    return Evidence(
        sorted(runs, key=lambda run: run.at_s), assumed_spread("cpu") if spread is None else spread
    )


def _sorted(runs: Iterable[Run]) -> dict[int, list[Run]]:
    by_number: dict[int, list[Run]] = {}
    for run in runs:
        by_number.setdefault(run.number, []).append(run)
    return by_number


def _marked(runs: Sequence[Run]) -> list[Run]:
    """All runs, those marked whose rates show that other programs disturbed them."""
    slow = set[int]()
    for number in {run.number for run in runs}:
        places = [place for place, run in enumerate(runs) if run.number == number]
        slow.update(places[one] for one in outliers_of([runs[place].log_rate for place in places]))
    return [
        replace(run, is_disturbed=True) if place in slow else run for place, run in enumerate(runs)
    ]


def _precisions(runs: Sequence[Run], sds: Floats) -> Floats:
    """One over the variance of each run's logarithm, for each variation: (variations, runs)."""
    own = [
        run.variance + (_DISTURBED_SD**2 if run.is_disturbed else 0.0) + _LEAST_VARIANCE
        for run in runs
    ]
    precisions: Floats = np.reciprocal(sds[:, None] ** 2 + np.array(own))
    return precisions


def _posterior_mean(runs: Sequence[Run], sds: Floats) -> tuple[Floats, Floats]:
    """A configuration's mean logarithm, and the variance of that, for each variation."""
    precisions = _precisions(runs, sds)
    total = precisions.sum(axis=1)
    return precisions @ np.array([run.log_rate for run in runs]) / total, 1 / total


def _log_likelihood(runs: Sequence[Run], sds: Floats) -> Floats:
    """Of each variation by the runs of a configuration, whose own rate is integrated out; 0 of a single run."""
    precisions = _precisions(runs, sds)
    means, variances = _posterior_mean(runs, sds)
    left = np.array([run.log_rate for run in runs]) - means[:, None]
    likelihood: Floats = (
        np.log(precisions).sum(axis=1) + np.log(variances) - (precisions * left**2).sum(axis=1)
    )
    return 0.5 * likelihood


# Whether a trial under way can be stopped, since its rate can't come near the best so far. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningThreshold:
    """A pruning threshold: the rate that a trial has to come near to go on."""

    number: int
    """The trial that sets it."""
    low_samples_per_s: float
    """What is believed of that trial's rate, less what two runs of the same settings may differ by."""


def luck_of(best: RunSpread, running: RunSpread, stopping: Stopping = POLICY.stopping) -> float:
    """Return what the logarithms of two rates may differ by though the settings are the same.

    Hosts of accelerators differ more than CPUs do, so that there it counts how little is known of
    the spread.

    Args:
        best: The spread of runs of the kind that the best trial is of.
        running: That of the trial under way, the host's.
        stopping: The numbers of the search.
    """
    lucky_sds = (
        stopping.lucky_sds
        if running.device is None
        else t_quantile(stopping.not_lucky, running.degrees_of_freedom)
    )
    return lucky_sds * hypot(best.sd, running.sd)


def behind_threshold(
    blocks: Sequence[Block], bar: PruningThreshold, stopping: Stopping = POLICY.stopping
) -> Note | None:
    """Return why a trial can be stopped; None while it may still come near the threshold.

    Both corrections of the final rate, for restarts and for a queue that was filled before the
    window, only lower it. So an upper end below the threshold stays below it. Blocks of the warm-up
    count only where they are far below it: they have no interval, but prefetched batches made them
    faster, if anything.

    Args:
        blocks: Those so far, of the warm-up as well.
        bar: The threshold.
        stopping: The numbers of the search.
    """
    in_window = [block for block in blocks if not block.is_warm_up]
    if len(in_window) < stopping.fewest_blocks:
        return _stopped(blocks, 0.0, bar) if _is_hopeless(blocks, bar, stopping) else None
    rate, half_width = mean_rate(in_window)
    if (1 + stopping.busy_margin) * (rate + half_width) >= bar.low_samples_per_s:
        return None
    return _stopped(in_window, half_width, bar)


def _is_hopeless(blocks: Sequence[Block], bar: PruningThreshold, stopping: Stopping) -> bool:
    """Return whether blocks are together below half of the threshold, and not for a single pause.

    Each came, or was made, at less than the threshold: a pause leaves the others as fast as they
    are.
    """
    if (
        len(blocks) < stopping.hopeless_blocks
        or sum(block.seconds for block in blocks) < stopping.hopeless_s
    ):
        return False
    slowest = [
        min(block.samples, block.samples if block.made is None else block.made) for block in blocks
    ]
    is_alike = all(
        samples < bar.low_samples_per_s * block.seconds
        for samples, block in zip(slowest, blocks, strict=True)
    )
    return is_alike and mean_rate(blocks)[0] < stopping.hopeless * bar.low_samples_per_s


def _stopped(blocks: Sequence[Block], half_width: float, bar: PruningThreshold) -> Note:
    return stopped_early(mean_rate(blocks)[0], half_width, bar.number, bar.low_samples_per_s)


# Which configuration to recommend: the simplest of the best, and a larger batch only for a gain.
# Pure.


_FIRST = "compile"
_SWITCHES = sorted(
    [
        (name, field.default)
        for name, field in reversed(TrainingConfig.model_fields.items())
        if isinstance(field.default, bool)
    ],
    key=lambda switch: switch[0] != _FIRST,
)
"""With the value that each has where nothing is set; compilation counts most, then the last of a
TrainingConfig's."""


def simplicity(config: TrainingConfig) -> tuple[int, ...]:
    """Sort key: fewest devices, fewest workers, smallest batch, plainest precision, then the fewest switches."""
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
    """Return whether a larger batch beats the fastest at the baseline's own beyond noise, and by enough as measured.

    None: undecided, further runs may show it.

    Args:
        over: The larger batch's throughput over that of the fastest at the baseline's own.
        least: The ratio that is enough.
    """
    if over.low > 1 and over.value >= least:
        return True
    return False if over.high < least or over.high <= 1 else None


def break_even_noise_scale(batch: float, larger: float, ratio: float) -> float | None:
    """Return the gradient noise scale above which a larger batch reaches a loss sooner, in samples.

    0: at any noise scale. None: at none, since the larger batch is not faster.

    Source: Qiao et al., "Pollux" (OSDI 2021), section 3.1: at a noise scale S (McCandlish et al.
    2018, arXiv 1812.06162), a sample in a batch of M teaches (S + M0) / (S + M) of one in a batch
    of M0.

    Args:
        batch: Samples of an optimizer step.
        larger: Samples of an optimizer step with the larger batch.
        ratio: The larger batch's throughput over the other's, in samples.
    """
    return max(0.0, (larger - ratio * batch) / (ratio - 1)) if ratio > 1 else None


def choose(
    candidates: Sequence[TrialRecord],
    gains: Mapping[int, float],
    *,
    settled: int | None = None,
    worthwhile: float = POLICY.proof.worthwhile,
) -> TrialRecord:
    """Return the trial to recommend, from feasible ones (the baseline among them where it is feasible), at least one.

    Of those within 2 % of the best the simplest is taken; where the baseline is one of them, it
    stays, and else what was settled on does.

    Args:
        candidates: All that may be recommended.
        gains: By number, the logarithm of what each is believed to reach over any one of them, less
            what an idle device costs.
        settled: Number of the trial that the race has settled on, if any.
        worthwhile: A smaller gain counts as none, as a share.
    """
    best = max(gains[record.number] for record in candidates)
    near = [record for record in candidates if gains[record.number] >= best + log1p(-worthwhile)]
    return min(
        near,
        key=lambda record: (
            record.number != 0,
            record.number != settled,
            simplicity(record.config),
            record.number,
        ),
    )


def simplest_of_the_best(
    records: Sequence[TrialRecord],
    score: Callable[[TrialRecord], float],
    *,
    worthwhile: float = POLICY.proof.worthwhile,
) -> TrialRecord:
    """Of feasible trials, at least one: the one that would be recommended of them were their scores the truth."""
    least = (1 - worthwhile) * max(map(score, records))
    return min(
        (record for record in records if score(record) >= least),
        key=lambda record: (record.number != 0, simplicity(record.config), record.number),
    )
