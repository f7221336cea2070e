"""`Measurement`: the figures of one run of a trial, from the blocks of its window to memory, clocks and ranks.

Data only. Comes in: figures from `autotune.worker`, or JSON of a run folder. Goes out: the same
figures, with properties that follow from one record alone, for `autotune.models` and
`autotune.report`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from autotune.config.environment import Environment
from autotune.config.training_config import TrainingConfig
from autotune.frozen import FrozenModel, with_field_copy
from autotune.messages.trials import clock_lowered, clock_moved, cores_taken, others_on_device
from autotune.note import Note
from autotune.records.breakdown import LoaderCosts, TimeBreakdown
from autotune.records.ceilings import SIDES, Ceiling, CeilingBook
from autotune.records.watched_run import Modes

# Host load: CPU time of the trial and of other processes during a window.
#
# Filled by the worker from two readings at the window's edges and stored raw; the share of other
# processes is derived. `note_on_load` turns it into a note.


_OTHERS_LEAST = 0.10
"""Share of the cores from which other processes count: two cores lose that to an active editor and
browser. Our own convention."""
_FULL_FROM = 0.5
"""Share of the cores in use from which processes slow each other down: hyperthreads then share a
core, and few cores are idle. Our own convention."""
_LEAST_S = 0.05
"""Least CPU seconds of other processes: the kernel counts in hundredths of a second per core. Our
own convention."""


class HostLoad(FrozenModel):
    """CPU time on one host during a window; for a group over several hosts, the host with most load by others.

    Source: man 5 proc, /proc/stat and /proc/pid/stat; Linux kernel, admin-guide/cgroup-v2
    (cpu.stat), accounting/psi.
    """

    seconds: Annotated[float, Field(gt=0)]
    """Seconds between the two readings; slightly more than the window."""
    cores: Annotated[int, Field(ge=1)]
    """Cores that the trial may use at once: affinity and cgroup quota."""
    reachable_cores: Annotated[int, Field(ge=1)]
    """Cores that it may run on; more than `cores` under a quota."""
    busy_s: Annotated[float, Field(ge=0)]
    """CPU seconds of all processes on the reachable cores, including those that the hypervisor gave
    to other machines."""
    own_s: Annotated[float, Field(ge=0)]
    """CPU seconds of the trial: every rank on the host, and their loader workers."""
    stolen_s: Annotated[float, Field(ge=0)]
    """Part of `busy_s` that went to other virtual machines."""
    group_s: Annotated[float, Field(ge=0)] | None = None
    """CPU seconds of all processes under the same quota; None without a quota, or if its group does
    not report it."""
    pressure_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds in which some runnable process waited for a core. Not used for decisions: with more
    workers than cores, they wait for each other. None if the kernel does not count it."""

    @property
    def others_cores(self) -> float:
        """Mean number of the trial's cores that other processes used.

        A quota leaves cores unused; other processes on these cost the trial nothing.
        """
        unused = self.reachable_cores - self.cores
        outside = (self.busy_s - self.own_s) / self.seconds - unused
        inside = 0.0 if self.group_s is None else (self.group_s - self.own_s) / self.seconds
        return min(max(0.0, outside, inside), float(self.cores))

    @property
    def is_loaded(self) -> bool:
        """Return whether other processes used enough CPU to slow the trial."""
        if self.others_cores < _OTHERS_LEAST * self.cores:
            return False
        if self.others_cores * self.seconds < _LEAST_S:
            return False
        used = self.others_cores + self.own_s / self.seconds
        return used >= _FULL_FROM * self.cores


