"""What trials say of memory: a line over the micro batch for each kind of settings, and the largest batch that ran.

Comes in: trials, and the points of curves. Goes out: a MemoryModel of them, MemoryLines, and a Note on the largest
micro batch within the limit. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from autotune.analysis.forecast.observations import ConfiguredPoint
from autotune.analysis.memory.model import MemoryModel, Peak
from autotune.analysis.statistics import t_95
from autotune.messages.recommendation import largest_batch
from autotune.note import Note
from autotune.policy import POLICY
from autotune.records.trial import OUT_OF_MEMORY, TrialRecord
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.training_config import AMP_DTYPES, TrainingConfig

__all__ = [
    "UNKNOWN_EXCESS_FRACTION",
    "MemoryLine",
    "is_too_big",
    "largest_batch_note",
    "memory_kind",
    "memory_lines",
    "memory_of_trials",
]

UNKNOWN_EXCESS_FRACTION = 0.25
"""By how much a trial is taken to have passed the limit that ran out of memory without saying how much was missing: our
own convention."""

_MOST_PEAKS = 240
"""Peaks that a model of memory is made from: our own convention, those of more trials than a search makes by itself.
Each configuration that is asked about is compared with all of them."""


def memory_of_trials(
    looks: Sequence[ConfiguredPoint], records: Sequence[TrialRecord], limit_bytes: int, *, limit_is_ram: bool
) -> MemoryModel:
    """What each curve's point and each trial says of peak memory, ones that ran out of memory under the limit included.

    The device alone has no workers. A trial that ran out of something else than what the limit is on (RAM beside a GPU,
    shared memory, open files) has no known peak. A trial that thrashed took what it was allowed, not what it needs, and
    counts as one that ran out of memory.
    """
    no_workers = {"num_workers": 0, **NEUTRAL_WITHOUT_WORKERS}
    alone = [(look.config.model_copy(update=no_workers), look.point.peak_memory_bytes) for look in looks]
    peaks = [Peak(config, peak, "alone" if limit_is_ram else "trial") for config, peak in alone if peak is not None]
    for record in records:
        measured, violation = _measured_peak(record), record.result.violation
        is_out = record.outcome == "oom" or (record.outcome == "host_oom" and limit_is_ram and violation is not None)
        if measured is not None:
            peaks.append(Peak(record.config, measured))
        elif record.measurement is not None or is_out:
            excess = UNKNOWN_EXCESS_FRACTION if record.measurement is not None or violation is None else violation
            peaks.append(Peak(record.config, int(limit_bytes * (1 + excess)), "least"))
    return MemoryModel(observed=_most_telling(peaks), has_workers_in_ram=limit_is_ram)


def _most_telling(peaks: list[Peak]) -> list[Peak]:
    """All peaks, or of many the highest, which are nearest to the limit, and the latest, in their order."""
    if len(peaks) <= _MOST_PEAKS:
        return peaks
    by_height = sorted(range(len(peaks)), key=lambda place: peaks[place].peak_bytes, reverse=True)
    kept = set(by_height[: _MOST_PEAKS // 2])
    kept.update([place for place in reversed(range(len(peaks))) if place not in kept][: _MOST_PEAKS - len(kept)])
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
        chances = self.model.chance_to_fit([self._with(size) for size in range(1, most + 1)], limit_bytes)
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
                update={"amp_dtype": AMP_DTYPES[kind[0]], "world_size": kind[1], "strategy": kind[2]}
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

    None if no trial ran within the limit. The note states whether a larger one is in the space, and failed.

    Args:
        records: the trials.
        config: settings of the kind.
        limit_bytes: of the peak memory.
        batches: every micro batch of the space.
        limit_is_ram: loader workers are part of the peak.
        overloaded: numbers of the trials that failed on the largest samples: their batches are too big.
    """
    own = [record for record in records if memory_kind(record.config) == memory_kind(config)]
    overloading = {record.config.micro_batch_size for record in own if record.number in overloaded}
    peaks = [(record.config, peak) for record in own if (peak := _measured_peak(record)) is not None]
    below = min(overloading, default=inf)
    within = [(one, peak) for one, peak in peaks if peak <= limit_bytes and one.micro_batch_size < below]
    if not within:
        return None
    largest, peak_bytes = max(within, key=lambda pair: (pair[0].micro_batch_size, pair[1]))
    batch, predicted, error = largest.micro_batch_size, None, None
    if len({one.micro_batch_size for one, _ in peaks} - {batch}) > 1:
        told = *memory_kind(config), batch
        others = [one for one in records if (*memory_kind(one.config), one.config.micro_batch_size) != told]
        model = memory_of_trials((), others, limit_bytes, limit_is_ram=limit_is_ram)
        predicted, error = MemoryLine(model=model, config=largest, batches=()).predict(batch)
    too_big = overloading.union(record.config.micro_batch_size for record in own if is_too_big(record))
    next_batch = min((size for size in batches if size > batch), default=None)
    bounded_by: Literal["limit", "space", "trials"] = "limit" if next_batch in too_big else "trials"
    if next_batch is None:
        bounded_by = "space"
    return largest_batch(bounded_by, batch, limit_bytes, peak_bytes, predicted_bytes=predicted, error_bytes=error)


def is_too_big(record: TrialRecord) -> bool:
    """Whether a trial passed the memory limit, or ran out of memory."""
    return record.outcome == "over_memory" or (record.measurement is None and record.outcome in OUT_OF_MEMORY)


def _measured_peak(record: TrialRecord) -> int | None:
    """A trial's peak memory in bytes; None of one that thrashed, which needed more than it got."""
    measured = record.measurement
    return None if measured is None or measured.memory.is_thrashing else measured.peak_memory_bytes
