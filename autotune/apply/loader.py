"""Move batches to a device, and copy the user's DataLoader with other settings.

Comes in: a DataLoader of any class, or a framework's wrapper of one. Goes out: a copy with a
configuration's settings and everything else (class, collate function, sampler, generator, ...) as
it is, or the settings that the loader has. The given loader is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    default_collate,
    default_convert,
)

from autotune.apply.cores import limited, threads_in_workers
from autotune.settings_table import BY_NAME, SETTINGS

IMAGE_DIMS = 4
"""Dimensions of a batch of images (batch, channels, height, width), as torch.channels_last needs."""


def moved(value: Any, device: torch.device, *, channels_last: bool, non_blocking: bool) -> Any:
    """Return a batch of any type on the device.

    An object with a method `to` moves itself; if that returns None, it has moved in place. Source:
    accelerate.utils.send_to_device and lightning's move_data_to_device do the same.

    Args:
        value: A tensor, a container of tensors, or an object with a method `to`; anything else is
            returned as it is.
        device: The target.
        channels_last: Put 4-D tensors into channels-last memory format.
        non_blocking: As for torch.Tensor.to.
    """
    if isinstance(value, Tensor):
        if channels_last and value.ndim == IMAGE_DIMS:
            return value.to(device, non_blocking=non_blocking, memory_format=torch.channels_last)
        return value.to(device, non_blocking=non_blocking)
    move = getattr(value, "to", None)
    if not callable(move):
        move_part = partial(
            moved, device=device, channels_last=channels_last, non_blocking=non_blocking
        )
        return rebuilt(value, move_part)
    own = _move_without_blocking(move, device) if non_blocking else move(device)
    return value if own is None else own


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with changed parts; anything else as it is.

    Source of the rules for mappings: torch/utils/data/_utils/pin_memory.py.
    """
    if isinstance(value, Mapping):
        return _like(value, {key: change(part) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if isinstance(value, tuple | list):
        return type(value)(map(change, value))
    if is_dataclass(value) and not isinstance(value, type):
        own = copy(value)
        for field in fields(value):
            part = change(getattr(value, field.name))
            object.__setattr__(own, field.name, part)  # it may be frozen
        return own
    return value


def _like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type with other values; a dict if the type can't be made that way."""
    if type(value) is dict:
        return parts
    try:
        if not isinstance(value, MutableMapping):
            return type(value)(parts)  # type: ignore[call-arg] # a mapping's type usually takes one
        own = copy(value)  # it may have attributes besides its items
        for key, part in parts.items():
            own[key] = part  # transformers' ModelOutput refuses `update`
    except Exception:  # noqa: BLE001 - a type of the user's may raise anything
        return parts
    return own


def _move_without_blocking(move: Callable[..., Any], device: torch.device) -> Any:
    try:
        return move(device, non_blocking=True)
    except TypeError:  # a method without that argument
        return move(device)


_PLAIN_SAMPLING = ("sampler", "batch_size", "drop_last")
"""Parameters of torch's BatchSampler."""


def inner_loader(data: Any) -> Any:
    """Unwrap a DataLoader from framework wrappers; return anything else as it is.

    Raises:
        ValueError: a WebLoader has stages after its loader, which no setting of the loader reaches.
    """
    for _ in range(8):  # also ends a circle
        if isinstance(data, DataLoader):
            inner = getattr(data, "base_dataloader", None)  # accelerate's
            if not isinstance(inner, DataLoader):
                return data
            data = inner
            continue
        stages = getattr(data, "pipeline", None)  # WebDataset's
        if not (isinstance(stages, list) and stages and isinstance(stages[0], DataLoader)):
            return data
        if len(stages) > 1:
            names = ", ".join(
                str(getattr(stage, "__name__", type(stage).__name__)) for stage in stages[1:]
            )
            raise ValueError(
                f"a WebLoader must end with its loader, but stages follow it ({names}), which the "
                f"loader's settings "
                "don't reach; make batches in the dataset (.batched(n)), and leave the stages out"
            )
        data = stages[0]
    return data


def lost_epoch(data: Any) -> int | None:
    """Return the epoch length in batches that a WebLoader sets (`with_epoch`), which its loader ignores; or None."""
    stages = getattr(data, "pipeline", None)
    count = getattr(data, "nsamples", None)
    is_set = isinstance(stages, list) and isinstance(count, int) and count > 0
    return count if is_set else None


def drawn_by(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a loader; the batch sampler's own if that is torch's."""
    resizable = _resizable(loader.batch_sampler)
    return loader.sampler if resizable is None else resizable.sampler


def drops_last(loader: DataLoader[Any]) -> bool:
    """Return drop_last of a loader; the batch sampler's own if that is torch's."""
    resizable = _resizable(loader.batch_sampler)
    return bool(loader.drop_last if resizable is None else resizable.drop_last)


def fixed_batches(loader: DataLoader[Any]) -> bool:
    """Return True if the dataset or the user's batch sampler makes the batches, so their size is fixed."""
    return loader.batch_sampler is None or _resizable(loader.batch_sampler) is None


def argument_of(loader: Any, name: str) -> Any:
    """Return an argument of a loader as TrainingConfig stores it; the neutral value if it has none."""
    neutral = BY_NAME[name].neutral
    value = getattr(loader, name, neutral)
    if isinstance(value, BaseContext):
        return value.get_start_method()
    return bool(value) if isinstance(neutral, bool) else value  # torch takes 1 for True


def observed_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's settings, by the names of TrainingConfig.

    The batch size is included if the loader makes the batches, and settings of workers if it has
    some.
    """
    settings = {
        setting.name: argument_of(loader, setting.name)
        for setting in SETTINGS
        if setting.is_loader_argument and (loader.num_workers or setting.needs is None)
    }
    if loader.num_workers:
        threads = threads_in_workers(loader.worker_init_fn)
        settings |= {} if threads is None else {"worker_threads": threads}
    if not fixed_batches(loader):
        settings["micro_batch_size"] = loader.batch_sampler.batch_size  # type: ignore[union-attr] # as _resizable found
    return settings


def loader_like(
    loader: DataLoader[Any],
    settings: Mapping[str, Any],
    batch_size: int,
    *,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    worker_threads: int | None = None,
) -> DataLoader[Any]:
    """Return a copy of a loader with other settings, not iterated yet.

    Args:
        loader: The user's loader.
        settings: TrainingConfig.loader_settings.
        batch_size: Samples per batch, if the loader makes the batches.
        sampler: Replaces the loader's own.
        batch_sampler: Replaces the loader's own; `batch_size` is then ignored.
        worker_threads: TrainingConfig.worker_threads; the loader's worker_init_fn still runs.
    """
    made = copy(loader)
    # Write to __dict__: torch refuses to change a loader, since its iterator may use the old values.
    # The copy has no iterator.
    own = vars(made)
    own.update(settings)
    start_method = own.pop("multiprocessing_context", None)  # a property, which checks it
    own.update(_iterator=None, _IterableDataset_len_called=None)
    own["worker_init_fn"] = limited(loader.worker_init_fn, worker_threads)
    if made.num_workers:
        own["prefetch_factor"] = settings["prefetch_factor"] or 2
        if start_method is not None:
            made.multiprocessing_context = start_method
    else:  # without workers torch refuses any other values
        own.update(timeout=0, _DataLoader__multiprocessing_context=None)
    if batch_sampler is not None:
        own.update(batch_sampler=batch_sampler, batch_size=None, drop_last=False)
        # torch's default for a loader that makes no batches
        if loader.batch_sampler is None and loader.collate_fn is default_convert:
            own["collate_fn"] = default_collate
        return made
    resizable = _resizable(loader.batch_sampler)
    if sampler is not None and not isinstance(loader.dataset, IterableDataset):
        own["sampler"] = sampler
    if resizable is not None:
        drawn = made.sampler if sampler is not None else resizable.sampler
        own["batch_sampler"] = type(resizable)(drawn, batch_size, resizable.drop_last)
        own["batch_size"] = batch_size
    return made


def _resizable(batch_sampler: Any) -> BatchSampler | None:
    """Return the batch sampler if it can be made again with another size, as torch's can; else None."""
    if not isinstance(batch_sampler, BatchSampler):
        return None
    try:
        names = tuple(inspect.signature(type(batch_sampler)).parameters)
    except (TypeError, ValueError):
        return None
    has_all = all(hasattr(batch_sampler, name) for name in _PLAIN_SAMPLING)
    return batch_sampler if names == _PLAIN_SAMPLING and has_all else None
