"""Find causes of a slow loader: its sampler, its collate function, calls for single items, whole files, locks.

In: a trial's loader, after its items were timed. Out: LoaderCauses. All runs in this process, one
part after the other, for about half a second. A part that fails, or that the user's objects do not
allow, is left out and noted in the debug log; it never ends a trial.
"""

from __future__ import annotations

import inspect
import io
import logging
import multiprocessing.managers
import multiprocessing.synchronize
import sqlite3
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from math import inf
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from autotune.records.breakdown import CollateFunction, LoaderCauses, LoaderCosts
from autotune.worker.batch import leaves_of, tensors_of, unwrapped
from autotune.worker.build import is_stream
from autotune.worker.extras.item_costs import WholeBatch, is_torchs, item_fetchers, makes_batches
from autotune.worker.step import torch_threads

_Found = TypeVar("_Found")
_LOG = logging.getLogger(__name__)

# Numbers without a source are our convention.
_PART_S = 0.1
"""Seconds of repeats of one part."""
_REPEATS = 5
"""Repeats of one part at most."""
_MOST_BATCHES = 64
"""Batches of indices to draw at most."""
_MOST_DRAWN = 2**20
"""Samples of an epoch from which on a random sampler is timed on this many, and scaled: a permutation
of 100 million takes seconds and gigabytes."""
_ITEMS = 5
"""Items whose memory is followed."""
_CALL_S = 10e-6
"""Seconds that calling a dataset for an item may take without any work: indexing a tensor twice takes
2 to 5 us on a core of 3 GHz."""
_COPIES = 2.0
"""Copies of an item's bytes that an item in memory may take: one out of the data, one to convert."""
_CHEAP_ITEM_S = 50e-6
"""Seconds of an item up to which the dataset is asked for several at once, in case it can."""
_COMPARED = 4
"""Items that are compared one by one and at once."""


def measure_causes(
    loader: DataLoader[Any],
    costs: LoaderCosts,
    samples: int,
    *,
    ends_at: float = inf,
) -> LoaderCauses:
    """Measure causes of a slow loader, for about half a second.

    Args:
        loader: The trial's loader; it is not iterated.
        costs: Costs of its items, as timed before.
        samples: Samples of a batch.
        ends_at: Time of perf_counter after which nothing is begun.
    """
    dataset: Any = loader.dataset
    has_batches = loader.batch_sampler is None or makes_batches(dataset)
    found: dict[str, Any] = {
        "makes_batches": has_batches,
        "shared_handles": tried(lambda: shared_handles(dataset)) or (),
        "stream_shards": tried(lambda: shards_of(dataset)),
    }
    with torch_threads(1):  # as torch sets it in loader workers
        if perf_counter() < ends_at and not is_stream(dataset):
            found |= tried(lambda: _sampler_costs(loader)) or {}
        if perf_counter() < ends_at:
            found |= tried(lambda: _memory_costs(loader, costs, ends_at)) or {}
        if perf_counter() < ends_at and loader.batch_sampler is not None:
            found |= tried(lambda: _batch_costs(loader, costs, samples, found)) or {}
    return LoaderCauses(**found)


def tried(work: Callable[[], _Found]) -> _Found | None:
    """Return the result of the work; None if it raises."""
    try:
        return work()
    except Exception:  # noqa: BLE001 - the user's objects may raise anything
        _LOG.debug("a cause in the loader could not be measured", exc_info=True)
        return None


def _usual_s(work: Callable[[], object]) -> float:
    """Return the median seconds of a few runs, after a first one."""
    work()
    seconds = list[float]()
    until = perf_counter() + _PART_S
    while not seconds or (len(seconds) < _REPEATS and perf_counter() < until):
        begun = perf_counter()
        work()
        seconds.append(perf_counter() - begun)
    return median(seconds)


# The sampler


def _sampler_costs(loader: DataLoader[Any]) -> dict[str, Any]:
    """Time the drawing of some batches' indices, and the start of an epoch's order."""
    own = unwrapped(loader)
    drawing = own.sampler if type(own.batch_sampler) is BatchSampler else own.batch_sampler
    name = type(own.sampler if drawing is None else drawing).__name__
    scale, batches = _index_batches(loader)
    begun = perf_counter()
    drawn = iter(batches)
    next(drawn)
    first_s = perf_counter() - begun
    seconds = list[float]()
    until = perf_counter() + _PART_S
    while len(seconds) < _MOST_BATCHES and perf_counter() < until:
        begun = perf_counter()
        if next(drawn, None) is None:  # a short epoch has ended
            break
        seconds.append(perf_counter() - begun)
    if not seconds:
        return {"sampler": name, "sampler_s": first_s, "sampler_start_s": 0.0}
    # The mean: a sampler may sort a pool of batches at some of them.
    usual_s = fmean(seconds)
    start_s = max(0.0, first_s - usual_s) * scale
    return {"sampler": name, "sampler_s": usual_s, "sampler_start_s": start_s}


