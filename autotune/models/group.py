"""The measurement of a group, made of those of its ranks.

Each rank measures the same blocks of the same number of batches. The group's throughput is that of
all samples over the time of the slowest rank; waits, busy fraction and memory are those of the worst
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

from autotune.config.environment import DeviceKind
from autotune.messages.trials import on_ranks
from autotune.models.evidence import assumed_variation, with_run_variation
from autotune.models.statistics import window_rate
from autotune.note import Note
from autotune.records.measurement import (
    Block,
    Ceilings,
    DeviceConditions,
    HostLoad,
    Measurement,
    MemorySample,
    Window,
)

_OF_THE_LONGEST_WAIT = ("data_wait_fraction", "breakdown", "loader_costs")
_OF_THE_LEAST_BUSY = ("busy_fraction", "busy_source", "busy_readings", "fullness")
_OF_THE_LARGEST = ("after_s", "startup_s", "build_s", "skipped_steps")
"""Fields of a group's Measurement that are those of one rank."""
_SUMMED = ("power_w", "energy_j")
_WORST: Mapping[str, Callable[[list[Any]], object]] = {
    "max_sm_clock_mhz": min,
    "persistence_mode": min,
    "sm_clock_mhz": partial(min, key=min),
    "memory_clock_mhz": partial(min, key=min),
    "others_memory_bytes": max,
    "others_busy_fraction": max,
    "temperature_c": partial(max, key=max),
    "throttle_reasons": lambda reasons: tuple(sorted({*chain(*reasons)})),
    "tf32_overrides": lambda names: tuple(sorted({*chain(*names)})),
}
"""How several devices' conditions become one."""


def merged_measurement(parts: Sequence[Measurement]) -> Measurement:
    """Return one measurement of what all ranks have measured together; that of a single rank as it is.

    Args:
        parts: In the order of the ranks; each holds its own figures as its only `ranks` entry, and
            windows of equally many blocks.

    Raises:
        ValueError: The windows differ in their blocks.
    """
    if len(parts) == 1:
        return parts[0]
    ranks = tuple(rank for part in parts for rank in part.ranks)
    kind = cast("DeviceKind", ranks[0].device.partition(":")[0]) if ranks else "cpu"
    window = _merged_window([part.window for part in parts])
    throughput = with_run_variation(
        window_rate(window), assumed_variation(kind).of([window.is_held_by_device])
    )
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
            "samples_per_s": throughput.value,
            "samples_per_s_ci": (throughput.low, throughput.high),
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
            "notes": _merged_notes(parts),
            "window": window,
        }
    )


def merged_conditions(parts: Sequence[DeviceConditions | None]) -> DeviceConditions | None:
    """Return the conditions of several devices as one: power and energy summed, otherwise the worst of them.

    Clocks and temperatures are those of one device at both edges: of the one with the lowest clock,
    or the highest temperature, at either. If a device reports no power, there is no sum.
    """
    known = [*filter(None, parts)]
    if not known or len(parts) == 1:
        return known[0] if known else None
    merged = dict[str, Any]()
    for name in DeviceConditions.model_fields:
        values = [value for one in known if (value := getattr(one, name)) is not None]
        if name not in _SUMMED and values:
            merged[name] = _WORST[name](values)
        elif len(values) == len(parts):
            merged[name] = sum(values)
    return DeviceConditions(**merged)


