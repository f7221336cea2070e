"""The spread between runs of the same settings: what is assumed, how runs teach it, and how it widens an interval.

Comes in: runs that share their settings, each with what its own window tells of its error. Goes out: a RunSpread, and
intervals. All on the logarithm of the rate, since neighbours slow a machine down by a factor. Pure.

Sources: the scaled inverse chi-squared prior of a variance, Gelman et al., "Bayesian Data Analysis", 3rd ed., section
2.6; degrees of freedom of a sum of variances, Satterthwaite 1946, "An approximate distribution of estimates of variance
components".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import fmean

from autotune.analysis.disturbed_runs import outliers_of
from autotune.analysis.rates import window_rate
from autotune.analysis.statistics import BATCH_MEANS, t_95
from autotune.policy import POLICY, Spread
from autotune.records.measurement import Interval, Measurement
from autotune.records.run_spread import MOST_SD, RunSpread
from autotune.settings.environment import DeviceKind

__all__ = [
    "Run",
    "SpreadEvidence",
    "assumed_spread",
    "evidence_of",
    "learn_spread",
    "rate_of_runs",
    "ratio_of_runs",
    "run_of",
    "spread_of_repeats",
    "variance_of_a_second",
    "with_interval",
    "with_run_spread",
]

_LEAST_SD = 0.002
"""No machine is known to be steadier: our own convention, which keeps intervals from closing."""
_MOST_WINDOW_SD = 0.1
"""Of the logarithm of a run's rate by its own window: where a loader pauses at regular times, batches differ far more
than windows do. Source: benchmarks/surfaces, `bursty`: batch means say 26 %, repeats differ by 7 %."""
_MOST_SECOND_SD = 0.5
"""The same where a window's length is planned: a window must hold a pause of its loader. Our own convention."""
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


def run_of(measurement: Measurement, *, number: int = 0, at_s: float = 0.0, most_sd: float = _MOST_WINDOW_SD) -> Run:
    """Return a measurement as a run. A window of a single block says nothing of its own error: the most is assumed."""
    rate, load = window_rate(measurement.window), measurement.host_load
    half = (rate.value - rate.low) / rate.value if rate.low > 0 else inf
    # as many batches as batch means were made of: a short window's interval is wide by Student's t alone
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
    return SpreadEvidence(between, len(runs) - 1, is_of_device=all(run.is_held_by_device for run in runs))


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
    return host.model_copy(update={"device": _pooled(device, [piece for piece in known if piece.is_of_device])})


def _pooled(prior: RunSpread, evidence: Sequence[SpreadEvidence]) -> RunSpread:
    if not evidence:
        return prior
    degrees = prior.degrees_of_freedom + sum(piece.degrees_of_freedom for piece in evidence)
    squares = prior.degrees_of_freedom * prior.sd**2 + sum(one.degrees_of_freedom * one.variance for one in evidence)
    sd = min(max(sqrt(squares / degrees), _LEAST_SD), MOST_SD)
    return RunSpread(sd=sd, degrees_of_freedom=degrees, source="workload")


def spread_of_repeats(prior: RunSpread, groups: Iterable[Sequence[Measurement]]) -> RunSpread:
    """What is known once groups of runs, each of the same settings, were measured."""
    return learn_spread(prior, (evidence_of(list(map(run_of, group))) for group in groups if len(group) > 1))


def rate_of_runs(runs: Sequence[Measurement], spread: RunSpread) -> Interval:
    """The geometric mean of runs' rates, with the 95 % interval in which another long run of the settings lies now."""
    if len(runs) == 1:
        return _rate_of_one(runs[0], spread)
    mean, variance = _mean_of(runs)
    spread = spread.of(run.window.is_held_by_device for run in runs)
    half = _half_width(spread, 1 + 1 / len(runs), variance)
    return Interval(value=exp(mean), low=exp(mean - half), high=exp(mean + half))


def ratio_of_runs(ours: Sequence[Measurement], theirs: Sequence[Measurement], spread: RunSpread) -> Interval:
    """The ratio of two mean rates that were not measured in turns, with its 95 % interval."""
    (our_mean, our_variance), (their_mean, their_variance) = map(_mean_of, (ours, theirs))
    spread = spread.of(run.window.is_held_by_device for run in (*ours, *theirs))
    half = _half_width(spread, 1 / len(ours) + 1 / len(theirs), our_variance + their_variance)
    value = our_mean - their_mean
    return Interval(value=exp(value), low=exp(value - half), high=exp(value + half))


def with_run_spread(rate: Interval, spread: RunSpread) -> Interval:
    """A window's rate with the 95 % interval in which another long run of the same settings lies by now.

    Blocks of one window share what a process happens to get: its memory's layout, the clock, the neighbours of the
    minute. Runs of the same settings therefore spread more than batch means can tell. Two runs do so twice. On an
    accelerator the spread must be that of the run's kind, see `RunSpread.of`.
    """
    down, up = (
        distance if distance == inf else _half_width(spread, 2, _variance(distance))
        for distance in (_log_distance(rate.value, rate.low), _log_distance(rate.high, rate.value))
    )
    return Interval(value=rate.value, low=rate.value * exp(-down), high=rate.value * exp(up))


def _mean_of(runs: Sequence[Measurement]) -> tuple[float, float]:
    """The mean logarithm of runs' rates, and its variance by the windows."""
    known = [run_of(run) for run in runs]
    return fmean(run.log_rate for run in known), sum(run.variance for run in known) / len(known) ** 2


def with_interval(measurement: Measurement, spread: RunSpread) -> Measurement:
    """The measurement with the interval of its rate by what is known of the spread by now."""
    rate = _rate_of_one(measurement, spread)
    return measurement.model_copy(update={"samples_per_s_ci": (rate.low, rate.high)})


def _rate_of_one(measurement: Measurement, spread: RunSpread) -> Interval:
    rate = with_run_spread(window_rate(measurement.window), spread.of([measurement.window.is_held_by_device]))
    scale = measurement.samples_per_s / rate.value if rate.value > 0 else 0.0
    return Interval(value=measurement.samples_per_s, low=scale * rate.low, high=scale * rate.high if scale > 0 else inf)


def _log_distance(high: float, low: float) -> float:
    return log(high / low) if low > 0 and high < inf else inf


def _variance(distance: float, degrees_of_freedom: int = _WINDOW_DEGREES_OF_FREEDOM) -> float:
    """The variance of a logarithm whose 95 % interval, by batch means, ends at a distance."""
    return (distance / t_95(degrees_of_freedom)) ** 2


def _half_width(spread: RunSpread, runs: float, own: float) -> float:
    """Half of the 95 % interval of a logarithm: so many variances between runs, and a variance that windows tell."""
    between = runs * spread.sd**2
    degrees = (between + own) ** 2 / (between**2 / spread.degrees_of_freedom + own**2 / _WINDOW_DEGREES_OF_FREEDOM)
    return t_95(degrees) * sqrt(between + own)
