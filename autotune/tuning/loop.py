"""Run a search: propose a trial, run it, store it; stop when no trial promises more; prove the gain.

Comes in: a study with its time budget, a runner of trials and a proposer. Goes out: a
SearchOutcome. Trials may run side by side in threads; the calling thread does everything else, one
ended trial after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, exp

from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import SideBySide, restart_launcher
from autotune.launch.runner import ShouldEnd, TrialRunner
from autotune.messages.search import (
    finalist_failed,
    no_recent_gain,
    precision_left_out,
    stress_not_tried,
)
from autotune.messages.trials import trial_disturbed
from autotune.models.evidence import (
    Ledger,
    behind_threshold,
    believe,
    choose,
    run_of,
)
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
    GUARDED,
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
from autotune.space.space import ResolvedSpace
from autotune.tuning.checks import PrecisionGuard, check_under_stress, may_overload
from autotune.tuning.outcomes import (
    FailureAttribution,
    SearchOutcome,
    compilation_domains,
    is_host_bound,
    list_cures,
)
from autotune.tuning.probe import with_ceilings
from autotune.tuning.proposals import (
    Params,
    first_guesses,
    largest_batch_variant,
    same_batch_variant,
)
from autotune.tuning.proposer import Latest, Proposer
from autotune.tuning.race import Race
from autotune.tuning.select import Finalists
from autotune.tuning.study import Study
from autotune.tuning.time_budget import TimeBudget

_Run = Callable[[], TrialRecord]
"""Runs a trial, in any thread: it touches neither study nor proposer."""
THOROUGH_EXTRAS = Extras(
    loader_ceiling=True, device_ceiling=True, copy_ceiling=True, breakdown=True, stretch_s=0.5
)
"""Extras of the first repeat of the best trial: its ceilings, by longer stretches, and its breakdown."""


@dataclass(slots=True, kw_only=True)
class Search:
    """A search under way; `outcome` returns its results so far."""

    time: TimeBudget
    runner: TrialRunner
    proposer: Proposer
    show: Callable[[Progress], None] = lambda _: None
    """Called after each run, to show the progress."""
    on_record: Callable[[TrialRecord], None] = lambda _: None
    """Called after each trial, to keep its record."""
    first: Sequence[Params] = ()
    """Values to try right after the baseline, before any proposal."""
    notes: list[Note] = field(default_factory=list)
    ceilings: CeilingBook = field(default_factory=CeilingBook)
    failures: FailureAttribution = field(default_factory=FailureAttribution)
    guard: PrecisionGuard = field(init=False)
    ended_because: Note | None = None
    promised_s: float | None = None
    """Seconds that the search should take, estimated before its first trial."""
    race: Race = field(init=False)
    _why_none: Note | None = None
    """The reason for the last time that no trial was proposed; running trials may still change it."""
    _believed: Latest[Mapping[int, float]] = field(default_factory=Latest)
    _best: Latest[TrialRecord | None] = field(default_factory=Latest)
    _before_s: float = 0.0
    """Seconds of the search before it was interrupted."""
    _stresses: dict[int, StressFigures] = field(default_factory=dict)
    _overloaded: list[int] = field(default_factory=list)
    is_complete: bool = False
    _cured: set[int] = field(default_factory=set)
    """Numbers of the host-bound trials for which cures were proposed."""
    _under_way: dict[int, Extras] = field(default_factory=dict)
    """Extras that the runs under way measure after their windows, by the trial's number."""

    def __post_init__(self) -> None:
        """Restore the state of an interrupted search from its records."""
        self.guard = PrecisionGuard(self.runner, self.space.baseline)
        ledger = Ledger.going_on(self.study.prior_variation, self.study.records, self.time.policy)
        self.race = Race(
            time=self.time, ledger=ledger, outcome=self.outcome, passes=self._passes_guard
        )
        self._before_s = max((run.at_s for run in ledger.runs), default=0.0)
        for record in self.study.ended:
            self.guard.recall(record)
            with_ceilings(record.result, record.config, self.ceilings)
            if record.is_refused and record.outcome == "diverged":
                self._leave_out(record)

    @property
    def study(self) -> Study:
        """The study that stores every trial."""
        return self.time.study

    @property
    def space(self) -> ResolvedSpace:
        """The space that is searched."""
        return self.study.space

    @property
    def believed(self) -> Mapping[int, float]:
        """The logarithm of the believed throughput of each feasible trial, by number.

        Trials that ran several times are believed by their own runs, others by the proposer's
        model.
        """
        ended = self.study.ended
        proposed = self.proposer.believed()

        def join(_: object) -> Mapping[int, float]:
            evidence = self.race.ledger.evidence
            believed = dict(proposed)
            for record in ended:
                if record.is_feasible and evidence.count(record.number) > 1:
                    believed[record.number] = evidence.log_rate(record.number)
            return believed

        return self._believed.of((ended, proposed), join)

    @property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score so far, at its believed throughput."""
        believed = self.believed
        return self._best.of(
            (self.study.ended, believed), lambda _: best_of(self.study.records, self._score)
        )

    @property
    def _trials(self) -> Trials:
        return self.time.policy.trials

    @property
    def _score(self) -> Callable[[TrialRecord], float]:
        """The score of a feasible trial at its believed throughput."""
        return partial(believed_score, believed=self.believed)

    def run(self) -> SearchOutcome:
        """Run trials until none promises more, prove the gain of the best, and check that it fits.

        The baseline runs alone first, since all others refer to it. If the winner fails on the
        largest samples, the next finalist takes its place. An exception ends the search at once,
        whatever else runs: closing the launcher ends the other trials.

        Returns:
            Everything that was measured and proven.

        Raises:
            WorkloadError: the user's code fails in the baseline.
            RepeatedFailureError: the same exception ended three configurations, and no one setting
                explains it.
            LauncherError: a trial can't be started.
            RunFolderError: a trial's record can't be kept.
        """
        self._begin()
        self._run_trials()
        while self._is_overloaded():
            self._run_trials()
        self._note_memory()
        self.is_complete = True
        return self.outcome()

    def _begin(self) -> None:
        """Propose the first trials; if the search continues, learn from the failures it has had."""
        for record in self.study.ended:
            self.notes.extend(self.failures.learn(record, self.study))
        self._enqueue(self.first)
        if not self.study.records:
            if self.study.method.begins_with_guesses:
                self._enqueue(first_guesses(self.space))
            self.promised_s = self.time.remaining_s(has_model=self.proposer.has_model)
        self._show(None)

    def _run_trials(self) -> None:
        """Keep every free slot running until there is no next run and all have ended."""
        with SideBySide[TrialRecord](self.time.most_trials) as under_way:
            while (run := self._next_run()) is not None or len(under_way) > 0:
                if run is None:
                    self._store(under_way.next_ended())
                    continue
                if len(under_way) == 0 and self._most_at_once == 1:
                    self._store(run())  # in this thread, which alone gets Ctrl-C: it ends at once
                    continue
                under_way.begin(run)
        self.ended_because = self._why_none

    def outcome(self) -> SearchOutcome:
        """Return everything measured and proven so far, also of a search that is not over."""
        return SearchOutcome(
            space=self.space,
            records=tuple(self.study.records),
            ended_because=self.ended_because,
            evidence=self.race.ledger.evidence,
            believed=self.believed,
            proven=dict(self.race.ledger.proven),
            is_settled=self.race.is_settled,
            run_s=self.time.run_s,
            stresses=dict(self._stresses),
            overloaded=tuple(self._overloaded),
        )

    def _is_overloaded(self) -> bool:
        """Run the winner on the largest samples if these might not fit; True if it fails on them.

        After one failure, the next winner is tried as well, even if its memory seems sure to
        suffice.
        """
        untested = Finalists.of(self.outcome(), lambda number: number not in self._stresses)
        winner = untested.winner()
        if winner is None or winner.number == 0:
            return False
        if len(self._overloaded) >= self._trials.most_stressed:
            return False
        if not self._overloaded and not may_overload(winner, self.space):
            return False
        restart_launcher(self.runner.launcher)
        check = check_under_stress(winner, self.time, self.runner)
        self.notes.extend(check.notes)
        if check.figures is not None:
            self._stresses[winner.number] = check.figures
        elif self._overloaded:
            # after a failure, a run that could not be made is no pass
            self.notes.append(stress_not_tried(winner.number))
        if check.is_refuted:
            self._overloaded.append(winner.number)
        return check.is_refuted

    def _note_memory(self) -> None:
        """Note the largest micro batch that stays within the memory limit."""
        winner = Finalists.recommendable(self.outcome()).winner()
        if winner is None:
            return
        largest = largest_batch_note(
            self.study.records,
            winner.config,
            self.space,
            overloaded=self._overloaded,
        )
        if largest is not None:
            self.notes.append(largest)

    def _next_run(self) -> _Run | None:
        """Return the next run, if a slot is free: the baseline again, a new trial, or a repeat for the race.

        None: no run for now. The result of a running trial may be a reason to continue.
        """
        records = self.study.records
        repeating = [record.config for record in records if record.number in self._under_way]
        running = [*repeating, *(trial.config for trial in self.study.running)]
        # a group that lies on several hosts takes as many slots
        taken = sum(hosts_of(config, self.space.environment) for config in running)
        if taken >= self._most_at_once:
            return None
        # compare the precision of what leads now: it must not lead the search if it may not win
        while not running and (best := self.best) is not None and not self._passes_guard(best):
            pass
        if self.race.leader is None:
            if self._is_baseline_due():
                return self._repeat_of(self.study.records[0], NO_EXTRAS)
            trial = self._ask()
            if trial is not None:
                return self._run_of(trial)
        if running:  # runs that decide the race run alone
            return None
        record = self.race.next_run()
        return None if record is None else self._repeat_of(record, self._extras_of_repeat(record))

    def _is_baseline_due(self) -> bool:
        """Return True if the baseline should run again now, and there is time for it."""
        records = self.study.records
        if not records or 0 in self._under_way:
            return False
        has_time = self.time.left_for_trials_s >= records[0].result.own_s
        return has_time and self.race.is_baseline_due(records[0], self.best)

    def _ask(self) -> TrialRecord | None:
        """Return the next trial: a waiting one, a proposal, or else a sample. None: no trial for now."""
        over = self.time.why_over
        if over is not None:
            self._why_none = over
            return None
        self._propose_cures()
        enough = self._why_enough()
        if enough is not None or self._is_near_its_end:
            self._propose_closing()
        if enough is not None and not self.study.has_waiting:
            self._why_none = enough
            return None
        self._propose()
        trial = self.study.ask(self.proposer.skip)
        if trial is None:
            self._why_none = self.study.none_left
        return trial

    def _run_of(self, trial: TrialRecord) -> _Run:
        """Return the trial's first run."""
        window = self.time.window()
        threshold = self.proposer.pruning_threshold(trial)
        should_end: ShouldEnd | None = None
        if threshold is not None:
            stopping = self.time.policy.stopping
            should_end = partial(behind_threshold, bar=threshold, stopping=stopping)
        return self._begin_run(
            trial, self.time.deadline_s(trial), window, self._extras_of(trial, window), should_end
        )

    def _repeat_of(self, record: TrialRecord, extras: Extras) -> _Run:
        """Return a further run of a trial, in a process of its own."""
        window = self.time.window()
        deadline_s = self.time.repeat_deadline_s(record) + 2 * window.max_s
        left_s = self.time.clock.left_s
        if left_s is not None:
            deadline_s = min(deadline_s, left_s + self.time.limits.grace_s)
        return self._begin_run(record, deadline_s, window, extras)

    def _begin_run(
        self,
        record: TrialRecord,
        deadline_s: float,
        window: WindowRules,
        extras: Extras,
        should_end: ShouldEnd | None = None,
    ) -> _Run:
        """Return a run of a trial, and note that it is under way."""
        runner = self.runner
        self._under_way[record.number] = extras

        def run() -> TrialRecord:
            name = f"trial-{record.number:03d}"
            if record.results:
                restart_launcher(runner.launcher)
                name += "-again"
            result = runner.run(
                record.config,
                name=name,
                deadline_s=deadline_s,
                window=window,
                extras=extras,
                should_end=should_end,
            )
            return record.with_run(result)

        return run

    def _extras_of(self, trial: TrialRecord, window: WindowRules) -> Extras:
        """Return the extras of a trial's first run: the ceilings that no run has tried to measure yet.

        Where the sides were measured alone, only the baseline and groups of devices measure
        ceilings again: one device does not show what limits a group, and a group that loses does
        not run again.
        """
        is_baseline = trial.number == 0
        if self.proposer.has_model and not is_baseline and not trial.config.is_group:
            return NO_EXTRAS
        limits = self.time.limits
        stretch_s = max(limits.ceiling_share * window.max_s, limits.shortest_ceiling_s)
        return Extras(
            loader_ceiling=self.ceilings.needs("loader", trial.config),
            device_ceiling=self.ceilings.needs("device", trial.config),
            copy_ceiling=self.ceilings.needs("copy", trial.config),
            breakdown=is_baseline,
            stretch_s=min(stretch_s, limits.longest_ceiling_s),
        )

    def _extras_of_repeat(self, record: TrialRecord) -> Extras:
        """Return the extras of a repeat: only the first repeat of the best trial has any."""
        if record is not self.best or record.repeats or self.time.is_short_search:
            return NO_EXTRAS
        if self.proposer.has_model and not record.config.is_group:
            return THOROUGH_EXTRAS
        return Extras(breakdown=True)

    def _store(self, ended: TrialRecord) -> None:
        """Store the last run of a trial, learn from it, and show it."""
        number = ended.number
        at_s = self._before_s + self.time.clock.elapsed_s
        is_repeat = len(ended.results) > 1
        asked = self._under_way.pop(number)
        result = with_ceilings(ended.results[-1], ended.config, self.ceilings, asked=asked)
        result = result.model_copy(update={"at_s": at_s})
        if result.measurement is not None:
            # somebody has killed or stopped a process of the trial
            for note in result.measurement.notes:
                if note.code in {"rerun_after_signal", "window_stopped"}:
                    self.notes.append(trial_disturbed(number, note))
        if is_repeat:
            result = self._judged(number, result)
        if result.measurement is not None and result.outcome == "ok":
            self.race.ledger.add(
                run_of(result.measurement, self.time.policy, number=number, at_s=at_s)
            )
        if is_repeat:
            # not `ended`, since the precision guard may have answered meanwhile
            self._show(self.study.add_run(number, result))
            return
        record = self.study.tell(ended, result, self._evaluate(result))
        self.on_record(record)
        try:
            self.notes.extend(self.failures.learn(record, self.study))
        finally:
            self._show(record)  # after learning, so that it knows which values were left out

    def _judged(self, number: int, result: TrialResult) -> TrialResult:
        """Return a repeat's result as a failure if it exceeds the memory limit, and note any failure."""
        if result.measurement is not None and result.outcome == "ok":
            fault = memory_fault(result.measurement, self.space.limit_bytes)
            if fault is not None:
                result = result.model_copy(update={"outcome": "over_memory", "reason": fault})
        if result.outcome != "ok":
            self.notes.append(finalist_failed(number, result.outcome, result.reason, result.log))
        return result

    def _evaluate(self, result: TrialResult) -> Score | None:
        """Score a first run against the reference's, or against itself if there is no reference yet."""
        measurement = result.measurement
        if measurement is None or result.outcome != "ok":
            return None
        reference = reference_of(self.study.ended)
        compared = None if reference is None else reference.measurement
        objective = self.space.objective
        return evaluate(
            measurement,
            compared or measurement,
            objective,
            self.space.limit_bytes,
            self.time.policy.memory.least_excess,
        )

    def _propose(self) -> None:
        """Enqueue the proposer's next values, unless a trial waits; without a proposal the sampler draws."""
        if self.study.has_waiting or not self.study.records:
            return
        had_model = self.proposer.has_model
        failed = self.proposer.prepare(self.runner, self.time.sides_s, self.ceilings)
        if failed is not None:
            self.notes.append(failed)
        if had_model and not self.proposer.has_model:
            # measuring the sides has failed; without it, the model knows no more than an expert
            self._enqueue(first_guesses(self.space))
            return
        self.proposer.propose(self.best)

    def _propose_cures(self) -> None:
        """Enqueue variants with less work for the host, once for each of the first host-bound leaders.

        After the baseline alone, the model proposes first: it knows of the host as well.
        """
        best = self.best
        if best is None or best.number in self._cured or len(self._cured) == self._trials.cured:
            return
        if self.study.has_waiting or len(self.study.ended) < self._trials.before_cures:
            return
        if best.measurement is None or not is_host_bound(best.measurement, self._trials.host_bound):
            return
        self._cured.add(best.number)
        # search compilation too from now on, where CUDA graphs may pay
        has_time = (
            self.time.left_for_trials_s >= self._trials.compiling_s
            and not self.time.is_short_search
        )
        if has_time and not self.study.method.visits_all and not best.config.is_group:
            domains = compilation_domains(best.measurement, self.space, self.time.budget)
            if domains:
                self.study.widen(domains)

        def fits(config: TrainingConfig) -> bool:
            reason = self.proposer.skip(config)
            return reason is None or reason.code != "would_not_fit"

        self._enqueue(list_cures(best.config, self.space, fits=fits))

    def _propose_closing(self) -> None:
        """Enqueue the closing trials, each unless it was tried.

        They are the best at the baseline's global batch, the best at the largest batch that fits
        (not in a short search: its steps are the longest), and the likely winner without settings
        that have no effect.
        """
        best = self.best
        if best is None:
            return
        self.proposer.propose_same_batch(best)
        closing = [same_batch_variant(best, self.space)]
        if not self.time.is_short_search:
            closing.append(largest_batch_variant(best, self.space, self.study.ended))
        others = [record for record in self.study.records if record.is_feasible and record.number]
        likely_winner = choose(
            others or [best], self._score, worthwhile=self.time.policy.proof.worthwhile
        )
        closing.append(self.proposer.plainer(likely_winner.config))
        self._enqueue(closing)

    def _enqueue(self, proposals: Iterable[Params | None]) -> None:
        for params in proposals:
            if params is not None:
                self.study.propose(params)

    def _passes_guard(self, leader: TrialRecord) -> bool:
        """Return True if the precision of a leading trial trains as float32 does; else exclude that precision."""
        answer = self.guard.known(leader.config)
        if answer is None:
            answer = self.guard.compare(leader.config, self.time.guard_deadline_s(leader.config))
            if answer.outcome == "ok":
                self.study.keep_answer(leader.number, answer)
        if answer.outcome == "ok":
            return True
        # refuse every trial of that precision, also those that ran during the comparison and those
        # that an interruption kept from being refused
        refused = guard_key(leader.config)
        for record in tuple(self.study.records):
            if record.result.outcome == "ok" and guard_key(record.config) == refused:
                self._leave_out(self.study.keep_answer(record.number, answer))
        return False

    def _leave_out(self, record: TrialRecord) -> None:
        """Exclude a precision that the guard has refused from further trials, and note it once."""
        self.study.leave_out({name: frozenset({getattr(record.config, name)}) for name in GUARDED})
        dtype, mode = guard_key(record.config)
        left_out = precision_left_out(dtype, mode, record.result.reason)
        if left_out not in self.notes:
            self.notes.append(left_out)

    @property
    def _most_at_once(self) -> int:
        """Trials that may run at once: the baseline runs alone."""
        return self.time.slots_now if self.study.records else 1

    def _why_enough(self) -> Note | None:
        """Return why no further trial is worth its time; None if one may be, or the search may not stop early."""
        if not self.time.may_stop_early:
            return None
        return (
            self.time.why_short_search_is_over
            or self._why_settled()
            or self.proposer.why_enough(self.best)
        )

    def _why_settled(self) -> Note | None:
        """Return a note if the last trials gained nothing; only promising trials count if a model leads."""
        is_led = self.proposer.is_informed and self.best is not None
        records = self.study.ended
        tries = self.study.promising if is_led else records
        patience = self._patience
        fewest = patience + (1 if self.time.is_short_search else self._trials.patient_after)
        if len(tries) < patience or len(records) < fewest:
            return None
        score = self._score
        now = self.best
        before = best_of(records[: records.index(tries[-patience])], score)
        if now is not None:
            if before is None:
                return None
            if score(now) >= (1 + self._trials.least_gain) * score(before):
                return None
        return no_recent_gain(trials=patience, is_promising=is_led)

    @property
    def _patience(self) -> int:
        """The number of trials without a gain after which the search stops."""
        trials = self._trials
        usual = trials.informed_patience if self.proposer.is_informed else trials.patience
        if not self.time.is_short_search or not self.study.ended:
            return usual
        in_time = ceil(trials.short_search_patience_s / typical_s(self.study.ended))
        return min(usual, max(trials.least_patience, in_time))

    @property
    def _is_near_its_end(self) -> bool:
        """Return True when it is time for the closing trials."""
        most = self.time.most_trials
        if self.time.may_stop_early:
            most = self._patience + self._trials.patient_after
        return self.time.is_near_its_end(most, self._trials.closing)

    def _show(self, last: TrialRecord | None) -> None:
        """Show the progress; `last` is the trial that has just ended."""
        records = self.study.records
        by_number = {record.number: record for record in records}
        best = self.best
        phase: Phase = "search"
        done = len(records)
        if self.race.leader is not None:
            best = by_number[self.race.leader]
            phase = "confirm"
            done = self.race.ledger.pairs
        self.show(
            Progress(
                phase=phase,
                done=done,
                total=self.time.most_trials,
                elapsed_s=self.time.clock.elapsed_s,
                remaining_s=self.time.remaining_s(
                    has_model=self.proposer.has_model,
                    settling_s=self.race.settling_s(self.best),
                    is_settling=self.race.leader is not None,
                ),
                baseline=by_number.get(0),
                best=best,
                last=last,
                can_win=self.proposer.can_win(best),
                known=self._known(best),
            )
        )

    def _known(self, best: TrialRecord | None) -> Known | None:
        """Return the best trial's speedup over the baseline so far; None without a comparison."""
        if best is None or best.number == 0:
            return None
        gain = self.race.ledger.evidence.contrast(best.number, 0)
        if gain is None:
            return None
        speedup = believe(gain, self.time.policy.proof).ratio()
        proven = self.race.ledger.proven.get(best.number)
        if proven is not None:
            # at the proof's error, which is smaller than that of a 95 % interval
            speedup = Interval(value=speedup.value, low=exp(proven), high=speedup.high)
        return Known(number=best.number, speedup=speedup, is_proven=proven is not None)
