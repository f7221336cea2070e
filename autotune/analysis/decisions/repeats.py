"""Which finished trials are run again, so that a lucky window neither leads a search nor ends it. Pure.

Comes in: the trials so far, what is believed of their rates, the spread between runs. Goes out: a trial to repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt

from autotune.records.run_spread import RunSpread
from autotune.records.trial import TrialRecord, believed_score

__all__ = ["unsure_at_the_end", "unsure_before_a_switch"]

_RUNS = 2
"""Of a trial that leads, of its challenger, and of the baseline: our own convention; a third tells a quarter more."""
_CLEAR_SDS = 2.0
"""Standard deviations of a difference between two runs from which on none is repeated: about its 95 % interval."""
_CLOSE_SDS = 1.0
"""The same, within which the second best may be the best: our own convention."""


def unsure_before_a_switch(
    records: Sequence[TrialRecord], believed: Mapping[int, float], spread: RunSpread, leading: int | None
) -> TrialRecord | None:
    """What must run again before the trial that is now believed to be the best replaces the leading one.

    Both, until each has run twice; neither where the difference is clear.
    """
    ranked = _ranked(records, believed)
    former = next((record for record in ranked if record.number == leading), None)
    if former is None or ranked[0] is former or _distance(ranked[0], former, believed, spread) > _CLEAR_SDS:
        return None
    return _with_one_run((ranked[0], former))


def unsure_at_the_end(
    records: Sequence[TrialRecord], believed: Mapping[int, float], spread: RunSpread
) -> TrialRecord | None:
    """What must run again before a search ends: its best, what may be better, and the baseline, where they ran once."""
    ranked = _ranked(records, believed)
    if len(ranked) < 2:  # nothing is compared
        return None
    close = [record for record in ranked[1:2] if _distance(ranked[0], record, believed, spread) < _CLOSE_SDS]
    baseline = [record for record in ranked if record.number == 0]
    return _with_one_run((ranked[0], *close, *baseline))


def _ranked(records: Sequence[TrialRecord], believed: Mapping[int, float]) -> list[TrialRecord]:
    feasible = [record for record in records if record.is_feasible]
    return sorted(feasible, key=lambda record: believed_score(record, believed), reverse=True)


def _distance(better: TrialRecord, other: TrialRecord, believed: Mapping[int, float], spread: RunSpread) -> float:
    """Between two scores, in standard deviations of a difference between two runs."""
    ratio = believed_score(better, believed) / believed_score(other, believed)
    between = spread.of(run.window.is_held_by_device for run in (*better.runs, *other.runs))
    return log(ratio) / (sqrt(2) * between.sd)


def _with_one_run(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """The first that was not repeated yet; a repeat that failed counts, so that none is tried for ever."""
    return next((record for record in records if 1 + len(record.repeats) < _RUNS), None)
