"""How many rounds of how many configurations a confirmation has, in windows of which length. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["ROUNDS", "UNHURRIED_CONFIRMATION_S", "ConfirmationPlan", "plan_confirmation"]

ROUNDS = 3
"""As many as it takes to tell a gain from what runs differ by; fewer where a time-out leaves no time."""
UNHURRIED_CONFIRMATION_S = 80.0
"""What three rounds may take where no time-out limits the search; more where two configurations start too slowly."""
_WINDOW_S, _SHORTEST_WINDOW_S = 20.0, 2.0
_UNHURRIED_WINDOW_S, _SHORTEST_UNHURRIED_WINDOW_S = 8.0, 4.0
_LAST_WINDOW_S = 1.0  # of a round for which next to no time is left
_EXTRAS_S = 1.5  # ceilings and breakdown of one run, once for each entrant


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationPlan:
    """The rounds of a confirmation."""

    rounds: int
    entrants: int
    """The first so many of those that wait; the others are left out."""
    window_s: float

    @property
    def has_extras(self) -> bool:
        """Whether a first round has the time to look at where the time goes."""
        return self.window_s > _LAST_WINDOW_S

    def for_round(
        self, overheads_s: Sequence[float], left_s: float | None, rounds_left: int
    ) -> ConfirmationPlan | None:
        """The plan of the next of so many rounds that are left, where runs may have taken longer than planned.

        Its windows end in the seconds left; where that makes them too short for all rounds, fewer follow. None where
        there is not even time for the shortest.
        """
        if left_s is None:
            return self
        for rounds, least_s in (*((one, _SHORTEST_WINDOW_S) for one in range(rounds_left, 0, -1)), (1, _LAST_WINDOW_S)):
            window_s = min(self.window_s, (left_s / rounds - sum(overheads_s)) / len(overheads_s))
            if window_s >= min(least_s, self.window_s):
                return replace(self, window_s=window_s)
        return None


def plan_confirmation(overheads_s: Sequence[float], left_s: float | None, *, has_baseline: bool) -> ConfirmationPlan:
    """Plan for configurations whose runs take so many seconds beyond their windows, the most important ones first.

    Without a time-out (`left_s` None) it is three rounds in any case; with one, rounds, configurations and windows
    shrink to the seconds left, down to one round of two (of one where no baseline is among them).
    """
    if left_s is None:
        return _unhurried(overheads_s)
    fewest = 2 if has_baseline else 1
    for rounds in range(ROUNDS, 0, -1):
        for count in range(len(overheads_s), fewest - 1, -1):
            window_s = ((left_s - count * _EXTRAS_S) / rounds - sum(overheads_s[:count])) / count
            if window_s >= _SHORTEST_WINDOW_S:
                return ConfirmationPlan(rounds=rounds, entrants=count, window_s=min(window_s, _WINDOW_S))
    if left_s > 0:
        return ConfirmationPlan(rounds=1, entrants=fewest, window_s=_LAST_WINDOW_S)
    return ConfirmationPlan(rounds=0, entrants=len(overheads_s), window_s=0.0)


def _unhurried(overheads_s: Sequence[float]) -> ConfirmationPlan:
    """Three rounds within what a confirmation may take; where starts are slow, of fewer configurations, but of two."""
    fewest = min(2, len(overheads_s))
    for count in range(len(overheads_s), fewest - 1, -1):
        starts_s = ROUNDS * sum(overheads_s[:count])
        window_s = (UNHURRIED_CONFIRMATION_S - count * _EXTRAS_S - starts_s) / (ROUNDS * count)
        if window_s >= _SHORTEST_UNHURRIED_WINDOW_S:
            return ConfirmationPlan(rounds=ROUNDS, entrants=count, window_s=min(window_s, _UNHURRIED_WINDOW_S))
    return ConfirmationPlan(rounds=ROUNDS, entrants=fewest, window_s=_SHORTEST_UNHURRIED_WINDOW_S)
