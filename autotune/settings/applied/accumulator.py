"""The accumulator: backward passes, and the optimizer's step after as many as were asked for; trials have it too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Accumulator"]


class _Stage(Enum):
    """Where a batch stands, in words for a message."""

    OUTSIDE = "outside of one"
    FORWARD = "in the forward pass"
    DONE = "a second time"


@dataclass(slots=True, kw_only=True)
class Accumulator:
    """Trains batch after batch, one `with` each: forward pass and loss inside it, then one `backward`.

        accumulator = config.accumulator(model, optimizer)
        for batch in loader:
            with accumulator:
                loss = loss_of(model, config.to_device(batch))
                accumulator.backward(loss)

    Where the model was compiled so that CUDA graphs are recorded, what it returns, a loss of its own among that, is
    overwritten by the next batch: read it before, or clone it.

    Inside it autocast is on where the configuration has it. Gradients are zeroed here after each step: do not
    zero them yourself. Batches that an epoch's end leaves over count for the next epoch's first step, as in trials;
    `reset` drops them.
    """

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    steps: int
    """Batches of one optimizer step, on one rank."""
    device_type: str = "cpu"
    """torch's name for the kind of device that the model lies on."""
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    """None: the precision holds for the whole process, or is torch's own."""
    no_sync: Callable[[], AbstractContextManager[None]] | None = None
    """DDP's no_sync: gradients stay with their rank while it is entered. None where nothing is exchanged, and for a
    static graph, in which DDP can't do without an exchange here and there."""
    gathers: bool = False
    """The model is in DataParallel, which gathers one loss of each device where the model computes its own."""
    exchanges_nothing: bool = False
    """Exchange nothing, not even in an optimizer step's last batch."""
    records_graphs: bool = False
    """The model was compiled in a mode that records CUDA graphs, whose outputs the next batch overwrites."""
    accumulated: int = 0
    """Batches since the optimizer's last step."""
    _cast: AbstractContextManager[Any] | None = field(default=None, init=False)
    _unsynced: AbstractContextManager[None] | None = field(default=None, init=False)
    _stage: _Stage = field(default=_Stage.OUTSIDE, init=False)

    def __enter__(self) -> Self:
        """Begin a batch. DDP prepares the exchange in the forward pass: no_sync stands around both passes.

        Raises:
            RuntimeError: the batch before has not ended yet.
        """
        if self._stage is not _Stage.OUTSIDE:
            raise RuntimeError(
                "a batch must end before the next begins: one `with accumulator` for each, but it is entered twice"
            )
        if self.records_graphs:
            # else one output without a backward pass would have torch keep those of all batches
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call] # torch
        if self.no_sync is not None and (self.exchanges_nothing or self.accumulated + 1 < self.steps):
            self._unsynced = self.no_sync()
            self._unsynced.__enter__()
        if self.autocast is not None:
            self._cast = self.autocast()
            self._cast.__enter__()
        self._stage = _Stage.FORWARD
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stage = _Stage.OUTSIDE
        cast, self._cast = self._cast, None
        if cast is not None:
            cast.__exit__(*raised)
        unsynced, self._unsynced = self._unsynced, None
        if unsynced is not None:
            unsynced.__exit__(*raised)

    def backward(self, loss: Tensor, *, before_step: Callable[[], object] | None = None) -> bool:
        """The backward pass of this batch's share of the loss, and the optimizer's step where one is due.

        It runs without autocast, as torch wants it. An exception on the way drops the batches since the last step.

        Args:
            loss: The mean loss of the batch, a scalar.
            before_step: Called right before a step, with gradients as they are (unscaled): to clip them, for example.
                With float16 they may be infinite there; the GradScaler then skips the step.
                Trials don't clip: what it costs is not in their rate.

        Returns:
            Whether a step was due. float16's GradScaler may skip it where gradients are not finite.

        Raises:
            RuntimeError: it is called outside `with`, or a second time within one.
        """
        if self._stage is not _Stage.FORWARD:
            raise RuntimeError(
                "backward must be called once in each `with accumulator`, but was called "
                f"{self._stage.value}; of several losses give the sum"
            )
        self._stage = _Stage.DONE
        if self.gathers and loss.ndim == 1:
            loss = loss.mean()
        share = loss if self.steps == 1 else loss / self.steps  # to divide by one costs 14 us, the way back included
        try:
            self._without_autocast(self.scaler.scale(share))
            self.accumulated += 1
            if self.accumulated < self.steps:
                self._keep_gradients()
                return False
            self._step(before_step)
        except BaseException:
            self.reset()
            raise
        return True

    def reset(self) -> None:
        """Drop the gradients that are there: after a step, and where a loop was broken off before one."""
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = 0

    def _keep_gradients(self) -> None:
        """Copy a first batch's gradients out of a CUDA graph's memory; later ones are added to the copies in place.

        A graph's backward pass hands its gradients to autograd, which takes them as they are for `grad`; the next batch
        would overwrite them, and torch raises. Parameters without a gradient stay without, which buffers of zeros would
        not leave them. Source: github.com/pytorch/pytorch/issues/169545, and in torch 2.13
        torch/_inductor/cudagraph_trees.py, format_dealloc_msg.

        A copy of each would have the host launch a kernel for every parameter, which graphs are there to spare. Those
        of a dtype are copied in a few launches, as torch's optimizers do their steps; that has no public name.
        """
        if not self.records_graphs or self.accumulated != 1:
            return
        dense = defaultdict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]](list)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.layout == torch.strided:
                    dense[gradient.device, gradient.dtype].append((parameter, gradient))
                else:  # of an embedding outside of the graph
                    parameter.grad = gradient.clone()
        for pairs in dense.values():
            copies = [torch.empty_like(gradient) for _, gradient in pairs]
            torch._foreach_copy_(copies, [gradient for _, gradient in pairs])
            for (parameter, _), copy in zip(pairs, copies, strict=True):
                parameter.grad = copy

    def _without_autocast(self, loss: Tensor) -> None:
        if self._cast is None:
            loss.backward()  # type: ignore[no-untyped-call] # torch
            return
        torch.clear_autocast_cache()  # what the weights were cast to is not needed beside their gradients
        was_on = torch.is_autocast_enabled(self.device_type)
        torch.set_autocast_enabled(self.device_type, False)
        try:
            loss.backward()  # type: ignore[no-untyped-call] # torch
        finally:
            torch.set_autocast_enabled(self.device_type, was_on)

    def _step(self, before_step: Callable[[], object] | None) -> None:
        try:
            if before_step is not None:
                self.scaler.unscale_(self.optimizer)
                before_step()
            self.scaler.step(self.optimizer)
        except BaseException:
            with suppress(AssertionError):  # it had not looked at them yet
                self.scaler.update()  # else it takes the next gradients for unscaled
            raise
        self.scaler.update()
        self.reset()
