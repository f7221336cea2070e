"""Measure the lengths of items and the time of batches by length: the gain of buckets and packing.

In: a trial's loader, after its workers have ended, and its trainer. Out: Lengths. If the dataset
can be indexed, items are drawn at random, whatever the sampler draws: one that sorts would show
only a part of the lengths. Batches of items of similar length are collated as the loader does it,
and timed on the device, in turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, cycle, islice
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from autotune.apply.loader import drawn_by, fixed_batches
from autotune.config.training_config import TrainingConfig
from autotune.models.forecast import forecast_buckets, forecast_packing
from autotune.models.statistics import error_of_median
from autotune.records.measurement import Lengths, LengthStep, Tokens
from autotune.worker.batch import token_tensors, unwrapped
from autotune.worker.build import is_stream, length_of
from autotune.worker.extras.item_costs import item_fetchers
from autotune.worker.side_alone import time_step
from autotune.worker.step import Trainer

# Numbers without a source are our convention.
_MOST_ITEMS = 1024
"""Number of items to read at most."""
_FEWEST_ITEMS = 64
"""Number of items below which nothing is reported: the longest are mostly missing among them."""
_ITEMS_S = 1.0
"""Seconds to read items."""
_MOST_TIMED = 7
"""Number of lengths whose batches are timed, at most."""
_REPEATS = 3
"""Repeats of each, at least."""
_STRETCHES = 2.0
"""Seconds to time all of them, as a multiple of those of other measurements."""
_OVERTIME = 3.0
"""Multiple of that time after which slow steps are given up, without a result."""
_WORDS = "input_ids"
"""Key of an item's tokens. Source: transformers, BatchEncoding."""


class _Sized(NamedTuple):
    """An item and its length."""

    length: int
    item: Any


def measure_lengths(  # noqa: PLR0913 - what is known of the trial, and two limits
    loader: DataLoader[Any],
    config: TrainingConfig,
    tokens: Tokens,
    current_padding: Sequence[int],
    trainer: Trainer | None,
    *,
    seconds: float,
    ends_at: float,
) -> Lengths | None:
    """Read lengths, and time batches by their length.

    Args:
        loader: The trial's loader; it is not iterated.
        config: The configuration that it was built for.
        tokens: The window's counts of tokens.
        current_padding: Padded lengths of the window's batches.
        trainer: A trainer on one device; None to time nothing.
        seconds: Seconds of the other measurements.
        ends_at: Time of perf_counter after which nothing is begun.

    Returns:
        The lengths; None if they are unknown, or all equal.
    """
    # Read the lengths of some items.
    until = min(ends_at, perf_counter() + _ITEMS_S)
    sized = _sized(loader, config, until)
    read = {one.length for one in sized}
    if len(sized) < _FEWEST_ITEMS or len(read) == 1 or not max(read, default=0):
        return None

    # Time batches by length; not with a token budget, which ties their number of samples to it, and
    # not compiled, since each length would be compiled again.
    size = config.loader_batch_size
    has_size = config.max_tokens is None and not config.compile
    steps: tuple[LengthStep, ...] = ()
    if trainer is not None and has_size and perf_counter() < ends_at:
        steps = _timed(loader, sized, size, trainer, _STRETCHES * seconds, ends_at)

    # The collate function truncates longer items.
    widest = max((*current_padding, *(step.padded for step in steps)))
    lengths = [min(one.length, widest) for one in sized]
    mean = fmean(lengths)
    by_items = 1 - mean / tokens.per_sample if tokens.per_sample >= mean else None
    return Lengths(
        items=len(lengths),
        mean=mean,
        median=median(lengths),
        longest=max(lengths),
        padding=by_items if tokens.padding is None else tokens.padding,
        steps=steps,
        buckets=forecast_buckets(
            lengths, size, current_padding, steps, dataset_length=length_of(loader.dataset)
        ),
        packed=forecast_packing(lengths, current_padding, steps),
    )


def length_of_item(item: Any) -> int | None:
    """Return the length of an item's first row of integers; None if it has none.

    The row may be a 1-D tensor or array, or a list; mappings, tuples and lists are searched.
    """
    if isinstance(item, Tensor):
        is_real = not item.is_floating_point() and not item.is_complex()
        is_row = item.ndim == 1 and is_real and item.dtype != torch.bool
        return len(item) if is_row else None
    if isinstance(item, np.ndarray):
        return len(item) if item.ndim == 1 and np.issubdtype(item.dtype, np.integer) else None
    if isinstance(item, Mapping):
        parts = [item[_WORDS]] if _WORDS in item else list(item.values())
    elif isinstance(item, tuple | list):
        if isinstance(item, list) and item and all(type(part) is int for part in item):
            return len(item)
        parts = list(item)
    else:
        return None
    for part in parts:
        length = length_of_item(part)
        if length is not None:
            return length
    return None


