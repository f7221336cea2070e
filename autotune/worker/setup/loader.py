"""The loader of a trial, or of one rank's share: which items make a batch, and how they reach its workers.

Every rank draws the same order, from the same seed, and takes each `size`-th of it: of a map-style dataset, of the
user's sampler or batch sampler. An iterable dataset must share its items out by itself: ranks whose first batches are
equal show that it does not.

Workers that are not forked (spawn, forkserver; Python 3.14's default) pickle by name, which fails for what was defined
in `__main__` or loaded from a file. The dataset and the functions go to them as a payload instead: written once a
trial, mapped by each worker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from autotune.errors import ConfigError
from autotune.protocol.payload import read_payload, write_payload
from autotune.settings.applied.tf_data import TfData, TfLoader
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload, beside_tf_data
from autotune.worker.setup.build import WorkloadFault, is_stream
from autotune.worker.setup.process_group import ALONE, Group

__all__ = ["EachNth", "build_loader", "tell_epoch"]


def build_loader(
    workload: Workload, dataset: Any, config: TrainingConfig, scratch: Path, group: Group = ALONE
) -> DataLoader[Any] | TfLoader:
    """The loader of a trial, of one rank's share where it has several.

    Folder `scratch` takes what loader workers that are not forked read.

    Raises:
        WorkloadFault: a tf.data pipeline can't be used, or what stands beside it.
    """
    if isinstance(dataset, TfData):
        return _tf_loader(workload, dataset, config)
    kwargs = config.dataloader_kwargs()
    kwargs.update(_sampling(workload, dataset, kwargs, group))
    functions = {"collate_fn": workload.collate_fn, "worker_init_fn": workload.worker_init_fn}
    if config.num_workers > 0:
        context = torch.multiprocessing.get_context(workload.multiprocessing_context)
        kwargs["multiprocessing_context"] = context
        if context.get_start_method() != "fork":
            ForkingPickler.register(type(dataset), partial(_as_payload, folder=scratch))
            functions = {name: part and _PortableFunction(part, scratch) for name, part in functions.items()}
    return DataLoader(dataset, **kwargs, **functions)


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
        self.drawn, self.group = drawn, group

    def __iter__(self) -> Iterator[Any]:
        drawn, size = iter(self.drawn), self.group.size
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


def _sampling(workload: Workload, dataset: Any, kwargs: dict[str, Any], group: Group) -> dict[str, Any]:
    """Arguments of the DataLoader that say which items make a batch; removes those they replace."""
    if workload.batch_sampler is not None:
        return {"batch_sampler": _own_sampler(workload.batch_sampler, group, dataset, kwargs.pop("batch_size"))}
    drops, order = {"drop_last": workload.drop_last}, {"shuffle": workload.shuffle}
    if is_stream(dataset):
        return drops
    if workload.sampler is not None:
        return drops | {"sampler": _own_sampler(workload.sampler, group, dataset)}
    if group.size > 1:
        return drops | {"sampler": DistributedSampler(dataset, group.size, group.rank, **order, **drops)}
    return drops | order


def _own_sampler(sampler: Any, group: Group, *arguments: Any) -> Any:
    """The user's sampler, or what their function makes of some arguments; of several ranks this one's share of it."""
    is_factory = callable(sampler) and not hasattr(sampler, "__iter__")
    drawn = sampler(*arguments) if is_factory else sampler
    return drawn if group.size == 1 else EachNth(drawn, group)


class _PortableFunction:
    """A callable of the user's that pickles as a payload; torch.utils.data gets it in place of the function."""

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._function, self._folder = function, folder

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
