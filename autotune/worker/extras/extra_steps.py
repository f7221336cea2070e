"""Measure the extras of a trial after its window: ceilings, breakdown of a step, costs of items.

In: a run whose window is over, and its Measurement. Out: the same Measurement with the new figures
added; those of the window never change. A stage that fails leaves its field None, and a note. The
measurement is passed to the caller before each stage, so that even the death of the process loses
no figure.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader

from autotune.config.tf_data import TfLoader
from autotune.config.training_config import TORCH_BUCKET_CAP_MB, TORCH_FIRST_BUCKET_MB
from autotune.messages.trials import (
    extra_failed,
    no_time_for_extras,
    rank_gone_before_extras,
    trial_ended_before_extras,
)
from autotune.models.forecast import PINNING_KINDS
from autotune.note import Note
from autotune.protocol.messages import Extras
from autotune.records.ceilings import host_ceiling_of
from autotune.records.measurement import Ceilings, Communication, Measurement
from autotune.worker.batch import Held, unpacked
from autotune.worker.extras.activations import measure_activations
from autotune.worker.extras.formats import measure_formats
from autotune.worker.extras.item_causes import measure_causes
from autotune.worker.extras.item_costs import measure_items, measure_pipeline, with_batch_rates
from autotune.worker.extras.lengths import measure_lengths
from autotune.worker.extras.profile import break_down
from autotune.worker.extras.what_if import measure_switches
from autotune.worker.failures import cause_of
from autotune.worker.feed import Delivery
from autotune.worker.group import Group
from autotune.worker.side_alone import collect, copy_alone, device_alone, loader_alone, resident
from autotune.worker.step import StepTrainer, Trainer
from autotune.worker.window import Run

_BATCHES = "batches"
"""Name of the stage that only prepares others, so that it is not reported as missing."""


@dataclass(slots=True)
class _After:
    """Shared state of the stages, with the measurement so far."""

    run: Run
    extras: Extras
    measurement: Measurement
    scratch: Path
    """Folder for temporary files."""
    host: list[Delivery] = field(default_factory=list)
    """Batches as the loader delivered them."""
    held: list[Held] = field(default_factory=list)
    """The same batches on the device."""
    begun: float = field(default_factory=perf_counter)

    @property
    def trainer(self) -> StepTrainer:
        """The run's trainer."""
        return self.run.trainer

    @property
    def ceilings(self) -> Ceilings:
        """The ceilings measured so far."""
        return self.measurement.ceilings or Ceilings()

    def add(self, **found: Any) -> None:
        """Set fields of the measurement."""
        self.measurement = self.measurement.model_copy(update=found)

    def note(self, note: Note) -> None:
        """Add a note on something that could not be measured."""
        self.measurement = self.so_far(note)

    def so_far(self, *notes: Note) -> Measurement:
        """Return the measurement with further notes, and the seconds of these stages so far."""
        notes = (*self.measurement.notes, *notes)
        spent_s = perf_counter() - self.begun
        return self.measurement.model_copy(update={"notes": notes, "after_s": spent_s})


_Stage = Callable[[_After], None]


def measure_after_window(
    run: Run,
    extras: Extras,
    measurement: Measurement,
    keep: Callable[[Measurement], None],
    scratch: Path,
) -> Measurement:
    """Measure the extras that a job asks for.

    Args:
        run: The run, whose feed still delivers; its loader's workers are ended on the way.
        extras: The extras to measure.
        measurement: The window's measurement.
        keep: Called with the measurement so far before each stage; it counts if the process dies.
        scratch: The trial's folder for temporary files.

    Returns:
        The measurement with ceilings, breakdown and costs, and notes on failed stages.
    """
    after = _After(run, extras, measurement, scratch)
    stages = _stages(after)
    for index, (name, stage) in enumerate(stages):
        left = [name for name, _ in stages[index:] if name != _BATCHES]
        try:
            is_late = run.is_late()
        except RuntimeError:  # another rank is gone; this rank's window is complete
            return after.so_far(rank_gone_before_extras(left))
        if is_late:
            return after.so_far(no_time_for_extras(left))
        keep(after.so_far(trial_ended_before_extras(left)))
        try:
            stage(after)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; the window is complete
            with suppress(OSError, ValueError):  # the user's code may have closed stderr
                traceback.print_exception(error, file=sys.stderr)
            after.note(extra_failed(stage=name, cause=cause_of(error)))
    return after.so_far() if stages else measurement


