"""Select the recommendation from a search's outcome: which trials may win, how they compare, which wins.

Comes in: a SearchOutcome. Goes out: a Recommendation with its reasons. Pure: the same outcome gives
the same recommendation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log

from autotune.config.training_config import TrainingConfig
from autotune.messages import search as messages
from autotune.models.evidence import (
    Contrast,
    believe,
    break_even_noise_scale,
    choose,
    worth_its_batch,
)
from autotune.note import Note
from autotune.policy import Proof
from autotune.records.measurement import Interval
from autotune.records.result import LargerBatch, Recommendation, Verdict, changed_settings
from autotune.records.trial import TrialRecord, guard_key, needs_guard
from autotune.space.scaling import LrAdvice, scale_lr
from autotune.tuning.outcomes import SearchOutcome


@dataclass(frozen=True, slots=True)
class Finalists:
    """The finalists: the trials that may be recommended, with the baseline if it is feasible."""

    found: SearchOutcome
    records: Sequence[TrialRecord]

    @classmethod
    def of(cls, found: SearchOutcome, may_win: Callable[[int], bool] = lambda _: True) -> Finalists:
        """Return the feasible trials that passed or had no stress run, and whose number `may_win` accepts."""
        feasible = [record for record in found.records if record.is_feasible]
        fitting = [record for record in feasible if record.number not in found.overloaded]
        return cls(found, [record for record in fitting if may_win(record.number)])

    @classmethod
    def recommendable(cls, found: SearchOutcome) -> Finalists:
        """Return the finalists; after one failed on the largest samples, only the baseline and those that passed.

        Where none of these is feasible, return all finalists.
        """
        passed = cls.of(found, lambda number: number == 0 or number in found.stresses)
        if found.overloaded and passed.records:
            return passed
        return cls.of(found)

    @property
    def proof(self) -> Proof:
        """The numbers that the choice depends on."""
        return self.found.space.policy.proof

    @property
    def baseline(self) -> TrialRecord | None:
        """The baseline, if it may be recommended."""
        return next((record for record in self.records if record.number == 0), None)

    @property
    def by_rank(self) -> list[TrialRecord]:
        """The finalists without the baseline, the best first."""
        others = [record for record in self.records if record.number != 0]
        return sorted(others, key=self.found.believed_score, reverse=True)

    def winner(self) -> TrialRecord | None:
        """Return the winner; None if nothing is feasible.

        A proven trial keeps its place against one that is only believed to be faster, by fewer
        runs, unless that one's runs are faster beyond noise.
        """
        if not self.records:
            return None
        settled = self.found.most_proven
        choice = self.choice_of(self.records, settled)
        proven = next((record for record in self.records if record.number == settled), None)
        if proven is None or choice.number in {0, *self.found.proven}:
            return choice
        if self.batch_ratio(proven) > self.batch_ratio(choice):  # a larger batch must be worth it
            return choice
        lead = self.found.evidence.contrast(choice.number, proven.number)
        if lead is not None and lead.chance_below(0.0) < self.proof.lead_error:
            return choice
        return proven

    def leader(self) -> TrialRecord | None:
        """Return the winner among all finalists but the baseline; None if there are none."""
        others = self.by_rank
        if not others:
            return None
        return self.choice_of(others, others=self.records)

    def choice_of(
        self,
        candidates: Sequence[TrialRecord],
        settled: int | None = None,
        *,
        others: Sequence[TrialRecord] = (),
    ) -> TrialRecord:
        """Return the winner among some trials.

        Args:
            candidates: The trials, at least one.
            settled: Number of the trial with the largest proven gain, if any.
            others: Further trials that larger batches are compared with.
        """
        # of thousands, compare the best and the baseline
        ranked = sorted(candidates, key=self.found.believed_score, reverse=True)
        most = self.proof.most_compared
        candidates = [*ranked[:most], *(one for one in ranked[most:] if one.number == 0)]
        # drop larger batches that are not worth it, unless nothing is left then
        own = self.fastest_at_own_batch([*candidates, *others])
        worth = candidates
        if own is not None:
            worth = [
                one
                for one in candidates
                if self.batch_ratio(one) <= 1 or self.is_worth_it(one, own)
            ]
        worth = worth or candidates
        # choose the simplest of those that are about as good as the best
        best = max(worth, key=self.found.believed_score)
        gains = {best.number: 0.0}
        for one in worth:
            if one is best:
                continue
            gain = self._gain(one, best)
            if gain is not None:
                gains[one.number] = gain
        return choose(
            [one for one in worth if one.number in gains],
            lambda one: exp(gains[one.number]),
            settled=settled,
            worthwhile=self.proof.worthwhile,
        )

    def _gain(self, one: TrialRecord, best: TrialRecord) -> float | None:
        """Return the logarithm of a trial's believed score over the best's; None if it ran too seldom.

        The baseline's is shrunk towards 0: a gain that noise could produce is no reason to change
        the user's settings.
        """
        if one.number == 0:
            contrast = self.found.evidence.contrast(0, best.number)
            return None if contrast is None else believe(contrast, self.proof).value
        if self.found.evidence.count(one.number) < self.proof.fewest_runs:
            return None
        return log(self.found.believed_score(one) / self.found.believed_score(best))

    def fastest_at_own_batch(self, candidates: Sequence[TrialRecord]) -> TrialRecord | None:
        """Return the trial believed to be the fastest at the baseline's global batch; None if there is none."""
        own = [one for one in candidates if self.batch_ratio(one) == 1]
        return max(own, key=self.found.believed_score, default=None)

    def batch_ratio(self, record: TrialRecord) -> float:
        """Return a trial's global batch over the baseline's."""
        return self.found.batch_ratio(record.config)

    def over(self, one: TrialRecord, other: TrialRecord) -> Interval | None:
        """Return a trial's measured throughput over another's; None if one of them has no run."""
        contrast = self.found.evidence.contrast(one.number, other.number)
        return None if contrast is None else contrast.ratio()

    def is_worth_it(self, larger: TrialRecord, own: TrialRecord) -> bool | None:
        """Return True if a larger batch beats the fastest at the baseline's batch by enough, beyond noise.

        None: the runs so far do not decide it.
        """
        contrast = self.found.evidence.contrast(larger.number, own.number)
        if contrast is None:
            return None
        least = 1 + self.found.space.objective.larger_batch_gain
        return worth_its_batch(contrast.ratio(self.proof.batch_error), least)

    def gain_of(self, record: TrialRecord) -> Contrast | None:
        """Return a trial's measured gain over the baseline; None for the baseline, or without one."""
        if record.number == 0 or self.baseline is None:
            return None
        return self.found.evidence.contrast(record.number, 0)


