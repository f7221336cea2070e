"""Take batches apart: tensors and bytes in them, copies for reuse, samples and tokens.

Comes in: whatever a loader delivers: a tensor, a mapping, a sequence, a dataclass, or any other
object (a graph of torch_geometric, an encoding of a tokenizer). Samples are counted where the
loader puts a batch together, never guessed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
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

# The parts of a batch, and copies of it for reuse.

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
_CLONED_BYTES = 64 * 2**20
"""Most bytes of clones held at once, in addition to the batches; at least one step's. Source: our
own convention."""
_REBUILT = frozenset({dict, list, tuple})


class Held(NamedTuple):
    """A batch with its number of samples, as a worker sends it or as it is kept to be trained on again.

    Torch pins the contents of a tuple.
    """

    batch: Any
    samples: int


def leaves_of(value: Any, above: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield all leaves of a batch or sample, in order: tensors, arrays, numbers, texts, attributes.

    Args:
        value: The batch, the sample, or a part of it.
        above: Ids of the containers around a part, which are not entered again.
    """
    parts = None
    # the depth guards against objects that reach half of a program
    if len(above) <= 8 and id(value) not in above:
        parts = _parts(value)
    if parts is None:
        yield value
        return
    for part in parts:
        yield from leaves_of(part, (*above, id(value)))


