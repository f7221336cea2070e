"""A first look at a workload's items: is there a slow tail, and how many cores does an item keep busy?

Takes the probe's feed, after a step has worked. Goes out: FirstItems, or None. The reads warm the page cache; where
nothing came from the disk meanwhile, they need no others. The random states of Python, NumPy and torch are as before
afterwards; what the user's own objects draw is not: a look draws from a sampler or a generator of their own, and begins
a stream anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from autotune.settings.applied.cores.processor import usable_cores
from autotune.worker.after_window.item_costs import TimedItems, draws_of, slow_tail, time_items
from autotune.worker.measure.step import torch_threads
from autotune.worker.setup.build import is_stream

__all__ = ["FirstItems", "look_at_items"]

_LOOK_S = 0.75
"""What a look may take beyond its last item: our own convention, beside 5 s for a cold page cache."""
_FEWEST_ITEMS = 5
"""Of fewer no median tells: our own convention, as when costs are measured."""
_ANEW_S = 2.0
"""Of the first batch, beyond which a stream, or a sampler of the user's, is not begun once more: our own convention."""
_LEAST_WARM_S = 0.1
"""Of reading, without a byte from the disk, after which the page cache is taken to be warm: our own convention."""
_OTHERS_FRACTION = 0.05
"""Of an item's time, below which what other threads take does not matter: our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstItems:
    """What was seen of the first items; for the figures see WorkloadFacts."""

    slow_tail_fraction: float
    cores_per_item: float


def look_at_items(loader: DataLoader[Any], first_batch_s: float, warm: Callable[[], None]) -> FirstItems | None:
    """Time items for about half a second; again, where the page cache was not warm.

    None where items are too slow for it, or where user code raises: a step has worked, and what is wrong with some
    other item is for the trials to say.

    Args:
        loader: Of this process, without workers; it is not iterated.
        first_batch_s: Seconds from starting it to its first batch. For the look a stream is begun anew, and so is a
            sampler that is not torch's own: not where that is long.
        warm: Reads until the page cache is warm. Not called where the look has shown that it is.
    """
    if first_batch_s > _ANEW_S and _is_begun_anew(loader):
        warm()
        return None
    begun, timed = perf_counter(), _timed(loader)
    if timed is None or timed.disk_bytes > 0 or perf_counter() - begun < _LEAST_WARM_S:
        warm()
        timed = timed and _timed(loader)
    if timed is None or len(timed.seconds) < _FEWEST_ITEMS or sum(timed.seconds) <= 0:
        return None
    return FirstItems(slow_tail_fraction=slow_tail(timed.seconds), cores_per_item=_cores(timed))


def _cores(timed: TimedItems) -> float:
    """Cores that an item keeps busy, while it is computed: waiting for a file hides no threads.

    Where its own thread does less than a share of the work nothing tells how many others there are: then it is the
    cores that are busy over all of its time. Where nothing else works it is one at the most, whatever reading clocks
    takes beside an item of some microseconds.
    """
    seconds, own_s, least_s = sum(timed.seconds), timed.own_cpu_s, _OTHERS_FRACTION * sum(timed.seconds)
    computed_s, usual = own_s + timed.others_cpu_s, timed.cpu_s / seconds
    if timed.cpu_s - own_s < least_s:
        return min(1.0, usual)
    return usual if timed.others_cpu_s < least_s or computed_s > usable_cores() * own_s else computed_s / own_s


def _is_begun_anew(loader: DataLoader[Any]) -> bool:
    if is_stream(loader.dataset) or loader.batch_size is None:
        return True
    return type(loader.sampler) not in {RandomSampler, SequentialSampler}


def _timed(loader: DataLoader[Any]) -> TimedItems | None:
    """Some items, as a loader worker makes them; None where they are too slow, or fail."""
    begun = perf_counter()
    try:
        with _random_states_kept(), torch_threads(1):  # as torch sets it in loader workers
            draws = draws_of(loader)
            next(draws)()
            if perf_counter() - begun > _LOOK_S:
                return None
            return time_items(draws, 0, begun + _LOOK_S)
    except Exception:  # noqa: BLE001 - user code may raise anything, at an item that no step has needed so far
        return None


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's random states on the CPU as before afterwards; those of objects are the user's."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)
