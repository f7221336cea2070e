"""`Measurement`: what a trial has measured, from the blocks of its window to memory, clocks and ranks.

Data alone: `autotune.worker` fills it in, `autotune.models` and `autotune.report` read it.
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

# What a host's cores did while a window ran: how much of them the trial had, and how much other
# programs took.
#
# Filled by the worker from two readings at the window's edges, stored raw beside the rate that it
# explains; what others took is derived. `note_on_load` turns it into a note.


_OTHERS_LEAST = 0.10
"""Share of the cores from which on other programs count: two cores lose that to an editor and a
browser at work, and more explains a rate by itself. Our own convention."""
_FULL_FROM = 0.5
"""Share of the cores from which on programs hold each other up: hyperthreads then share a core, and
fewer cores stand idle than are taken. Our own convention."""
_LEAST_S = 0.05
"""CPU time that others must have taken: the kernel counts it in hundredths of a second, for each
core by itself. Our own convention."""


class HostLoad(FrozenModel):
    """CPU time on one host during a window; of a group over several hosts that of the one that others loaded most.

    Source: man 5 proc, /proc/stat and /proc/pid/stat; Linux kernel, admin-guide/cgroup-v2
    (cpu.stat), accounting/psi.
    """

    seconds: Annotated[float, Field(gt=0)]
    """Between the two readings; a little more than the window."""
    cores: Annotated[int, Field(ge=1)]
    """That the trial may use at once: affinity and cgroup quota."""
    reachable_cores: Annotated[int, Field(ge=1)]
    """That it may run on; more than `cores` where a quota limits it."""
    busy_s: Annotated[float, Field(ge=0)]
    """CPU time of all programs on the reachable cores, what the hypervisor gave to other machines
    included."""
    own_s: Annotated[float, Field(ge=0)]
    """Of the trial's processes: every rank on the host, and their loader workers."""
    stolen_s: Annotated[float, Field(ge=0)]
    """The share of `busy_s` that went to other virtual machines."""
    group_s: Annotated[float, Field(ge=0)] | None = None
    """Of all processes under the same quota; None where there is no quota, and where its group does
    not tell."""
    pressure_s: Annotated[float, Field(ge=0)] | None = None
    """In which some process that could run had to wait for a core. More workers than cores wait for
    each other, so nothing is judged by it; None where the kernel does not count it."""

    @property
    def others_cores(self) -> float:
        """Of the cores that the trial may use, how many other programs took from it in the mean.

        A quota leaves cores unused; what others take of these costs the trial nothing.
        """
        beside = self.reachable_cores - self.cores
        outside = (self.busy_s - self.own_s) / self.seconds - beside
        inside = 0.0 if self.group_s is None else (self.group_s - self.own_s) / self.seconds
        return min(max(0.0, outside, inside), float(self.cores))

    @property
    def is_loaded(self) -> bool:
        """Whether others took enough, of cores that are not mostly idle, to hold the trial up."""
        used = self.others_cores + self.own_s / self.seconds
        is_much = (
            self.others_cores >= _OTHERS_LEAST * self.cores
            and self.others_cores * self.seconds >= _LEAST_S
        )
        return is_much and used >= _FULL_FROM * self.cores


