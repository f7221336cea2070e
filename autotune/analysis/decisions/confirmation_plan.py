"""How a confirmation spends its seconds and its error: many rounds of short windows, with a few looks at the figures.

Comes in: what each configuration's runs take beyond their windows, the seconds there are, the spread between runs. Goes
out: a ConfirmationPlan, and by how much a look may err. Pure.

A window is as long as its own error is worth beside the spread between runs, which no longer window lowers: more rounds
do. A look at the figures costs error, as every look may be the lucky one; the errors of all looks add up to what is
allowed (Bonferroni over looks and entrants), most of it kept for the last ones.

Sources: length of a run from its start's cost and both variances, Kalibera and Jones 2013, "Rigorous benchmarking in
reasonable time"; alpha spending by a power of the time used, Lan and DeMets 1983 and Kim and DeMets 1987.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from autotune.records.run_spread import RunSpread

__all__ = [
    "BRIEF_WINDOW_S",
    "FEWEST_ROUNDS",
    "MOST_ROUNDS",
    "SHORTEST_WINDOW_S",
    "UNHURRIED_CONFIRMATION_S",
    "ConfirmationPlan",
    "brief_confirmation",
    "is_look",
    "plan_confirmation",
    "spent_error",
    "window_length_s",
]

FEWEST_ROUNDS = 3
"""Below which the rounds' own spread tells nothing of use; fewer only where a time-out leaves no time: our own
convention."""
_LOOKS = (3, 4, 6, 9, 13, 19, 28)
"""Rounds after which the figures are looked at, each half as many again: our own convention; few looks share the
error."""
MOST_ROUNDS = _LOOKS[-1]
"""Enough to tell 4 % at a spread of 5 %; our own convention."""
UNHURRIED_CONFIRMATION_S = 80.0
"""Seconds of the rounds where no time-out limits the search; more where two configurations start too slowly. This and
the figures below are our own conventions."""
SHORTEST_WINDOW_S, _LONGEST_WINDOW_S = 1.0, 8.0
BRIEF_WINDOW_S = 4.0
"""Of a trial too: where starts are slow, steps mostly are, and three blocks take longer."""
_EXTRAS_S = 1.5
"""Ceilings and breakdown of one run, once for each entrant."""
_ALL_ERROR = 0.05
"""That one of the entrants is falsely said to be faster, at most."""
_ONE_ERROR = 0.025
"""That an entrant's interval lies above the truth, at most: that of a 95 % interval."""
_SPENDING_POWER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationPlan:
    """The rounds of a confirmation."""

    entrants: int
    """How many of the waiting configurations take part, from the first on."""
    window_s: float
    budget_s: float
    """Of all rounds together."""
    rounds: int
    """Without which nothing is confirmed, as far as the time suffices."""
    has_extras: bool = True
    """Whether a first round has the time to measure where the time goes."""

    def round_s(self, overheads_s: Sequence[float]) -> float:
        """What a round takes of entrants whose runs take so much beyond their windows."""
        return sum(overheads_s) + self.window_s * len(overheads_s)

    def for_round(
        self, overheads_s: Sequence[float], spent_s: float, left_s: float | None, number: int
    ) -> ConfirmationPlan | None:
        """The plan of a further round, after so many; None where there is no time for it.

        The planned rounds follow even where earlier ones took longer than planned, unless a time-out forbids: their
        windows then shrink to what is left.
        """
        if number >= self.rounds:
            in_time = spent_s + self.round_s(overheads_s) <= self.budget_s
            return self if in_time and (left_s is None or self.round_s(overheads_s) <= left_s) else None
        if left_s is None:
            return self
        window_s = (left_s - sum(overheads_s)) / len(overheads_s)
        return None if window_s < SHORTEST_WINDOW_S else replace(self, window_s=min(self.window_s, window_s))


def plan_confirmation(
    overheads_s: Sequence[float], left_s: float | None, window_s: float, *, has_baseline: bool
) -> ConfirmationPlan:
    """Plan for configurations, the most important ones first, by the seconds that their runs take beyond the windows.

    Without a time-out (`left_s` None) there are always three rounds; where starts are slow, of fewer configurations,
    but of two. With one, configurations, windows and then rounds shrink to the seconds left, down to one round of two
    (of one without a baseline among them).
    """
    budget_s, fewest = (UNHURRIED_CONFIRMATION_S, 2) if left_s is None else (left_s, 2 if has_baseline else 1)
    fewest = min(fewest, len(overheads_s))
    for rounds in range(FEWEST_ROUNDS, 0, -1):
        for count in range(len(overheads_s), fewest - 1, -1):
            fitting_s = ((budget_s - count * _EXTRAS_S) / rounds - sum(overheads_s[:count])) / count
            if fitting_s >= SHORTEST_WINDOW_S:
                chosen_s = min(window_s, fitting_s)
                return ConfirmationPlan(entrants=count, window_s=chosen_s, budget_s=budget_s, rounds=rounds)
        if left_s is None:
            return ConfirmationPlan(entrants=fewest, window_s=window_s, budget_s=budget_s, rounds=rounds)
    rounds = 0 if budget_s <= 0 else 1
    return ConfirmationPlan(
        entrants=fewest, window_s=SHORTEST_WINDOW_S, budget_s=budget_s, rounds=rounds, has_extras=False
    )


def brief_confirmation(waiting: int) -> ConfirmationPlan:
    """One round of the first two that wait, in short windows and with nothing beside: where each start takes long."""
    return ConfirmationPlan(entrants=min(2, waiting), window_s=BRIEF_WINDOW_S, budget_s=0.0, rounds=1, has_extras=False)


def window_length_s(overhead_s: float, variance_of_a_second: float, spread: RunSpread) -> float:
    """Seconds of a window, of runs that take so much beyond it.

    Args:
        overhead_s: what starting a run takes.
        variance_of_a_second: of the logarithm of a rate that was measured for one second.
        spread: between runs.
    """
    best_s = sqrt(overhead_s * variance_of_a_second) / spread.sd
    return min(max(best_s, SHORTEST_WINDOW_S), _LONGEST_WINDOW_S)


def is_look(rounds: int) -> bool:
    """Whether the figures are looked at after so many rounds; after the last one they are in any case."""
    return rounds in _LOOKS


def spent_error(time_fraction: float, challengers: int) -> float:
    """The one-sided error of each of so many challengers that looks may have spent by a share of the time."""
    return min(_ONE_ERROR, _ALL_ERROR / challengers) * min(time_fraction, 1.0) ** _SPENDING_POWER
