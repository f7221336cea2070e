"""What a trial has measured: the raw blocks of a timed window, and the Measurement that is made of them.

The worker fills a Window; `analysis.rates` calculates the rate and its interval from it. Everything raw is kept beside
what is derived.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from autotune.note import Note
from autotune.records.breakdown import LoaderCosts, TimeBreakdown
from autotune.records.ceilings import Ceiling
from autotune.records.conditions import DeviceConditions
from autotune.records.ranks import Communication, RankFigures
from autotune.records.utilization import BusyReading, Fullness

__all__ = ["Block", "Ceilings", "Measurement", "MemorySample", "Rate", "Restart", "Window"]

_THRASHING_FROM = 2
"""Retries within a window from which on training has no room: our own convention, after Composer, which lowers the
micro batch once two batches in a row had some. A single one has other causes too: fragments where lengths vary, cuDNN's
trials of a new shape. Source: composer/trainer/trainer.py, _handle_thrashing_in_automicrobatching."""


class Block(BaseModel):
    """A stretch of the loop between two edges, at each of which the device had done all that came before."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    samples: int
    """Samples that came, counted."""
    batches: int
    seconds: float
    """Wall time."""
    data_wait_s: float
    """Seconds in which the loop waited for the loader while it asked for these batches. Where the device works behind
    the host, a single block's may be longer than the block; the sum over a window's blocks is a part of their time."""


class Restart(BaseModel):
    """The end of an epoch and the start of the next, until the queue that workers fill ahead has been seen through.

    Batches that come right after a restart were made while the loop waited for the first of them: they belong to it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seconds: float
    """From the last batch's end on."""
    samples: int
    """Samples that came in these seconds."""


class Window(BaseModel):
    """The raw record of a timed window."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    blocks: tuple[Block, ...] = Field(min_length=1)
    restarts: tuple[Restart, ...] = ()
    """Epoch restarts that were taken out of the blocks; none where the blocks cover whole epochs."""
    whole_epochs: bool
    """The blocks cover whole epochs, restarts included. Otherwise restarts are added in proportion."""
    epoch_samples: int | None
    """Samples of one epoch; None where no end was seen and none is promised."""
    expected_restart_s: float = 0.0
    """What one restart is taken to cost where none fell into the window, from the first start of the loader."""
    queue_capacity: int
    """Batches that workers hold ready at most: min(prefetch_factor * num_workers, batches of an epoch)."""
    queue_at_start: int | None
    """Batches that lay ready at the window's first edge; None where the platform can't tell."""
    queue_at_end: int | None
    warm_up_batches: int
    warm_up_s: float
    is_drained: bool
    """The queue that a slow first step had filled was used up before the window."""
    is_steady: bool
    """No slow step came between the warm-up and the window."""
    stopped_by: Literal["precision", "time", "deadline"]


class Rate(BaseModel):
    """Samples per second with a 95 % interval."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    value: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half of the interval over the value."""
        return (self.high - self.low) / 2 / self.value if self.value > 0 else inf


class MemorySample(BaseModel):
    """Peak memory of a trial, and where the figure comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    peak_bytes: int
    source: str
    """Such as "max reserved + outside torch" or "PSS of the process tree"."""
    reserved_bytes: int | None = None
    """Peak of what torch's allocator held, on an accelerator."""
    outside_bytes: int | None = None
    """Device memory in use outside torch's allocator, on an accelerator: this process's context, kernels and
    libraries, and what other processes hold. The limit is on the device as a whole, where theirs is not to be had
    either; how much of it was theirs, `Measurement.conditions` tells (`others_memory_bytes`)."""
    allocated_bytes: int | None = None
    """Peak of what tensors took of the reserved memory, on an accelerator."""
    alloc_retries: int | None = None
    """Times within the window that torch's allocator found no room, gave back what it held, and asked again: each
    synchronises the device. None where the device does not count them."""

    @property
    def is_thrashing(self) -> bool:
        """Whether training had no room in the window: twice or more it gave memory back and asked anew.

        Its peak is that of what it was allowed, not of what it needs.
        """
        return self.alloc_retries is not None and self.alloc_retries >= _THRASHING_FROM


class Ceilings(BaseModel):
    """What was measured of either side alone, after the window."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    loader: Ceiling | None = None
    device: Ceiling | None = None


class Measurement(BaseModel):
    """What a trial has measured. Rates are in samples per second, fractions in 0..1, memory in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings")

    samples_per_s: float
    samples_per_s_ci: tuple[float, float]
    """95 % interval for another run of the same settings: batch means of the window, joined with the usual spread
    between runs; the upper end is infinite where the window held a single block."""
    busy_fraction: float | None
    """By GPM, else by NVML's samples, else by the loop's waits: a trial falls back where one does not tell, and its
    source says so."""
    busy_source: str | None
    busy_readings: tuple[BusyReading, ...] = ()
    """Every source that could tell."""
    fullness: Fullness | None = None
    """How full the busy time was; None where the device does not tell."""
    conditions: DeviceConditions | None = None
    """What the device did meanwhile; None where it does not tell."""
    data_wait_fraction: float
    peak_memory_bytes: int
    loader_ceiling: float | None = None
    """Rate of the loader alone; None where not measured."""
    device_ceiling: float | None = None
    """Rate of the device on batches that it already holds; None where not measured."""
    ceilings: Ceilings | None = None
    """What the two rates above come from, where this trial measured them itself."""
    breakdown: TimeBreakdown | None = None
    """Where the time goes; None where not asked for."""
    loader_costs: LoaderCosts | None = None
    """What data costs inside the loader; None where not asked for."""
    ranks: tuple[RankFigures, ...] = ()
    """Each rank's own figures, in order; () where there is one process. Everything else here is the group's: its rate
    and window, the worst rank's waits, busy fraction and memory."""
    communication: Communication | None = None
    """What exchanging gradients takes; None for a single rank, and where not measured."""
    remarks: tuple[Note, ...] = ()
    """What disturbed the window, what could not be measured after it, and why. Of a group: with `on_ranks`, the ranks
    that a remark is about, where it is not about all."""
    after_s: float = 0.0
    """Seconds that all this took after the window; a run that measures its window alone is so much shorter."""
    startup_s: float
    """From the trial's start to its first batch, the workload's own build included."""
    build_s: float
    """Share of the start-up in the user's own code: unpickling, building, the loader's first batch."""
    memory: MemorySample
    window: Window
    loss: float
    """Loss of the last step, to tell a run that trains from one that does not."""
    skipped_steps: int = 0
    """Optimizer steps that the GradScaler skipped, the warm-up included."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The raw blocks of the window."""
        return self.window.blocks

    def busy_by(self, source: str | None) -> float | None:
        """The busy fraction that a source has told; None where it has not."""
        if source == self.busy_source:
            return self.busy_fraction
        return next((one.fraction for one in self.busy_readings if one.source == source), None)

    @property
    def joules_per_sample(self) -> float | None:
        """Energy that the device drew for a sample: its mean power over the rate. None where it does not tell."""
        power_w = None if self.conditions is None else self.conditions.power_w
        return None if power_w is None or self.samples_per_s <= 0 else power_w / self.samples_per_s
