"""Peak memory: a law in the micro batch and the loader's workers, fitted lines, and growth within a window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Literal, NamedTuple

import numpy as np

from autotune.config.training_config import AMP_DTYPES, NEUTRAL_WITHOUT_WORKERS, TrainingConfig
from autotune.messages.search import largest_batch, memory_growth
from autotune.models.observations import ConfiguredPoint
from autotune.models.statistics import Floats, t_95
from autotune.note import Note
from autotune.policy import POLICY
from autotune.records.measurement import Measurement, MemoryGrowth, MemoryLimits
from autotune.records.result import Recommendation
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord, runs_of
from autotune.settings_table import SETTINGS

# Peak memory as one law: what is fixed, what grows with the micro batch, and what loader workers
# hold in RAM.
#
# Comes in: peaks that were measured, or passed. Goes out: a MemoryModel with its uncertainty, from
# which follow the chance to fit of any configuration, a line over the micro batch for each kind of
# settings, and the largest batch that the limit allows. Pure.
#
# Each precision has a fixed part and a growth of its own. Other settings add something fixed,
# groups also to the growth. The law is broken by workspaces that cuDNN takes where there is room,
# and by samples of varying length: such effects are in the spread, which is learned.
#
# Source: Bishop 2006, "Pattern Recognition and Machine Learning", section 3.3 (Bayesian linear
# regression: the first peak is enough for a forecast with the uncertainty that it deserves) and 3.5
# (the spread, by its effective number of observations). The scales of the prior, in shares of the
# highest peak, are our own conventions.


_SPREAD = 0.02
"""Standard deviation of a peak, as a share of the highest, before it is learned: our own
convention."""
_SPREAD_COUNTS = 4
"""Observations as which that counts: our own convention. Of the surfaces' peaks, 95 to 99 % lie
within the interval of 95 % that three to ten trials with smaller batches give."""
_ALONE_SPREAD = 0.06
"""In addition where memory is the host's, of a device alone: its process keeps what earlier points
took. Our own convention."""

_AT_ONCE = 512
"""Configurations that are compared with all peaks at once: our own convention, which bounds what
that takes."""


class Peak(NamedTuple):
    """Peak memory of a configuration."""

    config: TrainingConfig
    peak_bytes: int
    source: Literal["trial", "alone", "least"] = "trial"
    """"alone": of the device by itself, in RAM, where a process keeps what it once had; "least": it
    ran out of memory there, and needs as much or more."""


_Value = Callable[[TrainingConfig], float]


class _Term(NamedTuple):
    """A term of the law: its coefficient's prior, in shares of the highest peak, and what it multiplies."""

    mean: float
    sd: float
    value: _Value
    grows: bool = False
    """It also multiplies the batch, relative to the largest measured one."""
    of_workers: bool = False
    """It counts only where the limit is on RAM."""
    scale_bytes: int | None = None
    """What the prior is a share of, where not of the highest peak."""


_PRECISIONS: tuple[_Value, ...] = (
    lambda config: config.amp_dtype not in {"bfloat16", "float16"},
    lambda config: config.amp_dtype == "bfloat16",
    lambda config: config.amp_dtype == "float16",
)
_GROUPS: tuple[_Value, ...] = (
    lambda config: config.process_count > 1,
    lambda config: config.strategy == "dp",
)


def _workers(config: TrainingConfig) -> float:
    return config.num_workers


def _held(config: TrainingConfig) -> float:
    """Batches that workers hold: those that wait in the queue, and of each what it works on, samples and batch."""
    return config.num_workers * (config.batches_per_worker + 2)


def _ranks(config: TrainingConfig) -> float:
    return config.process_count


def _shared_pages(config: TrainingConfig) -> float:
    """A rank's part of the pages that a trial shares with the process it was forked from, less a rank's by itself.

    They are counted in equal shares (PSS): a trial of p processes has p of p + 1.
    """
    processes = config.process_count * (config.num_workers + 1)
    return processes / (processes + 1) / config.process_count - 0.5


def _denied(value: _Value) -> _Value:
    return lambda config: not value(config)


