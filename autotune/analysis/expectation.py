"""What rate other settings should give, from ceilings that were measured one by one. Pure.

Takes an Evidence; `options` hands on the points of its curves that can be advised, `expected_rate` what a pair of them
(one of the loader's, one of the device's) should reach in a run, `rate_without` what a run should that loses less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from autotune.records.ceilings import joint_rate, overlaps
from autotune.records.diagnosis import CurvePoint, Evidence
from autotune.settings.environment import DeviceKind
from autotune.settings.training_config import TrainingConfig
from autotune.space import constraints as rules

__all__ = [
    "DEVICE_SETTINGS",
    "LOADER_SETTINGS",
    "PINNING_KINDS",
    "apply_changes",
    "device_ceiling",
    "device_options",
    "expected_rate",
    "loader_ceiling",
    "loader_cpu_s",
    "loader_options",
    "rate_without",
    "runs_too_many_threads",
    "threads_of",
    "workers_run_too_many_threads",
]

LOADER_SETTINGS = frozenset({"num_workers", "prefetch_factor", "persistent_workers", "pin_memory"})
"""Settings that a loader's curve varies."""
DEVICE_SETTINGS = frozenset({"micro_batch_size", "amp_dtype", "channels_last", "intra_op_threads"})
"""Settings that a device's curve varies."""
PINNING_KINDS: frozenset[DeviceKind] = frozenset({"cuda", "rocm", "xpu"})
"""Devices whose copies are faster from page-locked memory."""
_MOST_SAVED = 0.95
"""Of the wall time, beyond which nothing is promised: our own convention."""
_SEVERAL_THREADS = 1.5
"""Cores that an item keeps busy, from which on it is taken to run in several threads: our own convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """A configuration, and what its two sides reach alone."""

    config: TrainingConfig
    loader: float
    device: float
    loader_cpu_s: float
    """CPU seconds of loading one sample, of all processes."""
    device_cpu_s: float
    """CPU seconds of training on one sample."""


def loader_ceiling(evidence: Evidence) -> float:
    """Rate of the loader alone today; from the items' costs where it was not measured, infinite without those."""
    measured, costs = evidence.measurement.loader_ceiling, evidence.measurement.loader_costs
    if measured is not None:
        return measured
    if costs is None:
        return inf
    sample_s = costs.item_s + costs.collate_s / evidence.config.micro_batch_size
    return max(1, evidence.config.num_workers) / sample_s if sample_s > 0 else inf


def device_ceiling(evidence: Evidence) -> float:
    """Rate of the device alone today; where it was not measured, the rate without the waits for data."""
    run = evidence.measurement
    return run.device_ceiling or run.samples_per_s / max(1.0 - run.data_wait_fraction, 0.01)


def loader_cpu_s(evidence: Evidence) -> float:
    """CPU seconds that the loader needs for one sample: the item's own, and its share of collating the batch."""
    costs = evidence.measurement.loader_costs
    if costs is None:
        return 0.0
    return costs.item_cpu_s + costs.collate_s / evidence.config.micro_batch_size


def loader_options(evidence: Evidence) -> list[CurvePoint]:
    """Loader settings that were measured and may be advised."""
    return _usable(evidence, evidence.curves.loader, LOADER_SETTINGS)


def device_options(evidence: Evidence) -> list[CurvePoint]:
    """Device settings that were measured and may be advised."""
    return _usable(evidence, evidence.curves.device, DEVICE_SETTINGS)


def apply_changes(evidence: Evidence, *points: CurvePoint | None) -> TrainingConfig:
    """Today's configuration with the points' changes."""
    changes = {name: value for point in points if point is not None for name, value in point.changes.items()}
    settings = rules.normalised(evidence.config.model_dump() | changes, evidence.facts, evidence.environment)
    return TrainingConfig.model_validate(settings)


def expected_rate(evidence: Evidence, loader: CurvePoint | None, device: CurvePoint | None) -> float:
    """The rate that a run should reach with the changes of a loader's and of a device's point (None: as today).

    The two ceilings are joined, cores and restarts of epochs counted in; what today's run falls short of its own joint
    rate by is expected to stay, unless the change ends a fight of threads for the cores.
    """
    today, after = _sides(evidence, None, None), _sides(evidence, loader, device)
    joint = _modelled_rate(evidence, after)
    if runs_too_many_threads(evidence, today.config) and not runs_too_many_threads(evidence, after.config):
        return joint
    return min(joint, evidence.measurement.samples_per_s * joint / _modelled_rate(evidence, today))


