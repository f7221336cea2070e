"""Which points of a grid are to be visited next: the order in which surfaces.py records them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

from autotune import TrainingConfig
from benchmarks.cases.surfaces import Grid
from benchmarks.replay.replay import Surface, Visit

__all__ = ["FIRST_POINTS", "missing_visits", "spread_order"]

FIRST_POINTS = 20
"""As many as a sitting of a few minutes sees; they come before the curves."""
_REPEATED_SHARE = 0.2
_CONTENDS_FROM = 0.85
"""Of the best rate: a point that was seen there once may be the best one."""


def missing_visits(
    grid: Grid, surface: Surface | None, *, points: int | None, visits: int, contender_visits: int
) -> list[tuple[TrainingConfig, Visit]]:
    """What is still to be visited, in an order that is the same in each sitting; the contenders once all else is there.

    What contends changes with its visits: whoever has made these looks again. `points`: the first ones alone.
    """
    known = spread_order(grid)[:points]
    repeated = [config for config in _by_chance(grid) if config in known][
        : round(_REPEATED_SHARE * len(known))
    ]
    done = set() if surface is None else {(trial.config, trial.visit) for trial in surface.trials}
    left = _not_done([*((known, number) for number in range(visits)), (repeated, visits)], done)
    if left or surface is None:
        return left
    rates = surface.rates()
    best = max(rates.values(), default=0.0)
    finalists = [config for config in known if rates.get(config, 0.0) >= _CONTENDS_FROM * best > 0]
    return _not_done([(finalists, number) for number in range(contender_visits)], done)


def spread_order(grid: Grid) -> list[TrainingConfig]:
    """Every point once: the baseline, the two far corners, then those whose values came least so far; then by chance.

    Of the first FIRST_POINTS each value of a setting is seen about as often as the others.
    """
    points, left = grid.configs(), _by_chance(grid)
    own, seen = TrainingConfig.model_validate(dict(grid.baseline)), Counter[tuple[str, Any]]()
    ordered: list[TrainingConfig] = []
    forced = list(dict.fromkeys(one for one in (own, points[0], points[-1]) if one in points))
    while left and len(ordered) < FIRST_POINTS:
        point = (
            forced.pop(0)
            if forced
            else min(left, key=lambda one: sum(seen[value] for value in _values(grid, one)))
        )
        left.remove(point)
        ordered.append(point)
        seen.update(_values(grid, point))
    return ordered + left


def _by_chance(grid: Grid) -> list[TrainingConfig]:
    points = grid.configs()
    random.Random(0).shuffle(points)
    return points


def _values(grid: Grid, point: TrainingConfig) -> list[tuple[str, Any]]:
    return [(name, getattr(point, name)) for name in grid.domains]


def _not_done(
    rounds: Sequence[tuple[Sequence[TrainingConfig], int]],
    done: Container[tuple[TrainingConfig, Visit]],
) -> list[tuple[TrainingConfig, Visit]]:
    """Visits of rounds of points that were not made yet."""
    visits = ((config, number) for configs, number in rounds for config in configs)
    return [visit for visit in visits if visit not in done]
