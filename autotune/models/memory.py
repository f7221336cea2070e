"""Model peak memory from trials, and detect memory growth within a window.

Comes in: peaks that were measured or exceeded, and memory readings of a window. Goes out: a
`MemoryModel` with its uncertainty, the probability that a configuration fits, fitted lines, the
largest batch within the limit, and notes on growth. Pure functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Literal, NamedTuple

import numpy as np

from autotune.config.training_config import AMP_DTYPES, NEUTRAL_WITHOUT_WORKERS, TrainingConfig
from autotune.messages.search import largest_batch, memory_growth
from autotune.models.observations import ConfiguredPoint
from autotune.models.statistics import BATCH_MEANS, Floats, in_parts, t_95, with_latest
from autotune.note import Note
from autotune.policy import POLICY, Memory, Normal
from autotune.records.measurement import Measurement, MemoryGrowth, MemoryLimits
from autotune.records.result import Recommendation
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord, runs_of
from autotune.settings_table import SETTINGS
from autotune.space.ranges import whole_numbers
from autotune.space.space import ResolvedSpace

# The memory model: a fixed part, a part that grows with the micro batch, and what loader workers
# hold in RAM.
#
# Each precision has a fixed part and a growth of its own. Other settings add a fixed part, groups
# also a growth. cuDNN workspaces, taken where there is room, and samples of varying length break
# the law: such effects are in the residual spread, which is learned.
#
# Source: Bishop 2006, "Pattern Recognition and Machine Learning", section 3.3 (Bayesian linear
# regression: one peak is enough for a forecast with its uncertainty) and 3.5 (the spread, by its
# effective number of observations). The scales of the prior stand in policy and settings_table.


class Peak(NamedTuple):
    """Peak memory of a configuration."""

    config: TrainingConfig
    peak_bytes: int
    source: Literal["trial", "alone", "least"] = "trial"
    """trial: a whole run; alone: the device alone, in RAM, where a process keeps what it once had;
    least: ran out of memory at this peak, so it needs as much or more."""


_Value = Callable[[TrainingConfig], float]


class _Term(NamedTuple):
    """Term of the law: the prior of its coefficient, in shares of the highest peak, and its factor."""

    prior: Callable[[Memory], Normal]
    value: _Value
    grows: bool = False
    """The term is also multiplied by the batch, relative to the largest measured one."""
    of_workers: bool = False
    """The term counts only if the limit is on RAM."""
    is_in_bytes: bool = False
    """The prior is in bytes, not in shares."""


_PRECISIONS: tuple[_Value, ...] = (
    lambda config: not config.is_half,
    lambda config: config.amp_dtype == "bfloat16",
    lambda config: config.amp_dtype == "float16",
)
_GROUPS: tuple[_Value, ...] = (
    lambda config: config.process_count > 1,
    lambda config: config.is_dp,
)


def _workers(config: TrainingConfig) -> float:
    return config.num_workers


def _held(config: TrainingConfig) -> float:
    """Return the batches that workers hold: queued ones, and per worker one in work, as samples and batch."""
    return config.num_workers * (config.batches_per_worker + 2)


def _ranks(config: TrainingConfig) -> float:
    return config.process_count


def _shared_pages(config: TrainingConfig) -> float:
    """Return a rank's part of the pages shared with the process that trials fork from, minus a single rank's.

    They are counted in equal shares (PSS): a trial of p processes has p of p + 1.
    """
    processes = config.process_count * (config.num_workers + 1)
    return processes / (processes + 1) / config.process_count - 0.5


def _around_zero(sd: float) -> Callable[[Memory], Normal]:
    prior = Normal(0.0, sd)
    return lambda _: prior


_OF_SETTINGS = [setting.memory for setting in SETTINGS if setting.memory is not None]
_TERMS = (
    *(_Term(lambda memory: memory.fixed, value) for value in _PRECISIONS),
    *(_Term(lambda memory: memory.growth, value, grows=True) for value in _PRECISIONS),
    _Term(lambda memory: memory.worker, _workers, of_workers=True),
    _Term(lambda memory: memory.held_batch, _held, grows=True, of_workers=True),
    _Term(
        lambda memory: memory.shared_pages_bytes, _shared_pages, of_workers=True, is_in_bytes=True
    ),
    *(_Term(_around_zero(own.sd), own.of) for own in _OF_SETTINGS),
    *(_Term(lambda memory: memory.group, value) for value in _GROUPS),
    *(_Term(lambda memory: memory.group, value, grows=True) for value in _GROUPS),
)
_GROWS = np.array([term.grows for term in _TERMS])
_OF_WORKERS = np.array([term.of_workers for term in _TERMS])
_RISING = np.flatnonzero(np.append(_GROWS | _OF_WORKERS, [False, False]))
"""Terms that can't be negative."""

