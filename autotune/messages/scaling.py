"""The evidence of each bottleneck of several devices: sentences without their full stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from autotune.messages import message
from autotune.messages.units import format_bytes, format_fraction, format_rate, format_short_time, show

__all__ = [
    "UnevenRank",
    "communication_evidence",
    "data_parallel_evidence",
    "loader_evidence",
    "settings_evidence",
    "shared_machine_evidence",
    "small_batch_evidence",
    "uneven_rank_evidence",
]


class UnevenRank(TypedDict):
    """A rank that is slower than the others."""

    rank: int
    device: str
    side: str
    fraction: float


@message
def communication_evidence(
    *, bytes_exchanged: int, exposed_s: float, exposed_fraction: float, hidden_fraction: float
) -> str:
    return (
        f"exchanging {format_bytes(bytes_exchanged)} of gradients adds {format_short_time(exposed_s)} to a step "
        f"({format_fraction(exposed_fraction)} of it); {format_fraction(hidden_fraction)} of the exchange is hidden "
        "behind the backward pass"
    )


@message
def data_parallel_evidence(*, world_size: int, reached_fraction: float) -> str:
    return (
        f"with batches on the devices, {world_size} devices under DataParallel reach "
        f"{format_fraction(reached_fraction)} of {world_size} times one device: each step copies the model to all of "
        "them and gathers their outputs"
    )


@message
def loader_evidence(
    *, ranks: int, is_overlapped: bool, loader_samples_per_s: float, device_samples_per_s: float | None
) -> str:
    reach = "the loader alone reaches" if ranks == 1 else f"the loaders of the {ranks} ranks together reach"
    device = "" if device_samples_per_s is None else f", the devices {_rate(device_samples_per_s)}"
    in_turn = "" if is_overlapped else "; without workers the two take turns"
    return f"{reach} {_rate(loader_samples_per_s)}{device}{in_turn}"


@message
def uneven_rank_evidence(*, ranks: Sequence[UnevenRank]) -> str:
    return "; ".join(
        f"rank {one['rank']} ({one['device']}): its {one['side']} alone reaches {format_fraction(one['fraction'])} of "
        "the others'"
        for one in ranks
    )


@message
def small_batch_evidence(*, micro_batch_size: int, single_batch_size: int, reached_fraction: float) -> str:
    return f"with batches of {micro_batch_size}, {_slower(reached_fraction)} with {single_batch_size}"


@message
def settings_evidence(*, settings: Mapping[str, object], reached_fraction: float) -> str:
    return f"{_slower(reached_fraction)} with {show(settings, 'settings')}"


@message
def shared_machine_evidence(*, ranks: int, cores: int | None, reached_fraction: float) -> str:
    if cores is None:
        return f"{_slower(reached_fraction)} in the same settings: the ranks share the host"
    return f"{ranks} ranks share {cores} cores: {_slower(reached_fraction)}"


def _slower(reached_fraction: float) -> str:
    return f"alone, a rank's device reaches {format_fraction(reached_fraction)} of the throughput of a single device"


def _rate(samples_per_s: float) -> str:
    return f"{format_rate(samples_per_s)} samples/s"
