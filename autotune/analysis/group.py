"""The measurement of a group, from those of its ranks: pure.

Each rank measures the same blocks of the same number of batches. The group's rate is that of all samples over the time
of the slowest rank; waits, busy fraction and memory are those of the worst one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

from autotune.analysis.rates import between_runs, rate_of
from autotune.note import Note, note
from autotune.records.ceilings import Ceiling
from autotune.records.conditions import DeviceConditions
from autotune.records.measurement import Block, Ceilings, Measurement, MemorySample, Restart, Window
from autotune.settings.environment import DeviceKind

__all__ = ["merged_conditions", "merged_measurement"]

_Figure = TypeVar("_Figure", int, float)


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
    ranks = tuple(one for part in parts for one in part.ranks)
    kind = cast("DeviceKind", ranks[0].device.partition(":")[0]) if ranks else "cpu"
    window = _merged_window([part.window for part in parts])
    rate, ceilings = between_runs(rate_of(window), kind), _merged_ceilings(parts)
    memory = _merged_memory(parts, is_ram=kind == "cpu")
    starved = max(parts, key=lambda part: part.data_wait_fraction)
    worst = min(parts, key=lambda part: 1.0 if part.busy_fraction is None else part.busy_fraction)
    return parts[0].model_copy(
        update={
            "samples_per_s": rate.value,
            "samples_per_s_ci": (rate.low, rate.high),
            "busy_fraction": worst.busy_fraction,
            "busy_source": worst.busy_source,
            "busy_readings": worst.busy_readings,
            "fullness": worst.fullness,
            "conditions": merged_conditions([part.conditions for part in parts]),
            "data_wait_fraction": starved.data_wait_fraction,
            "breakdown": starved.breakdown,
            "loader_costs": starved.loader_costs,
            "memory": memory,
            "peak_memory_bytes": memory.peak_bytes,
            "ceilings": ceilings,
            "loader_ceiling": None if ceilings is None or ceilings.loader is None else ceilings.loader.samples_per_s,
            "device_ceiling": None if ceilings is None or ceilings.device is None else ceilings.device.samples_per_s,
            "ranks": ranks,
            "remarks": _merged_remarks(parts),
            "after_s": max(part.after_s for part in parts),
            "startup_s": max(part.startup_s for part in parts),
            "build_s": max(part.build_s for part in parts),
            "window": window,
            "skipped_steps": max(part.skipped_steps for part in parts),
        }
    )


def merged_conditions(parts: Sequence[DeviceConditions | None]) -> DeviceConditions | None:
    """The conditions of several devices as one: power and energy summed, otherwise the worst of them.

    Clocks and temperatures are those of one device at both edges: of the one with the lowest clock, or the highest
    temperature, at either. Where a device does not tell of its power, no sum is told.
    """
    known = [one for one in parts if one is not None]
    if not known:
        return None
    if len(parts) == 1:
        return known[0]
    return DeviceConditions(
        sm_clock_mhz=min((one.sm_clock_mhz for one in known if one.sm_clock_mhz), key=min, default=None),
        max_sm_clock_mhz=min(_told(one.max_sm_clock_mhz for one in known), default=None),
        memory_clock_mhz=min((one.memory_clock_mhz for one in known if one.memory_clock_mhz), key=min, default=None),
        temperature_c=max((one.temperature_c for one in known if one.temperature_c), key=max, default=None),
        power_w=_sum([None if one is None else one.power_w for one in parts]),
        energy_j=_sum([None if one is None else one.energy_j for one in parts]),
        throttle_reasons=tuple(sorted({reason for one in known for reason in one.throttle_reasons})),
        others_memory_bytes=max(_told(one.others_memory_bytes for one in known), default=None),
        others_busy_fraction=max(_told(one.others_busy_fraction for one in known), default=None),
        persistence_mode=min(_told(one.persistence_mode for one in known), default=None),
        tf32_overrides=tuple(sorted({override for one in known for override in one.tf32_overrides})),
    )


def _told(figures: Iterable[_Figure | None]) -> list[_Figure]:
    return [one for one in figures if one is not None]


def _sum(figures: Sequence[float | None]) -> float | None:
    told = _told(figures)
    return sum(told) if len(told) == len(figures) else None


def _merged_window(windows: Sequence[Window]) -> Window:
    """The slowest rank's window, with the samples of all in its blocks."""
    counts = {len(window.blocks) for window in windows}
    if len(counts) != 1:
        raise ValueError(f"the ranks of a group must have measured equally many blocks, but got {sorted(counts)}")
    slowest = max(windows, key=lambda window: sum(block.seconds for block in window.blocks))
    blocks = tuple(
        Block(
            samples=sum(one.samples for one in across),
            batches=own.batches,
            seconds=own.seconds,
            data_wait_s=min(own.seconds, max(one.data_wait_s for one in across)),
        )
        for own, across in zip(slowest.blocks, zip(*(window.blocks for window in windows), strict=True), strict=True)
    )
    share = sum(block.samples for block in blocks) / max(1, sum(block.samples for block in slowest.blocks))
    epochs = [window.epoch_samples for window in windows]
    return slowest.model_copy(
        update={
            "blocks": blocks,
            "restarts": tuple(
                Restart(seconds=one.seconds, samples=round(one.samples * share)) for one in slowest.restarts
            ),
            "epoch_samples": None if None in epochs else sum(one for one in epochs if one is not None),
            "is_drained": all(window.is_drained for window in windows),
            "is_steady": all(window.is_steady for window in windows),
        }
    )


