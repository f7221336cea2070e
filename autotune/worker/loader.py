"""Build the loader of a trial, or of one rank's share, with the user's own samplers."""

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
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from autotune.apply.cores import limited
from autotune.apply.loader import drawn_by, drops_last, fixed_batches, loader_like
from autotune.config.plan import Workload, beside_tf_data
from autotune.config.tf_data import TfData, TfLoader
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.protocol.payload import read_payload, write_payload
from autotune.worker.build import WorkloadFault, is_stream, length_of
from autotune.worker.group import ALONE, Group

# The user's own batch sampler: made for a batch size or for a token budget.
#
# Comes in: the part of the workload, the dataset and a configuration. Goes out: what draws the
# batches; or the facts that a probe finds about it: whether it takes a token budget, and how many
# samples such a batch holds.


_BUDGET = "max_tokens"
_MOST_COUNTED = 1000
"""Batches that are drawn, not loaded, to know their mean size: our own convention."""


def is_factory(sampler: Any) -> bool:
    """Whether a sampler has to be called first: a function or a class, not a thing to iterate."""
    return callable(sampler) and (isinstance(sampler, type) or not hasattr(sampler, "__iter__"))


def takes_budget(sampler: Any) -> bool:
    """Whether a batch sampler is made for a token budget: it is a factory with a parameter `max_tokens`."""
    found = _parameters(sampler).get(_BUDGET)
    return found is not None and found.kind is not inspect.Parameter.POSITIONAL_ONLY


def takes_batch_size(sampler: Any) -> bool:
    """Whether such a factory can't be called without a batch size beside the dataset and the budget."""
    required = [
        one
        for name, one in _parameters(sampler).items()
        if name != _BUDGET
        and one.default is one.empty
        and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
    ]
    return len(required) > 1


def refuse_budget(config: TrainingConfig) -> None:
    """Refuse a token budget that nothing fills.

    Raises:
        WorkloadFault: there is one.
    """
    if config.max_tokens is not None:
        raise WorkloadFault(
            f"baseline.max_tokens needs a batch sampler with a parameter of that name, but got "
            f"{config.max_tokens} and "
            "no such sampler; leave it out, or give workload.batch_sampler as "
            "batch_sampler(dataset, max_tokens)"
        )


def made_batches(sampler: Any, dataset: Any, config: TrainingConfig) -> Iterable[Any]:
    """What draws the batches of a configuration: the user's sampler, or what their function makes.

    Raises:
        WorkloadFault: a token budget is given and not taken, or the other way round.
    """
    if not takes_budget(sampler):
        refuse_budget(config)
        drawn: Iterable[Any] = (
            sampler(dataset, config.loader_batch_size) if is_factory(sampler) else sampler
        )
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
    """Samples of a batch in the mean over the first ones that a batch sampler draws; None of none.

    Of a longer epoch, whose first batches may be the shortest, over all of it where its length is
    known.
    """
    epoch = length_of(batches)
    if epoch is not None and epoch > _MOST_COUNTED and dataset_length is not None:
        return dataset_length / epoch
    sizes = [len(batch) for batch in islice(batches, _MOST_COUNTED) if isinstance(batch, Sized)]
    return fmean(sizes) if sizes else None


def _parameters(sampler: Any) -> dict[str, inspect.Parameter]:
    if is_factory(sampler):
        with suppress(ValueError, TypeError):  # a builtin has no signature to look at
            return dict(inspect.signature(sampler).parameters)
    return {}


# The loader of a trial, or of one rank's share: which items make a batch, and how they reach its
# workers.
#
# A DataLoader of the user's is copied with a trial's settings; for a dataset one is made.
#
# Every rank draws the same order, from the same seed, and takes each `size`-th of it: of a
# map-style dataset, of the user's sampler or batch sampler. An iterable dataset must share its
# items out by itself: ranks whose first batches are equal show that it does not.
#
# Workers that are not forked (spawn, forkserver; Python 3.14's default) pickle by name, which fails
# for what was defined in `__main__` or loaded from a file. The dataset and the functions go to them
# as a payload instead: written once a trial, mapped by each worker.


def build_loader(
    workload: Workload, data: Any, config: TrainingConfig, scratch: Path, group: Group = ALONE
) -> DataLoader[Any] | TfLoader:
    """The loader of a trial, of one rank's share where it has several.

    Args:
        workload: What the user says of sampling, collating and workers.
        data: A dataset, a TfData, or a DataLoader, of which the workload says only what is to be
            different.
        config: The trial's settings.
        scratch: A folder for what loader workers that are not forked read.
        group: This rank among the others.

    Raises:
        WorkloadFault: a tf.data pipeline can't be used, or what stands beside it; or a token budget
            that nothing fills.
    """
    if workload.batch_sampler is None:
        refuse_budget(config)
    if isinstance(data, TfData):
        return _tf_loader(workload, data, config)
    if isinstance(data, DataLoader):
        loader = _like(data, workload, config, group)
    else:
        kwargs = {**config.loader_settings, **_sampling(workload, data, config, group)}
        loader = DataLoader(
            data, **kwargs, collate_fn=workload.collate_fn, worker_init_fn=workload.worker_init_fn
        )
    loader.worker_init_fn = limited(loader.worker_init_fn, config.worker_threads)
    if config.num_workers == 0:
        return loader
    method = config.multiprocessing_context or workload.multiprocessing_context
    if method is not None or loader.multiprocessing_context is None:
        loader.multiprocessing_context = torch.multiprocessing.get_context(method)
    if loader.multiprocessing_context.get_start_method() != "fork":
        ForkingPickler.register(type(loader.dataset), partial(_as_payload, folder=scratch))
        loader.collate_fn = _PortableFunction(loader.collate_fn, scratch)
        loader.worker_init_fn = loader.worker_init_fn and _PortableFunction(
            loader.worker_init_fn, scratch
        )
    return loader


