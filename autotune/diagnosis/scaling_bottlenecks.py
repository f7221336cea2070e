"""What keeps several devices from as many times the rate of a single device, from figures alone. Pure.

Comes in: a GroupCase. Goes out: the group's bottlenecks as codes with figures, the largest share first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, JsonValue

from autotune.diagnosis.gains import figures_of
from autotune.diagnosis.step_time import GroupCase, GroupTimes, group_times, smaller_batch, step_changes
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
    times = group_times(case)
    found = [_uneven(case, times), _loading(case, times), _exchanging(case, times), _computing(case, times)]
    heavy = [bottleneck for bottleneck in found if bottleneck is not None and bottleneck.share >= LEAST_SHARE]
    return tuple(sorted(heavy, key=lambda bottleneck: -bottleneck.share))


def _uneven(case: GroupCase, times: GroupTimes) -> ScalingBottleneck | None:
    devices = name_devices(case.group.ranks)
    uneven: list[JsonValue] = [
        {"rank": rank, "device": devices[rank], "side": slow.side, "fraction": slow.fraction}
        for rank, slow in uneven_ranks(case.group.ranks).items()
    ]
    share = times.saved(times.actual, times.even)
    return ScalingBottleneck(cause="uneven_rank", share=share, figures={"ranks": uneven}) if uneven else None


def _loading(case: GroupCase, times: GroupTimes) -> ScalingBottleneck | None:
    even = times.even
    if even.loader_s <= 0:
        return None
    figures: dict[str, JsonValue] = {
        **figures_of(case.group.config, "strategy", "world_size"),
        "loader_processes": case.group.config.process_count,
        "loader_samples_per_s": 1 / even.loader_s,
        "device_samples_per_s": 1 / even.computing_s if even.computing_s > 0 else None,
        "is_overlapped": even.is_overlapped,
    }
    return ScalingBottleneck(cause="loader", share=times.saved(even, replace(even, loader_s=0.0)), figures=figures)


def _exchanging(case: GroupCase, times: GroupTimes) -> ScalingBottleneck | None:
    exchange = case.group.communication
    if exchange is None:
        return None
    figures = figures_of(exchange, "bytes_exchanged", "exposed_s", "exposed_fraction", "hidden_fraction")
    share = times.saved(times.actual, replace(times.actual, exchange_s=0.0))
    return ScalingBottleneck(cause="communication", share=share, figures=figures)


def _computing(case: GroupCase, times: GroupTimes) -> ScalingBottleneck | None:
    """Devices that are slower in the group than a single device is.

    Source of what DataParallel does: pytorch.org, torch.nn.DataParallel.
    """
    even, ideal_s, config = times.even, times.ideal_device_s, case.group.config
    if ideal_s is None or even.device_s <= ideal_s:
        return None
    is_cpu, batch = case.environment.device_kind == "cpu", smaller_batch(case)
    cause: Cause = "shared_machine"
    figures: dict[str, JsonValue] = {
        "reached_fraction": ideal_s / even.device_s,
        **figures_of(case.group.config, "strategy", "world_size"),
    }
    if config.strategy == "dp":
        cause = "communication"
    elif step_changes(case):
        cause, figures["settings"] = "settings", step_changes(case)
    elif batch is not None and not is_cpu:
        cause, figures["micro_batch_size"], figures["single_batch_size"] = "small_batch", config.micro_batch_size, batch
    else:
        figures["cores"] = case.cores if is_cpu else None
    return ScalingBottleneck(cause=cause, share=times.saved(even, replace(even, device_s=ideal_s)), figures=figures)
