"""A script's batches as measuring takes them: of its own training loader, or of its steps where it has none.

Comes in: the script's loader and iterator, and a Conductor that hands the script what is taken. Goes out: a BatchFeed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader

from autotune.worker.attach.loop.beside import Beside
from autotune.worker.attach.loop.conductor import Conductor
from autotune.worker.attach.seams.hooks import plain_iter, plain_next
from autotune.worker.measure.batch import tensors_of
from autotune.worker.measure.batch_sizes import size_counter, unwrapped
from autotune.worker.measure.feed import Delivery, FeedEnded, LoopMoved, ready_in, stop_iterator
from autotune.worker.measure.feed import queue_capacity as capacity_of
from autotune.worker.measure.items_made import ItemCounter
from autotune.worker.measure.queue_depth import QueueDepth, asked_of
from autotune.worker.setup.build import is_stream, length_of

__all__ = ["CountedLoader", "ScriptFeed", "StepFeed"]


@dataclass(slots=True)
class CountedLoader:
    """A loader whose samples are counted where it puts batches together, with what was noted of its start."""

    loader: DataLoader[Any]
    drawn: deque[int] = field(default_factory=deque)
    sized: Callable[[Any], tuple[Any, int]] = field(init=False)
    in_epoch: int = 0
    """Batches of the present epoch."""
    start_s: float = 0.0
    """Seconds of its first start."""
    first_wait_s: float = 0.0
    """Seconds of waiting for its first batch."""
    has_begun: bool = False
    counter: ItemCounter = field(default_factory=ItemCounter)
    """Counts the items that its workers make."""

    def __post_init__(self) -> None:
        self.sized = size_counter(self.loader, self.drawn)
        if self.loader.batch_sampler is None:  # the dataset hands on whole batches: few train on single samples
            self.sized = lambda batch: (batch, self._usual(batch))

    def begin_epoch(self) -> None:
        """A new iterator is about to be made."""
        self.in_epoch = 0
        self.drawn.clear()
        self.counter.begin(self.loader)

    def has_begun_epoch(self) -> None:
        """The iterator is made."""
        self.counter.end(self.loader)

    def fetch(self, iterator: Any) -> tuple[Any, int]:
        """A batch and its samples.

        Raises:
            StopIteration: the epoch is over.
        """
        begun = perf_counter()
        batch = plain_next(iterator)
        if not self.has_begun:
            self.has_begun, self.first_wait_s = True, perf_counter() - begun
        self.in_epoch += 1
        try:
            batch, samples = self.sized(batch)
        except IndexError:  # it was begun before anybody counted: a Stateful loader may be before it is iterated
            samples = self._usual(batch)
        self.counter.add(samples)
        return batch, samples

    def _usual(self, batch: Any) -> int:
        """What a batch should hold: the loader's batch size, else the length of its first tensor."""
        parts = unwrapped(self.loader)
        size = self.loader.batch_size or getattr(parts.batch_sampler, "batch_size", None)
        first = next((tensor for tensor in tensors_of(batch) if tensor.ndim), None)
        return int(size) if size else (1 if first is None else first.shape[0])


