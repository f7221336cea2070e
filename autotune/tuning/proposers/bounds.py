"""Bounds that no open setting moves: the lowest ceiling of a side, and the cores once the job itself fills them.

Reads the study and what was measured of both sides alone, and changes nothing. Near one of them a search is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, inf
from statistics import fmean, median
from typing import Literal

from autotune.analysis.forecast.observations import ConfiguredPoint
from autotune.note import Note
from autotune.settings.training_config import TrainingConfig
from autotune.settings_table import SETTINGS
from autotune.space.domains import whole_numbers
from autotune.study.study import Study
from autotune.tuning.proposers.outlook import Outlook

__all__ = ["Bound", "bounds_of", "cores_bound"]

_NOT_TRIED = frozenset({"left_to_smaller_batches", "no_time_left"})
"""Reasons of points that nothing has tried to measure."""
_ONLY_IN_RUNS = [setting.name for setting in SETTINGS if setting.is_of_kernels and not setting.is_in_curves]
"""Settings that change a step's work and that no side alone has shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A rate that no open setting can exceed."""

    side: Literal["loader", "device", "host", "copy", "cores"]
    samples_per_s: float
    near_from: float
    """Share of it from which a search is over."""


def bounds_of(
    outlook: Outlook, sides: Sequence[ConfiguredPoint], study: Study, believed: Mapping[int, float]
) -> list[Bound]:
    """Return the bounds that are known: the lowest ceiling, and the cores.

    Args:
        outlook: What a further trial can win; it knows the ceilings.
        sides: What was measured of loader and device alone.
        study: The trials so far, and their space.
        believed: Logarithms of the trials' rates, by number.
    """
    found, policy = list[Bound](), study.space.policy.trials
    if outlook.lower_ceiling < inf:
        found.append(Bound(side=outlook.lower_side, samples_per_s=outlook.lower_ceiling, near_from=policy.near_ceiling))
    cores = cores_bound(sides, study, believed)
    if cores is not None:
        found.append(Bound(side="cores", samples_per_s=cores, near_from=policy.near_cores))
    return found


def cores_bound(sides: Sequence[ConfiguredPoint], study: Study, believed: Mapping[int, float]) -> float | None:
    """Return the rate at which the job by itself would fill every core, at the least work that a sample may take.

    That least work is the smaller of two figures, so that a setting that wastes cores, as threads that wait for each
    other do, bounds nothing: the CPU seconds of a sample in the cheapest trial so far, and what the cheapest loader and
    the cheapest step take alone, over all open settings. Trials with and without workers are bounded by themselves: a
    loader without workers spares the work of passing batches on, and fills one core at most.

    Returns:
        Samples per second. None where the kernel does not count the cores, before a trial with workers where these are
        open, where no side was measured alone, and on several hosts.
    """
    space, worked, cores = study.space, dict[TrainingConfig, float](), 0
    for record in study.ended:
        loads = [run.host_load for run in record.runs if run.host_load is not None and not run.host_load.is_loaded]
        if loads and record.number in believed:
            cores = max(cores, *(load.cores for load in loads))
            busy_cores = fmean(load.own_s / load.seconds for load in loads)
            worked[record.config] = max(busy_cores, 1e-6) / exp(believed[record.number])
    if not worked or space.environment.hosts > 1:
        return None
    counts = {space.baseline.num_workers, *whole_numbers(space.domains["num_workers"])}
    step_cpu_s = _least_step_cpu_s(sides, study, worked)
    most = 0.0
    for has_workers in {count > 0 for count in counts}:
        alike = [cpu_s for config, cpu_s in worked.items() if (config.num_workers > 0) == has_workers]
        if not alike:
            return None
        loaders = [side for side in sides if side.side == "loader" and (side.config.num_workers > 0) == has_workers]
        alone_cpu_s = _least_loader_cpu_s(loaders) + step_cpu_s
        if alone_cpu_s == 0:
            return None
        bound = cores / min(*alike, alone_cpu_s)
        if not has_workers:
            rates = [side.point.ceiling.samples_per_s for side in loaders if side.point.ceiling is not None]
            bound = min(bound, max(rates, default=inf))
        most = max(most, bound)
    return most


def _least_loader_cpu_s(loaders: Sequence[ConfiguredPoint]) -> float:
    """CPU seconds of a sample in the cheapest loader; 0 where that was not measured.

    Only threads and batch change a loader's work; of all points that agree in these the median is taken, since a
    stretch of 0.2 s counts CPU time in steps of 5 %.
    """
    known = [
        ((side.config.worker_threads or 0, side.config.micro_batch_size), side.point.cpu_s_per_sample)
        for side in loaders
        if side.point.ceiling is not None and side.point.cpu_s_per_sample is not None
    ]
    groups = groupby(sorted(known), key=lambda pair: pair[0])
    return min((median(cpu_s for _, cpu_s in group) for _, group in groups), default=0.0)


def _least_step_cpu_s(sides: Sequence[ConfiguredPoint], study: Study, ran: Collection[TrainingConfig]) -> float:
    """CPU seconds of a sample in the cheapest step, over all open settings; 0 where a setting is yet to be measured.

    0 on an accelerator too: a host that waits for it keeps a core busy, which is no work.
    """
    space = study.space
    if space.environment.device_kind != "cpu":
        return 0.0
    for name in _ONLY_IN_RUNS:
        if not set(space.domains[name]) <= {getattr(config, name) for config in ran}:
            return 0.0
    steps = [side for side in sides if side.side == "device" and not study.is_left_out(side.config)]
    reasons = (side.point.reason for side in steps if side.point.ceiling is None)
    if any(isinstance(reason, Note) and reason.code in _NOT_TRIED for reason in reasons):
        return 0.0
    known = (side.point.cpu_s_per_sample for side in steps if side.point.ceiling is not None)
    return min((cpu_s for cpu_s in known if cpu_s is not None), default=0.0)  # not counted where a trial measured it