def rate_without(evidence: Evidence, share: float) -> float:
    """The rate at best, were this share of the time gone: at most the loader's where it works beside the device."""
    present = evidence.measurement.samples_per_s
    freed = present / (1.0 - min(share, _MOST_SAVED))
    if not overlaps(evidence.config, evidence.environment.device_kind):
        return freed
    return max(present, min(freed, loader_ceiling(evidence)))


def threads_of(evidence: Evidence, config: TrainingConfig) -> int:
    """Threads of one operation on the CPU; where torch chooses, what it chose in the curves, else every core."""
    return config.intra_op_threads or evidence.curves.threads or evidence.environment.cores


def runs_too_many_threads(evidence: Evidence, config: TrainingConfig) -> bool:
    """Whether a run on the CPU has more threads and workers than cores."""
    if evidence.environment.device_kind != "cpu":
        return False
    return threads_of(evidence, config) + config.num_workers > evidence.environment.cores


def workers_run_too_many_threads(evidence: Evidence) -> bool:
    """Whether items run in several threads each (OpenCV's, NumPy's), in all more than there are cores."""
    costs, config = evidence.measurement.loader_costs, evidence.config
    if costs is None or costs.cpu_fraction <= _SEVERAL_THREADS:
        return False
    return costs.cpu_fraction * max(1, config.num_workers) * config.process_count > evidence.environment.cores


def _usable(evidence: Evidence, points: Sequence[CurvePoint], settings: frozenset[str]) -> list[CurvePoint]:
    found = []
    for point in points:
        if point.ceiling is not None and point.changes and settings.issuperset(point.changes):
            config = apply_changes(evidence, point)
            if rules.obstacle(config, evidence.facts, evidence.environment, drop_last=evidence.drop_last) is None:
                found.append(point)
    return found


def _sides(evidence: Evidence, loader: CurvePoint | None, device: CurvePoint | None) -> _Sides:
    config = apply_changes(evidence, loader, device)
    own_loader, own_device = _own(evidence.curves.loader), _own(evidence.curves.device)
    loads = _rate(loader) or max(_rate(own_loader) or 0.0, loader_ceiling(evidence))
    trains = _rate(device) or max(_rate(own_device) or 0.0, device_ceiling(evidence))
    loading_s, training_s = _cpu_s(loader or own_loader), _cpu_s(device or own_device)
    if training_s is None:
        training_s = min(threads_of(evidence, config), evidence.environment.cores) / trains
    return _Sides(
        config=config,
        loader=loads,
        device=trains,
        loader_cpu_s=loader_cpu_s(evidence) if loading_s is None else loading_s,
        device_cpu_s=training_s,
    )


def _own(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """Today's settings, measured beside the others of the curve; of two measurements the better one counts."""
    return next((point for point in points if not point.changes), None)


def _rate(point: CurvePoint | None) -> float | None:
    return None if point is None or point.ceiling is None else point.ceiling.samples_per_s


def _cpu_s(point: CurvePoint | None) -> float | None:
    return None if point is None else point.cpu_s_per_sample


def _modelled_rate(evidence: Evidence, sides: _Sides) -> float:
    """Both sides joined. A loader's ceiling holds its restarts already; the device and the cores wait for them too."""
    config, environment = sides.config, evidence.environment
    if config.num_workers == 0:
        return joint_rate(sides.loader, sides.device, is_overlapped=overlaps(config, environment.device_kind))
    restart_s = 0.0 if config.persistent_workers else _restart_s_per_sample(evidence)
    device_s = 1.0 / sides.device
    if environment.device_kind == "cpu":
        device_s = max(device_s, (sides.loader_cpu_s + sides.device_cpu_s) / environment.cores)
    return joint_rate(sides.loader, 1.0 / (device_s + restart_s), is_overlapped=True)


def _restart_s_per_sample(evidence: Evidence) -> float:
    breakdown = evidence.measurement.breakdown
    return 0.0 if breakdown is None else breakdown.restart_fraction / evidence.measurement.samples_per_s
