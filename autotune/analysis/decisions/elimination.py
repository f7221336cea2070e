"""Which entrants of a confirmation are worth a further round, after a look at the figures. Pure.

Comes in: the entrants with their rounds so far. Goes out: the numbers of those that go on; none where all is decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

from autotune.analysis.decisions.claims import believe
from autotune.analysis.decisions.rounds import RoundsFit, fit_rounds
from autotune.analysis.decisions.selection_rules import believed_gains, claim_of, ratio_of, worth_its_batch
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
    entrants: Sequence[Confirmation],
    alive: Sequence[int],
    spread: RunSpread,
    one_sided_error: float,
    *,
    batches: Mapping[int, float],
    least: float,
) -> tuple[int, ...]:
    """The challengers that go on, of those that are alive; () where a further round would decide nothing.

    It is over once the leading one is proven to be faster and its interval is narrow, or once none of them is likely to
    be 2 % faster than the baseline. Those clearly behind the leading one drop out. Without a baseline one of them is
    left. Where a larger batch leads, it and those that contend at the baseline's own go on until it is decided whether
    it is worth it; one that is not drops out.

    Args:
        entrants: all with their rounds, the baseline (number 0) among them where it is a reference.
        alive: the numbers of those that could run again.
        spread: between runs of the same settings.
        one_sided_error: that this look may spend.
        batches: by number, the global batch over the baseline's.
        least: the ratio over the fastest at the baseline's own batch from which on a larger one is worth it.
    """
    gains = believed_gains(entrants, spread)
    by_number = {entrant.number: entrant for entrant in entrants}
    own = max((number for number in gains if batches[number] == 1), key=gains.__getitem__, default=None)

    def is_worth_it(number: int) -> bool | None:
        if own is None or batches[number] <= 1:
            return True
        over = ratio_of(by_number[number], by_number[own], spread, one_sided_error)
        return over is None or worth_its_batch(over, least)

    open_ones = [number for number in alive if number in gains and number != 0 and is_worth_it(number) is not False]
    if not open_ones:
        return ()
    fit = fit_rounds(entrants, spread)
    leading = max(open_ones, key=gains.__getitem__)
    rival = own if own in alive and is_worth_it(leading) is None else None

    def is_behind(number: int) -> bool:
        ahead = leading if rival is None or batches[number] > 1 else rival
        return _is_behind(number, ahead, fit)

    stay = tuple(number for number in open_ones if not is_behind(number))
    if 0 not in fit.numbers:
        return stay if len(stay) > 1 else ()
    leader = claim_of(leading, fit, one_sided_error)
    is_proven = leader is not None and leader.is_proven and _is_narrow(leader.measured) and rival is None
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
