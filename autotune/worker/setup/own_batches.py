"""The user's own batch sampler: made for a batch size or for a token budget.

Comes in: the part of the workload, the dataset and a configuration. Goes out: what draws the batches; or the facts that
a probe finds about it: whether it takes a token budget, and how many samples such a batch holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sized
from contextlib import suppress
from itertools import islice
from statistics import fmean
from typing import Any

from autotune.settings.training_config import TrainingConfig
from autotune.worker.setup.build import WorkloadFault, length_of

__all__ = ["is_factory", "made_batches", "mean_samples", "refuse_budget", "takes_batch_size", "takes_budget"]

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
        if name != _BUDGET and one.default is one.empty and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
    ]
    return len(required) > 1


def refuse_budget(config: TrainingConfig) -> None:
    """Refuse a token budget that nothing fills.

    Raises:
        WorkloadFault: there is one.
    """
    if config.max_tokens is not None:
        raise WorkloadFault(
            f"baseline.max_tokens needs a batch sampler with a parameter of that name, but got {config.max_tokens} and "
            "no such sampler; leave it out, or give workload.batch_sampler as batch_sampler(dataset, max_tokens)"
        )


def made_batches(sampler: Any, dataset: Any, config: TrainingConfig) -> Iterable[Any]:
    """What draws the batches of a configuration: the user's sampler, or what their function makes.

    Raises:
        WorkloadFault: a token budget is given and not taken, or the other way round.
    """
    if not takes_budget(sampler):
        refuse_budget(config)
        drawn: Iterable[Any] = sampler(dataset, config.loader_batch_size) if is_factory(sampler) else sampler
        return drawn
    if config.max_tokens is None:
        raise WorkloadFault(
            "a batch sampler with a parameter max_tokens needs a budget to fill, but baseline.max_tokens is not given; "
            "set it to the tokens of one batch, padding included, that you train with today"
        )
    size = (config.loader_batch_size,) if takes_batch_size(sampler) else ()
    filled: Iterable[Any] = sampler(dataset, *size, max_tokens=config.loader_max_tokens)
    return filled


def mean_samples(batches: Iterable[Any], dataset_length: int | None) -> float | None:
    """Samples of a batch in the mean over the first ones that a batch sampler draws; None of none.

    Of a longer epoch, whose first batches may be the shortest, over all of it where its length is known.
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
