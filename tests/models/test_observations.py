"""Choose what to measure, and turn curves and trials into observations."""

from __future__ import annotations

from math import hypot, sqrt
from typing import Any

import pytest

from autotune.config.plan import OptimizerFacts
from autotune.config.training_config import TrainingConfig
from autotune.messages.search import one_side_not_measured
from autotune.messages.trials import curves_cut, curves_ended
from autotune.models.observations import (
    adds_workers_in_vain,
    changed,
    configured_points,
    device_variations,
    failed_side,
    loader_variations,
    rate_observations,
)
from autotune.models.throughput import Observation
from autotune.records.ceilings import Ceiling, CeilingBook, loader_key
from autotune.records.measurement import Block, Ceilings
from autotune.records.result import CurvePoint, Curves
from autotune.records.trial import TrialRecord, TrialResult
from tests.factories import (
    FOUR_DEVICES,
    GPU,
    make_measurement,
    make_point,
    make_record,
    make_space,
    make_window,
)

FOUR = TrainingConfig(num_workers=4, prefetch_factor=2)


def blocks(*rates: float) -> tuple[Block, ...]:
    return tuple(
        Block(samples=round(rate), batches=4, seconds=1.0, data_wait_s=0.0) for rate in rates
    )


def ended(outcome: str = "ok", **result: Any) -> TrialRecord:
    values = {"outcome": outcome, **result}
    return make_record(config=FOUR, result=TrialResult.model_validate(values), score=None)


def measured(rate: float = 200.0, noise: float = 0.1, **ceilings: Ceiling) -> TrialRecord:
    run = make_measurement(rate, noise)
    if ceilings:
        run = run.model_copy(update={"ceilings": Ceilings(**ceilings)})
    return ended(measurement=run)


def runs_of(*records: TrialRecord) -> list[Observation]:
    return list(rate_observations([], records, "cuda"))


def test_each_run_is_an_observation() -> None:
    uneven = make_window(blocks=[*blocks(*[180, 220] * 5)])
    results = (
        TrialResult(outcome="ok", measurement=make_measurement(200.0, window=uneven)),
        TrialResult(outcome="ok", measurement=make_measurement(210.0)),
        TrialResult(outcome="timeout"),
    )
    first, second = runs_of(make_record(config=FOUR, results=results))
    assert (first.kind, first.config, first.samples_per_s) == ("run", FOUR, 200.0)
    assert second.samples_per_s == 210.0
    assert first.relative_sd == pytest.approx(0.1 * sqrt(10 / 9) / sqrt(10), rel=0.1)
    assert runs_of(measured(noise=0.0001))[0].relative_sd == 0.002, "no surer than that"


def test_stopped_trial_is_less_sure() -> None:
    (run,) = runs_of(ended("pruned", blocks=blocks(90, 100, 110)))
    assert (run.config, run.samples_per_s) == (FOUR, 100.0)
    assert run.relative_sd == pytest.approx(0.05 + 4.303 * 10 / 3**0.5 / 100 / 1.96, rel=1e-3)


def test_sides_of_a_trial_are_observations() -> None:
    loader, device, copy = (
        Ceiling(samples_per_s=rate, samples=100, seconds=1.0, batches=4)
        for rate in (300.0, 500.0, 700.0)
    )
    seen = runs_of(measured(loader=loader, device=device), measured(copy=copy))
    assert [(one.kind, one.samples_per_s) for one in seen] == [
        ("run", 200.0),
        ("run", 200.0),
        ("loader", 300.0),
        ("device", 500.0),
        ("copy", 700.0),
    ]
    assert {one.config for one in seen} == {FOUR}


def test_copies_of_a_curve_are_observations() -> None:
    points = (
        make_point(600.0),
        make_point(1800.0, pin_memory=True),
        make_point(None, pin_memory=False),
    )
    looks = configured_points(Curves(copy=points), make_space())
    seen = list(rate_observations(looks, [], "cuda"))
    assert [(one.kind, one.config.pin_memory, one.samples_per_s) for one in seen] == [
        ("copy", False, 600.0),
        ("copy", True, 1800.0),
    ]


@pytest.mark.parametrize("outcome", ["crashed", "oom", "timeout", "diverged", "pruned"])
def test_a_trial_that_failed_tells_no_rate(outcome: str) -> None:
    assert runs_of(ended(outcome)) == []


def test_refused_precision_has_a_throughput() -> None:
    seen = runs_of(ended("diverged", reason="loss", measurement=make_measurement(200.0)))
    assert [run.samples_per_s for run in seen] == [200.0]


