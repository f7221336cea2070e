"""Build the loader of a trial, or of one rank's share, with the user's own samplers.

Comes in: the workload, its dataset or DataLoader, and a configuration. Goes out: a DataLoader or a
tf.data loader with that configuration's settings.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from autotune.apply.cores import limited
from autotune.apply.loader import drawn_by, drops_last, fixed_batches, loader_like
from autotune.config.plan import Workload, conflict_with_tf_data
from autotune.config.tf_data import TfData, TfLoader
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.protocol.payload import read_payload, write_payload
from autotune.settings_table import BATCH_SETTINGS, SETTINGS
from autotune.worker.build import WorkloadFault, is_stream, length_of
from autotune.worker.group import ALONE, Group

LOADER_INPUTS = frozenset(
    {setting.name for setting in SETTINGS if setting.is_of_loader} | BATCH_SETTINGS
)
"""Settings that decide how a loader is made: its own, and those of its batches."""

# The user's own batch sampler: made for a batch size or for a token budget.

_BUDGET = "max_tokens"
_MOST_COUNTED = 1000
"""Batches that are drawn, not loaded, for their mean size. Source: our own convention."""


def is_factory(sampler: Any) -> bool:
    """Return whether a sampler has to be called first: a function or class, not an iterable."""
    return callable(sampler) and (isinstance(sampler, type) or not hasattr(sampler, "__iter__"))


def takes_budget(sampler: Any) -> bool:
    """Return whether a batch sampler is made for a token budget: a factory with a parameter `max_tokens`."""
    found = _parameters(sampler).get(_BUDGET)
    return found is not None and found.kind is not inspect.Parameter.POSITIONAL_ONLY


def takes_batch_size(sampler: Any) -> bool:
    """Return whether such a factory requires a batch size besides the dataset and the budget."""
    required = 0
    for name, parameter in _parameters(sampler).items():
        is_variadic = parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        if name != _BUDGET and parameter.default is parameter.empty and not is_variadic:
            required += 1
    return required > 1


def refuse_budget(config: TrainingConfig) -> None:
    """Refuse a token budget that nothing fills.

    Raises:
        WorkloadFault: The configuration has one.
    """
    if config.max_tokens is not None:
        raise WorkloadFault(
            "baseline.max_tokens needs a batch sampler with a parameter of that name, but got "
            f"{config.max_tokens} and no such sampler; leave it out, or give workload.batch_sampler "
            "as batch_sampler(dataset, max_tokens)"
        )


def made_batches(sampler: Any, dataset: Any, config: TrainingConfig) -> Iterable[Any]:
    """Return what draws the batches of a configuration: the user's sampler, or what their factory makes.

    Args:
        sampler: The user's batch sampler, or a factory of one.
        dataset: The dataset to draw from.
        config: Batch size or token budget.

    Raises:
        WorkloadFault: A token budget is given but not taken, or taken but not given.
    """
    if not takes_budget(sampler):
        refuse_budget(config)
        drawn: Iterable[Any] = sampler
        if is_factory(sampler):
            drawn = sampler(dataset, config.loader_batch_size)
        return drawn
    if config.max_tokens is None:
        raise WorkloadFault(
            "a batch sampler with a parameter max_tokens needs a budget to fill, but "
            "baseline.max_tokens is not given; "
            "set it to the tokens of one batch, padding included, that you train with today"
        )
    size = (config.loader_batch_size,) if takes_batch_size(sampler) else ()
    filled: Iterable[Any] = sampler(dataset, *size, max_tokens=config.loader_max_tokens)
    return filled


def mean_samples(batches: Iterable[Any], dataset_length: int | None) -> float | None:
    """Return the mean samples of the first batches that a batch sampler draws; None if it draws none.

    The first batches of a longer epoch may be its shortest: there the mean is over the whole epoch,
    if its length is known.

    Args:
        batches: The batch sampler.
        dataset_length: Items of the dataset; None if unknown.
    """
    epoch = length_of(batches)
    if epoch is not None and epoch > _MOST_COUNTED and dataset_length is not None:
        return dataset_length / epoch
    sizes = [len(batch) for batch in islice(batches, _MOST_COUNTED) if isinstance(batch, Sized)]
    if not sizes:
        return None
    return fmean(sizes)


def _parameters(sampler: Any) -> dict[str, inspect.Parameter]:
    if is_factory(sampler):
        with suppress(ValueError, TypeError):  # a builtin has no signature
            return dict(inspect.signature(sampler).parameters)
    return {}


# The loader of a trial.


def build_loader(
    workload: Workload, data: Any, config: TrainingConfig, scratch: Path, group: Group = ALONE
) -> DataLoader[Any] | TfLoader:
    """Build the loader of a trial, or of this rank's share.

    A DataLoader of the user's is copied with the trial's settings; for a dataset a new one is made.

    Every rank draws the same order, from the same seed, and takes every `size`-th item of it: of a
    map-style dataset, of the user's sampler or batch sampler. An iterable dataset must shard
    itself; equal first batches on all ranks show that it does not.

    Workers that are not forked (spawn, forkserver; the default of Python 3.14) pickle by name,
    which fails for objects defined in `__main__` or loaded from a file. They get the dataset and
    functions as a payload instead, written once per trial and mapped by each worker.

    Args:
        workload: The user's sampling, collating and worker settings.
        data: A dataset, a TfData, or a DataLoader, in which the workload only overrides settings.
        config: The trial's settings.
        scratch: A folder for files read by loader workers that are not forked.
        group: This rank's group.

    Raises:
        WorkloadFault: A tf.data pipeline, or a setting given with it, can't be used; nothing fills
            a token budget; or a batch sampler is given for an iterable dataset.
    """
    if workload.batch_sampler is None:
        refuse_budget(config)
    if isinstance(data, TfData):
        return _tf_loader(workload, data, config)

    # Copy the user's loader, or a plain one of the dataset.
    if isinstance(data, DataLoader):
        loader = _like(data, data.dataset, workload, config, group)
    else:
        loader = _like(_plain_loader(data, workload), data, workload, config, group)
    loader.worker_init_fn = limited(loader.worker_init_fn, config.worker_threads)
    if config.num_workers == 0:
        return loader

    # Choose how workers start, and make the user's objects portable for workers that are not forked.
    method = config.multiprocessing_context or workload.multiprocessing_context
    if method is not None or loader.multiprocessing_context is None:
        loader.multiprocessing_context = torch.multiprocessing.get_context(method)
    if loader.multiprocessing_context.get_start_method() != "fork":
        ForkingPickler.register(type(loader.dataset), partial(_as_payload, folder=scratch))
        loader.collate_fn = _PortableFunction(loader.collate_fn, scratch)
        if loader.worker_init_fn:
            loader.worker_init_fn = _PortableFunction(loader.worker_init_fn, scratch)
    return loader


def _tf_loader(workload: Workload, data: TfData, config: TrainingConfig) -> TfLoader:
    fault = conflict_with_tf_data(workload)
    if fault is not None:
        raise WorkloadFault(fault)
    try:
        return data.loader(config)
    except ConfigError as error:
        raise WorkloadFault(str(error)) from error


class EachNth(Sampler[Any]):
    """A rank's share of a sampler or batch sampler; all ranks get equally many items.

    Args:
        drawn: The user's sampler; it must draw the same order on every rank.
        group: This rank's group.
    """

    def __init__(self, drawn: Iterable[Any], group: Group) -> None:
        self.drawn = drawn
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        drawn = iter(self.drawn)
        size = self.group.size
        while len(one_each := list(islice(drawn, size))) == size:  # no rank gets the remainder
            yield one_each[self.group.rank]

    def __len__(self) -> int:
        return len(self.drawn) // self.group.size  # type: ignore[arg-type] # raises the user's TypeError

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the user's sampler."""
        set_sampler_epoch(self.drawn, epoch)