def join_loads(loads: Iterable[HostLoad | None]) -> HostLoad | None:
    """Join the loads of several windows; None if none is known."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return HostLoad(
        seconds=sum(load.seconds for load in known),
        cores=min(load.cores for load in known),
        reachable_cores=min(load.reachable_cores for load in known),
        busy_s=sum(load.busy_s for load in known),
        own_s=sum(load.own_s for load in known),
        stolen_s=sum(load.stolen_s for load in known),
        group_s=_sum(load.group_s for load in known),
        pressure_s=_sum(load.pressure_s for load in known),
    )


def note_on_load(load: HostLoad | None) -> Note | None:
    """Return a note if other processes slowed a window; None if not, or if the load is unknown."""
    if load is None or not load.is_loaded:
        return None
    return cores_taken(others_cores=load.others_cores, cores=load.cores)


def _sum(parts: Iterable[float | None]) -> float | None:
    """Return the sum, or None if a part is unknown."""
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


# Device conditions during a window: clocks, power, temperature, throttling, other processes.
#
# Filled by the worker; () and None stand for what the device does not report. `notes_on` and
# `note_on_others` turn them into notes. Source: NVML API reference, nvmlDeviceGetClockInfo,
# nvmlDeviceGetTotalEnergyConsumption, nvmlDeviceGetCurrentClocksEventReasons.


ThrottleReason = Literal["power_cap", "thermal", "power_brake", "hardware_slowdown"]
"""Reason why a GPU ran below its set clock; idleness and user-set clocks are not among them."""

_CLOCK_MOVED_BY = 0.03
"""Relative change of the clock over a window that changes throughput by as much as a search decides
on: our own convention."""
OTHERS_LEAST_BYTES = 256 * 2**20
"""Device memory from which other processes count: less than a computing process takes. Memory
outside torch's allocator, for a context and loaded kernels, was 749 MiB and more on an H200 and an
H100 (benchmarks/results/gpu-*.json). Our own convention."""
OTHERS_LEAST_BUSY = 0.05
"""Busy share of another process that changes throughput by as much as a search decides on: our own
convention."""


class DeviceConditions(FrozenModel):
    """One device during a window; for several devices the sum of energy and power, otherwise the worst value."""

    sm_clock_mhz: tuple[int, int] | None = None
    """Clock of the multiprocessors at both edges of the window, in MHz."""
    max_sm_clock_mhz: int | None = None
    """Highest clock that the device can be set to, in MHz."""
    memory_clock_mhz: tuple[int, int] | None = None
    """Memory clock at both edges of the window, in MHz."""
    temperature_c: tuple[int, int] | None = None
    """Temperature at both edges of the window, in degrees Celsius."""
    power_w: Annotated[float, Field(ge=0)] | None = None
    """Mean power over the window in watts: energy over time, or the mean of both edges if energy is
    not counted."""
    energy_j: Annotated[float, Field(ge=0)] | None = None
    """Energy of the whole device during the window, in joules. The sensor samples only part of the
    time: compare windows of at least a second. Source: Yang et al., Part-time Power Measurements,
    arXiv:2312.02741."""
    throttle_reasons: tuple[ThrottleReason, ...] = ()
    """Reasons at either edge of the window or counted between them, sorted."""
    others_memory_bytes: Annotated[int, Field(ge=0)] | None = None
    """Device memory in use before this process opened it."""
    others_busy_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of time in which the device ran kernels just before this process opened it; None also
    if an earlier trial may have run them."""
    persistence_mode: bool | None = None
    """The driver keeps the unused device initialized."""
    tf32_overrides: tuple[str, ...] = ()
    """Environment variables that change the precision of float32, as NAME=value:
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE."""

    @property
    def clock_moved_by(self) -> float | None:
        """Relative change of the multiprocessors' clock over the window; None if unknown."""
        if self.sm_clock_mhz is None or min(self.sm_clock_mhz) <= 0:
            return None
        first, last = self.sm_clock_mhz
        return last / first - 1

    @property
    def has_moved(self) -> bool:
        """Return whether the clock changed by enough to affect throughput."""
        return self.clock_moved_by is not None and abs(self.clock_moved_by) >= _CLOCK_MOVED_BY

    @property
    def is_at_power_limit(self) -> bool:
        """Return whether the power limit lowered the clock: normal under heavy load, not a disturbance."""
        return "power_cap" in self.throttle_reasons

    @property
    def disturbances(self) -> tuple[ThrottleReason, ...]:
        """Reasons besides the power limit: the same load may run faster at another time."""
        return tuple(reason for reason in self.throttle_reasons if reason != "power_cap")

    @property
    def has_others(self) -> bool:
        """Return whether another process had the device open, by its memory.

        Kernels alone are no evidence: a process of ours that has just ended may have run them.
        """
        return (
            self.others_memory_bytes is not None and self.others_memory_bytes >= OTHERS_LEAST_BYTES
        )


def notes_on(conditions: DeviceConditions) -> Iterator[Note]:
    """Yield a note on each disturbance of a window."""
    if conditions.disturbances:
        yield clock_lowered(reasons=conditions.disturbances)
    if conditions.has_moved and conditions.sm_clock_mhz is not None:
        first, last = conditions.sm_clock_mhz
        yield clock_moved(first_mhz=first, last_mhz=last)


def note_on_others(conditions: DeviceConditions | None) -> Note | None:
    """Return a note if the device was in use before the search; None if not."""
    if conditions is None or not conditions.has_others:
        return None
    busy = conditions.others_busy_fraction
    if busy is not None and busy < OTHERS_LEAST_BUSY:
        busy = None
    return others_on_device(held_bytes=conditions.others_memory_bytes or 0, busy_fraction=busy)


# Device utilization: the busy fraction by every source that measured it, and the utilization of its
# units.