_OF_SETTINGS = [setting.memory for setting in SETTINGS if setting.memory is not None]
_TERMS = (
    *(_Term(0.5, 1.0, value) for value in _PRECISIONS),
    *(_Term(0.5, 0.5, value, grows=True) for value in _PRECISIONS),
    _Term(0.03, 0.03, _workers, of_workers=True),
    _Term(0.003, 0.004, _held, grows=True, of_workers=True),
    _Term(1.0, 0.4, _shared_pages, of_workers=True, scale_bytes=280 * 2**20),
    *(_Term(0.0, memory.sd, memory.of) for memory in _OF_SETTINGS),
    *(_Term(0.0, 0.3, value) for value in _GROUPS),
    *(_Term(0.0, 0.3, value, grows=True) for value in _GROUPS),
)
"""Before a second micro batch was measured, one twice as large is expected to take half as much
again, give or take as much. Pages that are shared are torch's libraries: 270 MiB on the surfaces of
benchmarks/."""
_ALONE = ((0.03, 0.05), (0.2, 0.3))
"""Prior mean and standard deviation of what a device alone takes in addition in RAM: fixed, and
with the batch."""
_CHANGES_OF_HALVES = (0.1, 0.3)
"""Standard deviation of what half precision changes: of what is fixed, and of the growth."""
_HALVES = np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 0.97], [0.0, 0.97, 1.0]])
"""Correlation of these changes: until both half precisions were measured, they are expected to be
much alike."""
_GROWS, _OF_WORKERS = (
    np.array([getattr(term, name) for term in _TERMS]) for name in ("grows", "of_workers")
)
_RISING = np.flatnonzero(np.append(_GROWS | _OF_WORKERS, [False, False]))
"""Terms that can't take less than no memory."""