def _stages(after: _After) -> list[tuple[str, _Stage]]:
    """Return the stages in order: the loader while it runs, the others once its workers have ended.

    All ranks come to each stage together; stages that only one rank runs exchange nothing.
    """
    extras = after.extras
    loader = after.run.feed.loader
    makes_batches = isinstance(loader, DataLoader) and loader.batch_sampler is not None
    has_lengths = makes_batches and after.measurement.tokens is not None
    has_copies = extras.copy_ceiling and after.trainer.device.kind in PINNING_KINDS
    needs_batches = (
        extras.device_ceiling or extras.breakdown or extras.activations or extras.what_if
    )
    wanted: list[tuple[bool, str, _Stage]] = [
        (extras.loader_ceiling, "loader_rate", _measure_loader),
        (needs_batches or has_copies, _BATCHES, _take_batches),
        (extras.device_ceiling, "device_rate", _measure_device),
        (has_copies, "copy_rate", _measure_copy),
        (needs_batches and after.run.group.size > 1, "communication", _measure_communication),
        (extras.what_if and after.run.group.size == 1, "what_if", _switch_modes),
        (extras.breakdown, "time_breakdown", _break_down),
        (extras.breakdown, "item_costs", _measure_items),
        (extras.breakdown and has_lengths, "lengths", _measure_lengths),
        (extras.activations, "activations", _measure_activations),
    ]
    return [(name, stage) for is_wanted, name, stage in wanted if is_wanted]


def _measure_loader(after: _After) -> None:
    run = after.run
    ceiling = loader_alone(
        run.feed,
        run.trainer.config,
        restart_s=after.measurement.window.expected_restart_s,
        seconds=after.extras.stretch_s,
        ends_at=run.ends_at,
    )
    ceilings = after.ceilings
    after.add(
        ceilings=Ceilings(loader=ceiling, device=ceilings.device, copy=ceilings.copy),
        loader_ceiling=ceiling.samples_per_s,
    )


def _take_batches(after: _After) -> None:
    """Take batches for the other stages, then end the workers, so that the device runs alone."""
    feed = after.run.feed
    try:
        after.host = collect(feed, seconds=after.extras.stretch_s)
    finally:
        feed.stop()
    after.held = resident(after.trainer, after.host)


def _measure_device(after: _After) -> None:
    _need_batches(after)
    window = after.measurement.window
    pause_s = window.starved_s / sum(block.batches for block in window.blocks)
    with after.trainer.without_exchange():
        ceiling = device_alone(
            after.trainer,
            after.held,
            pause_s=pause_s,
            seconds=after.extras.stretch_s,
            ends_at=after.run.ends_at,
        )
    host_ceiling = None
    if not window.is_held_by_device:
        host_ceiling = host_ceiling_of(ceiling, window.take_s)
    ceilings = after.ceilings
    after.add(
        ceilings=Ceilings(loader=ceilings.loader, device=ceiling, copy=ceilings.copy),
        device_ceiling=ceiling.samples_per_s,
        host_ceiling=host_ceiling,
    )


def _measure_copy(after: _After) -> None:
    """Measure copies of the loader's batches, pinned if the trial pins."""
    _need_batches(after)
    ceiling = copy_alone(
        after.trainer, after.host, seconds=after.extras.stretch_s, ends_at=after.run.ends_at
    )
    ceilings = after.ceilings
    after.add(
        ceilings=Ceilings(loader=ceilings.loader, device=ceilings.device, copy=ceiling),
        copy_ceiling=ceiling.samples_per_s,
    )


def _measure_communication(after: _After) -> None:
    batches = [kept.batch for kept in after.held]
    assert isinstance(after.trainer, Trainer), "a script's ranks are its own"  # noqa: S101 - our own bug
    seconds = after.extras.stretch_s
    figures = measure_communication(after.trainer, batches, after.run.group, seconds=seconds)
    after.add(communication=figures)


