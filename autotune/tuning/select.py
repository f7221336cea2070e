"""From what was found to what is recommended: what may win, how that compares, and the choice. Pure."""

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
class Contenders:
    """The trials that may be recommended, the baseline among them where it is feasible."""

    found: SearchOutcome
    records: Sequence[TrialRecord]

    @classmethod
    def of(
        cls, found: SearchOutcome, may_win: Callable[[int], bool] = lambda _: True
    ) -> Contenders:
        """Return the feasible trials of these numbers, less what stress runs have refuted."""
        return cls(
            found,
            [
                record
                for record in found.records
                if record.is_feasible
                and record.number not in found.overloaded
                and may_win(record.number)
            ],
        )

    @classmethod
    def sound(cls, found: SearchOutcome) -> Contenders:
        """Once one failed on the largest samples: the baseline, and those that passed there; else all.

        Where none of them is feasible, it is all as well.
        """
        left = cls.of(found, lambda number: number == 0 or number in found.stresses)
        return left if found.overloaded and left.records else cls.of(found)

    @property
    def proof(self) -> Proof:
        """The numbers that the choice depends on."""
        return self.found.space.policy.proof

    @property
    def baseline(self) -> TrialRecord | None:
        """The baseline, where it may be recommended."""
        return next((record for record in self.records if record.number == 0), None)

    @property
    def challengers(self) -> list[TrialRecord]:
        """All but the baseline, the best first."""
        others = [record for record in self.records if record.number != 0]
        return sorted(others, key=self.found.believed_score, reverse=True)

    def chosen(self, settled: int | None = None) -> TrialRecord | None:
        """Return the one to recommend; None where nothing is feasible.

        What is proven is not given up for one that is only believed to be faster, by fewer runs,
        unless that one's runs exceed its own beyond noise.
        """
        if not self.records:
            return None
        choice = self.choice_of(self.records, settled)
        proven = next((record for record in self.records if record.number == settled), None)
        if proven is None or choice.number in {0, *self.found.proven}:
            return choice
        if self.batch_ratio(proven) > self.batch_ratio(choice):  # a larger batch must be worth it
            return choice
        lead = self.found.evidence.contrast(choice.number, proven.number)
        return (
            choice
            if lead is not None and lead.chance_below(0.0) < self.proof.lead_error
            else proven
        )

    def leader(self) -> TrialRecord | None:
        """Return what would be recommended in the baseline's place; None without a challenger."""
        others = self.challengers
        return self.choice_of(others, others=self.records) if others else None

    def choice_of(
        self,
        candidates: Sequence[TrialRecord],
        settled: int | None = None,
        *,
        others: Sequence[TrialRecord] = (),
    ) -> TrialRecord:
        """Return the one to recommend among some, at least one.

        Args:
            candidates: The trials.
            settled: What the race has settled on.
            others: What larger batches are compared with as well.
        """
        ranked = sorted(candidates, key=self.found.believed_score, reverse=True)
        most = self.proof.most_compared
        candidates = [*ranked[:most], *(one for one in ranked[most:] if one.number == 0)]
        own = self.fastest_at_own_batch([*candidates, *others])
        worth = [
            one
            for one in candidates
            if own is None or self.batch_ratio(one) <= 1 or self.is_worth_it(one, own)
        ] or list(candidates)
        best = max(worth, key=self.found.believed_score)
        gains = {best.number: 0.0} | {
            one.number: gain
            for one in worth
            if one is not best and (gain := self._gain(one, best)) is not None
        }
        return choose(
            [one for one in worth if one.number in gains],
            gains,
            settled=settled,
            worthwhile=self.proof.worthwhile,
        )

    def _gain(self, one: TrialRecord, best: TrialRecord) -> float | None:
        """What one is believed to reach over the best, in scores; None where it ran too seldom to be chosen for it.

        Of the baseline it is shrunk: a gain that the noise could make is no reason to change what
        the user has.
        """
        if one.number == 0:
            contrast = self.found.evidence.contrast(0, best.number)
            return None if contrast is None else believe(contrast, self.proof).value
        if self.found.evidence.count(one.number) < self.proof.fewest_runs:
            return None
        return log(self.found.believed_score(one) / self.found.believed_score(best))

    def fastest_at_own_batch(self, candidates: Sequence[TrialRecord]) -> TrialRecord | None:
        """Return the one believed to be the fastest at the baseline's global batch; None without any."""
        own = [one for one in candidates if self.batch_ratio(one) == 1]
        return max(own, key=self.found.believed_score, default=None)

    def batch_ratio(self, record: TrialRecord) -> float:
        """Return its global batch over the baseline's."""
        return self.found.batch_ratio(record.config)

    def over(self, one: TrialRecord, other: TrialRecord) -> Interval | None:
        """Return the throughput of one over another's as measured; None where one of them has no run."""
        contrast = self.found.evidence.contrast(one.number, other.number)
        return None if contrast is None else contrast.ratio()

    def is_worth_it(self, larger: TrialRecord, own: TrialRecord) -> bool | None:
        """Return whether a larger batch beats the fastest at the own one beyond noise and by enough; None: open."""
        contrast = self.found.evidence.contrast(larger.number, own.number)
        least = 1 + self.found.space.objective.larger_batch_gain
        return (
            None
            if contrast is None
            else worth_its_batch(contrast.ratio(self.proof.batch_error), least)
        )

    def gain_of(self, record: TrialRecord) -> Contrast | None:
        """Return how far its rate lies above the baseline's, as measured; None for the baseline, and without one."""
        if record.number == 0 or self.baseline is None:
            return None
        return self.found.evidence.contrast(record.number, 0)