def join_loads(loads: Iterable[HostLoad | None]) -> HostLoad | None:
    """Several windows as one; None where none is known."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return HostLoad(
        cores=min(load.cores for load in known),
        reachable_cores=min(load.reachable_cores for load in known),
        group_s=_sum(load.group_s for load in known),
        pressure_s=_sum(load.pressure_s for load in known),
        **{
            name: sum(getattr(load, name) for load in known)
            for name in ("seconds", "busy_s", "own_s", "stolen_s")
        },
    )


def note_on_load(load: HostLoad | None) -> Note | None:
    """Return that other programs slowed a window; None where they did not, or nothing is known."""
    if load is None or not load.is_loaded:
        return None
    return cores_taken(others_cores=load.others_cores, cores=load.cores)


def _sum(parts: Iterable[float | None]) -> float | None:
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


# What a device did while a window ran: clocks, power, temperature, throttling, and who else used
# it.
#
# Filled by the worker, stored beside the figures that it explains; () and None stand for what the
# device does not report. `remarks_on` and `note_on_others` turn it into notes. Source: NVML API
# reference, nvmlDeviceGetClockInfo, nvmlDeviceGetTotalEnergyConsumption,
# nvmlDeviceGetCurrentClocksEventReasons.


ThrottleReason = Literal["power_cap", "thermal", "power_brake", "hardware_slowdown"]
"""Why a GPU ran below the clock that it was set to; an idle GPU and clocks that a user has set are
not among them."""

_CLOCK_MOVED_BY = 0.03
"""Share by which a clock between a window's edges moves the rate by as much as what a search
decides on: our own convention."""
OTHERS_LEAST_BYTES = 256 * 2**20
"""Device memory from which on others count: less than another process that computes takes. What lay
outside torch's allocator, a context and loaded kernels, was 749 MiB and more on an H200 and an H100
(benchmarks/results/gpu-*.json). Our own convention."""
OTHERS_LEAST_BUSY = 0.05
"""Share of time that another process has to compute before it moves a rate by what a search decides
on: our own convention."""


class DeviceConditions(FrozenModel):
    """One device during a window; of several devices the sum of energy and power, and otherwise the worst of them."""

    sm_clock_mhz: tuple[int, int] | None = None
    """Clock of the multiprocessors at the window's two edges."""
    max_sm_clock_mhz: int | None = None
    """The highest that the device can be set to."""
    memory_clock_mhz: tuple[int, int] | None = None
    """Clock of the memory at the window's two edges."""
    temperature_c: tuple[int, int] | None = None
    """At the window's two edges, in degrees Celsius."""
    power_w: Annotated[float, Field(ge=0)] | None = None
    """Mean over the window: energy over time; where energy is not counted, the mean of the two
    edges."""
    energy_j: Annotated[float, Field(ge=0)] | None = None
    """Drawn by the whole device during the window. The sensor behind it samples only a part of the
    time: compare windows of a second and more. Source: Yang et al., Part-time Power Measurements,
    arXiv:2312.02741."""
    throttle_reasons: tuple[ThrottleReason, ...] = ()
    """Those at either edge of the window, or counted between them, sorted."""
    others_memory_bytes: Annotated[int, Field(ge=0)] | None = None
    """Memory of the device in use before this process opened it."""
    others_busy_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of time in which the device ran kernels right before this process opened it; None as
    well where an earlier trial may have been the one that ran them."""
    persistence_mode: bool | None = None
    """The driver keeps the device initialised while it is unused."""
    tf32_overrides: tuple[str, ...] = ()
    """Variables of the environment that change what float32 means, as NAME=value:
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE."""

    @property
    def clock_moved_by(self) -> float | None:
        """By what share the multiprocessors' clock changed from one edge to the other; None where it is not known."""
        if self.sm_clock_mhz is None or min(self.sm_clock_mhz) <= 0:
            return None
        first, last = self.sm_clock_mhz
        return last / first - 1

    @property
    def has_moved(self) -> bool:
        """Whether the clock changed by enough to move the rate."""
        return self.clock_moved_by is not None and abs(self.clock_moved_by) >= _CLOCK_MOVED_BY

    @property
    def is_at_power_limit(self) -> bool:
        """Whether the power limit lowered the clock: normal under heavy load, and no disturbance."""
        return "power_cap" in self.throttle_reasons

    @property
    def disturbances(self) -> tuple[ThrottleReason, ...]:
        """What lowered the clock beside the power limit: the same load may run faster at another time."""
        return tuple(reason for reason in self.throttle_reasons if reason != "power_cap")

    @property
    def has_others(self) -> bool:
        """Whether another process had the device open, by its memory.

        Kernels alone do not show that: a process of ours that has just ended may have run them.
        """
        return (
            self.others_memory_bytes is not None and self.others_memory_bytes >= OTHERS_LEAST_BYTES
        )


def remarks_on(conditions: DeviceConditions) -> Iterator[Note]:
    """What disturbed a window."""
    if conditions.disturbances:
        yield clock_lowered(reasons=conditions.disturbances)
    if conditions.has_moved and conditions.sm_clock_mhz is not None:
        first, last = conditions.sm_clock_mhz
        yield clock_moved(first_mhz=first, last_mhz=last)


def note_on_others(conditions: DeviceConditions | None) -> Note | None:
    """The note of a search whose device was in use before it began; None where it was not."""
    if conditions is None or not conditions.has_others:
        return None
    busy = conditions.others_busy_fraction
    return others_on_device(
        held_bytes=conditions.others_memory_bytes or 0,
        busy_fraction=None if busy is None or busy < OTHERS_LEAST_BUSY else busy,
    )


