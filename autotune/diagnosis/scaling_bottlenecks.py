"""What keeps several devices from as many times the rate of a single device, from figures alone. Pure.

Comes in: a GroupCase. Goes out: the group's bottlenecks as codes with figures, the largest share first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, JsonValue

from autotune.diagnosis.gains import figures_of
from autotune.diagnosis.group_case import GroupCase, StepTime
from autotune.frozen import FrozenModel
from autotune.records.ranks import name_devices, uneven_ranks

__all__ = ["LEAST_SHARE", "Cause", "ScalingBottleneck", "find_scaling_bottlenecks"]

Cause = Literal["communication", "loader", "uneven_rank", "small_batch", "settings", "shared_machine"]

LEAST_SHARE = 0.05
"""Of the group's time, below which nothing is a bottleneck: our own convention, over twice a window's 2 % interval."""


class ScalingBottleneck(FrozenModel):
    """Something that the group's time goes into."""

    cause: Cause
    share: float
    """Of the group's time: what would be saved without it. The shares of two bottlenecks may overlap."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """The figures that show it, by name."""


def find_scaling_bottlenecks(case: GroupCase) -> tuple[ScalingBottleneck, ...]:
    """What takes at least 5 % of the group's time, the largest share first; () where no figure shows anything."""
    found = filter(None, [_uneven(case), _loading(case), _exchanging(case), _computing(case)])
    heavy = [bottleneck for bottleneck in found if bottleneck.share >= LEAST_SHARE]
    return tuple(sorted(heavy, key=lambda bottleneck: -bottleneck.share))


def _uneven(case: GroupCase) -> ScalingBottleneck | None:
    devices = name_devices(case.group.ranks)
    uneven: list[JsonValue] = [
        {"rank": rank, "device": devices[rank], "side": slow.side, "fraction": slow.fraction}
        for rank, slow in uneven_ranks(case.group.ranks).items()
    ]
    return _saved(case, "uneven_rank", case.actual, case.even, ranks=uneven) if uneven else None


def _loading(case: GroupCase) -> ScalingBottleneck | None:
    even = case.even
    if even.loader_s <= 0:
        return None
    figures = figures_of(case.group.config, "strategy", "world_size")
    figures |= {"loader_processes": case.group.config.process_count, "is_overlapped": even.is_overlapped}
    figures |= {"loader_samples_per_s": 1 / even.loader_s}
    figures |= {"device_samples_per_s": 1 / even.computing_s if even.computing_s > 0 else None}
    return _saved(case, "loader", even, replace(even, loader_s=0.0), **figures)


def _exchanging(case: GroupCase) -> ScalingBottleneck | None:
    exchange = case.group.communication
    if exchange is None:
        return None
    figures = figures_of(exchange, "bytes_exchanged", "exposed_s", "exposed_fraction", "hidden_fraction")
    return _saved(case, "communication", case.actual, replace(case.actual, exchange_s=0.0), **figures)


def _computing(case: GroupCase) -> ScalingBottleneck | None:
    """Devices that are slower in the group than a single device is.

    Source of what DataParallel does: pytorch.org, torch.nn.DataParallel.
    """
    even, ideal_s, single, config = case.even, case.ideal_device_s, case.single, case.group.config
    if single is None or ideal_s is None or even.device_s <= ideal_s:
        return None
    is_cpu, batch, single_batch = (
        case.environment.device_kind == "cpu",
        config.micro_batch_size,
        single.config.micro_batch_size,
    )
    cause: Cause
    figures: dict[str, JsonValue]
    if config.strategy == "dp":
        cause, figures = "communication", {}
    elif case.step_changes:
        cause, figures = "settings", {"settings": case.step_changes}
    elif single_batch > batch and not is_cpu:
        cause, figures = "small_batch", {"micro_batch_size": batch, "single_batch_size": single_batch}
    else:
        cause, figures = "shared_machine", {"cores": case.cores if is_cpu else None}
    figures |= {"reached_fraction": ideal_s / even.device_s, **figures_of(config, "strategy", "world_size")}
    return _saved(case, cause, even, replace(even, device_s=ideal_s), **figures)


def _saved(case: GroupCase, cause: Cause, before: StepTime, after: StepTime, **figures: JsonValue) -> ScalingBottleneck:
    """A bottleneck whose share is what the group would save without it."""
    return ScalingBottleneck(cause=cause, share=case.saved(before, after), figures=figures)
