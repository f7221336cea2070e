"""The end of a search: finalists and baseline measured again in turns, and the winner run on the largest samples.

Comes in: a SearchOutcome, a runner and the clock. Goes out: a ConfirmationOutcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import fmean, median

from autotune.analysis.decisions.confirmation_plan import (
    MOST_ROUNDS,
    ConfirmationPlan,
    brief_confirmation,
    is_look,
    plan_confirmation,
    spent_error,
    window_length_s,
)
from autotune.analysis.decisions.elimination import worth_going_on
from autotune.analysis.decisions.run_spread import variance_of_a_second
from autotune.analysis.decisions.selection_rules import ONE_SIDED_ERROR, simplest_of_the_best
from autotune.analysis.memory.lines import largest_batch_note
from autotune.analysis.scoring import evaluate
from autotune.launch.launcher import begin_anew
from autotune.launch.runner import TrialRunner
from autotune.note import Note, note
from autotune.protocol.jobs import NO_EXTRAS, WindowRules
from autotune.records.ceilings import CeilingBook
from autotune.records.recommendation import Confirmation
from autotune.records.run_summary import Progress
from autotune.records.stress_check import StressFigures
from autotune.records.trial import TrialRecord
from autotune.space.domains import whole_numbers
from autotune.tuning.checks.stress import MOST_STRESSED, check_under_stress, reserve_s
from autotune.tuning.contenders import Contenders
from autotune.tuning.entrant import Entrant, hung_among, overheads_s_of, taken_s_of
from autotune.tuning.extra_measurements import everything, with_ceilings
from autotune.tuning.outcomes import ConfirmationOutcome, SearchOutcome, disturbances
from autotune.tuning.time_budget import Clock, repeat_deadline_s

__all__ = ["Finals"]

_FINALISTS = 3
"""Configurations measured again beside the baseline: our own convention; more rounds of fewer tell more."""
_FINALIST_SHARE = 0.93
"""Share of the best trial's score from which another may be as good: our own convention."""
_PRECISION = 0.005
"""Relative half-width of a window's interval at which it ends before its planned length: our own convention."""
_GRACE_S = 5.0
"""Past what is left of a time-out, so that the last run is not lost for a moment: our own convention."""


