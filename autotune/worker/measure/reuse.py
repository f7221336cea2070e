"""Batches that are trained on more than once, each time as they came: the user's code may change them in place.

Takes batches; hands on copies to train on. Containers and other objects are copied for each use, their tensors only
where a first use has changed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from itertools import cycle, islice
from typing import Any

from torch import Tensor

from autotune.worker.measure.batch import batch_bytes, rebuilt, tensors_of

__all__ = ["Reused", "copied", "unpacked"]

_CLONED_BYTES = 64 * 2**20  # held at once beyond the batches themselves, our own convention; at least one step's
_REBUILT = frozenset({dict, list, tuple})


class Reused:
    """Batches in turns without end. The first is handed out as a whole copy, and checked when the next is asked for.

    So the first has to be trained on before more are taken.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self._turns = cycle(batches)
        self.handed_out = 0
        self._lent: list[tuple[Tensor, int]] | None = None
        """The first one's tensors, with their versions."""
        self._clones = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._turns)
        self.handed_out += 1
        if self._lent is None:
            own = copied(batch)
            self._lent = [(tensor, _version(tensor)) for tensor in tensors_of(own)]
            return own
        self._clones = self._clones or any(_version(tensor) != version for tensor, version in self._lent)
        self._lent = []
        return copied(batch) if self._clones else unpacked(batch)

    def take(self, steps: int, per_step: int) -> list[Any]:
        """Batches of some optimizer steps, made before a clock starts; of fewer where they have to be cloned."""
        first = next(self)
        if self._clones:
            step_bytes = per_step * batch_bytes([first])
            steps = min(steps, max(1, _CLONED_BYTES // max(1, step_bytes)))
        return [first, *islice(self, steps * per_step - 1)]


def copied(batch: Any) -> Any:
    """A batch of its own, tensors and all; one whose tensors are shared where a user's class refuses to be copied."""
    return _tried(deepcopy, batch, unpacked)


def unpacked(value: Any) -> Any:
    """The same tensors in a batch that can be emptied: objects that `Trainer.train` does not build anew are copied."""
    if isinstance(value, Tensor):
        return value
    return rebuilt(value, unpacked) if type(value) in _REBUILT else _tried(copy, value, lambda own: own)


def _tried(copy_of: Callable[[Any], Any], value: Any, otherwise: Callable[[Any], Any]) -> Any:
    try:
        return copy_of(value)
    except Exception:  # noqa: BLE001 - a user's class may refuse in any way
        return otherwise(value)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; torch does not count it for one that was made for inference."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public way to ask
