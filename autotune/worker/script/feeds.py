"""Take batches from a script: of its training loader, or of its steps where it has none."""

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
from autotune.worker.batch import CountedBatch, size_counter, tensors_of, unwrapped
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
    ready_in,
    stop_iterator,
)
from autotune.worker.feed import queue_capacity as capacity_of
from autotune.worker.script.hooks import plain_iter, plain_next
from autotune.worker.script.sightings import Beside, Sightings

# A training loop turned inside out: the script asks for batches, `measure/` hands them to it as if
# it were a Trainer.
#
# Measuring runs in a greenlet of its own, in the script's thread. It goes on when the script asks
# for a batch, which it does once it has trained on the one before, and stands still while the
# script trains. So the loops of measure/ drive somebody else's loop unchanged: `ScriptFeed.take`
# fetches a batch by the loader's own iterator, `ScriptTrainer.train` gives it to the script and
# returns when the script asks again. A switch costs well below a microsecond.


@dataclass(frozen=True, slots=True)
class _Raised:
    """In place of a batch: what the loader has raised, for the script to have it from its own call.

    An epoch's end is given as a class: by its traceback an exception that is held holds the
    loader's iterator, too, and by that its workers.
    """

    error: Exception | type[StopIteration]


class Conductor:
    """The two greenlets, and which of them runs."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.thread = get_ident()
        self.is_measuring = self.has_ended = False
        self._script = getcurrent()
        self._measuring = greenlet(work)

    def ask(self) -> Any:
        """In the script: let measuring go on until it hands out a batch.

        Raises:
            StopIteration: an epoch ends.
            Exception: what the loader has raised.
        """
        self._script = getcurrent()
        self.is_measuring = True
        answer = self._measuring.switch()
        self.is_measuring = False
        if isinstance(answer, _Raised):
            raise answer.error
        return answer

    def give(self, batch: Any) -> None:
        """In measuring: let the script go on with a batch until it asks for the next one.

        Raises:
            FeedEnded: it has come to its end, and will ask no more.
        """
        if self.has_ended:
            raise FeedEnded
        self.is_measuring = False
        self._script.switch(batch)
        self.is_measuring = True

    def end_epoch(self) -> None:
        """In measuring: let the script see the end of its epoch; returns when it asks for a batch again."""
        self.give(_Raised(StopIteration))

    def give_error(self, error: Exception) -> None:
        """In measuring: let the script have what its loader has raised; returns when it asks for a batch again."""
        self.give(_Raised(error))

    def end(self) -> None:
        """In the script, at its end: let measuring come to its own end with what it has."""
        if not self._measuring.dead:
            self._script = getcurrent()
            self.is_measuring = True
            self.has_ended = True
            self._measuring.throw(FeedEnded)


class HeldBatches:
    """An iterator in place of a loader's own, whose workers have ended: hands out what measuring gives."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def __iter__(self) -> HeldBatches:
        return self

    def __next__(self) -> Any:
        return self._conductor.ask()


@dataclass(slots=True)
class ScriptTrainer:
    """The script's own training step as a Trainer."""

    config: TrainingConfig
    device: Device
    conductor: Conductor
    optimizer: torch.optim.Optimizer
    loss: Any = None
    """Of the last backward pass, on the device."""
    accumulated: int = 0
    """Batches since the optimizer's last step."""
    scaler: torch.amp.GradScaler = field(
        default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False)
    )

    def train(self, batch: Any) -> Tensor:
        """Let the script train on a batch; the loss, without waiting for it."""
        self.accumulated += 1
        self.conductor.give(batch)
        loss = self.loss
        return torch.zeros((), device=self.device.torch_device) if loss is None else loss

    def to_device(self, batch: Any) -> Any:
        """As the configuration has it."""
        return self.config.to_device(batch, self.device.torch_device)

    def without_exchange(self) -> AbstractContextManager[None]:
        """Nothing is done about exchanging gradients, which is the script's own."""
        return nullcontext()


