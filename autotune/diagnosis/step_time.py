"""What sets a group's pace: its loaders, its devices and the exchange of gradients, from ceilings measured alone. Pure.

Takes the best trial of a group, the best on one device and the machine; hands on Paces, from which `core.brakes` tells
what holds the group and `core.group_advice` what a change should bring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from autotune.diagnosis.strategies import StrategyBest
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import overlaps
from autotune.settings.environment import Environment

__all__ = ["GroupCase", "Pace", "Paces", "paces_of", "smaller_batch", "step_changes"]

_STEP_SETTINGS = ("amp_dtype", "channels_last", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCase:
    """A group that is to be judged, and what it is judged by."""

    group: StrategyBest
    single: StrategyBest | None
    """The best on one device; None where there is none."""
    environment: Environment
    is_ddp_tried: bool = False
    """Some trial ran under ddp."""
    is_hook_tried: bool = False
    """Some trial compressed its gradients."""
    loader_costs: LoaderCosts | None = None
    """What an item costs, from whichever trial has looked."""

    @property
    def members(self) -> str:
        """Whom the group is made of, for a sentence: "2 ranks", under DataParallel "2 devices"."""
        config = self.group.config
        return f"{config.world_size} {'ranks' if config.strategy == 'ddp' else 'devices'}"

    @property
    def cores(self) -> int:
        """Those of all machines that the group was on."""
        return self.environment.cores * max(1, len({one.host for one in self.group.ranks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds that a sample takes the whole group, by side; what was not measured takes none."""

    loader_s: float
    device_s: float
    exchange_s: float
    is_overlapped: bool
    """Loading goes on beside training."""

    @property
    def computing_s(self) -> float:
        """The devices with their exchange."""
        return self.device_s + self.exchange_s

    @property
    def total_s(self) -> float:
        """Both sides joined: side by side, or one after the other."""
        return max(self.loader_s, self.computing_s) if self.is_overlapped else self.loader_s + self.computing_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """A group's pace as it is, as it would be with its ranks alike, and with each device as fast as the single one."""

    samples_per_s: float
    """The rate that the group has."""
    actual: Pace
    even: Pace
    ideal_device_s: float | None
    """None where the single device's ceiling was not measured."""

    def saved(self, before: Pace, after: Pace) -> float:
        """What a change saves of the time that the group takes, in 0..1."""
        return min(1.0, max(0.0, (before.total_s - after.total_s) * self.samples_per_s))


def paces_of(case: GroupCase) -> Paces:
    """A group's paces: the slowest rank sets it; were the ranks alike, all would keep that of the better half."""
    group, single, count = case.group, case.single, case.group.config.world_size
    loaders = [rank.loader_ceiling for rank in group.ranks if rank.loader_ceiling is not None]
    devices = [rank.device_ceiling for rank in group.ranks if rank.device_ceiling is not None]
    talk = group.communication
    actual = Pace(
        loader_s=_seconds(loaders, min, group.loader_ceiling, count),
        device_s=_seconds(devices, min, group.device_ceiling, count),
        exchange_s=0.0 if talk is None else talk.exposed_s / group.config.global_batch_size,
        is_overlapped=overlaps(group.config, case.environment.device_kind),
    )
    even = replace(
        actual,
        loader_s=_seconds(loaders, median_high, group.loader_ceiling, count),
        device_s=_seconds(devices, median_high, group.device_ceiling, count),
    )
    ideal_rate = None if single is None or single.device_ceiling is None else count * single.device_ceiling
    return Paces(
        samples_per_s=group.samples_per_s.value,
        actual=actual,
        even=even,
        ideal_device_s=1.0 / ideal_rate if ideal_rate else None,
    )


def step_changes(case: GroupCase) -> dict[str, object]:
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
    """Seconds that a sample takes the group: by its ranks' rates where all are known, else by its own."""
    rate = count * pick(rates) if len(rates) == count else of_group
    return 1.0 / rate if rate else 0.0
