"""benchmarks/replay/truth.py: a surface's truth by its visits, its error, and the regret that nobody can go below."""

from __future__ import annotations

from math import exp, inf, log
from statistics import fmean

import numpy as np
import pytest

from autotune import TrainingConfig
from benchmarks.replay.truth import Seen, Truth, fit_truth, floor_of, known_truth

POINTS = [TrainingConfig(micro_batch_size=1 + number) for number in range(40)]


def visits(
    seed: int, *, spread: float, sitting: float = 0.0, tails: float = 1e6, often: int = 6
) -> list[Seen]:
    """Each point once in the first sitting, ten of them more often in a second one; the first point in both."""
    chance = np.random.default_rng(seed)
    plan = [(place, 0) for place in range(40)] + [
        (place % 10, 1) for place in range(10 * (often - 1))
    ]
    return [
        Seen(
            POINTS[place],
            which,
            1000 * exp(0.02 * place + sitting * which + spread * chance.standard_t(tails)),
        )
        for place, which in plan
    ]


def test_a_truth_without_noise_is_found_beside_what_a_sitting_changes() -> None:
    found = fit_truth(visits(0, spread=0.0, sitting=0.3, often=5))
    ratios = [found.rates[point] / found.rates[POINTS[0]] for point in POINTS]
    assert ratios == pytest.approx([exp(0.02 * place) for place in range(40)])
    assert found.best == POINTS[-1]
    assert (found.regret(found.best), found.regret(TrainingConfig(micro_batch_size=999))) == (
        0.0,
        1.0,
    )


@pytest.mark.parametrize("tails", [1e6, 4.0], ids=["normal", "heavy tails"])
def test_the_standard_error_holds_the_truth_as_often_as_it_says(tails: float) -> None:
    strays = list[float]()
    for seed in range(60):
        found = fit_truth(visits(seed, spread=0.08, tails=tails))
        points = ((place, POINTS[place]) for place in (2, 5, 30))
        strays += [
            (log(found.rates[point] / 1000) - 0.02 * place) / found.errors[point]
            for place, point in points
        ]
    held = fmean(abs(one) < 1.96 for one in strays)
    assert 0.88 < held < 0.99, held


def test_one_slowed_visit_of_seven_hardly_moves_its_point() -> None:
    slowed = [*visits(0, spread=0.02), Seen(POINTS[3], 1, 300.0)]
    assert fit_truth(slowed).rates[POINTS[3]] == pytest.approx(1000 * exp(0.06), rel=0.03)


def test_a_sitting_of_two_slowed_visits_hardly_moves_a_point_that_was_seen_in_no_other_way() -> (
    None
):
    seen = [one for one in visits(0, spread=0.05) if one.config != POINTS[39]]
    slowed = [Seen(POINTS[0], 2, 250.0), Seen(POINTS[39], 2, 1000 * exp(0.02 * 39))]
    assert log(fit_truth([*seen, *slowed]).rates[POINTS[39]] / 1000) == pytest.approx(
        0.02 * 39, abs=0.3
    )


def test_what_all_points_share_in_a_sitting_is_no_error_of_comparing_them() -> None:
    chance = np.random.default_rng(0)
    plan = [(place, 0) for place in range(40)] + [
        (place, which) for which in range(1, 9) for place in [*range(10)] * 5
    ]
    seen = [
        Seen(POINTS[place], which, 1000 * exp(0.08 * chance.standard_normal()))
        for place, which in plan
    ]
    assert fit_truth(seen).errors[POINTS[0]] == pytest.approx(0.08 / 41**0.5, rel=0.2)


def test_without_a_second_visit_of_any_point_nothing_is_sure() -> None:
    found = fit_truth([Seen(point, 0, 1000.0) for point in POINTS])
    assert set(found.errors.values()) == {inf}
    assert tuple(floor_of(found)) == (1.0, 1.0, 1.0)


def test_more_visits_make_the_error_smaller() -> None:
    few, many = (
        fit_truth(visits(0, spread=0.08, often=often)).errors[POINTS[1]] for often in (4, 60)
    )
    assert many < 0.4 * few


def test_the_floor_is_nothing_of_a_known_truth_and_grows_with_its_error() -> None:
    rates = dict.fromkeys(POINTS, 1000.0)
    assert tuple(floor_of(known_truth(rates))) == (0.0, 0.0, 0.0)
    means = [
        floor_of(Truth(rates=rates, errors=dict.fromkeys(POINTS, error), spread=error)).mean
        for error in (0.01, 0.05)
    ]
    best_of_forty = 2.16  # standard deviations, the expected largest of forty normal draws
    assert means == pytest.approx(
        [1 - exp(-best_of_forty * 0.01), 1 - exp(-best_of_forty * 0.05)], rel=0.1
    )


def test_the_floor_of_a_best_point_far_ahead_is_nothing() -> None:
    rates = {point: 1000.0 * (2 if point == POINTS[0] else 1) for point in POINTS}
    assert floor_of(Truth(rates=rates, errors=dict.fromkeys(POINTS, 0.03), spread=0.03)).q95 == 0.0
