"""The search itself: ask, run, evaluate, tell, until nothing promises more and it is decided what the best gains.

Comes in: a study with its time budget, a runner, a proposer. Goes out: a SearchOutcome. Runs of
trials may be side by side in threads; all else is done by the calling thread, trial by trial as
they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, exp

from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import SideBySide, begin_anew
from autotune.launch.runner import TrialRunner
from autotune.messages.search import (
    finalist_failed,
    no_recent_gain,
    precision_left_out,
    stress_not_tried,
)
from autotune.models.evidence import Ledger, behind_threshold, believe, run_of, simplest_of_the_best
from autotune.models.memory import largest_batch_note
from autotune.models.statistics import evaluate, memory_fault
from autotune.models.time_estimate import typical_s
from autotune.note import Note
from autotune.policy import Trials, WindowRules
from autotune.protocol.messages import NO_EXTRAS, Extras
from autotune.records.ceilings import CeilingBook
from autotune.records.measurement import Interval
from autotune.records.result import Known, Phase, Progress
from autotune.records.trial import (
    Score,
    StressFigures,
    TrialRecord,
    TrialResult,
    believed_score,
    best_of,
    guard_key,
    reference_of,
)
from autotune.space.constraints import hosts_of
from autotune.space.ranges import whole_numbers
from autotune.space.space import ResolvedSpace
from autotune.tuning.checks import PrecisionGuard, check_under_stress, may_overload
from autotune.tuning.outcomes import (
    FailureAttribution,
    SearchOutcome,
    compilation_domains,
    disturbances,
    is_host_bound,
    list_cures,
)
from autotune.tuning.probe import extras_of, with_ceilings
from autotune.tuning.proposals import (
    Params,
    first_guesses,
    largest_batch_variant,
    same_batch_variant,
)
from autotune.tuning.proposer import Proposer
from autotune.tuning.race import Race
from autotune.tuning.select import Contenders
from autotune.tuning.study import Study
from autotune.tuning.time_budget import TimeBudget, repeat_deadline_s

_THOROUGH_EXTRAS = Extras(
    loader_ceiling=True, device_ceiling=True, copy_ceiling=True, breakdown=True, stretch_s=0.5
)
"""Of what leads at the end, once: what limits it, and where its time goes, by longer stretches of
its sides."""


@dataclass(slots=True, kw_only=True)
class Search:
    """A search under way; `outcome` is what came of it so far."""

    time: TimeBudget
    runner: TrialRunner
    proposer: Proposer
    show: Callable[[Progress], None] = lambda _: None
    on_record: Callable[[TrialRecord], None] = lambda _: None
    """Called after each trial, to keep its record."""
    first: Sequence[Params] = ()
    """What is tried right after the baseline, whatever proposes the rest."""
    notes: list[Note] = field(default_factory=list)
    ceilings: CeilingBook = field(default_factory=CeilingBook)
    failures: FailureAttribution = field(default_factory=FailureAttribution)
    guard: PrecisionGuard = field(init=False)
    ended_because: Note | None = None
    expected_s: float | None = None
    _why_none: Note | None = None
    """Why no trial was asked for last; trials that run may still change it."""
    _best: tuple[Sequence[TrialRecord], Mapping[int, float], TrialRecord | None] | None = None
    """The best, behind the trials and what was believed of them when it was found: it is asked for
    often."""
    _believed: tuple[Sequence[TrialRecord], Mapping[int, float], Mapping[int, float]] | None = None
    """What is believed of each trial, behind the trials and what the proposer believed of them."""
    race: Race = field(init=False)
    _before_s: float = 0.0
    """Seconds of the search before it was interrupted."""
    _stresses: dict[int, StressFigures] = field(default_factory=dict)
    _overloaded: list[int] = field(default_factory=list)
    _is_complete: bool = False
    _cured: set[int] = field(default_factory=set)
    """Trials for which cures of a loop that the host holds were proposed."""
    _asked: dict[int, Extras] = field(default_factory=dict)
    """What the runs under way measure after their windows, by the trial's number."""

    def __post_init__(self) -> None:
        """Take up the records of a search that goes on."""
        self.guard = PrecisionGuard(self.runner, self.space.baseline)
        ledger = Ledger.going_on(
            self.study.prior_spread, self.study.records, self.time.policy.proof
        )
        self.race = Race(
            time=self.time, ledger=ledger, look=self.outcome, passes=self._passes_guard
        )
        self._before_s = max((run.at_s for run in ledger.runs), default=0.0)
        for record in self.study.ended:
            self.guard.recall(record)
            with_ceilings(record.result, record.config, self.ceilings)
            if record.is_refused and record.outcome == "diverged":
                self._leave_out(record)

    @property
    def study(self) -> Study:
        """The study that is told of every trial."""
        return self.time.study

    @property
    def space(self) -> ResolvedSpace:
        """What is searched."""
        return self.study.space

    @property
    def _trials(self) -> Trials:
        return self.time.policy.trials

    @property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score so far, at the rate that is believed of it."""
        ended = self.study.ended
        believed = self.believed
        if self._best is None or self._best[0] is not ended or self._best[1] is not believed:
            self._best = ended, believed, best_of(self.study.records, self._score)
        return self._best[2]

    @property
    def believed(self) -> Mapping[int, float]:
        """Of feasible trials, the logarithm of the rate that is believed: by their own runs where these are several."""
        ended = self.study.ended
        proposed = self.proposer.believed()
        if (
            self._believed is None
            or self._believed[0] is not ended
            or self._believed[1] is not proposed
        ):
            evidence = self.race.ledger.evidence
            repeated = [
                one.number for one in ended if one.is_feasible and evidence.count(one.number) > 1
            ]
            self._believed = (
                ended,
                proposed,
                {**proposed, **{one: evidence.log_rate(one) for one in repeated}},
            )
        return self._believed[2]

    @property
    def _score(self) -> Callable[[TrialRecord], float]:
        """The score of a feasible trial, at the rate that is believed of it."""
        return partial(believed_score, believed=self.believed)

    def run(self) -> SearchOutcome:
        """Run trials until nothing promises more, then decide what the best gains, and check that it fits.

        The baseline runs alone first, since all others refer to it. Where the largest samples
        refute what was settled on, the next one is. An exception ends the search at once, whatever
        else runs: closing the launcher ends the other trials.

        Raises:
            WorkloadError: the user's code fails in the baseline.
            RepeatedFailureError: the same exception ended three configurations, and no one setting
                explains it.
            LauncherError: a trial can't be started.
            RunFolderError: a trial's record can't be kept.
        """
        self._begin()
        self._race()
        while self._is_overloaded():
            self._race()
        self._note_memory()
        self._is_complete = True
        return self.outcome()

    def _race(self) -> None:
        with SideBySide[TrialRecord](self.time.most_trials) as under_way:
            while (run := self._next_run()) is not None or len(under_way) > 0:
                if run is not None:
                    under_way.begin(run, is_alone=len(under_way) == 0 and self._most_at_once == 1)
                    continue
                self._tell(under_way.next_ended())
        self.ended_because = self._why_none

    def outcome(self) -> SearchOutcome:
        """What was measured so far; before the search is over, an interrupted one's."""
        return SearchOutcome(
            space=self.space,
            records=tuple(self.study.records),
            ceilings=self.ceilings,
            notes=tuple(self.notes),
            ended_because=self.ended_because,
            expected_s=self.expected_s,
            spread=self.study.spread,
            evidence=self.race.ledger.evidence,
            believed=dict(self.believed),
            proven=dict(self.race.ledger.proven),
            is_settled=self.race.is_settled,
            run_s=self.time.run_s,
            build_s=self.runner.build_s,
            is_brief=self.time.is_brief,
            stresses=dict(self._stresses),
            overloaded=tuple(self._overloaded),
            is_complete=self._is_complete,
        )

    def _is_overloaded(self) -> bool:
        """Run what was settled on, on the largest samples, where these might not fit; True where that refutes it.

        Once one was refuted, a run that could not be made is no pass, and the next one is tried as
        well.
        """
        found = self.outcome()
        chosen = Contenders.of(found, lambda number: number not in self._stresses).chosen(
            found.settled
        )
        if (
            chosen is None
            or chosen.number == 0
            or len(self._overloaded) >= self._trials.most_stressed
        ):
            return False
        if not self._overloaded and not may_overload(chosen, self.space):
            return False
        begin_anew(self.runner.launcher)
        check = check_under_stress(chosen, found, self.runner, self.time.clock.left_s)
        self.notes.extend(check.notes)
        if check.figures is not None:
            self._stresses[chosen.number] = check.figures
        elif self._overloaded:
            self.notes.append(stress_not_tried(chosen.number))
        if check.is_refuted:
            self._overloaded.append(chosen.number)
        return check.is_refuted

    def _note_memory(self) -> None:
        """Note the biggest micro batch that stays within the limit."""
        found = self.outcome()
        chosen = Contenders.sound(found).chosen(found.settled)
        if chosen is None:
            return
        largest = largest_batch_note(
            self.study.records,
            chosen.config,
            self.space.limit_bytes,
            batches=whole_numbers(self.space.domains["micro_batch_size"]),
            limit_is_ram=self.space.environment.has_only_ram,
            overloaded=self._overloaded,
        )
        if largest is not None:
            self.notes.append(largest)

    def _begin(self) -> None:
        """Propose what comes first; of a search that goes on, learn from the failures that it had."""
        for record in self.study.ended:
            self.notes.extend(self.failures.learn(record, self.study))
        self._enqueue(self.first)
        if not self.study.records:
            self._enqueue(
                first_guesses(self.space) if self.study.method.begins_with_guesses else ()
            )
            self.expected_s = self.time.remaining_s(has_model=self.proposer.has_model)
        self._show(None)

    def _next_run(self) -> Callable[[], TrialRecord] | None:
        """What runs next where a slot is free: the baseline again, a trial, or what the race decides by.

        None: no more for now. What a running trial brings may be a reason to go on after all.
        """
        repeating = [record.config for record in self.study.records if record.number in self._asked]
        running = [*repeating, *(trial.config for trial in self.study.running)]
        taken = sum(hosts_of(config, self.space.environment) for config in running)
        if taken >= self._most_at_once:  # a group that lies on several hosts takes as many slots
            return None
        while not running and (best := self.best) is not None and not self._passes_guard(best):
            pass  # else the search would go on with a precision that may not win
        if self.race.leader is None:
            if self._may_repeat_baseline and self.race.is_baseline_due():
                return self._repeat_of(self.study.records[0], NO_EXTRAS)
            if (trial := self._ask()) is not None:
                return self._run_of(trial)
        if running:  # what decides is measured by itself
            return None
        record = self.race.next_run()
        if record is None:
            return None
        extras = NO_EXTRAS
        if record is self.best and not record.repeats and not self.time.is_brief:
            is_alone = self.proposer.has_model and record.config.world_size == 1
            extras = _THOROUGH_EXTRAS if is_alone else Extras(breakdown=True)
        return self._repeat_of(record, extras)

    @property
    def _may_repeat_baseline(self) -> bool:
        records = self.study.records
        return bool(records) and 0 not in self._asked and self.time.may_repeat(records[0])

    def _repeat_of(self, record: TrialRecord, extras: Extras) -> Callable[[], TrialRecord]:
        """A further run of a trial's settings, as a call for any thread."""
        name = f"trial-{record.number:03d}-again"
        window = self.time.window()
        left_s = self.time.clock.left_s
        deadline_s = (
            repeat_deadline_s(record, self.runner.build_s, self.time.limits) + 2 * window.max_s
        )
        if left_s is not None:
            deadline_s = min(deadline_s, left_s + self.time.limits.grace_s)
        self._asked[record.number] = extras

        def run() -> TrialRecord:
            begin_anew(self.runner.launcher)
            result = self.runner.run(
                record.config, name=name, deadline_s=deadline_s, window=window, extras=extras
            )
            return record.with_run(result)

        return run

    def _ask(self) -> TrialRecord | None:
        """The next trial: what waits, what is proposed, else a sample. None: no more for now."""
        over = self.time.why_over
        enough = None
        if over is None:
            self._propose_cures()
            enough = self._why_enough()
            if enough is not None or self._is_near_its_end:
                self._propose_closing()
            over = None if self.study.has_waiting else enough
        if over is None:
            self._propose()
            if (trial := self.study.ask(self.proposer.skip)) is not None:
                return trial
        self._why_none = over or self.study.none_left
        return None

    def _run_of(self, trial: TrialRecord) -> Callable[[], TrialRecord]:
        """The trial's run as a call for any thread: it touches neither study nor proposer."""
        runner = self.runner
        deadline_s = self.time.deadline_s(trial)
        window = self.time.window()
        extras = self._extras_of(trial, window)
        threshold = self.proposer.pruning_threshold(trial)
        stopping = self.time.policy.stopping
        self._asked[trial.number] = extras

        def run() -> TrialRecord:
            result = runner.run(
                trial.config,
                name=f"trial-{trial.number:03d}",
                deadline_s=deadline_s,
                window=window,
                extras=extras,
                should_end=None
                if threshold is None
                else lambda blocks: behind_threshold(blocks, threshold, stopping),
            )
            return trial.with_run(result)

        return run

    def _evaluate(self, result: TrialResult) -> Score | None:
        measurement = result.measurement
        reference = reference_of(self.study.ended)
        if measurement is None or result.outcome != "ok":
            return None
        compared = (
            measurement
            if reference is None or reference.measurement is None
            else reference.measurement
        )
        return evaluate(measurement, compared, self.space.objective, self.space.limit_bytes)

    def _tell(self, ended: TrialRecord) -> None:
        """Keep the last run of a trial, and show it."""
        number = ended.number
        at_s = self._before_s + self.time.clock.elapsed_s
        is_repeat = len(ended.results) > 1
        result = with_ceilings(
            ended.results[-1], ended.config, self.ceilings, asked=self._asked.pop(number)
        )
        result = result.model_copy(update={"at_s": at_s})
        self.notes.extend(disturbances(number, result))
        if is_repeat:
            result = self._judged(number, result)
        if result.measurement is not None and result.outcome == "ok":
            self.race.ledger.add(run_of(result.measurement, number=number, at_s=at_s))
        if is_repeat:
            # not `ended`, since the precision guard may have answered meanwhile
            self._show(self.study.add_run(number, result))
            return
        record = self.study.tell(ended, result, self._evaluate(result))
        self.on_record(record)
        try:
            self.notes.extend(self.failures.learn(record, self.study))
        finally:
            self._show(record)  # with an outlook that knows what was left out

    def _judged(self, number: int, result: TrialResult) -> TrialResult:
        """A further run's result: one that passes the memory limit refutes its trial, and a failure is noted."""
        if result.measurement is not None and result.outcome == "ok":
            fault = memory_fault(result.measurement, self.space.limit_bytes)
            if fault is not None:
                result = result.model_copy(update={"outcome": "over_memory", "reason": fault})
        if result.outcome != "ok":
            self.notes.append(finalist_failed(number, result.outcome, result.reason, result.log))
        return result

    def _propose(self) -> None:
        """Enqueue what the proposer wants, unless something waits; where it wants nothing, the sampler draws."""
        if self.study.has_waiting or not self.study.records:
            return
        had_model = self.proposer.has_model
        failed = self.proposer.prepare(self.runner, self.time.sides_s, self.ceilings)
        if failed is not None:
            self.notes.append(failed)
        if had_model and not self.proposer.has_model:
            self._enqueue(first_guesses(self.space))  # the model would only guess as well
        elif (proposal := self.proposer.propose(self.best)) is not None:
            self.study.propose(proposal.params, is_promising=proposal.is_promising)

    def _propose_cures(self) -> None:
        """Enqueue what asks less of the host, once each for the first configurations that lead and that it holds.

        After the baseline alone, the model comes first, which knows of the host as well.
        """
        best = self.best
        if (
            best is None
            or best.number in self._cured
            or len(self._cured) == self._trials.cured
            or self.study.has_waiting
        ):
            return
        if (
            len(self.study.ended) < self._trials.before_cures
            or best.measurement is None
            or not is_host_bound(best.measurement)
        ):
            return
        self._cured.add(best.number)
        has_time = (
            self.time.left_for_trials_s >= self._trials.compiling_s and not self.time.is_brief
        )
        if has_time and not self.study.method.visits_all and best.config.world_size == 1:
            domains = compilation_domains(best.measurement, self.space, self.time.budget)
            if domains:
                self.study.widen(domains)

        def fits(config: TrainingConfig) -> bool:
            reason = self.proposer.skip(config)
            return reason is None or reason.code != "would_not_fit"

        self._enqueue(list_cures(best.config, self.space, fits=fits))

    def _propose_closing(self) -> None:
        """Enqueue the best at the baseline's global batch, and at the largest that fits, and a plainer one.

        In a brief search not the largest, whose steps are the longest. The last one is what would
        be recommended in the baseline's place, without idle switches. Each unless it was tried.
        """
        if (best := self.best) is not None:
            largest = largest_batch_variant(best, self.space, self.study.ended)
            same = self.proposer.at_same_batch(best), same_batch_variant(best, self.space)
            others = [
                record for record in self.study.records if record.is_feasible and record.number != 0
            ]
            would_win = simplest_of_the_best(
                others or [best], self._score, worthwhile=self.time.policy.proof.worthwhile
            )
            plainer = self.proposer.plainer(would_win.config)
            self._enqueue((*same, plainer) if self.time.is_brief else (*same, largest, plainer))

    def _enqueue(self, proposals: Iterable[Params | None]) -> None:
        for params in proposals:
            if params is not None:
                self.study.propose(params)

    def _passes_guard(self, leader: TrialRecord) -> bool:
        """Whether the precision of what leads trains as float32 does: where not, no trial of it may win."""
        answer = self.guard.known(leader.config)
        if answer is None:
            usual_s = self.time.usual_deadline_s(leader.config)
            answer = self.guard.ask(leader.config, self.time.guard_deadline_s(usual_s))
            if answer.outcome == "ok":
                self.study.keep_answer(leader.number, answer)
        if answer.outcome == "ok":
            return True
        # also those that ran while it was compared, and those that an interruption kept from being
        # refused
        for record in tuple(self.study.records):
            if record.result.outcome == "ok" and guard_key(record.config) == guard_key(
                leader.config
            ):
                self._leave_out(self.study.keep_answer(record.number, answer))
        return False

    def _leave_out(self, record: TrialRecord) -> None:
        """Try no more of a precision that the guard has refused, and note it once."""
        dtype, mode = guard_key(record.config)
        compiled = {
            "compile": frozenset({bool(mode)}),
            "compile_mode": frozenset({record.config.compile_mode}),
        }
        self.study.leave_out({"amp_dtype": frozenset({dtype}), **compiled})
        left_out = precision_left_out(dtype, mode, record.result.reason)
        if left_out not in self.notes:
            self.notes.append(left_out)

    def _extras_of(self, trial: TrialRecord, window: WindowRules) -> Extras:
        """Where the sides were measured, only groups of devices measure ceilings again, beside the baseline.

        What limits a group can't be measured on one device, and where the group loses, it does not
        run again.
        """
        if self.proposer.has_model and trial.number != 0 and trial.config.world_size == 1:
            return NO_EXTRAS
        is_baseline = trial.number == 0
        return extras_of(
            trial.config, self.ceilings, window, is_baseline=is_baseline, limits=self.time.limits
        )

    @property
    def _most_at_once(self) -> int:
        return self.time.slots_now if self.study.records else 1

    def _why_enough(self) -> Note | None:
        """Why no further trial is worth its time, of a search that may stop early; None where one may be."""
        if not self.time.may_stop_early:
            return None
        return (
            self.time.why_brief_is_over
            or self._why_settled()
            or self.proposer.why_enough(self.best)
        )

    def _why_settled(self) -> Note | None:
        """The last trials brought no gain: of those that were promising, where a model leads."""
        is_led = self.proposer.is_informed and self.best is not None
        records = self.study.ended
        tries = self.study.promising if is_led else records
        patience = self._patience
        if len(tries) < patience or len(records) < patience + (
            1 if self.time.is_brief else self._trials.patient_after
        ):
            return None
        score = self._score
        before = best_of(records[: records.index(tries[-patience])], score)
        now = self.best
        is_won = now is not None and (
            before is None or score(now) >= (1 + self._trials.least_gain) * score(before)
        )
        return None if is_won else no_recent_gain(trials=patience, is_promising=is_led)

    @property
    def _patience(self) -> int:
        usual = (
            self._trials.informed_patience if self.proposer.is_informed else self._trials.patience
        )
        if not self.time.is_brief or not self.study.ended:
            return usual
        return min(
            usual,
            max(
                self._trials.least_patience,
                ceil(self._trials.brief_patience_s / typical_s(self.study.ended)),
            ),
        )

    @property
    def _is_near_its_end(self) -> bool:
        """Whether it is time for the closing trials."""
        most = (
            self._patience + self._trials.patient_after
            if self.time.may_stop_early
            else self.time.most_trials
        )
        return self.time.is_near_its_end(most, self._trials.closing)

    def _show(self, last: TrialRecord | None) -> None:
        records = self.study.records
        best = self.best
        is_settling = self.race.leader is not None
        if is_settling:
            best = next(record for record in records if record.number == self.race.leader)
        phase: Phase = "confirm" if is_settling else "search"
        self.show(
            Progress(
                phase=phase,
                done=self.race.ledger.pairs if is_settling else len(records),
                total=self.time.most_trials,
                elapsed_s=self.time.clock.elapsed_s,
                remaining_s=self.time.remaining_s(
                    has_model=self.proposer.has_model,
                    settling_s=self.race.expected_s(),
                    is_settling=is_settling,
                ),
                baseline=next((record for record in records if record.number == 0), None),
                best=best,
                last=last,
                can_win=self.proposer.can_win(best),
                known=self._known(best),
            )
        )

    def _known(self, best: TrialRecord | None) -> Known | None:
        """Return how the best compares with the baseline by now; None where there is no comparison."""
        if best is None or best.number == 0:
            return None
        gain = self.race.ledger.evidence.contrast(best.number, 0)
        if gain is None:
            return None
        speedup = believe(gain, self.time.policy.proof).ratio()
        proven = self.race.ledger.proven.get(best.number)
        if proven is not None:  # at the kept error, which is smaller than that of a 95 % interval
            speedup = Interval(value=speedup.value, low=exp(proven), high=speedup.high)
        return Known(number=best.number, speedup=speedup, is_proven=proven is not None)