class ScriptFeed:
    """The script's own training loader as a Feed; once `is_own`, it is iterated here, and the script is given none.

    Args:
        conductor: Hands the script what is taken.
        counted: Its training loader.
        iterator: Of that loader, which the script has asked for a batch.
        depth: Whether the loader's queue is kept short.
        ranks: Processes that train in step.
    """

    def __init__(
        self, conductor: Conductor, counted: CountedLoader, iterator: Any, depth: QueueDepth, ranks: int = 1
    ) -> None:
        self.loader = counted.loader
        self._iterator: Callable[[], Any] = ref(iterator)
        """The script's is held by the script alone, so that leaving an epoch early ends its workers."""
        self.is_own = False
        self.is_dry = False
        """The script trains on, and asks for no more batches: it has kept them. It asks by its steps from now on."""
        self.batches = 0
        """Batches that it was given."""
        self._usual_samples = 1
        self.has_moved = False
        """The script has gone on to train on another loader than the one that it was found with."""
        self.is_moving = False
        """It has just done so: measuring has yet to be told."""
        self._is_partial = False
        """The epoch is one that was under way when it did."""
        self.is_between_epochs = False
        """The script was told that its epoch is over, and has begun no other."""
        self.watches_queue = True
        self.epoch_batches: int | None = length_of(counted.loader)
        self.beside = Beside()
        """The script's other loaders."""
        self.outside_s = 0.0
        """All seconds so far that were left out for that."""
        self.epochs = 0
        self._conductor, self._counted, self._depth, self._ranks = conductor, counted, depth, ranks
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
        """The next batch of the script's loader; at an epoch's end the first of the next epoch.

        Raises:
            FeedEnded: the script trains no further epoch, or a stream of its can be read once only.
            LoopMoved: it trains on another loader by now, whose batch comes next.
        """
        is_empty = (self.watches_queue or self._depth.may_deepen) and self.ready() == 0
        had_to_wait = is_empty and self.watches_queue
        asked, restarted, apart_s, failed = perf_counter(), False, 0.0, 0
        while True:
            self._tell_of_move()
            if self.is_dry:
                return Delivery(None, self._usual_samples * self._ranks, perf_counter(), 0.0, False, False, 0.0)
            try:
                if is_empty:
                    self._depth.fill(self.loader, self._iterator())
                batch, samples = self._counted.fetch(self._iterator())
            except StopIteration:
                ended = perf_counter()
                if self._counted.in_epoch:
                    self.epoch_batches = None if self._is_partial else self._counted.in_epoch
                    self._is_partial = False
                elif self.is_own:
                    raise FeedEnded from None
                restarted, self.epochs = True, self.epochs + 1
                self._next_epoch()
                outside_s = 0.0 if self.is_own else max(0.0, self._asked_again - ended)
                self.beside.take()  # it lies between two epochs, all of which is left out
                apart_s, asked = apart_s + outside_s, asked + outside_s
                continue
            except Exception as error:
                failed += 1
                if not self.is_own:
                    self._conductor.give_error(error)  # it may pass over a broken sample
                elif failed > 3:
                    raise
                continue
            self.outside_s += apart_s
            self.batches, self._usual_samples = self.batches + 1, samples
            wait_s, self._starting_s = perf_counter() - asked + self._starting_s, 0.0
            return Delivery(batch, samples * self._ranks, asked, wait_s, restarted, had_to_wait, apart_s)

    def _tell_of_move(self) -> None:
        if self.is_moving:
            self.is_moving = False
            raise LoopMoved

    def take_apart_s(self) -> float:
        """Seconds that the script's other loaders took since the last batch."""
        seconds = self.beside.take()
        self.outside_s += seconds
        return seconds

    def follow(self, counted: CountedLoader) -> None:
        """The script has made its training loader anew, for the epoch that it is about to begin."""
        self.loader, self._counted = counted.loader, counted
        self.epoch_batches = length_of(counted.loader)

    def move(self, counted: CountedLoader) -> None:
        """Take the batches of another loader, amid its epoch; what was measured on the former one goes, once."""
        self.follow(counted)
        self.epoch_batches, self._is_partial = None, True
        if not self.has_moved:
            self.has_moved = self.is_moving = True
            self.beside, self.outside_s, self.epochs = Beside(), 0.0, 0

    def began_epoch(self, iterator: Any, begun: float) -> None:
        """The script has begun an epoch: its iterator, and when it began to make one.

        Where it has left the epoch before, as `next(iter(loader))` does in each step, starting workers is no restart
        that is told apart, but time that it waits for its batch.
        """
        if not self.is_between_epochs:
            self._starting_s = perf_counter() - begun
        self._iterator, self._asked_again, self.is_between_epochs = ref(iterator), begun, False

    @property
    def knows_waits(self) -> bool:
        """Return whether waits are observed; for cached batches they are not."""
        return not self.is_dry

    @property
    def was_left(self) -> bool:
        """The script has let go of its iterator: it is between two epochs, though the one before had more batches."""
        return not self.is_own and not self.is_dry and self._iterator() is None

    def ask_of(self, iterator: Any) -> None:
        """The script wants its next batch from this iterator, which may be an older one: it has several."""
        if not self.is_own and self._iterator() is not iterator:
            self._iterator = ref(iterator)
            self._depth.settle(self.loader, iterator)

    @property
    def queue_capacity(self) -> int:
        """As a Feed has it."""
        return 0 if self.is_dry else capacity_of(self.loader, self.epoch_batches)

    @property
    def is_iterable(self) -> bool:
        """As a Feed has it."""
        return is_stream(self.loader.dataset)

    def is_at_end(self) -> bool:
        """As a Feed has it."""
        return not self.is_dry and self._counted.in_epoch == self.epoch_batches

    def ready(self) -> int | None:
        """As a Feed has it."""
        return 0 if self.is_dry else ready_in(self.loader, self._iterator())

    def asked_batches(self) -> int | None:
        """As a Feed has it."""
        return None if self.is_dry else asked_of(self._iterator())

    def made(self) -> int | None:
        """As a Feed has it, over all ranks; not across loaders, where it is begun again."""
        made = None if self.is_dry else self._counted.counter.made()
        return None if made is None else made * self._ranks

    def allow_full_queue(self) -> None:
        """As a Feed has it."""
        self._depth.allow_full_queue(self.loader, self._iterator())

    def take_over(self) -> None:
        """Iterate the loader here from now on: the script is given what measuring gives it."""
        iterator = self._iterator()
        self._iterator, self.is_own = lambda: iterator, True

    def stop(self, within_s: float = 1.0) -> None:
        """End the loader's workers; the script is given batches that are held from here on."""
        iterator, self._iterator, self.is_own = self._iterator(), lambda: None, True
        stop_iterator(self.loader, iterator, within_s)

    def _next_epoch(self) -> None:
        self._counted.begin_epoch()
        if self.is_own:
            with self._depth.applied(self.loader):
                iterator = plain_iter(self.loader)
            self._counted.has_begun_epoch()
            self._iterator = lambda: iterator
        else:
            self.is_between_epochs = True
            self._conductor.end_epoch()


