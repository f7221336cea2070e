"""Measure the activations kept for the backward pass, and how much checkpointing would free.

In: a trainer and batches on its device. Out: Activations. It takes some steps: two under hooks of
saved tensors, the others to time a step and the blocks' forward passes. Hooks are on the model, and
around its forward pass, only meanwhile; nothing of the user's is wrapped or replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autotune.models.statistics import error_of_median
from autotune.records.measurement import Activations, PairedRatio, SavedBytes
from autotune.worker.batch import Held, resized, tensors_of
from autotune.worker.side_alone import time_step
from autotune.worker.step import Step, Trainer
from autotune.worker.window import timed_events

# The saved tensors of one forward pass, by storage and by block


Hook: TypeAlias = tuple[nn.Module, Callable[..., None], Callable[..., None]]
"""A block, and torch's hooks before and after its forward pass, the first one with keywords."""


@dataclass(slots=True)
class _Kept:
    """A storage kept for the backward pass, and the calls in which tensors of it were saved."""

    size: int
    """Bytes of the storage."""
    places: set[tuple[int | None, ...]] = field(default_factory=set)
    """For each class of blocks the number of the block's call; None outside all blocks."""


@dataclass(slots=True)
class _Calls:
    """The calls of the blocks of one class in a forward pass."""

    count: int = 0
    inside: list[int] = field(default_factory=list)
    """Numbers of the calls under way: a block may contain another of its class."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Bytes of the blocks' inputs by address."""