def test_points_of_a_curve_are_observations() -> None:
    space = make_space()
    loader = make_point(500.0, 0.002, num_workers=2)
    device = make_point(900.0, None, micro_batch_size=64), make_point(None, micro_batch_size=128)
    looks = configured_points(Curves(loader=(loader,), device=device), space)
    seen = list(rate_observations(looks, [], "cuda"))
    assert [(one.kind, one.samples_per_s, one.cpu_s_per_sample) for one in seen] == [
        ("loader", 500.0, 0.002),
        ("device", 900.0, None),
    ]
    assert [one.config.num_workers for one in seen] == [2, 0]
    assert [one.config.micro_batch_size for one in seen] == [32, 64]


def test_shared_cores_are_less_sure() -> None:
    looks = configured_points(Curves(loader=(make_point(500.0),)), make_space())
    on_cpu, on_cuda = (
        next(rate_observations(looks, [], kind)).relative_sd for kind in ("cpu", "cuda")
    )
    assert on_cpu > on_cuda


def test_a_look_is_no_surer_than_its_own_stretch() -> None:
    space, sure = make_space(), make_point(500.0)
    assert sure.ceiling is not None
    open_ = sure.model_copy(
        update={"ceiling": sure.ceiling.model_copy(update={"relative_sd": 0.6})}
    )
    looks = configured_points(Curves(loader=(sure, open_)), space)
    one, other = (seen.relative_sd for seen in rate_observations(looks, [], "cuda"))
    assert other == pytest.approx(hypot(one, 0.6))


def test_changes_apply_on_one_device() -> None:
    group = TrainingConfig(strategy="ddp", world_size=4, num_workers=2, prefetch_factor=4)
    space = make_space(baseline=group, environment=FOUR_DEVICES)
    assert changed(space, {"micro_batch_size": 64}) == TrainingConfig(
        micro_batch_size=64, num_workers=2, prefetch_factor=4
    )


def test_a_change_leaves_out_what_has_no_effect() -> None:
    space = make_space(
        baseline=TrainingConfig(num_workers=2, prefetch_factor=4, persistent_workers=True)
    )
    assert changed(space, {"num_workers": 0}) == TrainingConfig()


SEEN: dict[str, Any] = {"slow_tail_fraction": 0.5, "cores_per_item": 2.0}


@pytest.mark.parametrize("workers", [0, 1, 6])
def test_settings_among_workers_take_several(workers: int) -> None:
    space = make_space(baseline=TrainingConfig(num_workers=workers), **SEEN)
    assert {*space.domains["in_order"]} == {True, False}
    varied = list(loader_variations(space, CeilingBook()))
    counts = {
        one.num_workers for one in varied if not one.in_order or one.worker_threads is not None
    }
    (count,) = counts
    assert count == max(workers, min(4, space.environment.cores))
    alike = [
        one
        for one in varied
        if one.num_workers == count and one.in_order and one.worker_threads is None
    ]
    assert alike, "beside the same workers as they are today"


def test_what_is_not_in_the_range_is_not_measured() -> None:
    for space in (
        make_space(),
        make_space({"num_workers": [0, 1], "worker_threads": None}, **SEEN),
    ):
        varied = list(loader_variations(space, CeilingBook()))
        assert {(one.in_order, one.worker_threads) for one in varied} == {(True, None)}


@pytest.mark.parametrize("workers", [0, 1, 4, 8])
def test_as_many_workers_as_cores_come_first(
    workers: int,
) -> None:
    space = make_space(baseline=TrainingConfig(num_workers=workers), environment=GPU)
    varied = list(loader_variations(space, CeilingBook()))
    counts = list(dict.fromkeys(one.num_workers for one in varied))
    assert counts[0] == space.environment.cores == 8
    assert counts == sorted(counts, key=lambda count: count < 2), "none and one come last"
    keys = [loader_key(one) for one in (space.baseline, *varied)]
    assert len(set(keys)) == len(keys)


def test_fused_comes_before_batches() -> None:
    space = make_space(optimizer=OptimizerFacts(name="SGD", can_fuse=True))
    looks = list(device_variations(space, CeilingBook()))
    first_batch = next(
        at
        for at, one in enumerate(looks)
        if one.micro_batch_size != space.baseline.micro_batch_size
    )
    assert changed(space, {"fused": True}) in looks[:first_batch]
    assert not any(one.fused for one in device_variations(make_space(), CeilingBook()))


def test_cudnn_benchmark_is_left_to_trials() -> None:
    space = make_space(has_convolutions=True, has_fixed_shapes=True)
    assert True in space.domains["cudnn_benchmark"]
    assert not any(one.cudnn_benchmark for one in device_variations(space, CeilingBook()))


