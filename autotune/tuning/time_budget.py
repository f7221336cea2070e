"""Share out the time of a search: the time left of a time-out, windows, deadlines, parts of the search.

Reads the study and the clock, and changes neither. The last part of a time-out is kept to prove the
gain of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf, sqrt
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
    """Seconds kept at the end to write the result."""
    deciding_share: float = field(default=POLICY.time.deciding_share, kw_only=True)
    """Share of the time-out that is kept to prove the gain of the best."""
    started: float = field(default_factory=monotonic)
    now: Callable[[], float] = monotonic

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return self.now() - self.started

    @property
    def left_s(self) -> float | None:
        """Seconds until the last run must have ended, just before the time-out; None without a time-out."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - self.writing_s - self.elapsed_s)

    @property
    def left_for_trials_s(self) -> float:
        """Seconds until the proof must begin; infinite without a time-out."""
        if self.timeout_s is None:
            return inf
        return max(0.0, (1 - self.deciding_share) * self.timeout_s - self.elapsed_s)


@dataclass(slots=True, kw_only=True)
class TimeBudget:
    """The time of a search under way."""

    study: Study
    budget: Budget
    clock: Clock
    slots: Callable[[], int] = lambda: 1
    """Returns how many trials may run at once; called before each, since machines come and go."""
    probe_s: float = 1.0
    """Seconds of the probe before the search, from which the search's time is estimated."""
    build_s: float = 0.0
    """Seconds to build the workload. Source: `TrialRunner.build_s`."""

    @property
    def policy(self) -> Policy:
        """The numbers that the search decides by."""
        return self.study.space.policy

    @property
    def limits(self) -> Time:
        """The deadlines and shares of time among these numbers."""
        return self.policy.time

    @property
    def shortest_trial_s(self) -> float:
        """The least seconds that another trial takes."""
        return (
            typical_overhead_s(self.study.ended, self.policy.estimates)
            + self.limits.shortest_window_s
        )

    @property
    def run_s(self) -> float:
        """Seconds that a further run of a trial takes, window included."""
        build_s = self.build_s if self.is_short_search else 0.0
        window_s = self.limits.shortest_window_s
        return typical_run_s(self.study.ended, window_s, self.policy.estimates) + build_s

    @property
    def most_trials(self) -> int:
        """The most trials of the search; all combinations if the method visits all and the user set no number."""
        if self.study.method.visits_all and self.budget.n_trials is None:
            return self.study.space.size
        return self.budget.max_trials

    @property
    def may_stop_early(self) -> bool:
        """Return True if the search may end before it has run the most trials."""
        return self.budget.may_stop_early and not self.study.method.visits_all

    @property
    def begun(self) -> int:
        """The number of trials so far, running ones included."""
        return len(self.study.records) + len(self.study.running)

    @property
    def is_short_search(self) -> bool:
        """Return True for a short search: builds are slow, trials share a process, and the user set no limit."""
        return (
            self.build_s >= self.limits.slow_build_s
            and self.may_stop_early
            and self.budget.timeout_s is None
        )

    def notes(self, *, has_shared: bool) -> Iterator[Note]:
        """Yield notes for the report: trials shared a process; training hours were assumed, or not used."""
        hours = self.budget.training_hours
        if self.build_s > 0 and has_shared:
            assumed = ASSUMED_TRAINING_HOURS if hours is None and self.is_short_search else None
            yield trials_shared(self.build_s, self.is_short_search, assumed_hours=assumed)
        if hours is not None and not (self.may_stop_early and self.study.method.has_model):
            yield training_hours_unused(hours)

    @property
    def _short_search_trials_s(self) -> float:
        """Seconds for the trials of a short search."""
        return max(
            self.limits.short_search_builds * self.build_s, self.limits.short_search_trials_s
        )

    @property
    def why_short_search_is_over(self) -> Note | None:
        """The note that a short search has used its time for trials; None before that."""
        if not self.is_short_search or self.study.best is None:
            return None
        if len(self.study.ended) < self.policy.trials.fewest:
            return None
        trials_s = self._short_search_trials_s
        if self.clock.elapsed_s - self.probe_s < trials_s:
            return None
        return starts_are_slow(trials_s, self.build_s)

    @property
    def slots_now(self) -> int:
        """The number of trials that may run at once now."""
        return max(1, self.slots())

    @property
    def left_for_trials_s(self) -> float:
        """Seconds until the proof must begin; it needs less if trials run one by one and none has won."""
        left = self.clock.left_for_trials_s
        total = self.clock.left_s
        best = self.study.best
        has_winner = best is not None and best.number != 0
        if total is None or not self.study.ended or has_winner or self.slots_now > 1:
            return left
        proof_s = 2 * (self.shortest_trial_s + self.build_s)  # one run each of best and baseline
        return max(left, total - proof_s)

    @property
    def why_over(self) -> Note | None:
        """The note that the budget's trials or time are used up; None while another trial may begin."""
        if self.begun >= self.most_trials:
            if self.budget.n_trials is None:
                return most_trials(self.most_trials)
            return trials_asked_for(self.begun)
        timeout_s = self.budget.timeout_s
        if timeout_s is None or not self.study.ended:
            return None
        if self.left_for_trials_s >= self.shortest_trial_s:
            return None
        return no_time_for_a_trial(timeout_s)

    def why_too_dear(self, gain: float) -> Note | None:
        """Return a note if a trial takes longer than a gain would save of the training to come; else None.

        Args:
            gain: Expected gain in throughput, as a share.
        """
        trial_s = typical_s(self.study.ended)
        training_s = self.budget.training_s
        if gain * training_s >= trial_s:
            return None
        return costs_more_than_it_saves(trial_s, gain_s=gain * training_s, training_s=training_s)

    def is_near_its_end(self, most_trials: int, closing: int) -> bool:
        """Return True if only the closing trials can still begin.

        Args:
            most_trials: Trials of the search in all.
            closing: Closing trials among them.
        """
        if self.begun >= most_trials - closing:
            return True
        ended = self.study.ended
        if not ended:
            return False
        rounds = ceil(closing / self.slots_now) + 1
        return self.left_for_trials_s < rounds * typical_s(ended)

    @property
    def longest_s(self) -> float:
        """The most seconds that a proposed trial may take."""
        return self.limits.longest_share * self.left_for_trials_s

    @property
    def sides_s(self) -> float:
        """Seconds that measuring loader and device alone may take."""
        limits = self.limits
        left = self.clock.left_for_trials_s
        start_s = 0.0
        for record in self.study.records:
            if record.number == 0 and record.measurement is not None:
                start_s = record.measurement.startup_s
        longest_s = max(limits.sides_s, limits.sides_starts * start_s)
        longest_s += limits.build_factor * self.build_s
        least_s = min(limits.telling_sides_s, limits.most_sides_share * left)
        return min(longest_s, max(limits.sides_share * left, least_s))

    def deadline_s(self, trial: TrialRecord) -> float:
        """Return the seconds after which a trial is ended."""
        left = self.left_for_trials_s
        if trial.number == 0:
            return min(self.limits.baseline_deadline_s, max(left, self.limits.least_deadline_s))
        return max(1.0, min(self.usual_deadline_s(trial.config), left))

    def guard_deadline_s(self, config: TrainingConfig) -> float:
        """Return the seconds after which a precision guard is ended: at most half the time that is left."""
        usual_s = self.usual_deadline_s(config)
        left_s = self.clock.left_s
        if left_s is None:
            return usual_s
        return max(1.0, min(usual_s, left_s / 2))

    def usual_deadline_s(self, config: TrainingConfig) -> float:
        """Return a trial's deadline without a time-out, in seconds: ten times what the reference took."""
        limits = self.limits
        reference = reference_of(self.study.ended)
        if reference is None:
            return limits.baseline_deadline_s
        least_s = limits.least_deadline_s
        if config.compile:
            least_s = limits.least_compile_deadline_s
        if config.compile and config.compile_mode.startswith("max-autotune"):
            least_s = limits.baseline_deadline_s  # it times kernels for minutes
        deadline_s = max(limits.deadline_factor * reference.result.own_s, least_s)
        return deadline_s + limits.build_factor * self.build_s

    def repeat_deadline_s(self, record: TrialRecord) -> float:
        """Return the seconds after which a repeat is ended, without its window and without a time-out.

        A repeat may have to build the workload, where its trial shared a process that had done so.
        """
        limits = self.limits
        longest_s = limits.deadline_factor * record.result.wall_s
        deadline_s = max(longest_s, limits.least_repeat_deadline_s)
        return deadline_s + limits.build_factor * self.build_s

    def window(self) -> WindowRules:
        """Return the measurement window of the next run.

        A longer window lowers its own error, but not the run-to-run variation, which only further
        runs average out. So the best length balances both, given the overhead of a start, and
        shrinks near a time-out. A window's error need not be much smaller than that variation:
        half of it makes the error of a run an eighth larger.

        Source: Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time".
        """
        limits = self.limits
        rules = self.policy.window
        records = self.study.ended
        measured = [
            record.measurement for record in records[-20:] if record.measurement is not None
        ]
        own = self.study.spread.of(run.window.is_held_by_device for run in measured)
        overhead_s = typical_overhead_s(records, self.policy.estimates)
        best_s = limits.first_window_s
        if self.is_short_search:
            best_s = limits.short_search_window_s
        elif measured:
            variances = [variance_of_a_second(run, self.policy) for run in measured]
            best_s = sqrt(overhead_s * median(variances)) / own.sd
        longest_s = min(limits.longest_window_s, self.left_for_trials_s / 3 - overhead_s)
        max_s = max(limits.shortest_window_s, min(best_s, longest_s))
        return rules.model_copy(update={"max_s": max_s, "precision": max(rules.precision, own.sd)})

    def remaining_s(
        self, *, has_model: bool, settling_s: float | None = None, is_settling: bool = False
    ) -> float:
        """Estimate the seconds that are left, from the runs so far, within the time-out.

        Args:
            has_model: A model proposes the trials.
            settling_s: Seconds that the proof should take; None if unknown.
            is_settling: Only the proof is left.
        """
        if is_settling and settling_s is not None:
            left_s = self.clock.left_s
            return settling_s if left_s is None else min(settling_s, left_s)
        usual_s = expected_s(
            Pace(
                most_trials=self.most_trials,
                may_stop_early=self.may_stop_early,
                records=self.study.records,
                slots=self.slots_now,
                probe_s=self.probe_s,
                build_s=self.build_s,
                left_s=self.clock.left_s,
                settling_s=settling_s,
                is_guided=has_model,
                estimates=self.policy.estimates,
            )
        )
        if not self.is_short_search:
            return usual_s
        trials_s = self.probe_s + self._short_search_trials_s - self.clock.elapsed_s
        return min(usual_s, max(0.0, trials_s) + self.build_s + self.limits.short_search_end_s)
