"""What each part of a search may take: windows, deadlines, what is left for trials, what is to be expected in all.

Reads the study and the clock, and changes neither. Composition, like tune, which asks it before each trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from autotune.analysis.time_estimate import (
    SHORTEST_WINDOW_S,
    Pace,
    expected_s,
    further_trials,
    rounds_of,
    shortest_trial_s,
    typical_overhead_s,
    typical_s,
)
from autotune.protocol.jobs import WindowRules
from autotune.records.trial import TrialRecord, best_of, reference_of
from autotune.settings.budget import Budget
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace
from autotune.study.study import Study, Trial
from autotune.tuning.clock import Clock

__all__ = ["BASELINE_DEADLINE_S", "Timing"]

BASELINE_DEADLINE_S = 600.0
_DEADLINE_FACTOR = 10.0
_MIN_DEADLINE_S = 20.0
_MIN_COMPILE_DEADLINE_S = 120.0
_LOOK_DEADLINE_S = 60.0
_LOOK_SHARE, _MOST_LOOK_SHARE = 0.15, 0.3  # of the time for trials; the larger one where the other is under 4 s
_TELLING_LOOK_S = 4.0
_LOOK_STARTS = 4.0  # of the baseline: a workload that takes long to build gets a look as well
_LONGEST_SHARE = 0.3  # of the time for trials: what one that is proposed may need
_FEWEST_LAST_RUNS = 3  # the best and the baseline in turns, and the best on the largest samples


@dataclass(slots=True, kw_only=True)
class Timing:
    """The time of a search under way."""

    study: Study
    space: ResolvedSpace
    budget: Budget
    clock: Clock
    slots: Callable[[], int] = lambda: 1
    """Trials that may run at once; asked again before each, since machines come and go."""
    probe_s: float = 1.0
    """What the look before the search took, from which its time is promised."""

    @property
    def most_trials(self) -> int:
        """As many as were asked for; of a grid, left open, every one."""
        is_whole_grid = self.study.method == "grid" and self.budget.n_trials is None
        return self.space.size if is_whole_grid else self.budget.max_trials

    @property
    def may_stop_early(self) -> bool:
        """Whether the search may end before as many have run."""
        return self.budget.may_stop_early and self.study.method != "grid"

    @property
    def begun(self) -> int:
        """Trials so far, those that run included."""
        return len(self.study.records) + len(self.study.running)

    @property
    def slots_now(self) -> int:
        """Trials that may run at once, by now."""
        return max(1, self.slots())

    @property
    def left_for_trials_s(self) -> float | None:
        """Seconds until the confirmation must begin; it needs less where trials come one by one and none has won."""
        left, total, ended = self.clock.left_for_trials_s, self.clock.left_s, self.study.ended
        best = best_of(self.study.records)
        has_winner = best is not None and best.number != 0
        if left is None or total is None or not ended or has_winner or self.slots_now > 1:
            return left
        return max(left, total - _FEWEST_LAST_RUNS * shortest_trial_s(ended))

    @property
    def has_room(self) -> bool:
        """Whether the time-out, if there is one, leaves time for one trial more."""
        left, ended = self.left_for_trials_s, self.study.ended
        return left is None or not ended or left >= shortest_trial_s(ended)

    def is_near_its_end(self, most_trials: int, closing: int) -> bool:
        """Whether no more than so many closing trials can still begin, of so many in all."""
        left, ended = self.left_for_trials_s, self.study.ended
        rounds = rounds_of(closing, slots=self.slots_now) + 1
        is_late = left is not None and bool(ended) and left < rounds * typical_s(ended)
        return self.begun >= most_trials - closing or is_late

    def longest_s(self) -> float:
        """What a trial that is proposed may take."""
        left = self.left_for_trials_s
        return inf if left is None else _LONGEST_SHARE * left

    @property
    def look_s(self) -> float:
        """What a look at loader and device alone may take."""
        first = next((record.measurement for record in self.study.records if record.number == 0), None)
        start_s = 0.0 if first is None else first.startup_s
        longest_s, left = max(_LOOK_DEADLINE_S, _LOOK_STARTS * start_s), self.clock.left_for_trials_s
        if left is None:
            return longest_s
        return min(longest_s, max(_LOOK_SHARE * left, min(_TELLING_LOOK_S, _MOST_LOOK_SHARE * left)))

    def deadline_s(self, trial: Trial) -> float:
        """After so many seconds a trial is ended."""
        left = self.left_for_trials_s
        if trial.number == 0:
            return BASELINE_DEADLINE_S if left is None else min(BASELINE_DEADLINE_S, max(left, _MIN_DEADLINE_S))
        wanted = self._usual_deadline_s(trial.config)
        return wanted if left is None else max(1.0, min(wanted, left))

    def guard_deadline_s(self, config: TrainingConfig) -> float:
        """As a trial's; what time the confirmation has may be used up to a half, since nothing unguarded gets there."""
        wanted, left, total = self._usual_deadline_s(config), self.clock.left_for_trials_s, self.clock.left_s
        return wanted if left is None or total is None else max(1.0, min(wanted, max(left, total / 2)))

    def _usual_deadline_s(self, config: TrainingConfig) -> float:
        """Without a time-out: ten times what the reference took."""
        reference = reference_of(self.study.ended)
        least = _MIN_COMPILE_DEADLINE_S if config.compile else _MIN_DEADLINE_S
        return BASELINE_DEADLINE_S if reference is None else max(_DEADLINE_FACTOR * reference.result.own_s, least)

    def window(self, *, is_guided: bool) -> WindowRules:
        """The window of the trial that begins: shorter than usual where the time-out would not leave each its 8 s.

        An open number of trials counts as what a search usually comes to.
        """
        rules, left = WindowRules(), self.left_for_trials_s
        if left is None:
            return rules
        records = self.study.ended
        expected = max(1, len(records)) + further_trials(self._pace(records, is_guided=is_guided))
        to_begin = max(1, (self.budget.n_trials or expected) - self.begun + 1)
        share_s = left / rounds_of(to_begin, slots=self.slots_now, is_first_alone=not records)
        return rules.model_copy(
            update={"max_s": min(rules.max_s, max(SHORTEST_WINDOW_S, share_s - typical_overhead_s(records)))}
        )

    def remaining_s(self, *, is_guided: bool) -> float:
        """An estimate from the trials so far and the confirmation to come, within the time-out."""
        return expected_s(self._pace(self.study.records, is_guided=is_guided))

    def _pace(self, records: Sequence[TrialRecord], *, is_guided: bool) -> Pace:
        return Pace(
            most_trials=self.most_trials,
            may_stop_early=self.may_stop_early,
            records=records,
            slots=self.slots_now,
            probe_s=self.probe_s,
            left_s=self.clock.left_s,
            is_guided=is_guided,
        )