def select(found: SearchOutcome) -> Recommendation | None:
    """Return the recommendation from what is known so far; None where nothing is feasible."""
    contenders = Contenders.sound(found)
    chosen = contenders.chosen(found.settled)
    if chosen is None:
        return None
    gain = contenders.gain_of(chosen)
    advice = _lr_advice(chosen.config, found)
    same = contenders.fastest_at_own_batch([chosen, *contenders.records])
    if same is not None:
        own = [record for record in contenders.records if contenders.batch_ratio(record) == 1]
        same = (
            chosen
            if contenders.batch_ratio(chosen) == 1
            else contenders.choice_of(own, found.settled)
        )
    verdict = _verdict(chosen, contenders)
    return Recommendation(
        config=chosen.config.model_copy(update={"lr": advice.lr}),
        number=chosen.number,
        verdict=verdict,
        speedup=_speedup(chosen, contenders),
        measured_speedup=None if gain is None else gain.ratio(),
        gain_probability=None
        if gain is None
        else 1 - believe(gain, contenders.proof).chance_below(0.0),
        more_s=_more_s(chosen, contenders) if verdict == "unconfirmed" else None,
        lr_advice=advice,
        same_batch=None if same is None else same.config,
        same_batch_number=None if same is None else same.number,
        same_batch_speedup=None if same is None else _speedup(same, contenders),
        larger_batch=_larger_batch(chosen, same, contenders),
        reasons=tuple(_reasons(chosen, contenders, verdict)),
        confirmations=_confirmations(chosen, contenders),
        stress=found.stresses.get(chosen.number),
        overloaded=found.overloaded,
        is_outrun=_is_outrun(chosen, contenders),
    )


def _confirmations(chosen: TrialRecord, contenders: Contenders) -> tuple[TrialRecord, ...]:
    """The baseline, what is recommended, and what ran more than once: nothing where only the baseline ran."""
    if all(record.number == 0 for record in contenders.found.records):
        return ()
    return tuple(
        record
        for record in contenders.found.records
        if record.runs
        and record.is_feasible
        and (record.number in {0, chosen.number} or len(record.runs) > 1)
    )


def _is_outrun(chosen: TrialRecord, contenders: Contenders) -> bool:
    """Whether a faster trial may not be used: refused, over the limit, or refuted when it was run again."""
    usable = {record.number for record in contenders.records}
    rates = {
        record.number: record.measurement.samples_per_s
        for record in contenders.found.records
        if record.measurement
    }
    return any(
        rate > rates[chosen.number] for number, rate in rates.items() if number not in usable
    )


def _larger_batch(
    chosen: TrialRecord, same: TrialRecord | None, contenders: Contenders
) -> LargerBatch | None:
    """The best at a larger global batch, worth it or not, against the fastest at the baseline's own.

    Where a larger batch was chosen, it is that. `same` is what is shown as the best at the
    baseline's own.
    """
    larger = [record for record in contenders.records if contenders.batch_ratio(record) > 1]
    if not larger:
        return None
    best = (
        chosen
        if contenders.batch_ratio(chosen) > 1
        else max(larger, key=contenders.found.believed_score)
    )
    own = contenders.fastest_at_own_batch(contenders.records)
    rivals = {rival.number: rival for rival in (own, same) if rival is not None}
    ratios = [
        ratio for rival in rivals.values() if (ratio := contenders.over(best, rival)) is not None
    ]
    over = min(ratios, key=lambda ratio: ratio.value, default=None)
    return LargerBatch(
        config=best.config.model_copy(update={"lr": _lr_advice(best.config, contenders.found).lr}),
        number=best.number,
        speedup=_speedup(best, contenders),
        over_same_batch=over,
        is_worth_it=own is None or bool(contenders.is_worth_it(best, own)),
        break_even=None if over is None else _break_even(best, over, contenders),
    )


def _break_even(larger: TrialRecord, over: Interval, contenders: Contenders) -> Interval | None:
    """Return the noise scale above which the larger batch pays, by its throughput over that of the baseline's batch."""
    samples = contenders.found.space.baseline.global_batch_size
    # Not the configuration's own count: with a token budget that is rounded for each micro batch.
    larger_samples = samples * contenders.batch_ratio(larger)
    of_value = break_even_noise_scale(samples, larger_samples, over.value)
    of_low = break_even_noise_scale(samples, larger_samples, over.low)
    of_high = break_even_noise_scale(samples, larger_samples, over.high)
    if of_value is None or of_high is None:
        return None
    return Interval(value=of_value, low=of_high, high=inf if of_low is None else of_low)