def set_sampler_epoch(sampler: Any, epoch: int) -> None:
    """Call `set_epoch` of a sampler or dataset, if it has that method of torch's."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _plain_loader(dataset: Any, workload: Workload) -> DataLoader[Any]:
    """Return a loader with the workload's `shuffle` and `drop_last`, and torch's defaults otherwise.

    Raises:
        WorkloadFault: A batch sampler is given for an iterable dataset, which takes no indices.
    """
    if workload.batch_sampler is not None and isinstance(dataset, IterableDataset):
        raise WorkloadFault(
            "workload.batch_sampler needs a dataset that takes indices, but got the IterableDataset "
            f"{type(dataset).__name__}; leave the batch sampler out, or make the batches in the dataset"
        )
    shuffle: bool | None = workload.shuffle
    if workload.sampler is not None or workload.batch_sampler is not None:
        shuffle = False
    if is_stream(dataset):
        shuffle = None  # with False torch would switch off the shuffling in a data pipe itself
    return DataLoader(dataset, shuffle=shuffle, drop_last=workload.drop_last)


def _like(
    given: DataLoader[Any],
    dataset: Any,
    workload: Workload,
    config: TrainingConfig,
    group: Group,
) -> DataLoader[Any]:
    """Return a copy of a loader with a trial's settings and the workload's overrides.

    Args:
        given: The user's loader, or a plain one.
        dataset: What the user's factories of samplers get: torch wraps data pipes in a loader.
        workload: The user's overrides.
        config: The trial's settings.
        group: This rank's group.
    """
    # Decide who draws: the workload's sampler, the dataset itself, or the loader's own sampler.
    sampler: Any = None
    batch_sampler: Any = None
    if workload.batch_sampler is not None:
        batch_sampler = _shared(made_batches(workload.batch_sampler, dataset, config), group)
    elif is_stream(dataset):
        pass  # it shards itself
    elif workload.sampler is not None:
        sampler = _drawn(workload.sampler, dataset, group)
    elif given.batch_sampler is not None and fixed_batches(given):
        batch_sampler = _shared(given.batch_sampler, group)
    else:
        sampler = _own_share(given, group)

    loader = loader_like(
        given,
        config.loader_settings,
        config.loader_batch_size,
        sampler=sampler,
        batch_sampler=batch_sampler,
    )
    if workload.collate_fn is not None:
        loader.collate_fn = workload.collate_fn
    if workload.worker_init_fn is not None:
        loader.worker_init_fn = workload.worker_init_fn
    return loader


def _own_share(given: DataLoader[Any], group: Group) -> Any:
    """Return this rank's share of what a loader's own sampler draws; None to copy the sampler.

    Torch's DistributedSampler is made for this group, and replaces sequential and random samplers.
    """
    drawn = drawn_by(given)
    if type(drawn) is DistributedSampler or (group.size > 1 and _is_plain(drawn)):
        shuffles = isinstance(drawn, RandomSampler)
        if isinstance(drawn, DistributedSampler):
            shuffles = drawn.shuffle
        return DistributedSampler(
            given.dataset, group.size, group.rank, shuffle=shuffles, drop_last=drops_last(given)
        )
    return EachNth(drawn, group) if group.size > 1 else None


def _is_plain(sampler: Any) -> bool:
    """Return whether a sampler's order is nothing but sequential or random."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler._num_samples is None  # noqa: SLF001 - num_samples is never None
    return type(sampler) is SequentialSampler


def _drawn(sampler: Any, dataset: Any, group: Group) -> Any:
    """Return the user's sampler, or what their factory makes for the dataset; of several ranks, the share."""
    if is_factory(sampler):
        sampler = sampler(dataset)
    return _shared(sampler, group)


def _shared(drawn: Any, group: Group) -> Any:
    if group.size == 1:
        return drawn
    return EachNth(drawn, group)


class _PortableFunction:
    """A callable of the user's that pickles as a payload, for workers that are not forked."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._function = function
        self._folder = folder

    def __call__(self, *args: Any) -> Any:
        """Call the user's function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[[Path], Any], tuple[Path]]:
        return _as_payload(self._function, self._folder)


def _as_payload(value: object, folder: Path) -> tuple[Callable[[Path], Any], tuple[Path]]:
    """Write a value into a new folder; return a function that reads it, and its arguments."""
    payload = Path(tempfile.mkdtemp(prefix="loader-", dir=folder))
    write_payload(value, payload)
    return read_payload, (payload,)
