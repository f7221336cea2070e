"""Which entrants of a confirmation are worth a further round, after a look at the figures. Pure.

Comes in: the entrants with their rounds so far. Goes out: the numbers of those that go on; none where all is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from autotune.analysis.decisions.claims import believe
from autotune.analysis.decisions.rounds import RoundsFit, fit_rounds
from autotune.analysis.decisions.selection_rules import believed_gains, claim_of
from autotune.records.recommendation import Confirmation, Ratio
from autotune.records.run_spread import RunSpread

__all__ = ["worth_going_on"]

_PRECISE, _PRECISE_SHARE = 0.05, 0.25
"""Half-width of a proven gain's interval, on the log scale, with which it needs no further rounds: a twentieth, or a
quarter of the gain, our own convention."""
_UNLIKELY = 0.05
"""Chance of a worthwhile gain below which an entrant needs no further rounds: our own convention."""
_BEHIND_SDS = 1.5
"""Standard errors behind the leading one from which on an entrant runs no more: our own convention. Where it was the
better one, little is lost: the closer they are, the more rounds both stay."""


def worth_going_on(
    entrants: Sequence[Confirmation], alive: Sequence[int], spread: RunSpread, one_sided_error: float
) -> tuple[int, ...]:
    """The challengers that go on, of those that are alive; () where a further round would decide nothing.

    It is over once the leading one is proven to be faster and its interval is narrow, or once none of them is likely to
    be 2 % faster than the baseline. Those clearly behind the leading one drop out. Without a baseline one of them is
    left.
    """
    gains = believed_gains(entrants, spread)
    open_ones = [number for number in alive if number in gains and number != 0]
    if not open_ones:
        return ()
    fit = fit_rounds(entrants, spread)
    leading = max(open_ones, key=gains.__getitem__)
    stay = tuple(number for number in open_ones if not _is_behind(number, leading, fit))
    if 0 not in fit.numbers:
        return stay if len(stay) > 1 else ()
    leader = claim_of(leading, fit, one_sided_error)
    is_proven = leader is not None and leader.is_proven and _is_narrow(leader.measured)
    differences = (fit.difference(number, 0) for number in stay)
    likely = (
        difference is None or believe(difference).worthwhile_probability > _UNLIKELY for difference in differences
    )
    return () if is_proven or not any(likely) else stay


def _is_behind(number: int, leading: int, fit: RoundsFit) -> bool:
    difference = fit.difference(leading, number)
    return difference is not None and difference.value > _BEHIND_SDS * difference.standard_error


def _is_narrow(ratio: Ratio) -> bool:
    return log(ratio.high / ratio.low) / 2 <= max(_PRECISE, _PRECISE_SHARE * log(ratio.value))
