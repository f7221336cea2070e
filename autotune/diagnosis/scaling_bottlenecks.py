"""What keeps several devices from as many times the rate of one, from figures alone. Pure.

Takes a GroupCase; `find_brakes` hands on what the group's time goes into, the heaviest first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from autotune.diagnosis.step_time import GroupCase, Paces, paces_of, smaller_batch, step_changes
from autotune.phrasing import say_bytes, say_rate, say_seconds, say_settings, say_share
from autotune.records.ranks import name_devices, uneven_ranks

__all__ = ["CAUSES", "LEAST_SHARE", "Brake", "Cause", "find_brakes"]

Cause = Literal["communication", "loader", "uneven_rank", "small_batch", "settings", "shared_machine"]

CAUSES: dict[Cause, str] = {
    "communication": "communication",
    "loader": "the loader",
    "uneven_rank": "an uneven rank",
    "small_batch": "too small a batch on each device",
    "settings": "settings that slow the step down",
    "shared_machine": "a machine that the ranks share",
}
"""Each cause in words."""
LEAST_SHARE = 0.05
"""Of the group's time, below which nothing is a brake: our own convention, over twice a window's 2 % interval."""


class Brake(BaseModel):
    """Something that the group's time goes into."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cause: Cause
    share: float
    """Of the group's time: what would be saved without it. The shares of two brakes may overlap."""
    evidence: str
    """The figures that show it, in a sentence without its full stop."""


def find_brakes(case: GroupCase) -> tuple[Brake, ...]:
    """What takes at least 5 % of the group's time, the heaviest first; () where no figure shows anything."""
    paces = paces_of(case)
    found = [_uneven(case, paces), _loading(case, paces), _talking(case, paces), _computing(case, paces)]
    heavy = [one for one in found if one is not None and one.share >= LEAST_SHARE]
    return tuple(sorted(heavy, key=lambda one: -one.share))


def _uneven(case: GroupCase, paces: Paces) -> Brake | None:
    slow = uneven_ranks(case.group.ranks)
    if not slow:
        return None
    devices = name_devices(case.group.ranks)
    said = "; ".join(
        f"rank {number} ({devices[number]}): its {side} alone gives {share:.0%} of what the others' do"
        for number, (side, share) in slow.items()
    )
    return Brake(cause="uneven_rank", share=paces.saved(paces.actual, paces.even), evidence=said)


def _loading(case: GroupCase, paces: Paces) -> Brake | None:
    even = paces.even
    if even.loader_s <= 0:
        return None
    is_one = case.group.config.process_count == 1
    loaders = "the loader alone reaches" if is_one else f"the loaders of the {case.members} reach together"
    said = f"{loaders} {say_rate(1 / even.loader_s)}"
    if even.computing_s > 0:
        said += f", the devices {say_rate(1 / even.computing_s)}"
    if not even.is_overlapped:
        said += "; without workers the two take turns"
    return Brake(cause="loader", share=paces.saved(even, replace(even, loader_s=0.0)), evidence=said)


def _talking(case: GroupCase, paces: Paces) -> Brake | None:
    talk = case.group.communication
    if talk is None:
        return None
    said = (
        f"exchanging {say_bytes(talk.bytes_exchanged)} of gradients makes a step {say_seconds(talk.exposed_s)} longer "
        f"({say_share(talk.exposed_fraction)} of it), and {say_share(talk.hidden_fraction)} of the exchange is hidden "
        "behind the backward pass"
    )
    share = paces.saved(paces.actual, replace(paces.actual, exchange_s=0.0))
    return Brake(cause="communication", share=share, evidence=said)


def _computing(case: GroupCase, paces: Paces) -> Brake | None:
    """Devices that are slower in the group than one is by itself."""
    even, ideal_s = paces.even, paces.ideal_device_s
    if ideal_s is None or even.device_s <= ideal_s:
        return None
    cause = _cause_of_slower_devices(case)
    share = paces.saved(even, replace(even, device_s=ideal_s))
    return Brake(cause=cause, share=share, evidence=_say_slower(case, cause, ideal_s / even.device_s))


def _cause_of_slower_devices(case: GroupCase) -> Cause:
    if case.group.config.strategy == "dp":
        return "communication"
    if step_changes(case):
        return "settings"
    if case.environment.device_kind != "cpu" and smaller_batch(case) is not None:
        return "small_batch"
    return "shared_machine"


def _say_slower(case: GroupCase, cause: Cause, reached: float) -> str:
    """`reached`: a device's rate in the group over that of the single one.

    Source of what DataParallel does: pytorch.org, torch.nn.DataParallel.
    """
    alone = f"alone, a rank's device reaches {say_share(reached)} of what one device does by itself"
    if cause == "communication":
        return (
            f"on batches that they hold, {case.members} under DataParallel reach {say_share(reached)} of "
            f"{case.group.config.world_size} times what one does: in each step it copies the model to all of them and "
            "gathers their outputs"
        )
    if cause == "settings":
        return f"{alone} with {say_settings(step_changes(case))}"
    if cause == "small_batch":
        return f"with batches of {case.group.config.micro_batch_size}, {alone} with {smaller_batch(case)}"
    if case.environment.device_kind == "cpu":
        return f"the {case.members} share {case.cores} cores: {alone}"
    return f"{alone}, in the same settings: the ranks share the host"