PROFILER_SOURCE = "profiler: kernels and copies"
GPM_SOURCE = "GPM graphics utilization"
NVML_SOURCE = "NVML utilization"
WAIT_SOURCE = "1 - data wait"
_RANKS = {PROFILER_SOURCE: 0, GPM_SOURCE: 1, NVML_SOURCE: 2, WAIT_SOURCE: 4}
_AGREE_WITHIN = 0.10  # our convention

_Fraction = Annotated[float, Field(ge=0, le=1)]


class BusyReading(FrozenModel):
    """A busy fraction and its source."""

    fraction: _Fraction
    """Busy share of the time, in 0..1."""
    source: str
    """Name of the source, such as `GPM_SOURCE`."""


class Fullness(FrozenModel):
    """Utilization of the device's units by NVIDIA's GPM during the window, in 0..1; None for an unavailable metric.

    Source: NVML API reference, GPM metrics 2 (SM_UTIL), 3 (SM_OCCUPANCY), 5 (ANY_TENSOR_UTIL), 10
    (DRAM_BW_UTIL).
    """

    sm_fraction: _Fraction | None
    """"Percentage of SMs that were busy" (NVML): streaming multiprocessors."""
    sm_occupancy: _Fraction | None
    """"Percentage of warps that were active vs theoretical maximum"."""
    tensor_fraction: _Fraction | None
    """"Percentage of time the GPU's SMs were doing ANY tensor operations"."""
    dram_fraction: _Fraction | None
    """"Percentage of DRAM bw used vs theoretical maximum"."""


def source_rank(source: str) -> int:
    """Return the rank of a source, 0 for the best.

    The profiler sees every kernel and copy. GPM reports the "percentage of time any
    compute/graphics app was active on the GPU" from one edge of a window to the other. NVML's
    samples are means over 1/6 s to 1 s depending on the product, so 0.6 s contain zero to three of
    them. The loop's waits reflect the loader alone: where launches delay the device, they give 1.
    Source: NVML API reference, nvmlGpmMetricId_t (GRAPHICS_UTIL) and nvmlUtilization_t.
    """
    return _RANKS.get(source, 3)  # an unknown source, of another version, outranks the loop's waits


def best_common_source(available: Sequence[Collection[str]]) -> str | None:
    """Return the best source that all configurations have, from each one's sources; None if there is none."""
    first = available[0] if available else ()
    common = [source for source in first if all(source in sources for sources in available)]
    return min(common, key=source_rank, default=None)


def best_direct_reading(readings: Sequence[BusyReading]) -> BusyReading | None:
    """Return the reading of the best source other than the loop's waits; None if there is none."""
    direct = [reading for reading in readings if reading.source != WAIT_SOURCE]
    return min(direct, key=lambda reading: source_rank(reading.source), default=None)


def disagreement(readings: Sequence[BusyReading]) -> tuple[BusyReading, BusyReading] | None:
    """Return the lowest and the highest reading if they differ by more than 10 points, else None.

    The loop's waits are left out: they are no evidence against what a device itself reports.
    """
    direct = [reading for reading in readings if reading.source != WAIT_SOURCE]
    if len(direct) < 2:
        return None
    low, *_, high = sorted(direct, key=lambda reading: reading.fraction)
    if high.fraction - low.fraction <= _AGREE_WITHIN:
        return None
    return low, high


# Memory of training: its limits, its growth, and the activations kept for the backward pass.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Memory limits of a trial; unknown until the machine is known."""

    limit_bytes: int | None = None
    """Limit of the whole device, or of RAM if `limit_is_ram`."""
    ram_bytes: int | None = None
    """RAM of this machine."""
    limit_is_ram: bool = False

    @classmethod
    def on(cls, environment: Environment, limit_bytes: int) -> MemoryLimits:
        """Return the limits on a machine, under the memory limit of the search."""
        return cls(
            limit_bytes=limit_bytes,
            ram_bytes=environment.ram_bytes,
            limit_is_ram=environment.has_only_ram,
        )


