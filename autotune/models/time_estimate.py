"""Estimate the time of trials and of a search, and the training time after which a search has paid off.

Comes in: the trials so far, and a `Pace` of the search to estimate. Goes out: seconds. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from autotune.config.training_config import TrainingConfig
from autotune.policy import POLICY, Estimates
from autotune.records.trial import TrialRecord

_LATEST = 200
"""Latest trials that an estimate uses: it is called several times per trial, and must not slow down
with their number. Our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Input of a search's time estimate."""

    most_trials: int
    """Trials after which the search ends in any case."""
    may_stop_early: bool
    """The search ends by itself if no further gain is expected."""
    records: Sequence[TrialRecord] = ()
    """Trials so far."""
    slots: int = 1
    """Trials that run at once."""
    probe_s: float = 1.0
    """Seconds of the probe."""
    build_s: float = 0.0
    """Part of these saved by trials that share its process; else 0."""
    left_s: float | None = None
    """Seconds left of the timeout; None without one."""
    settling_s: float | None = None
    """Estimated seconds of settling once no trial promises a gain; None before the gain is
    known."""
    is_guided: bool = True
    """A model proposes: it measures the curves of loader and device first, and ends the search
    sooner."""
    estimates: Estimates = POLICY.estimates
    """Durations where nothing was measured."""


def typical_s(records: Sequence[TrialRecord]) -> float:
    """Return the median seconds of a trial; at least one record is needed."""
    return median(_taken_s(record) for record in records[-_LATEST:])


def typical_overhead_s(records: Sequence[TrialRecord], estimates: Estimates) -> float:
    """Return the median seconds of a trial outside its window: build, loader start, warm-up."""
    latest = records[-_LATEST:]
    measured = [record for record in latest if record.measurement is not None]
    if not measured:
        return estimates.overhead_s
    return max(0.0, median(_taken_s(record) - _window_s(record) for record in measured))


def typical_run_s(records: Sequence[TrialRecord], window_s: float, estimates: Estimates) -> float:
    """Return the seconds of a further run; `window_s` is its window if none was measured."""
    windows = [_window_s(record) for record in records[-_LATEST:] if record.measurement is not None]
    return typical_overhead_s(records, estimates) + (median(windows) if windows else window_s)


def overhead_s(record: TrialRecord, build_s: float) -> float:
    """Return the seconds of a repeat outside its window, without measurements after it.

    Args:
        record: The trial to repeat.
        build_s: Seconds in which a new process builds the workload, if trials share one and skip
            that.
    """
    own_s = 0.0 if record.measurement is None else record.measurement.build_s
    return max(0.0, record.result.own_s - _window_s(record)) + max(0.0, build_s - own_s)


def first_batches_s(
    config: TrainingConfig, samples_per_s: float, epoch_samples: int | None, estimates: Estimates
) -> float:
    """Return the seconds in which workers make the batches before a window, at most an epoch.

    Args:
        config: Configuration to measure.
        samples_per_s: Throughput of the loader.
        epoch_samples: Samples of an epoch; None if unknown.
        estimates: Batches of each worker.
    """
    batches = estimates.first_batches * config.process_count * config.num_workers
    samples = config.micro_batch_size * batches
    if epoch_samples is not None:
        samples = min(samples, epoch_samples)
    return samples / samples_per_s


def steps_s(config: TrainingConfig, samples_per_s: float, estimates: Estimates) -> float:
    """Return the seconds of a trial's fewest optimizer steps at a throughput."""
    return estimates.fewest_steps * config.global_batch_size / samples_per_s


def measuring_s(
    config: TrainingConfig, samples_per_s: float, epoch_samples: int | None, estimates: Estimates
) -> float:
    """Return the seconds of measuring a configuration: its optimizer steps, or its workers' first batches.

    At least those that any trial takes.

    Args:
        config: Configuration to measure.
        samples_per_s: Expected throughput.
        epoch_samples: Samples of an epoch; None if unknown.
        estimates: Least seconds, steps and batches.
    """
    return max(
        estimates.least_measuring_s,
        steps_s(config, samples_per_s, estimates),
        first_batches_s(config, samples_per_s, epoch_samples, estimates),
    )


def expected_s(pace: Pace) -> float:
    """Return the expected seconds until a search is decided, at most those left."""
    # The first trial, with the curves if a model proposes
    estimates = pace.estimates
    done = len(pace.records)
    further = further_trials(pace)
    if done == 0:
        start_s = max(0.0, pace.probe_s - pace.build_s)
        trial_s = start_s + estimates.trial_s
        first_s = start_s + estimates.first_trial_s
    else:
        trial_s = typical_s(pace.records)
        first_s = 0.0
    if pace.is_guided and done <= 1 and further:
        first_s += estimates.curves_s

    # Further trials, with the baseline's runs in between
    total = first_s + estimates.baseline_factor * trial_s * ceil(further / pace.slots)

    # Settling, unless the baseline is alone
    if max(1, done) + further > 1:
        settling_s = pace.settling_s
        if settling_s is None:
            settling_s = estimates.settling_runs * (trial_s + pace.build_s)
        total += settling_s
    return total if pace.left_s is None else min(total, pace.left_s)


def further_trials(pace: Pace) -> int:
    """Return the expected trials beyond the baseline; at least one in a search that may stop early."""
    begun = max(1, len(pace.records))
    most = pace.most_trials
    if pace.may_stop_early and begun < most:
        estimates = pace.estimates
        expected = estimates.trials if pace.is_guided else estimates.unguided_trials
        return max(1, expected - begun)
    return max(0, most - begun)


def payback_s(search_s: float, speedup: float) -> float | None:
    """Return the seconds of training at the old throughput after which a search breaks even.

    A training of T seconds now takes T / speedup, which saves T - T / speedup.

    Args:
        search_s: Seconds of the search.
        speedup: New throughput over the old one.

    Returns:
        None if it never does.
    """
    if speedup <= 1:
        return None
    return search_s / (1 - 1 / speedup)


def _window_s(record: TrialRecord) -> float:
    if record.measurement is None:
        return 0.0
    return sum(block.seconds for block in record.measurement.blocks)


def _taken_s(record: TrialRecord) -> float:
    """Return the seconds of a trial; the baseline's without the measurements after its window, which are its own."""
    return record.result.own_s if record.number == 0 else record.result.wall_s