# How busy the device was, by every source that measured it, and how full the busy time was.


PROFILER_SOURCE = "profiler: kernels and copies"
GPM_SOURCE = "GPM graphics utilization"
NVML_SOURCE = "NVML utilization"
WAIT_SOURCE = "1 - data wait"
_RANKS = {PROFILER_SOURCE: 0, GPM_SOURCE: 1, NVML_SOURCE: 2, WAIT_SOURCE: 4}
_AGREE_WITHIN = 0.10  # our convention

_Fraction = Annotated[float, Field(ge=0, le=1)]


class BusyReading(FrozenModel):
    """A busy fraction, and where it comes from."""

    fraction: _Fraction
    """Of the time, in 0..1."""
    source: str
    """What told it, in a few words."""


class Fullness(FrozenModel):
    """How full the device's time was, by NVIDIA's GPM during the window, in 0..1; None where a metric is not given.

    Source: NVML API reference, GPM metrics 2 (SM_UTIL), 3 (SM_OCCUPANCY), 5 (ANY_TENSOR_UTIL), 10
    (DRAM_BW_UTIL).
    """

    sm_fraction: _Fraction | None
    """"Percentage of SMs that were busy", as NVML has it; streaming multiprocessors."""
    sm_occupancy: _Fraction | None
    """"Percentage of warps that were active vs theoretical maximum"."""
    tensor_fraction: _Fraction | None
    """"Percentage of time the GPU's SMs were doing ANY tensor operations"."""
    dram_fraction: _Fraction | None
    """"Percentage of DRAM bw used vs theoretical maximum"."""


def source_rank(source: str) -> int:
    """How much a source is worth, 0 for the best.

    The profiler sees every kernel and copy. GPM reports the "percentage of time any
    compute/graphics app was active on the GPU" from one edge of a window to the other; NVML's
    samples are means over 1/6 s to 1 s by product, so that none to three of them lie within 0.6 s.
    The loop's waits show the loader alone: where launches delay the device, they read 1. Source:
    NVML API reference, nvmlGpmMetricId_t (GRAPHICS_UTIL) and nvmlUtilization_t.
    """
    return _RANKS.get(source, 3)  # a source of another version is worth more than the loop's waits


def best_common_source(available: Sequence[Collection[str]]) -> str | None:
    """The best of the sources that all configurations have, an entry each with its sources; None without one."""
    first = available[0] if available else ()
    common = [source for source in first if all(source in sources for sources in available)]
    return min(common, key=source_rank, default=None)


def best_direct_reading(readings: Sequence[BusyReading]) -> BusyReading | None:
    """Return the reading of the best source but the loop's waits; None where only these are known."""
    direct = [reading for reading in readings if reading.source != WAIT_SOURCE]
    return min(direct, key=lambda reading: source_rank(reading.source), default=None)


def disagreement(readings: Sequence[BusyReading]) -> tuple[BusyReading, BusyReading] | None:
    """The lowest and the highest reading where they lie over 10 points apart, else None.

    The loop's waits don't count against what a device itself reports: they are left out where there
    are other sources.
    """
    direct = [reading for reading in readings if reading.source != WAIT_SOURCE]
    if len(direct) < 2:
        return None
    low, *_, high = sorted(direct, key=lambda reading: reading.fraction)
    return (low, high) if high.fraction - low.fraction > _AGREE_WITHIN else None


# Memory in training: how it grows, and what is kept for the backward pass.
#
# Data alone: the worker measures it (worker, worker/after_window/activations), analysis and
# diagnosis judge.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The memory that a trial may take; unknown until the machine is."""

    limit_bytes: int | None = None
    """Of the device as a whole, or of RAM where `limit_is_ram`."""
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
    """How memory has grown in a window, from one stretch of it to the next; what came in its first third left out."""

    kind: Literal["host", "device"]
    """host: what the trial's process and its loader workers have resident beside files and shared
    memory; device: what tensors take of the allocator's memory, of several devices together."""
    bytes_per_batch: float
    """Mean growth."""
    half_width: float
    """Half of its 95 % interval."""
    batches: int
    """Over which it was looked at."""
    seconds: float
    """That these took."""
    last_bytes: int
    """What was held at the end."""

    @property
    def low(self) -> float:
        """The interval's lower end, in bytes a batch."""
        return self.bytes_per_batch - self.half_width

    @property
    def high(self) -> float:
        """The interval's upper end."""
        return self.bytes_per_batch + self.half_width


