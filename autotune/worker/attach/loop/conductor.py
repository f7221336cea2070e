"""A training loop turned inside out: the script asks for batches, `measure/` hands them to it as if it were a Trainer.

Measuring runs in a greenlet of its own, in the script's thread. It goes on when the script asks for a batch, which it
does once it has trained on the one before, and stands still while the script trains. So the loops of measure/ drive
somebody else's loop unchanged: `ScriptFeed.take` fetches a batch by the loader's own iterator, `ScriptTrainer.train`
gives it to the script and returns when the script asks again. A switch costs well below a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from autotune.settings.training_config import TrainingConfig
from autotune.worker.measure.feed import FeedEnded
from autotune.worker.setup.device import Device

__all__ = ["Conductor", "HeldBatches", "ScriptTrainer"]


@dataclass(frozen=True, slots=True)
class _Raised:
    """In place of a batch: what the loader has raised, for the script to have it from its own call.

    An epoch's end is given as a class: by its traceback an exception that is held holds the loader's iterator, too, and
    by that its workers.
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
        self._script, self.is_measuring = getcurrent(), True
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
            self._script, self.is_measuring, self.has_ended = getcurrent(), True, True
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
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))

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
