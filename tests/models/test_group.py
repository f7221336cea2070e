"""A group's measurement: all samples over the slowest rank's time, and the worst rank's waits and memory."""

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


def test_a_single_rank_stays_as_it_is() -> None:
    part = make_part(0)
    assert merged_measurement([part]) is part


def test_the_rate_is_that_of_all_samples_over_the_slowest_ranks_time() -> None:
    group = merged_measurement([make_part(0, seconds=1.0), make_part(1, seconds=1.25)])
    assert group.samples_per_s == pytest.approx(200 / 1.25)
    low, high = group.samples_per_s_ci
    assert low < group.samples_per_s < high
    assert [one.rank for one in group.ranks] == [0, 1]
    assert group.window.epoch_samples == 10_000


def test_the_worst_ranks_waits_and_busy_fraction_are_the_groups() -> None:
    group = merged_measurement(
        [make_part(0, busy_fraction=0.5, busy_source="its own"), make_part(1, data_wait_s=0.4)]
    )
    assert (group.busy_fraction, group.busy_source) == (0.5, "its own")
    assert group.data_wait_fraction == pytest.approx(0.4)
    assert group.window.blocks[0].data_wait_s == pytest.approx(0.4)
    assert group.loss == 0.0


def test_the_loader_that_makes_least_holds_up_all_ranks() -> None:
    group = merged_measurement([make_part(0, made=60.0, data_wait_s=0.2), make_part(1, made=100.0)])
    assert group.window.made == pytest.approx(10 * 2 * 60.0)
    assert group.samples_per_s == pytest.approx(120.0)
    assert merged_measurement([make_part(0, made=60.0), make_part(1)]).window.made is None


def test_ranks_on_one_machines_ram_need_it_together() -> None:
    group = merged_measurement([make_part(0, peak_bytes=100), make_part(1, peak_bytes=150)])
    assert group.peak_memory_bytes == group.memory.peak_bytes == 250
    assert "all 2 ranks" in group.memory.source


def test_ranks_over_hosts_need_the_ram_of_the_one_that_is_fullest() -> None:
    parts = [
        make_part(rank, host=host, peak_bytes=100 + rank)
        for rank, host in enumerate((0, 0, 1, 1, 2))
    ]
    memory = merged_measurement(parts).memory
    assert memory.peak_bytes == 102 + 103
    assert "2 ranks" in memory.source


def test_of_devices_with_memory_of_their_own_the_fullest_counts() -> None:
    parts = [
        make_part(0, device="cuda:0", peak_bytes=100),
        make_part(1, device="cuda:1", peak_bytes=150),
    ]
    assert merged_measurement(parts).peak_memory_bytes == 150


def test_a_group_thrashes_where_one_of_its_ranks_does() -> None:
    memories = [
        MemorySample(peak_bytes=150, source="x", alloc_retries=0),
        MemorySample(peak_bytes=140, source="x", alloc_retries=2),
    ]
    parts = [
        make_part(rank, device=f"cuda:{rank}", memory=memory)
        for rank, memory in enumerate(memories)
    ]
    memory = merged_measurement(parts).memory
    assert (memory.peak_bytes, memory.alloc_retries, memory.is_thrashing) == (150, 2, True)
    uncounted = [make_part(rank, device=f"cuda:{rank}") for rank in range(2)]
    assert merged_measurement(uncounted).memory.alloc_retries is None