class StepFeed:
    """For a script without a DataLoader: each forward pass stands for a batch.

    The script makes the batch itself, between training on one and the next forward pass: on a CPU that is the time
    for which training waits. An accelerator may still work on the step meanwhile, and a script that computes something
    else between the two (a policy, an evaluation) may do anything there: then nothing is known.

    Args:
        samples: Of a batch, over all ranks.
        is_timed: The script trains on a CPU.
    """

    loader = None
    queue_capacity = 0
    is_iterable = True
    watches_queue = False
    epoch_batches: int | None = None
    start_s = first_wait_s = 0.0
    outside_s = 0.0
    epochs = 0
    is_moving = False

    def __init__(self, samples: int, *, is_timed: bool = False) -> None:
        self._samples, self._is_timed = samples, is_timed
        self._trained_at: float | None = None
        self._taken = self._timed = 0
        """Batches taken, and those whose start time is known."""

    @property
    def knows_waits(self) -> bool:
        """Return whether the wait is known for at least half of the batches."""
        return 2 * self._timed >= self._taken

    def has_trained(self) -> None:
        """Start the clock of the next batch: a backward pass was made, or a step."""
        self._trained_at = perf_counter() if self._is_timed else None

    def computes(self) -> None:
        """The script computes something else, a loss or an evaluation: what it does besides is no batch being made."""
        self._trained_at = None

    def take(self) -> Delivery:
        """The batch of the forward pass that begins."""
        now = perf_counter()
        wait_s = 0.0 if self._trained_at is None else now - self._trained_at
        self._taken, self._timed = self._taken + 1, self._timed + (self._trained_at is not None)
        return Delivery(None, self._samples, now, wait_s, False, False, 0.0)

    def take_apart_s(self) -> float:
        """Nobody knows what of a step is no training."""
        return 0.0

    def is_at_end(self) -> bool:
        """It has no epochs."""
        return False

    def ready(self) -> int | None:
        """It has no queue."""
        return 0

    def asked_batches(self) -> int | None:
        """As a Feed has it: there are no workers."""
        return None

    def made(self) -> int | None:
        """It has no workers."""
        return None

    def allow_full_queue(self) -> None:
        """It has no queue."""

    def stop(self, within_s: float = 1.0) -> None:
        """It has no workers."""
