"""Check the throughput law: times that add up, sides that limit each other, derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.throughput_law import COSTS, Circumstances, Rates, law

Costs = np.ndarray[tuple[int, int], np.dtype[np.float64]]
AMPLE = {"items": 9.0, "most_workers": 9.0, "per_batch": -9.0}
"""A loader that limits nothing."""


def here(
    *,
    workers: float = 1.0,
    ranks: float = 1.0,
    relative_batch: float = 1.0,
    micro_batches: float = 1.0,
    **changes: Any,
) -> Circumstances:
    values: dict[str, Any] = {
        "has_workers": workers > 0,
        "log_processes": np.log(max(workers, 1.0)),
        "log_ranks": np.log(ranks),
        "log_batch": np.log(relative_batch),
        "log_micro_batches": np.log(micro_batches),
        "is_overlapped": True,
        **dict.fromkeys(["is_crowded", "is_copied", "is_blocking", "is_launched"], False),
        "is_taken": False,
        "busy": 0.0,
        "cores": 64.0,
        "loader_cpu_s": 0.0,
    }
    values |= changes
    arrays: dict[str, Any] = {name: np.array([value]) for name, value in values.items()}
    return Circumstances(**arrays)


def rates_of(costs: Costs, where: Circumstances) -> Rates:
    return law(costs, where)[0]


def state(**logs: float) -> Costs:
    usual = {"items": 0.0, "samples": 0.0, "shortfall": 0.0, "softness": np.log(8)}
    return np.array([[logs.get(cost, usual.get(cost, -30.0))] for cost in COSTS])


def rates(known: Rates) -> tuple[float, float, float]:
    """Return the throughput of loader, device and run."""
    return tuple(float(np.exp(values[0])) for values in known[:3])  # type: ignore[return-value]


@pytest.mark.parametrize("batch", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("count", [1, 4])
def test_step_time(batch: float, count: int) -> None:
    # 1 second for the samples of a usual batch, 0.5 for any micro batch, 2 for a step, 3 for an exchange
    costs = state(**AMPLE, per_micro_batch=np.log(0.5), per_step=np.log(2), exchange=np.log(3))
    for ranks, exchange_s in ((1, 0.0), (4, 3.0)):
        step_s, samples = count * (0.5 + batch) + 2, ranks * count * batch
        _, device, run = rates(
            rates_of(costs, here(relative_batch=batch, micro_batches=count, ranks=ranks))
        )
        assert device == pytest.approx(samples / step_s)
        assert run == pytest.approx(samples / (step_s + exchange_s))


@pytest.mark.parametrize(("workers", "rate"), [(1, 10.0), (2, 20.0), (64, 80.0)])
def test_useful_workers_share_the_items(workers: int, rate: float) -> None:
    costs = state(items=np.log(10), most_workers=np.log(8))
    assert rates(rates_of(costs, here(workers=workers)))[0] == pytest.approx(rate, rel=1e-3)


def test_handing_over_a_batch() -> None:
    costs = state(per_batch=0.0, most_workers=9.0)
    for batch in (1.0, 4.0):
        worker, itself = (
            rates(rates_of(costs, here(relative_batch=batch, workers=workers)))[0]
            for workers in (1.0, 0.0)
        )
        assert [worker, itself] == pytest.approx([batch / (1 + batch), 1.0], rel=1e-3)


def test_times_add_up_in_turn() -> None:
    costs = state(items=np.log(1), samples=np.log(3), most_workers=9.0)
    in_turns, side_by_side = (
        rates(rates_of(costs, here(is_overlapped=value)))[2] for value in (False, True)
    )
    assert in_turns == pytest.approx(0.75)
    assert side_by_side == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("softness", "rate"), [(1, 1 / 2), (2, 2**-0.5), (1_000, 1.0)])
def test_softness_of_two_equal_sides(softness: float, rate: float) -> None:
    costs = state(most_workers=9.0, softness=np.log(softness))
    assert rates(rates_of(costs, here()))[2] == pytest.approx(rate, rel=1e-2)


def test_shortfall_is_of_a_run() -> None:
    costs = state(**AMPLE, shortfall=np.log(0.8))
    _, device, run = rates(rates_of(costs, here()))
    assert [device, run] == pytest.approx([1.0, 0.8], rel=1e-3)


@pytest.mark.parametrize(("hidden", "added_s"), [(0.0, 0.5), (0.5, 0.25), (1 - 1e-12, 0.0)])
@pytest.mark.parametrize("count", [1, 4])
def test_exposed_copies_add_to_each_micro_batch(hidden: float, added_s: float, count: int) -> None:
    # 1 second for the samples of a usual batch, 2 for a step, half a second for its copy
    logit = np.log(max(hidden, 1e-12) / (1 - hidden))
    costs = state(**AMPLE, per_step=np.log(2), copies=np.log(2), hidden=logit)
    known = rates_of(costs, here(is_copied=True, micro_batches=count))
    _, device, run = rates(known)
    assert device == pytest.approx(count / (count + 2)), "the device alone copies nothing"
    assert run == pytest.approx(count / (count * (1 + added_s) + 2))
    assert np.exp(known.copy[0]) == pytest.approx(2.0)


def test_each_rank_copies_to_its_own_device() -> None:
    costs = state(**AMPLE, copies=np.log(2), hidden=-30.0)
    one, four = (rates_of(costs, here(is_copied=True, ranks=ranks)) for ranks in (1, 4))
    assert np.exp(
        np.array([four.copy[0] - one.copy[0], four.run[0] - one.run[0]])
    ) == pytest.approx([4.0, 4.0])


def test_slow_loader_hides_copies() -> None:
    costs = state(items=np.log(0.1), most_workers=9.0, copies=np.log(2), hidden=-30.0)
    assert rates(rates_of(costs, here(is_copied=True)))[2] == pytest.approx(0.1, rel=1e-3)


@given(st.floats(-5, 5), st.floats(-5, 5), st.sampled_from([1.0, 4.0]), st.booleans())
def test_copies_cost_nothing_without_copies(
    copies: float, hidden: float, ranks: float, is_overlapped: bool
) -> None:
    where = here(ranks=ranks, is_overlapped=is_overlapped)
    known, other = (
        state(per_step=0.0, exchange=-1.0, copies=value, hidden=logit)
        for value, logit in ((0.0, 0.0), (copies, hidden))
    )
    assert rates_of(known, where) == rates_of(other, where)
    for row in (COSTS.index("copies"), COSTS.index("hidden")):
        assert not any(slope[row].any() for slope in law(other, where)[1]())


def hosted(**changes: Any) -> Rates:
    """Return rates with a host that launches a sample in 1 s alone, in 1.5 s in a loop, and takes one in 0.5 s."""
    costs = state(
        **AMPLE, samples=9.0, launching=0.0, slower=np.log(1.5), taking=np.log(2), copies=np.log(4)
    )
    return rates_of(costs, here(**{"is_launched": True, "is_taken": True} | changes))


def test_host_tasks_add_up() -> None:
    known = hosted()
    assert np.exp([known.launch[0], known.take[0], known.host[0]]) == pytest.approx([1.0, 2.0, 0.5])
    assert rates(known)[2] == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"relative_batch": 4.0}, 2.0),
        ({"ranks": 4.0}, 2.0),  # each has a host process
        ({"is_copied": True}, 0.5),
        ({"is_copied": True, "is_blocking": True}, 1 / (1.5 + 0.5 + 0.25)),
    ],
)
def test_a_hosts_rate(changes: dict[str, Any], rate: float) -> None:
    assert np.exp(hosted(**changes).host[0]) == pytest.approx(rate)


def test_host_makes_items_without_workers() -> None:
    costs = state(items=np.log(2), most_workers=9.0, samples=9.0, launching=0.0, slower=np.log(1.5))
    alone = rates_of(costs, here(is_launched=True, workers=0.0))
    assert np.exp(alone.host[0]) == pytest.approx(1 / (1.5 + 0.5))


def test_device_alone_waits_for_launches() -> None:
    for kernels, device in ((9.0, 1.0), (np.log(0.1), 0.1)):
        costs = state(**AMPLE, samples=kernels, launching=0.0, slower=np.log(1.5))
        assert rates(rates_of(costs, here(is_launched=True)))[1] == pytest.approx(device, rel=1e-3)


@pytest.mark.parametrize(("is_crowded", "rate"), [(False, 1.0), (True, 0.25)])
def test_too_many_threads_cost_a_run_alone(is_crowded: bool, rate: float) -> None:
    costs = state(**AMPLE, crowding=np.log(np.log(4)))
    _, device, run = rates(rates_of(costs, here(is_crowded=is_crowded)))
    assert [device, run] == pytest.approx([1.0, rate], rel=1e-3)


@given(
    st.lists(st.floats(-5, 5), min_size=len(COSTS), max_size=len(COSTS)),
    st.booleans(),
    st.sampled_from([1.0, 4.0]),
    st.floats(0.1, 10.0),
    st.sampled_from([0.0, 1e-3]),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([0.0, 4.0]),
    st.booleans(),
    st.booleans(),
)
def test_slopes_are_the_derivatives_of_the_rates(
    logs: list[float],
    is_overlapped: bool,
    ranks: float,
    batch: float,
    loader_cpu_s: float,
    busy: float,
    workers: float,
    is_copied: bool,
    is_launched: bool,
) -> None:
    where = here(
        is_overlapped=is_overlapped,
        is_crowded=is_overlapped,
        ranks=ranks,
        relative_batch=batch,
        workers=workers,
        micro_batches=2.0,
        is_copied=is_copied,
        is_blocking=is_copied,
        is_launched=is_launched,
        is_taken=is_launched and workers > 0,
        busy=busy,
        loader_cpu_s=loader_cpu_s,
    )
    costs, step = np.array(logs)[:, None], 1e-5
    known = rates_of(costs, where)
    assert np.isfinite(known[:3]).all()
    sides = [name for name, rate in known._asdict().items() if np.isfinite(rate).all()]
    is_taken = bool(where.is_taken.all())
    assert {"copy", "launch", "take", "host"} & {*sides} == {
        *(["copy"] if is_copied else []),
        *(["launch", "host"] if is_launched else []),
        *(["take"] if is_taken else []),
    }
    slopes = law(costs, where)[1]()._asdict()
    for row in range(len(COSTS)):
        moved = np.zeros_like(costs)
        moved[row] = step
        after, before = (rates_of(costs + sign * moved, where)._asdict() for sign in (1, -1))
        for side in sides:
            found = slopes[side][row]
            assert found == pytest.approx((after[side] - before[side]) / (2 * step), abs=1e-4)
