"""What a batch is made of, whatever type it has: the tensors in it, their bytes, and its way to the device.

Takes what a loader delivers: a tensor, a mapping, a sequence, a dataclass, or any other object (a graph of
torch_geometric, an encoding of a tokenizer). Nothing here guesses how many samples a batch holds: see feed.

Batches that are trained on more than once are handed out each time as they came, since the user's code may change them
in place: containers and other objects are copied for each use, their tensors only where a first use has changed them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data._utils.pin_memory import pin_memory

from autotune.settings.applied.batch import rebuilt

__all__ = [
    "Held",
    "Reused",
    "batch_bytes",
    "batch_fingerprint",
    "copied",
    "leaves_of",
    "pinned",
    "resized",
    "tensors_of",
    "unpacked",
]

_PLAIN = (Tensor, np.ndarray, np.generic, str, bytes, bytearray, int, float, complex, type, nn.Module)
"""Types that are not taken apart."""
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_CLONED_BYTES = 64 * 2**20  # held at once beyond the batches themselves, our own convention; at least one step's
_REBUILT = frozenset({dict, list, tuple})


class Held(NamedTuple):
    """A batch that is kept to be trained on again."""

    batch: Any
    samples: int


def leaves_of(value: Any) -> Iterator[Any]:
    """All that a batch or a sample holds, in order: tensors, arrays, numbers, texts; of an object, its attributes'."""
    return _leaves(value, ())


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch, in order."""
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def batch_bytes(batches: Iterable[Any]) -> int:
    """Bytes of the tensors of some batches."""
    return sum(tensor.nbytes for batch in batches for tensor in tensors_of(batch))


def batch_fingerprint(batch: Any) -> int:
    """A number that differs between batches of different items: of the first values of the first tensors.

    Where no tensor is found, it differs between processes: nothing is known of the items.
    """
    parts = [tensor.detach().flatten()[:256].tolist() for tensor in islice(tensors_of(batch), 4)]
    return crc32(repr(parts).encode()) if parts else os.getpid()


def resized(batch: Any, count: int, size: int) -> Any:
    """A batch with `size` samples, made from one with `count` samples, which are repeated as often as needed.

    Raises:
        ValueError: its type can't be rebuilt, or a tensor in it does not have the samples in its first dimension.
    """
    if not any(tensor.ndim for tensor in tensors_of(batch)):
        raise ValueError(f"a batch of type {type(batch).__name__} can't be made larger or smaller here")

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor):
            own = rebuilt(value, change)
            if own is value and tensors_of(value):
                raise ValueError(f"an object of type {type(value).__name__} can't be made larger or smaller here")
            return own
        if value.ndim == 0:
            return value
        if value.shape[0] != count or count == 0:
            raise ValueError(f"a tensor of shape {tuple(value.shape)} does not have the {count} samples in front")
        return value[torch.arange(size) % count]

    return change(batch)


def _leaves(value: Any, above: tuple[int, ...]) -> Iterator[Any]:
    """The leaves of a value; objects whose ids are in `above` hold it, and are not taken apart again."""
    # guards against objects that reach half of a program
    parts = None if len(above) > 8 or id(value) in above else _parts(value)
    if parts is None:
        yield value
        return
    for part in parts:
        yield from _leaves(part, (*above, id(value)))


def _parts(value: Any) -> list[Any] | None:
    """What a value holds; None for what is not taken apart."""
    if isinstance(value, Tensor) and value.layout in _SPARSE:
        return [value._indices(), value._values()] if value.layout == torch.sparse_coo else [value.values()]  # noqa: SLF001 - the public names ask for a coalesced tensor
    if isinstance(value, _PLAIN):
        return None
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return list(vars(value).values()) or None if hasattr(value, "__dict__") else None


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


def pinned(batch: Any) -> Any:
    """A batch in page-locked memory, as torch's DataLoader pins one."""
    pin: Callable[[Any], Any] = pin_memory  # torch has not typed it
    return pin(batch)


def copied(batch: Any) -> Any:
    """A batch of its own in pageable memory; one whose tensors are shared where a user's class refuses to be copied."""
    return _tried(deepcopy, batch, unpacked)


def unpacked(value: Any) -> Any:
    """The same tensors in a batch that can be emptied: objects that `Trainer.train` does not build anew are copied."""
    if isinstance(value, Tensor):
        return value
    return rebuilt(value, unpacked) if type(value) in _REBUILT else _tried(copy, value, lambda own: own)


def _tried(copy_of: Callable[[Any], Any], value: Any, otherwise: Callable[[Any], Any]) -> Any:
    with suppress(Exception):  # a user's class may refuse in any way
        return copy_of(value)
    return otherwise(value)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; torch does not count it for one that was made for inference."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public way to ask
