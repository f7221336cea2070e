"""The runs of a search as evidence: how far two configurations lie apart, with the run-to-run variation integrated out.

Every run counts, whenever it was made and whatever for: trials, repeats and the baseline in between. The model of the
logarithm of a run's rate:

    log rate = slow drift that all runs share + the configuration's own + run-to-run variation + the window's error

The drift is a stationary first-order process. The variation is not known: it is integrated over a grid under a scaled
inverse chi-squared prior, so that a contrast is a mixture of normal distributions with heavy tails while few repeats
have shown how far runs differ. Configurations that the device holds hardly differ from run to run; they are compared
among themselves, and two of unlike kinds by their own runs alone.

Sources: restricted likelihood of variance components, Patterson and Thompson 1971; the prior of a variance, Gelman et
al., "Bayesian Data Analysis", 3rd ed., section 2.6; runs as the unit of repetition, Kalibera and Jones 2013, "Rigorous
benchmarking in reasonable time". Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, sqrt

import numpy as np

from autotune.analysis.decisions.run_spread import Run, assumed_spread, run_of
from autotune.analysis.statistics import Floats
from autotune.records.recommendation import Ratio
from autotune.records.run_spread import RunSpread
from autotune.records.trial import TrialRecord

__all__ = ["Contrast", "Evidence", "evidence_of_runs"]

_GRID = np.geomspace(1 / 20, 6, 25)
"""Run-to-run variations that are considered, as multiples of what is expected: our own convention."""
_DRIFT_SHARE, _DRIFT_S = 0.3, 300.0
"""Share of the variance between two runs that lasts for minutes, and for how long. Source: benchmarks/fidelity.py, as
benchmarks/replay/simulated.py divides it."""
_DISTURBED_SD = 1.0
"""Standard deviation that is added to a run that other programs disturbed: neighbours slow a machine down by factors.
Our own convention."""
_MOST_RUNS = 80
"""The latest runs of other configurations that still teach the variation: our own convention; a search of thousands of
trials must not take longer the more there were."""
_LEAST_VARIANCE = 1e-12  # keeps a division finite
_BISECTIONS = 60


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
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.chance_below(middle) < probability else (low, middle)
        return (low + high) / 2

    def ratio(self, one_sided_error: float = 0.025) -> Ratio:
        """Return the ratio of the two rates: the median, and an interval that errs by so much at either end."""
        value, low, high = (exp(self.quantile(part)) for part in (0.5, one_sided_error, 1 - one_sided_error))
        return Ratio(value=value, low=low, high=high)


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
    _counts: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Count the runs of each configuration, and sort these by who holds them."""
        self._counts = {}
        for run in self.runs:
            self._counts[run.number] = self._counts.get(run.number, 0) + 1
        by_host = {run.number for run in self.runs if not run.is_held_by_device}
        self._steady = frozenset(self._counts) - by_host

    def count(self, number: int) -> int:
        """Return how many runs of a configuration there are."""
        return self._counts.get(number, 0)

    def contrast(self, number: int, other: int, *, since: int = 0) -> Contrast | None:
        """Return how far one configuration's rate lies above another's; None where one of them has no run.

        Args:
            number: The configuration.
            other: What it is compared with.
            since: Only runs from this place on count for the two; all of them teach the variation.
        """
        runs, spread = self._alike(number, other)
        late = [run for run in runs if run.place >= since]
        if not {number, other} <= {run.number for run in late}:
            return None
        weights, means, sds = _fit(runs, spread, number, other)
        if len(late) < len(runs):
            _, means, sds = _fit(late, spread, number, other)
        return Contrast(weights, means, sds)

    def _alike(self, number: int, other: int) -> tuple[list[_Placed], RunSpread]:
        """The runs that two configurations are compared by, and the variation of their kind."""
        is_alike = (number in self._steady) == (other in self._steady)

        def counts(run: Run) -> bool:
            if run.number in {number, other}:
                return True
            # A configuration that ran once says nothing of the others: its own rate takes up all of its run.
            is_repeated = self._counts[run.number] > 1
            return is_alike and is_repeated and (run.number in self._steady) == (number in self._steady)

        placed = [
            _Placed(run.number, run.at_s, run.log_rate, _variance_of(run), place)
            for place, run in enumerate(self.runs)
            if counts(run)
        ]
        own = [run for run in placed if run.number in {number, other}]
        others = [run for run in placed if run.number not in {number, other}]
        kept = sorted([*own, *others[max(0, len(others) - _MOST_RUNS) :]], key=lambda run: run.place)
        spread = self.spread.of([one in self._steady for one in (number, other)])
        return kept, spread


@dataclass(frozen=True, slots=True)
class _Placed:
    number: int
    at_s: float
    log_rate: float
    variance: float
    place: int


def evidence_of_runs(records: Iterable[TrialRecord], spread: RunSpread | None = None) -> Evidence:
    """Return the evidence of all runs that ended well, by the time at which they ended.

    Args:
        records: The trials, with their repeats.
        spread: Known before; None: what is assumed of a CPU.
    """
    runs = [
        run_of(result.measurement, number=record.number, at_s=result.at_s)
        for record in records
        for result in (record.result, *record.repeats)
        if result.measurement is not None
    ]
    return Evidence(sorted(runs, key=lambda run: run.at_s), assumed_spread("cpu") if spread is None else spread)


def _variance_of(run: Run) -> float:
    return run.variance + (_DISTURBED_SD**2 if run.is_disturbed else 0.0)


def _fit(runs: Sequence[_Placed], spread: RunSpread, number: int, other: int) -> tuple[Floats, Floats, Floats]:
    """The posterior weight of each variation, and mean and standard deviation of the contrast under it."""
    numbers = sorted({run.number for run in runs})
    design = np.array([[float(run.number == one) for one in numbers] for run in runs])
    wanted = np.array([float(one == number) - float(one == other) for one in numbers])
    times, rates = np.array([run.at_s for run in runs]), np.array([run.log_rate for run in runs])
    own = np.diag([run.variance for run in runs])
    # The drift of times far apart is independent; that of times close by is shared, and cancels in a contrast.
    lasting = np.exp(-np.abs(times[:, None] - times[None, :]) / _DRIFT_S)
    shape = _DRIFT_SHARE * lasting + (1 - _DRIFT_SHARE) * np.eye(len(runs))
    sds = spread.sd * _GRID
    roots = np.linalg.cholesky(sds[:, None, None] ** 2 * shape + own + _LEAST_VARIANCE * np.eye(len(runs)))
    both = np.linalg.solve(
        roots, np.broadcast_to(np.column_stack([design, rates]), (len(sds), *design.shape[:1], len(numbers) + 1))
    )
    whitened, seen = both[..., :-1], both[..., -1]
    gram = whitened.swapaxes(1, 2) @ whitened
    means = np.linalg.solve(gram, (whitened.swapaxes(1, 2) @ seen[..., None]))[..., 0]
    left = seen - (whitened @ means[..., None])[..., 0]
    variances = wanted @ np.linalg.solve(gram, np.broadcast_to(wanted[:, None], (len(sds), len(numbers), 1)))[..., 0].T
    degrees = spread.degrees_of_freedom
    log_weights = (
        -np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)
        - 0.5 * np.linalg.slogdet(gram)[1]
        - 0.5 * (left**2).sum(axis=1)
        - degrees * np.log(_GRID)
        - 0.5 * degrees / _GRID**2
    )
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum(), means @ wanted, np.sqrt(np.maximum(variances, _LEAST_VARIANCE))