def _index_batches(loader: DataLoader[Any]) -> tuple[float, Any]:
    """Return what draws the indices of an epoch's batches, and the factor to scale its start by.

    A long random order of torch's own samplers is replaced by a part of it.
    """
    own = unwrapped(loader)
    sampler = own.sampler
    batches = own.batch_sampler
    if batches is None:
        batches = sampler
    size = loader.batch_size
    if size is None or type(batches) is not BatchSampler:
        return 1.0, batches
    short: Any = None
    if type(sampler) is RandomSampler and sampler.num_samples > _MOST_DRAWN:
        short = RandomSampler(range(_MOST_DRAWN), replacement=sampler.replacement)
    elif type(sampler) is WeightedRandomSampler and sampler.num_samples > _MOST_DRAWN:
        weights: Any = sampler.weights  # a tensor
        short = WeightedRandomSampler(weights, _MOST_DRAWN, sampler.replacement)
    if short is None:
        return 1.0, batches
    scale = sampler.num_samples / _MOST_DRAWN
    return scale, BatchSampler(short, size, drop_last=True)


# An item's memory, and the bytes that it reads


def _memory_costs(loader: DataLoader[Any], costs: LoaderCosts, ends_at: float) -> dict[str, Any]:
    """Follow the memory of a few items, and decide whether items are in memory already."""
    fetchers = item_fetchers(loader, 1)
    next(fetchers)()  # may open files
    item = next(fetchers)()
    read = list[int]()
    peaks = list[float]()
    is_ours = not tracemalloc.is_tracing()
    if is_ours:
        tracemalloc.start(1)
    try:
        until = min(ends_at, perf_counter() + 2 * _PART_S)
        while len(peaks) < _ITEMS and (not peaks or perf_counter() < until):
            fetch = next(fetchers)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            read.append(_read_during(fetch))
            peaks.append(tracemalloc.get_traced_memory()[1] - held)
    finally:
        if is_ours:
            tracemalloc.stop()
    tensors = _arrays_of(item)
    copy_s = _usual_s(lambda: [tensor.clone() for tensor in tensors]) if tensors else 0.0
    is_cheap = costs.item_median_s <= _CALL_S + _COPIES * copy_s
    return {
        "read_bytes_per_item": median(read),
        "peak_bytes_per_item": median(peaks),
        "is_in_memory": is_cheap and not max(read) and not is_stream(loader.dataset),
    }


def _arrays_of(item: Any) -> list[Tensor]:
    """Return an item's tensors, and its NumPy arrays as tensors."""
    found = list[Tensor]()
    for leaf in leaves_of(item):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            found.append(torch.from_numpy(np.ascontiguousarray(leaf)))
    return found


def _read_during(work: Callable[[], object]) -> int:
    """Return the bytes that this process reads from files during some work; 0 outside of Linux.

    Source: man 5 proc, /proc/pid/io, rchar.
    """
    counts = Path("/proc/self/io")
    try:
        before = counts.read_text()
        work()
        after = counts.read_text()
    except OSError:
        work()
        return 0
    # The first reading counts itself in the second one.
    return max(0, _rchar(after) - _rchar(before) - len(before))


def _rchar(counts: str) -> int:
    """Return the bytes read so far by the text of /proc/pid/io; 0 if it has none."""
    with suppress(ValueError, KeyError):
        return int(dict(line.split(": ") for line in counts.splitlines())["rchar"])
    return 0


# A batch's items at once, and collating


