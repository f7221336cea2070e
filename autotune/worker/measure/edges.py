"""The edges of the measuring loop's blocks: when a block's work is done on the device, and how long it took.

Takes blocks as the loop has launched them; hands on Stretches, once their edges have passed. `DrainedEdges` waits for
the device at each edge, and only then is more launched: on the CPU, which is its own device, that costs nothing. An
accelerator would be idle until the host has fetched, copied and launched again, at every edge. `TimedEdges` therefore
records an event in the device's queue, and waits for it once the next block is queued behind it: the host is at most a
block ahead, and the device never waits for an edge.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autotune.records.measurement import Block
from autotune.worker.setup.device import Device
from autotune.worker.setup.process_group import Group

__all__ = [
    "DrainedEdges",
    "Edges",
    "Launched",
    "MadeReadings",
    "Mark",
    "Stretch",
    "TimedEdges",
    "open_edges",
    "open_mark",
    "timed_events",
]

_LEAST_S = 1e-9  # of a block, so that a rate exists


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A block as the host has launched it: its work may not be done yet."""

    samples: int
    batches: int
    data_wait_s: float
    """Seconds in which the host waited for the loader, restarts that are split off left out."""
    waits_in_a_row: int
    """Batches up to the last one for which the queue was empty."""
    starved_s: float
    """The part of `data_wait_s` in which no batch lay ready."""
    ready_at_end: int | None
    """Batches that lay ready once the last one was launched; None where that is not known."""
    begun: float
    """Time of perf_counter at which the first batch was asked for."""
    came: float
    """Time of perf_counter at which the first batch had come."""
    apart_s: float
    """Seconds of restarts that are split off; the device has nothing else to do at both of their ends."""
    loss: Any
    """Loss of the last batch, on the device."""
    made: MadeReadings | None = None
    """The loader's count of samples made; None where it has none."""


@dataclass(frozen=True, slots=True)
class MadeReadings:
    """How many samples a loader's workers had made, read by the host."""

    begun: float
    """Time of perf_counter of the first reading, before the block's first batch was asked for."""
    at_begin: int
    ended: float
    """Time of perf_counter of the last one, after the block's last batch was launched."""
    at_end: int
    apart: int = 0
    """Samples made between the two in restarts that are split off."""

    def since(self, before: MadeReadings | None) -> MadeReadings:
        """Return these readings from the end of the block before on, where there was one."""
        return self if before is None else replace(self, begun=before.ended, at_begin=before.at_end)

    def within(self, seconds: float, apart_s: float) -> float | None:
        """Return the samples made in a block of some seconds, at the rate seen by the host, restarts left out.

        None where a script has made its loader anew, which begins to count again.
        """
        host_s, made = self.ended - self.begun - apart_s, self.at_end - self.at_begin - self.apart
        return made * seconds / host_s if host_s > 0 and made >= 0 else None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A block that is done, and what the loop checks in it."""

    block: Block
    waits_in_a_row: int
    spent_s: float
    """Its seconds with the restarts that are split off."""
    loss: float
    """Loss of the last batch."""
    host_ahead_s: float | None = None
    """Seconds of work that the device had left when the next block's first batch had come; None where not known."""

    @property
    def compute_s(self) -> float:
        """Seconds of a batch, waits left out."""
        return (self.block.seconds - self.block.waited_s) / self.block.batches


@dataclass(frozen=True, slots=True)
class DrainedEdges:
    """The device has done all when a block ends. Its seconds are the host's, from its first batch on."""

    device: Device

    def begin(self) -> None:
        """Nothing to record: each block has a beginning of its own."""

    def end_block(self, launched: Launched) -> Stretch:
        """Wait for the device; hands on this block."""
        self.device.synchronize()
        spent_s = perf_counter() - launched.begun
        seconds = max(spent_s - launched.apart_s, _LEAST_S)
        return _stretch(launched, launched.made, seconds, spent_s, float(launched.loss), most_wait_s=seconds)

    def under_way(self) -> tuple[int, float]:
        """No batch, which is done now."""
        return 0, perf_counter()

    def finish(self) -> None:
        """No block is left."""


