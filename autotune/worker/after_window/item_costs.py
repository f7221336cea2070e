"""What data costs inside the loader: one item, one batch through collate_fn, its way from a worker, pinning, copying.

Takes a trial's loader after its workers have ended; hands on LoaderCosts. Items are made in this process, one after the
other, with one thread for torch's operations, as in a loader worker: the figures are those of one worker that has a
core to itself.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count, cycle, islice
from math import ceil, inf
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data._utils.pin_memory import pin_memory

from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import Ceiling
from autotune.settings.training_config import TrainingConfig
from autotune.worker.failure.causes import cause_of
from autotune.worker.measure.feed import Feed
from autotune.worker.measure.side_alone import batch_bytes, loader_alone
from autotune.worker.measure.step import tensors_of
from autotune.worker.setup import machine

__all__ = ["Surroundings", "measure_items"]

_ENOUGH_ITEMS = 256
_LEAST_S = 0.25  # cheap items go on so long: a reader that pauses now and then would be timed between two pauses
_MOST_ITEMS = 50_000
_FEWEST_ITEMS = 5
_ITEMS_S = 1.0
_TAIL_FACTOR = 8.0  # an item of so many medians is slow; core.breakdown.LoaderCosts.slow_tail_fraction
_REPEATS = 3
_REPEATS_S = 0.3
_TRANSFER_S = 0.2
_WORKER_TIMEOUT_S = 10.0
_ENDLESS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a rank's loader works beside."""

    local_ranks: int = 1
    """Ranks on this host, which share its cores; each loads its own batches."""
    to_device: Callable[[Any], object] | None = None
    """Copies a batch to the accelerator that is trained on, and waits for it; None where pinning has no effect."""


_ALONE = Surroundings()


def measure_items(
    loader: DataLoader[Any],
    config: TrainingConfig,
    *,
    ceiling: Ceiling | None,
    tell: Callable[[str], None],
    surroundings: Surroundings = _ALONE,
    ends_at: float = inf,
) -> LoaderCosts:
    """Time what the loader's parts cost, for about two seconds.

    CPU time is that of this whole process, all threads of the user's decoders among them, and of processes that an
    item starts and waits for. torch's own threads do nothing meanwhile, so none of them spins.

    Args:
        loader: What the trial has trained on; it is not iterated.
        config: What the loader was built for.
        ceiling: The rate of the loader alone, where it was measured.
        tell: Called with a remark for each part that fails beside the items, and is left out.
        surroundings: The ranks beside this one, and the device that its batches go to.
        ends_at: Time of perf_counter at which the deadline is near; no further item is begun then.
    """
    with _one_thread():
        items = _time_items(_draws(loader), config.micro_batch_size, ends_at)
        batch_items = list(islice(cycle(items.kept), config.micro_batch_size))
        collated = _Collated(batch_items, loader.collate_fn)
        begun, batch = perf_counter(), collated[0]
        once_s = perf_counter() - begun
        often_s = _tried("collating a batch again", lambda: _mean_s(lambda: collated[0]), tell)
    collate_s = once_s if often_s is None else often_s
    transfer_s = pin_s = None
    if config.num_workers:
        transfer_s = _tried(
            "a batch's way from a worker", lambda: _transfer_s(loader, config, collated, collate_s, ends_at), tell
        )
    if config.pin_memory and torch.accelerator.is_available():
        pin_s = _tried("pinning a batch", lambda: _pin_s(batch), tell)
    copy_s, pinned_copy_s = _copies_s(batch, surroundings.to_device, tell)
    batches_per_s = ceiling.batches / ceiling.seconds if ceiling is not None else None
    return LoaderCosts(
        items=len(items.seconds),
        item_s=fmean(items.seconds),
        item_cpu_s=items.cpu_s / len(items.seconds),
        item_median_s=median(items.seconds),
        item_p99_s=_quantile(items.seconds, 0.99),
        item_slowest_s=max(items.seconds),
        slow_tail_fraction=_slow_tail(items.seconds),
        disk_bytes_per_item=items.disk_bytes / len(items.seconds),
        item_bytes=batch_bytes(batch) / config.micro_batch_size,
        float32_fraction=_float32_fraction(batch),
        collate_s=collate_s,
        transfer_s=transfer_s,
        pin_s=pin_s,
        copy_s=copy_s,
        pinned_copy_s=pinned_copy_s,
        batches_per_worker_per_s=None if batches_per_s is None else batches_per_s / max(1, config.num_workers),
        batches_per_core_per_s=None if batches_per_s is None else batches_per_s / _own_cores(surroundings),
    )


