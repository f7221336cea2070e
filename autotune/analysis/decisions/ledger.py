"""The error that a search may spend on saying "faster", and what it has bought: the proofs. Pure.

A search looks at its figures after every run, and chooses the best of many configurations. Both would make luck look
like a gain. So every look has an error of its own, and all of them together stay within what is allowed, whatever the
data say and however long the search goes on (Bonferroni over configurations and looks):

- while it searches: the j-th configuration tried has SEARCH_ERROR / (j (j + 1)), and its n-th look 2^-n of that;
- once it has settled on a leader: only runs made since then count, which the choice does not depend on. Looks are few,
  and spend more the later they come (Lan and DeMets 1983, Kim and DeMets 1987). Where a leader falls later on, the next
  one has a quarter of what was left.

A proof is never taken back. Both configurations must have run twice, the baseline once after the other: a stretch in
which a neighbour slowed the machine down fakes any gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from autotune.analysis.decisions.evidence import Evidence, evidence_of_runs
from autotune.analysis.decisions.run_spread import Run
from autotune.policy import POLICY, Proof
from autotune.records.run_spread import RunSpread
from autotune.records.trial import TrialRecord

__all__ = ["Ledger"]


@dataclass(slots=True)
class Ledger:
    """Runs as they come, looks at them, and what these have proven."""

    spread: RunSpread
    """Between runs of the same settings, before these."""
    proof: Proof = POLICY.proof
    runs: list[Run] = field(default_factory=list)
    proven: dict[int, float] = field(default_factory=dict)
    """By configuration, the logarithm of the gain over the baseline (number 0) that is proven, the largest so far."""
    _order: list[int] = field(default_factory=list)
    """Configurations in the order in which they were tried."""
    _looks: Counter[int] = field(default_factory=Counter)
    _leader: int | None = None
    _since: int = 0
    """Place of the first run that counts for the leader."""
    _left: float = field(init=False)
    _budget: float = 0.0
    """Error of the leader."""
    _used: float = 0.0
    """Share of the settling that was over at the last look."""
    _evidence: Evidence | None = None

    def __post_init__(self) -> None:
        """Begin with all of the error to spend."""
        self._left = self.proof.settle_error

    @classmethod
    def going_on(cls, spread: RunSpread, records: Iterable[TrialRecord], proof: Proof = POLICY.proof) -> Ledger:
        """Return the ledger of a search that goes on: its runs are looked at again in the order in which they ended.

        What an interrupted search spent on settling is not known. One that had repeated a trial counts as having
        settled on it once.
        """
        ledger, known = cls(spread, proof), list(records)
        for run in evidence_of_runs(known, spread).runs:
            ledger.add(run)
        if any(record.repeats for record in known if record.number != 0):
            ledger._left *= 1 - proof.first_share
        return ledger

    @property
    def evidence(self) -> Evidence:
        """All runs so far."""
        if self._evidence is None or len(self._evidence.runs) < len(self.runs):
            self._evidence = Evidence(tuple(self.runs), self.spread)
        return self._evidence

    def add(self, run: Run) -> None:
        """Take a run, and look at its configuration; after a run of the baseline, at the leader."""
        self.runs.append(run)
        number = self._leader if run.number == 0 else run.number
        if number is None:
            return
        if number not in self._order:
            self._order.append(number)
        self._look_at(number)

    def settle(self, number: int) -> None:
        """Count only what comes from here on for a leader; it can't be chosen by that."""
        self._leader, self._since, self._used = number, len(self.runs), 0.0
        self._budget = self.proof.first_share * self._left
        self._left *= 1 - self.proof.first_share

    @property
    def pairs(self) -> int:
        """Runs of the leader and of the baseline, in pairs, since it was settled on."""
        late = Counter(run.number for run in self.runs[self._since :])
        return 0 if self._leader is None else min(late[self._leader], late[0])

    def look(self, used: float, *, is_last: bool = False) -> None:
        """Look at the leader, if enough pairs have come since the last look.

        Args:
            used: Share of the time for settling that is over.
            is_last: No further look follows.
        """
        if self._leader is None or self.pairs == 0 or not (is_last or self.pairs in self.proof.analyses_after):
            return
        used = 1.0 if is_last else min(used, 1.0)
        error, self._used = self._budget * (used**2 - self._used**2), max(used, self._used)
        self._prove(self._leader, error, since=self._since)

    def _look_at(self, number: int) -> None:
        if not self._may_prove(number):
            return
        self._looks[number] += 1
        place = 1 + self._order.index(number)
        self._prove(number, self.proof.search_error / (place * (place + 1)) * 0.5 ** self._looks[number])

    def _may_prove(self, number: int) -> bool:
        """Return True where both ran twice, and the baseline once after the configuration: a slow stretch ends."""
        first = next((place for place, run in enumerate(self.runs) if run.number == number), len(self.runs))
        runs_after = any(run.number == 0 for run in self.runs[first:])
        return runs_after and min(self.evidence.count(number), self.evidence.count(0)) >= self.proof.fewest_runs

    def _prove(self, number: int, error: float, *, since: int = 0) -> None:
        contrast = self.evidence.contrast(number, 0, since=since) if self._may_prove(number) else None
        if contrast is None or error < 1e-9:
            return
        if contrast.chance_below(0.0) < error:
            self.proven[number] = max(self.proven.get(number, 0.0), contrast.quantile(error))
