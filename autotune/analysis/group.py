"""The measurement of a group, made of those of its ranks. Pure.

Each rank measures the same blocks of the same number of batches. The group's rate is that of all samples over the time
of the slowest rank; waits, busy fraction and memory are those of the worst rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from math import inf
from typing import Any, cast

from autotune.analysis.decisions.run_spread import assumed_spread, with_run_spread
from autotune.analysis.rates import window_rate
from autotune.messages.trials import on_ranks
from autotune.note import Note
from autotune.records.ceilings import Ceiling
from autotune.records.conditions import DeviceConditions
from autotune.records.host_load import HostLoad
from autotune.records.measurement import Block, Ceilings, Measurement, MemorySample, Window
from autotune.settings.environment import DeviceKind

__all__ = ["merged_conditions", "merged_measurement"]

_OF_THE_LONGEST_WAIT = ("data_wait_fraction", "breakdown", "loader_costs")
_OF_THE_LEAST_BUSY = ("busy_fraction", "busy_source", "busy_readings", "fullness")
_OF_THE_LARGEST = ("after_s", "startup_s", "build_s", "skipped_steps")
"""Fields of a group's Measurement that are those of one rank."""


def merged_measurement(parts: Sequence[Measurement]) -> Measurement:
    """One measurement of what all ranks have measured together; that of a single rank as it is.

    Args:
        parts: in the order of the ranks; each holds its own figures as its only `ranks` entry, and windows of equally
            many blocks.

    Raises:
        ValueError: there is none, or the windows differ in their blocks.
    """
    if not parts:
        raise ValueError("a group must have at least one rank, but got none")
    if len(parts) == 1:
        return parts[0]
    ranks = tuple(rank for part in parts for rank in part.ranks)
    kind = cast("DeviceKind", ranks[0].device.partition(":")[0]) if ranks else "cpu"
    window = _merged_window([part.window for part in parts])
    rate = with_run_spread(window_rate(window), assumed_spread(kind).of([window.is_held_by_device]))
    ceilings = _merged_ceilings(parts)
    memory = _merged_memory(parts, is_ram=kind == "cpu")
    waiting = max(parts, key=lambda part: part.data_wait_fraction or 0.0)
    hosts = [part.host_ceiling for part in parts if part.host_ceiling is not None]
    idle = min(parts, key=lambda part: 1.0 if part.busy_fraction is None else part.busy_fraction)
    return parts[0].model_copy(
        update={
            **{name: getattr(waiting, name) for name in _OF_THE_LONGEST_WAIT},
            **{name: getattr(idle, name) for name in _OF_THE_LEAST_BUSY},
            **{name: max(getattr(part, name) for part in parts) for name in _OF_THE_LARGEST},
            "samples_per_s": rate.value,
            "samples_per_s_ci": (rate.low, rate.high),
            "conditions": merged_conditions([part.conditions for part in parts]),
            "host_load": _merged_load(parts),
            "memory": memory,
            "peak_memory_bytes": memory.peak_bytes,
            "ceilings": ceilings,
            "loader_ceiling": ceilings and ceilings.loader and ceilings.loader.samples_per_s,
            "device_ceiling": ceilings and ceilings.device and ceilings.device.samples_per_s,
            "copy_ceiling": ceilings and ceilings.copy and ceilings.copy.samples_per_s,
            "host_ceiling": min(hosts) * len(hosts) if len(hosts) == len(parts) else None,
            "ranks": ranks,
            "remarks": _merged_remarks(parts),
            "window": window,
        }
    )


def merged_conditions(parts: Sequence[DeviceConditions | None]) -> DeviceConditions | None:
    """The conditions of several devices as one: power and energy summed, otherwise the worst of them.

    Clocks and temperatures are those of one device at both edges: of the one with the lowest clock, or the highest
    temperature, at either. Where a device reports no power, there is no sum.
    """
    known = list(filter(None, parts))
    if not known or len(parts) == 1:
        return known[0] if known else None

    def given(name: str) -> list[Any]:
        return [value for conditions in known if (value := getattr(conditions, name)) is not None]

    merged: dict[str, Any] = {name: min(given(name), default=None) for name in ("max_sm_clock_mhz", "persistence_mode")}
    merged |= {name: min(given(name), key=min, default=None) for name in ("sm_clock_mhz", "memory_clock_mhz")}
    merged |= {name: max(given(name), default=None) for name in ("others_memory_bytes", "others_busy_fraction")}
    merged["temperature_c"] = max(given("temperature_c"), key=max, default=None)
    for name in ("power_w", "energy_j"):
        merged[name] = sum(given(name)) if len(given(name)) == len(parts) else None
    for name in ("throttle_reasons", "tf32_overrides"):
        merged[name] = tuple(sorted({value for values in given(name) for value in values}))
    return DeviceConditions(**merged)


