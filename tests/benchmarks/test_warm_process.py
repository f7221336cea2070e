"""Warm against fresh processes: a bias, a place's share in it, and luck that all points of a process have in common."""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest

from benchmarks.warm_process import told_of

POINTS, ROUNDS = 4, 60


def rounds_of(
    *, bias: float = 0.0, shared: float = 0.0, own: float = 0.01, of_first: float = 0.0
) -> list[dict[str, Any]]:
    """Rounds in which a warm process has so much luck for all its points, and its first point a bias of its own."""
    chance, found = random.Random(0), []
    for _ in range(ROUNDS):
        order, luck = chance.sample(range(POINTS), POINTS), chance.gauss(0, shared)
        warm = [
            bias + luck + chance.gauss(0, own) + (of_first if order[0] == point else 0)
            for point in range(POINTS)
        ]
        sides = {"fresh": [chance.gauss(0, own) for _ in range(POINTS)], "warm": warm}
        figures = {
            way: [
                {"samples_per_s": 100 * exp(log_rate), "peak_memory_bytes": 2**20}
                for log_rate in log_rates
            ]
            for way, log_rates in sides.items()
        }
        found.append({"order": order, "fresh_s": 20.0, "warm_s": 8.0, **figures})
    return found


def test_a_bias_is_found_with_its_error() -> None:
    told = told_of(rounds_of(bias=0.03), POINTS)
    assert told["bias"] == pytest.approx(0.03, abs=4 * told["bias_error"])
    assert 0 < told["bias_error"] < 0.003
    assert told["seconds"] == {"fresh": 20.0, "warm": 8.0}


def test_luck_that_all_points_of_a_process_share_is_no_part_of_their_ratios() -> None:
    told = told_of(rounds_of(shared=0.05), POINTS)
    assert told["spread"]["warm"] > 3 * told["spread"]["fresh"]
    assert told["spread_over_baseline"]["warm"] == pytest.approx(
        told["spread_over_baseline"]["fresh"], rel=0.3
    )


def test_what_the_first_point_of_a_process_has_shows_at_its_place() -> None:
    told = told_of(rounds_of(of_first=-0.1), POINTS)
    first, *others = told["bias_by_place"]
    assert first == pytest.approx(-0.1, abs=0.01)
    assert all(abs(other) < 0.01 for other in others)
    assert abs(told["bias"]) < 0.01, "the first has a process of its own, as fresh ones have"


def test_a_point_that_does_not_run_in_a_fresh_process_is_left_out() -> None:
    rounds = rounds_of()
    rounds[3]["fresh"][2]["samples_per_s"] = None
    told = told_of(rounds, POINTS)
    assert told["points"] == POINTS - 1
    assert 2 not in told["bias_by_point"]
