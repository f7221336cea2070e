"""What trials take, told by those that have run: the whole, what lies outside the window, the queue, and the least.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from statistics import median

from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TORCH_PREFETCH_FACTOR, TrainingConfig

__all__ = [
    "SHORTEST_WINDOW_S",
    "overhead_s",
    "queue_s",
    "rounds_of",
    "shortest_trial_s",
    "typical_overhead_s",
    "typical_s",
]

SHORTEST_WINDOW_S = 2.0
"""A trial's window is not made shorter than this, however little time is left."""
_FIRST_OVERHEAD_S = 1.5
_QUEUES_OF_A_TRIAL = 3  # one is drained in the warm-up, and the window sees it through twice


def typical_s(records: Sequence[TrialRecord]) -> float:
    """Seconds that a trial takes; there must be one."""
    return median(_taken_s(record) for record in records)


def typical_overhead_s(records: Sequence[TrialRecord]) -> float:
    """Seconds that a trial takes outside its window: build, loader's start, warm-up."""
    beyond = [
        _taken_s(record) - sum(block.seconds for block in record.measurement.blocks)
        for record in records
        if record.measurement is not None
    ]
    return max(0.0, median(beyond)) if beyond else _FIRST_OVERHEAD_S


def overhead_s(record: TrialRecord) -> float:
    """Seconds that a run of a trial's settings takes outside its window, without what came after it."""
    window_s = 0.0 if record.measurement is None else sum(block.seconds for block in record.measurement.blocks)
    return max(0.0, record.result.own_s - window_s)


def queue_s(config: TrainingConfig, samples_per_s: float, epoch_samples: int | None) -> float:
    """Seconds in which the loop takes, at a rate, the queues that a trial has to see; none holds more than an epoch.

    A trial that ends before that has measured how a queue is used up.
    """
    prefetch = config.prefetch_factor or TORCH_PREFETCH_FACTOR
    queue = config.micro_batch_size * config.process_count * config.num_workers * prefetch
    return _QUEUES_OF_A_TRIAL * min(queue, inf if epoch_samples is None else epoch_samples) / samples_per_s


def shortest_trial_s(records: Sequence[TrialRecord]) -> float:
    """Seconds that a trial takes at the least."""
    return typical_overhead_s(records) + SHORTEST_WINDOW_S


def rounds_of(trials: int, *, slots: int, is_first_alone: bool = False) -> int:
    """How often so many slots are filled until as many trials have run; the first may have to run alone."""
    alone = 1 if is_first_alone else 0
    return alone + ceil((trials - alone) / slots)


def _taken_s(record: TrialRecord) -> float:
    """Seconds of a trial; of the baseline without what came after its window: no other is looked at like that."""
    return record.result.own_s if record.number == 0 else record.result.wall_s
