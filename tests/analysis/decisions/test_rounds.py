"""Entrants measured in turns: what rounds share cancels, what is missing is bridged, and errors are what they say."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
import pytest

from autotune.analysis.decisions.rounds import fit_rounds
from autotune.analysis.decisions.run_spread import assumed_spread
from autotune.analysis.statistics import t_quantile
from autotune.records.recommendation import Confirmation
from autotune.records.run_spread import RunSpread
from tests.factories import make_confirmation

SPREAD = RunSpread(sd=0.05, degrees_of_freedom=3.0)


def test_what_a_round_shares_cancels() -> None:
    fit = fit_rounds([make_confirmation(0, 100, 70, 140), make_confirmation(1, 200, 140, 280)], SPREAD)
    difference = fit.difference(1, 0)
    assert difference is not None
    assert difference.value == pytest.approx(log(2))
    assert difference.unit_error == pytest.approx(sqrt(2 / 3)), "three rounds of both"
    own = 3 / 5 * SPREAD.sd**2
    assert difference.standard_error == pytest.approx(sqrt(own * 2 / 3)), "the prior's share alone"
    assert difference.degrees_of_freedom == 3 + 2


def test_a_failed_run_is_bridged_by_the_others() -> None:
    entrants = [make_confirmation(0, 100, None), make_confirmation(1, 200, 100), make_confirmation(2, None, 300)]
    difference = fit_rounds(entrants, SPREAD).difference(2, 0)
    assert difference is not None
    assert exp(difference.value) == pytest.approx(6.0)


def test_what_shares_no_round_by_any_chain_is_not_compared() -> None:
    fit = fit_rounds([make_confirmation(0, 5, None), make_confirmation(1, None, 5)], SPREAD)
    assert fit.difference(1, 0) is None


def test_an_entrant_over_itself_is_nothing() -> None:
    difference = fit_rounds([make_confirmation(3, 90, 110), make_confirmation(0, 90, 120)], SPREAD).difference(3, 3)
    assert difference is not None
    assert (difference.value, difference.standard_error) == (0.0, 0.0)


def test_more_rounds_and_more_entrants_tell_the_noise_better() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, (4, 12))

    def error(entrants: int, rounds: int) -> float:
        shown = [make_confirmation(n, *(100 * np.exp(noise[n, :rounds]))) for n in range(entrants)]
        difference = fit_rounds(shown, SPREAD).difference(1, 0)
        assert difference is not None
        return t_quantile(0.975, difference.degrees_of_freedom) * difference.standard_error

    assert error(2, 12) < error(2, 3)
    assert error(4, 3) < error(2, 3)


def test_a_noisy_entrant_does_not_hide_the_difference_of_two_that_the_device_holds() -> None:
    held = [make_confirmation(n, 100 + n, 100 + n, 100 + n, is_held_by_device=True) for n in (0, 1)]
    noisy = make_confirmation(2, 90, 120, 100)
    alone, together = (fit_rounds(field, assumed_spread("cuda")) for field in (held, [*held, noisy]))
    assert alone.difference(1, 0) == together.difference(1, 0)
    mixed, pair = together.difference(2, 0), fit_rounds([held[0], noisy], assumed_spread("cuda")).difference(2, 0)
    assert mixed is not None
    assert mixed == pair
    assert mixed.standard_error > 0.05


def test_what_runs_have_shown_is_told_apart_from_what_is_assumed() -> None:
    prior = RunSpread(sd=0.05, degrees_of_freedom=3.0)
    taught = RunSpread(sd=0.04, degrees_of_freedom=5.0, source="workload")
    once = [make_confirmation(0, 100), make_confirmation(1, 200)]
    difference = fit_rounds(once, taught, prior).difference(1, 0)
    assert difference is not None
    assert difference.seen_degrees == 2.0
    seen = (5 * 0.04**2 - 3 * 0.05**2) / 2
    assert difference.seen_error == pytest.approx(sqrt(2 * seen))
    nothing = fit_rounds(once, prior).difference(1, 0)
    assert nothing is not None
    assert nothing.seen_degrees == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("sd", [0.015, 0.05, 0.1])
@pytest.mark.parametrize(("rounds", "entrants"), [(1, 2), (3, 2), (3, 4), (12, 3)])
def test_the_interval_of_a_ratio_covers_the_truth(rounds: int, entrants: int, sd: float) -> None:
    """Whatever rounds share; the spread is known by ten repeats."""
    random, covered, count = np.random.default_rng(1), 0, 400
    for _ in range(count):
        known = sd * np.sqrt(random.chisquare(10) / 10)
        shared = random.normal(0, 0.2, rounds)
        field: list[Confirmation] = [
            make_confirmation(n, *(100 * (1 + 0.1 * n) * np.exp(shared + random.normal(0, sd, rounds))))
            for n in range(entrants)
        ]
        difference = fit_rounds(field, RunSpread(sd=known, degrees_of_freedom=10)).difference(1, 0)
        assert difference is not None
        half = t_quantile(0.975, difference.degrees_of_freedom) * difference.standard_error
        covered += abs(difference.value - log(1.1)) <= half
    assert covered / count >= 0.92