_DEMANDS: tuple[_Value, ...] = (
    lambda config: config.micro_batch_size,
    _PRECISIONS[0],
    _ranks,
    _workers,
    _held,
    *_GROUPS,
    *(memory.of for memory in _OF_SETTINGS),
    *(_denied(memory.of) for memory in _OF_SETTINGS if memory.is_either),
)
"""What memory grows with: no more of any demand means no more memory. Of two layouts, and of
compiled and not, neither is known to need more: they are demands against each other. cuDNN's
benchmark tries algorithms of any workspace, and CUDA graphs keep a pool of their own."""
_BATCH = 0
_RANKS = 2
"""Where these demands stand."""
_COLUMNS = (*(term.value for term in _TERMS), *_DEMANDS)
_IN_RAM_ALONE = np.array(
    [*_OF_WORKERS, *(demand in {_ranks, _workers, _held} for demand in _DEMANDS)]
)


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What at least one peak says of the peak memory of other configurations."""

    observed: Sequence[Peak]
    has_workers_in_ram: bool
    """The limit is on RAM: every rank, loader workers and the batches that they hold take a part of
    it."""

    def expect(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """Expected peak memory and its standard deviation, in bytes."""
        mean, covariance, spread, _ = self._posterior
        rows, _ = self._table(configs)
        return rows @ mean, np.sqrt((rows @ covariance * rows).sum(axis=1) + spread**2)

    @property
    def degrees_of_freedom(self) -> float:
        """With which the spread is known, as in Student's t of an interval."""
        return self._posterior[3]

    def chance_to_fit(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        """The probability that each stays within a limit; 1 where a measured peak leaves no doubt.

        Otherwise a batch that fits narrowly would stay uncertain after it was measured. A batch of
        k times the samples takes k times the memory at the most.
        """
        parts = (configs[begin : begin + _AT_ONCE] for begin in range(0, len(configs), _AT_ONCE))
        return np.concatenate([np.empty(0), *(self._chances(part, limit_bytes) for part in parts)])

    def _chances(self, configs: Sequence[TrainingConfig], limit_bytes: int) -> Floats:
        from scipy.special import stdtr

        expected, sd = self.expect(configs)
        (_, asked), (_, seen) = self._table(configs), self._seen
        peaks = np.array(
            [inf if peak.source == "least" else peak.peak_bytes for peak in self.observed]
        )
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
        """The highest peak and the largest batch that were measured; of all, where none was."""
        known = [peak for peak in self.observed if peak.source != "least"] or self.observed
        return max(float(peak.peak_bytes) for peak in known), max(
            peak.config.micro_batch_size for peak in known
        )

    @cached_property
    def _posterior(self) -> tuple[Floats, Floats, float, float]:
        """Mean and covariance of the terms' coefficients, and the spread of a peak with its degrees of freedom.

        A peak that was only passed counts as one where less would be expected there.
        """
        (scale, unit), peaks = (
            self._units,
            np.array([peak.peak_bytes for peak in self.observed], dtype=np.float64),
        )
        is_least, is_alone = (
            np.array([peak.source == name for peak in self.observed]) for name in ("least", "alone")
        )
        rows, demands = self._seen
        rows = np.column_stack([rows, is_alone, is_alone * demands[:, _BATCH] / unit])
        prior_mean, prior_precision = _prior(scale)
        counts = ~is_least
        variance = (_SPREAD * scale) ** 2
        extra = is_alone * (_ALONE_SPREAD * scale) ** 2
        for _ in range(6):  # on the surfaces nothing changes by 1 % after six rounds
            weighted = rows.T * counts / (variance + extra)
            precision = prior_precision + weighted @ rows
            pull = prior_precision @ prior_mean + weighted @ peaks
            covariance = np.linalg.inv(precision)
            expected = rows @ covariance @ pull
            shares = counts * variance / (variance + extra)
            counts = ~is_least | (expected < peaks)
            freedom = (
                _SPREAD_COUNTS + (shares * (1 - (weighted.T @ covariance * rows).sum(axis=1))).sum()
            )
            variance = (
                _SPREAD_COUNTS * (_SPREAD * scale) ** 2
                + np.square(shares * (peaks - expected)).sum()
            ) / freedom
        terms = len(_TERMS)
        mean = _rising_mean(precision, pull)[:terms]
        return mean, covariance[:terms, :terms], float(np.sqrt(variance)), float(freedom)

    def _table(self, configs: Sequence[TrainingConfig]) -> tuple[Floats, Floats]:
        """The columns of all terms, (configs, terms), and all demands, (configs, demands).

        Each rank takes its own, where the limit is on the RAM that they share.
        """
        table = np.array([_values(config) for config in configs], dtype=np.float64)
        counts = np.where(_IN_RAM_ALONE & (not self.has_workers_in_ram), 0.0, table)
        terms, demands = np.split(counts, [len(_TERMS)], axis=1)
        growth = np.where(_GROWS, demands[:, [_BATCH]] / self._units[1], 1.0)
        return terms * growth * np.maximum(1.0, demands[:, [_RANKS]]), demands


def _prior(scale_bytes: float) -> tuple[Floats, Floats]:
    """Mean and inverse covariance of all coefficients, those of a device alone last."""
    scales = np.array(
        [term.scale_bytes or scale_bytes for term in _TERMS] + [scale_bytes] * len(_ALONE)
    )
    means, sds = np.array([(term.mean, term.sd) for term in _TERMS] + list(_ALONE)).T
    covariance = np.diag(np.square(sds))
    for first, change in zip((0, 3), _CHANGES_OF_HALVES, strict=True):
        covariance[first : first + 3, first : first + 3] = sds[first] ** 2 + change**2 * _HALVES
    return means * scales, np.asarray(
        np.linalg.inv(covariance * np.outer(scales, scales)), dtype=np.float64
    )


def _rising_mean(precision: Floats, pull: Floats) -> Floats:
    """The posterior mean where no rising term is negative: those that would be are 0, the most negative first."""
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
    """The columns of one configuration; cached, since a proposal asks for thousands of the same ones."""
    return tuple(column(config) for column in _COLUMNS)


# What trials say of memory: a line over the micro batch for each kind of settings, and the largest
# batch that ran.
#
# Comes in: trials, and the points of curves. Goes out: a MemoryModel of them, MemoryLines, and a
# Note on the largest micro batch within the limit. Pure.


UNKNOWN_EXCESS_FRACTION = 0.25
"""By how much a trial is taken to have passed the limit that ran out of memory without saying how
much was missing: our own convention."""

_MOST_PEAKS = 240
"""Peaks that a model of memory is made from: our own convention, those of more trials than a search
makes by itself. Each configuration that is asked about is compared with all of them."""


def memory_of_trials(
    looks: Sequence[ConfiguredPoint],
    records: Sequence[TrialRecord],
    limit_bytes: int,
    *,
    limit_is_ram: bool,
) -> MemoryModel:
    """What each curve's point and each trial says of peak memory, ones that ran out of memory under the limit included.

    The device alone has no workers. A trial that ran out of something else than what the limit is
    on (RAM beside a GPU, shared memory, open files) has no known peak. A trial that thrashed took
    what it was allowed, not what it needs, and counts as one that ran out of memory.
    """
    no_workers = {"num_workers": 0, **NEUTRAL_WITHOUT_WORKERS}
    alone = [
        (look.config.model_copy(update=no_workers), look.point.peak_memory_bytes) for look in looks
    ]
    peaks = [
        Peak(config, peak, "alone" if limit_is_ram else "trial")
        for config, peak in alone
        if peak is not None
    ]
    for record in records:
        measured = _measured_peak(record)
        violation = record.result.violation
        is_out = record.outcome == "oom" or (
            record.outcome == "host_oom" and limit_is_ram and violation is not None
        )
        if measured is not None:
            peaks.append(Peak(record.config, measured))
        elif record.measurement is not None or is_out:
            excess = (
                UNKNOWN_EXCESS_FRACTION
                if record.measurement is not None or violation is None
                else violation
            )
            peaks.append(Peak(record.config, int(limit_bytes * (1 + excess)), "least"))
    return MemoryModel(observed=_most_telling(peaks), has_workers_in_ram=limit_is_ram)


def _most_telling(peaks: list[Peak]) -> list[Peak]:
    """All peaks, or of many the highest, which are nearest to the limit, and the latest, in their order."""
    if len(peaks) <= _MOST_PEAKS:
        return peaks
    by_height = sorted(range(len(peaks)), key=lambda place: peaks[place].peak_bytes, reverse=True)
    kept = set(by_height[: _MOST_PEAKS // 2])
    kept.update(
        [place for place in reversed(range(len(peaks))) if place not in kept][
            : _MOST_PEAKS - len(kept)
        ]
    )
    return [peaks[place] for place in sorted(kept)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """What the model says of some settings over the micro batch."""

    model: MemoryModel
    config: TrainingConfig
    """The settings; their micro batch does not count."""
    batches: tuple[int, ...]
    """Micro batches of the trials of this kind, in order."""

    @property
    def intercept_bytes(self) -> float:
        """What a batch comes on top of, loader workers included where they are a part of the peak."""
        return self.predict(0)[0]

    @property
    def workers_bytes(self) -> float:
        """The workers' part of that."""
        alone = self.config.model_copy(update={"num_workers": 0, "micro_batch_size": 0})
        return self.intercept_bytes - float(self.model.expect([alone])[0][0])

    @property
    def bytes_per_sample(self) -> float:
        """At least 0: memory does not shrink with the batch."""
        return self.predict(1)[0] - self.intercept_bytes

    @property
    def error_bytes(self) -> float:
        """Half of the 95 % interval in the middle of the trials."""
        return self.predict(round(sum(self.batches) / len(self.batches)))[1]

    def predict(self, micro_batch_size: int) -> tuple[float, float]:
        """Expected peak memory and half of its 95 % interval, in bytes."""
        expected, sd = self.model.expect([self._with(micro_batch_size)])
        return float(expected[0]), t_95(self.model.degrees_of_freedom) * float(sd[0])

    def largest_batch(self, limit_bytes: int, most: int) -> int:
        """The largest micro batch up to `most` that is sure to fit; 0 where none is."""
        chances = self.model.chance_to_fit(
            [self._with(size) for size in range(1, most + 1)], limit_bytes
        )
        return int(np.flatnonzero(chances >= POLICY.trials.sure_to_fit).max(initial=-1)) + 1

    def _with(self, micro_batch_size: int) -> TrainingConfig:
        return self.config.model_copy(update={"micro_batch_size": micro_batch_size})


def memory_kind(config: TrainingConfig) -> tuple[int, int, str]:
    """What has a line of its own: a precision, plainest first, and the devices that it runs on."""
    return AMP_DTYPES.index(config.amp_dtype), config.world_size, config.strategy


def memory_lines(
    records: Sequence[TrialRecord], config: TrainingConfig, limit_bytes: int, *, limit_is_ram: bool
) -> tuple[MemoryLine, ...]:
    """A line for each kind with at least two measured micro batches, plainest precision first.

    All settings but the kind's are those of `config`.
    """
    model = memory_of_trials((), records, limit_bytes, limit_is_ram=limit_is_ram)
    batches = defaultdict[tuple[int, int, str], list[int]](list)
    for record in records:
        if _measured_peak(record) is not None:
            batches[memory_kind(record.config)].append(record.config.micro_batch_size)
    return tuple(
        MemoryLine(
            model=model,
            config=config.model_copy(
                update={
                    "amp_dtype": AMP_DTYPES[kind[0]],
                    "world_size": kind[1],
                    "strategy": kind[2],
                }
            ),
            batches=tuple(sorted(sizes)),
        )
        for kind, sizes in sorted(batches.items())
        if len(set(sizes)) > 1
    )


def largest_batch_note(
    records: Sequence[TrialRecord],
    config: TrainingConfig,
    limit_bytes: int,
    *,
    batches: Sequence[int],
    limit_is_ram: bool,
    overloaded: Collection[int] = (),
) -> Note | None:
    """Return a note on the largest micro batch of a kind within the limit, with a prediction from other trials.

    None if no trial ran within the limit. The note states whether a larger one is in the space, and
    failed.

    Args:
        records: the trials.
        config: settings of the kind.
        limit_bytes: of the peak memory.
        batches: every micro batch of the space.
        limit_is_ram: loader workers are part of the peak.
        overloaded: numbers of the trials that failed on the largest samples: their batches are too
            big.
    """
    own = [record for record in records if memory_kind(record.config) == memory_kind(config)]
    overloading = {record.config.micro_batch_size for record in own if record.number in overloaded}
    peaks = [
        (record.config, peak) for record in own if (peak := _measured_peak(record)) is not None
    ]
    below = min(overloading, default=inf)
    within = [
        (one, peak) for one, peak in peaks if peak <= limit_bytes and one.micro_batch_size < below
    ]
    if not within:
        return None
    largest, peak_bytes = max(within, key=lambda pair: (pair[0].micro_batch_size, pair[1]))
    batch = largest.micro_batch_size
    predicted = None
    error = None
    if len({one.micro_batch_size for one, _ in peaks} - {batch}) > 1:
        told = *memory_kind(config), batch
        others = [
            one
            for one in records
            if (*memory_kind(one.config), one.config.micro_batch_size) != told
        ]
        model = memory_of_trials((), others, limit_bytes, limit_is_ram=limit_is_ram)
        predicted, error = MemoryLine(model=model, config=largest, batches=()).predict(batch)
    too_big = overloading.union(
        record.config.micro_batch_size for record in own if is_too_big(record)
    )
    next_batch = min((size for size in batches if size > batch), default=None)
    bounded_by: Literal["limit", "space", "trials"] = "limit" if next_batch in too_big else "trials"
    if next_batch is None:
        bounded_by = "space"
    return largest_batch(
        bounded_by, batch, limit_bytes, peak_bytes, predicted_bytes=predicted, error_bytes=error
    )


def is_too_big(record: TrialRecord) -> bool:
    """Whether a trial passed the memory limit, or ran out of memory."""
    return record.outcome == "over_memory" or (
        record.measurement is None and record.outcome in OUT_OF_MEMORY
    )


def _measured_peak(record: TrialRecord) -> int | None:
    """A trial's peak memory in bytes; None of one that thrashed, which needed more than it got."""
    measured = record.measurement
    return None if measured is None or measured.memory.is_thrashing else measured.peak_memory_bytes


# Whether memory creeps: how it grows from stretch to stretch of a window, and when it would reach
# the limit. Pure.
#
# Comes in: what was held after so many batches, and the runs of a configuration. Goes out: a
# MemoryGrowth, and notes.
#
# A heap that fills in the first seconds is no creep, and allocators grow in steps. So a window's
# first third does not count, and the growths of its stretches are taken for independent: a single
# step leaves zero inside the interval of their mean, a leak, which adds as much in each, does not.
# Nor does a dataset that is being cached, which ends with the first epoch: a window that lies in it
# says so.


_LEFT_OUT_SHARE = 1 / 3
_MOST_STRETCHES = 10
_FEWEST_STRETCHES = 4
"""Of a window: ten as for its rate (models/statistics); with fewer than four the interval says
nothing."""
_TOLD_WITHIN_S = 7 * 24 * 3600.0
"""A growth that reaches the limit no sooner is not told: our own convention, longer than most runs
between restarts."""
_EXCLUDED_FOR_S = 24 * 3600.0
"""Training that a window must show to be safe from growth, else that is said: our own convention, a
day."""
Kind = Literal["host", "device"]
Whose = Literal["baseline", "recommended"]


def growth_of(kind: Kind, points: Sequence[tuple[int, int]], seconds: float) -> MemoryGrowth | None:
    """How memory grows; None where there are too few points to tell.

    Args:
        kind: Whose memory it is.
        points: batches so far, and bytes held then, in the order in which they were read.
        seconds: from the first point to the last.
    """
    kept = points[int(len(points) * _LEFT_OUT_SHARE) :]
    stretches = min(_MOST_STRETCHES, len(kept) - 1)
    if stretches < _FEWEST_STRETCHES:
        return None
    edges = [kept[round(place * (len(kept) - 1) / stretches)] for place in range(stretches + 1)]
    rates = [
        (later[1] - earlier[1]) / max(1, later[0] - earlier[0])
        for earlier, later in pairwise(edges)
    ]
    batches = edges[-1][0] - edges[0][0]
    all_batches = points[-1][0] - points[0][0]
    return MemoryGrowth(
        kind=kind,
        bytes_per_batch=fmean(rates),
        half_width=t_95(stretches - 1) * stdev(rates) / sqrt(stretches),
        batches=batches,
        seconds=seconds * batches / max(1, all_batches),
        last_bytes=edges[-1][1],
    )


def creep_notes_of(
    trials: Sequence[TrialRecord], chosen: Recommendation | None, limits: MemoryLimits
) -> tuple[Note, ...]:
    """Return the notes on the recommended settings, and on the baseline where that is another trial."""
    numbers: dict[int, Whose] = {0: "baseline"}
    if chosen is not None:
        numbers[chosen.number] = "recommended"
    found = (
        creep_notes(runs_of(trials, number), limits, whose) for number, whose in numbers.items()
    )
    return tuple(chain.from_iterable(found))


def creep_notes(
    runs: Sequence[Measurement], limits: MemoryLimits, whose: Whose
) -> tuple[Note, ...]:
    """Return a note for each kind of memory that grows in most runs and would reach its limit in a week."""
    return tuple(
        _note(run, growth, limits, whose)
        for run, growth in _typical(runs)
        if _creeps(runs, limits, growth.kind)
    )


def kinds_not_excluded(runs: Sequence[Measurement], limits: MemoryLimits) -> tuple[Kind, ...]:
    """Kinds of memory that don't show a creep, but may grow to the limit within a day for all that the windows tell.

    Where all windows had too few blocks, they tell nothing of a kind.
    """
    if not runs:
        return ()
    typical = {growth.kind: (run, growth) for run, growth in _typical(runs)}
    kinds: tuple[Kind, ...] = ("host",) if limits.limit_is_ram else ("host", "device")
    return tuple(
        kind
        for kind in kinds
        if kind not in typical
        or (not _creeps(runs, limits, kind) and _may_fill(*typical[kind], limits))
    )


def _may_fill(run: Measurement, growth: MemoryGrowth, limits: MemoryLimits) -> bool:
    return growth.high * _EXCLUDED_FOR_S * _batches_per_s(growth) > _left_bytes(run, growth, limits)


def _typical(runs: Sequence[Measurement]) -> Iterator[tuple[Measurement, MemoryGrowth]]:
    """Of each kind the run with the median growth."""
    kinds: tuple[Kind, ...] = ("host", "device")
    for kind in kinds:
        known = sorted(_of_kind(runs, kind), key=lambda one: one[1].bytes_per_batch)
        if known:
            yield known[len(known) // 2]


def _of_kind(runs: Sequence[Measurement], kind: Kind) -> list[tuple[Measurement, MemoryGrowth]]:
    return [(run, growth) for run in runs for growth in run.growth if growth.kind == kind]


def _creeps(runs: Sequence[Measurement], limits: MemoryLimits, kind: Kind) -> bool:
    """Whether most runs show a growth that would reach the limit soon enough to be told."""
    known = _of_kind(runs, kind)
    showing = [
        growth
        for run, growth in known
        if growth.low > 0
        and growth.low * _TOLD_WITHIN_S * _batches_per_s(growth) > _left_bytes(run, growth, limits)
    ]
    return 2 * len(showing) > len(known)


def _note(run: Measurement, growth: MemoryGrowth, limits: MemoryLimits, whose: Whose) -> Note:
    batches = _left_bytes(run, growth, limits) / growth.bytes_per_batch
    seen = run.window.warm_up_batches + sum(block.batches for block in run.blocks)
    epoch = run.window.epoch_samples
    samples = (
        seen
        * sum(block.samples for block in run.blocks)
        / sum(block.batches for block in run.blocks)
    )
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
    """Return the bytes of the kind that grows that are left after the run's peak; infinite where no limit is known."""
    if growth.kind == "device" or limits.limit_is_ram:
        return (
            inf
            if limits.limit_bytes is None
            else max(0.0, limits.limit_bytes - run.peak_memory_bytes)
        )
    return inf if limits.ram_bytes is None else max(0.0, limits.ram_bytes - growth.last_bytes)


def _batches_per_s(growth: MemoryGrowth) -> float:
    return growth.batches / max(growth.seconds, 1e-9)
