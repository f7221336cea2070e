"""What a micro batch keeps for its backward pass, and what checkpointing the model's repeated blocks would leave of it.

Takes a Trainer and batches on its device; returns Activations. Costs some steps: two under hooks of saved tensors, the
others for the time of a step and of the blocks' forward pass. Hooks stand on the model and around its forward pass only
for these; nothing of the user's is wrapped or replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import sqrt
from statistics import median, stdev
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune.records.memory import Activations, PairedRatio
from autotune.worker.after_window.activations.watch import Watch, hooked
from autotune.worker.measure.batch import Held, copied, resized
from autotune.worker.measure.edges import timed_events
from autotune.worker.measure.side_alone import train_on
from autotune.worker.measure.step import Step, Trainer

__all__ = ["measure_activations"]

_FEWEST_TURNS = 3  # from which on a scatter is told
_OVERTIME = 3.0  # times the time for it, after which fewer turns have to do: our own convention


def measure_activations(trainer: Trainer, held: Sequence[Held], *, seconds: float, ends_at: float) -> Activations:
    """Train on a batch, and on half of it, to see what is kept; then time steps and the blocks' forward pass.

    Args:
        trainer: What trains on one device; its model goes on learning.
        held: Batches on the device, at least one; the largest is taken.
        seconds: How long steps are timed; at least one is.
        ends_at: Time of perf_counter at which the deadline is near: nothing but what is needed is begun then.
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
        for child in container.children() if isinstance(container, nn.ModuleList | nn.Sequential) else ():
            if next(child.parameters(), None) is not None and not isinstance(child, torch.jit.ScriptModule):
                found.setdefault(type(child), {})[id(child)] = child
    return [list(blocks.values()) for blocks in found.values() if len(blocks) > 1]


def _watched(trainer: Trainer, held: Held, candidates: Sequence[Sequence[nn.Module]]) -> Watch:
    """An optimizer step on a batch, the first micro batch of which is watched."""
    model = trainer.model
    watch = Watch(
        left_out=frozenset(one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())),
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


def _on_half(trainer: Trainer, half: Held, candidates: Sequence[Sequence[nn.Module]]) -> Watch | None:
    """The same on half of a batch; None where the user's code refuses it."""
    try:
        return _watched(trainer, half, candidates)
    except Exception:  # noqa: BLE001 - the user's code runs in it; without it all that is kept counts as growing
        trainer.accumulator.reset()
        return None


def _timed(
    trainer: Trainer, batches: Sequence[Any], blocks: Sequence[nn.Module], until: float, given_up: float
) -> _Times:
    """Steps on each batch, then one whose forward passes through the blocks are timed: in turns, whatever load comes.

    Until the first of two times; at least three turns unless they take longer than to the second.
    """
    turns, halves, forwards = 0, list[float](), list[float]()
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
    new_event, spans, open_spans, is_forward = timed_events(trainer.device), list[tuple[Any, Any]](), list[Any](), True

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
            is_forward = False  # what the user's own checkpoints compute once more is no forward pass

    with hooked([(block, enter, leave) for block in blocks]):
        _train_step(replace(trainer, step=Step(forward, trainer.step.source)), batch)  # ends with a synchronisation
    if new_event is None:
        return float(sum(end - begun for begun, end in spans))
    return sum(float(begun.elapsed_time(end)) for begun, end in spans) * 1e-3


def _train_step(trainer: Trainer, batch: Any) -> float:
    """Seconds of one optimizer step, each of its micro batches a copy of this batch."""
    seconds, _ = train_on(trainer, iter([copied(batch) for _ in range(trainer.config.grad_accum_steps)]))
    return seconds


def _as_it_is(tensor: Any) -> Any:
    return tensor
