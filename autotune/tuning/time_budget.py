"""The time of a search: what is left of a time-out, and what windows, deadlines and parts of the search may take.

Reads the study and the clock, and changes neither. The last part of a time-out is kept to decide
what the best gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median

from autotune.config.plan import ASSUMED_TRAINING_HOURS, Budget
from autotune.config.training_config import TrainingConfig
from autotune.messages.search import (
    costs_more_than_it_saves,
    most_trials,
    no_time_for_a_trial,
    starts_are_slow,
    training_hours_unused,
    trials_asked_for,
    trials_shared,
)
from autotune.models.evidence import variance_of_a_second
from autotune.models.time_estimate import (
    Pace,
    expected_s,
    rounds_of,
    typical_overhead_s,
    typical_run_s,
    typical_s,
)
from autotune.note import Note
from autotune.policy import POLICY, Policy, Time, WindowRules
from autotune.protocol.disk import monotonic
from autotune.records.trial import TrialRecord, reference_of
from autotune.tuning.study import Study


@dataclass(slots=True)
class Clock:
    """The time of a search."""

    timeout_s: float | None
    writing_s: float = field(default=0.0, kw_only=True)
    """Kept at the end to judge and to write what was found."""
    deciding_share: float = field(default=POLICY.time.deciding_share, kw_only=True)
    """Of the time-out, kept to decide what the best gains."""
    started: float = field(default_factory=monotonic)
    now: Callable[[], float] = monotonic

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return self.now() - self.started

    @property
    def left_s(self) -> float | None:
        """Seconds until the last run is to have ended, just before the time-out; None where there is none."""
        return (
            None
            if self.timeout_s is None
            else max(0.0, self.timeout_s - self.writing_s - self.elapsed_s)
        )

    @property
    def left_for_trials_s(self) -> float:
        """Seconds until what decides must begin; without end where there is no time-out."""
        return (
            inf
            if self.timeout_s is None
            else max(0.0, (1 - self.deciding_share) * self.timeout_s - self.elapsed_s)
        )


@dataclass(slots=True, kw_only=True)
class TimeBudget:
    """The time of a search under way."""

    study: Study
    budget: Budget
    clock: Clock
    slots: Callable[[], int] = lambda: 1
    """Trials that may run at once; asked again before each, since machines come and go."""
    probe_s: float = 1.0
    """What the probe before the search took, from which its time is estimated."""
    build_s: float = 0.0
    """As TrialRunner has it."""

    @property
    def policy(self) -> Policy:
        """The numbers that the search decides by."""
        return self.study.space.policy

    @property
    def limits(self) -> Time:
        """Its deadlines and shares of the time."""
        return self.policy.time

    @property
    def shortest_trial_s(self) -> float:
        """Seconds that a further trial takes at the least."""
        return typical_overhead_s(self.study.ended) + self.limits.shortest_window_s

    @property
    def run_s(self) -> float:
        """Seconds of a further run: outside its window, and a window."""
        build_s = self.build_s if self.is_brief else 0.0
        return typical_run_s(self.study.ended, self.limits.shortest_window_s) + build_s

    @property
    def most_trials(self) -> int:
        """As many as were asked for; every combination where the method visits all and the number was left open."""
        is_whole_space = self.study.method.visits_all and self.budget.n_trials is None
        return self.study.space.size if is_whole_space else self.budget.max_trials

    @property
    def may_stop_early(self) -> bool:
        """Whether the search may end before as many have run."""
        return self.budget.may_stop_early and not self.study.method.visits_all

    @property
    def begun(self) -> int:
        """Trials so far, those that run included."""
        return len(self.study.records) + len(self.study.running)

    @property
    def is_brief(self) -> bool:
        """Whether each second counts: trials share a process since starts are slow, and nobody has set a limit."""
        return (
            self.build_s >= self.limits.slow_build_s
            and self.may_stop_early
            and self.budget.timeout_s is None
        )

    def notes(self, *, has_shared: bool) -> Iterator[Note]:
        """For the report: that trials shared a process, and what was assumed or not used of the training to come."""
        hours = self.budget.training_hours
        if self.build_s > 0 and has_shared:
            assumed = None if hours is not None or not self.is_brief else ASSUMED_TRAINING_HOURS
            yield trials_shared(self.build_s, self.is_brief, assumed_hours=assumed)
        if hours is not None and not (self.may_stop_early and self.study.method.has_model):
            yield training_hours_unused(hours)

    @property
    def _brief_trials_s(self) -> float:
        return max(self.limits.brief_builds * self.build_s, self.limits.brief_trials_s)

    @property
    def why_brief_is_over(self) -> Note | None:
        """A brief search has had its time for trials."""
        trials_s = self._brief_trials_s
        has_begun = (
            len(self.study.ended) >= self.policy.trials.fewest and self.study.best is not None
        )
        if not self.is_brief or not has_begun or self.clock.elapsed_s - self.probe_s < trials_s:
            return None
        return starts_are_slow(trials_s, self.build_s)

    @property
    def slots_now(self) -> int:
        """Trials that may run at once, by now."""
        return max(1, self.slots())

    @property
    def left_for_trials_s(self) -> float:
        """Seconds until what decides must begin; it needs less where trials come one by one and none has won."""
        left = self.clock.left_for_trials_s
        total = self.clock.left_s
        ended = self.study.ended
        best = self.study.best
        has_winner = best is not None and best.number != 0
        if total is None or not ended or has_winner or self.slots_now > 1:
            return left
        return max(
            left, total - 2 * (self.shortest_trial_s + self.build_s)
        )  # the best and the baseline

    @property
    def why_over(self) -> Note | None:
        """Why no further trial may begin: the budget's trials or time are used up. None while one may."""
        if self.begun >= self.most_trials:
            if self.budget.n_trials is None:
                return most_trials(self.most_trials)
            return trials_asked_for(self.begun)
        timeout_s = self.budget.timeout_s
        if (
            timeout_s is None
            or not self.study.ended
            or self.left_for_trials_s >= self.shortest_trial_s
        ):
            return None
        return no_time_for_a_trial(timeout_s)

    def why_too_dear(self, gain: float) -> Note | None:
        """Whether a further trial takes longer than the training that is still to come would win by such a gain."""
        trial_s = typical_s(self.study.ended)
        training_s = self.budget.training_s
        if gain * training_s >= trial_s:
            return None
        return costs_more_than_it_saves(trial_s, gain_s=gain * training_s, training_s=training_s)

    def is_near_its_end(self, most_trials: int, closing: int) -> bool:
        """Whether no more than so many closing trials can still begin, of so many in all."""
        left = self.left_for_trials_s
        ended = self.study.ended
        rounds = rounds_of(closing, slots=self.slots_now) + 1
        is_late = bool(ended) and left < rounds * typical_s(ended)
        return self.begun >= most_trials - closing or is_late

    def longest_s(self) -> float:
        """What a trial that is proposed may take."""
        return self.limits.longest_share * self.left_for_trials_s

    @property
    def sides_s(self) -> float:
        """What measuring loader and device alone may take."""
        starts_s = (
            run.measurement.startup_s
            for run in self.study.records
            if run.number == 0 and run.measurement
        )
        limits = self.limits
        left = self.clock.left_for_trials_s
        longest_s = (
            max(limits.sides_s, limits.sides_starts * next(starts_s, 0.0))
            + limits.build_factor * self.build_s
        )
        least_s = min(limits.telling_sides_s, limits.most_sides_share * left)
        return min(longest_s, max(limits.sides_share * left, least_s))

    def deadline_s(self, trial: TrialRecord) -> float:
        """After so many seconds a trial is ended."""
        left = self.left_for_trials_s
        if trial.number == 0:
            return min(self.limits.baseline_deadline_s, max(left, self.limits.least_deadline_s))
        return max(1.0, min(self.usual_deadline_s(trial.config), left))

    def guard_deadline_s(self, usual_s: float) -> float:
        """For the precision guard of a trial with this usual deadline: up to a half of what is left of a time-out."""
        return (
            usual_s if self.clock.left_s is None else max(1.0, min(usual_s, self.clock.left_s / 2))
        )

    def usual_deadline_s(self, config: TrainingConfig) -> float:
        """Without a time-out: ten times what the reference took."""
        reference = reference_of(self.study.ended)
        least = (
            self.limits.least_compile_deadline_s if config.compile else self.limits.least_deadline_s
        )
        if config.compile and config.compile_mode.startswith("max-autotune"):
            least = self.limits.baseline_deadline_s  # it times kernels for minutes
        if reference is None:
            return self.limits.baseline_deadline_s
        return (
            max(self.limits.deadline_factor * reference.result.own_s, least)
            + self.limits.build_factor * self.build_s
        )

    def may_repeat(self, record: TrialRecord) -> bool:
        """Return True where there is time for a further run of a trial while the search goes on."""
        return self.left_for_trials_s >= record.result.own_s

    def window(self) -> WindowRules:
        """Return the window of the run that begins: as long as its own error is worth beside the run-to-run variation.

        No longer window lowers that, but further runs do: the best length weighs what a start
        takes, and shrinks where a time-out is near. Nor is a window's own error measured to much
        less than what runs differ by: half of that makes the error of a run an eighth larger.

        Source: Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time".
        """
        rules = self.policy.window
        records = self.study.ended
        spread = self.study.spread
        measured = [
            record.measurement for record in records[-20:] if record.measurement is not None
        ]
        own = spread.of(run.window.is_held_by_device for run in measured)
        best_s = self.limits.first_window_s
        if self.is_brief:
            best_s = self.limits.brief_window_s
        elif measured:
            best_s = (
                sqrt(typical_overhead_s(records) * median(map(variance_of_a_second, measured)))
                / own.sd
            )
        longest_s = self.left_for_trials_s / 3 - typical_overhead_s(records)
        max_s = max(
            self.limits.shortest_window_s, min(best_s, self.limits.longest_window_s, longest_s)
        )
        return rules.model_copy(update={"max_s": max_s, "precision": max(rules.precision, own.sd)})

    def remaining_s(
        self, *, has_model: bool, settling_s: float | None = None, is_settling: bool = False
    ) -> float:
        """Estimate the seconds that are left, from the runs so far, within the time-out.

        Args:
            has_model: A model proposes the trials.
            settling_s: What deciding should take; None where nothing is known of that.
            is_settling: Only that is left.
        """
        if is_settling and settling_s is not None:
            return settling_s if self.clock.left_s is None else min(settling_s, self.clock.left_s)
        usual_s = expected_s(
            self._pace(self.study.records, has_model=has_model, settling_s=settling_s)
        )
        if not self.is_brief:
            return usual_s
        trials_s = self.probe_s + self._brief_trials_s - self.clock.elapsed_s
        return min(usual_s, max(0.0, trials_s) + self.build_s + self.limits.brief_end_s)

    def _pace(
        self, records: Sequence[TrialRecord], *, has_model: bool, settling_s: float | None = None
    ) -> Pace:
        return Pace(
            most_trials=self.most_trials,
            may_stop_early=self.may_stop_early,
            records=records,
            slots=self.slots_now,
            probe_s=self.probe_s,
            build_s=self.build_s,
            left_s=self.clock.left_s,
            settling_s=settling_s,
            is_guided=has_model,
        )


def repeat_deadline_s(record: TrialRecord, build_s: float, time: Time) -> float:
    """When a further run of a trial's settings is ended, beyond its window, where no time-out ends it earlier.

    It may have to build the workload, as its trial in a shared process had not.
    """
    return (
        max(time.deadline_factor * record.result.wall_s, time.least_repeat_deadline_s)
        + time.build_factor * build_s
    )
