"""What a trial measures after its window: either side alone, where the time goes, what an item costs.

Takes a run whose window is over and the Measurement made from it; hands on the same Measurement with what was found
added. What the window has measured is never changed. A stage that fails leaves its field None and a remark; the caller
is given each state to keep before the next stage begins, so that not even the death of the process loses a figure.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from autotune.analysis.expectation import PINNING_KINDS
from autotune.protocol.messages import Extras
from autotune.records.measurement import Ceilings, Measurement
from autotune.worker.after_window.communication import measure_communication
from autotune.worker.after_window.item_costs import Surroundings, measure_items
from autotune.worker.after_window.profile import break_down
from autotune.worker.failure.causes import cause_of
from autotune.worker.measure.loop import Run
from autotune.worker.measure.reuse import unpacked
from autotune.worker.measure.side_alone import collect, device_alone, loader_alone, resident
from autotune.worker.measure.step import Trainer

__all__ = ["measure_after"]

_HELD = 8
_HELD_BYTES = 512 * 2**20
_STOP_WITHIN_S = 1.0

_LOADER = "the rate of the loader alone"
_BATCHES = "batches to train on without the loader"
_DEVICE = "the rate of the device alone"
_COMMUNICATION = "what exchanging gradients takes"
_BREAKDOWN = "where the time goes"
_ITEMS = "what an item costs"


@dataclass(slots=True, kw_only=True)
class _After:
    """What the stages share, and what they have found so far."""

    run: Run
    trainer: Trainer
    extras: Extras
    measurement: Measurement
    host: list[Any] = field(default_factory=list)
    """Batches as the loader delivered them."""
    held: list[Any] = field(default_factory=list)
    """The same on the device."""
    begun: float = field(default_factory=perf_counter)

    def add(self, **found: Any) -> None:
        """Add to the measurement."""
        self.measurement = self.measurement.model_copy(update=found)

    def remark(self, remark: str) -> None:
        """Add what could not be measured."""
        self.measurement = self.told(remark)

    def told(self, *remarks: str) -> Measurement:
        """The measurement with further remarks, and the time that these stages have taken so far."""
        found = {"remarks": (*self.measurement.remarks, *remarks), "after_s": perf_counter() - self.begun}
        return self.measurement.model_copy(update=found)


_Stage = Callable[[_After], None]


def measure_after(
    run: Run, trainer: Trainer, extras: Extras, measurement: Measurement, keep: Callable[[Measurement], None]
) -> Measurement:
    """Measure what is asked for beyond the window.

    Args:
        run: The run, its feed still delivering; its loader's workers are ended on the way.
        trainer: What the run trains.
        extras: What is asked for.
        measurement: What the window has told.
        keep: Called with the measurement so far before each stage: it counts should the process not outlive it.

    Returns:
        The measurement with ceilings, breakdown and costs, and remarks on what could not be measured.
    """
    after = _After(run=run, trainer=trainer, extras=extras, measurement=measurement)
    stages = _stages(extras, run.group.size)
    for index, (what, stage) in enumerate(stages):
        left = [name for name, _ in stages[index:] if name != _BATCHES]
        try:
            is_late = run.is_late()
        except RuntimeError:  # it is asked of all ranks, and the window is safe
            return after.told(f"another rank was gone before {_listed(left)} could be measured")
        if is_late:
            return after.told(f"the deadline was too near to measure {_listed(left)}")
        keep(after.told(f"the trial ended before it had measured {_listed(left)}"))
        _attempt(what, stage, after)
    return after.told() if stages else measurement


def _stages(extras: Extras, ranks: int) -> list[tuple[str, _Stage]]:
    """What to measure, in order: the loader while it runs, all else once it is gone.

    Ranks come to each stage together, and go through none alone that exchanges anything between them.
    """
    needs_batches = extras.device_ceiling or extras.breakdown
    wanted: list[tuple[bool, str, _Stage]] = [
        (extras.loader_ceiling, _LOADER, _measure_loader),
        (needs_batches, _BATCHES, _take_batches),
        (extras.device_ceiling, _DEVICE, _measure_device),
        (needs_batches and ranks > 1, _COMMUNICATION, _measure_communication),
        (extras.breakdown, _BREAKDOWN, _break_down),
        (extras.breakdown, _ITEMS, _measure_items),
    ]
    return [(what, stage) for is_wanted, what, stage in wanted if is_wanted]


def _attempt(what: str, stage: _Stage, after: _After) -> None:
    """Run a stage; whatever it raises becomes a remark, the traceback goes to the log."""
    try:
        stage(after)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, and the window is safe already
        with suppress(OSError, ValueError):  # the user's code may have closed it
            traceback.print_exception(error, file=sys.stderr)
        after.remark(f"{what} could not be measured ({cause_of(error)})")


def _measure_loader(after: _After) -> None:
    run, window = after.run, after.measurement.window
    ceiling = loader_alone(
        run.feed,
        after.trainer.config,
        seconds=after.extras.stretch_s,
        restart_s=window.expected_restart_s,
        ends_at=run.ends_at,
    )
    before = after.measurement.ceilings or Ceilings()
    after.add(
        ceilings=before.model_copy(update={"loader": ceiling}),
        loader_ceiling=ceiling.samples_per_s,
    )


def _take_batches(after: _After) -> None:
    """Take batches to go on with, then end the loader's workers, so that the device has the machine to itself."""
    feed = after.run.feed
    try:
        after.host = collect(feed, count=_HELD, limit_bytes=_HELD_BYTES, seconds=after.extras.stretch_s)
    finally:
        feed.stop(_STOP_WITHIN_S)
    after.held = resident(after.trainer, after.host)


