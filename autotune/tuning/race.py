"""Which configuration runs again, and when a search is decided: the repeats of a search, and its proof.

While it searches, the baseline runs again after every few other runs. Once no trial promises more,
what leads runs again until it has run twice; where it loses the lead, the next one does. Then
leader and baseline run in turns, until the gain is proven and known well enough, or is not likely
to be worth a change, or could not be proven in time.

Comes in: the runs as they end. Goes out: the trial that is to run again, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log, sqrt
from statistics import NormalDist

from autotune.models.evidence import Contrast, Ledger, believe, chance_worthwhile
from autotune.policy import Proof
from autotune.records.trial import TrialRecord
from autotune.tuning.outcomes import SearchOutcome
from autotune.tuning.select import Contenders
from autotune.tuning.time_budget import TimeBudget


@dataclass(slots=True, kw_only=True)
class Race:
    """A race under way."""

    time: TimeBudget
    ledger: Ledger
    look: Callable[[], SearchOutcome]
    """What was measured so far."""
    passes: Callable[[TrialRecord], bool]
    """Whether a trial may lead: its precision is compared where that was not done before."""
    leader: int | None = None
    """Number of the trial that was settled on."""
    is_settled: bool = False
    _from_s: float = 0.0
    _budget_s: float = 0.0
    _challenged: int = 0
    _looked_at: int = 0
    """Pairs of runs at the last look."""

    @property
    def _proof(self) -> Proof:
        return self.time.policy.proof

    def is_baseline_due(self) -> bool:
        """Return True where enough others have run since the baseline did, and it is a reference."""
        runs = self.ledger.runs
        since = next(
            (place for place, run in enumerate(reversed(runs)) if run.number == 0), len(runs)
        )
        if self.time.is_brief or since < self._proof.baseline_every:
            return False
        found = self.look()
        baseline = found.baseline
        if baseline is None or not baseline.is_feasible:
            return False
        # a failed run is no reference, and would be due again at once
        has_failed = bool(baseline.repeats) and baseline.repeats[-1].outcome != "ok"
        return not has_failed and not self._is_clear(found)

    def _is_clear(self, found: SearchOutcome) -> bool:
        """Whether the best is so far ahead of the baseline, which ran twice, that its next run decides nothing."""
        best = found.best
        evidence = found.evidence
        if best is None or best.number == 0 or evidence.count(0) < self._proof.fewest_runs:
            return False
        contrast = evidence.contrast(best.number, 0)
        return contrast is not None and contrast.chance_below(0.0) < self._proof.clear

    def next_run(self) -> TrialRecord | None:
        """Return the trial that is to run again once nothing promises more; None where the search is decided."""
        found = self.look()
        contenders = Contenders.of(found)
        baseline = contenders.baseline
        leader = contenders.leader()
        if leader is None or not self._has_time(found):
            self.is_settled = leader is None or self.is_settled
            return None
        if (
            baseline is not None
            and sum(run.outcome != "ok" for run in baseline.repeats) >= self._proof.most_lost
        ):
            self.is_settled = True
            return None
        settled = next(
            (record for record in contenders.records if record.number == self.leader), None
        )
        if settled is not None and baseline is not None:
            return self._next_of_the_two(settled, baseline, found)
        return self._settle(contenders, leader)

    def _settle(self, contenders: Contenders, leader: TrialRecord) -> TrialRecord | None:
        """The trial that must run again before one is settled on, or the first run after that."""
        found = contenders.found
        baseline = contenders.baseline
        if (record := self._contested(contenders)) is not None:
            return record
        if baseline is not None and self._is_hopeless(leader, found):
            self.is_settled = True
            return None
        if (record := self._unsure(contenders, leader)) is not None:
            return record
        if not self.passes(leader):
            return self.next_run()
        if baseline is None:
            self.is_settled = True
            return None
        self.leader = leader.number
        self.is_settled = False
        self.ledger.settle(leader.number)
        self._from_s = self.time.clock.elapsed_s
        self._looked_at = 0
        self._budget_s = self._settle_s
        return self._next_of_the_two(leader, baseline, found)

    def _is_hopeless(self, leader: TrialRecord, found: SearchOutcome) -> bool:
        """Whether nothing is likely to be worth a change, by the baseline's runs and the single one of what leads."""
        contrast = found.evidence.contrast(leader.number, 0)
        is_known = found.evidence.count(0) >= self._proof.fewest_runs
        return (
            contrast is not None
            and is_known
            and chance_worthwhile(contrast, self._proof) < self._proof.unlikely
        )

    @property
    def left_s(self) -> float:
        """Seconds that deciding may still take at the most."""
        if self.is_settled:
            return 0.0
        if self.leader is None:
            return self._settle_s
        return max(0.0, self._budget_s - (self.time.clock.elapsed_s - self._from_s))

    def expected_s(self) -> float | None:
        """Return the seconds that deciding should still take; None before the best differs from the baseline.

        A large gain is proven and known well enough by the runs of the search and a few more. A
        small one takes the time that there is, to be known better, where it does not turn out to be
        none.
        """
        found = self.look()
        best = found.best
        number = self.leader if self.leader is not None or best is None else best.number
        contrast = None if number is None else found.evidence.contrast(number, 0)
        if self.is_settled or (contrast is None and self.leader is not None):
            return self.left_s
        if contrast is None or number == 0:
            return None
        if contrast.value <= self._proof.large_gain:
            return self.left_s
        return min(self._proof.large_gain_runs * found.run_s, self.left_s)

    @property
    def _settle_s(self) -> float:
        limits = self.time.limits
        left_s = self.time.clock.left_s
        if left_s is not None:
            return left_s
        return (
            limits.brief_deciding_builds * self.time.build_s
            if self.time.is_brief
            else limits.deciding_s
        )

    def _has_time(self, found: SearchOutcome) -> bool:
        left_s = self.time.clock.left_s
        return left_s is None or left_s >= found.run_s

    def _contested(self, contenders: Contenders) -> TrialRecord | None:
        """A larger batch of which it is open whether it is worth it, or its rival, whichever ran less often."""
        own = contenders.fastest_at_own_batch(contenders.records)
        larger = next(
            (one for one in contenders.challengers if contenders.batch_ratio(one) > 1), None
        )
        if own is None or larger is None or self.time.is_brief:
            return None
        found = contenders.found
        rivals = [one for one in (larger, own) if self._runs_of(one) < self._proof.most_contested]
        is_open = (
            found.believed_score(larger) > found.believed_score(own)
            and contenders.is_worth_it(larger, own) is None
        )
        return min(rivals, key=self._runs_of) if rivals and is_open else None

    def _unsure(self, contenders: Contenders, leader: TrialRecord) -> TrialRecord | None:
        """What must run again before one is settled on: the leader, then what may well be better."""
        if self._runs_of(leader) < self._proof.fewest_runs:
            return leader
        if self._challenged >= self._proof.most_challenged or self.time.is_brief:
            return None
        found = contenders.found
        most = contenders.batch_ratio(leader)
        open_ones = [
            one
            for one in contenders.challengers[: 2 * self._proof.most_challenged]
            if one is not leader
            and self._runs_of(one) < self._proof.fewest_runs
            and contenders.batch_ratio(one) <= most
        ]
        wins = {one.number: self._expected_win(one, leader, found) for one in open_ones}
        best = max(open_ones, key=lambda one: wins[one.number], default=None)
        if best is None or wins[best.number] < self.time.policy.trials.least_gain:
            return None
        self._challenged += 1
        return best

    def _expected_win(self, one: TrialRecord, leader: TrialRecord, found: SearchOutcome) -> float:
        """What one should win over the leader if it turns out to be better, by what is believed of both."""
        contrast = found.evidence.contrast(one.number, leader.number)
        if contrast is None:
            return 0.0
        ahead = log(found.believed_score(one) / found.believed_score(leader))
        normal = NormalDist(0.0, contrast.sd)
        return ahead * normal.cdf(ahead) + contrast.sd**2 * normal.pdf(ahead)

    def _next_of_the_two(
        self, leader: TrialRecord, baseline: TrialRecord, found: SearchOutcome
    ) -> TrialRecord | None:
        """Whichever of leader and baseline ran less often; None where it is decided, or there is no time."""
        spent_s = self.time.clock.elapsed_s - self._from_s
        ledger = self.ledger
        pairs = ledger.pairs
        is_last = (
            spent_s + 2 * found.run_s > self._budget_s
            or pairs >= self._proof.most_pairs
            or not self._has_time(found)
        )
        if pairs > self._looked_at or (is_last and pairs):
            self._looked_at = pairs
            used = 1.0 if self._budget_s <= 0 else spent_s / self._budget_s
            ledger.look(max(used, pairs / self._proof.most_pairs), is_last=is_last)
        contrast = ledger.evidence.contrast(leader.number, 0)
        runs = {record.number: self._runs_of(record) for record in (leader, baseline)}
        is_known = min(runs.values()) >= self._proof.fewest_runs
        if contrast is not None and is_known and self._is_decided(leader.number, contrast, spent_s):
            self.is_settled = True
            return None
        if is_last and runs[leader.number] >= runs[0] and is_known:
            self.is_settled = True
            return None
        if is_last and not (self.time.clock.left_s is None and not is_known):
            return None
        return baseline if runs[0] <= runs[leader.number] else leader

    def _is_decided(self, number: int, contrast: Contrast, spent_s: float) -> bool:
        if number in self.ledger.proven:
            ratio = believe(contrast, self._proof).ratio()
            return log(ratio.high / ratio.low) / 2 <= max(
                self._proof.precise, self._proof.precise_share * log(ratio.value)
            )
        return chance_worthwhile(contrast, self._proof) < self._proof.unlikely or self._is_futile(
            contrast, spent_s
        )

    def _is_futile(self, contrast: Contrast, spent_s: float) -> bool:
        """Whether a gain as large as is to be expected could not be proven in the time for settling."""
        pairs = self.ledger.pairs
        if pairs < self._proof.futile_after:
            return False
        in_time = max(0.0, self._budget_s / spent_s - 1) * pairs if spent_s > 0 else inf
        more = min(in_time, self._proof.most_pairs - pairs)
        error = contrast.sd * sqrt(pairs / (pairs + more))
        usual_variance = self._proof.usual_gain_sd**2
        shrunk = contrast.value * usual_variance / (usual_variance + contrast.sd**2)
        return shrunk < error

    def _runs_of(self, record: TrialRecord) -> int:
        """How often it ran; a run that failed counts, so that none is tried for ever."""
        return len(record.results)