def select(found: SearchOutcome) -> Recommendation | None:
    """Return the recommendation by the runs so far; None if nothing is feasible.

    Args:
        found: Everything that was measured and proven, also of a search that is not over.
    """
    finalists = Finalists.recommendable(found)
    winner = finalists.winner()
    if winner is None:
        return None
    advice = _lr_advice(winner.config, found)
    verdict = _verdict(winner, finalists)
    # how it compares with the baseline
    gain = finalists.gain_of(winner)
    measured_speedup = None
    gain_probability = None
    if gain is not None:
        measured_speedup = gain.ratio()
        gain_probability = 1 - believe(gain, finalists.proof).chance_below(0.0)
    # the best at the baseline's global batch, for users who keep that
    own = [record for record in finalists.records if finalists.batch_ratio(record) == 1]
    same = winner if finalists.batch_ratio(winner) == 1 else None
    if own and same is None:
        same = finalists.choice_of(own, found.most_proven)
    return Recommendation(
        config=winner.config.model_copy(update={"lr": advice.lr}),
        number=winner.number,
        verdict=verdict,
        speedup=_speedup(winner, finalists),
        measured_speedup=measured_speedup,
        gain_probability=gain_probability,
        more_s=_more_s(winner, finalists) if verdict == "unconfirmed" else None,
        lr_advice=advice,
        same_batch=None if same is None else same.config,
        same_batch_number=None if same is None else same.number,
        same_batch_speedup=None if same is None else _speedup(same, finalists),
        larger_batch=_larger_batch(winner, same, finalists),
        reasons=tuple(_reasons(winner, finalists, verdict)),
        confirmations=_confirmations(winner, finalists),
        stress=found.stresses.get(winner.number),
        overloaded=found.overloaded,
        is_outrun=_is_outrun(winner, finalists),
    )