def _merged_window(windows: Sequence[Window]) -> Window:
    """The slowest rank's window, with the samples of all in its blocks."""
    counts = {len(window.blocks) for window in windows}
    if len(counts) != 1:
        raise ValueError(f"the ranks of a group must have measured equally many blocks, but got {sorted(counts)}")
    slowest = max(windows, key=lambda window: sum(block.seconds for block in window.blocks))
    across = zip(*(window.blocks for window in windows), strict=True)
    blocks = _with_made(tuple(starmap(_merged_block, zip(slowest.blocks, across, strict=True))), windows)
    share = sum(block.samples for block in blocks) / max(1, sum(block.samples for block in slowest.blocks))
    epochs = [window.epoch_samples for window in windows]
    ahead = [window.host_ahead_s for window in windows if window.host_ahead_s is not None]
    taking = [window.take_s for window in windows if window.take_s is not None]
    return slowest.model_copy(
        update={
            "blocks": blocks,
            "restarts": tuple(
                restart.model_copy(update={"samples": round(restart.samples * share)}) for restart in slowest.restarts
            ),
            "host_ahead_s": min(ahead) if len(ahead) == len(windows) else None,
            "take_s": max(taking, default=None),
            "epoch_samples": None if None in epochs else sum(filter(None, epochs)),
            "is_drained": all(window.is_drained for window in windows),
            "is_steady": all(window.is_steady for window in windows),
        }
    )


def _with_made(blocks: tuple[Block, ...], windows: Sequence[Window]) -> tuple[Block, ...]:
    """Add what was made as if each rank had the loader that makes least, since it holds up all."""
    least, lowest = None, inf
    for window in windows:
        if window.made is None:
            return blocks
        if window.made < lowest:
            least, lowest = window, window.made
    assert least is not None  # noqa: S101 - there is a rank
    return tuple(
        block.model_copy(update={"made": len(windows) * (own.made or 0.0)})
        for block, own in zip(blocks, least.blocks, strict=True)
    )


def _merged_block(own: Block, across: Sequence[Block]) -> Block:
    """The slowest rank's block, with the samples of all ranks and the waits of the rank that waited longest."""
    update: dict[str, Any] = {"samples": sum(block.samples for block in across), "made": None}
    for name in ("data_wait_s", "starved_s"):
        known = [seconds for block in across if (seconds := getattr(block, name)) is not None]
        update[name] = min(own.seconds, max(known)) if known else None
    return own.model_copy(update=update)


def _merged_ceilings(parts: Sequence[Measurement]) -> Ceilings | None:
    """What the group would reach by one side alone: all ranks at the pace of the slowest."""
    ceilings = [part.ceilings for part in parts if part.ceilings is not None]
    if len(ceilings) < len(parts):
        return None
    merged: dict[str, Ceiling] = {}
    for side in Ceilings.model_fields:
        known: list[Ceiling] = [ceiling for each in ceilings if (ceiling := getattr(each, side)) is not None]
        if len(known) == len(parts):
            slowest = min(known, key=lambda ceiling: ceiling.samples_per_s)
            times = {name: len(parts) * getattr(slowest, name) for name in ("samples_per_s", "samples")}
            merged[side] = slowest.model_copy(update=times)
    return Ceilings(**merged)


def _merged_memory(parts: Sequence[Measurement], *, is_ram: bool) -> MemorySample:
    """The worst rank's, each on a device of its own; where all on a host share its RAM, the worst host's sum."""
    samples = [part.memory for part in parts]
    if not is_ram:
        retries = [sample.alloc_retries for sample in samples if sample.alloc_retries is not None]
        worst = max(samples, key=lambda sample: sample.peak_bytes)  # ranks in step all wait for whichever has no room
        return worst.model_copy(update={"alloc_retries": max(retries, default=None)})
    by_host = [[part.memory.peak_bytes for part in ranks] for ranks in _by_host(parts)]
    host = max(by_host, key=sum)
    which = f"all {len(samples)} ranks" if len(by_host) == 1 else f"{len(host)} ranks of one host"
    return MemorySample(peak_bytes=sum(host), source=f"{samples[0].source}, {which}")


def _merged_load(parts: Sequence[Measurement]) -> HostLoad | None:
    """That of the host which others loaded most, where all ranks count as the trial's own; None where unknown."""
    hosts = []
    for ranks in _by_host(parts):
        loads = [part.host_load for part in ranks if part.host_load is not None]
        if len(loads) < len(ranks):
            return None
        longest = max(loads, key=lambda load: load.seconds)
        shares = [load.own_s / load.seconds for load in loads]  # the ranks' readings lie a moment apart
        hosts.append(longest.model_copy(update={"own_s": sum(shares) * longest.seconds}))
    return max(hosts, key=lambda load: load.others_cores)


def _by_host(parts: Sequence[Measurement]) -> list[list[Measurement]]:
    """The ranks on each host."""
    found: dict[int, list[Measurement]] = {}
    for part in parts:
        found.setdefault(part.ranks[0].host if part.ranks else 0, []).append(part)
    return list(found.values())


def _merged_remarks(parts: Sequence[Measurement]) -> tuple[Note, ...]:
    """Each remark once, with its ranks where not all have it."""
    found: dict[Note, list[int]] = {}
    for rank, part in enumerate(parts):
        for remark in part.remarks:
            found.setdefault(remark, []).append(rank)
    return tuple(remark if len(ranks) == len(parts) else on_ranks(remark, ranks) for remark, ranks in found.items())