_DEMANDS: tuple[_Value, ...] = (
    lambda config: config.micro_batch_size,
    _PRECISIONS[0],
    _ranks,
    _workers,
    _held,
    *_GROUPS,
    *(memory.of for memory in _OF_SETTINGS),
    *(
        lambda config, memory=memory: not memory.of(config)
        for memory in _OF_SETTINGS
        if memory.is_either
    ),
)
"""Quantities that memory grows with: no more of any demand means no more memory. Of two layouts, or
compiled and not, neither is known to need more, so they are opposite demands. cuDNN's benchmark
mode tries algorithms with any workspace, and CUDA graphs keep a pool of their own."""
_BATCH = 0
_RANKS = 2
"""Indices of these demands."""
_COLUMNS = (*(term.value for term in _TERMS), *_DEMANDS)
_IN_RAM_ALONE = np.array(
    [*_OF_WORKERS, *(demand in {_ranks, _workers, _held} for demand in _DEMANDS)]
)


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Model of peak memory, fitted to at least one peak."""

    observed: Sequence[Peak]
    has_workers_in_ram: bool
    """The limit is on RAM: ranks, loader workers and the batches that they hold take a part of
    it."""
    memory: Memory = POLICY.memory
    """Priors."""

    def expect(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """Return the expected peak memory and its standard deviation, in bytes, (configs,) each."""
        mean, covariance, spread, _ = self._posterior
        rows, _ = self._table(configs)
        variance = (rows @ covariance * rows).sum(axis=1) + spread**2
        return rows @ mean, np.sqrt(variance)

    @property
    def degrees_of_freedom(self) -> float:
        """Degrees of freedom of the spread, for Student's t of an interval."""
        return self._posterior[3]

    def chance_to_fit(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        """Return the probability that each configuration stays within a limit.

        It is 1 if a measured peak leaves no doubt: otherwise a batch that fits narrowly would stay
        uncertain after it was measured. A batch of k times the samples takes at most k times the
        memory.

        Args:
            configs: Configurations to judge.
            limit_bytes: Limit of the peak memory.
        """
        parts = (self._chances(part, limit_bytes) for part in in_parts(configs))
        return np.concatenate([np.empty(0), *parts])

    def _chances(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        from scipy.special import stdtr

        expected, sd = self.expect(configs)
        _, asked = self._table(configs)
        _, seen = self._seen
        peaks = np.array(
            [inf if peak.source == "least" else peak.peak_bytes for peak in self.observed]
        )

        # Certain by a single peak: no more of any demand than one that fits, or no less than one
        # that does not
        growth = np.maximum(1.0, asked[:, None, _BATCH] / seen[:, _BATCH])
        fits = np.all(asked[:, None, 1:] <= seen[:, 1:], axis=2) & (growth * peaks <= limit_bytes)
        fails = np.all(asked[:, None] >= seen, axis=2) & (peaks > limit_bytes)
        chances = np.where(
            fits.any(axis=1) & ~fails.any(axis=1),
            1.0,
            stdtr(self.degrees_of_freedom, (limit_bytes - expected) / sd),
        )
        return np.asarray(chances, dtype=np.float64)

    @cached_property
    def _seen(self) -> tuple[Floats, Floats]:
        return self._table([peak.config for peak in self.observed])

    @cached_property
    def _units(self) -> tuple[float, int]:
        """Highest peak and largest batch that were measured; of all peaks if none was measured."""
        known = [peak for peak in self.observed if peak.source != "least"] or self.observed
        highest = max(float(peak.peak_bytes) for peak in known)
        return highest, max(peak.config.micro_batch_size for peak in known)

    @cached_property
    def _posterior(self) -> tuple[Floats, Floats, float, float]:
        """Mean and covariance of the coefficients, and the spread of a peak with its degrees of freedom.

        A peak that was only exceeded counts as an observation wherever the model expects less.
        """
        scale, unit = self._units
        spread_sd = self.memory.spread_sd * scale
        peaks = np.array([peak.peak_bytes for peak in self.observed], dtype=np.float64)
        is_least = np.array([peak.source == "least" for peak in self.observed])
        is_alone = np.array([peak.source == "alone" for peak in self.observed])
        rows, demands = self._seen
        rows = np.column_stack([rows, is_alone, is_alone * demands[:, _BATCH] / unit])
        prior_mean, prior_precision = _prior(self.memory, scale)
        counts = ~is_least
        variance = spread_sd**2
        extra = is_alone * (self.memory.alone_sd * scale) ** 2
        for _ in range(6):  # on the surfaces nothing changes by 1 % after six rounds
            # Coefficients, given the spread
            weighted = rows.T * counts / (variance + extra)
            precision = prior_precision + weighted @ rows
            pull = prior_precision @ prior_mean + weighted @ peaks
            covariance = np.linalg.inv(precision)
            expected = rows @ covariance @ pull

            # Peaks that count: measured ones, and exceeded ones above what is expected
            shares = counts * variance / (variance + extra)
            counts = ~is_least | (expected < peaks)

            # Spread, given the coefficients
            leverages = (weighted.T @ covariance * rows).sum(axis=1)
            freedom = self.memory.spread_counts + (shares * (1 - leverages)).sum()
            misfit = np.square(shares * (peaks - expected)).sum()
            variance = (self.memory.spread_counts * spread_sd**2 + misfit) / freedom
        terms = len(_TERMS)
        mean = _rising_mean(precision, pull)[:terms]
        return mean, covariance[:terms, :terms], float(np.sqrt(variance)), float(freedom)

    def _table(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """Return the columns of all terms, (configs, terms), and all demands, (configs, demands).

        If the limit is on RAM, which ranks share, each rank takes its own.
        """
        table = np.array([_values(config) for config in configs], dtype=np.float64)
        counts = np.where(_IN_RAM_ALONE & (not self.has_workers_in_ram), 0.0, table)
        terms, demands = np.split(counts, [len(_TERMS)], axis=1)
        growth = np.where(_GROWS, demands[:, [_BATCH]] / self._units[1], 1.0)
        return terms * growth * np.maximum(1.0, demands[:, [_RANKS]]), demands


def _prior(memory: Memory, scale_bytes: float) -> tuple[Floats, Floats]:
    """Return the mean and the inverse covariance of all coefficients, those of a device alone last."""
    alone = (memory.alone_fixed, memory.alone_growth)
    own_scales = [1.0 if term.is_in_bytes else scale_bytes for term in _TERMS]
    scales = np.array(own_scales + [scale_bytes] * len(alone))
    priors = [*(term.prior(memory) for term in _TERMS), *alone]
    means = np.array([prior.mean for prior in priors])
    sds = np.array([prior.sd for prior in priors])

    # Half precision changes float32's coefficients by a correlated amount
    covariance = np.diag(np.square(sds))
    alike = memory.halves_correlation
    changes = np.array([[0.0, 0.0, 0.0], [0.0, 1.0, alike], [0.0, alike, 1.0]])
    for first, change_sd in ((0, memory.half_fixed_sd), (3, memory.half_growth_sd)):
        covariance[first : first + 3, first : first + 3] = sds[first] ** 2 + change_sd**2 * changes
    precision = np.linalg.inv(covariance * np.outer(scales, scales))
    return means * scales, np.asarray(precision, dtype=np.float64)


def _rising_mean(precision: Floats, pull: Floats) -> Floats:
    """Return the posterior mean with no rising term negative: set those to 0, the most negative first."""
    kept = np.arange(len(pull))
    while True:
        mean = np.zeros(len(pull))
        mean[kept] = np.linalg.solve(precision[np.ix_(kept, kept)], pull[kept])
        lowest = _RISING[np.argmin(mean[_RISING])]
        if mean[lowest] >= 0:
            return mean
        kept = kept[kept != lowest]


@lru_cache(maxsize=8192)
def _values(config: TrainingConfig) -> tuple[float, ...]:
    """Return the columns of one configuration. Cached: a proposal repeats thousands of configurations."""
    return tuple(column(config) for column in _COLUMNS)


# From trials to the memory model: its observations, lines over the micro batch, and the largest
# batch that ran.


def memory_of_trials(
    curves: Sequence[ConfiguredPoint],
    records: Sequence[TrialRecord],
    limit_bytes: int,
    *,
    limit_is_ram: bool,
    memory: Memory = POLICY.memory,
) -> MemoryModel:
    """Fit the memory model to the points of curves and to trials, including those that ran out of memory.

    The device alone has no workers. A trial that ran out of another resource than the limited one
    (RAM next to a GPU, shared memory, open files) has no known peak. A trial that thrashed took
    what it was allowed, not what it needs, and counts as out of memory.

    Args:
        curves: Points of the curves.
        records: Trials.
        limit_bytes: Limit of the peak memory.
        limit_is_ram: The limit is on RAM, so loader workers are part of the peak.
        memory: Priors, and the excess of trials that ran out of memory.
    """
    peaks = list[Peak]()
    no_workers = {"num_workers": 0, **NEUTRAL_WITHOUT_WORKERS}
    source: Literal["alone", "trial"] = "alone" if limit_is_ram else "trial"
    for one in curves:
        if one.point.peak_memory_bytes is not None:
            config = one.config.model_copy(update=no_workers)
            peaks.append(Peak(config, one.point.peak_memory_bytes, source))

    for record in records:
        measured = _measured_peak(record)
        violation = record.result.violation
        is_out = record.outcome == "oom" or (
            record.outcome == "host_oom" and limit_is_ram and violation is not None
        )
        if measured is not None:
            peaks.append(Peak(record.config, measured))
        elif record.measurement is not None or is_out:
            excess = memory.unknown_excess
            if record.measurement is None and violation is not None:
                excess = violation
            peaks.append(Peak(record.config, int(limit_bytes * (1 + excess)), "least"))

    # Of many peaks the highest, which are nearest to the limit, and the latest
    by_height = sorted(range(len(peaks)), key=lambda place: peaks[place].peak_bytes, reverse=True)
    most = memory.most_peaks
    observed = with_latest(peaks, by_height[: most // 2], most=most)
    return MemoryModel(observed=observed, has_workers_in_ram=limit_is_ram, memory=memory)


def memory_within(
    space: ResolvedSpace,
    records: Sequence[TrialRecord],
    curves: Sequence[ConfiguredPoint] = (),
) -> MemoryModel:
    """Fit the memory model to a search's trials and curves, by its space's limit and policy."""
    return memory_of_trials(
        curves,
        records,
        space.limit_bytes,
        limit_is_ram=space.environment.has_only_ram,
        memory=space.policy.memory,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Peak memory over the micro batch, for one kind of settings."""

    model: MemoryModel
    config: TrainingConfig
    """Settings of the line, whose micro batch does not count."""
    batches: tuple[int, ...]
    """Micro batches of the trials of this kind, in ascending order."""

    @property
    def intercept_bytes(self) -> float:
        """Peak memory without a batch, including loader workers if they are part of the peak."""
        return self.predict(0)[0]

    @property
    def workers_bytes(self) -> float:
        """Part of the intercept that loader workers take."""
        alone = self.config.model_copy(update={"num_workers": 0, "micro_batch_size": 0})
        return self.intercept_bytes - float(self.model.expect([alone])[0][0])

    @property
    def bytes_per_sample(self) -> float:
        """Slope of the line; at least 0, since memory does not shrink with the batch."""
        return self.predict(1)[0] - self.intercept_bytes

    @property
    def error_bytes(self) -> float:
        """Half of the 95 % interval at the trials' mean micro batch."""
        return self.predict(round(sum(self.batches) / len(self.batches)))[1]

    def predict(self, micro_batch_size: int) -> tuple[float, float]:
        """Return the expected peak memory and half of its 95 % interval, in bytes."""
        expected, sd = self.model.expect([self._with(micro_batch_size)])
        return float(expected[0]), t_95(self.model.degrees_of_freedom) * float(sd[0])

    def largest_batch(self, limit_bytes: int, most: int) -> int:
        """Return the largest micro batch up to `most` that is sure to fit; 0 if none is."""
        configs = [self._with(size) for size in range(1, most + 1)]
        chances = self.model.chance_to_fit(configs, limit_bytes)
        fitting = np.flatnonzero(chances >= POLICY.trials.sure_to_fit)
        return int(fitting.max(initial=-1)) + 1

    def _with(self, micro_batch_size: int) -> TrainingConfig:
        return self.config.model_copy(update={"micro_batch_size": micro_batch_size})


def memory_kind(config: TrainingConfig) -> tuple[int, int, str]:
    """Return the key of settings that share a line: precision, plainest first, world size and strategy."""
    return AMP_DTYPES.index(config.amp_dtype), config.world_size, config.strategy


def memory_lines(
    records: Sequence[TrialRecord], config: TrainingConfig, limit_bytes: int, *, limit_is_ram: bool
) -> tuple[MemoryLine, ...]:
    """Return a line for each kind with at least two measured micro batches, plainest precision first.

    Args:
        records: Trials.
        config: Source of all settings but the kind's.
        limit_bytes: Limit of the peak memory.
        limit_is_ram: The limit is on RAM, so loader workers are part of the peak.
    """
    model = memory_of_trials((), records, limit_bytes, limit_is_ram=limit_is_ram)
    measured = defaultdict[tuple[int, int, str], list[TrainingConfig]](list)
    for record in records:
        if _measured_peak(record) is not None:
            measured[memory_kind(record.config)].append(record.config)
    lines = list[MemoryLine]()
    for _, own in sorted(measured.items()):
        batches = sorted(one.micro_batch_size for one in own)
        if batches[0] < batches[-1]:
            kind = {name: getattr(own[0], name) for name in ("amp_dtype", "world_size", "strategy")}
            line = config.model_copy(update=kind)
            lines.append(MemoryLine(model=model, config=line, batches=tuple(batches)))
    return tuple(lines)


def largest_batch_note(
    records: Sequence[TrialRecord],
    config: TrainingConfig,
    space: ResolvedSpace,
    *,
    overloaded: Collection[int] = (),
) -> Note | None:
    """Return a note on the largest micro batch of a kind within the limit, with a prediction from other trials.

    The note states whether a larger one is in the space, and whether it failed.

    Args:
        records: Trials.
        config: Settings of the kind.
        space: The space, with the memory limit.
        overloaded: Numbers of the trials that failed on the largest samples: their batches are too
            big.

    Returns:
        None if no trial ran within the limit.
    """
    limit_bytes = space.limit_bytes
    # The largest batch of the kind that ran within the limit, and not too big otherwise
    own = [record for record in records if memory_kind(record.config) == memory_kind(config)]
    overloading = {record.config.micro_batch_size for record in own if record.number in overloaded}
    peaks = [
        (record.config, peak) for record in own if (peak := _measured_peak(record)) is not None
    ]
    below = min(overloading, default=inf)
    within = [
        (record.config, peak)
        for record in own
        if record.measurement is not None
        and record.measurement.peak_memory_bytes <= limit_bytes
        and (peak := _measured_peak(record)) is not None
        and record.config.micro_batch_size < below
    ]
    if not within:
        return None
    largest, peak_bytes = max(within, key=lambda pair: (pair[0].micro_batch_size, pair[1]))
    batch = largest.micro_batch_size

    # Its prediction from the trials with other batches
    predicted = None
    error = None
    if len({one.micro_batch_size for one, _ in peaks} - {batch}) > 1:
        others = [
            record
            for record in records
            if memory_kind(record.config) != memory_kind(config)
            or record.config.micro_batch_size != batch
        ]
        model = memory_within(space, others)
        predicted, error = MemoryLine(model=model, config=largest, batches=()).predict(batch)

    # The reason why no larger one ran
    too_big = overloading.union(
        record.config.micro_batch_size for record in own if is_too_big(record)
    )
    batches = whole_numbers(space.domains["micro_batch_size"])
    next_batch = min((size for size in batches if size > batch), default=None)
    bounded_by: Literal["limit", "space", "trials"] = "trials"
    if next_batch is None:
        bounded_by = "space"
    elif next_batch in too_big:
        bounded_by = "limit"
    return largest_batch(
        bounded_by, batch, limit_bytes, peak_bytes, predicted_bytes=predicted, error_bytes=error
    )


def is_too_big(record: TrialRecord) -> bool:
    """Return whether a trial exceeded the memory limit or ran out of memory."""
    return record.outcome == "over_memory" or (
        record.measurement is None and record.outcome in OUT_OF_MEMORY
    )


def _measured_peak(record: TrialRecord) -> int | None:
    """Return the peak memory that a trial reached; None if it thrashed, and needed more than it got.

    What its workers may still copy is a forecast of its own, and no law of the micro batch.
    """
    measured = record.measurement
    if measured is None or measured.memory.is_thrashing:
        return None
    return measured.peak_memory_bytes - measured.memory.to_come_bytes


# Memory growth: its trend over a window, and the time until it reaches the limit.
#
# A heap that fills in the first seconds is no leak, and allocators grow in steps. So a window's
# first third does not count, and the increments of its stretches are taken as independent: after a
# single step, the interval of their mean contains zero; after a leak, which adds the same in each,
# it does not. A dataset that is being cached grows only until the end of the first epoch: the note
# states that a window lies in it.


_LEFT_OUT_SHARE = 1 / 3
"""Share of a window at its start that does not count."""
_FEWEST_STRETCHES = 4
"""Fewest stretches of a window: with fewer the interval is meaningless. At most as many as for its
throughput."""
Kind = Literal["host", "device"]
Whose = Literal["baseline", "recommended"]


class Trend(NamedTuple):
    """Growth of memory over the readings without their first third."""

    bytes_per_count: float
    """Mean growth per batch, sample or step, whatever the readings count."""
    half_width: float
    """Half of its 95 % interval."""
    counts: int
    """Batches, samples or steps observed."""
    last_bytes: int

    @property
    def low(self) -> float:
        """Lower end of the interval, in bytes per count."""
        return self.bytes_per_count - self.half_width


def trend_of(points: Sequence[tuple[int, int]]) -> Trend | None:
    """Estimate how memory grows with what the readings count; None if there are too few.

    Args:
        points: Batches, samples or steps so far and bytes held then, in the order of reading.
    """
    # Cut what follows the first third into stretches
    kept = points[int(len(points) * _LEFT_OUT_SHARE) :]
    stretches = min(BATCH_MEANS, len(kept) - 1)
    if stretches < _FEWEST_STRETCHES:
        return None
    edges = [kept[round(place * (len(kept) - 1) / stretches)] for place in range(stretches + 1)]

    # Growth per count in each of them
    rates = [
        (later[1] - earlier[1]) / max(1, later[0] - earlier[0])
        for earlier, later in pairwise(edges)
    ]
    return Trend(
        bytes_per_count=fmean(rates),
        half_width=t_95(stretches - 1) * stdev(rates) / sqrt(stretches),
        counts=edges[-1][0] - edges[0][0],
        last_bytes=edges[-1][1],
    )


def growth_of(kind: Kind, points: Sequence[tuple[int, int]], seconds: float) -> MemoryGrowth | None:
    """Estimate memory growth over a window; None if there are too few points.

    Args:
        kind: Host or device memory.
        points: Batches so far and bytes held then, in the order of reading.
        seconds: Time from the first point to the last.
    """
    trend = trend_of(points)
    if trend is None:
        return None
    all_batches = points[-1][0] - points[0][0]
    return MemoryGrowth(
        kind=kind,
        bytes_per_batch=trend.bytes_per_count,
        half_width=trend.half_width,
        batches=trend.counts,
        seconds=seconds * trend.counts / max(1, all_batches),
        last_bytes=trend.last_bytes,
    )


def growth_notes_of(
    trials: Sequence[TrialRecord],
    chosen: Recommendation | None,
    limits: MemoryLimits,
    memory: Memory,
) -> tuple[Note, ...]:
    """Return the growth notes on the recommended settings, and on the baseline if that is another trial."""
    numbers: dict[int, Whose] = {0: "baseline"}
    if chosen is not None:
        numbers[chosen.number] = "recommended"
    return tuple(
        note
        for number, whose in numbers.items()
        for note in growth_notes(runs_of(trials, number), limits, whose, memory)
    )


def growth_notes(
    runs: Sequence[Measurement],
    limits: MemoryLimits,
    whose: Whose,
    memory: Memory = POLICY.memory,
) -> tuple[Note, ...]:
    """Return a note for each kind of memory that grows in most runs and would soon reach its limit.

    Args:
        runs: Runs of one configuration.
        limits: Memory limits.
        whose: The configuration, for the note.
        memory: Time of training within which the limit would be reached.
    """
    kinds: tuple[Kind, ...] = ("host", "device")
    series = [_growth_in(runs, kind) for kind in kinds]
    return tuple(
        _note(*known[len(known) // 2], limits, whose)  # the run with the median growth
        for known in series
        if _grows(known, limits, memory)
    )


def kinds_not_excluded(runs: Sequence[Measurement], limits: MemoryLimits) -> tuple[Kind, ...]:
    """Return the kinds of memory without proven growth that may still fill up within a day.

    A kind that no window has measured, for lack of blocks, is among them.

    Args:
        runs: Runs of one configuration.
        limits: Memory limits.
    """
    kinds: tuple[Kind, ...] = ("host",) if limits.limit_is_ram else ("host", "device")
    found = list[Kind]()
    for kind in kinds if runs else ():
        known = _growth_in(runs, kind)
        if not known:
            found.append(kind)
        elif not _grows(known, limits, POLICY.memory):
            run, growth = known[len(known) // 2]
            if _fills(run, growth, limits, growth.high, POLICY.memory.no_leak_for_s):
                found.append(kind)
    return tuple(found)


def _growth_in(runs: Sequence[Measurement], kind: Kind) -> list[tuple[Measurement, MemoryGrowth]]:
    """Return the runs with their growth of one kind, the smallest growth first."""
    known = [(run, growth) for run in runs for growth in run.growth if growth.kind == kind]
    return sorted(known, key=lambda one: one[1].bytes_per_batch)


def _grows(
    known: Sequence[tuple[Measurement, MemoryGrowth]], limits: MemoryLimits, memory: Memory
) -> bool:
    """Return whether most runs show growth that would reach the limit soon enough to be reported."""
    showing = sum(_fills(*one, limits, one[1].low, memory.leak_within_s) for one in known)
    return 2 * showing > len(known)


def _fills(
    run: Measurement,
    growth: MemoryGrowth,
    limits: MemoryLimits,
    bytes_per_batch: float,
    within_s: float,
) -> bool:
    """Return whether memory that grows by `bytes_per_batch` reaches its limit within `within_s`."""
    growing = bytes_per_batch * within_s * _batches_per_s(growth)
    return growing > _left_bytes(run, growth, limits)


def _note(run: Measurement, growth: MemoryGrowth, limits: MemoryLimits, whose: Whose) -> Note:
    batches = _left_bytes(run, growth, limits) / growth.bytes_per_batch

    # Samples so far, by the window's mean batch
    window_batches = sum(block.batches for block in run.blocks)
    seen = run.window.warm_up_batches + window_batches
    samples = seen * sum(block.samples for block in run.blocks) / window_batches
    epoch = run.window.epoch_samples
    return memory_growth(
        whose=whose,
        kind=growth.kind,
        bytes_per_batch=round(growth.bytes_per_batch),
        half_width_bytes=round(growth.half_width),
        seconds=round(growth.seconds, 1),
        batches_to_limit=round(batches),
        limit_within_s=round(batches / _batches_per_s(growth)),
        is_first_epoch=epoch is None or samples < epoch,
    )


def _left_bytes(run: Measurement, growth: MemoryGrowth, limits: MemoryLimits) -> float:
    """Return the bytes between the run's peak and the limit of this kind; infinite without a limit."""
    if growth.kind == "device" or limits.limit_is_ram:
        limit = limits.limit_bytes
        held = run.peak_memory_bytes
    else:
        limit = limits.ram_bytes
        held = growth.last_bytes
    return inf if limit is None else max(0.0, limit - held)


def _batches_per_s(growth: MemoryGrowth) -> float:
    return growth.batches / max(growth.seconds, 1e-9)