def test_most_telling_of_thousands() -> None:
    def rate(number: int) -> float:
        return 9000.0 - number if 100 <= number < 130 else 100.0 + number / 1000

    def workers(number: int) -> int:
        return 3 if number in {7, 8} else 2

    records = [
        measured(rate(number)).model_copy(
            update={"number": number, "config": TrainingConfig(num_workers=workers(number))}
        )
        for number in range(600)
    ]
    seen = [one.samples_per_s for one in runs_of(*records)]
    fastest, latest = map(rate, range(100, 130)), map(rate, range(575, 600))
    assert {rate(0), *fastest, rate(8), *latest} <= {*seen}, "8: the fastest with three workers"
    assert rate(7) not in seen
    assert len(seen) == 60


MEASURED, EMPTY, ENDED = make_point(500.0), make_point(None), curves_ended(reason="it hung")


@pytest.mark.parametrize(
    ("curves", "ended", "side", "reason"),
    [
        (Curves(loader=(MEASURED,), device=(MEASURED, EMPTY)), "it hung", None, ""),
        (Curves(loader=(MEASURED,)), "", None, ""),
        (Curves(loader=(MEASURED,)), "it hung", "device", "it hung"),
        (Curves(device=(MEASURED,)), "it hung", "loader", "it hung"),
        (
            Curves(loader=(MEASURED,), device=(EMPTY,), notes=(ENDED,)),
            "",
            "device",
            "no figures came",
        ),
    ],
)
def test_failed_side(curves: Curves, ended: str, side: str | None, reason: str) -> None:
    expected = None if side is None else one_side_not_measured(side=side, reason=reason)
    assert failed_side(curves, ended) == expected


def test_ended_curves_have_a_note() -> None:
    curves = Curves(
        loader=(MEASURED,), device=(MEASURED,), notes=(curves_cut(), ENDED), is_cut=True
    )
    assert failed_side(curves, "it hung") == ENDED


def test_exceeded_ceiling_is_uncertain() -> None:
    space, slowed = make_space(), Curves(device=(make_point(300.0),))
    run = measured(1200.0).model_copy(update={"config": space.baseline})
    credible, doubted = (
        next(
            seen
            for seen in rate_observations(configured_points(slowed, space), records, "cuda")
            if seen.kind == "device"
        )
        for records in ([], [run])
    )
    assert credible.relative_sd < 0.1
    assert doubted.relative_sd > 1.0


@pytest.mark.parametrize(
    ("rates", "is_vain"),
    [
        ({1: 100.0, 2: 190.0}, False),
        ({1: 100.0, 2: 190.0, 4: 195.0}, True),
        ({2: 190.0}, False),
        ({1: 100.0, 2: 190.0, 16: 100.0}, False),
    ],
    ids=["grows", "has stopped", "one number", "more than asked for"],
)
def test_workers_are_added_while_the_loader_grows(rates: dict[int, float], is_vain: bool) -> None:
    points = [make_point(50.0)]
    points += [
        make_point(rate, num_workers=count, persistent_workers=True)
        for count, rate in rates.items()
    ]
    assert adds_workers_in_vain(points, {"num_workers": 8, "persistent_workers": True}) is is_vain
    assert not adds_workers_in_vain(points, {"num_workers": 8, "micro_batch_size": 64}), (
        "the batch tells more"
    )


@pytest.mark.parametrize(
    ("device", "batches"), [(900.0, {16, 32, 64}), (9000.0, {64})], ids=["near", "far above"]
)
def test_device_out_of_reach(device: float, batches: set[int]) -> None:
    space = make_space({"num_workers": [0, 2, 4], "micro_batch_size": [16, 32, 64]})
    alone = [
        Ceiling(samples_per_s=rate, samples=100, seconds=1.0, batches=4) for rate in (300.0, device)
    ]
    book = CeilingBook()
    book.keep("loader", space.baseline, alone[0])
    book.keep("device", space.baseline, alone[1])
    varied = [one for one in device_variations(space, book) if one.micro_batch_size != 32]
    assert {one.micro_batch_size for one in varied} == batches - {32}


def test_shared_ceiling_counts_once() -> None:
    space, own = make_space(), Ceiling(samples_per_s=500.0, samples=100, seconds=1.0, batches=4)
    record = measured(device=own).model_copy(update={"config": space.baseline})
    curves = Curves(device=(CurvePoint(changes={}, ceiling=own),))
    seen = list(rate_observations(configured_points(curves, space), [record], "cuda"))
    assert [one.kind for one in seen].count("device") == 1
