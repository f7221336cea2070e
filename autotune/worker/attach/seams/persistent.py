"""Workers that outlive their epoch because autotune says so: in all else the script is to train as if they did not.

Comes in: a loader that is given `persistent_workers` from outside, whenever it is iterated. Goes out: an iterator. Such
workers hold the dataset as it was when they began, so that they are started again where the script has changed it
since (`set_epoch`, a curriculum); and a loader has one such iterator, so that a second one within an epoch gets workers
of its own, or the first would begin again. Changes inside of a list or a tensor of the dataset are not seen.
"""

# ruff: noqa: SLF001 - torch's own names
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, Dataset

__all__ = ["begin", "guard", "has_epochs", "is_over"]

_OVER = "autotune_is_over"
_State = tuple[object, ...]
_GUARDED: WeakKeyDictionary[DataLoader[Any], _State] = WeakKeyDictionary()
"""The state of the dataset that the workers of each loader hold."""


def guard(loader: DataLoader[Any]) -> None:
    """Have a loader, just made, train as if its workers ended with each epoch."""
    _GUARDED[loader] = ()


def begin(loader: DataLoader[Any], own_iter: Callable[[Any], Any]) -> Any:
    """Iterate a loader by its own `__iter__`."""
    if loader not in _GUARDED:
        return own_iter(loader)
    is_held, former, state = _references(loader) > _UNHELD, loader._iterator, _state_of(loader.dataset)
    if former is not None and is_held and not getattr(former, _OVER, False):
        loader._iterator = None
        try:
            return own_iter(loader)
        finally:
            loader._iterator = former
    if former is not None and state != _GUARDED[loader]:
        loader._iterator = None
        former._shutdown_workers()  # type: ignore[attr-defined] # only one with workers persists
    _GUARDED[loader] = state
    iterator = own_iter(loader)
    with suppress(AttributeError):  # a subclass's may be a generator, which nothing can be noted on
        setattr(iterator, _OVER, False)
    return iterator


def is_over(iterator: Any) -> None:
    """An iterator has no more batches for its epoch: whoever still holds it will ask for none."""
    setattr(iterator, _OVER, True)


def has_epochs(dataset: object) -> bool:
    """Return whether a dataset, or one inside of it, is told of its epoch, which workers that persist never hear of."""
    return any(callable(getattr(one, "set_epoch", None)) for one in _datasets_in(dataset))


def _references(loader: Any) -> int:
    return sys.getrefcount(loader._iterator)


class _Alone:
    """Holds an iterator that nobody else does."""

    def __init__(self) -> None:
        self._iterator = object()


_UNHELD = _references(_Alone())
"""References of an iterator that the loader alone holds; it differs between versions of Python."""


def _datasets_in(dataset: object) -> list[object]:
    """A dataset and those that it is made of: a Subset's, a ConcatDataset's."""
    found = [dataset]
    for one in found:
        for value in _attributes_of(one).values():
            # longer lists in a dataset are samples
            parts = value if isinstance(value, list | tuple) and len(value) <= 64 else [value]
            found += [part for part in parts if isinstance(part, Dataset) and not any(part is known for known in found)]
    return found


def _state_of(dataset: object) -> _State:
    """What of a dataset can be compared: plain values, and which objects it refers to."""
    state: list[object] = []
    for one in _datasets_in(dataset):
        for name, value in _attributes_of(one).items():
            is_plain = value is None or isinstance(value, bool | int | float | str)
            state.append((name, value if is_plain else id(value)))
    return tuple(state)


def _attributes_of(one: object) -> Mapping[str, object]:
    found: object = getattr(one, "__dict__", {})
    return found if isinstance(found, Mapping) else {}
