"""What the data of a tf.data pipeline costs: a sample of a batch, made one after the other by one thread.

Takes a trial's loader after its threads have ended; hands on LoaderCosts as `item_costs` does for a DataLoader. A
pipeline hands on whole batches, so that a sample's time is its part of its batch's, and collating, transfer and
pinning belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from math import inf
from typing import Any

from autotune.records.breakdown import LoaderCosts
from autotune.settings.applied.tf_data import TfLoader
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.training_config import TrainingConfig
from autotune.worker.after_window.item_costs import costs_of, time_items

__all__ = ["measure_pipeline"]


def measure_pipeline(loader: TfLoader, config: TrainingConfig, *, ends_at: float = inf) -> LoaderCosts:
    """Time what a sample costs where one thread makes all of it, for about a second.

    Args:
        loader: What the trial has trained on; its pipeline is built anew.
        config: What the loader was built for.
        ends_at: Time of perf_counter at which the deadline is near; no further batch is begun then.
    """
    plain = config.model_copy(update={**NEUTRAL_WITHOUT_WORKERS, "num_workers": 0, "pin_memory": False})
    alone = TfLoader(loader.dataset, plain, threads=1)
    timed = time_items(_draws(alone), 1, ends_at)
    return costs_of(timed, timed.kept[0], len(timed.kept), collate_s=0.0)  # kept: the first batch, for each sample


def _draws(loader: TfLoader) -> Iterator[Callable[[], list[Any]]]:
    batches = chain.from_iterable(iter(partial(iter, loader), None))
    while True:
        yield partial(_next_batch, loader, batches)


def _next_batch(loader: TfLoader, batches: Iterator[Any]) -> list[Any]:
    """A batch as often as it has samples."""
    return [next(batches)] * loader.samples
