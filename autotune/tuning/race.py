"""Decide which trials run again and when a search is decided: the repeats of a search, and its proof.

During the search, the baseline runs again after every few other runs. Once no trial promises more,
the leader runs again until it has run twice; if it loses the lead, the next one does. Then leader
and baseline run in turn until the gain is proven and known well enough, or is unlikely to be
worthwhile, or can't be proven in time.

Comes in: the runs as they end. Goes out: the trial to run again, or none.
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
from autotune.tuning.select import Finalists
from autotune.tuning.time_budget import TimeBudget


@dataclass(slots=True, kw_only=True)
class Race:
    """A race under way."""

    time: TimeBudget
    ledger: Ledger
    outcome: Callable[[], SearchOutcome]
    """Returns everything measured so far."""
    passes: Callable[[TrialRecord], bool]
    """Returns True if a trial may lead; compares its precision with float32 where that is not known."""
    leader: int | None = None
    """Number of the finalist whose gain is to be proven."""
    is_settled: bool = False
    _from_s: float = 0.0
    """Time of the search when proving the leader's gain began."""
    _budget_s: float = 0.0
    """Seconds that this may take."""
    _repeated: int = 0
    """Repeats so far of trials that may be better than the leader."""
    _analyzed_pairs: int = 0
    """Pairs of runs at the last interim analysis."""

    @property
    def _proof(self) -> Proof:
        return self.time.policy.proof

    def is_baseline_due(self, baseline: TrialRecord, best: TrialRecord | None) -> bool:
        """Return True if enough other runs have ended since the baseline's, and it is a valid reference."""
        since = 0
        for run in reversed(self.ledger.runs):
            if run.number == 0:
                break
            since += 1
        if self.time.is_short_search or since < self._proof.baseline_every:
            return False
        # a failed repeat is no reference, and the next one would be due at once
        if not baseline.is_feasible or baseline.results[-1].outcome != "ok":
            return False
        # another run decides nothing if the best is far ahead
        evidence = self.ledger.evidence
        if best is None or best.number == 0 or evidence.count(0) < self._proof.fewest_runs:
            return True
        contrast = evidence.contrast(best.number, 0)
        return contrast is None or contrast.chance_below(0.0) >= self._proof.clear

    def next_run(self) -> TrialRecord | None:
        """Return the trial to run again once no trial promises more; None if the search is decided."""
        finalists = Finalists.of(self.outcome())
        baseline = finalists.baseline
        leader = finalists.leader()
        if leader is None:
            self.is_settled = True
            return None
        if not self._has_time:
            return None
        if baseline is not None:
            failed_repeats = sum(run.outcome != "ok" for run in baseline.repeats)
            if failed_repeats >= self._proof.most_lost:
                self.is_settled = True
                return None
            for record in finalists.records:
                if record.number == self.leader:
                    return self._next_of_the_two(record, baseline)
        return self._settle(finalists, leader)

    def _settle(self, finalists: Finalists, leader: TrialRecord) -> TrialRecord | None:
        """Choose the leader; return the trial that must run before that, or the first run of the proof."""
        evidence = finalists.found.evidence
        baseline = finalists.baseline
        # decide first whether a larger batch is worth it
        contested = self._contested(finalists)
        if contested is not None:
            return contested
        contrast = evidence.contrast(leader.number, 0)
        has_baseline = baseline is not None and evidence.count(0) >= self._proof.fewest_runs
        if has_baseline and contrast is not None and self._is_hopeless(contrast):
            self.is_settled = True
            return None
        # repeat the leader, and what may well be better
        unsure = self._unsure(finalists, leader)
        if unsure is not None:
            return unsure
        if not self.passes(leader):
            return self.next_run()
        if baseline is None:
            self.is_settled = True
            return None
        # from here on, leader and baseline run in turn
        self.leader = leader.number
        self.is_settled = False
        self.ledger.settle(leader.number)
        self._from_s = self.time.clock.elapsed_s
        self._analyzed_pairs = 0
        self._budget_s = self._settle_s
        return self._next_of_the_two(leader, baseline)

    def _is_hopeless(self, contrast: Contrast) -> bool:
        """Return True if a worthwhile gain is unlikely."""
        return chance_worthwhile(contrast, self._proof) < self._proof.unlikely

    def settling_s(self, best: TrialRecord | None) -> float | None:
        """Return the seconds that the proof should still take; None before the best differs from the baseline.

        A large gain is proven and known well enough by the runs of the search and a few more. A
        small one takes all the time there is, unless it turns out to be none.
        """
        number = self.leader
        if number is None and best is not None:
            number = best.number
        contrast = None
        if number is not None:
            contrast = self.ledger.evidence.contrast(number, 0)
        if self.is_settled:
            return 0.0
        if self.leader is None and (contrast is None or number == 0):
            return None
        left_s = self._settle_s
        if self.leader is not None:
            left_s = max(0.0, self._budget_s - (self.time.clock.elapsed_s - self._from_s))
        if contrast is None or contrast.value <= self._proof.large_gain:
            return left_s
        return min(self._proof.large_gain_runs * self.time.run_s, left_s)

    @property
    def _settle_s(self) -> float:
        """Seconds for the whole proof."""
        limits = self.time.limits
        left_s = self.time.clock.left_s
        if left_s is not None:
            return left_s
        if self.time.is_short_search:
            return limits.short_search_deciding_builds * self.time.build_s
        return limits.deciding_s

    @property
    def _has_time(self) -> bool:
        left_s = self.time.clock.left_s
        return left_s is None or left_s >= self.time.run_s

    def _contested(self, finalists: Finalists) -> TrialRecord | None:
        """Return the best larger batch or the best at the baseline's, whichever ran less; None if it is decided."""
        own = finalists.fastest_at_own_batch(finalists.records)
        larger = next((one for one in finalists.by_rank if finalists.batch_ratio(one) > 1), None)
        if own is None or larger is None or self.time.is_short_search:
            return None
        found = finalists.found
        if found.believed_score(larger) <= found.believed_score(own):
            return None
        if finalists.is_worth_it(larger, own) is not None:
            return None
        both = [one for one in (larger, own) if len(one.results) < self._proof.most_contested]
        return min(both, key=lambda one: len(one.results), default=None)

    def _unsure(self, finalists: Finalists, leader: TrialRecord) -> TrialRecord | None:
        """Return the trial to repeat before the proof: the leader, then what may well be better; else None.

        Failed runs count too, so that none is repeated for ever.
        """
        if len(leader.results) < self._proof.fewest_runs:
            return leader
        if self._repeated >= self._proof.most_repeats or self.time.is_short_search:
            return None
        found = finalists.found
        most = finalists.batch_ratio(leader)
        fastest = finalists.by_rank[: 2 * self._proof.most_repeats]
        others = [
            one
            for one in fastest
            if one is not leader
            and len(one.results) < self._proof.fewest_runs
            and finalists.batch_ratio(one) <= most
        ]
        gains = {one.number: self._expected_gain(one, leader, found) for one in others}
        best = max(others, key=lambda one: gains[one.number], default=None)
        if best is None or gains[best.number] < self.time.policy.trials.least_gain:
            return None
        self._repeated += 1
        return best

    def _expected_gain(self, one: TrialRecord, leader: TrialRecord, found: SearchOutcome) -> float:
        """Return the expected gain of a trial over the leader, counting it as 0 if it is slower."""
        contrast = found.evidence.contrast(one.number, leader.number)
        if contrast is None:
            return 0.0
        ahead = log(found.believed_score(one) / found.believed_score(leader))
        normal = NormalDist(0.0, contrast.sd)
        return ahead * normal.cdf(ahead) + contrast.sd**2 * normal.pdf(ahead)

    def _next_of_the_two(self, leader: TrialRecord, baseline: TrialRecord) -> TrialRecord | None:
        """Return whichever of leader and baseline ran less often; None if decided, or out of time."""
        spent_s = self.time.clock.elapsed_s - self._from_s
        ledger = self.ledger
        pairs = ledger.pairs
        is_last = (
            spent_s + 2 * self.time.run_s > self._budget_s
            or pairs >= self._proof.most_pairs
            or not self._has_time
        )
        # an interim analysis after each further pair of runs, and a final one
        if pairs > self._analyzed_pairs or (is_last and pairs):
            self._analyzed_pairs = pairs
            used = 1.0 if self._budget_s <= 0 else spent_s / self._budget_s
            ledger.analyze(max(used, pairs / self._proof.most_pairs), is_last=is_last)
        contrast = ledger.evidence.contrast(leader.number, 0)
        leader_runs = len(leader.results)
        baseline_runs = len(baseline.results)
        is_known = min(leader_runs, baseline_runs) >= self._proof.fewest_runs
        if contrast is not None and is_known and self._is_decided(leader.number, contrast, spent_s):
            self.is_settled = True
            return None
        if is_last and is_known and leader_runs >= baseline_runs:
            self.is_settled = True
            return None
        if is_last and (is_known or self.time.clock.left_s is not None):
            return None
        return baseline if baseline_runs <= leader_runs else leader

    def _is_decided(self, number: int, contrast: Contrast, spent_s: float) -> bool:
        """Return True if the gain is proven and precise, or unlikely to be worthwhile or provable."""
        if number in self.ledger.proven:
            ratio = believe(contrast, self._proof).ratio()
            half_width = log(ratio.high / ratio.low) / 2
            precise = max(self._proof.precise, self._proof.precise_share * log(ratio.value))
            return half_width <= precise
        if self._is_hopeless(contrast):
            return True
        # could a gain of the expected size be proven in the time for the proof?
        pairs = self.ledger.pairs
        if pairs < self._proof.futile_after:
            return False
        in_time = inf  # further pairs of runs
        if spent_s > 0:
            in_time = max(0.0, self._budget_s / spent_s - 1) * pairs
        more = min(in_time, self._proof.most_pairs - pairs)
        error = contrast.sd * sqrt(pairs / (pairs + more))
        usual_variance = self._proof.usual_gain_sd**2
        shrunk = contrast.value * usual_variance / (usual_variance + contrast.sd**2)
        return shrunk < error
