"""What a trial has measured: the raw blocks of a timed window, and the Measurement that is made of them.

The worker fills a Window; `analysis.rates` calculates the rate and its interval from it. Everything raw is kept beside
what is derived.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from pydantic import Field

from autotune.frozen import FrozenModel, with_field_copy
from autotune.note import Note
from autotune.records.breakdown import LoaderCosts, TimeBreakdown
from autotune.records.ceilings import SIDES, Ceiling, CeilingBook
from autotune.records.conditions import DeviceConditions
from autotune.records.host_load import HostLoad
from autotune.records.lengths import Lengths, Tokens
from autotune.records.memory import Activations, MemoryGrowth
from autotune.records.ranks import Communication, RankFigures
from autotune.records.utilization import WAIT_SOURCE, BusyReading, Fullness
from autotune.settings.training_config import TrainingConfig

__all__ = ["Block", "Ceilings", "Interval", "Measurement", "MemorySample", "Restart", "Window", "keep_ceilings"]

_THRASHING_FROM = 2
"""Retries within a window from which on training has no room: our convention, after Composer, which lowers the
micro batch once two batches in a row had some. A single one has other causes too: fragments where lengths vary, cuDNN's
trials of a new shape. Source: composer/trainer/trainer.py, _handle_thrashing_in_automicrobatching."""
_AHEAD_FROM = 0.25
"""Batches of work that a device has left when the next batch has come, where it sets the pace: our own convention. More
than one can't be asked for: a driver queues about a thousand launches, fewer than a step of a large model has."""


class Block(FrozenModel):
    """A stretch of the loop between two edges, at each of which the device had done all that came before."""

    samples: int
    """Samples that came, counted."""
    batches: int
    """Batches that came."""
    seconds: float
    """Wall time."""
    data_wait_s: float
    """Seconds from asking the loader for these batches to having them. Where the device works behind the host, a single
    block's may be longer than the block; the sum over a window's blocks is a part of their time."""
    starved_s: float | None = None
    """The part of them in which no batch lay ready: without what taking a ready batch costs. None: not known apart."""
    ready_at_end: int | None = None
    """Batches that lay ready when the block's last one was launched; None where that is not known."""
    made: float | None = None
    """Samples that the loader's workers made meanwhile, whether or not they came; None where they are not counted."""
    is_warm_up: bool = False
    """It came before the window: batches may have come faster than the loader makes them."""

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for data: those in which no batch lay ready, where these are known apart."""
        return self.data_wait_s if self.starved_s is None else self.starved_s


class Restart(FrozenModel):
    """The end of an epoch and the start of the next, until the queue that workers have filled in advance is used up.

    Batches that come right after a restart were made while the loop waited for the first of them: they belong to it.
    """

    seconds: float
    """From the last batch's end on."""
    samples: int
    """Samples that came in these seconds."""


