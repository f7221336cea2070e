"""The runs of a search as evidence: how far two configurations lie apart, with the run-to-run variation integrated out.

Every run counts, whenever it was made and whatever for: trials, repeats and the baseline in between. The model of the
logarithm of a run's rate:

    log rate = the configuration's own + run-to-run variation + the window's error

The variation is not known: it is integrated over a grid under a scaled inverse chi-squared prior, so that a contrast is
a mixture of normal distributions with heavy tails while few repeats have shown how far runs differ. Configurations that
the device holds hardly differ from run to run; they are compared among themselves, and two of unlike kinds by their own
runs alone. A slow drift of the machine is not modelled: noise decorrelates within seconds (benchmarks/warm_process.py),
and interleaved runs share what lasts for minutes, which makes the intervals a little too wide.

Sources: restricted likelihood of variance components, Patterson and Thompson 1971; the prior of a variance, Gelman et
al., "Bayesian Data Analysis", 3rd ed., section 2.6; runs as the unit of repetition, Kalibera and Jones 2013, "Rigorous
benchmarking in reasonable time". Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, sqrt
from statistics import fmean

import numpy as np

from autotune.analysis.decisions.run_spread import Run, assumed_spread, run_of
from autotune.analysis.disturbed_runs import outliers_of
from autotune.analysis.statistics import Floats
from autotune.records.measurement import Interval
from autotune.records.run_spread import RunSpread
from autotune.records.trial import TrialRecord

__all__ = ["Contrast", "Evidence", "evidence_of_runs"]

_LEAST_SD, _MOST_SD, _MOST_ANYWHERE_SD, _POINTS = 1 / 20, 6.0, 0.5, 31
"""Run-to-run variations that are considered: from a share of what is expected to a multiple of it, or to a half where
that is more, since a device that others slow down differs by more than it ever does alone. Our own conventions."""
_DISTURBED_SD = 1.0
"""Standard deviation that is added to a run that other programs disturbed: neighbours slow a machine down by factors.
Our own convention."""
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
        low, high = float((self.means - 40 * self.sds).min()), float((self.means + 40 * self.sds).max())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.chance_below(middle) < probability else (low, middle)
        return (low + high) / 2

    def ratio(self, one_sided_error: float = 0.025) -> Interval:
        """Return the ratio of the two rates: the median, and an interval that errs by so much at either end."""
        value, low, high = (exp(self.quantile(part)) for part in (0.5, one_sided_error, 1 - one_sided_error))
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
    _variations: dict[tuple[frozenset[int], RunSpread], tuple[Floats, Floats]] = field(default_factory=dict)
    """By the configurations whose runs teach it, and what was known before: run-to-run variations and their weights."""

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
        (mean, variance), (other_mean, other_variance) = _mean_of(late[number], sds), _mean_of(late[other], sds)
        return Contrast(weights, mean - other_mean, np.sqrt(variance + other_variance + _LEAST_VARIANCE))

    def _variation(self, number: int, other: int) -> tuple[Floats, Floats]:
        """The run-to-run variations that are possible where two configurations are compared, and their weights."""
        is_alike = (number in self._steady) == (other in self._steady)
        # A configuration that ran once says nothing of the variation: its own rate takes up all of its run.
        known = frozenset(
            one
            for one, runs in self._runs_of.items()
            if len(runs) > 1
            and (one in {number, other} or (is_alike and (one in self._steady) == (number in self._steady)))
        )
        spread = self.spread.of([one in self._steady for one in (number, other)])
        if (known, spread) not in self._variations:
            sds = np.geomspace(_LEAST_SD * spread.sd, max(_MOST_SD * spread.sd, _MOST_ANYWHERE_SD), _POINTS)
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
    return Evidence(sorted(runs, key=lambda run: run.at_s), assumed_spread("cpu") if spread is None else spread)


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
    return [replace(run, is_disturbed=True) if place in slow else run for place, run in enumerate(runs)]


def _precisions(runs: Sequence[Run], sds: Floats) -> Floats:
    """One over the variance of each run's logarithm, for each variation: (variations, runs)."""
    own = [run.variance + (_DISTURBED_SD**2 if run.is_disturbed else 0.0) + _LEAST_VARIANCE for run in runs]
    precisions: Floats = np.reciprocal(sds[:, None] ** 2 + np.array(own))
    return precisions


def _mean_of(runs: Sequence[Run], sds: Floats) -> tuple[Floats, Floats]:
    """A configuration's mean logarithm, and the variance of that, for each variation."""
    precisions = _precisions(runs, sds)
    total = precisions.sum(axis=1)
    return precisions @ np.array([run.log_rate for run in runs]) / total, 1 / total


def _log_likelihood(runs: Sequence[Run], sds: Floats) -> Floats:
    """Of each variation by the runs of a configuration, whose own rate is integrated out; 0 of a single run."""
    precisions, (means, variances) = _precisions(runs, sds), _mean_of(runs, sds)
    left = np.array([run.log_rate for run in runs]) - means[:, None]
    likelihood: Floats = np.log(precisions).sum(axis=1) + np.log(variances) - (precisions * left**2).sum(axis=1)
    return 0.5 * likelihood
