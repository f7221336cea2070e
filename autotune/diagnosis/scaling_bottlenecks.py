"""What keeps several devices from as many times the rate of a single device, from figures alone. Pure.

Comes in: a GroupCase, with the best trial of a group, the best on one device, the machine and the trials. Goes out: the
group's bottlenecks, the largest share first. The times of a step, from the ceilings of loaders
and devices and the exchange of gradients, say what a bottleneck costs, and to scaling_advice what a change saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Literal

from pydantic import Field, JsonValue

from autotune.analysis.forecast.rate_law import joint_s
from autotune.diagnosis.strategies import StrategyBest
from autotune.frozen import FrozenModel
from autotune.messages import scaling as messages
from autotune.note import Note
from autotune.records.ceilings import overlaps
from autotune.records.ranks import name_devices, uneven_ranks
from autotune.records.trial import TrialRecord
from autotune.settings.environment import Environment
from autotune.settings_table import SETTINGS

__all__ = ["LEAST_SHARE", "Cause", "GroupCase", "ScalingBottleneck", "StepTime", "find_scaling_bottlenecks"]

Cause = Literal["communication", "loader", "uneven_rank", "small_batch", "settings", "shared_machine"]

LEAST_SHARE = 0.05
"""Of the group's time, below which nothing is a bottleneck: our own convention, over twice a window's 2 % interval."""
_STEP_SETTINGS = [setting.name for setting in SETTINGS if setting.is_of_kernels]
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
        """Both sides together, by the law that a search forecasts by."""
        return joint_s(self.loader_s, self.computing_s, is_overlapped=self.is_overlapped)


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


class ScalingBottleneck(FrozenModel):
    """Something that the group's time goes into."""

    cause: Cause
    share: float
    """Of the group's time: what would be saved without it. The shares of two bottlenecks may overlap."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """The figures that show it, by name."""
    evidence: str
    """The same in a sentence."""


def find_scaling_bottlenecks(case: GroupCase) -> tuple[ScalingBottleneck, ...]:
    """What takes at least 5 % of the group's time, the largest share first; () where no figure shows anything."""
    found = filter(None, [_uneven(case), _loading(case), _exchanging(case), _computing(case)])
    heavy = [bottleneck for bottleneck in found if bottleneck.share >= LEAST_SHARE]
    return tuple(sorted(heavy, key=lambda bottleneck: -bottleneck.share))


def _uneven(case: GroupCase) -> ScalingBottleneck | None:
    devices = name_devices(case.group.ranks)
    uneven = [
        messages.UnevenRank(rank=rank, device=devices[rank], side=slow.side, fraction=slow.fraction)
        for rank, slow in uneven_ranks(case.group.ranks).items()
    ]
    if not uneven:
        return None
    return _saved(case, "uneven_rank", case.actual, case.even, messages.uneven_rank_evidence(ranks=uneven))


def _loading(case: GroupCase) -> ScalingBottleneck | None:
    even = case.even
    if even.loader_s <= 0:
        return None
    rates = messages.loader_evidence(
        ranks=case.group.config.process_count,
        is_overlapped=even.is_overlapped,
        loader_samples_per_s=1 / even.loader_s,
        device_samples_per_s=1 / even.computing_s if even.computing_s > 0 else None,
    )
    return _saved(case, "loader", even, replace(even, loader_s=0.0), rates)


def _exchanging(case: GroupCase) -> ScalingBottleneck | None:
    exchange = case.group.communication
    if exchange is None:
        return None
    exposed = messages.communication_evidence(
        bytes_exchanged=exchange.bytes_exchanged,
        exposed_s=exchange.exposed_s,
        exposed_fraction=exchange.exposed_fraction,
        hidden_fraction=exchange.hidden_fraction,
    )
    return _saved(case, "communication", case.actual, replace(case.actual, exchange_s=0.0), exposed)


def _computing(case: GroupCase) -> ScalingBottleneck | None:
    """Devices that are slower in the group than a single device is.

    Source of what DataParallel does: pytorch.org, torch.nn.DataParallel.
    """
    even, ideal_s, single, config = case.even, case.ideal_device_s, case.single, case.group.config
    if single is None or ideal_s is None or even.device_s <= ideal_s:
        return None
    is_cpu = case.environment.device_kind == "cpu"
    batch, single_batch = config.micro_batch_size, single.config.micro_batch_size
    reached = ideal_s / even.device_s
    cause: Cause
    if config.strategy == "dp":
        cause = "communication"
        evidence = messages.data_parallel_evidence(world_size=config.world_size, reached_fraction=reached)
    elif case.step_changes:
        cause = "settings"
        evidence = messages.settings_evidence(settings=case.step_changes, reached_fraction=reached)
    elif single_batch > batch and not is_cpu:
        cause = "small_batch"
        evidence = messages.small_batch_evidence(
            micro_batch_size=batch, single_batch_size=single_batch, reached_fraction=reached
        )
    else:
        cause = "shared_machine"
        cores = case.cores if is_cpu else None
        evidence = messages.shared_machine_evidence(ranks=config.world_size, cores=cores, reached_fraction=reached)
    return _saved(case, cause, even, replace(even, device_s=ideal_s), evidence)


def _saved(case: GroupCase, cause: Cause, before: StepTime, after: StepTime, evidence: Note) -> ScalingBottleneck:
    """Return a bottleneck whose share is what the group would save without it."""
    share = case.saved(before, after)
    return ScalingBottleneck(cause=cause, share=share, figures=evidence.figures, evidence=evidence.text)
