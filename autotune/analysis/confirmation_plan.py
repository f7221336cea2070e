"""How many rounds a confirmation has, of how many configurations, in windows of which length.

Comes in: what each configuration's runs take beyond their windows, and the seconds left. Goes out: a ConfirmationPlan.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["ROUNDS", "UNHURRIED_CONFIRMATION_S", "ConfirmationPlan", "plan_confirmation"]

ROUNDS = 3
"""The fewest whose spread gives an interval (analysis/selection_rules); fewer where a time-out leaves no time."""
UNHURRIED_CONFIRMATION_S = 80.0
"""Seconds of three rounds where no time-out limits the search; more where two configurations start too slowly. This and
the figures below are our own conventions."""
_LONGEST_WINDOW_S, _SHORTEST_WINDOW_S = 20.0, 2.0
_LONGEST_UNHURRIED_WINDOW_S, _SHORTEST_UNHURRIED_WINDOW_S = 8.0, 4.0
_LAST_WINDOW_S = 1.0
"""Of a round for which hardly any time is left."""
_EXTRAS_S = 1.5
"""Ceilings and breakdown of one run, once for each entrant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationPlan:
    """The rounds of a confirmation."""

    rounds: int
    entrants: int
    """How many of the waiting configurations take part, from the first on."""
    window_s: float

    @property
    def has_extras(self) -> bool:
        """Whether a first round has the time to measure where the time goes."""
        return self.window_s > _LAST_WINDOW_S

    def for_round(
        self, overheads_s: Sequence[float], left_s: float | None, rounds_left: int
    ) -> ConfirmationPlan | None:
        """The plan of the next of the rounds that are left, where earlier runs may have taken longer than planned.

        Its windows end in the seconds left. Where they would become too short for all rounds, fewer rounds follow. None
        where there is not even time for the shortest window.
        """
        if left_s is None:
            return self
        shortest = [(rounds, _SHORTEST_WINDOW_S) for rounds in range(rounds_left, 0, -1)]
        for rounds, shortest_s in (*shortest, (1, _LAST_WINDOW_S)):
            window_s = min(self.window_s, (left_s / rounds - sum(overheads_s)) / len(overheads_s))
            if window_s >= min(shortest_s, self.window_s):
                return replace(self, window_s=window_s)
        return None


def plan_confirmation(overheads_s: Sequence[float], left_s: float | None, *, has_baseline: bool) -> ConfirmationPlan:
    """Plan for configurations, the most important ones first, by the seconds that their runs take beyond the windows.

    Without a time-out (`left_s` None) there are always three rounds; where starts are slow, of fewer configurations,
    but of two. With one, rounds, configurations and windows shrink to the seconds left, down to one round of two (of
    one without a baseline among them).
    """

    def fit(total_s: float, rounds: int, fewest: int, shortest_s: float, longest_s: float) -> ConfirmationPlan | None:
        for count in range(len(overheads_s), fewest - 1, -1):
            window_s = ((total_s - count * _EXTRAS_S) / rounds - sum(overheads_s[:count])) / count
            if window_s >= shortest_s:
                return ConfirmationPlan(rounds=rounds, entrants=count, window_s=min(window_s, longest_s))
        return None

    if left_s is None:
        shortest_s, fewest = _SHORTEST_UNHURRIED_WINDOW_S, min(2, len(overheads_s))
        plan = fit(UNHURRIED_CONFIRMATION_S, ROUNDS, fewest, shortest_s, _LONGEST_UNHURRIED_WINDOW_S)
        return plan or ConfirmationPlan(rounds=ROUNDS, entrants=fewest, window_s=shortest_s)
    fewest = 2 if has_baseline else 1
    if left_s <= 0:
        return ConfirmationPlan(rounds=0, entrants=len(overheads_s), window_s=0.0)
    plans = (fit(left_s, rounds, fewest, _SHORTEST_WINDOW_S, _LONGEST_WINDOW_S) for rounds in range(ROUNDS, 0, -1))
    return next(filter(None, plans), ConfirmationPlan(rounds=1, entrants=fewest, window_s=_LAST_WINDOW_S))
