"""What a group's time goes into: its loaders, its devices and the exchange of gradients, from ceilings. Pure.

Comes in: the best trial of a group, the best on one device, the machine and the trials, as a GroupCase. Goes out: step
times, from which scaling_bottlenecks and scaling_advice calculate what a bottleneck costs and a change saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high

from pydantic import JsonValue

from autotune.diagnosis.strategies import StrategyBest
from autotune.records.ceilings import overlaps
from autotune.records.trial import TrialRecord
from autotune.settings.environment import Environment

__all__ = ["GroupCase", "StepTime"]

_STEP_SETTINGS = ("amp_dtype", "channels_last", "compile")
"""Settings of the step that a search varies beside the batch."""


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
class GroupCase:
    """A group to be judged, what it is compared with, and its time for a sample."""

    group: StrategyBest
    single: StrategyBest | None
    """The best on one device; None where there is none."""
    environment: Environment
    records: Sequence[TrialRecord]
    """All trials of the search."""

    @property
    def cores(self) -> int:
        """Those of all machines that the group was on."""
        return self.environment.cores * max(1, len({rank.host for rank in self.group.ranks}))

    @property
    def actual(self) -> StepTime:
        """Today: the slowest rank sets the group's time."""
        return self._step_time(min)

    @property
    def even(self) -> StepTime:
        """With equal ranks: all would be as fast as the better half is today."""
        return self._step_time(median_high)

    @property
    def ideal_device_s(self) -> float | None:
        """With each device as fast as a single one; None where the single device's ceiling was not measured."""
        alone = None if self.single is None else self.single.device_ceiling
        return 1.0 / (self.group.config.world_size * alone) if alone else None

    @property
    def step_changes(self) -> dict[str, JsonValue]:
        """Settings of the step in which the best on one device differs from the group, with its own values."""
        ours, theirs = self.group.config, (self.single or self.group).config
        values = {name: getattr(theirs, name) for name in _STEP_SETTINGS}
        return {name: value for name, value in values.items() if value != getattr(ours, name)}

    def saved(self, before: StepTime, after: StepTime) -> float:
        """What a change saves of the group's time, in 0..1."""
        return min(1.0, max(0.0, (before.total_s - after.total_s) * self.group.samples_per_s.value))

    def _step_time(self, pick: Callable[[Iterable[float]], float]) -> StepTime:
        config, exchange = self.group.config, self.group.communication

        def seconds(side: str) -> float:
            """Seconds that the group needs for a sample: by its ranks' rates where all are known, else by its own."""
            rates = [rate for rank in self.group.ranks if (rate := getattr(rank, side)) is not None]
            is_known = len(rates) == config.world_size
            rate = config.world_size * pick(rates) if is_known else getattr(self.group, side)
            return 1.0 / rate if rate else 0.0

        return StepTime(
            loader_s=seconds("loader_ceiling"),
            device_s=seconds("device_ceiling"),
            exchange_s=0.0 if exchange is None else exchange.exposed_s / config.global_batch_size,
            is_overlapped=overlaps(config, self.environment.device_kind),
        )