def tensors_of(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch, in order."""
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def batch_bytes(batches: Iterable[Any]) -> int:
    """Return the bytes of all tensors of some batches."""
    return sum(tensor.nbytes for batch in batches for tensor in tensors_of(batch))


def batch_fingerprint(batch: Any) -> int:
    """Return a number that differs between batches of different items.

    It hashes the first values of the first tensors. Without any tensor the items are unknown, and
    the number differs between processes.
    """
    parts = [tensor.detach().flatten()[:256].tolist() for tensor in islice(tensors_of(batch), 4)]
    if not parts:
        return os.getpid()
    return crc32(repr(parts).encode())


def resized(batch: Any, count: int, size: int) -> Any:
    """Return a batch of another size, made by repeating samples as often as needed.

    Args:
        batch: The batch.
        count: Its number of samples.
        size: Number of samples of the result.

    Raises:
        ValueError: Its type can't be rebuilt, or a tensor in it does not have the samples in its
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


def _parts(value: Any) -> list[Any] | None:
    """Return the parts of a value; None if it is not taken apart."""
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
    if hasattr(value, "__dict__"):
        return list(vars(value).values()) or None
    return None


class Reused:
    """Cycle through batches without end, safe against code that changes them in place.

    The first batch is handed out as a full copy and checked for changes when the next one is asked
    for, so it has to be trained on before more are taken. Containers and other objects are copied
    for each use, tensors only if the first use has changed them.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self._turns = cycle(batches)
        self.handed_out = 0
        self._lent: list[tuple[Tensor, int]] | None = None
        """Tensors of the first batch with their versions."""
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
        # Once the first batch was trained on: clone all others if its tensors have changed.
        if any(_version(tensor) != version for tensor, version in self._lent):
            self._clones = True
        self._lent = []
        if self._clones:
            return copied(batch)
        return unpacked(batch)

    def take(self, steps: int, per_step: int) -> list[Any]:
        """Return batches for some optimizer steps, before a clock starts; fewer if they have to be cloned.

        Args:
            steps: Optimizer steps.
            per_step: Batches per step.
        """
        first = next(self)
        if self._clones:
            step_bytes = per_step * batch_bytes([first])
            steps = min(steps, max(1, _CLONED_BYTES // max(1, step_bytes)))
        return [first, *islice(self, steps * per_step - 1)]


def pinned(batch: Any) -> Any:
    """Return a batch in page-locked memory, pinned as torch's DataLoader does it."""
    pin: Callable[[Any], Any] = pin_memory  # untyped in torch
    return pin(batch)


def copied(batch: Any) -> Any:
    """Return a full copy in pageable memory; tensors are shared if a user's class can't be copied."""
    return _tried(deepcopy, batch, unpacked)


def unpacked(value: Any) -> Any:
    """Return the same tensors in containers that may be emptied; objects of other types are copied."""
    if isinstance(value, Tensor):
        return value
    if type(value) in _REBUILT:
        return rebuilt(value, unpacked)
    return _tried(copy, value, lambda own: own)


def _tried(copy_of: Callable[[Any], Any], value: Any, otherwise: Callable[[Any], Any]) -> Any:
    """Return a copy of a value, or what `otherwise` returns if copying fails."""
    with suppress(Exception):  # a user's class may refuse in any way
        return copy_of(value)
    return otherwise(value)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; torch does not count it for inference tensors."""
    if tensor.is_inference():
        return 0
    return tensor._version  # noqa: SLF001 - no public way to ask


# Samples and tokens of a batch.

_TOKENS = "input_ids"
"""Name of the tokens in batches with names. Source: transformers."""
_MASK = "attention_mask"
"""Name of the only mask that is read: others mark special tokens, or mean the padding itself
(torch's key_padding_mask)."""
_ANY_MASK = "mask"


def size_counter(
    loader: DataLoader[Any] | TfLoader, drawn: deque[int]
) -> Callable[[Any], tuple[Any, int]]:
    """Return a function that turns each delivery of a loader into a batch and its number of samples.

    The samples are: for a map-style dataset, the indices that the sampler drew; for a stream, the
    loader's batch size if short batches are dropped, else a count by a wrapper around `collate_fn`,
    which workers send along; for a tf.data pipeline, the size in its element spec; for a dataset
    that makes whole batches, the first dimension of their tensors.

    Workers that deliver batches out of order have them counted where they are collated. For a
    dataset with `__getitems__`, which may pass anything to `collate_fn`, sizes are those that were
    drawn: with `in_order=False` an epoch's sum is right, single batches may not be.

    Args:
        loader: The loader; its batch sampler or collate function may be wrapped.
        drawn: Queue for the sizes of batches that were drawn and not yet delivered.

    Returns:
        A function that raises IndexError for a batch that was begun before this call.
    """
    if isinstance(loader, TfLoader):
        return lambda batch: (batch, loader.samples)
    if loader.batch_sampler is None:  # the dataset makes whole batches
        return lambda batch: (batch, length_of_batch(batch))

    # Count the indices that the sampler draws, if batches arrive in that order.
    is_out_of_order = loader.num_workers > 0 and not loader.in_order
    is_counted_as_drawn = not is_out_of_order or hasattr(loader.dataset, "__getitems__")
    if is_counted_as_drawn and not isinstance(loader.dataset, IterableDataset):
        # past __setattr__, by which torch refuses another sampler: an iterator might hold the old one
        vars(loader)["batch_sampler"] = _Counted(loader.batch_sampler, drawn)
        return lambda batch: (batch, drawn.popleft())

    # Otherwise all batches have one size, or workers count them.
    size = loader.batch_size
    if loader.drop_last and size is not None:
        return lambda batch: (batch, size)
    loader.collate_fn = partial(_with_count, loader.collate_fn)
    return _apart


class Parts(NamedTuple):
    """The samplers and collate function of a loader."""

    sampler: Any
    batch_sampler: Any
    collate_fn: Callable[[Any], Any]


def unwrapped(loader: DataLoader[Any]) -> Parts:
    """Return a loader's samplers and collate function, without the wrappers of `size_counter`."""
    sampler = loader.batch_sampler
    collate = loader.collate_fn
    if isinstance(sampler, _Counted):
        sampler = sampler.counted
    if isinstance(collate, partial) and collate.func is _with_count:
        collate = collate.args[0]
    return Parts(loader.sampler, sampler, collate)


class _Counted:
    """A batch sampler that records the size of each batch it draws; everything else is passed through."""

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
        if name in _OWN:  # not set yet while this object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.counted, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.counted, name, value)


_OWN = frozenset({"counted", "_drawn"})


def _with_count(collate: Callable[[Any], Any], samples: Any) -> Held:
    """Return a collated batch with the number of samples passed to the collate function."""
    return Held(collate(samples), len(samples))


def length_of_batch(batch: Any) -> int:
    """Return the samples of a batch that a dataset has made.

    It is the length of its first tensor or array, else of a list; else 1.
    """
    first = next((leaf for leaf in leaves_of(batch) if getattr(leaf, "shape", ())), None)
    if first is not None:
        return int(first.shape[0])
    if isinstance(batch, list):
        return len(batch)
    return 1


def _apart(counted: Any) -> tuple[Any, int]:
    """Return a batch and its samples.

    Raises:
        IndexError: It was collated before counting began.
    """
    if type(counted) is not Held:
        raise IndexError
    return counted


_Path = tuple[Callable[[Any], Any], ...]
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class TokenCount:
    """Counts the tokens of batches that have the form of a first one.

    Tokens are the numbers in a batch's first integer tensor of two dimensions, (batch, length),
    padding included. Within a window only its shape is read; before it, masks too.
    """

    def __init__(self, tokens: _Path, mask: _Path | None, *, has_name: bool) -> None:
        self._tokens = tokens
        self._mask = mask
        self._has_name = has_name
        self._masked = 0
        self._real = 0
        self._is_lost = False
        self._counted = list[tuple[int, int, int]]()
        """Samples, rows and padded length of each batch."""

    @property
    def lengths(self) -> list[int]:
        """Padded lengths of the last batches."""
        return [length for _, _, length in self._counted[-1000:]]

    def begin_window(self) -> None:
        """Start counting from zero; from here on only shapes are read."""
        self._mask = None
        self._counted.clear()

    def add(self, batch: Any, samples: int) -> None:
        """Count a batch; one whose form differs from the first ends the count."""
        if self._is_lost:
            return
        try:
            tensor = _at(batch, self._tokens)
            rows, length = tensor.shape
            mask = None if self._mask is None else _at(batch, self._mask)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            self._is_lost = True
            return
        self._counted.append((samples, rows, length))
        if mask is not None:
            self._masked += mask.numel()
            self._real += int((mask != 0).sum())

    def figures(self) -> Tokens | None:
        """Return the counts; None if batches differ in form, or nothing shows that these are tokens.

        A table of integers has two dimensions as well: tokens also have a name, lengths that vary,
        or padding.
        """
        if self._is_lost or not self._counted:
            return None
        samples, rows, lengths = np.array(self._counted, dtype=np.float64).T
        tokens = float(rows @ lengths)
        if not samples.any() or not tokens:
            return None
        padding = None
        if self._masked:
            padding = 1 - self._real / self._masked
        shortest = int(lengths.min())
        longest = int(lengths.max())
        if not (self._has_name or shortest != longest or padding):
            return None

        # The standard error of a ratio of sums.
        batches = len(self._counted)
        mean = tokens / float(samples.sum())
        relative_sd = None
        if batches > 1:
            residuals = samples * (lengths - mean)
            relative_sd = sqrt(residuals @ residuals * batches / (batches - 1)) / tokens
        return Tokens(
            per_sample=mean,
            relative_sd=relative_sd,
            batches=batches,
            shortest=shortest,
            longest=longest,
            padding=padding,
        )


def token_count(batch: Any, samples: int) -> TokenCount | None:
    """Return a counter for batches like this one.

    Args:
        batch: A batch of the loader.
        samples: Its number of samples.

    Returns:
        None if it has no integer tensor (batch, length).
    """
    try:
        found = list(_paths(batch))
    except Exception:  # noqa: BLE001 - a batch of a user's own type may raise anything: then nobody knows its tokens
        return None
    rows = [one for one in found if _is_tokens(one, samples)]
    if not rows:
        return None

    # Prefer the tensor that is called input_ids, and take a mask of its shape.
    tokens = next((one for one in rows if one.name == _TOKENS), rows[0])
    masks = (
        one.path for one in found if one.name == _MASK and one.tensor.shape == tokens.tensor.shape
    )
    return TokenCount(tokens.path, next(masks, None), has_name=tokens.name == _TOKENS)


def token_tensors(batch: Any, samples: int) -> tuple[Tensor, Tensor | None] | None:
    """Return a batch's tokens and their mask.

    Args:
        batch: A batch of the loader.
        samples: Its number of samples.

    Returns:
        Tensors (batch, length); the mask is None if there is none. None if there are no tokens.
    """
    count = token_count(batch, samples)
    if count is None:
        return None
    tokens = _at(batch, count._tokens)  # noqa: SLF001 - its own module
    if count._mask is None:  # noqa: SLF001 - its own module
        return tokens, None
    return tokens, _at(batch, count._mask)  # noqa: SLF001 - its own module


class _Found(NamedTuple):
    """A tensor in a batch."""

    path: _Path
    name: str
    """Its name; "" without one."""
    tensor: Tensor


def _is_tokens(found: _Found, samples: int) -> bool:
    tensor = found.tensor
    has_form = tensor.ndim == 2 and tensor.dtype in _INTEGERS and len(tensor) == samples
    return has_form and _ANY_MASK not in found.name


def _at(batch: Any, path: _Path) -> Any:
    for step in path:
        batch = step(batch)
    return batch


def _paths(value: Any, path: _Path = (), name: str = "") -> Iterator[_Found]:
    """Yield the tensors of a batch, as deep as (inputs, targets) with a mapping as inputs."""
    if isinstance(value, Tensor):
        yield _Found(path, name, value)
    elif len(path) < 3:
        for step, part_name, part in _steps(value):
            yield from _paths(part, (*path, step), part_name)


def _steps(value: Any) -> list[tuple[Callable[[Any], Any], str, Any]]:
    """Return the parts of a value, each with its getter and its name."""
    if isinstance(value, Mapping):
        return [(itemgetter(key), str(key), part) for key, part in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return [(attrgetter(name), name, getattr(value, name, None)) for name in names]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        # 8 are enough: a list of a thousand rows is no batch with lengths
        return [(itemgetter(at), "", part) for at, part in enumerate(islice(value, 8))]
    return []
