"""The search itself: ask, run, evaluate, tell, until the budget, the space or the hope of more is used up.

Takes a runner, and a study with its timing; leaves the finished records in the study. Only the runs of trials may be
side by side in threads; all else is done by the calling thread, trial by trial as they end. Composition, like api, from
which alone it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.analysis.early_stopping import lost_race
from autotune.analysis.scoring import evaluate
from autotune.launch.runner import TrialRunner
from autotune.launch.side_by_side import SideBySide
from autotune.note import Note
from autotune.protocol.messages import NO_EXTRAS, Extras, WindowRules
from autotune.records.ceilings import CeilingBook
from autotune.records.precision_check import guard_key
from autotune.records.recommendation import Confirmation
from autotune.records.run_summary import Progress
from autotune.records.stress_check import StressFigures
from autotune.records.trial import Score, TrialRecord, TrialResult, best_of, reference_of, score_value
from autotune.settings.environment import Environment
from autotune.settings.objective import Objective
from autotune.settings.search_space import SettingValue
from autotune.space.constraints import hosts_of
from autotune.space.resolved_space import ResolvedSpace
from autotune.study.proposals import first_guesses, largest_batch_variant, same_batch_variant
from autotune.study.study import Study, Trial
from autotune.tuning.extra_measurements import extras_of, with_ceilings
from autotune.tuning.failure_attribution import Blame
from autotune.tuning.model_proposer import Guide
from autotune.tuning.precision_check import PrecisionGuard, guarded_settings
from autotune.tuning.time_budget import Timing

__all__ = ["Show", "Tuning"]

_PATIENCE = 12
_GUIDED_PATIENCE = 6  # of those that a model holds the most promising
_PATIENT_AFTER = 4
_WORTH = 1.01
_CLOSING_TRIALS = 3  # the last ones, of which two may be needed for what the sampler has left open

Show = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A trial that has run, and what it was asked for beside its window."""

    trial: Trial
    extras: Extras
    result: TrialResult


