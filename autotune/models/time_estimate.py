"""How long trials and a whole search take, and after how much training the search has paid for itself.

Comes in: the trials so far, and a Pace for the search that is to be estimated. Goes out: seconds.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from statistics import median

from autotune.config.training_config import TrainingConfig
from autotune.records.trial import TrialRecord

_LATEST = 200
"""Trials that tell what a trial takes: our own convention; asked for several times a trial, which
must not take longer the more there were."""
_EXPECTED_TRIALS = 9
"""Of a search that may stop by itself. Source: benchmarks/regret.py."""
_EXPECTED_UNGUIDED_TRIALS = 20
"""Of one that only its patience ends, after 16 trials and 12 since the last gain: our own
convention."""
_FIRST_TRIAL_S = 4.0
_TRIAL_S = 2.5
_CURVES_S = 8.0
"""Estimates before anything was measured, starts excluded: the baseline with ceilings and profile,
another run, and the curves. Our own conventions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What an estimate of a search is made from."""

    most_trials: int
    """Trials after which the search ends in any case."""
    may_stop_early: bool
    """The search ends by itself where no further gain is expected."""
    records: Sequence[TrialRecord] = ()
    """The trials so far."""
    slots: int = 1
    """Trials that run at once."""
    probe_s: float = 1.0
    """Seconds that the probe took."""
    build_s: float = 0.0
    """Of these, what trials that share its process spare; else 0."""
    left_s: float | None = None
    """Seconds left of the time-out; None without one."""
    settling_s: float | None = None
    """Seconds that deciding should take once no trial promises more; None before anything is known
    of the gain."""
    is_guided: bool = True
    """A model proposes: it measures the curves of loader and device first, and ends the search
    sooner."""


def typical_s(records: Sequence[TrialRecord]) -> float:
    """Seconds of a trial, from at least one record."""
    return median(_taken_s(record) for record in records[-_LATEST:])


def typical_overhead_s(records: Sequence[TrialRecord]) -> float:
    """Seconds of a trial outside its window: build, loader's start, warm-up."""
    latest = records[-_LATEST:]
    beyond = [
        _taken_s(record) - _window_s(record) for record in latest if record.measurement is not None
    ]
    return max(0.0, median(beyond)) if beyond else 1.5


def typical_run_s(records: Sequence[TrialRecord], window_s: float) -> float:
    """Return the seconds of a further run; `window_s` is its window where none was measured."""
    windows = [_window_s(record) for record in records[-_LATEST:] if record.measurement is not None]
    return typical_overhead_s(records) + (median(windows) if windows else window_s)


def overhead_s(record: TrialRecord, build_s: float = 0.0) -> float:
    """Seconds that a run of a trial's settings takes outside its window, without what is measured after it.

    Args:
        record: The trial.
        build_s: What a new process takes to build the workload, where trials share one and need
            not.
    """
    own_s = 0.0 if record.measurement is None else record.measurement.build_s
    return max(0.0, record.result.own_s - _window_s(record)) + max(0.0, build_s - own_s)


def first_batches_s(
    config: TrainingConfig, samples_per_s: float, epoch_samples: int | None
) -> float:
    """Seconds in which workers make the batches that come before a window; these exceed no epoch."""
    # of each worker its first one, and one while steps become steady
    batches = 2 * config.process_count * config.num_workers
    samples = config.micro_batch_size * batches
    return min(samples, inf if epoch_samples is None else epoch_samples) / samples_per_s


def steps_s(config: TrainingConfig, samples_per_s: float) -> float:
    """Seconds of the fewest optimizer steps that a trial takes at a rate."""
    return (
        6 * config.global_batch_size / samples_per_s
    )  # three before its window, three blocks in it


def measuring_s(config: TrainingConfig, samples_per_s: float, epoch_samples: int | None) -> float:
    """Seconds that measuring a configuration takes at a rate: its optimizer steps, or its workers' first batches.

    No less than what any trial takes.
    """
    return max(
        10.0, steps_s(config, samples_per_s), first_batches_s(config, samples_per_s, epoch_samples)
    )


def rounds_of(trials: int, *, slots: int, is_first_alone: bool = False) -> int:
    """How often so many slots are filled until as many trials have run; the first may have to run alone."""
    alone = 1 if is_first_alone else 0
    return alone + ceil((trials - alone) / slots)


def expected_s(pace: Pace) -> float:
    """Seconds that a search is expected to go on until it is decided; at most what is left."""
    done = len(pace.records)
    further = further_trials(pace)
    if done == 0:
        start_s = max(0.0, pace.probe_s - pace.build_s)
        trial_s = start_s + _TRIAL_S
        first_s = start_s + _FIRST_TRIAL_S + (_CURVES_S if pace.is_guided and further else 0.0)
    else:
        trial_s = typical_s(pace.records)
        first_s = _CURVES_S if pace.is_guided and done == 1 and further else 0.0
    # 1.1: the baseline runs again after every third trial
    total = first_s + 1.1 * trial_s * rounds_of(further, slots=pace.slots)
    if max(1, done) + further > 1:  # a baseline alone is compared with nothing
        # leader and baseline, twice each (benchmarks/regret.py)
        total += 4 * (trial_s + pace.build_s) if pace.settling_s is None else pace.settling_s
    return total if pace.left_s is None else min(total, pace.left_s)


def further_trials(pace: Pace) -> int:
    """Trials beyond the baseline that are still to come; at least one in a search that may stop by itself."""
    begun = max(1, len(pace.records))
    most = pace.most_trials
    if pace.may_stop_early and begun < most:
        return max(1, (_EXPECTED_TRIALS if pace.is_guided else _EXPECTED_UNGUIDED_TRIALS) - begun)
    return max(0, most - begun)


def payback_s(search_s: float, speedup: float) -> float | None:
    """Seconds of training at the old speed after which a search breaks even; None where it never does.

    A training of T seconds takes T / speedup now, which saves T - T / speedup.
    """
    return search_s / (1 - 1 / speedup) if speedup > 1 else None


def _window_s(record: TrialRecord) -> float:
    return (
        0.0
        if record.measurement is None
        else sum(block.seconds for block in record.measurement.blocks)
    )


def _taken_s(record: TrialRecord) -> float:
    """Seconds of a trial. The baseline's without what follows its window, which no other trial measures."""
    return record.result.own_s if record.number == 0 else record.result.wall_s