def _measure_device(after: _After) -> None:
    _need_batches(after)
    with _alone(after.trainer):
        ceiling = device_alone(after.trainer, after.held, seconds=after.extras.stretch_s, ends_at=after.run.ends_at)
    before = after.measurement.ceilings or Ceilings()
    after.add(ceilings=before.model_copy(update={"device": ceiling}), device_ceiling=ceiling.samples_per_s)


def _measure_communication(after: _After) -> None:
    figures = measure_communication(after.trainer, after.held, after.run.group, seconds=after.extras.stretch_s)
    after.add(communication=figures)


def _break_down(after: _After) -> None:
    _need_batches(after)
    talk = after.measurement.communication
    with _alone(after.trainer):
        profiled = break_down(
            after.trainer,
            host=after.host,
            held=after.held,
            window=after.measurement.window,
            restarts=after.run.restarts,
            exchange_s=0.0 if talk is None else talk.exposed_s / after.trainer.config.grad_accum_steps,
        )
    readings = after.measurement.busy_readings
    after.add(
        breakdown=profiled.breakdown,
        busy_readings=readings if profiled.busy is None else (profiled.busy, *readings),
    )


def _measure_items(after: _After) -> None:
    ceilings = after.measurement.ceilings
    costs = measure_items(
        after.run.feed.loader,
        after.trainer.config,
        ceiling=None if ceilings is None else ceilings.loader,
        ends_at=after.run.ends_at,
        tell=after.remark,
        surroundings=Surroundings(local_ranks=after.run.group.local_size, to_device=_copier(after.trainer)),
    )
    after.add(loader_costs=costs)


def _copier(trainer: Trainer) -> Callable[[Any], object] | None:
    """Copies a batch as a step does, and waits until it is there; None for devices that pinning does not help."""
    if trainer.device.kind not in PINNING_KINDS:
        return None

    def copy(batch: Any) -> None:
        trainer.to_device(unpacked(batch))
        trainer.device.synchronize()

    return copy


def _need_batches(after: _After) -> None:
    """Check that every rank has batches: even by itself each begins with an exchange of the model's buffers.

    Raises:
        RuntimeError: this rank or another one has none.
    """
    if not after.run.group.all(bool(after.held)):
        raise RuntimeError("there are no batches")


@contextmanager
def _alone(trainer: Trainer) -> Iterator[None]:
    """Train without exchanging gradients: each rank takes as many steps as its own time holds.

    Raises:
        RuntimeError: the exchange can't be held back.
    """
    if trainer.config.process_count > 1 and trainer.hold_back is None:
        raise RuntimeError("with ddp.static_graph no rank can train by itself")
    trainer.is_alone = trainer.config.process_count > 1
    try:
        yield
    finally:
        trainer.is_alone = False


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