def _merged_window(windows: Sequence[Window]) -> Window:
    """Return the slowest rank's window, with the samples of all in its blocks, and the longest wait."""
    counts = {len(window.blocks) for window in windows}
    if len(counts) != 1:
        raise ValueError(
            "the ranks of a group must have measured the same number of blocks, but got "
            f"{sorted(counts)}"
        )
    slowest = max(windows, key=lambda window: sum(block.seconds for block in window.blocks))
    # What was made counts as if each rank had the loader that makes least, since it holds up all.
    made = [window.made for window in windows if window.made is not None]
    least = windows[made.index(min(made))] if len(made) == len(windows) else None
    blocks = list[Block]()
    for number, across in enumerate(zip(*(window.blocks for window in windows), strict=True)):
        own = slowest.blocks[number]
        merged: dict[str, Any] = {
            "samples": sum(block.samples for block in across),
            "made": least and len(windows) * (least.blocks[number].made or 0.0),
        }
        for name in ("data_wait_s", "starved_s"):
            waits = [seconds for block in across if (seconds := getattr(block, name)) is not None]
            merged[name] = min(own.seconds, max(waits)) if waits else None
        blocks.append(own.model_copy(update=merged))
    share = sum(block.samples for block in blocks) / max(
        1, sum(block.samples for block in slowest.blocks)
    )
    epochs = [window.epoch_samples for window in windows]
    ahead = [window.host_ahead_s for window in windows if window.host_ahead_s is not None]
    taking = [window.take_s for window in windows if window.take_s is not None]
    return slowest.model_copy(
        update={
            "blocks": tuple(blocks),
            "restarts": tuple(
                restart.model_copy(update={"samples": round(restart.samples * share)})
                for restart in slowest.restarts
            ),
            "host_ahead_s": min(ahead) if len(ahead) == len(windows) else None,
            "take_s": max(taking, default=None),
            "epoch_samples": None if None in epochs else sum(filter(None, epochs)),
            "is_drained": all(window.is_drained for window in windows),
            "is_steady": all(window.is_steady for window in windows),
        }
    )


def _merged_ceilings(parts: Sequence[Measurement]) -> Ceilings | None:
    """Return what the group would reach by one side alone: all ranks at the pace of the slowest."""
    ceilings = [part.ceilings for part in parts if part.ceilings is not None]
    if len(ceilings) < len(parts):
        return None
    merged = {}
    for side in Ceilings.model_fields:
        known = [getattr(each, side) for each in ceilings]
        if None not in known:
            slowest = min(known, key=lambda ceiling: ceiling.samples_per_s)
            samples_per_s = len(parts) * slowest.samples_per_s
            samples = len(parts) * slowest.samples
            merged[side] = slowest.model_copy(
                update={"samples_per_s": samples_per_s, "samples": samples}
            )
    return Ceilings(**merged)


def _merged_memory(parts: Sequence[Measurement], *, is_ram: bool) -> MemorySample:
    """Return the worst rank's, each on a device of its own; if all on a host share its RAM, the worst host's sum."""
    samples = [part.memory for part in parts]
    if not is_ram:
        retries = [sample.alloc_retries for sample in samples if sample.alloc_retries is not None]
        # ranks in step all wait for whichever has no room
        worst = max(samples, key=lambda sample: sample.peak_bytes)
        return worst.model_copy(update={"alloc_retries": max(retries, default=None)})
    by_host = [[part.memory for part in ranks] for ranks in _by_host(parts)]
    host = max(by_host, key=lambda memories: sum(one.peak_bytes for one in memories))
    which = f"all {len(samples)} ranks" if len(by_host) == 1 else f"{len(host)} ranks of one host"
    return MemorySample(
        peak_bytes=sum(one.peak_bytes for one in host),
        source=f"{samples[0].source}, {which}",
        to_come_bytes=sum(one.to_come_bytes for one in host),
    )


def _merged_load(parts: Sequence[Measurement]) -> HostLoad | None:
    """Return that of the host which others loaded most, where all ranks count as the trial's own; None if unknown."""
    hosts = []
    for ranks in _by_host(parts):
        loads = [part.host_load for part in ranks if part.host_load is not None]
        if len(loads) < len(ranks):
            return None
        longest = max(loads, key=lambda load: load.seconds)
        # the ranks' readings lie a moment apart
        share = sum(load.own_s / load.seconds for load in loads)
        hosts.append(longest.model_copy(update={"own_s": share * longest.seconds}))
    return max(hosts, key=lambda load: load.others_cores)


def _by_host(parts: Sequence[Measurement]) -> list[list[Measurement]]:
    """Return the ranks on each host."""
    found: dict[int, list[Measurement]] = {}
    for part in parts:
        found.setdefault(part.ranks[0].host if part.ranks else 0, []).append(part)
    return list(found.values())


def _merged_notes(parts: Sequence[Measurement]) -> tuple[Note, ...]:
    """Return each note once, with its ranks unless all have it."""
    found: dict[Note, list[int]] = {}
    for rank, part in enumerate(parts):
        for note in part.notes:
            found.setdefault(note, []).append(rank)
    return tuple(
        note if len(ranks) == len(parts) else on_ranks(note, ranks) for note, ranks in found.items()
    )
