"""The rate to expect of other settings, from ceilings that were measured one by one. Pure.

Comes in: an Evidence. Goes out: the points of its curves that can be advised, the rate of a run with a pair of them
(one of the loader's, one of the device's), and the rate of a run that loses less time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import inf
from typing import Literal

from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import joint_rate, overlaps
from autotune.records.diagnosis import CurvePoint, Evidence
from autotune.settings.environment import DeviceKind
from autotune.settings.training_config import LOADER_SETTINGS, TrainingConfig
from autotune.space import constraints as rules

__all__ = [
    "DEVICE_SETTINGS",
    "PINNING_KINDS",
    "advisable_points",
    "apply_changes",
    "device_ceiling",
    "expected_rate",
    "join_rates",
    "loader_ceiling",
    "loader_cpu_s",
    "loader_processes",
    "rate_without",
    "runs_too_many_threads",
    "threads_of",
    "with_collating",
    "workers_run_too_many_threads",
]

DEVICE_SETTINGS = frozenset({"micro_batch_size", "amp_dtype", "channels_last", "intra_op_threads"})
"""Settings that a device's curve varies."""
PINNING_KINDS: frozenset[DeviceKind] = frozenset({"cuda", "rocm", "xpu"})
"""Devices whose copies are faster from page-locked memory."""
_MOST_SAVED_FRACTION = 0.95
"""Share of the wall time that can be saved at the most: our own convention."""
_SEVERAL_THREADS = 1.5
"""Cores that an item keeps busy, from which on it counts as running in several threads: our own convention."""
_LEAST_BUSY_SHARE = 0.01
"""Least share of the time without waits for data from which a device's ceiling is derived: our own convention."""


def loader_ceiling(evidence: Evidence) -> float:
    """Rate of the loader alone today, from the items' costs where it was not measured; infinite without those."""
    measured, costs = evidence.measurement.loader_ceiling, evidence.measurement.loader_costs
    if measured is not None:
        return measured
    sample_s = 0.0 if costs is None else with_collating(evidence, costs, costs.item_s)
    return max(1, evidence.config.num_workers) / sample_s if sample_s > 0 else inf


def device_ceiling(evidence: Evidence) -> float:
    """Rate of the device alone today; where it was not measured, the rate without the waits for data."""
    run = evidence.measurement
    return run.device_ceiling or run.samples_per_s / max(1.0 - run.data_wait_fraction, _LEAST_BUSY_SHARE)


def loader_cpu_s(evidence: Evidence) -> float:
    """CPU seconds of the loader for one sample: the item, and its share of collating the batch."""
    costs = evidence.measurement.loader_costs
    return 0.0 if costs is None else with_collating(evidence, costs, costs.item_cpu_s)


def with_collating(evidence: Evidence, costs: LoaderCosts, item_s: float) -> float:
    """Seconds of one sample in the loader: the item's, and its share of collating the batch."""
    return item_s + costs.collate_s / evidence.config.micro_batch_size


def join_rates(evidence: Evidence, loader: float, device: float) -> float:
    """The rate that a loader and a device reach together with today's settings."""
    return joint_rate(loader, device, is_overlapped=overlaps(evidence.config, evidence.environment.device_kind))


def advisable_points(evidence: Evidence, side: Literal["loader", "device"]) -> list[CurvePoint]:
    """Settings of one side that were measured and can be advised."""
    settings: Collection[str] = LOADER_SETTINGS if side == "loader" else DEVICE_SETTINGS
    found: list[CurvePoint] = [point for point in getattr(evidence.curves, side) if point.ceiling is not None]
    varied = [point for point in found if point.changes and {*point.changes} <= {*settings}]
    obstacle = partial(rules.obstacle, drop_last=evidence.drop_last)
    machine = evidence.facts, evidence.environment
    return [point for point in varied if obstacle(apply_changes(evidence, point), *machine) is None]


def apply_changes(evidence: Evidence, *points: CurvePoint | None) -> TrainingConfig:
    """Today's configuration with the points' changes."""
    changes = {name: value for point in points if point is not None for name, value in point.changes.items()}
    settings = rules.normalised(evidence.config.model_dump() | changes, evidence.facts, evidence.environment)
    return TrainingConfig.model_validate(settings)