@dataclass(slots=True, kw_only=True)
class Finals:
    """A confirmation under way; `outcome` is what came of it so far."""

    found: SearchOutcome
    runner: TrialRunner
    clock: Clock
    show: Callable[[Progress], None]
    notes: list[Note] = field(default_factory=list)
    _confirmations: list[Confirmation] = field(default_factory=list)
    """As of the last look: what later rounds have brought counts from the next one on."""
    _reserved_s: float = 0.0
    """Of the time left, what belongs to the stress run."""
    _used: float = 0.0
    """Share of the time, and with it of the error, that was used at the last look."""
    _error: float = ONE_SIDED_ERROR
    """The last look's one-sided error, of each entrant."""
    _is_complete: bool = False
    _stresses: dict[int, StressFigures] = field(default_factory=dict)
    _overloaded: list[int] = field(default_factory=list)
    _ceilings: CeilingBook = field(init=False)
    _searched: SearchOutcome = field(init=False)  # `found` learns from the rounds
    _last: int | None = None  # number of the trial that was run again last

    def __post_init__(self) -> None:
        """Keep the search's ceilings as they are: this stage adds to a copy."""
        self._ceilings, self._searched = deepcopy(self.found.ceilings), self.found

    def run(self) -> ConfirmationOutcome:
        """Measure finalists and baseline in turns, in alternating order, and run the winner on the largest samples.

        Nothing is measured where nobody challenges the baseline. Rounds go on until a look at the figures shows that
        all is decided, or until the time is used: 80 s without a time-out, though three rounds follow in any case, of
        fewer finalists where runs take long, and one in a brief search. With a time-out, rounds and windows shrink
        to the time that is left, down to one round of the best and the baseline.
        """
        if finalists := self._finalists():
            self._measure_in_turns(finalists)
            self._stress_winner()
        self._note_memory()
        self._is_complete = True
        return self.outcome()

    def outcome(self) -> ConfirmationOutcome:
        """What was measured so far."""
        is_unchallenged = self._is_complete and not self.found.challengers
        refuted = {"is_feasible": False}
        return ConfirmationOutcome(
            confirmations=tuple(
                entrant.model_copy(update=refuted) if entrant.number in self._overloaded else entrant
                for entrant in self._confirmations
            ),
            stresses=dict(self._stresses),
            overloaded=tuple(self._overloaded),
            notes=tuple(self.notes),
            is_confirmed=self._used > 0 or is_unchallenged,
            one_sided_error=self._error,
            is_complete=self._is_complete,
        )

    def _finalists(self) -> list[TrialRecord]:
        """The best challenger, the best at the baseline's global batch and at a larger one, the simplest of the best.

        Then others that may be as good as the best, the second best first. Where not all may run, the best at the
        baseline's global batch goes before a larger one that its trial does not show to be worth it.
        """
        better = self.found.challengers
        believed = self.found.believed_score
        near = [record for record in better if believed(record) >= _FINALIST_SHARE * believed(better[0])]
        same_batch = [record for record in better if self.found.batch_ratio(record.config) == 1]
        larger_batch = [record for record in near if self.found.batch_ratio(record.config) > 1]
        simplest = [simplest_of_the_best(near, self.found.believed_score)] if near else []
        first = better[:1] if self._is_worth_its_place(better, same_batch) else same_batch[:1]
        wished = [*first, *better[:1], *same_batch[:1], *larger_batch[:1], *simplest, *near[1:]]
        return list({record.number: record for record in wished}.values())[:_FINALISTS]

    def _is_worth_its_place(self, better: Sequence[TrialRecord], same_batch: Sequence[TrialRecord]) -> bool:
        """Whether the best is no larger batch, or its trial shows it to be worth it beside the best at the own one."""
        if self.found.is_brief or not same_batch or self.found.batch_ratio(better[0].config) <= 1:
            return True  # in a brief one no other would run beside it
        known = Contenders.of(self.found, ConfirmationOutcome())
        trials = {trial.number: trial for trial in known.trials}
        return known.is_worth_it(trials[better[0].number], trials[same_batch[0].number])

    def _measure_in_turns(self, finalists: Sequence[TrialRecord]) -> None:
        """Run rounds until all is decided or the time is used. What has failed, or is behind, is not run again."""
        build_s, own = self.found.build_s, self.found.feasible_baseline
        wanted = [Entrant(record, build_s=build_s) for record in (*own, *finalists)]
        self._reserved_s = reserve_s(finalists[0], self.clock.left_s or 0.0, build_s)
        overheads_s, window_s = [entrant.overhead_s for entrant in wanted], self._window_s(wanted)
        plan = plan_confirmation(overheads_s, self._left_s, window_s, has_baseline=bool(own))
        plan = brief_confirmation(len(wanted)) if self.found.is_brief else plan
        entrants, left_out = wanted[: plan.entrants], wanted[plan.entrants :]
        self.notes.extend(note("finalist_left_out", trial=entrant.record.number) for entrant in left_out)
        running = entrants
        for number in range(MOST_ROUNDS if plan.rounds else 0):
            hung = hung_among(entrants)
            alive = [entrant for entrant in running if entrant.is_feasible and entrant.record.number not in hung]
            if len(alive) < min(2, len(entrants)):
                break
            overheads_s = overheads_s_of(alive, entrants)
            in_time = plan if number == 0 else plan.for_round(overheads_s, taken_s_of(entrants), self._left_s, number)
            if in_time is None or not self._measure_round(entrants, alive, number, in_time):
                break
            if is_look(number + 1):
                used = max(taken_s_of(entrants) / plan.budget_s, (number + 1) / MOST_ROUNDS)
                go_on = self._look(entrants, alive, used)
                running = [entrant for entrant in alive if entrant.record.number in {0, *go_on}]
                if not go_on:
                    return
        if entrants[0].runs and self._used < 1:
            self._look(entrants, [], 1.0)

    def _window_s(self, entrants: Sequence[Entrant]) -> float:
        measured = [entrant.record.measurement for entrant in entrants if entrant.record.measurement is not None]
        variance, spread = median(map(variance_of_a_second, measured)), self.found.spread
        own = spread.of(run.window.is_held_by_device for run in measured)
        return window_length_s(fmean(entrant.overhead_s for entrant in entrants), variance, own)

    def _look(self, entrants: Sequence[Entrant], alive: Sequence[Entrant], used_fraction: float) -> tuple[int, ...]:
        """Keep what was measured so far as what decides; the challengers for which a further round may change it."""
        challengers = max(1, sum(entrant.record.number != 0 for entrant in entrants))
        before, self._used = self._used, min(used_fraction, 1.0)
        self._error = spent_error(self._used, challengers) - spent_error(before, challengers)
        hung = hung_among(entrants)
        self._confirmations = [
            entrant.confirmation(is_hung=entrant.record.number in hung) for entrant in entrants if entrant.runs
        ]
        self.found = self._searched.taught_by(self._confirmations)
        sound = [entrant for entrant in self._confirmations if entrant.is_feasible and entrant.runs]
        numbers = [entrant.record.number for entrant in alive if entrant.record.number in {one.number for one in sound}]
        if not sound or not numbers:
            return ()
        return worth_going_on(
            sound,
            numbers,
            self.found.spread,
            self._error,
            batches={entrant.number: self.found.batch_ratio(entrant.config) for entrant in sound},
            least=1 + self.found.space.objective.larger_batch_gain,
        )

    def _measure_round(
        self, entrants: Sequence[Entrant], alive: Sequence[Entrant], number: int, plan: ConfirmationPlan
    ) -> bool:
        """Run each entrant that is alive once; whether there was time for all."""
        for entrant in alive if number % 2 == 0 else alive[::-1]:
            left_s, is_due = self._left_s, number > 0 or any(other.runs for other in entrants[1:])
            if is_due and left_s is not None and left_s < overheads_s_of([entrant], entrants)[0]:
                return False
            is_known = number == 0 and self.found.was_run_apart(entrant.record)
            entrant.runs.append(entrant.record if is_known else self._run_again(entrant.record, number, plan))
            done = sum(len(other.runs) for other in entrants)
            self._show(entrant, done, done + sum(len(other.runs) == number for other in alive))
        return True

    @property
    def _left_s(self) -> float | None:
        """Seconds until the stress run must begin; None where there is no time-out."""
        left = self.clock.left_s
        return None if left is None else left - self._reserved_s

    def _run_again(self, record: TrialRecord, number: int, plan: ConfirmationPlan) -> TrialRecord:
        left_s, deadline_s = self.clock.left_s, repeat_deadline_s(record, self.found.build_s) + 2 * plan.window_s
        window = WindowRules(max_s=plan.window_s, precision=_PRECISION)
        extras = everything(window) if number == 0 and plan.has_extras else NO_EXTRAS
        begin_anew(self.runner.launcher)
        self._last = record.number
        result = self.runner.run(
            record.config,
            name=f"confirmation-{record.number:03d}-{number + 1}",
            deadline_s=deadline_s if left_s is None else min(deadline_s, left_s + _GRACE_S),
            window=window,
            extras=extras,
        )
        self.notes.extend(disturbances(record.number, result))
        result = with_ceilings(result, record.config, self._ceilings, asked=extras)
        if result.measurement is None:
            failed = {"outcome": result.outcome, "reason": result.reason, "log": result.log}
            self.notes.append(note("finalist_failed", trial=record.number, **failed))
        measured, space = result.measurement, self.found.space
        score = None if measured is None else evaluate(measured, measured, space.objective, space.limit_bytes)
        return TrialRecord(number=record.number, config=record.config, result=result, score=score)

    def _stress_winner(self) -> None:
        """Run the winner on the largest samples; where that refutes it, the next one, a few times.

        Once one was refuted, a run that could not be made is no pass: the next one is tried as well.
        """
        tried: set[int] = set()
        for _ in range(MOST_STRESSED):
            chosen = Contenders.of(self.found, self.outcome(), lambda number: number not in tried).chosen
            if chosen is None or chosen.number == 0:
                break
            record = next(record for record in self.found.records if record.number == chosen.number)
            if self._last != chosen.number:  # another one's process
                begin_anew(self.runner.launcher)
            check = check_under_stress(record, self.found, self.runner, self.clock.left_s)
            self.notes.extend(check.notes)
            if check.figures is not None:
                self._stresses[record.number] = check.figures
            if check.is_refuted:
                self._overloaded.append(record.number)
            if check.figures is not None or not self._overloaded:
                return
            tried.add(record.number)
        self._note_unproven()

    def _note_unproven(self) -> None:
        """Note of the one that would win that it was not run on the largest samples, where others failed there."""
        sure = self.outcome()
        would, does = Contenders.of(self.found, sure).chosen, Contenders.sound(self.found, sure).chosen
        if would is None or does is None or would.number == 0 or would.number in sure.stresses:
            return
        is_recommended = does.number == would.number
        self.notes.append(note("stress_not_tried", trial=would.number, is_recommended=is_recommended))

    def _note_memory(self) -> None:
        """Note the biggest micro batch that stays within the limit."""
        chosen = Contenders.sound(self.found, self.outcome()).chosen
        if chosen is None:
            return
        largest = largest_batch_note(
            self.found.records,
            chosen.config,
            self.found.space.limit_bytes,
            batches=whole_numbers(self.found.space.domains["micro_batch_size"]),
            limit_is_ram=self.found.space.environment.has_only_ram,
            overloaded=self._overloaded,
        )
        if largest is not None:
            self.notes.append(largest)

    def _show(self, entrant: Entrant, done: int, total: int) -> None:
        self.show(
            Progress(
                phase="confirm",
                done=done,
                total=total,
                elapsed_s=self.clock.elapsed_s,
                remaining_s=self.clock.left_s,
                baseline=self.found.baseline,
                best=self.found.best,
                last=entrant.runs[-1],
            )
        )
