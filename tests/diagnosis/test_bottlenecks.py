from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.diagnosis.bottlenecks import (
    BOTTLENECKS,
    breakdown_of,
    find_bottlenecks,
    fixed_step_share,
    is_healthy,
    say_headline,
    standing_today,
)
from autotune.records.ceilings import Standing
from autotune.records.diagnosis import Advice, Bottleneck, Curves, Evidence
from autotune.records.utilization import Fullness
from autotune.settings.training_config import TrainingConfig
from tests.evidence import CPU, make_breakdown, make_costs, make_evidence, make_point, make_roofline


def shares(evidence: Evidence) -> dict[Bottleneck, Any]:
    return {one.bottleneck: pytest.approx(one.share) for one in find_bottlenecks(evidence)}


def batch_curve(fixed_s: float, slope_s: float) -> Curves:
    """The device alone in several batches, each of which takes fixed_s + slope_s * batch."""
    points = [make_point(b / (fixed_s + slope_s * b), micro_batch_size=b) for b in (16, 64, 128)]
    return Curves(device=(make_point(32 / (fixed_s + slope_s * 32)), *points), roofline=make_roofline(operators=1000))


@pytest.mark.parametrize(
    ("costs", "kind"),
    [
        (make_costs(), "data_cpu"),
        (make_costs(item_cpu_s=0.4e-3), "data_io"),
        (make_costs(slow_tail_fraction=0.5), "data_tail"),
        (make_costs(slow_tail_fraction=0.5, item_cpu_s=0.0), "data_tail"),
        (None, "data_cpu"),
    ],
)
def test_waiting_for_data_is_told_by_what_an_item_does(costs: Any, kind: Bottleneck) -> None:
    evidence = make_evidence(breakdown=make_breakdown(wait=0.7), loader_costs=costs)
    assert shares(evidence) == {kind: 0.7, "compute": 0.3}


def test_restarts_are_no_waiting_for_items() -> None:
    assert shares(make_evidence(breakdown=make_breakdown(wait=0.6, restart=0.6))) == {"restart": 0.6, "compute": 0.4}


def test_copies_and_gaps_of_a_gpu_are_told_apart() -> None:
    evidence = make_evidence(breakdown=make_breakdown(copy=0.5, idle=0.3))
    assert shares(evidence) == {"copy": 0.5, "launch": 0.3, "compute": 0.2}


def test_gaps_after_the_hosts_waits_are_no_computing() -> None:
    evidence = make_evidence(breakdown=make_breakdown(synchronise=0.4, idle=0.05))
    assert shares(evidence) == {"synchronise": 0.4, "compute": 0.55}
    told = {one.bottleneck: one.evidence for one in find_bottlenecks(evidence)}
    assert "40 % of the time the device has nothing to do because the host had waited" in told["synchronise"]
    assert "computes 55 %" in told["compute"]


def test_what_takes_less_than_a_tenth_is_noise() -> None:
    breakdown = make_breakdown(wait=0.09, copy=0.09, idle=0.09)
    assert shares(make_evidence(breakdown=breakdown)) == {"compute": 0.73}


def test_small_operators_with_a_fixed_cost_are_launch_bound_on_the_cpu() -> None:
    # 1,000 operators in 10 ms; 9 of the 10 ms stay whatever the batch
    curves = batch_curve(9e-3, 1e-3 / 32)
    evidence = make_evidence(3200.0, environment=CPU, curves=curves, breakdown=make_breakdown(idle=0.2))
    assert shares(evidence) == {"launch": 0.2 + 0.8 * 0.9}


def test_large_operators_with_a_fixed_cost_compute() -> None:
    curves = batch_curve(9e-1, 1e-1 / 32)  # an operator takes 1 ms
    assert shares(make_evidence(32.0, environment=CPU, curves=curves)) == {"compute": 1.0}


def test_moving_bytes_for_half_of_the_time_is_memory_bound() -> None:
    curves = Curves(roofline=make_roofline(moved_bytes=0.5e11 * 0.032))  # half of the peak, in 32 ms a batch
    assert shares(make_evidence(1000.0, curves=curves)) == {"memory": 1.0}


def test_a_product_that_takes_longer_than_its_bytes_is_compute_bound() -> None:
    roofline = make_roofline(moved_bytes=0.5e11 * 0.032, flops=0.9e12 * 0.032)
    assert shares(make_evidence(1000.0, curves=Curves(roofline=roofline))) == {"compute": 1.0}


@pytest.mark.parametrize(
    ("dram", "tensor", "kind"), [(0.5, 0.1, "memory"), (0.2, 0.1, "compute"), (0.6, 0.9, "compute")]
)
def test_gpm_tells_memory_from_computing_where_there_is_one(dram: float, tensor: float, kind: Bottleneck) -> None:
    fullness = Fullness(sm_fraction=1.0, sm_occupancy=1.0, tensor_fraction=tensor, dram_fraction=dram)
    curves = Curves(roofline=make_roofline(moved_bytes=1e12))  # what its operators would say does not count then
    assert shares(make_evidence(curves=curves, fullness=fullness, busy_fraction=0.9)) == {kind: 1.0}


