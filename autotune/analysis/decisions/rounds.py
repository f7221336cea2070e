"""Rates of configurations that were measured in turns, compared with one another over all rounds at once.

Comes in: each entrant's runs, round by round, and what is known of the spread between runs. Goes out: a RoundsFit,
which tells the ratio of any two with its standard error. Pure.

The logarithm of a rate is taken to be the round's plus the entrant's plus noise: what a round shares, such as a slow
minute, cancels, and the noise is pooled over all entrants of a kind and over all rounds. What was known of it before
counts as so many degrees of freedom more. Entrants that the device holds hardly differ from run to run; they are fitted
apart from those that the host holds, and two of unlike kinds by themselves.

Sources: two-way layout without interaction, Scheffe, "The Analysis of Variance", section 4.2; the pooled residual with
a prior, Gelman et al., "Bayesian Data Analysis", 3rd ed., section 14.2; runs as the unit of repetition, Kalibera and
Jones 2013, "Rigorous benchmarking in reasonable time".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean

import numpy as np

from autotune.analysis.decisions.run_spread import run_of
from autotune.analysis.statistics import Floats
from autotune.records.recommendation import Confirmation
from autotune.records.run_spread import RunSpread

__all__ = ["Difference", "RoundsFit", "fit_rounds"]

_FEWEST_FREE = 2
"""Degrees of freedom of rounds that carry an interval by themselves: three rounds of two, our own convention."""
_ESTIMABLE = 1e-6  # of a contrast that rounds tell, what a projection may leave: rounding


@dataclass(frozen=True, slots=True)
class Difference:
    """Of the logarithms of two entrants' rates."""

    value: float
    standard_error: float
    degrees_of_freedom: float
    is_carried: bool
    """Runs tell the noise, here or before: it is not what is assumed of such a device alone."""
    unit_error: float
    """The standard error that a noise of 1 would make: sqrt(2 / rounds) of two that ran in the same rounds."""
    seen_error: float
    """The standard error by what runs have shown alone, without what is assumed of the device."""
    seen_degrees: float
    """Degrees of freedom that it is known by; 0 where runs have shown nothing."""


@dataclass(frozen=True, slots=True)
class RoundsFit:
    """What rounds tell of their entrants."""

    entrants: Sequence[Confirmation]
    spread: RunSpread
    prior: RunSpread
    _layouts: dict[tuple[int, ...], _Layout] = field(default_factory=dict)
    """Those that were fitted already, by their entrants' numbers."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The entrants, in order."""
        return tuple(entrant.number for entrant in self.entrants)

    def difference(self, number: int, other: int) -> Difference | None:
        """Of an entrant over another; None where no round, and no chain of rounds, holds both.

        Fitted are all entrants of the kind that both are of, or the two alone where they are of unlike kinds.
        """
        steady = {entrant.number for entrant in self.entrants if _is_held_by_device(entrant)}
        if (number in steady) != (other in steady):
            alike = [entrant for entrant in self.entrants if entrant.number in {number, other}]
        else:
            alike = [entrant for entrant in self.entrants if (entrant.number in steady) == (number in steady)]
        if not any(entrant.runs for entrant in alike):
            return None
        numbers = tuple(entrant.number for entrant in alike)
        if numbers not in self._layouts:
            self._layouts[numbers] = _fit(alike, self.spread, self.prior)
        return self._layouts[numbers].difference(number, other)


def fit_rounds(entrants: Sequence[Confirmation], spread: RunSpread, prior: RunSpread | None = None) -> RoundsFit:
    """Fit rounds and entrants.

    Args:
        entrants: Each with its runs, round by round.
        spread: Between runs, by all that is known of it.
        prior: What the search began with; None: `spread` itself, of which nothing was seen in this search.
    """
    return RoundsFit(entrants, spread, spread if prior is None else prior)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Effects of rounds and entrants, fitted with one noise."""

    numbers: tuple[int, ...]
    """The entrants, in order."""
    log_rates: Floats
    """(rounds + entrants,); of the entrants only differences have a meaning."""
    unscaled: Floats
    """Covariance of these for a noise of 1, (rounds + entrants, rounds + entrants)."""
    estimable: Floats
    """Projection onto what the runs can tell, of the same shape."""
    variance: float
    """Of the logarithm of one run in its round."""
    degrees_of_freedom: float
    is_carried: bool
    """As a Difference has it."""
    seen_variance: float
    """As `variance`, by what runs have shown alone."""
    seen_degrees: float
    """As a Difference has it."""

    def difference(self, number: int, other: int) -> Difference | None:
        contrast = np.zeros(len(self.log_rates))
        rounds = len(self.log_rates) - len(self.numbers)
        contrast[rounds + self.numbers.index(number)] += 1.0
        contrast[rounds + self.numbers.index(other)] -= 1.0
        if np.abs(self.estimable @ contrast - contrast).max() > _ESTIMABLE:
            return None
        unit_variance = float(contrast @ self.unscaled @ contrast)
        return Difference(
            value=float(contrast @ self.log_rates),
            standard_error=sqrt(max(unit_variance * self.variance, 0.0)),
            degrees_of_freedom=self.degrees_of_freedom,
            is_carried=self.is_carried,
            unit_error=sqrt(max(unit_variance, 0.0)),
            seen_error=sqrt(max(unit_variance * self.seen_variance, 0.0)),
            seen_degrees=self.seen_degrees,
        )


def _fit(entrants: Sequence[Confirmation], spread: RunSpread, prior: RunSpread) -> _Layout:
    """Fit entrants with one noise; at least one of them has run."""
    cells = [
        (place, number, run)
        for number, entrant in enumerate(entrants)
        for place, run in enumerate(entrant.rounds)
        if run is not None
    ]
    rounds = max(place for place, _, _ in cells) + 1
    design = np.zeros((len(cells), rounds + len(entrants)))
    for row, (place, number, _) in enumerate(cells):
        design[row, place] = design[row, rounds + number] = 1.0
    runs = [run_of(run) for _, _, run in cells]
    observed = np.array([run.log_rate for run in runs])
    gram = design.T @ design
    unscaled: Floats = np.asarray(np.linalg.pinv(gram, hermitian=True), dtype=np.float64)
    log_rates = unscaled @ (design.T @ observed)
    left = float(((observed - design @ log_rates) ** 2).sum())
    free = len(cells) - int(np.linalg.matrix_rank(design))
    kinds = [run.is_held_by_device for run in runs]
    spread, prior, own = spread.of(kinds), prior.of(kinds), fmean(run.variance for run in runs)
    known, degrees = spread.degrees_of_freedom, spread.degrees_of_freedom + free
    # what is assumed is no sight of runs; what former searches have learned is
    assumed = prior.degrees_of_freedom if prior.source == "assumed" else 0.0
    seen_degrees = known - assumed + free
    seen = known * spread.sd**2 - assumed * prior.sd**2 + (known - assumed) * own + left
    return _Layout(
        numbers=tuple(entrant.number for entrant in entrants),
        log_rates=log_rates,
        unscaled=unscaled,
        estimable=unscaled @ gram,
        variance=(known * (spread.sd**2 + own) + left) / degrees,
        degrees_of_freedom=degrees,
        is_carried=spread.source != "assumed" or free >= _FEWEST_FREE,
        seen_variance=max(seen, 0.0) / seen_degrees if seen_degrees > 0 else 0.0,
        seen_degrees=seen_degrees,
    )


def _is_held_by_device(entrant: Confirmation) -> bool:
    return bool(entrant.runs) and all(run.window.is_held_by_device for run in entrant.runs)
