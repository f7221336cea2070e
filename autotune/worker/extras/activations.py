"""Measure what a micro batch keeps for its backward pass, and what checkpointing would leave of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from statistics import median, stdev
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from autotune.records.measurement import Activations, PairedRatio, SavedBytes
from autotune.worker.batch import Held, copied, resized, tensors_of
from autotune.worker.side_alone import train_on
from autotune.worker.step import Step, Trainer
from autotune.worker.window import timed_events

# What one forward pass keeps for its backward pass, storage by storage, and inside which block.
#
# Takes the tensors that autograd keeps and the calls of blocks; hands on SavedBytes. Hooks stand on
# blocks only as long as a context lasts.


Hook: TypeAlias = tuple[nn.Module, Callable[[Iterable[Any]], None], Callable[[], None]]
"""A block, what is called before it with its inputs, and what is called after it."""


@dataclass(slots=True)
class _Kept:
    """A storage that is kept for the backward pass, and where that was asked for."""

    size: int
    places: set[tuple[int | None, ...]] = field(default_factory=set)
    """For each class of blocks the number of the block's call; None: outside of all."""


@dataclass(slots=True)
class Watch:
    """What one forward pass keeps, by storages, and the blocks' calls in it."""

    left_out: frozenset[int]
    """Addresses of parameters and buffers."""
    calls: list[int]
    """So far, of each class of blocks."""
    inside: list[list[int]]
    """Numbers of the calls under way, of each class: a block may hold another of its class."""
    is_over: bool = False
    kept: dict[int, _Kept] = field(default_factory=dict)
    inputs: list[dict[int, int]] = field(default_factory=list)
    """Bytes of what blocks were given, by address, for each class."""
    alive: list[Any] = field(default_factory=list)
    """Storages, so that no address stands for two of them."""

    def enter(self, kind: int, inputs: Iterable[Any]) -> None:
        """A block's forward pass begins."""
        if self.is_over:
            return
        if not self.inside[kind]:
            self.calls[kind] += 1
            for tensor in tensors_of(list(inputs)):
                address, size = self._storage(tensor)
                if size:
                    self.inputs[kind][address] = size
        self.inside[kind].append(self.calls[kind] - 1)

    def leave(self, kind: int) -> None:
        """It has ended, or failed."""
        if not self.is_over and self.inside[kind]:
            self.inside[kind].pop()

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor is kept; its values stay as they are.

        Handed on is never the tensor itself: an operation that keeps its own output would hold
        itself through it until a backward pass comes (torch,
        torch.autograd.graph.saved_tensors_hooks).
        """
        if not self.is_over:
            address, size = self._storage(tensor)
            if size:
                place = tuple(calls[0] if calls else None for calls in self.inside)
                self.kept.setdefault(address, _Kept(size)).places.add(place)
        return tensor.detach()

    def end(self) -> None:
        """The forward pass is over: the backward pass may free what it has used."""
        self.is_over = True
        self.alive.clear()

    def saved(self, kind: int | None, samples: int) -> SavedBytes:
        """The bytes, as a class of blocks divides them; None: none does."""
        total = sum(one.size for one in self.kept.values())
        if kind is None:
            return SavedBytes(samples=samples, total_bytes=total)
        within = {
            at: one
            for at, one in self.kept.items()
            if all(place[kind] is not None for place in one.places)
        }
        inputs = {
            at: size
            for at, size in self.inputs[kind].items()
            if at in within or at not in self.kept
        }
        of_calls = [0] * self.calls[kind]
        for at, one in within.items():
            for call in {place[kind] for place in one.places} if at not in inputs else ():
                of_calls[call or 0] += one.size
        return SavedBytes(
            samples=samples,
            total_bytes=total,
            inside_bytes=sum(one.size for one in within.values()),
            inputs_bytes=sum(inputs.values()),
            largest_bytes=max(of_calls, default=0),
        )

    def left_bytes(self, kind: int) -> int:
        """What is left at the most where each block of a class is checkpointed."""
        saved = self.saved(kind, 1)
        return saved.total_bytes - saved.least_saved_bytes

    def _storage(self, tensor: Tensor) -> tuple[int, int]:
        """Address and bytes; no bytes of what is left out, and of tensors without a storage of their own."""
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
    """Call a function before each block with its inputs, and another after it, whether it fails or not."""
    handles = list[Any]()

    def before(
        enter: Callable[[Iterable[Any]], None], _: nn.Module, args: Any, kwargs: Any
    ) -> None:
        enter((*args, *kwargs.values()))

    def after(leave: Callable[[], None], *_: Any) -> None:
        leave()

    try:
        for block, enter, leave in hooks:
            handles.append(
                block.register_forward_pre_hook(partial(before, enter), with_kwargs=True)
            )
            handles.append(block.register_forward_hook(partial(after, leave), always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


# What a micro batch keeps for its backward pass, and what checkpointing the model's repeated blocks
# would leave of it.
#
# Takes a Trainer and batches on its device; returns Activations. Costs some steps: two under hooks
# of saved tensors, the others for the time of a step and of the blocks' forward pass. Hooks stand
# on the model and around its forward pass only for these; nothing of the user's is wrapped or
# replaced.


_FEWEST_TURNS = 3  # from which on a scatter is told
_OVERTIME = 3.0  # times the time for it, after which fewer turns have to do: our own convention


def measure_activations(
    trainer: Trainer, held: Sequence[Held], *, seconds: float, ends_at: float
) -> Activations:
    """Train on a batch, and on half of it, to see what is kept; then time steps and the blocks' forward pass.

    Args:
        trainer: What trains on one device; its model goes on learning.
        held: Batches on the device, at least one; the largest is taken.
        seconds: How long steps are timed; at least one is.
        ends_at: Time of perf_counter at which the deadline is near: nothing but what is needed is
            begun then.
    """
    if trainer.accumulated:  # a window that the deadline has cut may end within a step
        trainer.accumulator.reset()
    largest = max(held, key=lambda one: one.samples)
    candidates = _repeated(trainer.model)
    whole = _watched(trainer, largest, candidates)
    chosen = min(range(len(candidates)), key=whole.left_bytes, default=None)
    if chosen is not None and not whole.saved(chosen, largest.samples).most_saved_bytes:
        chosen = None
    half = _half_of(largest) if perf_counter() < ends_at else None
    half_watch = None if half is None else _on_half(trainer, half, candidates)
    blocks = [] if chosen is None else candidates[chosen]
    batches = [largest.batch, *([] if half is None or half_watch is None else [half.batch])]
    limits = (min(ends_at, perf_counter() + times * seconds) for times in (1.0, _OVERTIME))
    times = _timed(trainer, batches, blocks, *limits)
    return Activations(
        block=type(blocks[0]).__name__ if blocks else None,
        blocks=0 if chosen is None else whole.calls[chosen],
        whole=whole.saved(chosen, largest.samples),
        half=None if half is None or half_watch is None else half_watch.saved(chosen, half.samples),
        half_step=times.half,
        forward=times.forward,
    )


class _Times(NamedTuple):
    """Half a batch, and the blocks' forward pass, over an optimizer step on the whole one."""

    half: PairedRatio | None
    forward: PairedRatio | None


