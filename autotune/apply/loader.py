"""Apply loader settings: the batch of a configuration, and a copy of a DataLoader with other settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
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

# A batch's way to the device: tensors, containers of them, and objects that move themselves.


IMAGE_DIMS = 4
"""Dimensions of a batch of images, batch, channels, height, width: what torch.channels_last is
defined for."""


def moved(value: Any, device: torch.device, *, channels_last: bool, non_blocking: bool) -> Any:
    """A batch on the device, its 4-D tensors in channels-last layout where asked; of any type.

    An object with a method `to` is asked to move itself, before any other rule: its class knows
    best. One that returns nothing has moved in place. Source: accelerate.utils.send_to_device and
    lightning's move_data_to_device, which both do so.
    """
    if isinstance(value, Tensor):
        if channels_last and value.ndim == IMAGE_DIMS:
            return value.to(device, non_blocking=non_blocking, memory_format=torch.channels_last)
        return value.to(device, non_blocking=non_blocking)
    move = getattr(value, "to", None)
    if not callable(move):
        return rebuilt(
            value,
            lambda part: moved(
                part, device, channels_last=channels_last, non_blocking=non_blocking
            ),
        )
    own = _move_without_blocking(move, device) if non_blocking else move(device)
    return value if own is None else own


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same type whose parts are changed; anything else as it is.

    Source: torch/utils/data/_utils/pin_memory.py, whose rules for mappings these are.
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
            object.__setattr__(
                own, field.name, change(getattr(value, field.name))
            )  # a frozen one's too
        return own
    return value


def _like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type with other values; a dict where its type can't be made so."""
    if type(value) is dict:
        return parts
    try:
        if not isinstance(value, MutableMapping):
            return type(value)(parts)  # type: ignore[call-arg] # a mapping's type usually takes one
        own = copy(value)  # it may have attributes beside its items
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


# A DataLoader of the user's under other settings: trials and the user's own loop load by copies of
# it.
#
# Comes in: a DataLoader of any class, or what has one inside (accelerate's, a WebLoader). Goes out:
# a copy with a configuration's settings, of which all else (its class, collate function, sampler,
# generator, ...) is the user's; or what the loader is set to. The loader that was given is not
# changed.


_PLAIN_SAMPLING = ("sampler", "batch_size", "drop_last")
"""What torch's BatchSampler is made from."""


def inner_loader(data: Any) -> Any:
    """The DataLoader inside of what frameworks put around it; anything else as it is.

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
    """Batches of an epoch that a WebLoader sets (`with_epoch`) and its loader does not know; None without any."""
    stages = getattr(data, "pipeline", None)
    count = getattr(data, "nsamples", None)
    is_set = isinstance(stages, list) and isinstance(count, int) and count > 0
    return count if is_set else None


def drawn_by(loader: DataLoader[Any]) -> Any:
    """The sampler that a loader's batches are drawn by: with a batch sampler of torch's kind it is in that."""
    resizable = _resizable(loader.batch_sampler)
    return loader.sampler if resizable is None else resizable.sampler


def drops_last(loader: DataLoader[Any]) -> bool:
    """Whether an epoch's last batch is left out where it is smaller; a batch sampler of torch's kind knows it best."""
    resizable = _resizable(loader.batch_sampler)
    return bool(loader.drop_last if resizable is None else resizable.drop_last)


def fixed_batches(loader: DataLoader[Any]) -> bool:
    """Whether batches come as the dataset or a batch sampler of the user's makes them: no other size can be had."""
    return loader.batch_sampler is None or _resizable(loader.batch_sampler) is None


def argument_of(loader: Any, name: str) -> Any:
    """Return an argument of a loader as a TrainingConfig has it; the setting's neutral value where it has none."""
    neutral = BY_NAME[name].neutral
    value = getattr(loader, name, neutral)
    if isinstance(value, BaseContext):
        return value.get_start_method()
    return bool(value) if isinstance(neutral, bool) else value  # torch takes 1 for True


def observed_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader is set to, by the names of a TrainingConfig.

    Its batch size is among them where it makes batches itself, and what only workers use where it
    has some.
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
    """A copy of a loader under other settings, which has not been iterated.

    Args:
        loader: The user's.
        settings: TrainingConfig.loader_settings.
        batch_size: Samples of a batch, where the loader makes batches itself.
        sampler: In place of the loader's own.
        batch_sampler: In place of the loader's own; its batches stay as it makes them.
        worker_threads: TrainingConfig.worker_threads; the loader's own worker_init_fn runs too.
    """
    made = copy(loader)
    # torch refuses most of this once a loader is made, since an iterator might hold the old one:
    # this one has none
    own = vars(made)
    own.update(
        {name: value for name, value in settings.items() if name != "multiprocessing_context"}
    )
    own.update(_iterator=None, _IterableDataset_len_called=None)
    own["worker_init_fn"] = limited(loader.worker_init_fn, worker_threads)
    if made.num_workers:
        own["prefetch_factor"] = settings["prefetch_factor"] or 2
        if settings.get("multiprocessing_context") is not None:
            made.multiprocessing_context = settings["multiprocessing_context"]
    else:
        own.update(
            timeout=0, _DataLoader__multiprocessing_context=None
        )  # without workers torch refuses any other
    if batch_sampler is not None:
        own.update(batch_sampler=batch_sampler, batch_size=None, drop_last=False)
        if (
            loader.batch_sampler is None and loader.collate_fn is default_convert
        ):  # torch's own, for no batches at all
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
    """A batch sampler that can be made anew with another batch size: torch's, or one that is made just as torch's."""
    if not isinstance(batch_sampler, BatchSampler):
        return None
    try:
        names = tuple(inspect.signature(type(batch_sampler)).parameters)
    except (TypeError, ValueError):
        return None
    has_all = all(hasattr(batch_sampler, name) for name in _PLAIN_SAMPLING)
    return batch_sampler if names == _PLAIN_SAMPLING and has_all else None