class SavedBytes(FrozenModel):
    """What one forward pass keeps for the backward pass, the model's parameters and buffers left out.

    Bytes are those of storages: what tensors share counts once.
    """

    samples: int
    """Samples of the batch."""
    total_bytes: int
    """All that is kept."""
    inside_bytes: int = 0
    """What the repeated blocks keep, and nothing outside of them."""
    inputs_bytes: int = 0
    """What the blocks are given, as far as nothing outside of them keeps it: what is left of them
    by checkpointing."""
    largest_bytes: int = 0
    """The most that one block keeps, its input left out: what computing it once more takes for a
    moment."""

    @property
    def least_saved_bytes(self) -> int:
        """What checkpointing each block saves at least: the peak may fall where one of them is computed once more."""
        return max(0, self.inside_bytes - self.inputs_bytes - self.largest_bytes)

    @property
    def most_saved_bytes(self) -> int:
        """What it saves where the peak falls outside of all blocks."""
        return max(0, self.inside_bytes - self.inputs_bytes)


class PairedRatio(FrozenModel):
    """One time over another, both measured in turns."""

    value: float
    """Median over the turns."""
    sd: float | None
    """Standard error of that; None of fewer than three turns."""


class Activations(FrozenModel):
    """What a micro batch keeps for its backward pass, and what checkpointing the model's repeated blocks changes.

    Source: Chen, Xu, Zhang, Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    block: str | None
    """Class of the repeated blocks: of those that stand in a ModuleList or a Sequential, the one by
    which most is saved; None where none saves anything."""
    blocks: int = 0
    """How often such a block is called in a forward pass."""
    whole: SavedBytes
    """Of a batch as the loader delivers it."""
    half: SavedBytes | None = None
    """Of one of half its samples; None where that could not be made."""
    forward: PairedRatio | None = None
    """The blocks' forward pass over a step on the device alone: what computing them once more
    takes; None without such blocks."""
    half_step: PairedRatio | None = None
    """A step on half of the batch, over one on the whole; None where that could not be made."""

    @property
    def bytes_per_sample(self) -> float:
        """What a further sample adds to all that is kept."""
        return self._growth("total_bytes")

    def least_saved_bytes(self, samples: int) -> float:
        """What checkpointing saves at least with so many samples in a micro batch."""
        return self._at("least_saved_bytes", samples)

    def most_saved_bytes(self, samples: int) -> float:
        """What it saves at most."""
        return self._at("most_saved_bytes", samples)

    def _at(self, name: str, samples: int) -> float:
        base: int = getattr(self.whole, name)
        return max(0.0, base + self._growth(name) * (samples - self.whole.samples))

    def _growth(self, name: str) -> float:
        """Bytes of a further sample: from two sizes, since weights that autocast has converted do not grow."""
        whole: int = getattr(self.whole, name)
        if self.half is None or self.half.samples >= self.whole.samples:
            return whole / self.whole.samples
        half: int = getattr(self.half, name)
        return max(0.0, (whole - half) / (self.whole.samples - self.half.samples))


# Each rank's own figures in the measurement of a group, what exchanging gradients takes, and which
# ranks are slower.
#
# Which rank slows the others down shows in what each rank reaches alone: in step they all have the
# slowest one's rate.


# Of the others' median: our convention; ranks differ by a few per cent through clocks and
# neighbours.
_UNEVEN = 0.9
_SIDES: tuple[Literal["loader", "device"], ...] = ("loader", "device")


class RankFigures(FrozenModel):
    """One rank's own part of a trial. Rates in samples per second, fractions in 0..1."""

    rank: int
    """Its number in the group."""
    host: int = 0
    """Number of its machine among those that the group is spread over."""
    device: str
    """torch's name for its device, such as "cuda:1"."""
    samples_per_s: float
    """Its own samples alone."""
    data_wait_fraction: float | None
    """Of its loop's time, waiting for its loader."""
    busy_fraction: float | None
    """Of its device; None where not known."""
    peak_memory_bytes: int
    """Of its device, or of its process tree on the CPU."""
    loader_ceiling: float | None = None
    """Its loader alone, while the other ranks' loaders ran too; None where not measured."""
    device_ceiling: float | None = None
    """Its device alone, on batches in its memory, without exchanging gradients; None where not
    measured."""


