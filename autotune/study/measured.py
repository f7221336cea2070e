"""The trials of a study that have ended, and what is asked of them many times between two of them: calculated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from autotune.records.trial import TrialRecord, best_of

__all__ = ["MeasuredTrials"]


class MeasuredTrials:
    """Records by a key of their configuration's behaviour."""

    def __init__(self, records: Mapping[str, TrialRecord]) -> None:
        self._by_key = dict(records)

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def get(self, key: str) -> TrialRecord | None:
        """The record of a configuration; None where it was not measured."""
        return self._by_key.get(key)

    def of_number(self, number: int) -> tuple[str, TrialRecord]:
        """A trial's key and record."""
        return next((key, record) for key, record in self._by_key.items() if record.number == number)

    def keep(self, key: str, record: TrialRecord) -> None:
        """Add a record, or put it in the place of the former one."""
        self._by_key[key] = record
        for name in ("ended", "in_order", "best"):
            self.__dict__.pop(name, None)

    @cached_property
    def ended(self) -> Sequence[TrialRecord]:
        """In the order in which they ended; the same object until another one ends."""
        return tuple(self._by_key.values())

    @cached_property
    def in_order(self) -> Sequence[TrialRecord]:
        """By number."""
        return tuple(sorted(self.ended, key=lambda record: record.number))

    @cached_property
    def best(self) -> TrialRecord | None:
        """The feasible trial with the best score, as it was measured."""
        return best_of(self.in_order)