def test_computing_slower_than_alone_with_more_threads_than_cores_is_a_fight() -> None:
    config = TrainingConfig(num_workers=4)
    evidence = make_evidence(1000.0, config=config, environment=CPU, device_ceiling=4000.0)
    assert shares(evidence) == {"threads": 0.75, "compute": 0.25}


def test_threads_beyond_the_cores_are_found_by_the_curve() -> None:
    config = TrainingConfig(intra_op_threads=16)
    curves = Curves(device=(make_point(1000.0), make_point(5000.0, intra_op_threads=4)), threads=16)
    evidence = make_evidence(1000.0, config=config, environment=CPU, curves=curves)
    assert shares(evidence) == {"threads": 0.8, "compute": 0.2}


def test_nobody_fights_where_there_are_cores_for_all() -> None:
    config = TrainingConfig(num_workers=1, intra_op_threads=3)
    evidence = make_evidence(1000.0, config=config, environment=CPU, device_ceiling=4000.0)
    assert shares(evidence) == {"compute": 1.0}


def test_a_gpu_has_no_threads_that_fight() -> None:
    config = TrainingConfig(num_workers=64)
    assert shares(make_evidence(1000.0, config=config, device_ceiling=4000.0)) == {"compute": 1.0}


@pytest.mark.parametrize(
    ("cores_busy", "workers", "kind"), [(2.5, 4, "threads"), (2.5, 3, "data_cpu"), (1.4, 8, "data_cpu")]
)
def test_items_in_several_threads_fight_where_the_workers_have_not_enough_cores(
    cores_busy: float, workers: int, kind: Bottleneck
) -> None:
    costs = make_costs(1e-3, item_cpu_s=cores_busy * 1e-3)
    evidence = make_evidence(
        config=TrainingConfig(num_workers=workers), loader_costs=costs, breakdown=make_breakdown(wait=0.7)
    )
    assert shares(evidence) == {kind: 0.7, "compute": 0.3}


def test_threads_of_items_are_told_in_figures() -> None:
    costs = make_costs(2e-3, item_cpu_s=5e-3)
    evidence = make_evidence(
        config=TrainingConfig(num_workers=4), loader_costs=costs, breakdown=make_breakdown(wait=0.7)
    )
    assert find_bottlenecks(evidence)[0].evidence == (
        "70 % of the time is spent waiting for data: an item by itself keeps 2.5 cores busy for 2.0 ms, in threads of "
        "a library's own (OpenCV's, NumPy's) or in processes that it starts; 4 loader processes at once would keep "
        "10.0 busy, but there are 8"
    )


@pytest.mark.parametrize(("wait", "is_told"), [(0.4, True), (0.02, False)])
def test_threads_that_fight_on_both_sides_are_one_finding(wait: float, is_told: bool) -> None:
    # computing takes four times as long as alone: three quarters of what is left beside the waits
    evidence = make_evidence(
        1000.0 * (1 - wait),
        config=TrainingConfig(num_workers=4),
        environment=CPU,
        device_ceiling=4000.0,
        loader_costs=make_costs(item_cpu_s=2e-3),
        breakdown=make_breakdown(wait=wait),
    )
    assert shares(evidence) == {"threads": wait + 0.75 * (1 - wait), "compute": 0.25 * (1 - wait)}
    said = find_bottlenecks(evidence)[0].evidence
    assert "computing is 4.0 times slower in the loop" in said
    assert ("loader processes at once would keep 8.0 busy" in said) == is_told


def test_without_a_breakdown_the_clock_of_the_window_tells() -> None:
    evidence = make_evidence(breakdown=None, data_wait_fraction=0.6)
    assert shares(evidence) == {"data_cpu": 0.6, "compute": 0.4}
    told = breakdown_of(evidence).shares()
    assert sum(one.fraction for one in told.values()) == pytest.approx(1.0)
    assert {part for part, one in told.items() if one.source == "not measured"} == set(told) - {"data_wait"}
    assert "was not measured" in next(one.evidence for one in find_bottlenecks(evidence) if one.bottleneck == "compute")


def test_ceilings_that_were_not_measured_come_from_what_was() -> None:
    measured: dict[str, Any] = {"loader_ceiling": None, "device_ceiling": None, "data_wait_fraction": 0.5}
    standing = standing_today(make_evidence(500.0, loader_costs=make_costs(1e-3), **measured))
    assert [standing.loader_ceiling, standing.device_ceiling] == pytest.approx([1000.0, 1000.0])