def expected_rate(evidence: Evidence, loader: CurvePoint | None, device: CurvePoint | None) -> float:
    """The rate of a run with the changes of a loader's and of a device's point (None: as today).

    Both ceilings are joined, with cores and restarts of epochs. Today's run falls short of its own joint rate by some
    share, which is expected to stay, unless the change ends an oversubscription of the cores.
    """
    own, config = apply_changes(evidence), apply_changes(evidence, loader, device)
    joint, today = _joint_rate(evidence, config, loader, device), _joint_rate(evidence, own, None, None)
    if runs_too_many_threads(evidence, own) and not runs_too_many_threads(evidence, config):
        return joint
    return min(joint, evidence.measurement.samples_per_s * joint / today)


def rate_without(evidence: Evidence, share: float) -> float:
    """The best rate without this share of the time: at most the loader's where it works beside the device."""
    present = evidence.measurement.samples_per_s
    most = loader_ceiling(evidence) if overlaps(evidence.config, evidence.environment.device_kind) else inf
    return max(present, min(present / (1.0 - min(share, _MOST_SAVED_FRACTION)), most))


def threads_of(evidence: Evidence, config: TrainingConfig) -> int:
    """Threads of one operation on the CPU; where torch chooses, what it chose in the curves, else every core."""
    return config.intra_op_threads or evidence.curves.threads or evidence.environment.cores


def runs_too_many_threads(evidence: Evidence, config: TrainingConfig) -> bool:
    """Whether a run on the CPU has more threads and workers than cores."""
    running, environment = threads_of(evidence, config) + config.num_workers, evidence.environment
    return environment.device_kind == "cpu" and running > environment.cores


def workers_run_too_many_threads(evidence: Evidence) -> bool:
    """Whether items run in several threads each (OpenCV's, NumPy's), in all more than there are cores."""
    costs, loaders = evidence.measurement.loader_costs, loader_processes(evidence.config)
    if costs is None or costs.cpu_fraction <= _SEVERAL_THREADS:
        return False
    return costs.cpu_fraction * loaders > evidence.environment.cores


def loader_processes(config: TrainingConfig) -> int:
    """Processes that make items, of all ranks: their workers, or else the ranks themselves."""
    return max(1, config.num_workers) * config.process_count


def _joint_rate(
    evidence: Evidence, config: TrainingConfig, loader: CurvePoint | None, device: CurvePoint | None
) -> float:
    """Both sides joined. A loader's ceiling includes its restarts; the device and the cores wait for them too.

    Of today's own settings, which were measured in the run and in the curves, the better measurement counts.
    """
    environment = evidence.environment
    own_loader, own_device = _own(evidence.curves.loader), _own(evidence.curves.device)
    loader_rate = _rate(loader) or max(_rate(own_loader), loader_ceiling(evidence))
    device_rate = _rate(device) or max(_rate(own_device), device_ceiling(evidence))
    if config.num_workers == 0:
        return joint_rate(loader_rate, device_rate, is_overlapped=overlaps(config, environment.device_kind))
    device_s, breakdown = 1.0 / device_rate, evidence.measurement.breakdown
    if environment.device_kind == "cpu":
        busy_s = min(threads_of(evidence, config), environment.cores) / device_rate
        loading_s = _cpu_s(loader or own_loader, unmeasured=loader_cpu_s(evidence))
        training_s = _cpu_s(device or own_device, unmeasured=busy_s)
        device_s = max(device_s, (loading_s + training_s) / environment.cores)
    if breakdown is not None and not config.persistent_workers:
        device_s += breakdown.restart_fraction / evidence.measurement.samples_per_s
    return joint_rate(loader_rate, 1.0 / device_s, is_overlapped=True)


def _own(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """Today's settings, measured beside the others of the curve."""
    return next((point for point in points if not point.changes), None)


def _rate(point: CurvePoint | None) -> float:
    return 0.0 if point is None or point.ceiling is None else point.ceiling.samples_per_s


def _cpu_s(point: CurvePoint | None, *, unmeasured: float) -> float:
    return unmeasured if point is None or point.cpu_s_per_sample is None else point.cpu_s_per_sample