class TimedEdges:
    """Edges are events in the device's queue, each waited for when the next block is launched behind it.

    A block's seconds lie between its two events, by the device's clock: its own work and the time in which the device
    had none, whatever the host does meanwhile. The last block gets what is left of the host's time between the first
    edge and the last, at which the device is waited for: so the sum is that of the wall. Waits for the loader are the
    host's, which may be a block ahead: a single block's may be longer than the block, their sum is never too long.

    What the loop does between blocks (intervals, agreeing with other ranks) is done while a block is under way, and
    belongs to the time as everything does.
    """

    def __init__(self, device: Device, new_event: Callable[[], Any]) -> None:
        self._device, self._new_event = device, new_event
        self._losses = [_landing_place(), _landing_place()]  # one is read while the other is written
        self._begun, self._passed_s, self._passed_batches = 0.0, 0.0, 0
        self._edge: Any = None
        self._ahead: tuple[Launched, Any, Tensor] | None = None
        self._made: MadeReadings | None = None

    def begin(self) -> None:
        """The first event, which has passed as soon as it is recorded."""
        self._begun, self._edge = perf_counter(), self._recorded()

    def end_block(self, launched: Launched) -> Stretch | None:
        """Mark this block's end; waits for the end of the one before, and hands that on."""
        before, loss = self._ahead, self._losses[0]
        self._losses.reverse()
        loss.copy_(self._on_own_device(launched.loss.reshape(())), non_blocking=True)  # it has come when the event has
        self._ahead = launched, self._recorded(), loss
        if before is None:
            return None
        _, edge, _ = before
        edge.synchronize()
        spent_s, self._edge = self._edge.elapsed_time(edge) * 1e-3, edge
        stretch = self._passed(before, spent_s)
        return replace(stretch, host_ahead_s=max(0.0, self._begun + self._passed_s - launched.came))

    def under_way(self) -> tuple[int, float]:
        """Batches of the block under way, and when they will be done, at the speed of those before; never past."""
        batches = 0 if self._ahead is None else self._ahead[0].batches
        left_s = batches * self._passed_s / max(1, self._passed_batches)
        return batches, max(perf_counter(), self._begun + self._passed_s + left_s)

    def finish(self) -> Stretch | None:
        """Wait for the device; the block that was under way gets the time that is left."""
        self._device.synchronize()
        last, self._ahead = self._ahead, None
        return None if last is None else self._passed(last, perf_counter() - self._begun - self._passed_s)

    def _on_own_device(self, loss: Tensor) -> Tensor:
        """Return a loss on the device whose queue the events are in.

        A script may have split its model, so that its loss lies on another device, whose queue the event says nothing
        of. torch has the receiving device's stream wait for a copy between two devices, so what follows there, the
        copy to the host and the event, comes after it. A copy straight to the host would run on the loss's device.
        Source: aten/src/ATen/native/cuda/Copy.cu, copy_device_to_device and copy_kernel_cuda.
        """
        own = self._device.torch_device
        return loss if loss.device.type != own.type else loss.to(own, non_blocking=True)

    def _recorded(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def _passed(self, block: tuple[Launched, Any, Tensor], spent_s: float) -> Stretch:
        launched, _, loss = block
        self._passed_s, self._passed_batches = self._passed_s + spent_s, self._passed_batches + launched.batches
        seconds = max(spent_s - launched.apart_s, _LEAST_S)
        # Between two blocks the host waits for the device, and workers go on.
        made = launched.made and launched.made.since(self._made)
        self._made = launched.made
        return _stretch(launched, made, seconds, spent_s, float(loss))


Edges: TypeAlias = DrainedEdges | TimedEdges
"""Ends blocks. Between `begin` and `finish` the blocks' `spent_s` leave out no time that belongs to a block."""


class Mark:
    """A place in the device's queue, and when the device came to it, by the host's clock."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._place, self._now = new_event(), new_event()

    def set(self) -> None:
        """Put the mark behind what was launched so far."""
        self._place.record()

    def passed_at(self) -> float:
        """Time of perf_counter at which all before the mark was done; waits for what was launched since."""
        self._now.record()
        self._now.synchronize()
        return perf_counter() - float(self._place.elapsed_time(self._now)) * 1e-3


def open_mark(device: Device) -> Mark | None:
    """A mark; None where the device can't time events: there, work that it did during a restart counts as restart."""
    new_event = timed_events(device)
    return None if new_event is None else Mark(new_event)


def open_edges(device: Device, group: Group, *, drains: bool = False) -> Edges:
    """The edges for a window: timed where the devices of all ranks can time events, else drained, or if asked for."""
    new_event = None if drains else timed_events(device)
    if group.all(new_event is not None) and new_event is not None:
        return TimedEdges(device, new_event)
    return DrainedEdges(device)


def _stretch(
    launched: Launched,
    made: MadeReadings | None,
    seconds: float,
    spent_s: float,
    loss: float,
    *,
    most_wait_s: float = inf,
) -> Stretch:
    block = Block(
        samples=launched.samples,
        batches=launched.batches,
        seconds=seconds,
        data_wait_s=min(launched.data_wait_s, most_wait_s),
        starved_s=min(launched.starved_s, most_wait_s),
        ready_at_end=launched.ready_at_end,
        made=made and made.within(seconds, launched.apart_s),
    )
    return Stretch(block, launched.waits_in_a_row, spent_s, loss)


def timed_events(device: Device) -> Callable[[], Any] | None:
    """A maker of events that give the time between two of them; None where the device has none.

    It is tried, since some backends have the class and refuse to time. Not on MPS: an event with timing commits the
    queue's command buffer there, which costs as much as waiting, and has not been tried.
    Source: torch/cuda/streams.py (Event, whose class torch.xpu has as well); aten/src/ATen/mps/MPSEvent.mm.
    """
    if device.kind in {"cpu", "mps"}:
        return None
    with suppress(AttributeError, RuntimeError, TypeError, ValueError):  # what breaks a device shows again
        new_event = partial(device.module.Event, enable_timing=True)
        first, second = new_event(), new_event()
        first.record()
        second.record()
        second.synchronize()
        return new_event if first.elapsed_time(second) >= 0 else None
    return None


def _landing_place() -> Tensor:
    """Where a loss is copied to on the host: the copy blocks the host only where the memory is not page-locked.

    Source: "Asynchronous" in CUDA's runtime API: a copy to pageable memory returns when it is done.
    """
    with suppress(RuntimeError):  # so is what a device without page-locked memory raises, NotImplementedError
        return torch.empty((), pin_memory=True, device="cpu")  # whatever torch.set_default_device says
    return torch.empty((), device="cpu")
