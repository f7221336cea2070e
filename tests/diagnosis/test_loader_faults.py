"""Faults inside the loader: which advice comes first, and where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.bottlenecks import find_bottlenecks, judge
from autotune.records.breakdown import CollateFunction, FormatCost, LoaderCauses
from autotune.records.result import Advice, Curves, Evidence
from tests.factories import (
    CPU,
    make_breakdown,
    make_evidence,
    make_facts,
    make_loader_costs,
    make_point,
)

TWO_CORES = CPU.model_copy(update={"cores": 2})
IN_MEMORY = {"is_in_memory": True, "copy_s": 1e-5}
WHOLE = {"read_bytes_per_item": 2e5, "peak_bytes_per_item": 64 * 1024.0}
SLOW_COLLATE = CollateFunction(function="pad", place="train.py:7", plain_s=1e-3)


def waiting(
    costs: dict[str, Any], causes: dict[str, Any] | None = None, **changes: Any
) -> Evidence:
    """Return a run on two cores that waits for its loader of 100 samples/s, 32 to a batch."""
    known = LoaderCauses(**(causes or {}))
    arguments: dict[str, Any] = {
        "environment": TWO_CORES,
        "breakdown": make_breakdown(wait=0.8),
        "loader_costs": make_loader_costs(**({"causes": known} | costs)),
        "loader_ceiling": 100.0,
        "device_ceiling": 10_000.0,
    }
    return make_evidence(95.0, **(arguments | changes))


def advice_on(evidence: Evidence) -> list[Advice]:
    return list(judge("job", evidence).advice)


def kinds(evidence: Evidence) -> list[str]:
    return [piece.kind for piece in advice_on(evidence)]


def test_single_items_in_memory_are_to_be_fetched_at_once() -> None:
    costs = {"item_s": 5e-3, "collate_s": 0.16}
    measured = waiting(costs, {**IN_MEMORY, "batch_fetch_s": 0.032})
    first = advice_on(measured)[0]
    assert (first.kind, first.is_fault) == ("fetch_batches", True)
    # 1 ms of 10 ms is left of a sample, and the device's 0.1 ms
    assert first.expected_gain == pytest.approx(10.1 / 1.1 - 1)
    assert {"cache_items", "make_items_cheaper"}.isdisjoint(kinds(measured))
    limit = advice_on(waiting(costs, IN_MEMORY))[0]
    assert (limit.kind, limit.figures["is_measured"]) == ("fetch_batches", False)
    assert limit.gain_interval is not None
    assert limit.gain_interval.low < limit.gain_interval.value < limit.gain_interval.high


@pytest.mark.parametrize(
    "causes", [{"is_in_memory": False}, {"makes_batches": True}, {"copy_s": None}]
)
def test_other_items_are_not_to_be_fetched_at_once(causes: dict[str, Any]) -> None:
    assert "fetch_batches" not in kinds(waiting({"item_s": 5e-3}, IN_MEMORY | causes))


def test_a_slow_collate_function_is_named_first() -> None:
    evidence = waiting({"item_s": 1e-6, "collate_s": 0.32}, {**IN_MEMORY, "collate": SLOW_COLLATE})
    finding = find_bottlenecks(evidence)[0]
    assert finding.bottleneck == "data_cpu"
    assert finding.figures["collate_function"] == "pad (train.py:7)"
    first = advice_on(evidence)[0]
    assert (first.kind, first.figures["function"]) == ("speed_up_collate", "pad")
    assert "cache_items" not in kinds(evidence)


def test_a_collate_function_near_a_plain_one_is_no_fault() -> None:
    for plain_s, collate_s in ((0.2, 0.32), (1e-6, 1e-4)):
        own = SLOW_COLLATE.model_copy(update={"plain_s": plain_s})
        assert "speed_up_collate" not in kinds(
            waiting({"item_s": 10e-3, "collate_s": collate_s}, {"collate": own})
        )


def test_cheap_items_that_wait_are_no_cause_next_to_collating() -> None:
    evidence = waiting(
        {"item_s": 1e-6, "item_cpu_s": 1e-8, "collate_s": 0.3, "slow_tail_fraction": 0.9}
    )
    assert find_bottlenecks(evidence)[0].bottleneck == "data_cpu"


def test_waits_for_a_core_are_no_waits_for_files_and_no_tail() -> None:
    costs = {"item_s": 10e-3, "item_cpu_s": 3e-3, "slow_tail_fraction": 0.6}
    assert find_bottlenecks(waiting(costs))[0].bottleneck == "data_tail"
    delayed = find_bottlenecks(waiting({**costs, "item_delayed_s": 7e-3}))[0]
    assert delayed.bottleneck == "data_cpu"


def test_a_part_of_a_file_is_to_be_read_alone() -> None:
    evidence = waiting({"item_s": 10e-3}, WHOLE)
    first = advice_on(evidence)[0]
    assert (first.kind, first.is_fault) == ("read_parts", True)
    assert "add_workers" not in kinds(evidence)[:1]


@pytest.mark.parametrize(
    "causes",
    [{"read_bytes_per_item": 0.0}, {"read_bytes_per_item": 4e3, "peak_bytes_per_item": 4096.0}],
    ids=["temporary arrays", "a little more"],
)
def test_temporary_arrays_are_no_whole_file(causes: dict[str, Any]) -> None:
    assert "read_parts" not in kinds(waiting({"item_s": 10e-3}, WHOLE | causes))


def test_images_have_advice_of_their_own() -> None:
    cost = FormatCost(
        kind="image_copy",
        calls_per_item=1,
        item_fraction=0.8,
        now_s=8e-3,
        better_s=2e-3,
        figures={"width": 512, "height": 512, "to_width": 64, "to_height": 64},
    )
    found = kinds(waiting({"item_s": 10e-3, "formats": (cost,)}, WHOLE))
    assert "read_parts" not in found
    assert "store_smaller" in found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_sampler_is_advised(workers: int) -> None:
    causes = {"sampler": "Weighted", "sampler_s": 0.16, "sampler_start_s": 1.0}
    evidence = waiting({"item_s": 4e-3}, causes, config=TrainingConfig(num_workers=workers))
    first = advice_on(evidence)[0]
    assert (first.kind, first.is_fault) == ("draw_faster", True)
    cheap = waiting({"item_s": 4e-3}, causes | {"sampler_s": 1e-3, "sampler_start_s": 0.0})
    assert "draw_faster" not in kinds(cheap)


def locked(
    rate: float, handles: tuple[str, ...] = ("lock (Lock)",), cpu_s: float | None = None
) -> Evidence:
    curves = Curves(loader=(make_point(rate, cpu_s=cpu_s, num_workers=2),))
    config = TrainingConfig(num_workers=1)
    return waiting({"item_s": 10e-3}, {"shared_handles": handles}, curves=curves, config=config)


def test_workers_that_share_a_lock_and_do_not_scale_are_advised() -> None:
    first = advice_on(locked(101.0))[0]
    assert (first.kind, first.figures["handles"]) == ("open_in_each_worker", ["lock (Lock)"])
    assert first.expected_gain == pytest.approx(1.0, abs=0.05)


def test_a_lock_is_blamed_only_if_workers_do_not_scale_on_free_cores() -> None:
    for evidence in (locked(190.0), locked(101.0, handles=()), locked(101.0, cpu_s=0.018)):
        assert "open_in_each_worker" not in kinds(evidence)


def test_a_stream_with_few_shards_is_to_have_more() -> None:
    config = TrainingConfig(num_workers=4)
    evidence = waiting({"item_s": 10e-3, "item_cpu_s": 1e-4}, {"stream_shards": 1}, config=config)
    assert kinds(evidence)[0] == "add_shards"
    enough = waiting({"item_s": 10e-3}, {"stream_shards": 4}, config=config)
    assert "add_shards" not in kinds(enough)


def test_a_repeated_stream_comes_first_whatever_else_takes_time() -> None:
    facts = make_facts(is_iterable=True, is_sharded=False, dataset_length=None)
    config = TrainingConfig(num_workers=4)
    for share in (0.05, 0.8):
        evidence = waiting(
            {"item_s": 1e-3}, facts=facts, config=config, breakdown=make_breakdown(wait=share)
        )
        finding = find_bottlenecks(evidence)[0]
        assert (finding.bottleneck, finding.share) == ("repeats", 0.75)
        first = advice_on(evidence)[0]
        assert (first.kind, first.expected_gain) == ("shard_stream", 3.0)
        assert first.expected_samples_per_s is None, "samples/s stay, different ones are more"
        assert not any("num_workers" in piece.settings for piece in advice_on(evidence))


def test_nothing_is_advised_to_a_loader_that_nobody_waits_for() -> None:
    causes = {**IN_MEMORY, **WHOLE, "collate": SLOW_COLLATE}
    evidence = waiting(
        {"item_s": 5e-3, "collate_s": 0.1}, causes, breakdown=make_breakdown(wait=0.0)
    )
    assert not any(piece.is_fault for piece in advice_on(evidence))
