"""What a batch is made of: its tensors and bytes, its way to the device, the samples and tokens in it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import cycle, islice
from math import sqrt
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from autotune.apply.loader import rebuilt
from autotune.config.tf_data import TfLoader
from autotune.records.measurement import Tokens

# What a batch is made of, whatever type it has: the tensors in it, their bytes, and its way to the
# device.
#
# Takes what a loader delivers: a tensor, a mapping, a sequence, a dataclass, or any other object (a
# graph of torch_geometric, an encoding of a tokenizer). Nothing here guesses how many samples a
# batch holds: see feed.
#
# Batches that are trained on more than once are handed out each time as they came, since the user's
# code may change them in place: containers and other objects are copied for each use, their tensors
# only where a first use has changed them.


_PLAIN = (
    Tensor,
    np.ndarray,
    np.generic,
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type,
    nn.Module,
)
"""Types that are not taken apart."""
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_CLONED_BYTES = (
    64 * 2**20
)  # held at once beyond the batches themselves, our own convention; at least one step's
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
        ValueError: its type can't be rebuilt, or a tensor in it does not have the samples in its
            first dimension.
    """
    if not any(tensor.ndim for tensor in tensors_of(batch)):
        raise ValueError(
            f"a batch of type {type(batch).__name__} can't be made larger or smaller here"
        )

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor):
            own = rebuilt(value, change)
            if own is value and tensors_of(value):
                raise ValueError(
                    f"an object of type {type(value).__name__} can't be made larger or smaller here"
                )
            return own
        if value.ndim == 0:
            return value
        if value.shape[0] != count or count == 0:
            raise ValueError(
                f"a tensor of shape {tuple(value.shape)} does not have the {count} samples in front"
            )
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
        if value.layout == torch.sparse_coo:  # the public names ask for a coalesced tensor
            return [value._indices(), value._values()]  # noqa: SLF001
        return [value.values()]
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
        self._clones = self._clones or any(
            _version(tensor) != version for tensor, version in self._lent
        )
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
    return (
        rebuilt(value, unpacked)
        if type(value) in _REBUILT
        else _tried(copy, value, lambda own: own)
    )


def _tried(copy_of: Callable[[Any], Any], value: Any, otherwise: Callable[[Any], Any]) -> Any:
    with suppress(Exception):  # a user's class may refuse in any way
        return copy_of(value)
    return otherwise(value)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; torch does not count it for one that was made for inference."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public way to ask


# How many samples a batch holds: counted where the loader puts it together, never guessed; and how
# many tokens.
#
# Comes in: a loader. Goes out: what makes a batch and its size from each delivery. A map-style
# dataset's batch has as many as the sampler drew indices for it. A stream's has the loader's batch
# size where short batches are dropped; else a wrapper around `collate_fn` counts them in the
# worker, and sends the number along with the batch. A tf.data pipeline's loader counts them by what
# its elements are specified as. A dataset that makes whole batches: their tensors' first dimension.
#
# Tokens are the numbers in a batch's first integer tensor of two dimensions, (batch, length),
# padding included. Within a window its shape alone is read.


_TOKENS = "input_ids"
"""What the tokens are called wherever a batch has names: transformers' own."""
_MASK = "attention_mask"
"""The only one that is read: others mark special tokens, or mean the padding itself (torch's
key_padding_mask)."""
_ANY_MASK = "mask"


def size_counter(
    loader: DataLoader[Any] | TfLoader, drawn: deque[int]
) -> Callable[[Any], tuple[Any, int]]:
    """What makes a batch and its number of samples from each delivery of a loader, whose sizes are noted in `drawn`.

    It raises IndexError for a batch that was begun before this was called.

    Workers that deliver batches in the order in which they are ready have them counted where they
    are collated. Of a dataset with `__getitems__`, which may hand anything to `collate_fn`, the
    sizes are those that were drawn: with `in_order=False` an epoch's sum is right, each alone may
    not be.
    """
    if isinstance(loader, TfLoader):
        return lambda batch: (batch, loader.samples)
    if loader.batch_sampler is None:  # whole batches are made elsewhere
        return lambda batch: (batch, length_of_batch(batch))
    is_out_of_order = loader.num_workers > 0 and not loader.in_order
    is_counted_as_drawn = not is_out_of_order or hasattr(loader.dataset, "__getitems__")
    if is_counted_as_drawn and not isinstance(loader.dataset, IterableDataset):
        # torch refuses another sampler once a loader is made, since its iterator might hold the old
        # one
        vars(loader)["batch_sampler"] = _Counted(loader.batch_sampler, drawn)
        return lambda batch: (batch, drawn.popleft())
    size = loader.batch_size
    if loader.drop_last and size is not None:
        return lambda batch: (batch, size)
    loader.collate_fn = partial(_with_count, loader.collate_fn)
    return _apart