def _batch_costs(
    loader: DataLoader[Any], costs: LoaderCosts, samples: int, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Time a plain collate function on a batch's items, and taking the items at once."""
    dataset: Any = loader.dataset
    collate = unwrapped(loader).collate_fn
    has_torchs = is_torchs(collate)
    drawn = item_fetchers(loader)
    items = list[Any]()
    until = perf_counter() + 10 * _PART_S
    while len(items) < samples and (not items or perf_counter() < until):
        items += next(drawn)()
    items = list(islice(cycle(items), samples))
    if isinstance(items[0], WholeBatch):  # nothing is collated
        return {}
    batch = collate(list(items))
    tensors = tensors_of(batch)
    costs_found: dict[str, Any] = {
        "copy_s": _usual_s(lambda: [tensor.clone() for tensor in tensors])
    }
    if not has_torchs:
        # Only a slow function is worth the comparison.
        plain_s = tried(lambda: _usual_s(lambda: plain_collate(list(items))))
        function = function_of(collate)
        costs_found["collate"] = function.model_copy(update={"plain_s": plain_s})
    is_one_by_one = not found["makes_batches"] and not is_stream(dataset)
    if (
        has_torchs
        and is_one_by_one
        and found.get("is_in_memory")
        and costs.item_median_s <= _CHEAP_ITEM_S
    ):
        costs_found["batch_fetch_s"] = tried(lambda: _batch_fetch_s(loader, samples))
    return costs_found


def _batch_fetch_s(loader: DataLoader[Any], samples: int) -> float | None:
    """Time a batch taken from the dataset at once; None if it is not the same as its items collated."""
    dataset: Any = loader.dataset
    chance = np.random.default_rng(0)
    few = chance.integers(0, len(dataset), _COMPARED).tolist()
    at_once = dataset[few]
    one_by_one = unwrapped(loader).collate_fn([dataset[index] for index in few])
    if not _is_same(at_once, one_by_one):
        return None
    many = chance.integers(0, len(dataset), samples).tolist()
    return _usual_s(lambda: dataset[many])


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two batches have equal tensors or arrays, in the same order, and something in them."""
    ours = _arrays_of(first)
    theirs = _arrays_of(second)
    if not ours or len(ours) != len(theirs):
        return False
    return all(
        own.shape == other.shape and own.dtype == other.dtype and torch.equal(own, other)
        for own, other in zip(ours, theirs, strict=True)
    )


def plain_collate(items: Sequence[Any]) -> Any:
    """Collate items as torch does, but pad tensors and arrays of different lengths.

    Raises:
        TypeError: Items hold objects that torch can't collate.
        RuntimeError: Tensors differ in more than their first dimension.
    """
    first = items[0]
    if isinstance(first, Mapping):
        return {key: plain_collate([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list) and not isinstance(first[:1], str):
        is_tokens = bool(first) and isinstance(first[0], int | float)
        if not (isinstance(first, list) and is_tokens):
            return [plain_collate(part) for part in zip(*items, strict=True)]
        items = [torch.tensor(item) for item in items]
    if isinstance(items[0], np.ndarray):
        items = [torch.from_numpy(item) for item in items]
    if isinstance(items[0], Tensor) and len({item.shape for item in items}) > 1:
        return pad_sequence(list(items), batch_first=True)
    return default_collate(list(items))


def function_of(collate: Any) -> CollateFunction:
    """Return the name and place of a collate function: a function, a partial, a method or an object."""
    while isinstance(collate, partial):
        collate = collate.func
    function = collate
    if not hasattr(function, "__code__") and not inspect.ismethod(function):
        function = type(collate).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", None) or type(collate).__name__
    place = "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return CollateFunction(function=name.replace("<locals>.", ""), place=place)


# What workers share, and the shards of a stream


_SHARED: tuple[type, ...] = (
    multiprocessing.synchronize.SemLock,
    multiprocessing.managers.BaseProxy,
    io.IOBase,
    zipfile.ZipFile,
    tarfile.TarFile,
    sqlite3.Connection,
)
"""Locks and open files."""
_SHARED_NAMES = frozenset({"h5py", "lmdb", "lmdb.cpython", "netCDF4", "tables.file", "zarr"})
"""Modules whose objects are open files."""
_DEPTH = 3
"""Levels of objects below the dataset that are searched."""
_MOST_SEARCHED = 2000
"""Attributes that are searched at most."""


def shared_handles(dataset: Any) -> tuple[str, ...]:
    """Return the locks and open files that are attributes of the dataset, or of objects in it."""
    found = dict[str, None]()
    seen = set[int]()
    waiting = [("", dataset, 0)]
    while waiting and len(seen) < _MOST_SEARCHED:
        name, value, depth = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        module = type(value).__module__
        if isinstance(value, _SHARED) or module.split(".")[0] in _SHARED_NAMES:
            found[f"{name} ({type(value).__name__})"] = None
            continue
        if depth < _DEPTH:
            waiting += [(own, part, depth + 1) for own, part in _parts(name, value)]
    return tuple(found)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, or the first entries of a container, with their names."""
    if isinstance(value, Tensor | np.ndarray | str | bytes | int | float | type(None)):
        return
    if isinstance(value, Mapping):
        yield from ((name, part) for part in islice(value.values(), 8))
    elif isinstance(value, list | tuple):
        yield from ((name, part) for part in value[:8])
    else:
        yield from list(getattr(value, "__dict__", {}).items())


def shards_of(dataset: Any) -> int | None:
    """Return the shards of a stream, from its attribute num_shards or n_shards; None if it has none."""
    if not isinstance(dataset, IterableDataset):
        return None
    for _ in range(_DEPTH):  # a stream may wrap another one
        for name in ("num_shards", "n_shards"):
            count = getattr(dataset, name, None)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
        dataset = getattr(dataset, "dataset", None)
    return None
