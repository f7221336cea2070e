"""What the rate of each point of a surface is taken to be, how sure that is, and what regret that lets anybody see.

Comes in: the rate of each visit, with its point and its sitting. Goes out: a Truth, and the floor of its regrets. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, hypot, inf, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune import TrainingConfig

__all__ = ["Floor", "Seen", "Truth", "fit_truth", "floor_of", "known_truth"]

_TAILS = 4.0
"""Degrees of freedom of Student's t, which the logarithms of the visits' rates are taken to follow: a neighbour slows
some visits down by far more than the others differ by. Source: Lange, Little and Taylor, Robust statistical modeling
using the t distribution, JASA 84 (1989): fixed at 4 where data are few."""
_SITTINGS_SD = 0.15
"""Standard deviation of what a sitting changes for all points, on the log scale; one of few visits is drawn to nothing.
Source: benchmarks/results/fidelity-*.json, three plain runs of a setting: they differ by 29 % over the day in the
median, by 10 % in one sitting; three normal draws differ by 1.69 standard deviations."""
_SETTLED = 1e-7  # change of a logarithm at which the fit has come to its end: our own convention
_MOST_STEPS = 200  # own convention: it takes some thirty
_DRAWS = 4000  # own convention: an error of 0.1 points where regrets scatter by 5
_MIXING_STEPS = 500  # of the EM for the mixture: own convention, the floor no longer moves

_Floats = NDArray[np.float64]


class Seen(NamedTuple):
    """A visit that ended well."""

    config: TrainingConfig
    sitting: int
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The rates of the points that may be used: those that failed or passed the limit in a visit are not among them."""

    rates: Mapping[TrainingConfig, float]
    """Samples per second."""
    errors: Mapping[TrainingConfig, float]
    """Standard error of the logarithm of each: near enough, of the rate as a share of it."""
    spread: float
    """Of a visit's logarithm about its point, by Student's t with 4 degrees of freedom; 0 where the truth is known."""

    @cached_property
    def best(self) -> TrainingConfig:
        """The point with the highest rate."""
        return max(self.rates, key=lambda config: self.rates[config])

    def regret(self, config: TrainingConfig) -> float:
        """What a point's rate lies under the best; 1 where it may not be used."""
        return 1 - self.rates.get(config, 0.0) / self.rates[self.best]

    def regret_error(self, config: TrainingConfig) -> float:
        """Standard error of a point's regret, its own and the best point's; 0 of the best itself."""
        if config == self.best or config not in self.rates:
            return 0.0
        return (1 - self.regret(config)) * hypot(self.errors[config], self.errors[self.best])


class Floor(NamedTuple):
    """The regret that a chooser who always takes the best point would seem to have."""

    median: float
    mean: float
    q95: float


def known_truth(rates: Mapping[TrainingConfig, float]) -> Truth:
    """A truth without an error."""
    return Truth(rates=rates, errors=dict.fromkeys(rates, 0.0), spread=0.0)


def fit_truth(seen: Sequence[Seen]) -> Truth:
    """A two-way model of the logarithms: what belongs to the point, and what belongs to the sitting for all points.

    What a sitting changes is normal about nothing, counted from the one with the most visits; rates are told at the
    mean of all visits' sittings, so that errors are those of comparing points, not of the level that all share. Weights
    and scale are those of Student's t by EM; the scale is shared by all points, and loses a degree of freedom for each
    effect. Errors are by the expected information: a point that was visited once has that of one visit, and all are
    infinite where nothing was visited twice. Source: Lange, Little and Taylor 1989, sections 3 and 5.
    """
    configs = list(dict.fromkeys(one.config for one in seen))
    if not configs:
        return Truth(rates={}, errors={}, spread=0.0)
    design, logs = _design(seen, configs), np.array([log(one.samples_per_s) for one in seen])
    at_the_mean = np.hstack(
        [np.eye(len(configs)), np.tile(design[:, len(configs) :].mean(axis=0), (len(configs), 1))]
    )
    drawn = np.diag([0.0] * len(configs) + [1 / _SITTINGS_SD**2] * (design.shape[1] - len(configs)))
    effects, spread = _robust(design, logs, drawn)
    effects, errors = at_the_mean @ effects, np.full(len(configs), spread)
    if 0 < spread < inf:
        information = (_TAILS + 1) / (_TAILS + 3) * design.T @ design / spread**2 + drawn
        errors = np.sqrt(np.diag(at_the_mean @ np.linalg.inv(information) @ at_the_mean.T))
    return Truth(
        rates={config: exp(effects[place]) for place, config in enumerate(configs)},
        errors={config: float(errors[place]) for place, config in enumerate(configs)},
        spread=spread,
    )