def _confirmations(winner: TrialRecord, finalists: Finalists) -> tuple[TrialRecord, ...]:
    """Return the baseline, the winner and all that ran more than once; nothing if only the baseline ran."""
    records = finalists.found.records
    if all(record.number == 0 for record in records):
        return ()
    shown = {0, winner.number}
    return tuple(
        record
        for record in records
        if record.is_feasible and (record.number in shown or len(record.runs) > 1)
    )


def _is_outrun(winner: TrialRecord, finalists: Finalists) -> bool:
    """Return True if a trial that may not be used was faster: it was refused, or exceeds the memory limit."""
    usable = {record.number for record in finalists.records}
    own = winner.measurement
    unusable = [one.measurement for one in finalists.found.records if one.number not in usable]
    return own is not None and any(run.samples_per_s > own.samples_per_s for run in unusable if run)


def _larger_batch(
    winner: TrialRecord, same: TrialRecord | None, finalists: Finalists
) -> LargerBatch | None:
    """Compare the best at a larger global batch, worth it or not, with the best at the baseline's.

    Args:
        winner: The winner; if its batch is larger, it is the one that is compared.
        same: The trial that is shown as the best at the baseline's global batch.
        finalists: The finalists.
    """
    larger = [record for record in finalists.records if finalists.batch_ratio(record) > 1]
    if not larger:
        return None
    best = winner
    if finalists.batch_ratio(winner) <= 1:
        best = max(larger, key=finalists.found.believed_score)
    # take the smaller of the gains over the fastest and over what is shown
    own = finalists.fastest_at_own_batch(finalists.records)
    compared = [record for record in (own, same) if record is not None]
    ratios = [finalists.over(best, record) for record in compared]
    known = [ratio for ratio in ratios if ratio is not None]
    over = min(known, key=lambda ratio: ratio.value, default=None)
    return LargerBatch(
        config=best.config.model_copy(update={"lr": _lr_advice(best.config, finalists.found).lr}),
        number=best.number,
        speedup=_speedup(best, finalists),
        over_same_batch=over,
        is_worth_it=own is None or bool(finalists.is_worth_it(best, own)),
        break_even=None if over is None else _break_even(best, over, finalists),
    )


def _break_even(larger: TrialRecord, over: Interval, finalists: Finalists) -> Interval | None:
    """Return the noise scale above which the larger batch pays, given its throughput over the other's."""
    samples = finalists.found.space.baseline.global_batch_size
    # not the configuration's own count: a token budget rounds that for each micro batch
    larger_samples = samples * finalists.batch_ratio(larger)
    of_value = break_even_noise_scale(samples, larger_samples, over.value)
    of_low = break_even_noise_scale(samples, larger_samples, over.low)
    of_high = break_even_noise_scale(samples, larger_samples, over.high)
    if of_value is None or of_high is None:
        return None
    return Interval(value=of_value, low=of_high, high=inf if of_low is None else of_low)


def _verdict(winner: TrialRecord, finalists: Finalists) -> Verdict:
    if finalists.baseline is None:
        return "baseline_infeasible"
    if winner.number == 0:
        return "already_best" if finalists.found.is_settled else "unconfirmed"
    is_proven = winner.number in finalists.found.proven and _is_compared(winner, finalists.found)
    return "faster" if is_proven else "unconfirmed"


def _is_compared(winner: TrialRecord, found: SearchOutcome) -> bool:
    """Return True unless the winner's precision must be compared with float32 and was not, after an interruption."""
    if not needs_guard(winner.config, found.space.baseline):
        return True
    key = guard_key(winner.config)
    guarded = [record for record in found.records if record.result.guard is not None]
    return any(
        record.result.outcome == "ok" and guard_key(record.config) == key for record in guarded
    )


