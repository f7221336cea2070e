"""The English of several devices compared: their bottlenecks, the evidence of each, and the advice.

Evidence has the code of its cause with `_evidence` behind it, a piece of advice's basis its kind with `_basis`; all are
sentences without their full stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from autotune.diagnosis.scaling_bottlenecks import Cause
from autotune.report.wording.template import Wording
from autotune.report.wording.units import show

__all__ = ["CAUSES", "SCALING"]

_Figures: TypeAlias = Mapping[str, Any]

CAUSES: dict[Cause, str] = {
    "communication": "communication",
    "loader": "the loader",
    "uneven_rank": "an uneven rank",
    "small_batch": "too small a batch on each device",
    "settings": "settings that slow the step down",
    "shared_machine": "a machine that the ranks share",
}
"""Each bottleneck of several devices."""
_FOLLOWS = "the learning rate has to follow the global batch"


def _members(f: _Figures) -> str:
    return f"{f['world_size']} {'ranks' if f['strategy'] == 'ddp' else 'devices'}"


def _slower(f: _Figures) -> str:
    return f"alone, a rank's device reaches {show(f['reached_fraction'], 'share')} of the rate of a single device"


def _group_loader(f: _Figures) -> str:
    is_single = f["loader_processes"] == 1
    loaders = "the loader alone reaches" if is_single else f"the loaders of the {_members(f)} together reach"
    devices = f["device_samples_per_s"]
    said = f"{loaders} {show(f['loader_samples_per_s'], 'rate')}" + (
        "" if devices is None else f", the devices {show(devices, 'rate')}"
    )
    return said if f["is_overlapped"] else f"{said}; without workers the two take turns"


def _communication(f: _Figures) -> str:
    if "reached_fraction" in f:
        return (
            f"with batches on the devices, {_members(f)} under DataParallel reach "
            f"{show(f['reached_fraction'], 'share')} "
            f"of {f['world_size']} times the rate of a single device: each step copies the model to all of them and "
            "gathers their outputs"
        )
    return (
        f"exchanging {show(f['bytes_exchanged'], 'bytes')} of gradients makes a step "
        f"{show(f['exposed_s'], 'seconds')} longer "
        f"({show(f['exposed_fraction'], 'share')} of it), and {show(f['hidden_fraction'], 'share')} of the "
        f"exchange is hidden "
        "behind the backward pass"
    )


def _uneven_rank(f: _Figures) -> str:
    share = show(f["fraction"], "share")
    return f"rank {f['rank']} ({f['device']}): its {f['side']} alone gives {share} of what the others' do"


def _shared_machine(f: _Figures) -> str:
    if f["cores"] is None:
        return f"{_slower(f)}, in the same settings: the ranks share the host"
    return f"the {_members(f)} share {f['cores']} cores: {_slower(f)}"


SCALING: dict[str, Wording] = {
    "communication_evidence": _communication,
    "loader_evidence": _group_loader,
    "uneven_rank_evidence": lambda f: "; ".join(map(_uneven_rank, f["ranks"])),
    "small_batch_evidence": lambda f: (
        f"with batches of {f['micro_batch_size']}, {_slower(f)} with {f['single_batch_size']}"
    ),
    "settings_evidence": lambda f: f"{_slower(f)} with {show(f['settings'], 'settings')}",
    "shared_machine_evidence": _shared_machine,
    "try_ddp": (
        "Let the search try strategy ddp, which no trial had: a process for each device, which exchange only gradients"
    ),
    "try_ddp_basis": "no trial has measured it",
    "more_samples_per_exchange": (
        f"Set {{settings:settings}}: {{factor}} times the samples for each exchange ({_FOLLOWS})"
    ),
    "more_samples_per_exchange_basis": (
        "an exchange adds {exposed_s:seconds} to a step of {step_s:seconds}, and peak memory is "
        "{limit_fraction:share} of the limit"
    ),
    "compress_gradients": (
        "Set {settings:settings}: half the bytes to exchange; the gain is an upper limit, since compressing costs time "
        "too (check that the loss still falls as before)"
    ),
    "compress_gradients_basis": "the exchange alone takes {exchange_s:seconds}, {exposed_s:seconds} of it not hidden",
    "more_workers": lambda f: f"Set {show(f['settings'], 'settings')}{' for each rank' if f['ranks'] > 1 else ''}",
    "more_workers_basis": (
        "today {loader_processes} loader processes on {cores} cores reach {loader_samples_per_s:rate} together"
    ),
    "more_cores_for_loaders": "Take more cores: loading and training share the cores here",
    "more_cores_for_loaders_basis": (
        "{loader_processes} loader processes on {cores} cores reach {loader_samples_per_s:rate}"
    ),
    "more_cores_or_cheaper_items": "Take about {cores_needed} cores instead of {cores}, or make an item cheaper",
    "more_cores_or_cheaper_items_basis": (
        "{loader_processes} loader processes on {cores} cores reach {loader_samples_per_s:rate}, the devices "
        "{device_samples_per_s:rate}"
    ),
    "find_slow_rank": lambda f: (
        f"Find out what slows rank {', '.join(map(str, f['ranks']))} down: in every step the others wait for it"
    ),
    "find_slow_rank_basis": "the rates of the other ranks",
    "batch_of_single_device": f"Set {{settings:settings}} on each rank, as on one device ({_FOLLOWS})",
    "batch_of_single_device_basis": ("the rate of a single device; it took {limit_fraction:share} of the memory limit"),
    "settings_of_single_device": "Set {settings:settings}, as in the best trial on one device",
    "settings_of_single_device_basis": "the rate of a single device",
    "more_cores_for_ranks": "Take more cores: on a CPU, ranks share its cores",
    "more_cores_for_ranks_basis": "{cores} cores here",
}
"""The sentences by code."""
