"""What a diagnosis takes from its evidence before it expects rates: ceilings, settings to advise, threads. Pure.

Comes in: an Evidence. Goes out: its ceilings, the points of its curves that can be advised, what these make of today's
configuration, the rate of a run that loses less time, and whether threads oversubscribe the cores.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from math import inf
from typing import Literal

from autotune.analysis.forecast.rate_law import joint_rate
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import overlaps
from autotune.records.diagnosis import CurvePoint, Evidence
from autotune.settings.environment import DeviceKind
from autotune.settings.training_config import LOADER_SETTINGS, TrainingConfig
from autotune.settings_table import SETTINGS
from autotune.space import constraints as rules

__all__ = [
    "DEVICE_SETTINGS",
    "PINNING_KINDS",
    "advisable_points",
    "apply_changes",
    "copy_ceilings",
    "cores_ceiling",
    "device_ceiling",
    "device_cores",
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

DEVICE_SETTINGS = frozenset(setting.name for setting in SETTINGS if setting.is_in_curves)
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
    """Rate of the device alone today; where it was not measured, the rate without the waits; infinite without those."""
    run = evidence.measurement
    if run.device_ceiling is None and run.data_wait_fraction is None:
        return inf
    return run.device_ceiling or run.samples_per_s / max(1.0 - (run.data_wait_fraction or 0.0), _LEAST_BUSY_SHARE)


def copy_ceilings(evidence: Evidence) -> dict[bool, float]:
    """Rates of copying batches alone by whether they are pinned, as far as they were measured: today's by the run."""
    own = evidence.config.pin_memory
    known = {
        bool(point.changes.get("pin_memory", own)): point.ceiling.samples_per_s
        for point in evidence.curves.copy
        if point.ceiling is not None
    }
    today = evidence.measurement.copy_ceiling
    return known if today is None else known | {own: today}


def loader_cpu_s(evidence: Evidence) -> float:
    """CPU seconds of the loader for one sample: the item, and its share of collating the batch."""
    costs = evidence.measurement.loader_costs
    return 0.0 if costs is None else with_collating(evidence, costs, costs.item_cpu_s)


def with_collating(evidence: Evidence, costs: LoaderCosts, item_s: float) -> float:
    """Seconds of one sample in the loader: the item's, and its share of collating the batch."""
    return item_s + costs.collate_s / evidence.config.micro_batch_size


def device_cores(evidence: Evidence) -> float:
    """Return the cores that computing keeps busy at the device's ceiling, in the most economical number of threads."""
    if evidence.environment.device_kind != "cpu":
        return 0.0
    measured = [
        point.cpu_s_per_sample
        for point in evidence.curves.device
        if point.cpu_s_per_sample is not None and set(point.changes) <= {"intra_op_threads"}
    ]
    if measured:
        return min(measured) * device_ceiling(evidence)
    return float(min(threads_of(evidence, evidence.config), evidence.environment.cores))


def cores_ceiling(evidence: Evidence) -> float:
    """Return the rate at which loading and computing keep all cores busy, whatever the number of workers.

    Infinite where the CPU time of neither is known.
    """
    sample_s = loader_cpu_s(evidence) + device_cores(evidence) / device_ceiling(evidence)
    return evidence.environment.cores / sample_s if sample_s > 0 else inf


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
