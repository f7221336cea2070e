"""The accumulator: backward passes, and the optimizer's step after as many as were asked for; trials have it too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Accumulator"]


@dataclass(slots=True, kw_only=True)
class Accumulator:
    """Trains batch after batch, one `with` block each: forward pass and loss inside it, then `backward`.

        accumulator = config.accumulator(model, optimizer)
        for batch in loader:
            with accumulator:
                loss = loss_of(model, config.to_device(batch))
                accumulator.backward(loss)

    Inside the block autocast is on where the configuration has it; `backward` leaves it first.
    """

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    steps: int
    """Batches of one optimizer step, on one rank."""
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    """None: the precision holds for the whole process, or is torch's own."""
    no_sync: Callable[[], AbstractContextManager[None]] | None = None
    """DDP's no_sync: gradients stay with their rank while it is entered. None where nothing is exchanged, and for a
    static graph, in which DDP can't do without an exchange here and there."""
    gathers: bool = False
    """The model is in DataParallel, which gathers one loss of each device where the model computes its own."""
    exchanges_nothing: bool = False
    """Exchange nothing, not even in an optimizer step's last batch."""
    accumulated: int = 0
    """Batches since the optimizer's last step."""
    _cast: AbstractContextManager[Any] | None = field(default=None, init=False)
    _unsynced: AbstractContextManager[None] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        """Begin a batch. DDP prepares the exchange in the forward pass: no_sync stands around both passes."""
        if self.no_sync is not None and (self.exchanges_nothing or self.accumulated + 1 < self.steps):
            self._unsynced = self.no_sync()
            self._unsynced.__enter__()
        if self.autocast is not None:
            self._cast = self.autocast()
            self._cast.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._leave_autocast()
        if self._unsynced is not None:
            unsynced, self._unsynced = self._unsynced, None
            unsynced.__exit__(*raised)

    def backward(self, loss: Tensor, *, before_step: Callable[[], object] | None = None) -> bool:
        """The backward pass of this batch's share of the loss, and the optimizer's step where one is due.

        Args:
            loss: The mean loss of the batch, a scalar.
            before_step: Called right before a step, with gradients as they are (unscaled): to clip them, for example.
                Trials don't clip: what it costs is not in their rate.

        Returns:
            Whether a step was due. float16's GradScaler may skip it where gradients are not finite.
        """
        self._leave_autocast()
        if self.gathers and loss.ndim == 1:
            loss = loss.mean()
        share = loss if self.steps == 1 else loss / self.steps  # to divide by one costs 14 us, the way back included
        self.scaler.scale(share).backward()  # type: ignore[no-untyped-call] # torch
        self.accumulated += 1
        if self.accumulated < self.steps:
            return False
        if before_step is not None:
            self.scaler.unscale_(self.optimizer)
            before_step()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = 0
        return True

    def _leave_autocast(self) -> None:
        if self._cast is not None:
            cast, self._cast = self._cast, None
            cast.__exit__(None, None, None)