def _merged_ceilings(parts: Sequence[Measurement]) -> Ceilings | None:
    """What the group would reach by one side alone: all ranks at the pace of the slowest."""
    known = [part.ceilings for part in parts if part.ceilings is not None]
    if len(known) < len(parts):
        return None
    return Ceilings(
        loader=_merged_ceiling([one.loader for one in known]), device=_merged_ceiling([one.device for one in known])
    )


def _merged_ceiling(ceilings: Sequence[Ceiling | None]) -> Ceiling | None:
    known = [one for one in ceilings if one is not None]
    if len(known) < len(ceilings):
        return None
    slowest = min(known, key=lambda one: one.samples_per_s)
    return Ceiling(
        samples_per_s=len(known) * slowest.samples_per_s,
        samples=len(known) * slowest.samples,
        seconds=slowest.seconds,
        batches=slowest.batches,
    )


def _merged_memory(parts: Sequence[Measurement], *, is_ram: bool) -> MemorySample:
    """The worst rank's, each on a device of its own; where all on a host share its RAM, the worst host's sum."""
    samples = [part.memory for part in parts]
    if not is_ram:
        retries = [one.alloc_retries for one in samples if one.alloc_retries is not None]
        worst = max(samples, key=lambda one: one.peak_bytes)  # ranks in step all wait for whichever has no room
        return worst.model_copy(update={"alloc_retries": max(retries, default=None)})
    by_host: dict[int, list[int]] = {}
    for part in parts:
        by_host.setdefault(part.ranks[0].host if part.ranks else 0, []).append(part.memory.peak_bytes)
    host = max(by_host.values(), key=sum)
    which = f"all {len(samples)} ranks" if len(by_host) == 1 else f"{len(host)} ranks of one host"
    return MemorySample(peak_bytes=sum(host), source=f"{samples[0].source}, {which}")


def _merged_remarks(parts: Sequence[Measurement]) -> tuple[Note, ...]:
    """Each remark once, with its ranks where not all have it."""
    found: dict[Note, list[int]] = {}
    for rank, part in enumerate(parts):
        for remark in part.remarks:
            found.setdefault(remark, []).append(rank)
    return tuple(
        remark if len(ranks) == len(parts) else note(remark.code, **remark.figures, on_ranks=ranks)
        for remark, ranks in found.items()
    )