class MemoryGrowth(FrozenModel):
    """Memory growth over a window without its first third, from stretch to stretch."""

    kind: Literal["host", "device"]
    """host: resident memory of the trial's process and its loader workers, without files and shared
    memory; device: memory of tensors in torch's allocator, all devices together."""
    bytes_per_batch: float
    """Mean growth per batch."""
    half_width: float
    """Half of its 95 % interval."""
    batches: int
    """Batches observed."""
    seconds: float
    """Seconds that these took."""
    last_bytes: int
    """Bytes held at the end."""

    @property
    def low(self) -> float:
        """Lower end of the interval, in bytes per batch."""
        return self.bytes_per_batch - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval, in bytes per batch."""
        return self.bytes_per_batch + self.half_width


class SavedBytes(FrozenModel):
    """Bytes that one forward pass keeps for the backward pass, without the model's parameters and buffers.

    Counted by storage: what tensors share counts once.
    """

    samples: int
    """Samples of the batch."""
    total_bytes: int
    """All bytes kept."""
    inside_bytes: int = 0
    """Bytes that only the repeated blocks keep."""
    inputs_bytes: int = 0
    """Bytes of the blocks' inputs that nothing outside of them keeps: they remain under
    checkpointing."""
    largest_bytes: int = 0
    """Most bytes that one block keeps, without its input: recomputing it takes them for a
    moment."""

    @property
    def least_saved_bytes(self) -> int:
        """Bytes that checkpointing each block saves at least: the peak may fall into a recomputation."""
        return max(0, self.inside_bytes - self.inputs_bytes - self.largest_bytes)

    @property
    def most_saved_bytes(self) -> int:
        """Bytes that it saves if the peak falls outside of all blocks."""
        return max(0, self.inside_bytes - self.inputs_bytes)


class PairedRatio(FrozenModel):
    """Ratio of two times, measured interleaved."""

    value: float
    """Median over the pairs."""
    sd: float | None
    """Standard error of the median; None with fewer than three pairs."""


class Activations(FrozenModel):
    """Bytes that a micro batch keeps for its backward pass, and the effect of checkpointing repeated blocks.

    Source: Chen, Xu, Zhang, Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    block: str | None
    """Class of the repeated blocks: among those in a ModuleList or a Sequential, the one that saves
    most; None if none saves anything."""
    blocks: int = 0
    """Calls of such a block in a forward pass."""
    whole: SavedBytes
    """Of a batch as the loader delivers it."""
    half: SavedBytes | None = None
    """Of a batch with half its samples; None if that could not be made."""
    forward: PairedRatio | None = None
    """Time of the blocks' forward pass over that of a step on the device alone: the cost of
    recomputing them; None without such blocks."""
    half_step: PairedRatio | None = None
    """Time of a step on half of the batch over one on the whole; None if that could not be made."""

    @property
    def bytes_per_sample(self) -> float:
        """Bytes kept per further sample."""
        return self._growth("total_bytes")

    def least_saved_bytes(self, samples: int) -> float:
        """Return the bytes that checkpointing saves at least, with this many samples in a micro batch."""
        return self._at("least_saved_bytes", samples)

    def most_saved_bytes(self, samples: int) -> float:
        """Return the bytes that checkpointing saves at most, with this many samples in a micro batch."""
        return self._at("most_saved_bytes", samples)

    def _at(self, name: str, samples: int) -> float:
        base: int = getattr(self.whole, name)
        return max(0.0, base + self._growth(name) * (samples - self.whole.samples))

    def _growth(self, name: str) -> float:
        """Return the bytes per further sample, from two sizes: weights that autocast converted do not grow."""
        whole: int = getattr(self.whole, name)
        if self.half is None or self.half.samples >= self.whole.samples:
            return whole / self.whole.samples
        half: int = getattr(self.half, name)
        return max(0.0, (whole - half) / (self.whole.samples - self.half.samples))


# Ranks of a group: each one's own figures, gradient exchange, and slow ranks.
#
# In step, all ranks have the slowest one's throughput; the slow rank shows in what each reaches
# alone.


# Share of the other ranks' median below which a rank counts as slow; clocks and other processes
# make ranks differ by a few per cent. Our own convention.
_UNEVEN = 0.9
_SIDES: tuple[Literal["loader", "device"], ...] = ("loader", "device")


class RankFigures(FrozenModel):
    """One rank's part of a trial. Throughput in samples/s, fractions in 0..1."""

    rank: int
    """Number of the rank in the group."""
    host: int = 0
    """Number of its machine among those of the group."""
    device: str
    """torch's name of its device, such as "cuda:1"."""
    samples_per_s: float
    """Throughput of its own samples."""
    data_wait_fraction: float | None
    """Share of its loop's time spent waiting for its loader."""
    busy_fraction: float | None
    """Busy share of its device; None if unknown."""
    peak_memory_bytes: int
    """Peak memory of its device, or of its process tree on the CPU."""
    loader_ceiling: float | None = None
    """Throughput of its loader alone, while the other ranks' loaders ran too; None if not
    measured."""
    device_ceiling: float | None = None
    """Throughput of its device alone, on batches in its memory, without gradient exchange; None if
    not measured."""


