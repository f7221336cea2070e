"""What a search is expected to take, told before it and while it goes on, and when it has paid for itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from autotune.analysis.confirmation_plan import ROUNDS, UNHURRIED_CONFIRMATION_S
from autotune.analysis.durations import rounds_of, typical_overhead_s, typical_s
from autotune.records.stress_check import STRESS_S, look_s
from autotune.records.trial import TrialRecord

__all__ = ["Pace", "expected_s", "further_trials", "payback_s"]

_MOST_RUNS, _FEWEST_RUNS = 4 * ROUNDS, 2 * ROUNDS  # of the baseline with three finalists, or with one
_EXPECTED_TRIALS = 12
"""Of a search that may stop by itself. Source: benchmarks/regret.py."""
_EXPECTED_UNGUIDED_TRIALS = 20
"""Of one that only patience ends: 16 at the least, and 12 after the last gain."""
_FIRST_TRIAL_S = 6.0  # beyond the probe: the window, ceilings and the profile of the baseline
_TRIAL_S = 3.5  # beyond the start, which a probe has shown
_LOOK_S = 6.0
_RUN_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What an estimate is made from."""

    most_trials: int
    """Trials after which the search ends in any case."""
    may_stop_early: bool
    """It ends by itself where nothing is to be won any more."""
    records: Sequence[TrialRecord] = ()
    """The trials so far."""
    slots: int = 1
    """Trials that run at once."""
    probe_s: float = 1.0
    """What one look at the workload took."""
    left_s: float | None = None
    """Seconds left of the time-out; None where there is none."""
    is_guided: bool = True
    """A model proposes: it looks at loader and device first, and ends the search sooner."""


def expected_s(pace: Pace) -> float:
    """Seconds that a search is expected to go on, confirmation and stress run included; at most what is left."""
    done, further = len(pace.records), further_trials(pace)
    if done == 0:
        trial_s, overhead_s = pace.probe_s + _TRIAL_S, pace.probe_s
        first_s = pace.probe_s + _FIRST_TRIAL_S + (_LOOK_S if pace.is_guided and further else 0.0)
    else:
        trial_s, overhead_s, first_s = typical_s(pace.records), typical_overhead_s(pace.records), 0.0
    total = first_s + trial_s * rounds_of(further, slots=pace.slots)
    trials = max(1, done) + further
    if trials > 1:  # a baseline alone has nobody to be compared with
        total += _confirmation_s(ROUNDS * trials, overhead_s + _RUN_S) + overhead_s + STRESS_S + look_s(inf)
    return total if pace.left_s is None else min(total, pace.left_s)


def _confirmation_s(most_runs: int, run_s: float) -> float:
    within = min(UNHURRIED_CONFIRMATION_S, min(_MOST_RUNS, most_runs) * run_s)
    return max(within, min(_FEWEST_RUNS, most_runs) * run_s)


def further_trials(pace: Pace) -> int:
    """Trials beyond the baseline that are still to come; of a search that may stop by itself one at the least."""
    begun, most = max(1, len(pace.records)), pace.most_trials
    if pace.may_stop_early and begun < most:
        return max(1, (_EXPECTED_TRIALS if pace.is_guided else _EXPECTED_UNGUIDED_TRIALS) - begun)
    return max(0, most - begun)


def payback_s(search_s: float, speedup: float) -> float | None:
    """Seconds of training, as it was before, after which a search has paid for itself; None where it never does.

    A training of T seconds takes T / speedup now, so that T - T / speedup is won.
    """
    return search_s / (1 - 1 / speedup) if speedup > 1 else None