def test_all_ranks_go_at_the_pace_of_the_slowest_ceiling() -> None:
    def ceilings(loader: float | None, device: float) -> Ceilings:
        return Ceilings(
            loader=None
            if loader is None
            else Ceiling(samples_per_s=loader, samples=10, seconds=1.0, batches=1),
            device=Ceiling(samples_per_s=device, samples=10, seconds=1.0, batches=1),
        )

    group = merged_measurement(
        [make_part(0, ceilings=ceilings(50.0, 90.0)), make_part(1, ceilings=ceilings(80.0, 70.0))]
    )
    assert (group.loader_ceiling, group.device_ceiling) == (100.0, 140.0)
    partly = merged_measurement(
        [make_part(0, ceilings=ceilings(None, 90.0)), make_part(1, ceilings=ceilings(80.0, 70.0))]
    )
    assert (partly.loader_ceiling, partly.device_ceiling) == (None, 140.0)
    assert (
        merged_measurement([make_part(0, ceilings=ceilings(1.0, 1.0)), make_part(1)]).ceilings
        is None
    )
    copy = Ceiling(samples_per_s=30.0, samples=10, seconds=1.0, batches=1)
    copying = [make_part(rank, ceilings=Ceilings(copy=copy)) for rank in range(2)]
    assert merged_measurement(copying).copy_ceiling == 60.0


def test_what_the_devices_did_is_told_of_all_of_them() -> None:
    own = DeviceConditions(power_w=300.0, energy_j=300.0, sm_clock_mhz=(1980, 1980))
    other = DeviceConditions(
        power_w=500.0, energy_j=500.0, sm_clock_mhz=(1980, 1500), throttle_reasons=("thermal",)
    )
    group = merged_measurement([make_part(0, conditions=own), make_part(1, conditions=other)])
    assert group.conditions is not None
    assert (group.conditions.power_w, group.conditions.energy_j) == (800.0, 800.0)
    assert group.conditions.throttle_reasons == ("thermal",)
    assert group.conditions.has_moved
    assert group.joules_per_sample == pytest.approx(800 / group.samples_per_s)
    assert merged_measurement([make_part(0), make_part(1)]).conditions is None


def test_restarts_count_the_samples_of_all_ranks() -> None:
    restarts = (Restart(seconds=0.5, samples=20),)
    group = merged_measurement([make_part(0, restarts=restarts), make_part(1, restarts=restarts)])
    assert group.window.restarts == (Restart(seconds=0.5, samples=40),)


def test_where_the_time_goes_is_told_of_the_rank_that_waits_most() -> None:
    busy, starved = make_breakdown(wait=0.1), make_breakdown(wait=0.5)
    parts = [make_part(0, breakdown=busy), make_part(1, data_wait_s=0.5, breakdown=starved)]
    assert merged_measurement(parts).breakdown == starved


def test_a_group_is_drained_once_all_of_it_are() -> None:
    assert not merged_measurement([make_part(0), make_part(1, is_drained=False)]).window.is_drained


def test_what_one_rank_could_not_measure_bears_its_number() -> None:
    both, alone = window_stopped(), extra_failed("copy", cause="x")
    found = merged_measurement(
        [make_part(0, notes=(both,)), make_part(1, notes=(both, alone))]
    ).notes
    assert found == (both, on_ranks(alone, [1]))
    assert found[1].figures == {**alone.figures, "on_ranks": [1]}


def test_windows_of_different_length_are_no_group() -> None:
    with pytest.raises(ValueError, match="shorter"):
        merged_measurement([make_part(0), make_part(1, blocks=9)])


def make_load(*, busy_s: float, own_s: float, seconds: float = 10.0) -> HostLoad:
    return HostLoad(
        seconds=seconds, cores=4, reachable_cores=4, busy_s=busy_s, own_s=own_s, stolen_s=0.0
    )


def test_ranks_of_a_host_share_its_load_and_the_most_loaded_host_counts() -> None:
    mild, heavy = make_load(busy_s=30.0, own_s=10.0), make_load(busy_s=30.0, own_s=5.0, seconds=9.0)
    parts = [
        make_part(rank, host=rank // 2, host_load=(mild, heavy)[rank // 2]) for rank in range(4)
    ]
    load = merged_measurement(parts).host_load
    assert load is not None
    assert load.own_s == 10.0
    assert load.others_cores == pytest.approx(20 / 9)


def test_other_load_is_unknown_where_a_rank_lacks_its_own_time() -> None:
    parts = [make_part(0, host_load=make_load(busy_s=30.0, own_s=10.0)), make_part(1)]
    assert merged_measurement(parts).host_load is None