# A script's batches as measuring takes them: of its own training loader, or of its steps where it
# has none.
#
# Comes in: the script's loader and iterator, and a Conductor that hands the script what is taken.
# Goes out: a BatchFeed.


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
        if (
            self.loader.batch_sampler is None
        ):  # the dataset hands on whole batches: few train on single samples
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
            self.has_begun = True
            self.first_wait_s = perf_counter() - begun
        self.in_epoch += 1
        try:
            batch, samples = self.sized(batch)
        except (
            IndexError
        ):  # it was begun before anybody counted: a Stateful loader may be before it is iterated
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
        self,
        conductor: Conductor,
        counted: CountedLoader,
        iterator: Any,
        depth: QueueDepth,
        ranks: int = 1,
    ) -> None:
        self.loader = counted.loader
        self._iterator: Callable[[], Any] = ref(iterator)
        """The script's is held by the script alone, so that leaving an epoch early ends its
        workers."""
        self.is_own = False
        self.is_dry = False
        """The script trains on, and asks for no more batches: it has kept them. It asks by its
        steps from now on."""
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
        """The next batch of the script's loader; at an epoch's end the first of the next epoch.

        Raises:
            FeedEnded: the script trains no further epoch, or a stream of its can be read once only.
            LoopMoved: it trains on another loader by now, whose batch comes next.
        """
        is_empty = (self.watches_queue or self._depth.may_deepen) and self.ready() == 0
        had_to_wait = is_empty and self.watches_queue
        asked = perf_counter()
        restarted = False
        apart_s = 0.0
        failed = 0
        while True:
            self._tell_of_move()
            if self.is_dry:
                return Delivery(
                    None, self._usual_samples * self._ranks, perf_counter(), 0.0, False, False, 0.0
                )
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
                restarted = True
                self.epochs = self.epochs + 1
                self._next_epoch()
                outside_s = 0.0 if self.is_own else max(0.0, self._asked_again - ended)
                self.beside.take()  # it lies between two epochs, all of which is left out
                apart_s = apart_s + outside_s
                asked = asked + outside_s
                continue
            except Exception as error:
                failed += 1
                if not self.is_own:
                    self._conductor.give_error(error)  # it may pass over a broken sample
                elif failed > 3:
                    raise
                continue
            self.outside_s += apart_s
            self.batches = self.batches + 1
            self._usual_samples = samples
            wait_s = perf_counter() - asked + self._starting_s
            self._starting_s = 0.0
            return Delivery(
                batch, samples * self._ranks, asked, wait_s, restarted, had_to_wait, apart_s
            )

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
        self.loader = counted.loader
        self._counted = counted
        self.epoch_batches = length_of(counted.loader)

    def move(self, counted: CountedLoader) -> None:
        """Take the batches of another loader, amid its epoch; what was measured on the former one goes, once."""
        self.follow(counted)
        self.epoch_batches = None
        self._is_partial = True
        if not self.has_moved:
            self.has_moved = self.is_moving = True
            self.beside = Beside()
            self.outside_s = 0.0
            self.epochs = 0

    def began_epoch(self, iterator: Any, begun: float) -> None:
        """The script has begun an epoch: its iterator, and when it began to make one.

        Where it has left the epoch before, as `next(iter(loader))` does in each step, starting
        workers is no restart that is told apart, but time that it waits for its batch.
        """
        if not self.is_between_epochs:
            self._starting_s = perf_counter() - begun
        self._iterator = ref(iterator)
        self._asked_again = begun
        self.is_between_epochs = False

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
        self._iterator = lambda: iterator
        self.is_own = True

    def stop(self, within_s: float = 1.0) -> None:
        """End the loader's workers; the script is given batches that are held from here on."""
        iterator = self._iterator()
        self._iterator = lambda: None
        self.is_own = True
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

    The script makes the batch itself, between training on one and the next forward pass: on a CPU
    that is the time for which training waits. An accelerator may still work on the step meanwhile,
    and a script that computes something else between the two (a policy, an evaluation) may do
    anything there: then nothing is known.

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
        self._samples = samples
        self._is_timed = is_timed
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
        self._taken = self._taken + 1
        self._timed = self._timed + (self._trained_at is not None)
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


# Which of a script's loaders trains: the one that a batch came of before an optimizer stepped, in
# the same thread.
#
# Comes in: the loaders that are iterated, their batches, the optimizer's steps. Goes out: the
# training loader, once it is known, with its batches counted; or that the script trains without
# one.


_STEPS_WITHOUT_LOADER = 3
"""Optimizer steps without a batch of a DataLoader after which a script counts as one that has none:
our convention."""
_LONGEST_WITHOUT_S = 10.0
"""Seconds of such steps where a first look has seen the loader that trains: a warm-up on other
data. Our convention."""
STEPS_BEYOND_BATCHES = 64
"""Steps since the last batch, beyond as many as it took batches, from which on it trains on what it
has kept: ours."""


class Loaders:
    """The loaders whose batches are counted.

    Args:
        sightings: What was seen so far.
        facts: Of the script's probe; None: any loader may be the one that trains.
        is_shallow: Keep the queue of the one that trains short until it matters, see QueueDepth.
    """

    def __init__(
        self, sightings: Sightings, facts: ScriptFacts | None, *, is_shallow: bool
    ) -> None:
        self.counted: dict[int, CountedLoader] = {}
        """By the loader's id."""
        self.training: DataLoader[Any] | None = None
        """The training loader, once it is known."""
        self.depth = QueueDepth(is_shallow=is_shallow)
        """Of the training loader's queue, and of those that may be the training loader."""
        self._sightings = sightings
        self._facts = facts
        self._last: dict[int, tuple[DataLoader[Any], int]] = {}
        """By thread: the loader that it has last taken a batch of, and the optimizer steps before
        that."""
        self._taken: dict[int, Counter[int]] = {}
        """By thread: how many batches of each loader, by its id, were taken since an optimizer
        stepped, in order."""
        self._begun = 0.0
        """When the last iterator of a counted loader was begun."""
        self._without_since: float | None = None
        """When it has made its first step on other batches than those of the loader that is known
        to train."""
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
        kept = getattr(
            loader, "_iterator", None
        )  # of persistent workers: it knows its loader, which knows it
        if kept is not None:
            kept.autotune_loader = None
        self._last.clear()
        self.training = None

    def has_none_after_step(self) -> bool:
        """An optimizer has stepped: either that shows which loader trains, or, after some steps, that none does."""
        last = self._last.get(get_ident())
        count = len(self._sightings.samples)
        steps = self._sightings.most_steps - (0 if last is None else last[1])
        taken = self._taken.pop(get_ident(), Counter())
        if last is not None and steps <= count + STEPS_BEYOND_BATCHES:
            # Of loaders that are read in step (zip) the first one has the lead; any evaluation
            # reads more batches.
            is_in_step = len(taken) > 1 and set(taken.values()) == {1}
            self.training = self.counted[next(iter(taken))].loader if is_in_step else last[0]
            return False
        if (
            last is None and self._facts is not None and self._facts.loaders
        ):  # its loader is known, and yet to come
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

    Nobody measures it: where the loader might have been the one that trains, it gets its whole
    queue now.
    """
    deepen(getattr(iterator, "autotune_loader", None), iterator)
    batch = plain_next(iterator)
    return batch.batch if type(batch) is CountedBatch else batch