def _repeated(model: nn.Module) -> list[list[nn.Module]]:
    """The blocks with parameters of each class that comes several times in the model's ModuleLists and Sequentials."""
    found: dict[type, dict[int, nn.Module]] = {}
    for container in model.modules():
        for child in (
            container.children() if isinstance(container, nn.ModuleList | nn.Sequential) else ()
        ):
            if next(child.parameters(), None) is not None and not isinstance(
                child, torch.jit.ScriptModule
            ):
                found.setdefault(type(child), {})[id(child)] = child
    return [list(blocks.values()) for blocks in found.values() if len(blocks) > 1]


def _watched(trainer: Trainer, held: Held, candidates: Sequence[Sequence[nn.Module]]) -> Watch:
    """An optimizer step on a batch, the first micro batch of which is watched."""
    model = trainer.model
    watch = Watch(
        left_out=frozenset(
            one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())
        ),
        calls=[0 for _ in candidates],
        inside=[[] for _ in candidates],
        inputs=[{} for _ in candidates],
    )

    def forward(model: nn.Module, batch: Any) -> Tensor:
        if watch.is_over:
            return trainer.step.function(model, batch)
        try:
            with torch.autograd.graph.saved_tensors_hooks(watch.keep, _as_it_is):
                return trainer.step.function(model, batch)
        finally:
            watch.end()

    hooks = [
        (block, partial(watch.enter, kind), partial(watch.leave, kind))
        for kind, blocks in enumerate(candidates)
        for block in blocks
    ]
    with hooked(hooks):
        _train_step(replace(trainer, step=Step(forward, trainer.step.source)), held.batch)
    return watch