@dataclass(slots=True)
class Watch:
    """Record the storages that one forward pass keeps, and the blocks' calls in it.

    Blocks come in classes (module types), of which one is chosen in the end.
    """

    left_out: frozenset[int]
    """Addresses of parameters and buffers."""
    calls: list[_Calls]
    """The calls of each class of blocks."""
    is_over: bool = False
    kept: dict[int, _Kept] = field(default_factory=dict)
    """Kept storages by address."""
    alive: list[Any] = field(default_factory=list)
    """Storages held so that no address is used twice."""

    def enter(self, kind: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the start of a block's forward pass, with its inputs."""
        if self.is_over:
            return
        calls = self.calls[kind]
        if not calls.inside:
            calls.count += 1
            for tensor in tensors_of([*args, *kwargs.values()]):
                address, size = self._storage(tensor)
                if size:
                    calls.inputs[address] = size
        calls.inside.append(calls.count - 1)

    def leave(self, kind: int, *_: Any) -> None:
        """Record the end of a block's forward pass, whether it failed or not."""
        if not self.is_over and self.calls[kind].inside:
            self.calls[kind].inside.pop()

    def keep(self, tensor: Tensor) -> Tensor:
        """Record a saved tensor, and return a detached alias of it.

        Returning the tensor itself would make an operation that saves its own output keep itself
        alive until the backward pass. Source: torch.autograd.graph.saved_tensors_hooks.
        """
        if not self.is_over:
            address, size = self._storage(tensor)
            if size:
                place = tuple(calls.inside[0] if calls.inside else None for calls in self.calls)
                self.kept.setdefault(address, _Kept(size)).places.add(place)
        return tensor.detach()

    def end(self) -> None:
        """Stop recording, so that the backward pass can free its tensors."""
        self.is_over = True
        self.alive.clear()

    def saved(self, kind: int | None, samples: int) -> SavedBytes:
        """Return the kept bytes, divided by a class of blocks.

        Args:
            kind: Number of the class; None for the total only.
            samples: Number of samples in the batch.
        """
        total = sum(one.size for one in self.kept.values())
        if kind is None:
            return SavedBytes(samples=samples, total_bytes=total)
        # Storages saved only inside blocks, which checkpointing frees; the blocks' inputs stay.
        within = {
            at: one
            for at, one in self.kept.items()
            if all(place[kind] is not None for place in one.places)
        }
        inputs = {
            at: size
            for at, size in self.calls[kind].inputs.items()
            if at in within or at not in self.kept
        }
        # Bytes of each call, which exist again while its block is recomputed.
        of_calls = [0] * self.calls[kind].count
        for at, one in within.items():
            if at in inputs:
                continue
            for call in {place[kind] for place in one.places}:
                of_calls[call or 0] += one.size
        return SavedBytes(
            samples=samples,
            total_bytes=total,
            inside_bytes=sum(one.size for one in within.values()),
            inputs_bytes=sum(inputs.values()),
            largest_bytes=max(of_calls, default=0),
        )

    def left_bytes(self, kind: int) -> int:
        """Return the most bytes that are left if each block of a class is checkpointed."""
        saved = self.saved(kind, 1)
        return saved.total_bytes - saved.least_saved_bytes

    def _storage(self, tensor: Tensor) -> tuple[int, int]:
        """Return a storage's address and bytes; (0, 0) if it is left out, or there is none."""
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            size = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse ones and the like
            return 0, 0
        if not address or address in self.left_out:
            return 0, 0
        self.alive.append(storage)
        return address, size


@contextmanager
def hooked(hooks: Sequence[Hook]) -> Iterator[None]:
    """Call functions before and after each block, also if the block fails."""
    handles = list[Any]()
    try:
        for block, enter, leave in hooks:
            handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


# The measurement


_FEWEST_TURNS = 3
"""Number of rounds from which a standard deviation is given."""
_OVERTIME = 3.0
"""Multiple of the time after which fewer rounds must suffice. Source: our convention."""


def measure_activations(
    trainer: Trainer, held: Sequence[Held], *, seconds: float, ends_at: float
) -> Activations:
    """Measure the activations of a batch and of half of it, and time steps and blocks.

    Args:
        trainer: A trainer on one device; its model goes on learning.
        held: Batches on the device, at least one; the largest is taken.
        seconds: Seconds to time steps for; at least one step is timed.
        ends_at: Time of perf_counter after which only the necessary steps are begun.
    """
    # Record a step on the largest batch, and choose the blocks that free most.
    if trainer.accumulated:  # a window cut short by the deadline may end within a step
        trainer.accumulator.reset()
    largest = max(held, key=lambda one: one.samples)
    candidates = _repeated(trainer.model)
    whole = _watched(trainer, largest, candidates)
    chosen = min(range(len(candidates)), key=whole.left_bytes, default=None)
    if chosen is not None and not whole.saved(chosen, largest.samples).most_saved_bytes:
        chosen = None
    blocks = [] if chosen is None else candidates[chosen]

    # Record a step on half of it, which shows what grows with the batch.
    half = _on_half(trainer, largest, candidates) if perf_counter() < ends_at else None
    batches = [largest.batch]
    saved_on_half = None
    if half is not None:
        held_half, half_watch = half
        batches.append(held_half.batch)
        saved_on_half = half_watch.saved(chosen, held_half.samples)

    # Time steps on both, and the blocks' forward passes.
    until = min(ends_at, perf_counter() + seconds)
    given_up = min(ends_at, perf_counter() + _OVERTIME * seconds)
    half_step, forward = _timed(trainer, batches, blocks, until, given_up)
    return Activations(
        block=type(blocks[0]).__name__ if blocks else None,
        blocks=0 if chosen is None else whole.calls[chosen].count,
        whole=whole.saved(chosen, largest.samples),
        half=saved_on_half,
        half_step=half_step,
        forward=forward,
    )


def _repeated(model: nn.Module) -> list[list[nn.Module]]:
    """Return the blocks with parameters, by class, that repeat in ModuleLists and Sequentials."""
    found: dict[type, dict[int, nn.Module]] = {}
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        for child in container.children():
            has_parameters = next(child.parameters(), None) is not None
            if has_parameters and not isinstance(child, torch.jit.ScriptModule):
                found.setdefault(type(child), {})[id(child)] = child
    return [list(blocks.values()) for blocks in found.values() if len(blocks) > 1]


def _watched(trainer: Trainer, held: Held, candidates: Sequence[Sequence[nn.Module]]) -> Watch:
    """Train an optimizer step on a batch, and return the record of its first micro batch."""
    model = trainer.model
    tensors = (*model.parameters(), *model.buffers())
    watch = Watch(
        left_out=frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors),
        calls=[_Calls() for _ in candidates],
    )

    def forward(model: nn.Module, batch: Any) -> Tensor:
        if watch.is_over:
            return trainer.step.function(model, batch)
        try:
            with torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda tensor: tensor):
                return trainer.step.function(model, batch)
        finally:
            watch.end()

    hooks = [
        (block, partial(watch.enter, kind), partial(watch.leave, kind))
        for kind, blocks in enumerate(candidates)
        for block in blocks
    ]
    with hooked(hooks):
        time_step(replace(trainer, step=Step(forward, trainer.step.source)), held.batch)
    return watch


