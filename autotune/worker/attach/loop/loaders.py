"""Which of a script's loaders trains: the one that a batch came of before an optimizer stepped, in the same thread.

Comes in: the loaders that are iterated, their batches, the optimizer's steps. Goes out: the training loader, once it is
known, with its batches counted; or that the script trains without one.
"""

from __future__ import annotations

from collections import Counter
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune.settings.workload import ScriptFacts
from autotune.worker.attach.loop.feeds import CountedLoader
from autotune.worker.attach.loop.sightings import Sightings
from autotune.worker.attach.seams.hooks import plain_next
from autotune.worker.measure.batch_sizes import CountedBatch
from autotune.worker.measure.queue_depth import QueueDepth, deepen

__all__ = ["STEPS_BEYOND_BATCHES", "Loaders", "uncounted"]

_STEPS_WITHOUT_LOADER = 3
"""Optimizer steps without a batch of a DataLoader after which a script counts as one that has none: our convention."""
_LONGEST_WITHOUT_S = 10.0
"""Seconds of such steps where a first look has seen the loader that trains: a warm-up on other data. Our convention."""
STEPS_BEYOND_BATCHES = 64
"""Steps since the last batch, beyond as many as it took batches, from which on it trains on what it has kept: ours."""


class Loaders:
    """The loaders whose batches are counted.

    Args:
        sightings: What was seen so far.
        facts: Of the script's probe; None: any loader may be the one that trains.
        is_shallow: Keep the queue of the one that trains short until it matters, see QueueDepth.
    """

    def __init__(self, sightings: Sightings, facts: ScriptFacts | None, *, is_shallow: bool) -> None:
        self.counted: dict[int, CountedLoader] = {}
        """By the loader's id."""
        self.training: DataLoader[Any] | None = None
        """The training loader, once it is known."""
        self.depth = QueueDepth(is_shallow=is_shallow)
        """Of the training loader's queue, and of those that may be the training loader."""
        self._sightings, self._facts = sightings, facts
        self._last: dict[int, tuple[DataLoader[Any], int]] = {}
        """By thread: the loader that it has last taken a batch of, and the optimizer steps before that."""
        self._taken: dict[int, Counter[int]] = {}
        """By thread: how many batches of each loader, by its id, were taken since an optimizer stepped, in order."""
        self._begun = 0.0
        """When the last iterator of a counted loader was begun."""
        self._without_since: float | None = None
        """When it has made its first step on other batches than those of the loader that is known to train."""
        self._with_gradients: set[int] = set()
        """Ids of the loaders that were iterated with gradients on."""

    def is_evaluated(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader is about to be iterated for an evaluation: gradients are off, which were on before.

        The training loader is, where a script looks at its accuracy on what it trains on.
        """
        if torch.is_grad_enabled():
            self._with_gradients.add(id(loader))
            return False
        return id(loader) in self._with_gradients

    def begin(self, loader: DataLoader[Any], *, is_sure: bool) -> CountedLoader | None:
        """A loader is about to be iterated; how it is counted, where it trains for sure or may be the one that does."""
        counted = self.counted.get(id(loader))
        if counted is None and (is_sure or self._may_train(loader)):
            counted = self.counted[id(loader)] = CountedLoader(loader)
        if counted is not None:
            counted.begin_epoch()
            self._begun = perf_counter()
        return counted

    def is_counted(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader trains, or may be the one that does."""
        return id(loader) in self.counted

    def began(self, loader: DataLoader[Any]) -> float:
        """It is iterated now; when that was begun."""
        counted = self.counted.get(id(loader))
        if counted is not None:
            counted.has_begun_epoch()
            if not counted.has_begun:
                counted.start_s = perf_counter() - self._begun
        return self._begun

    def next(self, loader: DataLoader[Any], iterator: Any) -> Any:
        """The next batch for the script."""
        counted = self.counted.get(id(loader))
        if counted is None:
            return uncounted(iterator)
        self.depth.settle(loader, iterator)
        batch, samples = counted.fetch(iterator)
        self._last[get_ident()] = loader, self._sightings.most_steps
        self._taken.setdefault(get_ident(), Counter())[id(loader)] += 1
        self._sightings.samples.append(samples)
        return batch

    def moved(self, former: DataLoader[Any], loader: DataLoader[Any]) -> CountedLoader:
        """Replace the training loader, and return how the new one is counted."""
        self.forget(former)
        return self.counted.setdefault(id(loader), CountedLoader(loader))

    def forget(self, loader: DataLoader[Any]) -> None:
        """The script has made its training loader anew: hold the former one no longer, so that its workers end."""
        self.counted.pop(id(loader), None)
        self._with_gradients.discard(id(loader))
        kept = getattr(loader, "_iterator", None)  # of persistent workers: it knows its loader, which knows it
        if kept is not None:
            kept.autotune_loader = None
        self._last.clear()
        self.training = None

    def has_none_after_step(self) -> bool:
        """An optimizer has stepped: either that shows which loader trains, or, after some steps, that none does."""
        last, count = self._last.get(get_ident()), len(self._sightings.samples)
        steps = self._sightings.most_steps - (0 if last is None else last[1])
        taken = self._taken.pop(get_ident(), Counter())
        if last is not None and steps <= count + STEPS_BEYOND_BATCHES:
            # Of loaders that are read in step (zip) the first one has the lead; any evaluation reads more batches.
            is_in_step = len(taken) > 1 and set(taken.values()) == {1}
            self.training = self.counted[next(iter(taken))].loader if is_in_step else last[0]
            return False
        if last is None and self._facts is not None and self._facts.loaders:  # its loader is known, and yet to come
            self._without_since = self._without_since or perf_counter()
            if perf_counter() - self._without_since < _LONGEST_WITHOUT_S:
                return False
        if steps >= _STEPS_WITHOUT_LOADER:
            self.training = None
        return steps >= _STEPS_WITHOUT_LOADER

    def _may_train(self, loader: DataLoader[Any]) -> bool:
        """Before its probe any loader may be the one that trains; then its place is known."""
        if self._facts is None:
            return True
        return any(made.loader() is loader and made.is_searched for made in self._sightings.made)


def uncounted(iterator: Any) -> Any:
    """A batch as the script has it, whether or not its loader counts.

    Nobody measures it: where the loader might have been the one that trains, it gets its whole queue now.
    """
    deepen(getattr(iterator, "autotune_loader", None), iterator)
    batch = plain_next(iterator)
    return batch.batch if type(batch) is CountedBatch else batch
