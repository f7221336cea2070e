"""What a group's time goes into: its loaders, its devices and the exchange of gradients, from ceilings. Pure.

Comes in: a GroupCase, with the best trial of a group, the best on one device and the machine. Goes out: step times,
from which scaling_bottlenecks and scaling_advice calculate what a bottleneck costs and a change saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_high

from pydantic import JsonValue

from autotune.diagnosis.strategies import StrategyBest
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import overlaps
from autotune.settings.environment import Environment

__all__ = ["GroupCase", "GroupTimes", "StepTime", "group_times", "smaller_batch", "step_changes"]

_STEP_SETTINGS = ("amp_dtype", "channels_last", "compile")
"""Settings of the step that a search varies beside the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCase:
    """A group to be judged, and what it is compared with."""

    group: StrategyBest
    single: StrategyBest | None
    """The best on one device; None where there is none."""
    environment: Environment
    is_ddp_tried: bool = False
    """Some trial ran under ddp."""
    is_hook_tried: bool = False
    """Some trial compressed its gradients."""
    loader_costs: LoaderCosts | None = None
    """What an item costs, from any trial that has measured it."""

    @property
    def cores(self) -> int:
        """Those of all machines that the group was on."""
        return self.environment.cores * max(1, len({rank.host for rank in self.group.ranks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds that the group needs for a sample, by side; 0 for what was not measured."""

    loader_s: float
    device_s: float
    exchange_s: float
    is_overlapped: bool
    """Loading overlaps with training."""

    @property
    def computing_s(self) -> float:
        """The devices with their exchange."""
        return self.device_s + self.exchange_s

    @property
    def total_s(self) -> float:
        """Both sides joined: at the same time, or one after the other."""
        return max(self.loader_s, self.computing_s) if self.is_overlapped else self.loader_s + self.computing_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """A group's time for a sample: today, with equal ranks, and with each device as fast as a single one."""

    samples_per_s: float
    """The rate that the group has."""
    actual: StepTime
    even: StepTime
    ideal_device_s: float | None
    """None where the single device's ceiling was not measured."""

    def saved(self, before: StepTime, after: StepTime) -> float:
        """What a change saves of the group's time, in 0..1."""
        return min(1.0, max(0.0, (before.total_s - after.total_s) * self.samples_per_s))


def group_times(case: GroupCase) -> GroupTimes:
    """The slowest rank sets the group's time; equal ranks would all be as fast as the better half is today."""
    group, single, count = case.group, case.single, case.group.config.world_size
    loaders = [rank.loader_ceiling for rank in group.ranks if rank.loader_ceiling is not None]
    devices = [rank.device_ceiling for rank in group.ranks if rank.device_ceiling is not None]
    exchange = group.communication

    def time_by(pick: Callable[[Sequence[float]], float]) -> StepTime:
        return StepTime(
            loader_s=_seconds(loaders, pick, group.loader_ceiling, count),
            device_s=_seconds(devices, pick, group.device_ceiling, count),
            exchange_s=0.0 if exchange is None else exchange.exposed_s / group.config.global_batch_size,
            is_overlapped=overlaps(group.config, case.environment.device_kind),
        )

    alone = None if single is None else single.device_ceiling
    return GroupTimes(
        samples_per_s=group.samples_per_s.value,
        actual=time_by(min),
        even=time_by(median_high),
        ideal_device_s=1.0 / (count * alone) if alone else None,
    )


def step_changes(case: GroupCase) -> dict[str, JsonValue]:
    """Settings of the step in which the best on one device differs from the group, with its own values."""
    if case.single is None:
        return {}
    ours, theirs = case.group.config, case.single.config
    values = {name: getattr(theirs, name) for name in _STEP_SETTINGS}
    return {name: value for name, value in values.items() if value != getattr(ours, name)}


def smaller_batch(case: GroupCase) -> int | None:
    """The micro batch of the best on one device, where the group's is smaller; else None."""
    if case.single is None or case.single.config.micro_batch_size <= case.group.config.micro_batch_size:
        return None
    return case.single.config.micro_batch_size


def _seconds(
    rates: Sequence[float], pick: Callable[[Sequence[float]], float], of_group: float | None, count: int
) -> float:
    """Seconds that the group needs for a sample: by its ranks' rates where all are known, else by its own."""
    rate = count * pick(rates) if len(rates) == count else of_group
    return 1.0 / rate if rate else 0.0