class CountedBatch(NamedTuple):
    """A batch with its number of samples, as a worker sends both; a tuple, so that torch pins what is in it."""

    batch: Any
    samples: int


class Parts(NamedTuple):
    """What puts a loader's batches together."""

    batch_sampler: Any
    collate_fn: Callable[[Any], Any]


def unwrapped(loader: DataLoader[Any]) -> Parts:
    """A loader's own batch sampler and collate function, without what `size_counter` has put around them."""
    sampler = loader.batch_sampler
    collate = loader.collate_fn
    if isinstance(sampler, _Counted):
        sampler = sampler.counted
    if isinstance(collate, partial) and collate.func is _with_count:
        collate = collate.args[0]
    return Parts(sampler, collate)


class _Counted:
    """A batch sampler that notes the size of each batch as the loader draws it; all else is the sampler's own."""

    def __init__(self, sampler: Any, drawn: deque[int]) -> None:
        self.counted = sampler
        self._drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        for batch in self.counted:
            self._drawn.append(len(batch) if isinstance(batch, Sized) else 1)
            yield batch

    def __len__(self) -> int:
        return len(self.counted)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet: it is being copied, or unpickled
            raise AttributeError(name)
        return getattr(self.counted, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.counted, name, value)


_OWN = frozenset({"counted", "_drawn"})


def _with_count(collate: Callable[[Any], Any], samples: Any) -> CountedBatch:
    """A batch, and how many samples the collate function was given for it."""
    return CountedBatch(collate(samples), len(samples))


def length_of_batch(batch: Any) -> int:
    """Samples of a batch that a dataset has made: the length of its first tensor or array, else of a list; else one."""
    first = next((leaf for leaf in leaves_of(batch) if getattr(leaf, "shape", ())), None)
    if first is not None:
        return int(first.shape[0])
    return len(batch) if isinstance(batch, list) else 1


def _apart(counted: Any) -> tuple[Any, int]:
    """A batch and its samples.

    Raises:
        IndexError: it was collated before anybody counted.
    """
    if type(counted) is not CountedBatch:
        raise IndexError
    return counted.batch, counted.samples


_Path = tuple[Callable[[Any], Any], ...]
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class TokenCount:
    """Counts the tokens of batches that are like a first one. Before the window masks are read too."""

    def __init__(self, tokens: _Path, mask: _Path | None, *, has_name: bool) -> None:
        self._tokens = tokens
        self._mask = mask
        self._has_name = has_name
        self._masked = 0
        self._real = 0
        self._is_lost = False
        self.lengths = deque[int](maxlen=1000)
        """Padded lengths of the last batches."""
        self._sums = _Sums()

    def begin_window(self) -> None:
        """Begin anew; from here on shapes alone are read."""
        self._mask, self._sums = None, _Sums()
        self.lengths.clear()

    def add(self, batch: Any, samples: int) -> None:
        """Count a batch; one that is unlike the first ends the count."""
        if self._is_lost:
            return
        try:
            tensor = _at(batch, self._tokens)
            rows, length = tensor.shape
            mask = None if self._mask is None else _at(batch, self._mask)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            self._is_lost = True
            return
        self.lengths.append(length)
        self._sums.add(samples, rows, length)
        if mask is not None:
            self._masked += mask.numel()
            self._real += int((mask != 0).sum())

    def figures(self) -> Tokens | None:
        """What was counted; None where batches are unlike each other, or where nothing tells that these are tokens.

        A table of whole numbers has two dimensions as well: tokens have a name, lengths that vary,
        or padding.
        """
        padding = 1 - self._real / self._masked if self._masked else None
        sums = self._sums
        if self._is_lost or not sums.samples or not sums.tokens:
            return None
        if not (self._has_name or sums.shortest != sums.longest or padding):
            return None
        return Tokens(
            per_sample=sums.tokens / sums.samples,
            relative_sd=sums.relative_sd(),
            batches=sums.batches,
            shortest=sums.shortest,
            longest=sums.longest,
            padding=padding,
        )