def _tf_loader(workload: Workload, data: TfData, config: TrainingConfig) -> TfLoader:
    fault = beside_tf_data(workload)
    if fault is not None:
        raise WorkloadFault(fault)
    try:
        return data.loader(config)
    except ConfigError as error:
        raise WorkloadFault(str(error)) from error


class EachNth(Sampler[Any]):
    """A rank's share of what a sampler, or a batch sampler, draws: equally much for each rank.

    Args:
        drawn: the user's sampler; it must draw the same order on every rank.
        group: this rank among the others.
    """

    def __init__(self, drawn: Iterable[Any], group: Group) -> None:
        self.drawn = drawn
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        drawn = iter(self.drawn)
        size = self.group.size
        while len(one_each := list(islice(drawn, size))) == size:  # what is left over goes to none
            yield one_each[self.group.rank]

    def __len__(self) -> int:
        return len(self.drawn) // self.group.size  # type: ignore[arg-type] # raises TypeError as the user's own does

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to a sampler that asks for it."""
        tell_epoch(self.drawn, epoch)


def tell_epoch(sampler: Any, epoch: int) -> None:
    """Tell a sampler or dataset which epoch begins, where it has torch's method for that."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _sampling(
    workload: Workload, dataset: Any, config: TrainingConfig, group: Group
) -> dict[str, Any]:
    """Arguments of the DataLoader that say which items come, in which order, and which of them make a batch."""
    if workload.batch_sampler is not None:
        return {
            "batch_sampler": _shared(made_batches(workload.batch_sampler, dataset, config), group)
        }
    batches = {"batch_size": config.loader_batch_size, "drop_last": workload.drop_last}
    if is_stream(dataset):
        return batches
    if workload.sampler is not None:
        return batches | {"sampler": _drawn(workload.sampler, dataset, group)}
    if group.size > 1:
        shuffle = workload.shuffle
        drop_last = workload.drop_last
        return batches | {
            "sampler": DistributedSampler(
                dataset, group.size, group.rank, shuffle=shuffle, drop_last=drop_last
            )
        }
    return batches | {"shuffle": workload.shuffle}


def _like(
    given: DataLoader[Any], workload: Workload, config: TrainingConfig, group: Group
) -> DataLoader[Any]:
    """A copy of the user's loader under other settings, with what the workload says in place of the loader's own."""
    dataset = given.dataset
    sampler: Any = None
    batch_sampler: Any = None
    if workload.batch_sampler is not None:
        batch_sampler = _shared(made_batches(workload.batch_sampler, dataset, config), group)
    elif workload.sampler is not None:
        sampler = _drawn(workload.sampler, dataset, group)
    elif is_stream(dataset):
        pass  # it shares its items out by itself
    elif given.batch_sampler is not None and fixed_batches(given):
        batch_sampler = _shared(given.batch_sampler, group)
    elif type(drawn := drawn_by(given)) is DistributedSampler or (
        group.size > 1 and _is_plain(drawn)
    ):
        shuffles = (
            drawn.shuffle
            if isinstance(drawn, DistributedSampler)
            else isinstance(drawn, RandomSampler)
        )
        sampler = DistributedSampler(
            dataset, group.size, group.rank, shuffle=shuffles, drop_last=drops_last(given)
        )
    elif group.size > 1:
        sampler = EachNth(drawn, group)
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


def _is_plain(sampler: Any) -> bool:
    """Whether a sampler's order says no more than whether it is random."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler._num_samples is None  # noqa: SLF001 - num_samples is never None
    return type(sampler) is SequentialSampler


def _drawn(sampler: Any, dataset: Any, group: Group) -> Any:
    """The user's sampler, or what their function makes for the dataset; of several ranks this one's share of it."""
    return _shared(sampler(dataset) if is_factory(sampler) else sampler, group)


def _shared(drawn: Any, group: Group) -> Any:
    return drawn if group.size == 1 else EachNth(drawn, group)


class _PortableFunction:
    """A callable of the user's that pickles as a payload; torch.utils.data gets it in place of the function."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._function = function
        self._folder = folder

    def __call__(self, *args: Any) -> Any:
        """Call the user's function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[[Path], Any], tuple[Path]]:
        return _as_payload(self._function, self._folder)


def _as_payload(value: object, folder: Path) -> tuple[Callable[[Path], Any], tuple[Path]]:
    """Write a value below a folder; how a worker reads it."""
    payload = Path(tempfile.mkdtemp(prefix="loader-", dir=folder))
    write_payload(value, payload)
    return read_payload, (payload,)