def _speedup(record: TrialRecord, finalists: Finalists) -> Interval | None:
    """Return the believed speedup over the baseline; exactly 1 for the baseline itself."""
    if finalists.baseline is None:
        return None
    gain = finalists.gain_of(record)
    if gain is None:
        return Interval(value=1.0, low=1.0, high=1.0)
    return believe(gain, finalists.proof).ratio()


def _more_s(winner: TrialRecord, finalists: Finalists) -> float | None:
    """Estimate the seconds of further pairs of runs that would prove the measured gain; None if too many."""
    found = finalists.found
    gain = finalists.gain_of(winner)
    if gain is None or gain.value <= 0 or found.run_s <= 0:
        return None
    pairs = max(1, min(found.evidence.count(winner.number), found.evidence.count(0)))
    needed = pairs * (finalists.proof.sure_sds * gain.sd / gain.value) ** 2
    more_s = 2 * found.run_s * max(1, ceil(needed - pairs))
    return more_s if more_s <= finalists.proof.longest_wait_s else None


def _lr_advice(config: TrainingConfig, found: SearchOutcome) -> LrAdvice:
    baseline = found.space.baseline
    ratio = config.global_batch_ratio(baseline)
    return scale_lr(baseline.lr, ratio, found.space.objective.lr_rule, found.space.facts.optimizer)


def _reasons(winner: TrialRecord, finalists: Finalists, verdict: Verdict) -> Iterator[Note]:
    """Yield the notes that explain the recommendation."""
    reference = finalists.baseline
    found = finalists.found
    if reference is None:
        yield messages.baseline_is_no_reference()
    yield _why_this(winner, finalists)
    if winner.number == 0:
        return
    runs = found.evidence.count(winner.number)
    baseline_runs = found.evidence.count(0)
    if verdict == "faster":
        yield messages.proven(exp(found.proven[winner.number]) - 1, runs, baseline_runs)
    elif reference is not None and (gain := finalists.gain_of(winner)) is not None:
        yield messages.not_proven(
            1 - believe(gain, finalists.proof).chance_below(0.0), runs, baseline_runs
        )
    if not _is_compared(winner, found):
        yield messages.precision_unchecked(winner.config.amp_dtype)
    if reference is not None:
        yield messages.changed_settings([*changed_settings(winner.config, reference.config)])


def _why_this(winner: TrialRecord, finalists: Finalists) -> Note:
    """Return the note with the reason for this choice."""
    found = finalists.found
    # larger batches that are not worth it, and the number of the other configurations
    own = finalists.fastest_at_own_batch(finalists.records)
    dropped = list[TrialRecord]()
    if own is not None:
        compared = finalists.by_rank[: finalists.proof.most_compared]
        larger = [record for record in compared if finalists.batch_ratio(record) > 1]
        dropped = [record for record in larger if not finalists.is_worth_it(record, own)]
    configurations = len(found.records)
    if dropped:
        configurations = sum(found.batch_ratio(record.config) <= 1 for record in found.records)
    is_outrun = _is_outrun(winner, finalists)
    if winner.number == 0 and found.overloaded:
        untested = Finalists.of(found).winner()
        return messages.faster_ones_overloaded(untested is not None and untested.number != 0)
    if winner.number == 0:
        # the best of the others, which may be faster by the upper end of their gains
        others = [record for record in finalists.by_rank if record not in dropped][:3]
        gains = [finalists.gain_of(record) for record in others]
        highs = [
            believe(gain, finalists.proof).ratio().high - 1 for gain in gains if gain is not None
        ]
        most = max(highs, default=None)
        return messages.nothing_beats_baseline(
            configurations, is_outrun, bool(dropped), most_fraction=most
        )
    others = [record for record in finalists.records if record not in dropped]
    best = max(others, key=found.believed_score)
    behind = finalists.over(winner, best)
    if best.number != winner.number and behind is not None and behind.value < 1:
        return messages.simplest_of_the_best(best.number, behind.value)
    return messages.best_believed(configurations, is_outrun, bool(dropped))
