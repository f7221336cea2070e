"""The end of a search: finalists and baseline measured again in turns, and the winner run on the largest samples.

Comes in: a SearchOutcome, a runner and the clock. Goes out: a ConfirmationOutcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from autotune.analysis.confirmation_plan import ROUNDS, ConfirmationPlan, plan_confirmation
from autotune.analysis.memory_line import largest_batch_note
from autotune.analysis.scoring import evaluate
from autotune.analysis.selection_rules import ratio_of
from autotune.analysis.time_estimate import overhead_s
from autotune.launch.runner import TrialRunner
from autotune.note import Note, note
from autotune.protocol.jobs import NO_EXTRAS, WindowRules
from autotune.records.ceilings import CeilingBook
from autotune.records.recommendation import Confirmation
from autotune.records.run_summary import Progress
from autotune.records.stress_check import StressFigures
from autotune.records.trial import TrialRecord, score_value
from autotune.space.domains import whole_numbers
from autotune.tuning.extra_measurements import everything, with_ceilings
from autotune.tuning.outcomes import LEAST_GAIN, ConfirmationOutcome, SearchOutcome
from autotune.tuning.selection import Contenders, baseline_of, challengers, feasible_baseline
from autotune.tuning.stress_check import MOST_STRESSED, check_under_stress, reserve_s
from autotune.tuning.time_budget import Clock, repeat_deadline_s

__all__ = ["Finals"]

_FINALISTS = 3
"""Configurations measured again beside the baseline: our own convention; more rounds of fewer tell more."""
_FINALIST_SHARE = 0.93
"""Share of the best trial's score from which another may be as good: our own convention."""
_MOST_ROUNDS = 6
"""Rounds where three leave a gain open: our own convention; they halve the interval's square."""
_PRECISION = 0.015
"""Relative half-width of a run's interval at which its window ends: our own convention, above that between runs."""
_GRACE_S = 5.0
"""Past what is left of a time-out, so that the last run is not lost for a moment: our own convention."""


@dataclass(slots=True)
class _Entrant:
    """A configuration in the rounds, with its runs so far."""

    record: TrialRecord
    runs: list[TrialRecord] = field(default_factory=list)

    @property
    def overhead_s(self) -> float:
        """Seconds that a run of it takes outside its window: the most that one took here, else as its trial did."""
        beyond = (overhead_s(run) for run in self.runs if run.measurement is not None)
        return max(beyond, default=overhead_s(self.record))

    @property
    def is_feasible(self) -> bool:
        """Whether it still may win; one that ran into a deadline may."""
        return all(run.is_feasible or run.outcome == "timeout" for run in self.runs)

    def confirmation(self) -> Confirmation:
        """Its runs as a value."""
        rounds = tuple(run.measurement for run in self.runs)
        number, config = self.record.number, self.record.config
        return Confirmation(number=number, config=config, rounds=rounds, is_feasible=self.is_feasible)


