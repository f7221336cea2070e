"""A configuration that takes part in a confirmation, with its runs so far, and what runs take.

Comes in: its trial's record, and the records of its runs as they end. Goes out: a Confirmation, seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.analysis.decisions.confirmation_plan import SHORTEST_WINDOW_S
from autotune.analysis.time_estimate import QUEUES_OF_A_WINDOW, overhead_s, queue_s
from autotune.records.recommendation import Confirmation
from autotune.records.trial import TrialRecord

__all__ = ["Entrant", "hung_among", "overheads_s_of", "taken_s_of"]

_MOST_TIMEOUTS = 2  # our convention


@dataclass(slots=True)
class Entrant:
    """A configuration in the rounds, with its runs so far."""

    record: TrialRecord
    runs: list[TrialRecord] = field(default_factory=list)
    """Round by round, up to the last one that it took part in."""
    build_s: float = 0.0
    """As TrialRunner has it."""

    @property
    def overhead_s(self) -> float:
        """Seconds that its trial took outside its window, and by which its queue makes a window longer than planned."""
        return overhead_s(self.record, self.build_s) + self._queue_s

    @property
    def _queue_s(self) -> float:
        """A window covers two queues: seconds of these, less the shortest window, which is planned in any case."""
        measured = self.record.measurement
        if measured is None:
            return 0.0
        config, epoch_samples = self.record.config, measured.window.epoch_samples
        covered_s = queue_s(config, measured.samples_per_s, epoch_samples, queues=QUEUES_OF_A_WINDOW)
        return max(0.0, covered_s - SHORTEST_WINDOW_S)

    @property
    def excess_s(self) -> float:
        """By how many seconds more a run of it took here at the most."""
        usual_s = overhead_s(self.record, self.build_s)
        beyond = (overhead_s(run) - usual_s for run in self.runs if run.measurement is not None)
        return max(beyond, default=0.0)

    @property
    def is_feasible(self) -> bool:
        """Whether it still may win as far as its own runs tell; one that ran into a deadline may."""
        return all(run.is_feasible or run.outcome == "timeout" for run in self.runs)

    @property
    def timeouts(self) -> int:
        """Runs that ran into their deadline."""
        return sum(run.outcome == "timeout" for run in self.runs)

    def confirmation(self, *, is_hung: bool) -> Confirmation:
        """Its runs as a value; one that has hung can't win."""
        rounds = tuple(run.measurement for run in self.runs)
        number, config = self.record.number, self.record.config
        return Confirmation(number=number, config=config, rounds=rounds, is_feasible=self.is_feasible and not is_hung)


def hung_among(entrants: Sequence[Entrant]) -> set[int]:
    """Numbers of those that ran into a deadline twice, while another one's runs ended: these can't win.

    Once may be the search's own end, and where none ends the machine stands still. The baseline is what all others are
    compared with: it is never among them.
    """
    ended = {entrant.record.number for entrant in entrants if any(run.measurement is not None for run in entrant.runs)}
    late = {entrant.record.number for entrant in entrants if entrant.timeouts >= _MOST_TIMEOUTS}
    return {number for number in late - {0} if ended - {number}}


def overheads_s_of(asked: Sequence[Entrant], entrants: Sequence[Entrant]) -> list[float]:
    """What runs take outside their windows: as their trials did, and as much more as any run here has."""
    excess_s = max(0.0, *(entrant.excess_s for entrant in entrants))
    return [entrant.overhead_s + excess_s for entrant in asked]


def taken_s_of(entrants: Sequence[Entrant]) -> float:
    """Seconds of all runs so far."""
    return sum(run.result.wall_s for entrant in entrants for run in entrant.runs)
