"""Keep a value that takes long to compute, until what it is computed from changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(slots=True)
class Latest(Generic[_T]):
    """The latest value, with the stamp of the data that it was computed from."""

    stamp: object = None
    """The data, or a key of it."""
    value: _T | None = None

    def of(self, stamp: object, make: Callable[[_T | None], _T]) -> _T:
        """Return the value for a stamp; `make` computes it from the one before."""
        if self.value is None or self.stamp != stamp:
            self.value = make(self.value)
            self.stamp = stamp
        return self.value
