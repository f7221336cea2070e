"""Take batches from a running script: from its training loader, or from its steps if it has none.

In: the script's loaders, their iterators and the optimizer's steps. Out: a Feed and a Trainer, so
that the measurement code drives a script's loop as it drives autotune's own; and the loader that
trains, with its batches counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.utils.data import DataLoader

from autotune.config.plan import ScriptFacts
from autotune.config.training_config import TrainingConfig
from autotune.worker.batch import Held, size_counter, tensors_of, unwrapped
from autotune.worker.build import is_stream, length_of
from autotune.worker.device import Device
from autotune.worker.feed import (
    Delivery,
    FeedEnded,
    ItemCounter,
    LoopMoved,
    QueueDepth,
    asked_of,
    deepen,
    pids_of,
    ready_in,
    stop_iterator,
)
from autotune.worker.feed import queue_capacity as capacity_of
from autotune.worker.script.hooks import plain_iter, plain_next
from autotune.worker.script.sightings import SideBatches, Sightings

# The script's training loop, inverted
#
# The measurement runs in its own greenlet, in the script's thread. It runs when the script asks for
# a batch (having trained on the one before), and stands still while the script trains.
# `ScriptFeed.take` fetches a batch with the loader's own iterator; `ScriptTrainer.train` passes it
# to the script and returns when the script asks again. A switch costs well below a microsecond.


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception of the loader in place of a batch, to be raised in the script's own call.

    The end of an epoch is passed as a class: the traceback of an exception object would keep the
    loader's iterator, and so its workers, alive.
    """

    error: Exception | type[StopIteration]


class Conductor:
    """Switch between the script's greenlet and the measuring one.

    Args:
        work: The measurement; runs in its own greenlet from the first `ask` on.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.thread: int | None = None
        """The thread that trains, once it has asked for a batch."""
        self.is_measuring = self.has_ended = False
        self.actions: deque[Callable[[], object]] = deque()
        """Actions to run in the script's greenlet, before it gets its next batch."""
        self._work = work

    def ask(self) -> Any:
        """Run the measurement until it gives a batch; called in the script.

        Returns:
            The batch.

        Raises:
            StopIteration: The epoch ends.
            Exception: The loader raised it.
        """
        if self.thread is None:
            self.thread = get_ident()
            self._measuring = greenlet(self._work)
        self._script = getcurrent()
        self.is_measuring = True
        answer = self._measuring.switch()
        self.is_measuring = False
        while self.actions:
            self.actions.popleft()()
        if isinstance(answer, _Raised):
            raise answer.error
        return answer

    def give(self, batch: Any) -> None:
        """Run the script on a batch until it asks for the next one; called in the measurement.

        Raises:
            FeedEnded: The script has ended, and will not ask again.
        """
        if self.has_ended:
            raise FeedEnded
        self.is_measuring = False
        self._script.switch(batch)
        self.is_measuring = True

    def give_error(self, error: Exception | type[StopIteration]) -> None:
        """Raise an exception in the script, and return when it asks for a batch again.

        Args:
            error: A loader's exception; StopIteration itself to end the script's epoch.
        """
        self.give(_Raised(error))

    def end(self) -> None:
        """Let the measurement finish with what it has; called at the script's end."""
        if not self._measuring.dead:
            self._script = getcurrent()
            self.is_measuring = True
            self.has_ended = True
            self._measuring.throw(FeedEnded)