class Window(FrozenModel):
    """The raw record of a timed window."""

    blocks: tuple[Block, ...] = Field(min_length=1)
    """In the order in which they came."""
    restarts: tuple[Restart, ...] = ()
    """Epoch restarts that were taken out of the blocks; none where the blocks cover whole epochs."""
    whole_epochs: bool
    """The blocks cover whole epochs, restarts included. Otherwise restarts are added in proportion."""
    epoch_samples: int | None
    """Samples of one epoch; None where no epoch ended and the dataset has no length."""
    expected_restart_s: float = 0.0
    """What one restart is taken to cost where none fell into the window, from the first start of the loader."""
    queue_capacity: int
    """Batches that workers prepare in advance at most: min(prefetch_factor * num_workers, batches of an epoch)."""
    workers: int = 0
    """Processes of the loader that make batches; 0 where there are none, or their number is not known."""
    asked: int | None = None
    """Batches that they were asked for at the last edge, those that lay ready included: fewer than the capacity while
    the queue is kept short. None where that is not known."""
    queue_at_start: int | None
    """Batches that were ready at the window's first edge; None where the platform has no such count."""
    queue_at_end: int | None
    """The same at the last edge."""
    take_s: float | None = None
    """Median seconds of taking a batch that lay ready, from the warm-up; None where none did."""
    host_ahead_s: float | None = None
    """Median over the blocks' ends: seconds of work that the device still had when the next batch had come. 0 where the
    device waited for the loader or for the host. None where its events can't be timed, and on the CPU."""
    warm_up_batches: int
    """Batches before the window."""
    warm_up_s: float
    """Seconds before the window, from the first batch on."""
    is_drained: bool
    """The queue that a slow first step had filled was used up before the window."""
    is_steady: bool
    """No slow step came between the warm-up and the window."""
    stopped_by: Literal["precision", "time", "deadline"]
    """What ended it: the rate was known well enough, the window's longest time, or the trial's deadline."""

    @property
    def batch_s(self) -> float:
        """Mean seconds of a batch in its blocks."""
        return sum(block.seconds for block in self.blocks) / sum(block.batches for block in self.blocks)

    @property
    def raw_samples_per_s(self) -> float:
        """Samples that came over the seconds of the blocks, without any correction."""
        return sum(block.samples for block in self.blocks) / sum(block.seconds for block in self.blocks)

    @property
    def starved_s(self) -> float:
        """Seconds in which the loop waited, and no batch lay ready."""
        return sum(block.waited_s for block in self.blocks)

    @property
    def made(self) -> float | None:
        """Samples that the loader's workers made in its blocks; None where they were not counted in each."""
        counts = [block.made for block in self.blocks if block.made is not None]
        return sum(counts) if len(counts) == len(self.blocks) else None

    @property
    def is_held_by_device(self) -> bool:
        """Return True where the device still had work whenever the next batch had come, so that it sets the pace."""
        return self.host_ahead_s is not None and self.host_ahead_s >= _AHEAD_FROM * self.batch_s


class Interval(FrozenModel):
    """A figure with its 95 % interval: a throughput in samples/s, a ratio of two, a number of samples."""

    value: float
    """The estimate."""
    low: float
    """The interval's lower end."""
    high: float
    """The interval's upper end; may be infinite."""

    @property
    def relative_half_width(self) -> float:
        """Half of the interval over the value."""
        return (self.high - self.low) / 2 / self.value if self.value > 0 else inf


class MemorySample(FrozenModel):
    """Peak memory of a trial, and where the figure comes from."""

    peak_bytes: int
    """What the limit is judged on."""
    source: str
    """Such as "max reserved + outside torch" or "PSS of the process tree"."""
    reserved_bytes: int | None = None
    """Peak of what torch's allocator had reserved, on an accelerator."""
    outside_bytes: int | None = None
    """Device memory in use outside torch's allocator, on an accelerator: this process's context, kernels and
    libraries, and what other processes use. The limit is on the device as a whole, so their memory counts too;
    how much that was is in `Measurement.conditions` (`others_memory_bytes`)."""
    allocated_bytes: int | None = None
    """Peak of what tensors took of the reserved memory, on an accelerator."""
    alloc_retries: int | None = None
    """Times within the window that torch's allocator found no room, freed its cached blocks, and tried again: each
    synchronises the device. None where the device does not count them."""

    @property
    def is_thrashing(self) -> bool:
        """Whether training had no room in the window: the allocator had to free its cached blocks twice or more.

        Its peak is that of what it was allowed, not of what it needs.
        """
        return self.alloc_retries is not None and self.alloc_retries >= _THRASHING_FROM


with with_field_copy():

    class Ceilings(FrozenModel):
        """What was measured of each side alone, after the window."""

        loader: Ceiling | None = None
        """Batches loaded, and not trained on; None where not measured."""
        device: Ceiling | None = None
        """Batches trained on that lay in the device's memory; None where not measured."""
        copy: Ceiling | None = None  # type: ignore[assignment] # hides a method
        """Batches moved to the device, and not trained on; None without such a device, and where not measured."""