@dataclass(slots=True)
class Tuning:
    """A search under way."""

    timing: Timing
    runner: TrialRunner
    limit_bytes: int
    show: Show
    on_record: Callable[[TrialRecord], None]
    """Called after each trial, to keep its record."""
    notes: list[Note | str] = field(default_factory=list)
    stopped_because: str = ""
    is_interrupted: bool = False
    """Something ended the search before it was over."""
    is_confirmed: bool = False
    """The finalists were measured again to the end; what may still be missing is the stress run."""
    confirmations: list[Confirmation] = field(default_factory=list)
    """What the confirmation has seen so far."""
    stresses: dict[int, StressFigures] = field(default_factory=dict)
    """What stress runs have seen, by the trial's number."""
    overloaded: dict[int, str] = field(default_factory=dict)
    """Why a stress run refutes a configuration, by the trial's number."""
    ceilings: CeilingBook = field(default_factory=CeilingBook)
    first: list[dict[str, SettingValue]] = field(default_factory=list)
    """What is tried right after the baseline, whatever proposes the rest; of a search that goes on, what it has not
    tried yet."""
    promised_s: float | None = None
    """What the search was expected to take before it began; None where it goes on from an earlier sitting."""
    guide: Guide | None = None
    """The model that proposes trials; None where the study's sampler alone does."""
    blame: Blame = field(default_factory=Blame)
    guard: PrecisionGuard = field(init=False)
    proposed_same_batch: dict[str, SettingValue] | None = None
    proposed_largest: dict[str, SettingValue] | None = None

    def __post_init__(self) -> None:
        """Take up what the records of an earlier sitting hold."""
        self.guard = PrecisionGuard(self.runner, self.space.baseline)
        for record in self.study.ended:
            self.guard.recall(record)
            with_ceilings(record.result, record.config, self.ceilings)
            if record.is_refused and record.outcome == "diverged":
                self._leave_out(record)

    @property
    def study(self) -> Study:
        """The study that is told of every trial."""
        return self.timing.study

    @property
    def space(self) -> ResolvedSpace:
        """What is searched."""
        return self.timing.space

    @property
    def objective(self) -> Objective:
        """What counts as better."""
        return self.space.objective

    @property
    def environment(self) -> Environment:
        """The machine."""
        return self.space.environment

    @property
    def baseline(self) -> TrialRecord | None:
        """The baseline's record, once it has run."""
        return next((record for record in self.study.records if record.number == 0), None)

    @property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score so far."""
        return best_of(self.study.records)

    def search(self) -> None:
        """Run trials until the budget, the space or the hope of more is used up.

        The baseline runs alone, since all others refer to it. What ends the search while others run is raised at once:
        to close the launcher ends those.

        Raises:
            WorkloadError: the user's code fails in the baseline.
            RepeatedFailureError: the same exception ended three configurations, and no one setting explains it.
            LauncherError: a trial can't be started.
            RunFolderError: a trial's record can't be kept.
        """
        for record in self.study.ended:
            self.blame.learn(record, self.study, self.notes)
        for params in self.first:
            self.study.propose(params)
        if not self.study.records:
            if self.study.method in {"tpe", "gp"}:
                self._guess()
            self.promised_s = self._remaining_s
        self._show(None)
        with SideBySide[_Run](self.timing.most_trials) as under_way:
            while (trial := self._next(under_way)) is not None:
                is_alone = len(under_way) == 0 and self._most_at_once == 1
                under_way.begin(self._run_of(trial), is_alone=is_alone)

    def _next(self, under_way: SideBySide[_Run]) -> Trial | None:
        """The next trial as soon as a slot is free; None once no further one is to run and none is under way."""
        while True:
            trial = self._ask() if self._hosts_taken < self._most_at_once else None
            if trial is not None or len(under_way) == 0:
                return trial
            self._finish(under_way.next_ended())  # what it brings may be a reason to go on after all

    def _ask(self) -> Trial | None:
        if self.is_over():
            return None
        self._propose_promising()
        trial = self.study.ask() if self.guide is None else self.study.ask(self.guide.doubt)
        if trial is None:
            self.stopped_because = "every configuration of the space was measured"
        return trial

    def _run_of(self, trial: Trial) -> Callable[[], _Run]:
        """The trial's run as a call, which may be made in another thread: it touches neither study nor tuning."""
        runner, window, deadline_s = self.runner, self._window, self.timing.deadline_s(trial)
        extras = self._extras_of(trial, window)
        name, bar = f"trial-{trial.number:03d}", None if self.guide is None else self.guide.bar_of(trial)

        def run() -> _Run:
            result = runner.run(
                trial.config,
                name=name,
                deadline_s=deadline_s,
                window=window,
                extras=extras,
                should_end=None if bar is None else lambda blocks: lost_race(blocks, bar),
            )
            return _Run(trial=trial, extras=extras, result=result)

        return run

    def _extras_of(self, trial: Trial, window: WindowRules) -> Extras:
        """A guided search has looked at either side alone: beside the baseline only groups of devices do so again.

        What holds a group no look has shown, and where it loses, no confirmation will.
        """
        if self.guide is not None and trial.number != 0 and trial.config.world_size == 1:
            return NO_EXTRAS
        return extras_of(trial.config, self.ceilings, window, is_baseline=trial.number == 0)

    def _guess(self) -> None:
        """Propose what an expert would try."""
        for guess in first_guesses(self.space):
            self.study.propose(guess)

    def _propose_promising(self) -> None:
        """Have the model propose, unless proposals wait; once, before it does, let it look at loader and device."""
        if self.guide is None or self.baseline is None or self.study.has_waiting:
            return
        if self.guide.looks is None:
            remark = self.guide.look(self.runner, self.timing.look_s, self.ceilings)
            if remark is not None:
                self.notes.append(remark)
                self.guide = None  # a model that has seen neither side would only guess
                self._guess()
                return
        self.guide.propose(self.best)

    def _finish(self, run: _Run) -> None:
        trial = run.trial
        result = with_ceilings(run.result, trial.config, self.ceilings, asked=run.extras)
        score = self._evaluate(TrialRecord(number=trial.number, config=trial.config, result=result))
        if score is not None and score.feasible:
            result = self.guard.judge(trial.config, result, deadline_s=self.timing.guard_deadline_s(trial.config))
        record = self.study.tell(trial, result, score if result.outcome == "ok" else None)
        if record.is_refused:
            self._leave_out(record)
        self.on_record(record)
        try:
            self.blame.learn(record, self.study, self.notes)
        finally:
            self._show(record)  # with an outlook that knows what was left out

    def _leave_out(self, record: TrialRecord) -> None:
        """Propose nothing more of a precision that the guard has refused, and say so once."""
        self.study.refuse(guarded_settings(record.config))
        dtype, is_compiled = guard_key(record.config)
        note = f"{dtype}{' with compile' if is_compiled else ''} was left out: {record.result.reason}"
        if note not in self.notes:
            self.notes.append(note)

    def _evaluate(self, record: TrialRecord) -> Score | None:
        if record.measurement is None:
            return None
        reference = reference_of(self.study.ended) or record
        assert reference.measurement is not None  # noqa: S101 - a reference has one by its definition
        return evaluate(record.measurement, reference.measurement, self.objective, self.limit_bytes)

    def is_over(self) -> bool:
        """Whether no further trial is to begin; `stopped_because` says why."""
        records, timing = self.study.ended, self.timing
        if timing.begun >= timing.most_trials:
            asked = f"{timing.begun} trials were asked for"
            self.stopped_because = asked if timing.budget.n_trials else f"{timing.most_trials} trials are the most"
        elif not timing.has_room:
            self.stopped_because = f"the time-out of {timing.budget.timeout_s:g} s leaves no room for another trial"
        elif timing.may_stop_early and (reason := self._why_enough(records)) and not self._has_more(records):
            self.stopped_because = reason
        else:
            self._propose_last(records)
            return False
        return True

    @property
    def _hosts_taken(self) -> int:
        """Slots of the trials that run: a group that lies on several hosts takes as many."""
        return sum(hosts_of(trial.config, self.environment) for trial in self.study.running)

    @property
    def _most_at_once(self) -> int:
        return self.timing.slots_now if self.study.records else 1

    def _why_enough(self, records: Sequence[TrialRecord]) -> str:
        """Why no further trial is worth its time, in a clause; "" where one may be."""
        if self._has_settled(records):
            whose = "of those that promised most" if self._is_led else "trials"
            return f"the last {self._patience} {whose} brought less than 1 %"
        return "" if self.guide is None else self.guide.why_enough(self.best)

    def _has_more(self, records: Sequence[TrialRecord]) -> bool:
        """Whether something is still to be tried before the end: the closing trials, or what was proposed before."""
        self._propose_closing(records)
        return self.study.has_waiting

    @property
    def _patience(self) -> int:
        """Trials without a gain that end a search which may stop by itself; where a model leads, of its proposals."""
        return _PATIENCE if self.guide is None or self.guide.looks is None else _GUIDED_PATIENCE

    @property
    def _is_led(self) -> bool:
        """Whether a model proposes what promises most: it has looked, and something is feasible."""
        return self.guide is not None and bool(self.guide.looks) and self.best is not None

    def _has_settled(self, records: Sequence[TrialRecord]) -> bool:
        tries = self.study.promising if self._is_led else records
        if len(tries) < self._patience or len(records) < self._patience + _PATIENT_AFTER:
            return False
        before, now = best_of(records[: records.index(tries[-self._patience])]), best_of(records)
        if now is None or before is None:
            return now is None
        return score_value(now) < _WORTH * score_value(before)

    def _propose_last(self, records: Sequence[TrialRecord]) -> None:
        timing = self.timing
        most = self._patience + _PATIENT_AFTER if timing.may_stop_early else timing.most_trials
        if timing.is_near_its_end(most, _CLOSING_TRIALS):
            self._propose_closing(records)

    def _propose_closing(self, records: Sequence[TrialRecord]) -> None:
        """Have the best settings tried at the user's own global batch, and at the largest that fits."""
        best = self.best
        if best is None:
            return
        if self.guide is not None:
            self.guide.propose_same_batch(best)
        params = same_batch_variant(best, self.space)
        if params is not None and params != self.proposed_same_batch:
            self.proposed_same_batch = dict(params)
            self.study.propose(params)
        params = largest_batch_variant(best, self.space, records, self.limit_bytes)
        if params is not None and params != self.proposed_largest:
            self.proposed_largest = dict(params)
            self.study.propose(params)

    def _show(self, last: TrialRecord | None) -> None:
        records = self.study.records
        self.show(
            Progress(
                phase="search",
                done=len(records),
                total=self.timing.most_trials,
                elapsed_s=self.timing.clock.elapsed_s,
                remaining_s=self._remaining_s,
                baseline=self.baseline,
                best=self.best,
                last=last,
                can_win=None if self.guide is None else self.guide.can_win(self.best),
            )
        )

    @property
    def _remaining_s(self) -> float:
        return self.timing.remaining_s(is_guided=self.guide is not None)

    @property
    def _window(self) -> WindowRules:
        return self.timing.window(is_guided=self.guide is not None)