def _switch_modes(after: _After) -> None:
    """Compare steps with and without the modes that slow them down; a group's ranks go in step."""
    _need_batches(after)
    trainer: Any = after.trainer
    found = measure_switches(
        trainer,
        trainer.optimizer,
        [kept.batch for kept in after.held],
        seconds=after.extras.stretch_s,
        ends_at=after.run.ends_at,
    )
    after.add(modes=found.modes, switches=found.gains)
    for note in found.notes:
        after.note(note)


def _break_down(after: _After) -> None:
    _need_batches(after)
    communication = after.measurement.communication
    exchange_s = 0.0
    if communication:
        exchange_s = communication.exposed_s / after.trainer.config.grad_accum_steps
    with after.trainer.without_exchange():
        breakdown, busy = break_down(
            after.trainer,
            host=[delivery.batch for delivery in after.host],
            held=[kept.batch for kept in after.held],
            window=after.measurement.window,
            restarts=after.run.restarts,
            exchange_s=exchange_s,
        )
    own_reading = () if busy is None else (busy,)
    after.add(breakdown=breakdown, busy_readings=(*own_reading, *after.measurement.busy_readings))


def _measure_items(after: _After) -> None:
    run = after.run
    trainer = after.trainer
    config = trainer.config

    def to_device(batch: Any) -> None:
        """Copy a batch as a step does, and wait for it."""
        trainer.to_device(unpacked(batch))
        trainer.device.synchronize()

    copy = to_device if trainer.device.kind in PINNING_KINDS else None
    if isinstance(run.feed.loader, TfLoader):
        costs = measure_pipeline(run.feed.loader, config, ends_at=run.ends_at)
    else:
        costs = measure_items(
            run.feed.loader, config, note=after.note, to_device=copy, ends_at=run.ends_at
        )
        after.add(loader_costs=costs)
        formats = measure_formats(run.feed.loader, costs.item_s, after.scratch, run.ends_at)
        causes = measure_causes(
            run.feed.loader, costs, config.micro_batch_size, ends_at=run.ends_at
        )
        costs = costs.model_copy(update={"formats": formats, "causes": causes})
    ceiling = after.ceilings.loader
    if ceiling:
        costs = with_batch_rates(costs, ceiling, config, run.group.local_size)
    after.add(loader_costs=costs)


def _measure_lengths(after: _After) -> None:
    """Measure lengths of items; on one device also the time of batches by length.

    A group's ranks would train on different lengths.
    """
    run = after.run
    tokens = after.measurement.tokens
    assert run.tokens is not None and tokens is not None, "only such batches are looked at"  # noqa: S101, PT018 - our own bug
    timed = after.trainer if run.group.size == 1 and isinstance(after.trainer, Trainer) else None
    lengths = measure_lengths(
        run.feed.loader,
        after.trainer.config,
        tokens,
        run.tokens.lengths,
        timed,
        seconds=after.extras.stretch_s,
        ends_at=run.ends_at,
    )
    after.add(lengths=lengths)


def _measure_activations(after: _After) -> None:
    """Measure the activations kept for the backward pass, on one device and without compiling.

    A group's ranks would make different numbers of passes, and a compiled model shows no blocks.
    """
    trainer = after.trainer
    if not isinstance(trainer, Trainer):  # a script's
        return
    if trainer.config.is_group or trainer.config.compile:
        return
    _need_batches(after)
    activations = measure_activations(
        trainer, after.held, seconds=after.extras.stretch_s, ends_at=after.run.ends_at
    )
    after.add(activations=activations)


def _need_batches(after: _After) -> None:
    """Check that every rank has batches: without an exchange of gradients, buffers are still sent.

    Raises:
        RuntimeError: This rank or another one has none.
    """
    if not after.run.group.all(bool(after.held)):
        raise RuntimeError("there are no batches")


# The exchange of gradients: steps with it, steps without it, and the exchange alone. All ranks come
# here together and take the same number of steps.


_ROUNDS = 3
"""Rounds of both kinds of step in turn, so that a drift affects both; the fastest counts. Source:
our convention."""
_FEWEST_STEPS = 3
"""Steps of a round at least, as for peaks of memory. Source: our convention."""
_HALVED = frozenset({"fp16", "bf16"})