@dataclass(slots=True, kw_only=True)
class Finals:
    """A confirmation under way; `outcome` is what came of it so far."""

    found: SearchOutcome
    runner: TrialRunner
    clock: Clock
    show: Callable[[Progress], None]
    notes: list[Note] = field(default_factory=list)
    _confirmations: list[Confirmation] = field(default_factory=list)
    _rounds: int = 0
    """Rounds that all entrants have ended."""
    _reserved_s: float = 0.0
    """Of the time left, what belongs to the stress run."""
    _planned: int = 0
    """Rounds without which nothing is confirmed."""
    _is_complete: bool = False
    _stresses: dict[int, StressFigures] = field(default_factory=dict)
    _overloaded: list[int] = field(default_factory=list)
    _ceilings: CeilingBook = field(init=False)

    def __post_init__(self) -> None:
        """Keep the search's ceilings as they are: this stage adds to a copy."""
        self._ceilings = deepcopy(self.found.ceilings)

    def run(self) -> ConfirmationOutcome:
        """Measure finalists and baseline in turns, in alternating order, and run the winner on the largest samples.

        Nothing is measured where nobody challenges the baseline. Without a time-out three rounds are planned to take
        80 s, starts included; where starts are slow fewer finalists run, and where two configurations need more they
        get it. With one, rounds and windows shrink to the time that is left, down to one round of the best and the
        baseline. Where three rounds leave open whether 1 % or more is won, up to three further ones follow as long as
        there is time.
        """
        if finalists := self._finalists():
            self._measure_in_turns(finalists)
            self._stress_winner()
        self._note_memory()
        self._is_complete = True
        return self.outcome()

    def outcome(self) -> ConfirmationOutcome:
        """What was measured so far."""
        is_measured = self._rounds > 0 and self._rounds >= self._planned
        is_unchallenged = self._is_complete and not challengers(self.found)
        refuted = {"is_feasible": False}
        return ConfirmationOutcome(
            confirmations=tuple(
                entrant.model_copy(update=refuted) if entrant.number in self._overloaded else entrant
                for entrant in self._confirmations
            ),
            stresses=dict(self._stresses),
            overloaded=tuple(self._overloaded),
            notes=tuple(self.notes),
            is_confirmed=is_measured or is_unchallenged,
            is_complete=self._is_complete,
        )

    def _finalists(self) -> list[TrialRecord]:
        """The best challenger, the best that keeps the baseline's global batch, then others that may be as good."""
        better = challengers(self.found)
        wanted = self.found.space.baseline.global_batch_size
        same_batch = [record for record in better if record.config.global_batch_size == wanted]
        near = [record for record in better if _is_near(record, better[0])]
        wished = [*better[:1], *same_batch[:1], *near[1:]]
        return list({record.number: record for record in wished}.values())[:_FINALISTS]

    def _measure_in_turns(self, finalists: Sequence[TrialRecord]) -> None:
        """Run the rounds. What was planned and can't follow any more is not missing: nothing is left to be compared.

        What has failed is not run again. Where runs take longer than planned, later windows are shorter: the stress
        run keeps its time. A further round counts once it is whole.
        """
        wanted = [_Entrant(record) for record in (*feasible_baseline(self.found), *finalists)]
        has_baseline = wanted[0].record.number == 0
        self._reserved_s = reserve_s(finalists[0], self.clock.left_s or 0.0)
        overheads_s = [entrant.overhead_s for entrant in wanted]
        plan = plan_confirmation(overheads_s, self._left_s, has_baseline=has_baseline)
        entrants, left_out = wanted[: plan.entrants], wanted[plan.entrants :]
        self._planned = rounds = plan.rounds
        self.notes.extend(note("finalist_left_out", trial=entrant.record.number) for entrant in left_out)
        for number in range(_MOST_ROUNDS):
            alive = [entrant for entrant in entrants if entrant.is_feasible]
            is_further = number >= rounds
            is_decided = is_further and not (rounds == ROUNDS and _is_open(self._confirmations))
            if is_decided or len(alive) < min(2, len(entrants)):
                break
            if number > 0:
                overheads_s = [entrant.overhead_s for entrant in alive]
                rounds_left = 1 if is_further else rounds - number
                in_time = plan.for_round(overheads_s, self._left_s, rounds_left)
                if in_time is None or (is_further and in_time != plan):
                    break
                plan = in_time
            if not self._measure_round(entrants, alive, number, plan):
                break
        self._planned = min(self._planned, self._rounds)

    def _measure_round(
        self, entrants: Sequence[_Entrant], alive: Sequence[_Entrant], number: int, plan: ConfirmationPlan
    ) -> bool:
        """Run each entrant that is alive once; whether there was time for all."""
        rounds = self._planned
        for entrant in alive if number % 2 == 0 else alive[::-1]:
            left_s = self._left_s
            if number > 0 and left_s is not None and left_s < entrant.overhead_s:
                return False
            entrant.runs.append(self._run_again(entrant.record, number, plan))
            if number < rounds:
                self._keep(entrants)
            done = sum(len(other.runs) for other in entrants)
            left = sum(max(rounds, number + 1) - len(other.runs) for other in entrants if other.is_feasible)
            self._show(entrant, done, done + left)
        self._keep(entrants)
        self._rounds = number + 1
        return True

    def _keep(self, entrants: Sequence[_Entrant]) -> None:
        self._confirmations = [entrant.confirmation() for entrant in entrants if entrant.runs]

    @property
    def _left_s(self) -> float | None:
        """Seconds until the stress run must begin; None where there is no time-out."""
        left = self.clock.left_s
        return None if left is None else left - self._reserved_s

    def _run_again(self, record: TrialRecord, number: int, plan: ConfirmationPlan) -> TrialRecord:
        left_s, deadline_s = self.clock.left_s, repeat_deadline_s(record) + 2 * plan.window_s
        window = WindowRules(max_s=plan.window_s, precision=_PRECISION)
        extras = everything(window) if number == 0 and plan.has_extras else NO_EXTRAS
        result = self.runner.run(
            record.config,
            name=f"confirmation-{record.number:03d}-{number + 1}",
            deadline_s=deadline_s if left_s is None else min(deadline_s, left_s + _GRACE_S),
            window=window,
            extras=extras,
        )
        result = with_ceilings(result, record.config, self._ceilings, asked=extras)
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
        would, does = Contenders.of(self.found, sure).chosen, Contenders.proven(self.found, sure).chosen
        if would is None or does is None or would.number == 0 or would.number in sure.stresses:
            return
        is_recommended = does.number == would.number
        self.notes.append(note("stress_not_tried", trial=would.number, is_recommended=is_recommended))

    def _note_memory(self) -> None:
        """Note the biggest micro batch that stays within the limit."""
        chosen = Contenders.proven(self.found, self.outcome()).chosen
        if chosen is None:
            return
        largest = largest_batch_note(
            self.found.records,
            chosen.config,
            self.found.space.limit_bytes,
            batches=whole_numbers(self.found.space.domains["micro_batch_size"]),
            counts_workers=self.found.space.environment.has_only_ram,
            overloaded=self._overloaded,
        )
        if largest is not None:
            self.notes.append(largest)

    def _show(self, entrant: _Entrant, done: int, total: int) -> None:
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


def _is_near(record: TrialRecord, best: TrialRecord) -> bool:
    """Whether a trial is close to the best one, or may be as far as its interval tells."""
    if record.measurement is None or best.measurement is None:
        return False
    high, low = record.measurement.samples_per_s_ci[1], best.measurement.samples_per_s_ci[0]
    return high >= low or score_value(record) >= _FINALIST_SHARE * score_value(best)


def _is_open(confirmations: Sequence[Confirmation]) -> bool:
    """Whether the fastest seems to win 1 % or more over the baseline, but noise may be all there is."""
    alive = [entrant for entrant in confirmations if entrant.is_feasible and entrant.runs]
    reference = baseline_of(alive)
    if reference is None or len(alive) < 2:
        return False
    fastest = max((entrant for entrant in alive if entrant.number != 0), key=lambda entrant: entrant.samples_per_s)
    ratio = ratio_of(fastest, reference)
    return ratio is not None and ratio.value >= 1 + LEAST_GAIN and ratio.low <= 1