class HeldBatches:
    """Iterate over batches that the measurement gives, in place of a loader whose workers ended."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def __iter__(self) -> HeldBatches:
        return self

    def __next__(self) -> Any:
        return self._conductor.ask()


@dataclass(slots=True)
class ScriptTrainer:
    """Train with the script's own step; implements Trainer."""

    config: TrainingConfig
    device: Device
    conductor: Conductor
    optimizer: torch.optim.Optimizer
    loss: Any = None
    """Loss of the last backward pass, on the device."""
    accumulated: int = 0
    """Number of batches since the optimizer's last step."""
    scaler: torch.amp.GradScaler = field(
        default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False)
    )

    def train(self, batch: Any) -> Tensor:
        """Let the script train on a batch, and return the loss without synchronizing."""
        self.accumulated += 1
        self.conductor.give(batch)
        if self.loss is None:
            return torch.zeros((), device=self.device.torch_device)
        loss: Tensor = self.loss
        return loss

    def to_device(self, batch: Any) -> Any:
        """Copy a batch to the device as the configuration's settings say."""
        return self.config.to_device(batch, self.device.torch_device)

    def in_loop(self, action: Callable[[], object]) -> None:
        """Run an action in the script's greenlet, before its next batch."""
        self.conductor.actions.append(action)

    def without_exchange(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: gradient exchange belongs to the script."""
        return nullcontext()


# Feeds over a script's batches


@dataclass(slots=True)
class CountedLoader:
    """Count a loader's samples where it collates batches, and record its start-up times."""

    loader: DataLoader[Any]
    drawn: deque[int] = field(default_factory=deque)
    """Sizes of the index batches that were drawn and not yet fetched."""
    sized: Callable[[Any], tuple[Any, int]] = field(init=False)
    """Function from what the loader returns to the batch and its number of samples."""
    in_epoch: int = 0
    """Number of batches in the present epoch."""
    start_s: float = 0.0
    """Seconds to make its first iterator."""
    first_wait_s: float = 0.0
    """Seconds of waiting for its first batch."""
    has_begun: bool = False
    counter: ItemCounter = field(default_factory=ItemCounter)
    """Counter of the items that its workers make."""

    def __post_init__(self) -> None:
        self.sized = size_counter(self.loader, self.drawn)
        if self.loader.batch_sampler is None:
            # The dataset returns whole batches: few scripts train on single samples.
            self.sized = lambda batch: (batch, self._usual(batch))

    def begin_epoch(self) -> None:
        """Reset the counts; call before a new iterator is made."""
        self.in_epoch = 0
        self.drawn.clear()
        self.counter.begin(self.loader)

    def has_begun_epoch(self) -> None:
        """Start to count items; call once the iterator is made."""
        self.counter.end(self.loader)

    def fetch(self, iterator: Any) -> tuple[Any, int]:
        """Return the next batch and its number of samples.

        Raises:
            StopIteration: The epoch is over.
        """
        begun = perf_counter()
        batch = plain_next(iterator)
        if not self.has_begun:
            self.has_begun = True
            self.first_wait_s = perf_counter() - begun
        self.in_epoch += 1
        try:
            batch, samples = self.sized(batch)
        except IndexError:
            # The loader began before it was counted: a StatefulDataLoader may do so before it is
            # iterated.
            samples = self._usual(batch)
        self.counter.add(samples)
        return batch, samples

    def _usual(self, batch: Any) -> int:
        """Return the loader's batch size, else the length of the first tensor, else 1."""
        parts = unwrapped(self.loader)
        size = self.loader.batch_size or getattr(parts.batch_sampler, "batch_size", None)
        if size:
            return int(size)
        first = next((tensor for tensor in tensors_of(batch) if tensor.ndim), None)
        return 1 if first is None else first.shape[0]


class ScriptFeed:
    """Feed the measurement from the script's own training loader; implements Feed.

    Once `is_own`, the loader is iterated here and the script no longer gets its batches.

    Args:
        conductor: Passes the batches that are taken to the script.
        counted: The training loader.
        iterator: The loader's iterator, which the script asked for a batch.
        depth: The rule that keeps the loader's queue short until it matters.
        ranks: Number of processes that train in step.
    """

    def __init__(
        self,
        conductor: Conductor,
        counted: CountedLoader,
        iterator: Any,
        depth: QueueDepth,
        ranks: int = 1,
    ) -> None:
        self.loader = counted.loader
        self._iterator: Callable[[], Any] = ref(iterator)
        """Weak reference to the iterator, so that its workers end when the script leaves an epoch
        early."""
        self.is_own = False
        """True once the loader is iterated here."""
        self.is_dry = False
        """True once the script trains on batches that it kept; its steps drive the measurement."""
        self.batches = 0
        """Number of batches given to the script."""
        self._usual_samples = 1
        self.has_moved = False
        """True once the script trains on another loader than the one it began with."""
        self.is_moving = False
        """True from such a move until the measurement knows of it."""
        self._is_partial = False
        """True if the present epoch was under way when the script moved to its loader."""
        self.is_between_epochs = False
        """True from an epoch's end until the script begins the next one."""
        self.watches_queue = True
        self.epoch_batches: int | None = length_of(counted.loader)
        self.side_batches = SideBatches()
        """Record of the script's other loaders."""
        self.outside_s = 0.0
        """Seconds so far that were left out, between epochs or for other loaders."""
        self.epochs = 0
        self._conductor = conductor
        self._counted = counted
        self._depth = depth
        self._ranks = ranks
        self._asked_again = self._starting_s = 0.0

    @property
    def start_s(self) -> float:
        """Seconds of starting the loader's workers."""
        return self._counted.start_s

    @property
    def first_wait_s(self) -> float:
        """Seconds of waiting for the first batch."""
        return self._counted.first_wait_s

    def take(self) -> Delivery:
        """Return the next batch of the script's loader, across the end of an epoch.

        Raises:
            FeedEnded: The script trains no further epoch, or its stream can be read only once.
            LoopMoved: The script now trains on another loader, whose batch comes next.
        """
        is_empty = (self.watches_queue or self._depth.may_deepen) and self.ready() == 0
        had_to_wait = is_empty and self.watches_queue
        asked = perf_counter()
        restarted = False
        apart_s = 0.0
        failed = 0
        while True:
            if self.is_moving:
                self.is_moving = False
                raise LoopMoved
            if self.is_dry:
                return Delivery(
                    None, self._usual_samples * self._ranks, perf_counter(), 0.0, False, False, 0.0
                )
            try:
                if is_empty:
                    self._depth.fill(self.loader, self._iterator())
                batch, samples = self._counted.fetch(self._iterator())
            except StopIteration:
                outside_s = self._next_epoch()
                restarted = True
                apart_s += outside_s
                asked += outside_s
                continue
            except Exception as error:
                failed += 1
                if not self.is_own:
                    self._conductor.give_error(error)  # the script may skip a broken sample
                elif failed > 3:
                    raise
                continue
            self.outside_s += apart_s
            self.batches += 1
            self._usual_samples = samples
            wait_s = perf_counter() - asked + self._starting_s
            self._starting_s = 0.0
            return Delivery(
                batch, samples * self._ranks, asked, wait_s, restarted, had_to_wait, apart_s
            )

    def take_apart_s(self) -> float:
        """Return the seconds that the script's other loaders took since the last batch."""
        seconds = self.side_batches.take()
        self.outside_s += seconds
        return seconds

    def follow(self, counted: CountedLoader) -> None:
        """Follow the training loader that the script has rebuilt for the epoch about to begin."""
        self.loader = counted.loader
        self._counted = counted
        self.epoch_batches = length_of(counted.loader)

    def move(self, counted: CountedLoader) -> None:
        """Move to another loader, within its epoch; on the first move discard what was measured."""
        self.follow(counted)
        self.epoch_batches = None
        self._is_partial = True
        if not self.has_moved:
            self.has_moved = self.is_moving = True
            self.side_batches = SideBatches()
            self.outside_s = 0.0
            self.epochs = 0

    def began_epoch(self, iterator: Any, begun: float) -> None:
        """Record that the script has begun an epoch.

        If it left the epoch before early (`next(iter(loader))` does so in each step), the start of
        the workers counts as waiting for the batch, not as a restart.

        Args:
            iterator: The new iterator.
            begun: When the script began to make it, by perf_counter.
        """
        if not self.is_between_epochs:
            self._starting_s = perf_counter() - begun
        self._iterator = ref(iterator)
        self._asked_again = begun
        self.is_between_epochs = False

    @property
    def knows_waits(self) -> bool:
        """True if waits are observed; for batches that the script kept they are not."""
        return not self.is_dry

    @property
    def may_be_rebuilt(self) -> bool:
        """True if the script may now rebuild its training loader: the epoch is over or was left.

        Lightning asks for no more batches than an epoch has, and holds the old iterator until it
        has made the next one.
        """
        was_left = not self.is_own and not self.is_dry and self._iterator() is None
        return self.is_between_epochs or was_left or self.is_at_end()

    def ask_of(self, iterator: Any) -> None:
        """Take the next batch from this iterator, one of several that the script may hold."""
        if not self.is_own and self._iterator() is not iterator:
            self._iterator = ref(iterator)
            self._depth.settle(self.loader, iterator)

    @property
    def queue_capacity(self) -> int:
        """Number of batches that the loader's queue can hold."""
        return 0 if self.is_dry else capacity_of(self.loader, self.epoch_batches)

    @property
    def is_iterable(self) -> bool:
        """True if the dataset is a stream (IterableDataset)."""
        return is_stream(self.loader.dataset)

    def is_at_end(self) -> bool:
        """Return whether the epoch has no more batches."""
        return not self.is_dry and self._counted.in_epoch == self.epoch_batches

    def ready(self) -> int | None:
        """Return the number of batches ready in the queue; None if unknown."""
        return 0 if self.is_dry else ready_in(self.loader, self._iterator())

    def asked_batches(self) -> int | None:
        """Return the number of batches requested from the workers; None if unknown."""
        return None if self.is_dry else asked_of(self._iterator())

    def made(self) -> int | None:
        """Return the items made so far, over all ranks; counts again from zero on a new loader."""
        made = None if self.is_dry else self._counted.counter.made()
        return None if made is None else made * self._ranks

    @property
    def epoch_samples(self) -> int:
        """Number of samples delivered in this epoch, if batches are alike."""
        return self._counted.in_epoch * self._usual_samples

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the loader's workers."""
        return pids_of(self._iterator())

    @property
    def active_workers(self) -> int:
        """Number of workers that have samples left in this epoch, of a stream."""
        return sum(getattr(self._iterator(), "_workers_status", ()))

    def allow_full_queue(self) -> None:
        """Let the loader fill its whole queue from now on."""
        self._depth.allow_full_queue(self.loader, self._iterator())

    def take_over(self) -> None:
        """Iterate the loader here from now on; the script gets what the measurement gives it."""
        iterator = self._iterator()
        self._iterator = lambda: iterator
        self.is_own = True

    def stop(self, within_s: float = 1.0) -> None:
        """End the loader's workers; from now on the script gets batches that are held."""
        iterator = self._iterator()
        self._iterator = lambda: None
        self.is_own = True
        stop_iterator(self.loader, iterator, within_s)

    def end_epoch(self) -> None:
        """End the script's epoch early, and return once it asks for a batch of the next one.

        Raises:
            FeedEnded: The script has ended.
        """
        batches = self.epoch_batches
        self.outside_s += self._next_epoch()
        self.epoch_batches = batches

    def _next_epoch(self) -> float:
        """Begin the next epoch, and return the seconds that the script spent between the two.

        Raises:
            FeedEnded: The loader, which is iterated here, gave no batch in the epoch that ends.
        """
        ended = perf_counter()
        if self._counted.in_epoch:
            self.epoch_batches = None if self._is_partial else self._counted.in_epoch
            self._is_partial = False
        elif self.is_own:
            raise FeedEnded from None
        self.epochs += 1
        self._counted.begin_epoch()
        if self.is_own:
            with self._depth.applied(self.loader):
                iterator = plain_iter(self.loader)
            self._counted.has_begun_epoch()
            self._iterator = lambda: iterator
            self.side_batches.take()
            return 0.0
        self.is_between_epochs = True
        self._conductor.give_error(StopIteration)  # returns when the script asks for a batch again
        self.side_batches.take()  # all time between two epochs is left out already
        return max(0.0, self._asked_again - ended)


class StepFeed:
    """Count each forward pass as a batch, for a script without a DataLoader; implements Feed.

    The script makes a batch itself, between a training step and the next forward pass; on a CPU
    that time is the wait for data. On an accelerator the step may still run meanwhile, and a script
    that computes something else in between (a policy, an evaluation) may do anything there: in both
    cases the wait is unknown.

    Args:
        samples: Number of samples in a batch, over all ranks.
        is_timed: True if the script trains on a CPU.
    """

    loader = None
    queue_capacity = 0
    worker_pids: tuple[int, ...] = ()
    is_iterable = True
    watches_queue = False
    epoch_batches: int | None = None
    start_s = first_wait_s = 0.0
    outside_s = 0.0
    epochs = 0
    is_moving = False

    def __init__(self, samples: int, *, is_timed: bool = False) -> None:
        self._samples = samples
        self._is_timed = is_timed
        self._trained_at: float | None = None
        self._taken = 0
        """Number of batches taken."""
        self._timed = 0
        """Number of batches whose wait is known."""

    @property
    def knows_waits(self) -> bool:
        """True if the wait is known for at least half of the batches."""
        return 2 * self._timed >= self._taken

    def has_trained(self) -> None:
        """Start the clock of the next batch, after a backward pass or a step."""
        self._trained_at = perf_counter() if self._is_timed else None

    def computes(self) -> None:
        """Stop the clock: the script computes a loss or an evaluation, not a batch."""
        self._trained_at = None

    def take(self) -> Delivery:
        """Return the batch of the forward pass that begins."""
        now = perf_counter()
        wait_s = 0.0
        if self._trained_at is not None:
            wait_s = now - self._trained_at
            self._timed += 1
        self._taken += 1
        return Delivery(None, self._samples, now, wait_s, False, False, 0.0)

    def take_apart_s(self) -> float:
        """Return 0: time outside training is unknown without a loader."""
        return 0.0

    def is_at_end(self) -> bool:
        """Return False: there are no epochs."""
        return False

    def ready(self) -> int | None:
        """Return 0: there is no queue."""
        return 0

    def asked_batches(self) -> int | None:
        """Return None: there are no workers."""
        return None

    def made(self) -> int | None:
        """Return None: there are no workers."""
        return None

    def allow_full_queue(self) -> None:
        """Do nothing: there is no queue."""

    def stop(self, within_s: float = 1.0) -> None:
        """Do nothing: there are no workers."""


# The search for the training loader: it gave the last batch before an optimizer stepped, in the
# same thread


_STEPS_WITHOUT_LOADER = 3
"""Optimizer steps without a batch of a DataLoader after which a script counts as having no loader.
Source: our convention."""
_LONGEST_WITHOUT_S = 10.0
"""Seconds of such steps to allow if the probe found a training loader (warm-up on other data).
Source: our convention."""
STEPS_BEYOND_BATCHES = 64
"""Steps since the last batch, in excess of the batches taken, from which the script trains on
batches that it kept. Source: our convention."""


class Loaders:
    """Find the loader that trains, and count the batches of it and of loaders that may be it.

    Args:
        sightings: Observations of the script so far.
        facts: Facts from the script's probe; None if there are none: any loader may train.
        is_shallow: Keep the training loader's queue short until it matters, see QueueDepth.
    """

    def __init__(
        self, sightings: Sightings, facts: ScriptFacts | None, *, is_shallow: bool
    ) -> None:
        self.counted: dict[int, CountedLoader] = {}
        """Counted loaders, which train or may do so, by the loader's id."""
        self.training: DataLoader[Any] | None = None
        """The training loader, once it is known."""
        self.depth = QueueDepth(is_shallow=is_shallow)
        """Queue depth of the counted loaders."""
        self._sightings = sightings
        self._facts = facts
        self._last: dict[int, tuple[DataLoader[Any], int]] = {}
        """By thread: the loader of its last batch, and the optimizer steps before that batch."""
        self._taken: dict[int, Counter[int]] = {}
        """By thread: batches taken since the last optimizer step, by loader id, in order."""
        self._begun = 0.0
        """Time at which the last iterator of a counted loader was begun, by perf_counter."""
        self._without_since: float | None = None
        """Time of the first step without a batch of the loader that the probe found."""
        self._with_gradients: set[int] = set()
        """Ids of the loaders that were iterated with gradients on."""

    def is_evaluated(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader is iterated for an evaluation: gradients are off, but were on.

        This happens to the training loader if a script measures its training accuracy.
        """
        if torch.is_grad_enabled():
            self._with_gradients.add(id(loader))
            return False
        return id(loader) in self._with_gradients

    def begin(self, loader: DataLoader[Any], *, is_sure: bool) -> CountedLoader | None:
        """Start to count a loader that is about to be iterated.

        Args:
            loader: The loader.
            is_sure: The loader is known to train.

        Returns:
            The counted loader; None if this loader can't be the training loader.
        """
        counted = self.counted.get(id(loader))
        if counted is None and (is_sure or self._may_train(loader)):
            counted = self.counted[id(loader)] = CountedLoader(loader)
        if counted is not None:
            counted.begin_epoch()
            self._begun = perf_counter()
        return counted

    def began(self, loader: DataLoader[Any]) -> float:
        """Record that a loader has its iterator; return when the script began to make it."""
        counted = self.counted.get(id(loader))
        if counted is not None:
            counted.has_begun_epoch()
            if not counted.has_begun:
                counted.start_s = perf_counter() - self._begun
        return self._begun

    def next(self, loader: DataLoader[Any], iterator: Any) -> Any:
        """Return the script's next batch, counted if its loader is."""
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
        """Release the old training loader, so that its workers exit."""
        self.counted.pop(id(loader), None)
        self._with_gradients.discard(id(loader))
        # The iterator of persistent workers and its loader refer to each other.
        kept = getattr(loader, "_iterator", None)
        if kept is not None:
            kept.autotune_loader = None
        self._last.clear()
        self.training = None

    def has_none_after_step(self) -> bool:
        """Find the training loader after an optimizer step; return whether the script has none."""
        last = self._last.get(get_ident())
        count = len(self._sightings.samples)
        steps = self._sightings.most_steps
        if last is not None:
            steps -= last[1]
        taken = self._taken.pop(get_ident(), Counter())
        if last is not None and steps <= count + STEPS_BEYOND_BATCHES:
            # If loaders are read in step (zip), the first one leads; any evaluation reads more
            # batches than one.
            is_in_step = len(taken) > 1 and set(taken.values()) == {1}
            self.training = self.counted[next(iter(taken))].loader if is_in_step else last[0]
            return False
        if last is None and self._facts is not None and self._facts.loaders:
            # The probe found a loader: it may be used after a warm-up on other data.
            self._without_since = self._without_since or perf_counter()
            if perf_counter() - self._without_since < _LONGEST_WITHOUT_S:
                return False
        if steps >= _STEPS_WITHOUT_LOADER:
            self.training = None
        return steps >= _STEPS_WITHOUT_LOADER

    def _may_train(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader may train: any before the probe, then the searched ones."""
        if self._facts is None:
            return True
        return any(made.loader() is loader and made.is_searched for made in self._sightings.made)


def uncounted(iterator: Any) -> Any:
    """Return a batch as the script expects it, without counting it.

    This loader is not measured, so it gets its full queue now.
    """
    deepen(getattr(iterator, "autotune_loader", None), iterator)
    batch = plain_next(iterator)
    return batch.batch if type(batch) is Held else batch