def measure_communication(
    trainer: Trainer, held: Sequence[Any], group: Group, *, seconds: float
) -> Communication:
    """Time optimizer steps with and without the exchange, in turn, and the all-reduces alone.

    Args:
        trainer: The trainer; its ranks' weights differ afterwards.
        held: Batches on the device.
        group: All ranks; each must call this function.
        seconds: Seconds of each of the three measurements.

    Raises:
        RuntimeError: Some rank has no batches, its model has no no_sync, or it has no memory for
            the all-reduces.
    """
    if not group.all(bool(held) and trainer.accumulator.no_sync is not None):
        raise RuntimeError("each rank must hold batches, and its model must have no_sync")
    batches = cycle(held)

    def train() -> None:
        for batch in islice(batches, trainer.config.grad_accum_steps):
            trainer.train(batch)

    steps = _repeats(_mean_s(train, _FEWEST_STEPS, trainer, group), seconds / _ROUNDS)
    with_exchange = []
    without = []
    for _ in range(_ROUNDS):
        with_exchange.append(_mean_s(train, steps, trainer, group))
        with trainer.without_exchange():
            without.append(_mean_s(train, steps, trainer, group))
    sizes = _bucket_bytes(trainer)
    return Communication(
        step_s=min(with_exchange),
        step_alone_s=min(without),
        exchange_s=_exchange_s(sizes, trainer, group, seconds),
        bytes_exchanged=sum(sizes),
    )


def _repeats(once_s: float, seconds: float) -> int:
    """Return the number of repeats that fill some seconds, within bounds."""
    # The upper bound limits a measurement whose first, timed step was too fast by chance.
    return max(_FEWEST_STEPS, min(200, ceil(seconds / max(once_s, 1e-6))))


def _mean_s(work: Callable[[], None], repeats: int, trainer: Trainer, group: Group) -> float:
    """Measure the mean seconds of some work on the slowest rank; all ranks begin together."""
    group.wait()
    trainer.device.synchronize()
    begun = perf_counter()
    for _ in range(repeats):
        work()
    trainer.device.synchronize()
    return group.most((perf_counter() - begun) / repeats)


def _bucket_bytes(trainer: Trainer) -> list[int]:
    """Return the bytes of each bucket that is sent: gradients in backward order, as DDP joins them."""
    wanted = trainer.config.ddp_settings
    cap = wanted.first_bucket_mb or wanted.bucket_cap_mb or TORCH_FIRST_BUCKET_MB
    share = 0.5 if wanted.comm_hook in _HALVED else 1.0
    buckets = list[int]()
    filled = 0.0
    for parameter in reversed(list(trainer.model.parameters())):
        if not parameter.requires_grad:
            continue
        filled += parameter.nbytes * share
        if filled >= cap * 2**20 * share:
            buckets.append(int(filled))
            filled = 0.0
            cap = wanted.bucket_cap_mb or TORCH_BUCKET_CAP_MB
    return [*buckets, int(filled)] if filled else buckets


def _exchange_s(sizes: Sequence[int], trainer: Trainer, group: Group, seconds: float) -> float:
    """Measure the seconds of all-reducing buckets of these sizes, with nothing else running.

    Raises:
        RuntimeError: Some rank has no memory for them.
    """
    tensors = _alike(sizes, trainer.device.torch_device, group)

    def exchange() -> None:
        for work in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
            if work is not None:
                work.wait()

    once_s = _mean_s(exchange, 1, trainer, group)
    return _mean_s(exchange, _repeats(once_s, seconds), trainer, group)


def _alike(sizes: Sequence[int], device: torch.device, group: Group) -> list[Tensor]:
    """Allocate tensors of these sizes on all ranks, or on none.

    They take as much memory as all gradients. If only one rank ran out of memory, the others would
    wait in the first all-reduce, so all agree before it.
    """
    tensors = list[Tensor]()
    refusal = None
    try:
        tensors.extend(
            torch.ones(max(1, size // 4), dtype=torch.float32, device=device) for size in sizes
        )
    except RuntimeError as error:  # out of memory, of whatever kind of device
        refusal = error
    if not group.all(refusal is None):
        raise RuntimeError(
            "each rank must have memory for a second copy of its gradients"
        ) from refusal
    return tensors