class Communication(FrozenModel):
    """Cost of gradient exchange in an optimizer step, on batches in the devices' memory."""

    step_s: float
    """Seconds of a step with gradient exchange."""
    step_alone_s: float
    """Seconds of the same step without it (no_sync)."""
    exchange_s: float
    """Seconds of the exchange alone: an all-reduce of the gradients' bytes, bucket by bucket."""
    bytes_exchanged: int
    """Bytes of the gradients, over all buckets."""

    @property
    def exposed_s(self) -> float:
        """Seconds that the exchange adds to a step."""
        return max(0.0, self.step_s - self.step_alone_s)

    @property
    def exposed_fraction(self) -> float:
        """Share of a step that the exchange adds."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def hidden_fraction(self) -> float:
        """Share of the exchange hidden behind the backward pass."""
        if self.exchange_s <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.exposed_s / self.exchange_s))


class SlowSide(NamedTuple):
    """Side of a rank that is slower than on the other ranks."""

    side: Literal["loader", "device"]
    fraction: float
    """Its throughput alone over the other ranks' median."""


def name_devices(ranks: Sequence[RankFigures]) -> dict[int, str]:
    """Return each rank's device by the rank's number; over several hosts, with the host's number."""
    if len({rank.host for rank in ranks}) > 1:
        return {rank.rank: f"host {rank.host}, {rank.device}" for rank in ranks}
    return {rank.rank: rank.device for rank in ranks}


def uneven_ranks(ranks: Sequence[RankFigures]) -> dict[int, SlowSide]:
    """Return the ranks whose loader or device alone reaches less than 90 % of the other ranks' median."""
    found: dict[int, SlowSide] = {}
    for side in _SIDES:
        rates = {
            rank.rank: rate
            for rank in ranks
            if (rate := getattr(rank, f"{side}_ceiling")) is not None
        }
        for number, rate in rates.items():
            others = [other for its_number, other in rates.items() if its_number != number]
            # Of a rank with two slow sides, the loader counts
            if others and number not in found and rate < _UNEVEN * median(others):
                found[number] = SlowSide(side, rate / median(others))
    return found


# Sequence lengths: tokens per sample, padding, and the forecasts for bucketing and packing
# (models/forecast).


class Tokens(FrozenModel):
    """Tokens of a trial's batches: elements of the first integer tensor of two dimensions, (batch, length)."""

    per_sample: float
    """Mean tokens per sample over the window's batches, including padding."""
    relative_sd: float | None = None
    """Relative standard error of `per_sample`; None for a single batch."""
    batches: int
    """Batches counted."""
    shortest: int
    """Padded length of the shortest batch."""
    longest: int
    """Padded length of the longest batch."""
    padding: _Fraction | None = None
    """Share of padding by the batches' own masks, during the warm-up; None if a batch has no
    mask."""


class LengthStep(FrozenModel):
    """Time of training on a batch of a given longest sample."""

    longest: int
    """Tokens of its longest sample."""
    padded: int
    """Length to which the batch was padded."""
    seconds: float
    """Median seconds of one micro batch on the device alone."""
    relative_sd: float
    """Relative standard error of `seconds`."""


class BucketForecast(FrozenModel):
    """Effect of batches of similar lengths, from the lengths of items and the time of batches by length."""

    pool_batches: int
    """Batches sorted by length at once."""
    random_padding: _Fraction
    """Share of padding in random batches."""
    bucket_padding: _Fraction
    """Share of padding in batches of similar lengths."""
    device_time: float | None = None
    """Device time per sample in batches of similar lengths, over that in current batches; None if
    batches of several lengths were not timed."""
    device_time_ci: tuple[float, float] | None = None
    """Its 95 % interval, from resampled items and repeats."""


class PackForecast(FrozenModel):
    """Effect of packing several samples into a row, from the lengths of items and the time of batches by length."""

    row_tokens: int
    """Tokens of a row: the length of the longest timed batch."""
    samples_per_row: float
    """Mean samples per row."""
    padding: _Fraction
    """Empty share of a row, by first fit decreasing."""
    device_time: float
    """Device time per sample in full rows, over that in current batches."""
    device_time_ci: tuple[float, float]
    """Its 95 % interval, from resampled items and repeats, and the cost of attention over whole
    rows."""


class Lengths(FrozenModel):
    """Lengths of items, drawn at random if the dataset allows it."""

    items: int
    """Items whose length was read."""
    mean: float
    """Mean tokens of an item."""
    median: float
    """Median tokens of an item."""
    longest: int
    """Tokens of the longest item read."""
    padding: _Fraction | None = None
    """Share of padding in current batches, by their masks or by the items' mean; None if neither is
    known."""
    steps: tuple[LengthStep, ...] = ()
    """Batches of these items, timed on the device interleaved; () if not measured."""
    buckets: BucketForecast
    packed: PackForecast | None = None
    """None if batches of several lengths were not timed."""