def test_a_loader_of_which_nothing_is_known_survives_json() -> None:
    standing = standing_today(make_evidence(loader_ceiling=None, loader_costs=None))
    assert standing.loader_ceiling == inf
    assert Standing.model_validate_json(standing.model_dump_json()) == standing


@given(fixed_s=st.floats(0, 1), slope_s=st.floats(1e-6, 1e-2))
def test_the_fixed_share_of_a_line_is_found_exactly(fixed_s: float, slope_s: float) -> None:
    rate = 32 / (fixed_s + slope_s * 32)
    share = fixed_step_share(make_evidence(rate, environment=CPU, curves=batch_curve(fixed_s, slope_s)))
    assert share == pytest.approx(fixed_s / (fixed_s + slope_s * 32), abs=1e-3)


def test_two_batches_are_too_few_for_a_line() -> None:
    curves = Curves(device=(make_point(1000.0, micro_batch_size=64),))
    assert fixed_step_share(make_evidence(curves=curves)) == 0.0


@given(
    parts=st.tuples(*[st.floats(0.0, 1.0)] * 5).map(lambda raw: [one / max(1.0, sum(raw)) for one in raw]),
    restart=st.floats(0.0, 1.0),
    alone=st.floats(0.1, 100.0),
    workers=st.integers(0, 8),
)
def test_every_finding_is_sorted_and_none_beyond_the_whole(
    parts: list[float], restart: float, alone: float, workers: int
) -> None:
    wait, copy, synchronise, idle, _ = parts
    idle = max(0.0, min(idle, 1 - wait - copy - synchronise))
    breakdown = make_breakdown(wait=wait, copy=copy, synchronise=synchronise, idle=idle, restart=restart * wait)
    config = TrainingConfig(num_workers=workers)
    evidence = make_evidence(config=config, environment=CPU, breakdown=breakdown, device_ceiling=1000.0 * alone)
    found = [one.share for one in find_bottlenecks(evidence)]
    assert found
    assert found == sorted(found, reverse=True)
    assert sum(found) <= 1 + 1e-6


def advice(gain: float) -> Advice:
    return Advice(text="", settings={"pin_memory": True}, expected_samples_per_s=1.0, expected_gain=gain, basis="")


def test_healthy_is_what_computes_and_has_nothing_to_gain() -> None:
    evidence = make_evidence()
    computing = find_bottlenecks(evidence)
    assert is_healthy(evidence, computing, [advice(0.04)])
    assert not is_healthy(evidence, computing, [advice(0.06)])


@pytest.mark.parametrize(
    "breakdown",
    [make_breakdown(wait=0.7), make_breakdown(idle=0.43), make_breakdown(synchronise=0.12), None],
    ids=["waits for data", "gaps beside computing", "the host's waits beside it", "not measured"],
)
def test_what_has_more_than_computing_or_was_not_looked_at_is_not_healthy(breakdown: Any) -> None:
    evidence = make_evidence(breakdown=breakdown, data_wait_fraction=0.0)
    assert not is_healthy(evidence, find_bottlenecks(evidence), [])


OTHERS = Curves(loader=(make_point(1000.0), make_point(1000.0, num_workers=1)))


def headline(breakdown: Any, *pieces: Advice, curves: Curves = OTHERS) -> str:
    evidence = make_evidence(breakdown=breakdown, curves=curves)
    found = find_bottlenecks(evidence)
    return say_headline(evidence, found, pieces, healthy=is_healthy(evidence, found, pieces))


def test_the_headline_names_the_first_bottleneck_and_the_best_setting() -> None:
    waiting = make_breakdown(wait=0.7)
    assert headline(waiting, advice(1.4)) == (
        "Data-bound by CPU work (70 % of the time). pin_memory=True should give 2.4 times."
    )
    assert "No setting" in headline(waiting)
    assert headline(make_breakdown()).startswith("Healthy")


def test_the_headline_of_what_mostly_computes_names_what_comes_after() -> None:
    assert headline(make_breakdown(idle=0.43)).startswith(
        "Compute-bound (57 % of the time), but also launch-bound: the operations are too small (43 %). No setting"
    )
    assert headline(None).startswith("90 % of the time is not spent waiting for data; what it goes into was not")


@pytest.mark.parametrize("breakdown", [make_breakdown(), make_breakdown(wait=0.7)], ids=["healthy", "waiting"])
def test_the_headline_does_not_speak_of_settings_that_nobody_measured(breakdown: Any) -> None:
    curves = Curves(loader=(make_point(1000.0), make_point(None, num_workers=1)))
    said = headline(breakdown, curves=curves)
    assert said.endswith(". Other settings were not measured.")
    assert "nothing measured" not in said


@pytest.mark.parametrize("kind", BOTTLENECKS)
def test_every_bottleneck_has_its_words(kind: Bottleneck) -> None:
    assert BOTTLENECKS[kind]