class Communication(FrozenModel):
    """What exchanging gradients takes of an optimizer step, on batches in the devices' memory."""

    step_s: float
    """A step as it is, gradients exchanged."""
    step_alone_s: float
    """The same step without exchange (no_sync)."""
    exchange_s: float
    """The exchange alone: an all-reduce of as many bytes as the gradients have, bucket by bucket."""
    bytes_exchanged: int
    """Bytes of the gradients, bucket by bucket."""

    @property
    def exposed_s(self) -> float:
        """Seconds by which the exchange makes a step longer."""
        return max(0.0, self.step_s - self.step_alone_s)

    @property
    def exposed_fraction(self) -> float:
        """Share of a step that the exchange adds."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def hidden_fraction(self) -> float:
        """Share of the exchange that lies behind the backward pass."""
        return (
            min(1.0, max(0.0, 1.0 - self.exposed_s / self.exchange_s))
            if self.exchange_s > 0
            else 0.0
        )


class SlowSide(NamedTuple):
    """The side of a rank that is slower than the other ranks'."""

    side: Literal["loader", "device"]
    fraction: float
    """What it reaches alone, of the other ranks' median."""


def name_devices(ranks: Sequence[RankFigures]) -> dict[int, str]:
    """Each rank's device, by the rank's number; where they stand on several hosts, with the host's, from 0."""
    is_over_hosts = len({rank.host for rank in ranks}) > 1
    return {
        rank.rank: f"host {rank.host}, {rank.device}" if is_over_hosts else rank.device
        for rank in ranks
    }


def uneven_ranks(ranks: Sequence[RankFigures]) -> dict[int, SlowSide]:
    """Ranks that slow the others down: loader or device alone reaches less than 90 % of the others' median."""
    found: dict[int, SlowSide] = {}
    for side in _SIDES:
        rates = {
            rank.rank: rate
            for rank in ranks
            if (rate := getattr(rank, f"{side}_ceiling")) is not None
        }
        for number, rate in rates.items():
            others = [other for its_number, other in rates.items() if its_number != number]
            if others and number not in found and rate < _UNEVEN * median(others):
                found[number] = SlowSide(side, rate / median(others))
    return found


# Sequences of many lengths: the tokens of a sample, how many of them are padding, and what other
# batches would win.
#
# Data alone: the worker counts and times, models/forecast calculates.


class Tokens(FrozenModel):
    """The tokens of a trial's batches: numbers in the first integer tensor of two dimensions, (batch, length)."""

    per_sample: float
    """Mean over the window's batches, padding included."""
    relative_sd: float | None = None
    """Standard error of that, as a share of it; None of a single batch."""
    batches: int
    """Batches that were counted."""
    shortest: int
    """Length of the batch that is padded least."""
    longest: int
    """Length of the longest batch."""
    padding: _Fraction | None = None
    """Share of padding by the batches' own masks, in the warm-up; None where a batch has no mask."""


class LengthStep(FrozenModel):
    """What training on a batch of so many samples takes where its longest is so long."""

    longest: int
    """Tokens of its longest sample."""
    padded: int
    """Length to which the batch was padded."""
    seconds: float
    """Of one micro batch on the device alone, the median of the repeats."""
    relative_sd: float
    """Standard error of that, as a share of it."""


class BucketForecast(FrozenModel):
    """What batches of like lengths would change, from the lengths of items and the time of batches of each length."""

    pool_batches: int
    """Batches that are sorted by length at once."""
    random_padding: _Fraction
    """Share of padding in batches that are put together at random."""
    bucket_padding: _Fraction
    """The same in batches of like lengths."""
    device_time: float | None = None
    """The device's time for a sample in batches of like lengths, over that in today's batches; None
    where the time of batches of several lengths was not measured."""
    device_time_ci: tuple[float, float] | None = None
    """Its 95 % interval, by resampled items and repeats."""


class PackForecast(FrozenModel):
    """What rows that several samples fill would change, from the lengths of items and the time of batches of each."""

    row_tokens: int
    """Tokens of a row: as long as the longest batch that was timed."""
    samples_per_row: float
    """Samples that fill a row."""
    padding: _Fraction
    """Share of a row that is left empty, where samples are put first where they fit, the longest
    first."""
    device_time: float
    """The device's time for a sample in full rows, over that in today's batches."""
    device_time_ci: tuple[float, float]
    """Its 95 % interval, by resampled items and repeats, and by what attention over a whole row
    costs."""