# The window and the measurement: raw blocks, and the figures derived from them.
#
# The worker fills a `Window`; `models.statistics` calculates the throughput and its interval. Raw
# data is kept next to what is derived from it.


_THRASHING_FROM = 2
"""Allocator retries within a window from which training lacks memory: our convention, after
Composer, which lowers the micro batch once two consecutive batches had some. A single one has other
causes too: fragmentation with varying lengths, cuDNN's trials of a new shape. Source:
composer/trainer/trainer.py, _handle_thrashing_in_automicrobatching."""
_AHEAD_FROM = 0.25
"""Batches of queued work, when the next batch arrives, from which the device sets the pace: our own
convention. More than one can't be required: a driver queues about a thousand launches, fewer than a
step of a large model has."""


class Block(FrozenModel):
    """Stretch of the loop between two edges, at each of which the device had finished all previous work."""

    samples: int
    """Samples delivered."""
    batches: int
    """Batches delivered."""
    seconds: float
    """Wall time."""
    data_wait_s: float
    """Seconds from requesting these batches to having them. If the device lags behind the host, a
    single block's may exceed the block; the sum over a window's blocks is part of their time."""
    starved_s: float | None = None
    """Part of these seconds without a ready batch, so without the cost of taking one. None if not
    known separately."""
    ready_at_end: int | None = None
    """Ready batches when the block's last one was launched; None if unknown."""
    made: float | None = None
    """Samples that workers made meanwhile, delivered or not; None if not counted."""
    is_warm_up: bool = False
    """The block precedes the window: batches may have come faster than the loader makes them."""

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for data; only those without a ready batch, if known separately."""
        return self.data_wait_s if self.starved_s is None else self.starved_s


class Restart(FrozenModel):
    """End of an epoch and start of the next, until the queue that workers filled in advance is used up.

    Batches right after a restart were made while the loop waited for the first of them, so they
    belong to it.
    """

    seconds: float
    """Seconds from the end of the last batch."""
    samples: int
    """Samples delivered in these seconds."""


class Window(FrozenModel):
    """Raw record of a timed window."""

    blocks: tuple[Block, ...] = Field(min_length=1)
    """Blocks in order."""
    restarts: tuple[Restart, ...] = ()
    """Epoch restarts taken out of the blocks; none if the blocks cover whole epochs."""
    whole_epochs: bool
    """The blocks cover whole epochs including restarts. Otherwise restarts are added in
    proportion."""
    epoch_samples: int | None
    """Samples of an epoch; None if no epoch ended and the dataset has no length."""
    expected_restart_s: float = 0.0
    """Assumed seconds of a restart if none fell into the window, from the first start of the
    loader."""
    queue_capacity: int
    """Most batches that workers prepare in advance: min(prefetch_factor * num_workers, batches of an
    epoch)."""
    workers: int = 0
    """Loader processes that make batches; 0 without any, or if unknown."""
    asked: int | None = None
    """Batches requested from them at the last edge, including ready ones; below the capacity while
    the queue is kept short. None if unknown."""
    queue_at_start: int | None
    """Ready batches at the first edge; None if the platform has no such count."""
    queue_at_end: int | None
    """Ready batches at the last edge."""
    take_s: float | None = None
    """Median seconds of taking a ready batch, from the warm-up; None if none was ready."""
    host_ahead_s: float | None = None
    """Median over the blocks' ends of the seconds of work that the device still had when the next
    batch arrived. 0 if the device waited for the loader or the host. None if its events can't be
    timed, and on the CPU."""
    warm_up_batches: int
    """Batches before the window."""
    warm_up_s: float
    """Seconds before the window, from the first batch."""
    is_drained: bool
    """The queue that a slow first step had filled was used up before the window."""
    is_steady: bool
    """No slow step between the warm-up and the window."""
    stopped_by: Literal["precision", "time", "deadline"]
    """Reason for its end: sufficient precision, the longest time of a window, or the trial's
    deadline."""

    @property
    def batch_s(self) -> float:
        """Mean seconds per batch in the blocks."""
        batches = sum(block.batches for block in self.blocks)
        return sum(block.seconds for block in self.blocks) / batches

    @property
    def raw_samples_per_s(self) -> float:
        """Samples over seconds of the blocks, without any correction."""
        seconds = sum(block.seconds for block in self.blocks)
        return sum(block.samples for block in self.blocks) / seconds

    @property
    def starved_s(self) -> float:
        """Seconds in which the loop waited and no batch was ready."""
        return sum(block.waited_s for block in self.blocks)

    @property
    def made(self) -> float | None:
        """Samples that workers made in the blocks; None if some block has no count."""
        counts = [block.made for block in self.blocks if block.made is not None]
        return sum(counts) if len(counts) == len(self.blocks) else None

    @property
    def is_held_by_device(self) -> bool:
        """Return True if the device had work left whenever the next batch arrived, so that it sets the pace."""
        return self.host_ahead_s is not None and self.host_ahead_s >= _AHEAD_FROM * self.batch_s


class Interval(FrozenModel):
    """A figure with its 95 % interval: a throughput in samples/s, a ratio of two, a number of samples."""

    value: float
    """Estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end; may be infinite."""

    @property
    def relative_half_width(self) -> float:
        """Half of the interval over the value."""
        return (self.high - self.low) / 2 / self.value if self.value > 0 else inf


SwitchName = Literal[
    "anomaly",
    "deterministic",
    "tracer",
    "profiler",
    "denormals",
]
"""A mode of the process that slows steps down: anomaly detection of autograd; deterministic
algorithms; a trace or profile function of Python; torch's profiler; arithmetic on subnormal
values."""


class SwitchGain(FrozenModel):
    """Ratio of two step times, with a mode on and with it switched off from outside, in turn."""

    name: SwitchName
    """The mode that was switched."""
    ratio: Interval
    """Time of an optimizer step with the mode over that without it, on batches at hand; its 95 %
    interval from the rounds."""
    rounds: int
    """Pairs of stretches with and without it."""
    steps: int
    """Optimizer steps of a stretch."""
    share: float | None = None
    """Share of subnormal values among those that a step computes; None for other modes."""
    is_at_one_thread: bool = False
    """Both sides computed with one thread, of several that training uses."""


class MemorySample(FrozenModel):
    """Peak memory of a trial, and its source."""

    peak_bytes: int
    """Peak that is compared with the limit: what was measured, and `to_come_bytes`."""
    source: str
    """Source of the measured part, such as "max reserved + outside torch" or "PSS of the process
    tree"."""
    to_come_bytes: int = 0
    """Part of the peak that was not reached yet: what loader workers will still copy of this
    process's memory, by the growth that was measured. 0 if the limit is not on RAM."""
    reserved_bytes: int | None = None
    """Peak that torch's allocator reserved, on an accelerator."""
    outside_bytes: int | None = None
    """Device memory outside torch's allocator, on an accelerator: this process's context, kernels
    and libraries, and other processes. The limit is on the whole device, so their memory counts
    too; see `Measurement.conditions` (`others_memory_bytes`)."""
    allocated_bytes: int | None = None
    """Peak of tensors in the reserved memory, on an accelerator."""
    alloc_retries: int | None = None
    """Times within the window that torch's allocator found no memory, freed its cached blocks and
    retried; each synchronizes the device. None if the device does not count them."""

    @property
    def is_thrashing(self) -> bool:
        """Return whether training lacked memory in the window: the allocator freed its cached blocks twice or more.

        The peak is then what the trial was allowed, not what it needs.
        """
        return self.alloc_retries is not None and self.alloc_retries >= _THRASHING_FROM