@dataclass(slots=True)
class _Sums:
    """Sums over batches, from which their figures come, however many there are."""

    batches: int = 0
    samples: int = 0
    tokens: int = 0
    shortest: int = 2**63
    longest: int = 0
    moments: tuple[int, int, int] = (0, 0, 0)
    """Of samples squared, times the length, and times its square."""

    def add(self, samples: int, rows: int, length: int) -> None:
        """Count a batch."""
        self.batches += 1
        self.samples += samples
        self.tokens += rows * length
        self.shortest, self.longest = min(self.shortest, length), max(self.longest, length)
        none, one, two, square = *self.moments, samples * samples
        self.moments = none + square, one + square * length, two + square * length * length

    def relative_sd(self) -> float | None:
        """Standard error of the mean tokens of a sample, as a share of it: that of a ratio of sums."""
        if self.batches < 2 or not self.tokens:
            return None
        mean = self.tokens / self.samples
        none, one, two = self.moments
        off = max(0.0, two - 2 * mean * one + mean * mean * none)
        return sqrt(off * self.batches / (self.batches - 1)) / self.tokens


def token_count(batch: Any, samples: int) -> TokenCount | None:
    """What counts the tokens of batches like this one; None where it has no integer tensor (batch, length)."""
    try:
        found = list(_paths(batch, (), 2))  # (inputs, targets) whose inputs are a mapping
    except Exception:  # noqa: BLE001 - a batch of a user's own type may raise anything: then nobody knows its tokens
        return None
    rows = [(path, names) for path, names, tensor in found if _is_tokens(tensor, samples, names)]
    if not rows:
        return None
    path, names = next((one for one in rows if one[1][-1:] == (_TOKENS,)), rows[0])
    shape = _at(batch, path).shape
    masks = (
        own for own, called, tensor in found if called[-1:] == (_MASK,) and tensor.shape == shape
    )
    return TokenCount(path, next(masks, None), has_name=names[-1:] == (_TOKENS,))


def token_tensors(batch: Any, samples: int) -> tuple[Tensor, Tensor | None] | None:
    """A batch's tokens and their mask; None where it has none."""
    count = token_count(batch, samples)
    if count is None:
        return None
    return _at(batch, count._tokens), None if count._mask is None else _at(batch, count._mask)  # noqa: SLF001 - its own module


def _is_tokens(tensor: Tensor, samples: int, names: tuple[str, ...]) -> bool:
    is_mask = bool(names) and _ANY_MASK in names[-1]
    return tensor.ndim == 2 and tensor.dtype in _INTEGERS and len(tensor) == samples and not is_mask


def _at(batch: Any, path: _Path) -> Any:
    for step in path:
        batch = step(batch)
    return batch


def _paths(value: Any, path: _Path, deeper: int) -> Iterator[tuple[_Path, tuple[str, ...], Tensor]]:
    """The tensors of a batch, each with the way to it and the names on that way."""
    for step, name, part in _steps(value):
        names = (name,) if name else ()
        if isinstance(part, Tensor):
            yield (*path, step), names, part
        elif deeper:
            yield from _paths(part, (*path, step), deeper - 1)


def _steps(value: Any) -> list[tuple[Callable[[Any], Any], str, Any]]:
    if isinstance(value, Tensor):
        return [(_itself, "", value)]
    if isinstance(value, Mapping):
        return [(itemgetter(key), str(key), part) for key, part in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return [(attrgetter(name), name, getattr(value, name, None)) for name in names]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        # a list of a thousand rows is no batch with lengths
        return [(itemgetter(at), "", part) for at, part in enumerate(islice(value, 8))]
    return []


def _itself(value: Any) -> Any:
    return value