def _own_cores(surroundings: Surroundings) -> int:
    """This rank's share of the cores."""
    return max(1, machine.usable_cores() // surroundings.local_ranks)


def _tried(what: str, measure: Callable[[], float], tell: Callable[[str], None]) -> float | None:
    """What was measured; None and a remark where the user's code, or his objects on their way, would not have it."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the items' costs are worth keeping
        tell(f"{what} could not be measured ({cause_of(error)})")
        return None


@dataclass(slots=True)
class _Items:
    """Items that were timed."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    disk_bytes: int = 0
    kept: list[Any] = field(default_factory=list)


class _Collated(TorchDataset[Any]):
    """Makes the same batch from ready items over and over: what a worker does, less the items."""

    def __init__(self, items: list[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.items, self.collate = items, collate

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, _: int) -> Any:
        return self.collate(list(self.items))


def _time_items(draws: Iterator[Callable[[], list[Any]]], most_kept: int, ends_at: float) -> _Items:
    """Time draw after draw; a first one, which may open files, is left out."""
    items = _Items(kept=next(draws)())
    began_children_s, began_disk, begun = _children_cpu_s(), _disk_bytes(), perf_counter()
    for draw in draws:
        asked_cpu_s, asked = process_time(), perf_counter()
        came = draw()
        now, now_cpu_s = perf_counter(), process_time()
        items.cpu_s += now_cpu_s - asked_cpu_s
        items.seconds += [(now - asked) / len(came)] * len(came)
        items.kept += came[: max(0, most_kept - len(items.kept))]
        if _is_enough(len(items.seconds), now - begun) or now > ends_at:
            break
    items.cpu_s += _children_cpu_s() - began_children_s
    items.disk_bytes = _disk_bytes() - began_disk
    return items


def _is_enough(done: int, spent_s: float) -> bool:
    """Whether so many items in so many seconds tell what one costs, rare pauses among them."""
    if done >= _MOST_ITEMS or (done >= _ENOUGH_ITEMS and spent_s >= _LEAST_S):
        return True
    return spent_s > _ITEMS_S and (done >= _FEWEST_ITEMS or spent_s > _FEWEST_ITEMS * _ITEMS_S)


def _draws(loader: DataLoader[Any]) -> Iterator[Callable[[], list[Any]]]:
    """Ways to make the next item, or the next few where the dataset makes whole batches; without end."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return _stream_draws(dataset)
    indices = _indices(loader)
    if _makes_batches(dataset):
        size = loader.batch_size or _FEWEST_ITEMS
        return (_call(dataset.__getitems__, list(islice(indices, size))) for _ in count())
    return (_call(lambda index: [dataset[index]], index) for index in indices)


def _call(make: Callable[[Any], list[Any]], wanted: Any) -> Callable[[], list[Any]]:
    return lambda: make(wanted)


def _stream_draws(dataset: Any) -> Iterator[Callable[[], list[Any]]]:
    """Items of an iterable, begun anew at its end; the new start belongs to the item that needs it."""
    streams = [iter(dataset)]

    def draw() -> list[Any]:
        for _ in range(2):
            with suppress(StopIteration):
                return [next(streams[0])]
            streams[0] = iter(dataset)
        raise RuntimeError("an iterable dataset must give an item each time it is begun, but gave none")

    return (draw for _ in count())


def _makes_batches(dataset: Any) -> bool:
    """Whether the loader asks for whole batches; a Subset does so for what it holds, in a plain loop where need be."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Indices as the loader draws them, without end; at random without a permutation of them all where it shuffles."""
    if type(loader.sampler) is RandomSampler and loader.batch_size is not None:
        size = len(loader.sampler.data_source)
        return (random.randrange(size) for _ in count())  # noqa: S311 - no secret
    source = loader.batch_sampler
    if source is None:
        return chain.from_iterable(iter(loader.sampler) for _ in count())
    return chain.from_iterable(chain.from_iterable(iter(source) for _ in count()))


def _transfer_s(
    loader: DataLoader[Any], config: TrainingConfig, collated: _Collated, collate_s: float, ends_at: float
) -> float:
    """Seconds that a batch takes from one worker to this process, less collating, which fills the shared memory."""
    feed = Feed(
        DataLoader(
            collated,
            batch_size=None,
            num_workers=1,
            collate_fn=_as_it_is,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=_WORKER_TIMEOUT_S,
        )
    )
    try:
        feed.start()
        alone = config.model_copy(update={"num_workers": 1, "prefetch_factor": None})
        ceiling = loader_alone(feed, alone, seconds=_TRANSFER_S, ends_at=ends_at)
    finally:
        feed.stop()
    return max(0.0, ceiling.seconds / ceiling.batches - collate_s)


def _as_it_is(batch: Any) -> Any:
    return batch


def _pin_s(batch: Any) -> float:
    return _warm_mean_s(lambda: _pinned(batch))


def _copies_s(
    batch: Any, to_device: Callable[[Any], object] | None, tell: Callable[[str], None]
) -> tuple[float | None, float | None]:
    """Seconds of a batch's copy to the device, from the memory that collating gives and from page-locked memory."""
    if to_device is None:
        return None, None
    copy_s = _tried("copying a batch", lambda: _warm_mean_s(lambda: to_device(batch)), tell)
    return copy_s, _tried("copying a pinned batch", lambda: _pinned_copy_s(batch, to_device), tell)


def _pinned_copy_s(batch: Any, to_device: Callable[[Any], object]) -> float:
    pinned = _pinned(batch)
    return _warm_mean_s(lambda: to_device(pinned))


def _pinned(batch: Any) -> Any:
    pin: Callable[[Any], Any] = pin_memory  # torch has not typed it
    return pin(batch)


def _float32_fraction(batch: Any) -> float | None:
    """Share of float32 in the batch's bytes; None where it has none."""
    size = batch_bytes(batch)
    return sum(one.nbytes for one in tensors_of(batch) if one.dtype == torch.float32) / size if size else None


def _warm_mean_s(work: Callable[[], Any]) -> float:
    """Mean seconds of a few runs after a first one, which allocates what torch's allocators then keep."""
    work()
    return _mean_s(work)


def _mean_s(work: Callable[[], Any]) -> float:
    """Mean seconds of a few runs; of the first alone where that is long."""
    begun, done, spent_s = perf_counter(), 0, 0.0
    while done < _REPEATS and spent_s <= _REPEATS_S:
        work()
        done, spent_s = done + 1, perf_counter() - begun
    return spent_s / done


def _quantile(values: list[float], share: float) -> float:
    """Nearest rank: the smallest value that so many are not above."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def _slow_tail(seconds: list[float]) -> float:
    """Share of all time in items of over eight medians."""
    total, bound = sum(seconds), _TAIL_FACTOR * median(seconds)
    return min(1.0, sum(one for one in seconds if one > bound) / total) if total > 0 else 0.0


def _children_cpu_s() -> float:
    """CPU seconds of the processes that this one has started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _disk_bytes() -> int:
    """Bytes that this process has had read from disks, page cache not counted; Linux, man 5 proc. 0 elsewhere."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])
    return 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch's operations, as torch sets it in loader workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