with with_field_copy():

    class Ceilings(FrozenModel):
        """Measurements of each side alone, after the window."""

        loader: Ceiling | None = None
        """Loading batches without training; None if not measured."""
        device: Ceiling | None = None
        """Training on batches in the device's memory; None if not measured."""
        copy: Ceiling | None = None  # type: ignore[assignment] # hides a method
        """Copying batches to the device without training; None without such a device, or if not
        measured."""


class Measurement(FrozenModel):
    """Figures of one run. Throughput in samples/s, fractions in 0..1, memory in bytes."""

    samples_per_s: float
    """Samples over seconds of the window, including epoch restarts, corrected for prefetched
    batches."""
    samples_per_s_ci: tuple[float, float]
    """95 % interval for another run of the same settings: batch means of the window, joined with
    the usual run-to-run variation on such a device; reports use the learned one. The upper end is
    infinite for a window of one block."""
    busy_fraction: float | None
    """Busy fraction by GPM, else by NVML's samples, else by the loop's waits; `busy_source` names
    the source used."""
    busy_source: str | None
    """Source of the busy fraction; None if there is none."""
    busy_readings: tuple[BusyReading, ...] = ()
    """Readings of all sources."""
    fullness: Fullness | None = None
    """Utilization of the device's units; None if the device does not report it."""
    conditions: DeviceConditions | None = None
    """Conditions of the device; None if it does not report them."""
    host_load: HostLoad | None = None
    """Load of the host's cores; None if the kernel does not report it."""
    data_wait_fraction: float | None
    """Share of the loop's time spent waiting for the loader; None if a script without a DataLoader
    doesn't show it."""
    peak_memory_bytes: int
    """Peak memory that is compared with the limit."""
    loader_ceiling: float | None = None
    """Throughput of the loader alone; None if not measured."""
    device_ceiling: float | None = None
    """Throughput of the device on batches in its memory; None if not measured."""
    copy_ceiling: float | None = None
    """Throughput of copying batches to the device, from memory pinned as in the trial; None without
    such a device, or if not measured."""
    host_ceiling: float | None = None
    """Throughput of the host that takes ready batches and launches their work; None if the host is
    the device, or if not measured."""
    ceilings: Ceilings | None = None
    """Source of the ceilings above, if this trial measured them itself."""
    breakdown: TimeBreakdown | None = None
    """Shares of the wall time; None if not requested."""
    loader_costs: LoaderCosts | None = None
    """Costs of data inside the loader; None if not requested."""
    tokens: Tokens | None = None
    """Tokens per sample; None if batches have no lengths."""
    lengths: Lengths | None = None
    """Lengths of items, and forecasts for bucketing; None if not requested, or if all are equal."""
    activations: Activations | None = None
    """Bytes kept for the backward pass; None if not requested, in groups, and for compiled
    models."""
    modes: Modes | None = None
    """Debugging modes of the process after the window; None if not requested."""
    switches: tuple[SwitchGain, ...] = ()
    """Gains of switching a mode off; without those that are off, or that nothing outside of the
    script can switch."""
    growth: tuple[MemoryGrowth, ...] = ()
    """Memory growth in the window (rank 0's in a group); none if the window was too short."""
    ranks: tuple[RankFigures, ...] = ()
    """Each rank's own figures, in order; () for a single process. All other fields are the group's:
    its throughput and window, the worst rank's waits, busy fraction and memory."""
    communication: Communication | None = None
    """Cost of gradient exchange; None for a single rank, or if not measured."""
    notes: tuple[Note, ...] = ()
    """Notes on disturbances of the window and on failed measurements after it. In a group,
    `on_ranks` lists the ranks that a note is about, if not all."""
    after_s: float = 0.0
    """Seconds of all measurements after the window; a run that measures only its window is shorter
    by these."""
    startup_s: float
    """Seconds from the trial's start to its first batch, including the workload's build."""
    build_s: float
    """Part of the start-up in user code: unpickling, building, the loader's first batch."""
    memory: MemorySample
    window: Window
    loss: float
    """Loss of the last step, to detect a run that does not train."""
    skipped_steps: int = 0
    """Optimizer steps that the GradScaler skipped, including the warm-up."""
    earlier_trials: int = 0
    """Trials that its process measured before. With some, it built nothing, and their caches,
    allocator and heap remained. 0: none, as in a training's own process; a probe may have come
    before."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Raw blocks of the window."""
        return self.window.blocks

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second including padding; None if batches have no lengths."""
        return None if self.tokens is None else self.samples_per_s * self.tokens.per_sample

    def busy_by(self, source: str | None) -> float | None:
        """Return the busy fraction by a source; None if it has none."""
        if source == self.busy_source:
            return self.busy_fraction
        for reading in self.busy_readings:
            if reading.source == source:
                return reading.fraction
        return None

    @property
    def host_fraction(self) -> float | None:
        """Share of the loop's time in which the device is idle until the host launches more work.

        From the breakdown if there is one, else the time not spent waiting for data or on the
        device's own work. 0 if the device sets the pace; None if unknown, and on the CPU.
        """
        if self.window.host_ahead_s is None:
            return None
        if self.window.is_held_by_device:
            return 0.0
        if self.breakdown is not None:
            return self.breakdown.idle.fraction

        # Launching may limit the device alone as well: then the driver's reading is the lower one
        busy = list[float]()
        if self.device_ceiling is not None:
            busy.append(self.samples_per_s / self.device_ceiling)
        if self.busy_fraction is not None and self.busy_source != WAIT_SOURCE:
            busy.append(self.busy_fraction)
        if not busy or self.data_wait_fraction is None:
            return None
        return max(0.0, 1.0 - self.data_wait_fraction - min(busy))

    @property
    def joules_per_sample(self) -> float | None:
        """Energy of the device per sample: mean power over throughput. None if the device does not report it."""
        if self.conditions is None or self.conditions.power_w is None or self.samples_per_s <= 0:
            return None
        return self.conditions.power_w / self.samples_per_s


def keep_ceilings(book: CeilingBook, config: TrainingConfig, run: Measurement) -> None:
    """Enter a run's ceilings and its throughput into the book.

    Args:
        book: Ceilings measured so far.
        config: Configuration of the run.
        run: Its measurement.
    """
    if run.ceilings is not None:
        for side in SIDES:
            book.keep(side, config, getattr(run.ceilings, side))
    book.show(config, run.samples_per_s_ci[0])