class Lengths(FrozenModel):
    """Lengths of items, drawn at random where the dataset allows it."""

    items: int
    """Items whose length was read."""
    mean: float
    """Tokens of an item."""
    median: float
    """Tokens that half of the items stay below."""
    longest: int
    """Tokens of the longest item that was read."""
    batch_samples: int
    """Samples of the batches that all else is told for."""
    padding: _Fraction | None = None
    """Share of padding in today's batches, by their masks or by the items' mean; None where neither
    tells."""
    steps: tuple[LengthStep, ...] = ()
    """Batches of these items, timed on the device in turns; () where not measured."""
    buckets: BucketForecast
    packed: PackForecast | None = None
    """None where the time of batches of several lengths was not measured."""


# What a trial has measured: the raw blocks of a timed window, and the Measurement that is made of
# them.
#
# The worker fills a Window; `analysis.rates` calculates the rate and its interval from it.
# Everything raw is kept beside what is derived.


_THRASHING_FROM = 2
"""Retries within a window from which on training has no room: our convention, after Composer, which
lowers the micro batch once two batches in a row had some. A single one has other causes too:
fragments where lengths vary, cuDNN's trials of a new shape. Source: composer/trainer/trainer.py,
_handle_thrashing_in_automicrobatching."""
_AHEAD_FROM = 0.25
"""Batches of work that a device has left when the next batch has come, where it sets the pace: our
own convention. More than one can't be asked for: a driver queues about a thousand launches, fewer
than a step of a large model has."""


class Block(FrozenModel):
    """A stretch of the loop between two edges, at each of which the device had done all that came before."""

    samples: int
    """Samples that came, counted."""
    batches: int
    """Batches that came."""
    seconds: float
    """Wall time."""
    data_wait_s: float
    """Seconds from asking the loader for these batches to having them. Where the device works
    behind the host, a single block's may be longer than the block; the sum over a window's blocks
    is a part of their time."""
    starved_s: float | None = None
    """The part of them in which no batch lay ready: without what taking a ready batch costs. None:
    not known apart."""
    ready_at_end: int | None = None
    """Batches that lay ready when the block's last one was launched; None where that is not known."""
    made: float | None = None
    """Samples that the loader's workers made meanwhile, whether or not they came; None where they
    are not counted."""
    is_warm_up: bool = False
    """It came before the window: batches may have come faster than the loader makes them."""

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for data: those in which no batch lay ready, where these are known apart."""
        return self.data_wait_s if self.starved_s is None else self.starved_s


class Restart(FrozenModel):
    """The end of an epoch and the start of the next, until the queue that workers have filled in advance is used up.

    Batches that come right after a restart were made while the loop waited for the first of them:
    they belong to it.
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
    """What one restart is taken to cost where none fell into the window, from the first start of
    the loader."""
    queue_capacity: int
    """Batches that workers prepare in advance at most: min(prefetch_factor * num_workers, batches
    of an epoch)."""
    workers: int = 0
    """Processes of the loader that make batches; 0 where there are none, or their number is not
    known."""
    asked: int | None = None
    """Batches that they were asked for at the last edge, those that lay ready included: fewer than
    the capacity while the queue is kept short. None where that is not known."""
    queue_at_start: int | None
    """Batches that were ready at the window's first edge; None where the platform has no such
    count."""
    queue_at_end: int | None
    """The same at the last edge."""
    take_s: float | None = None
    """Median seconds of taking a batch that lay ready, from the warm-up; None where none did."""
    host_ahead_s: float | None = None
    """Median over the blocks' ends: seconds of work that the device still had when the next batch
    had come. 0 where the device waited for the loader or for the host. None where its events can't
    be timed, and on the CPU."""
    warm_up_batches: int
    """Batches before the window."""
    warm_up_s: float
    """Seconds before the window, from the first batch on."""
    is_drained: bool
    """The queue that a slow first step had filled was used up before the window."""
    is_steady: bool
    """No slow step came between the warm-up and the window."""
    stopped_by: Literal["precision", "time", "deadline"]
    """What ended it: the rate was known well enough, the window's longest time, or the trial's
    deadline."""

    @property
    def batch_s(self) -> float:
        """Mean seconds of a batch in its blocks."""
        return sum(block.seconds for block in self.blocks) / sum(
            block.batches for block in self.blocks
        )

    @property
    def raw_samples_per_s(self) -> float:
        """Samples that came over the seconds of the blocks, without any correction."""
        return sum(block.samples for block in self.blocks) / sum(
            block.seconds for block in self.blocks
        )

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
    """Device memory in use outside torch's allocator, on an accelerator: this process's context,
    kernels and libraries, and what other processes use. The limit is on the device as a whole, so
    their memory counts too; how much that was is in `Measurement.conditions`
    (`others_memory_bytes`)."""
    allocated_bytes: int | None = None
    """Peak of what tensors took of the reserved memory, on an accelerator."""
    alloc_retries: int | None = None
    """Times within the window that torch's allocator found no room, freed its cached blocks, and
    tried again: each synchronises the device. None where the device does not count them."""

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
        """Batches moved to the device, and not trained on; None without such a device, and where
        not measured."""