class Measurement(FrozenModel):
    """What a trial has measured. Rates are in samples per second, fractions in 0..1, memory in bytes."""

    samples_per_s: float
    """Samples over seconds of the window, epoch restarts counted, corrected for what the queue held."""
    samples_per_s_ci: tuple[float, float]
    """Interval for another run of the same settings: batch means of the window, joined with the spread between runs
    that is usual on such a device; reports use the one that was learned. The upper end is infinite where the window
    has a single block."""
    busy_fraction: float | None
    """By GPM, else by NVML's samples, else by the loop's waits: a trial falls back where a source has no value, and
    `busy_source` names the one that was used."""
    busy_source: str | None
    """What told the busy fraction; None where nothing did."""
    busy_readings: tuple[BusyReading, ...] = ()
    """Every source that has measured it."""
    fullness: Fullness | None = None
    """How full the busy time was; None where the device does not report it."""
    conditions: DeviceConditions | None = None
    """What the device did meanwhile; None where it does not report it."""
    host_load: HostLoad | None = None
    """What the host's cores did meanwhile; None where the kernel does not tell."""
    data_wait_fraction: float | None
    """Of the loop's time, waiting for the loader; None where a script without a DataLoader doesn't show it."""
    peak_memory_bytes: int
    """What the memory limit is judged on."""
    loader_ceiling: float | None = None
    """Rate of the loader alone; None where not measured."""
    device_ceiling: float | None = None
    """Rate of the device on batches in its memory; None where not measured."""
    copy_ceiling: float | None = None
    """Rate of moving batches to the device, from memory pinned as in the trial; None without such a device, or where
    not measured."""
    host_ceiling: float | None = None
    """Rate of the host that takes batches that lie ready and launches their work; None where the host is the device, or
    where not measured."""
    ceilings: Ceilings | None = None
    """What the rates above come from, where this trial measured them itself."""
    breakdown: TimeBreakdown | None = None
    """Where the time goes; None where not asked for."""
    loader_costs: LoaderCosts | None = None
    """What data costs inside the loader; None where not asked for."""
    tokens: Tokens | None = None
    """The tokens of a sample; None where a batch has no lengths."""
    lengths: Lengths | None = None
    """Lengths of items, and what batches of like lengths would win; None where not asked for, or all are equal."""
    activations: Activations | None = None
    """What is kept for the backward pass; None where not asked for, in groups, and where the model is compiled."""
    growth: tuple[MemoryGrowth, ...] = ()
    """How memory has grown in the window, of a group that of rank 0; none where the window was too short to tell."""
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
    """Loss of the last step, to distinguish a run that trains from one that does not."""
    skipped_steps: int = 0
    """Optimizer steps that the GradScaler skipped, the warm-up included."""
    earlier_trials: int = 0
    """Trials that its process had measured before: with some, it built nothing, and what they left in caches, in the
    allocator and in the heap was there. 0: none, as in a training's own process; a probe may have come before."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The raw blocks of the window."""
        return self.window.blocks

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, padding included; None where a batch has no lengths."""
        return None if self.tokens is None else self.samples_per_s * self.tokens.per_sample

    def busy_by(self, source: str | None) -> float | None:
        """The busy fraction by a source; None where it has none."""
        if source == self.busy_source:
            return self.busy_fraction
        return next((reading.fraction for reading in self.busy_readings if reading.source == source), None)

    @property
    def host_fraction(self) -> float | None:
        """Share of the loop's time in which the device has nothing to do until the host launches more.

        It is the breakdown's where there is one, else what the waits for data and the device's own work leave of the
        time. 0 where the device holds the loop; None where that is not known, and on the CPU.
        """
        if self.window.host_ahead_s is None:
            return None
        if self.window.is_held_by_device:
            return 0.0
        if self.breakdown is not None:
            return self.breakdown.idle.fraction
        # A device alone may be held by launching as well: then the driver's reading is the lower one.
        busy = [] if self.device_ceiling is None else [self.samples_per_s / self.device_ceiling]
        if self.busy_fraction is not None and self.busy_source != WAIT_SOURCE:
            busy.append(self.busy_fraction)
        if not busy or self.data_wait_fraction is None:
            return None
        return max(0.0, 1.0 - self.data_wait_fraction - min(busy))

    @property
    def joules_per_sample(self) -> float | None:
        """Energy that the device drew for a sample: its mean power over the rate. None where it does not report it."""
        power_w = None if self.conditions is None else self.conditions.power_w
        return None if power_w is None or self.samples_per_s <= 0 else power_w / self.samples_per_s


def keep_ceilings(book: CeilingBook, config: TrainingConfig, run: Measurement) -> None:
    """Enter what a run of a configuration has measured of each side, and what it shows of them as a whole."""
    if run.ceilings is not None:
        for side in SIDES:
            book.keep(side, config, getattr(run.ceilings, side))
    book.show(config, run.samples_per_s_ci[0])
