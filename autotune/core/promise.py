"""What a search is expected to take, told before it and while it goes on, and when it has paid for itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.budget import Budget
from autotune.core.durations import rounds_of, typical_overhead_s, typical_s
from autotune.core.trial import TrialRecord

__all__ = ["CONFIRMATION_RUNS", "LONGEST_CONFIRMATION_S", "Pace", "expected_s", "payback_s"]

CONFIRMATION_RUNS = 12
"""Runs of a confirmation as a rule: three rounds of three finalists and the baseline."""
LONGEST_CONFIRMATION_S = 100.0
"""What a confirmation takes at the most where nothing limits the search: its windows shrink to that."""
_EXPECTED_TRIALS = 12
"""Of a search that may stop by itself. Source: benchmarks/regret.py."""
_FIRST_TRIAL_S = 6.0  # beyond the probe: the window, ceilings and the profile of the baseline
_TRIAL_S = 3.5  # beyond the start, which a probe has shown
_LOOK_S = 6.0
_RUN_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What an estimate is made from."""

    budget: Budget
    records: Sequence[TrialRecord] = ()
    """The trials so far."""
    slots: int = 1
    """Trials that run at once."""
    probe_s: float = 1.0
    """What one look at the workload took."""
    left_s: float | None = None
    """Seconds left of the time-out; None where there is none."""


def expected_s(pace: Pace) -> float:
    """Seconds that a search is expected to go on, its confirmation included; never more than the time-out leaves."""
    most = pace.budget.max_trials if pace.budget.n_trials else min(_EXPECTED_TRIALS, pace.budget.max_trials)
    done = len(pace.records)
    if done == 0:
        trial_s, overhead_s, first_s = pace.probe_s + _TRIAL_S, pace.probe_s, pace.probe_s + _FIRST_TRIAL_S + _LOOK_S
        done = 1
    else:
        trial_s, overhead_s, first_s = typical_s(pace.records), typical_overhead_s(pace.records), 0.0
    trials_s = trial_s * rounds_of(max(1, most - done), slots=pace.slots)
    total = first_s + trials_s + min(LONGEST_CONFIRMATION_S, CONFIRMATION_RUNS * (overhead_s + _RUN_S))
    return total if pace.left_s is None else min(total, pace.left_s)


def payback_s(search_s: float, speedup: float) -> float | None:
    """Seconds of training, as it was before, after which a search has paid for itself; None where it never does.

    A training of T seconds takes T / speedup now, so that T - T / speedup is won.
    """
    return search_s / (1 - 1 / speedup) if speedup > 1 else None