class Measurement(FrozenModel):
    """What a trial has measured. Rates are in samples per second, fractions in 0..1, memory in bytes."""

    samples_per_s: float
    """Samples over seconds of the window, epoch restarts counted, corrected for what the queue
    held."""
    samples_per_s_ci: tuple[float, float]
    """Interval for another run of the same settings: batch means of the window, joined with the
    spread between runs that is usual on such a device; reports use the one that was learned. The
    upper end is infinite where the window has a single block."""
    busy_fraction: float | None
    """By GPM, else by NVML's samples, else by the loop's waits: a trial falls back where a source
    has no value, and `busy_source` names the one that was used."""
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
    """Of the loop's time, waiting for the loader; None where a script without a DataLoader doesn't
    show it."""
    peak_memory_bytes: int
    """What the memory limit is judged on."""
    loader_ceiling: float | None = None
    """Rate of the loader alone; None where not measured."""
    device_ceiling: float | None = None
    """Rate of the device on batches in its memory; None where not measured."""
    copy_ceiling: float | None = None
    """Rate of moving batches to the device, from memory pinned as in the trial; None without such a
    device, or where not measured."""
    host_ceiling: float | None = None
    """Rate of the host that takes batches that lie ready and launches their work; None where the
    host is the device, or where not measured."""
    ceilings: Ceilings | None = None
    """What the rates above come from, where this trial measured them itself."""
    breakdown: TimeBreakdown | None = None
    """Where the time goes; None where not asked for."""
    loader_costs: LoaderCosts | None = None
    """What data costs inside the loader; None where not asked for."""
    tokens: Tokens | None = None
    """The tokens of a sample; None where a batch has no lengths."""
    lengths: Lengths | None = None
    """Lengths of items, and what batches of like lengths would win; None where not asked for, or
    all are equal."""
    activations: Activations | None = None
    """What is kept for the backward pass; None where not asked for, in groups, and where the model
    is compiled."""
    growth: tuple[MemoryGrowth, ...] = ()
    """How memory has grown in the window, of a group that of rank 0; none where the window was too
    short to tell."""
    ranks: tuple[RankFigures, ...] = ()
    """Each rank's own figures, in order; () where there is one process. Everything else here is the
    group's: its rate and window, the worst rank's waits, busy fraction and memory."""
    communication: Communication | None = None
    """What exchanging gradients takes; None for a single rank, and where not measured."""
    remarks: tuple[Note, ...] = ()
    """What disturbed the window, what could not be measured after it, and why. Of a group: with
    `on_ranks`, the ranks that a remark is about, where it is not about all."""
    after_s: float = 0.0
    """Seconds that all this took after the window; a run that measures its window alone is so much
    shorter."""
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
    """Trials that its process had measured before: with some, it built nothing, and what they left
    in caches, in the allocator and in the heap was there. 0: none, as in a training's own process;
    a probe may have come before."""

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
        return next(
            (reading.fraction for reading in self.busy_readings if reading.source == source), None
        )

    @property
    def host_fraction(self) -> float | None:
        """Share of the loop's time in which the device has nothing to do until the host launches more.

        It is the breakdown's where there is one, else what the waits for data and the device's own
        work leave of the time. 0 where the device holds the loop; None where that is not known, and
        on the CPU.
        """
        if self.window.host_ahead_s is None:
            return None
        if self.window.is_held_by_device:
            return 0.0
        if self.breakdown is not None:
            return self.breakdown.idle.fraction
        # A device alone may be held by launching as well: then the driver's reading is the lower
        # one.
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