def _sized(loader: DataLoader[Any], config: TrainingConfig, until: float) -> list[_Sized]:
    """Return items with their lengths, from the items or from the rows that collating makes."""
    items: list[Any] = []
    for draw in _draws(loader):
        items += draw()
        if len(items) >= _MOST_ITEMS or perf_counter() > until:
            break
    lengths = [length_of_item(item) for item in items]
    if all(length is None for length in lengths):
        lengths = list(_by_mask(loader, items, config.loader_batch_size, until + _ITEMS_S))
    return [_Sized(length, item) for length, item in zip(lengths, items, strict=False) if length]


def _draws(loader: DataLoader[Any]) -> Iterator[Callable[[], list[Any]]]:
    """Yield functions that make random items of an epoch.

    A sampler that leaves out items, or repeats some, decides which items an epoch has.
    """
    dataset: Any = loader.dataset
    total = length_of(dataset)
    own: Any = unwrapped(loader)  # else the feed's counting hides the sampler
    sampler = drawn_by(own)
    if is_stream(dataset) or total is None:
        return item_fetchers(loader)
    draws_all = fixed_batches(own) or isinstance(
        sampler, RandomSampler | SequentialSampler | DistributedSampler
    )
    drawn = range(total) if draws_all else list(islice(sampler, 100_000))
    chosen = random.sample(drawn, min(len(drawn), _MOST_ITEMS))
    take = getattr(dataset, "__getitems__", lambda indices: [dataset[index] for index in indices])
    return (partial(take, [index]) for index in chosen)


def _by_mask(loader: DataLoader[Any], items: list[Any], size: int, until: float) -> Iterator[int]:
    """Yield the lengths of items that are no rows yet (texts), from the mask of their batch."""
    for at in range(0, len(items), size):
        if perf_counter() > until:
            return
        group = items[at : at + size]
        found = token_tensors(unwrapped(loader).collate_fn(list(group)), len(group))
        if found is None or found[1] is None:
            return
        yield from (int(length) for length in (found[1] != 0).sum(1))


def _timed(
    loader: DataLoader[Any],
    sized: Sequence[_Sized],
    size: int,
    trainer: Trainer,
    seconds: float,
    ends_at: float,
) -> tuple[LengthStep, ...]:
    """Time batches of several lengths in turn, after a warm-up round; return () if too slow."""
    collate = unwrapped(loader).collate_fn
    groups = _groups(sized, size)
    batches = [trainer.to_device(collate([one.item for one in group])) for group in groups]
    padded = [token_tensors(batch, size) for batch in batches]
    until = min(ends_at, perf_counter() + seconds)
    given_up = min(ends_at, until + _OVERTIME * seconds)
    if None in padded:
        return ()
    times: list[list[float]] = [[] for _ in batches]
    for turn in count():
        for own, batch in zip(times, batches, strict=True):
            spent_s = time_step(trainer, batch)
            if turn:
                own.append(spent_s / trainer.config.grad_accum_steps)
            elif perf_counter() > given_up:
                return ()
        if (turn >= _REPEATS and perf_counter() > until) or perf_counter() > given_up:
            break
    return tuple(
        LengthStep(
            longest=max(one.length for one in group),
            padded=found[0].shape[1],
            seconds=median(own),
            relative_sd=error_of_median(own) / median(own),
        )
        for group, found, own in zip(groups, padded, times, strict=True)
        if found is not None and len(own) >= _REPEATS
    )


def _groups(sized: Sequence[_Sized], size: int) -> list[list[_Sized]]:
    """Return groups of items of similar length, shortest first, each of a batch's size.

    Groups lie closer together where items are long, as a batch is padded to its longest item. If
    there are few items, each comes several times.
    """
    ordered = sorted(sized, key=lambda one: one.length)
    total = len(ordered)
    tenth = max(1, total // 10)
    ends = {round(total * (1 - 0.5**power)) for power in range(1, _MOST_TIMED - 1)} | {total}
    width = max(1, min(size, total // 10))
    groups = [ordered[max(0, end - width) : end] for end in [tenth, *sorted(ends)]]
    return [list(islice(cycle(group), size)) for group in groups]