def floor_of(truth: Truth) -> Floor:
    """By simulation: true rates drawn given the fitted ones, fitted rates drawn given those, the truly best chosen.

    True rates are drawn from a mixture over the fitted ones (the nonparametric maximum likelihood, by EM), since fitted
    rates lie further apart than true ones. Source: Laird, Nonparametric maximum likelihood estimation of a mixing
    distribution, JASA 73 (1978).
    """
    fitted = np.log(np.array(list(truth.rates.values())))
    errors = np.array([truth.errors[config] for config in truth.rates])
    if not errors.any():
        return Floor(0.0, 0.0, 0.0)
    if not np.isfinite(errors).all():
        return Floor(1.0, 1.0, 1.0)
    chance = np.random.default_rng(0)
    true = _drawn_truths(fitted, errors, chance)
    again = true + errors * chance.standard_normal(true.shape)
    among_equals = 1e-9 * chance.random(
        true.shape
    )  # the mixture has few rates: equal ones have no first
    chosen = np.argmax(true + among_equals, axis=1)
    regrets = 1 - np.exp(again[np.arange(_DRAWS), chosen] - again.max(axis=1))
    return Floor(
        float(np.median(regrets)), float(np.mean(regrets)), float(np.quantile(regrets, 0.95))
    )


def _design(seen: Sequence[Seen], configs: Sequence[TrainingConfig]) -> _Floats:
    """A column for each point, and one for each sitting but the one with the most visits."""
    sittings = [one.sitting for one in seen]
    others = sorted({*sittings} - {max(sittings, key=sittings.count)})
    places = {config: place for place, config in enumerate(configs)}
    design = np.zeros((len(seen), len(configs) + len(others)))
    for row, one in enumerate(seen):
        design[row, places[one.config]] = 1
        if one.sitting in others:
            design[row, len(configs) + others.index(one.sitting)] = 1
    return design


def _robust(design: _Floats, logs: _Floats, drawn: _Floats) -> tuple[_Floats, float]:
    """Effects and the scale of Student's t; `drawn`: the information that draws effects to nothing."""
    free = len(logs) - design.shape[1]
    weights: _Floats = np.ones(len(logs))
    effects: _Floats = np.zeros(design.shape[1])
    spread, change = 1.0, inf
    for _ in range(_MOST_STEPS):
        if change < _SETTLED or spread < _SETTLED:
            break
        weighted = design.T * weights
        normal: _Floats = weighted @ design + spread**2 * drawn
        fitted: _Floats = np.linalg.solve(normal, weighted @ logs).astype(np.float64)
        change, effects = float(np.abs(fitted - effects).max()), fitted
        squares = (logs - design @ effects) ** 2
        spread = float(np.sqrt((weights * squares).sum() / free)) if free > 0 else inf
        if not 0 < spread < inf:
            break
        weights = (_TAILS + 1) / (_TAILS + squares / spread**2)
    return effects, spread


def _drawn_truths(fitted: _Floats, errors: _Floats, chance: np.random.Generator) -> _Floats:
    """Draws of the true logarithms, a row each, given the fitted ones."""
    sure = np.maximum(errors, _SETTLED)
    likelihood = np.exp(-0.5 * ((fitted[:, None] - fitted[None, :]) / sure[:, None]) ** 2)
    shares = np.full(len(fitted), 1 / len(fitted))
    for _ in range(_MIXING_STEPS):
        posterior = likelihood * shares
        posterior /= posterior.sum(axis=1, keepdims=True)
        shares = posterior.mean(axis=0)
    reached = np.cumsum(posterior, axis=1)
    drawn = [np.searchsorted(row, chance.random(_DRAWS) * row[-1]) for row in reached]
    true: _Floats = fitted[np.stack(drawn, axis=1)]
    return true
