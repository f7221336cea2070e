"""Merge ranks: all samples over the slowest rank's time, the worst rank's waits and memory."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.messages.trials import extra_failed, on_ranks, window_stopped
from autotune.models.group import merged_measurement
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import (
    Block,
    Ceilings,
    DeviceConditions,
    HostLoad,
    Measurement,
    MemorySample,
    RankFigures,
    Restart,
    Window,
)
from tests.factories import make_breakdown


def make_part(
    rank: int, *, device: str = "cpu", seconds: float = 1.0, samples: int = 100, **changes: Any
) -> Measurement:
    wait_s, peak = changes.pop("data_wait_s", 0.0), changes.pop("peak_bytes", 100)
    window = Window(
        blocks=(
            Block(
                samples=samples,
                batches=10,
                seconds=seconds,
                data_wait_s=wait_s,
                made=changes.pop("made", None),
            ),
        )
        * changes.pop("blocks", 10),
        whole_epochs=False,
        epoch_samples=5000,
        restarts=changes.pop("restarts", ()),
        queue_capacity=4,
        queue_at_start=0,
        queue_at_end=0,
        warm_up_batches=5,
        warm_up_s=0.5,
        is_drained=changes.pop("is_drained", True),
        is_steady=True,
        stopped_by="time",
    )
    figures = RankFigures(
        rank=rank,
        host=changes.pop("host", 0),
        device=device,
        samples_per_s=samples / seconds,
        data_wait_fraction=wait_s / seconds,
        busy_fraction=0.9,
        peak_memory_bytes=peak,
    )
    values = {
        "samples_per_s": samples / seconds,
        "samples_per_s_ci": (90.0, 110.0),
        "busy_fraction": 0.9,
        "busy_source": "made up",
        "data_wait_fraction": wait_s / seconds,
        "peak_memory_bytes": peak,
        "startup_s": 1.0,
        "build_s": 0.5,
        "memory": MemorySample(peak_bytes=peak, source="PSS of the process tree"),
        "window": window,
        "loss": float(rank),
        "ranks": (figures,),
    }
    return Measurement.model_validate(values | changes)


def merge(*ranks: dict[str, Any]) -> Measurement:
    return merged_measurement([make_part(rank, **changes) for rank, changes in enumerate(ranks)])


def test_a_single_rank_stays_as_it_is() -> None:
    part = make_part(0)
    assert merged_measurement([part]) is part


def test_slowest_rank_sets_the_throughput() -> None:
    group = merge({"seconds": 1.0}, {"seconds": 1.25})
    assert group.samples_per_s == pytest.approx(200 / 1.25)
    low, high = group.samples_per_s_ci
    assert low < group.samples_per_s < high
    assert [one.rank for one in group.ranks] == [0, 1]
    assert group.window.epoch_samples == 10_000


def test_worst_rank_sets_waits_and_busy_fraction() -> None:
    busy, starved = make_breakdown(wait=0.1), make_breakdown(wait=0.5)
    group = merge(
        {"busy_fraction": 0.5, "busy_source": "its own", "breakdown": busy},
        {"data_wait_s": 0.4, "breakdown": starved, "is_drained": False},
    )
    assert (group.busy_fraction, group.busy_source) == (0.5, "its own")
    assert group.data_wait_fraction == pytest.approx(0.4)
    assert group.window.blocks[0].data_wait_s == pytest.approx(0.4)
    assert group.loss == 0.0
    assert group.breakdown == starved
    assert not group.window.is_drained


def test_slowest_loader_holds_up_all_ranks() -> None:
    group = merge({"made": 60.0, "data_wait_s": 0.2}, {"made": 100.0})
    assert group.window.made == pytest.approx(10 * 2 * 60.0)
    assert group.samples_per_s == pytest.approx(120.0)
    assert merge({"made": 60.0}, {}).window.made is None


def test_ranks_on_one_machines_ram_need_it_together() -> None:
    group = merge({"peak_bytes": 100}, {"peak_bytes": 150})
    assert group.peak_memory_bytes == group.memory.peak_bytes == 250
    assert "all 2 ranks" in group.memory.source


def test_copies_to_come_of_all_ranks_on_a_host_add_up() -> None:
    memory = MemorySample(peak_bytes=100, source="x", to_come_bytes=40)
    found = merge({"memory": memory}, {"memory": memory}).memory
    assert (found.peak_bytes, found.to_come_bytes) == (200, 80)


def test_fullest_host_sets_the_ram() -> None:
    hosts = enumerate((0, 0, 1, 1, 2))
    memory = merge(*({"host": host, "peak_bytes": 100 + rank} for rank, host in hosts)).memory
    assert memory.peak_bytes == 102 + 103
    assert "2 ranks" in memory.source


def test_fullest_device_sets_the_memory() -> None:
    ranks = [
        {
            "device": f"cuda:{rank}",
            "peak_bytes": peak,
            "memory": MemorySample(peak_bytes=peak, source="x", alloc_retries=retries),
        }
        for rank, (peak, retries) in enumerate([(150, 0), (140, 2)])
    ]
    group = merge(*ranks)
    assert group.peak_memory_bytes == 150
    memory = group.memory
    assert (memory.peak_bytes, memory.alloc_retries, memory.is_thrashing) == (150, 2, True)
    assert merge({"device": "cuda:0"}, {"device": "cuda:1"}).memory.alloc_retries is None


def test_slowest_ceiling_times_ranks() -> None:
    def ceilings(**rates: float) -> dict[str, Ceilings]:
        known = {
            side: Ceiling(samples_per_s=rate, samples=10, seconds=1.0, batches=1)
            for side, rate in rates.items()
        }
        return {"ceilings": Ceilings(**known)}

    other = ceilings(loader=80.0, device=70.0, copy=30.0)
    group = merge(ceilings(loader=50.0, device=90.0, copy=30.0), other)
    assert (group.loader_ceiling, group.device_ceiling) == (100.0, 140.0)
    assert group.copy_ceiling == 60.0
    partly = merge(ceilings(device=90.0), other)
    assert (partly.loader_ceiling, partly.device_ceiling) == (None, 140.0)
    assert merge(other, {}).ceilings is None


def test_conditions_of_all_devices() -> None:
    own = DeviceConditions(power_w=300.0, energy_j=300.0, sm_clock_mhz=(1980, 1980))
    other = DeviceConditions(power_w=500.0, energy_j=500.0, sm_clock_mhz=(1980, 1500))
    group = merge({"conditions": own}, {"conditions": other})
    assert group.conditions is not None
    assert (group.conditions.power_w, group.conditions.energy_j) == (800.0, 800.0)
    assert group.conditions.has_moved
    assert group.joules_per_sample == pytest.approx(800 / group.samples_per_s)
    assert merge({}, {}).conditions is None


def test_restarts_count_the_samples_of_all_ranks() -> None:
    rank = {"restarts": (Restart(seconds=0.5, samples=20),)}
    assert merge(rank, rank).window.restarts == (Restart(seconds=0.5, samples=40),)


def test_notes_of_one_rank_name_it() -> None:
    both, alone = window_stopped(), extra_failed("copy", cause="x")
    found = merge({"notes": (both,)}, {"notes": (both, alone)}).notes
    assert found == (both, on_ranks(alone, [1]))
    assert found[1].figures == {**alone.figures, "on_ranks": [1]}


def test_windows_of_different_length_are_no_group() -> None:
    with pytest.raises(ValueError, match=r"\[9, 10\]"):
        merge({}, {"blocks": 9})


def make_load(*, busy_s: float, own_s: float, seconds: float = 10.0) -> HostLoad:
    return HostLoad(
        seconds=seconds, cores=4, reachable_cores=4, busy_s=busy_s, own_s=own_s, stolen_s=0.0
    )


def test_most_loaded_host_counts() -> None:
    mild, heavy = make_load(busy_s=30.0, own_s=10.0), make_load(busy_s=30.0, own_s=5.0, seconds=9.0)
    loads = [(0, mild), (0, mild), (1, heavy), (1, heavy)]
    load = merge(*({"host": host, "host_load": own} for host, own in loads)).host_load
    assert load is not None
    assert load.own_s == 10.0
    assert load.others_cores == pytest.approx(20 / 9)
    assert merge({"host_load": mild}, {}).host_load is None