def _on_half(
    trainer: Trainer, held: Held, candidates: Sequence[Sequence[nn.Module]]
) -> tuple[Held, Watch] | None:
    """Halve a batch, and record a step on it; return None if that fails, or it has one sample."""
    samples = held.samples // 2
    if samples == 0:
        return None
    try:
        half = Held(resized(held.batch, held.samples, samples), samples)
        return half, _watched(trainer, half, candidates)
    except Exception:  # noqa: BLE001 - it runs the user's code; without it all bytes count as growing
        trainer.accumulator.reset()
        return None


def _timed(
    trainer: Trainer,
    batches: Sequence[Any],
    blocks: Sequence[nn.Module],
    until: float,
    given_up: float,
) -> tuple[PairedRatio | None, PairedRatio | None]:
    """Time steps on each batch and the blocks' forward passes, in turn, so that load affects all.

    Args:
        trainer: The trainer.
        batches: The whole batch, and half of it if that can be trained on.
        blocks: The blocks; may be empty.
        until: Time of perf_counter at which to stop after three rounds.
        given_up: Time of perf_counter at which to stop after one.

    Returns:
        The times of a step on half of the batch, and of the blocks' forward passes, over that of an
        optimizer step on the whole batch; None for what is not there.
    """
    turns = 0
    halves = list[float]()
    forwards = list[float]()
    while not turns or (perf_counter() < (until if turns >= _FEWEST_TURNS else given_up)):
        whole_s, *half_s = [time_step(trainer, batch) for batch in batches]
        turns += 1
        halves += [one / whole_s for one in half_s]
        if blocks:
            forwards.append(_forward_s(trainer, batches[0], blocks) / whole_s)
    return _ratio(halves), _ratio(forwards)


def _ratio(turns: Sequence[float]) -> PairedRatio | None:
    """Return the median of ratios, with its standard error."""
    if not turns:
        return None
    sd = error_of_median(turns) if len(turns) >= _FEWEST_TURNS else None
    return PairedRatio(value=median(turns), sd=sd)


def _forward_s(trainer: Trainer, batch: Any, blocks: Sequence[nn.Module]) -> float:
    """Measure the seconds of the blocks' forward passes in a step, by the device's clock if it has one."""
    new_event = timed_events(trainer.device)
    spans = list[tuple[Any, Any]]()
    open_spans = list[Any]()
    is_forward = True

    def mark() -> Any:
        if new_event is None:
            return perf_counter()
        event = new_event()
        event.record()
        return event

    def enter(*_: Any) -> None:
        open_spans.append(mark() if is_forward and not open_spans else None)

    def leave(*_: Any) -> None:
        begun = open_spans.pop() if open_spans else None
        if begun is not None:
            spans.append((begun, mark()))

    def forward(model: nn.Module, batch: Any) -> Tensor:
        nonlocal is_forward
        is_forward = True
        try:
            return trainer.step.function(model, batch)
        finally:
            is_forward = False  # the user's own checkpoints recompute blocks in the backward pass

    watched = replace(trainer, step=Step(forward, trainer.step.source))
    with hooked([(block, enter, leave) for block in blocks]):
        time_step(watched, batch)  # synchronizes at its end
    if new_event is None:
        return float(sum(end - begun for begun, end in spans))
    return sum(float(begun.elapsed_time(end)) for begun, end in spans) * 1e-3