def _half_of(held: Held) -> Held | None:
    """Half of a batch; None where it has one sample, or a type that can't be made smaller."""
    samples = held.samples // 2
    with suppress(ValueError):
        return Held(resized(held.batch, held.samples, samples), samples) if samples else None
    return None


def _on_half(
    trainer: Trainer, half: Held, candidates: Sequence[Sequence[nn.Module]]
) -> Watch | None:
    """The same on half of a batch; None where the user's code refuses it."""
    try:
        return _watched(trainer, half, candidates)
    except Exception:  # noqa: BLE001 - the user's code runs in it; without it all that is kept counts as growing
        trainer.accumulator.reset()
        return None


def _timed(
    trainer: Trainer,
    batches: Sequence[Any],
    blocks: Sequence[nn.Module],
    until: float,
    given_up: float,
) -> _Times:
    """Steps on each batch, then one whose forward passes through the blocks are timed: in turns, whatever load comes.

    Until the first of two times; at least three turns unless they take longer than to the second.
    """
    turns = 0
    halves = list[float]()
    forwards = list[float]()
    while not turns or (perf_counter() < (until if turns >= _FEWEST_TURNS else given_up)):
        whole_s, *half_s = (_train_step(trainer, batch) for batch in batches)
        turns += 1
        halves += [one / whole_s for one in half_s]
        forwards += [_forward_s(trainer, batches[0], blocks) / whole_s] if blocks else []
    return _Times(_ratio(halves), _ratio(forwards))


def _ratio(turns: Sequence[float]) -> PairedRatio | None:
    """The median, and 1.25 times the standard error of a mean, as for normal errors."""
    if not turns:
        return None
    sd = 1.25 * stdev(turns) / sqrt(len(turns)) if len(turns) >= _FEWEST_TURNS else None
    return PairedRatio(value=median(turns), sd=sd)


def _forward_s(trainer: Trainer, batch: Any, blocks: Sequence[nn.Module]) -> float:
    """Seconds of an optimizer step's forward passes through the blocks, by the device's clock where it has one."""
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

    def enter(_: Iterable[Any]) -> None:
        open_spans.append(mark() if is_forward and not open_spans else None)

    def leave() -> None:
        begun = open_spans.pop() if open_spans else None
        if begun is not None:
            spans.append((begun, mark()))

    def forward(model: nn.Module, batch: Any) -> Tensor:
        nonlocal is_forward
        is_forward = True
        try:
            return trainer.step.function(model, batch)
        finally:
            is_forward = (
                False  # what the user's own checkpoints compute once more is no forward pass
            )

    with hooked([(block, enter, leave) for block in blocks]):
        _train_step(
            replace(trainer, step=Step(forward, trainer.step.source)), batch
        )  # ends with a synchronisation
    if new_event is None:
        return float(sum(end - begun for begun, end in spans))
    return sum(float(begun.elapsed_time(end)) for begun, end in spans) * 1e-3


def _train_step(trainer: Trainer, batch: Any) -> float:
    """Seconds of one optimizer step, each of its micro batches a copy of this batch."""
    seconds, _ = train_on(
        trainer, iter([copied(batch) for _ in range(trainer.config.grad_accum_steps)])
    )
    return seconds


def _as_it_is(tensor: Any) -> Any:
    return tensor
