"""Measure the extras of a trial after its window: ceilings, breakdown of a step, costs of items.

In: a run whose window is over, and its Measurement. Out: the same Measurement with the new figures
added; those of the window never change. A stage that fails leaves its field None, and a note. The
measurement is passed to the caller before each stage, so that even the death of the process loses
no figure.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from autotune.config.tf_data import TfLoader
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
from autotune.records.measurement import Ceilings, Measurement
from autotune.worker.batch import Held, unpacked
from autotune.worker.extras.activations import measure_activations
from autotune.worker.extras.communication import measure_communication
from autotune.worker.extras.formats import measure_formats
from autotune.worker.extras.item_costs import measure_items, measure_pipeline, with_batch_rates
from autotune.worker.extras.lengths import measure_lengths
from autotune.worker.extras.profile import break_down
from autotune.worker.failures import cause_of
from autotune.worker.feed import Delivery
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
    needs_batches = extras.device_ceiling or extras.breakdown or extras.activations
    wanted: list[tuple[bool, str, _Stage]] = [
        (extras.loader_ceiling, "loader_rate", _measure_loader),
        (needs_batches or has_copies, _BATCHES, _take_batches),
        (extras.device_ceiling, "device_rate", _measure_device),
        (has_copies, "copy_rate", _measure_copy),
        (needs_batches and after.run.group.size > 1, "communication", _measure_communication),
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
        costs = costs.model_copy(update={"formats": formats})
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
    if trainer.config.world_size > 1 or trainer.config.compile:
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