def _verdict(chosen: TrialRecord, contenders: Contenders) -> Verdict:
    if contenders.baseline is None:
        return "baseline_infeasible"
    if chosen.number == 0:
        return "already_best" if contenders.found.is_settled else "unconfirmed"
    is_proven = chosen.number in contenders.found.proven and _is_compared(chosen, contenders.found)
    return "faster" if is_proven else "unconfirmed"


def _is_compared(chosen: TrialRecord, found: SearchOutcome) -> bool:
    """Whether the precision guard has passed what is recommended, where it needs that; an interrupt may come before."""
    key = guard_key(chosen.config)
    passed = (
        record
        for record in found.records
        if record.result.guard is not None and record.result.outcome == "ok"
    )
    compared = {guard_key(record.config) for record in passed}
    return not needs_guard(chosen.config, found.space.baseline) or key in compared


def _speedup(record: TrialRecord, contenders: Contenders) -> Interval | None:
    """What is believed of its gain; exactly 1 for the baseline itself."""
    if contenders.baseline is None:
        return None
    gain = contenders.gain_of(record)
    return (
        Interval(value=1.0, low=1.0, high=1.0)
        if gain is None
        else believe(gain, contenders.proof).ratio()
    )


def _more_s(chosen: TrialRecord, contenders: Contenders) -> float | None:
    """Seconds of further pairs of runs after which a gain as large as it looks should be proven."""
    found = contenders.found
    gain = contenders.gain_of(chosen)
    if gain is None or gain.value <= 0 or found.run_s <= 0:
        return None
    pairs = max(1, min(found.evidence.count(chosen.number), found.evidence.count(0)))
    needed = pairs * (contenders.proof.sure_sds * gain.sd / gain.value) ** 2
    more_s = 2 * found.run_s * max(1, ceil(needed - pairs))
    return more_s if more_s <= contenders.proof.longest_wait_s else None


def _lr_advice(config: TrainingConfig, found: SearchOutcome) -> LrAdvice:
    baseline = found.space.baseline
    ratio = config.global_batch_ratio(baseline)
    return scale_lr(baseline.lr, ratio, found.space.objective.lr_rule, found.space.facts.optimizer)


def _reasons(chosen: TrialRecord, contenders: Contenders, verdict: Verdict) -> Iterator[Note]:
    """What the recommendation rests on."""
    reference = contenders.baseline
    found = contenders.found
    if reference is None:
        yield messages.baseline_is_no_reference()
    yield _why_this(chosen, contenders)
    if chosen.number == 0:
        return
    runs = found.evidence.count(chosen.number)
    baseline_runs = found.evidence.count(0)
    if verdict == "faster":
        yield messages.proven(exp(found.proven[chosen.number]) - 1, runs, baseline_runs)
    elif reference is not None and (gain := contenders.gain_of(chosen)) is not None:
        yield messages.not_proven(1 - believe(gain).chance_below(0.0), runs, baseline_runs)
    if not _is_compared(chosen, found):
        yield messages.precision_unchecked(chosen.config.amp_dtype)
    if reference is not None:
        yield messages.changed_settings([*changed_settings(chosen.config, reference.config)])


def _why_this(chosen: TrialRecord, contenders: Contenders) -> Note:
    found = contenders.found
    own = contenders.fastest_at_own_batch(contenders.records)
    dropped = [
        record
        for record in contenders.challengers[: contenders.proof.most_compared]
        if own is not None
        and contenders.batch_ratio(record) > 1
        and not contenders.is_worth_it(record, own)
    ]
    configurations = sum(
        found.batch_ratio(record.config) <= 1 or not dropped for record in found.records
    )
    is_outrun = _is_outrun(chosen, contenders)
    if chosen.number == 0 and found.overloaded:
        would = Contenders.of(found).chosen()
        return messages.faster_ones_overloaded(would is not None and would.number != 0)
    if chosen.number == 0:
        rivals = [record for record in contenders.challengers if record not in dropped][:3]
        gains = [gain for record in rivals if (gain := contenders.gain_of(record)) is not None]
        most = max((believe(gain).ratio().high - 1 for gain in gains), default=None)
        return messages.nothing_beats_baseline(
            configurations, is_outrun, bool(dropped), most_fraction=most
        )
    others = [record for record in contenders.records if record not in dropped]
    best = max(others, key=found.believed_score)
    behind = contenders.over(chosen, best)
    if best.number != chosen.number and behind is not None and behind.value < 1:
        return messages.simplest_of_the_best(best.number, behind.value)
    return messages.best_believed(configurations, is_outrun, bool(dropped))
