"""Does another device help: the best of each strategy, the verdict, the bottlenecks of the group, and advice."""

from __future__ import annotations

from math import exp, isfinite, sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.environment import Environment
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.diagnosis.scaling import (
    LEAST_SHARE,
    Cause,
    Helps,
    StrategyBest,
    StrategyComparison,
    compare_strategies,
)
from autotune.models.evidence import assumed_variation
from autotune.models.throughput_law import joint_s
from autotune.records.measurement import Communication, RankFigures
from autotune.records.result import Advice, RunVariation
from autotune.records.trial import Score, TrialRecord, TrialResult
from tests.factories import CPU, GPU, make_loader_costs, make_measurement, run_again

Measured = dict[str, Any]
TALK = Communication(step_s=0.04, step_alone_s=0.032, exchange_s=0.012, bytes_exchanged=2**25)
"""Of 64 samples: 2,000 samples/s without the exchange, 1,600 with it."""


def trial(
    number: int,
    rate: float,
    measured: Measured | None = None,
    *,
    limit_share: float = 0.5,
    **config: Any,
) -> TrialRecord:
    """A trial that ran, with an interval of 1 %."""
    plain: Measured = {"loader_ceiling": None, "device_ceiling": None, "loader_costs": None}
    score = Score(value=1.0, feasible=limit_share <= 1, violation=limit_share - 1)
    result = TrialResult(
        outcome="ok", measurement=make_measurement(rate, **plain | (measured or {}))
    )
    return TrialRecord(
        number=number, config=TrainingConfig(**config), results=(result,), score=score
    )


def ddp(
    number: int, rate: float, measured: Measured | None = None, *, world_size: int = 2, **more: Any
) -> TrialRecord:
    return trial(number, rate, measured, strategy="ddp", world_size=world_size, **more)


def crashed(number: int, **config: Any) -> TrialRecord:
    result = TrialResult(outcome="crashed", reason="rank 1: ValueError")
    return TrialRecord(number=number, config=TrainingConfig(**config), results=(result,))


def with_ranks(
    *devices: float | None, loaders: tuple[float | None, ...] = (), **more: Any
) -> Measured:
    """What the ranks reach alone; loaders far above, unless given."""
    each = zip(devices, loaders or (1e6,) * len(devices), strict=True)
    ranks = tuple(
        RankFigures(
            rank=number,
            device=f"cuda:{number}",
            samples_per_s=100.0,
            data_wait_fraction=0.0,
            busy_fraction=0.9,
            peak_memory_bytes=2**30,
            loader_ceiling=loader,
            device_ceiling=device,
        )
        for number, (device, loader) in enumerate(each)
    )
    return {"ranks": ranks, **more}


ALONE: Measured = {"device_ceiling": 1000.0, "loader_ceiling": 1e6}
"""What one device and its loader reach."""


def compared(*records: TrialRecord, environment: Environment = GPU) -> StrategyComparison:
    spread = RunVariation(sd=0.01, degrees_of_freedom=3.0)
    if environment is not GPU:
        spread = assumed_variation(environment.device_kind)
    found = compare_strategies(records, environment, spread)
    assert found is not None
    return found


def fastest_of(comparison: StrategyComparison) -> StrategyBest:
    assert comparison.fastest is not None
    return comparison.fastest


def shares(comparison: StrategyComparison) -> dict[Cause, Any]:
    return {found.cause: pytest.approx(found.share, rel=1e-3) for found in comparison.bottlenecks}


def advised(comparison: StrategyComparison) -> dict[tuple[tuple[str, object], ...], Any]:
    return {
        tuple(one.settings.items()): pytest.approx(one.expected_gain, abs=1e-3)
        for one in comparison.advice
    }


def test_one_device_is_not_compared() -> None:
    spread = assumed_variation("cuda")
    assert compare_strategies([], GPU, spread) is None
    assert compare_strategies([trial(0, 100.0), crashed(1)], GPU, spread) is None


def test_best_of_each_strategy_in_order() -> None:
    records = (
        trial(0, 100.0),
        trial(1, 120.0),
        ddp(2, 200.0),
        ddp(3, 390.0, world_size=4),
        trial(4, 150.0, strategy="dp", world_size=2),
        ddp(5, 190.0),
        crashed(6, strategy="ddp", world_size=2),
    )
    entries = compared(*records).entries
    assert [(one.group, one.best and one.best.number, one.tried) for one in entries] == [
        ("one device", 1, 2),
        ("dp × 2", 4, 1),  # noqa: RUF001 - a times sign
        ("ddp × 2", 2, 3),  # noqa: RUF001 - a times sign
        ("ddp × 4", 3, 1),  # noqa: RUF001 - a times sign
    ]


def test_efficiency_is_the_speedup_for_each_device() -> None:
    comparison = compared(trial(0, 100.0), trial(1, 120.0), ddp(2, 200.0))
    best = fastest_of(comparison)
    assert best.efficiency == pytest.approx(200 / 240)
    assert best.speedup is not None
    # 1 % a run, by three degrees of freedom
    spread = exp(3.182 * 0.01 * sqrt(2))
    expected = (200 / 120 / spread, 200 / 120, 200 / 120 * spread)
    ratio = best.speedup
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx(expected, rel=1e-3)
    single = comparison.single
    assert single is not None
    assert (single.number, single.speedup, single.efficiency) == (1, None, None)


@pytest.mark.parametrize(
    ("rate", "helps"),
    [
        (180.0, "yes"),
        (106.0, "yes"),
        (103.0, "not_measurably"),
        (97.0, "not_measurably"),
        (90.0, "no"),
    ],
)
def test_helps_only_beyond_noise(rate: float, helps: Helps) -> None:
    assert compared(trial(0, 100.0), ddp(1, rate)).helps == helps


def test_fastest_group_is_judged() -> None:
    comparison = compared(trial(0, 100.0), ddp(1, 95.0), ddp(2, 130.0, world_size=4))
    assert fastest_of(comparison).number == 2
    assert comparison.helps == "yes"


@pytest.mark.parametrize(
    "failed",
    [
        ddp(1, 200.0, limit_share=1.2),
        crashed(1, strategy="ddp", world_size=2),
        run_again(ddp(1, 250.0), None),
    ],
    ids=["over the limit", "crashed", "failed again"],
)
def test_infeasible_group_is_no_answer(failed: TrialRecord) -> None:
    found = compared(trial(0, 100.0), failed)
    assert (found.fastest, found.helps, found.bottlenecks, found.advice) == (None, None, (), ())
    assert (found.entries[-1].tried, found.entries[-1].best) == (1, None)
    assert fastest_of(compared(trial(0, 100.0), failed, ddp(2, 150.0))).number == 2


def test_without_a_single_device_nothing_is_claimed() -> None:
    comparison = compared(crashed(0), ddp(1, 200.0, with_ranks(100.0, 100.0)))
    assert (comparison.single, comparison.helps) == (None, None)
    assert fastest_of(comparison).speedup is None


def test_ratio_is_of_all_runs() -> None:
    single, group = run_again(trial(0, 100.0), 98.0, 102.04), run_again(ddp(1, 250.0), 180.0)
    best = fastest_of(compared(single, group))
    assert best.runs == 2
    assert best.samples_per_s.value == pytest.approx(sqrt(250.0 * 180.0))
    assert best.speedup is not None
    assert best.speedup.value == pytest.approx(sqrt(250.0 * 180.0) / 100.0, rel=1e-4)
    once = fastest_of(compared(trial(0, 100.0), ddp(1, 212.0))).speedup
    assert once is not None
    assert best.speedup.high / best.speedup.low < once.high / once.low, "more runs narrow it"


def test_trials_are_ranked_by_their_first_runs() -> None:
    again = run_again(ddp(1, 200.0), 190.0, 190.0, 190.0)
    comparison = compared(trial(0, 100.0), again, ddp(2, 195.0, num_workers=2))
    assert fastest_of(comparison).number == 1


def test_exchange_is_of_a_trial_with_the_same_step() -> None:
    measured = ddp(1, 150.0, {"communication": TALK}, num_workers=2)
    other = ddp(2, 140.0, {"communication": TALK}, ddp=DdpConfig(bucket_cap_mb=100))
    assert fastest_of(compared(trial(0, 100.0), measured, ddp(3, 160.0))).communication == TALK
    assert fastest_of(compared(trial(0, 100.0), other, ddp(3, 160.0))).communication is None
    static = ddp(3, 160.0, ddp=DdpConfig(static_graph=True))  # can't measure its own
    assert fastest_of(compared(trial(0, 100.0), measured, static)).communication == TALK


def test_other_changed_settings_are_listed() -> None:
    group = ddp(1, 150.0, num_workers=4, amp_dtype="bfloat16", ddp=DdpConfig(static_graph=True))
    assert compared(trial(0, 100.0), group).other_changes == ("amp_dtype", "num_workers")


def held_by_exchange(**more: Any) -> TrialRecord:
    return ddp(1, 1600.0, with_ranks(1000.0, 1000.0, communication=TALK), **more)


def test_exposed_exchange_holds_the_group() -> None:
    comparison = compared(trial(0, 1000.0, ALONE), held_by_exchange())
    assert shares(comparison) == {"communication": 0.2}
    assert comparison.bottlenecks[0].evidence.figures == {
        "bytes_exchanged": 2**25,
        "exposed_s": pytest.approx(0.008),
        "exposed_fraction": pytest.approx(0.2),
        "hidden_fraction": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize("talk", [None, TALK])
def test_slow_loaders_hold_the_group(talk: Communication | None) -> None:
    """An exchange behind them is no bottleneck."""
    slow = with_ranks(1000.0, 1000.0, loaders=(400.0, 400.0), communication=talk)
    comparison = compared(trial(0, 700.0, ALONE), ddp(1, 790.0, slow))
    assert list(shares(comparison)) == ["loader"]
    if talk is None:
        assert shares(comparison) == {"loader": (1 / 800 - 1 / 2000) * 790}
        assert comparison.bottlenecks[0].evidence.figures == {
            "ranks": 2,
            "loader_samples_per_s": pytest.approx(800.0),
            "device_samples_per_s": pytest.approx(2000.0),
            "is_overlapped": True,
        }


@pytest.mark.parametrize(
    ("measured", "side", "fraction"),
    [
        (with_ranks(1000.0, 500.0), "device", 0.5),
        (with_ranks(1000.0, 1000.0, loaders=(2000.0, 500.0)), "loader", 0.25),
    ],
)
def test_uneven_rank_costs_waits(measured: Measured, side: str, fraction: float) -> None:
    comparison = compared(trial(0, 1000.0, ALONE), ddp(1, 1000.0, measured))
    assert shares(comparison) == {"uneven_rank": 0.5}
    slow = {"rank": 1, "device": "cuda:1", "side": side, "fraction": fraction}
    assert comparison.bottlenecks[0].evidence.figures == {"ranks": [slow]}
    assert (comparison.advice[0].kind, comparison.advice[0].figures) == (
        "find_slow_rank",
        {"ranks": [1]},
    )
    assert comparison.advice[0].expected_gain == pytest.approx(1.0, rel=1e-2)


def test_uneven_but_fast_loader_is_no_bottleneck() -> None:
    measured = with_ranks(1000.0, 1000.0, loaders=(9000.0, 5000.0))
    assert compared(trial(0, 1000.0, ALONE), ddp(1, 1980.0, measured)).bottlenecks == ()


def test_smaller_batch_slows_devices() -> None:
    group = ddp(1, 990.0, with_ranks(500.0, 500.0), micro_batch_size=16)
    comparison = compared(trial(0, 1000.0, ALONE, micro_batch_size=64), group)
    assert shares(comparison) == {"small_batch": 0.495}
    figures = {"micro_batch_size": 16, "single_batch_size": 64, "reached_fraction": 0.5}
    assert comparison.bottlenecks[0].evidence.figures == figures
    assert advised(comparison) == {(("micro_batch_size", 64),): 0.980}


@pytest.mark.parametrize(
    "setting", [("amp_dtype", "bfloat16"), ("fused", True), ("cudnn_benchmark", True)]
)
def test_slower_settings_are_named(setting: tuple[str, Any]) -> None:
    comparison = compared(
        trial(0, 1000.0, ALONE, **dict([setting])), ddp(1, 990.0, with_ranks(500.0, 500.0))
    )
    assert shares(comparison) == {"settings": 0.495}
    assert comparison.bottlenecks[0].evidence.figures["settings"] == dict([setting])
    assert advised(comparison) == {(setting,): 0.980}


def test_ranks_share_cores_on_cpu() -> None:
    group = ddp(1, 990.0, with_ranks(500.0, 500.0), num_workers=1)
    comparison = compared(trial(0, 1000.0, ALONE, num_workers=1), group, environment=CPU)
    assert shares(comparison) == {"shared_machine": 0.495}
    assert comparison.bottlenecks[0].evidence.figures == {
        "ranks": 2,
        "cores": 4,
        "reached_fraction": 0.5,
    }
    assert [piece.kind for piece in comparison.advice] == ["more_cores_for_ranks"]


def test_loading_alternates_without_workers_on_cpu() -> None:
    group = ddp(1, 1000.0, with_ranks(1000.0, 1000.0, loaders=(1000.0, 1000.0)))
    comparison = compared(trial(0, 500.0, ALONE), group, environment=CPU)
    assert shares(comparison) == {"loader": 0.5}
    assert comparison.bottlenecks[0].evidence.figures["is_overlapped"] is False


def test_data_parallel_is_judged_as_a_whole() -> None:
    group = trial(1, 1150.0, {"device_ceiling": 1200.0}, strategy="dp", world_size=2)
    comparison = compared(trial(0, 1000.0, ALONE), group)
    assert shares(comparison) == {"communication": (1 / 1200 - 1 / 2000) * 1150}
    figures = {"world_size": 2, "reached_fraction": pytest.approx(0.6)}
    assert comparison.bottlenecks[0].evidence.figures == figures
    assert [piece.kind for piece in comparison.advice] == ["try_ddp"]
    tried = crashed(2, strategy="ddp", world_size=2)
    assert compared(trial(0, 1000.0, ALONE), group, tried).advice == ()


def test_no_measurement_no_cause() -> None:
    comparison = compared(trial(0, 1000.0), ddp(1, 900.0))
    assert (comparison.helps, comparison.bottlenecks, comparison.advice) == ("no", (), ())


def test_fitting_batch_gives_an_exchange_more_samples() -> None:
    """At a fifth of the limit four times the batch fits; eight times would be wanted."""
    comparison = compared(trial(0, 1000.0, ALONE), held_by_exchange(limit_share=0.2))
    assert advised(comparison)[(("micro_batch_size", 128),)] == 1 / 0.85 - 1
    (larger,) = [piece for piece in comparison.advice if piece.kind == "more_samples_per_exchange"]
    assert larger.figures["factor"] == 4
    assert larger.figures["limit_fraction"] == pytest.approx(0.2)


def test_accumulation_is_advised_without_room() -> None:
    comparison = compared(trial(0, 1000.0, ALONE), held_by_exchange(limit_share=0.7))
    found = advised(comparison)
    assert found[(("grad_accum_steps", 8),)] == 1 / 0.825 - 1
    assert not [names for names in found if "micro_batch_size" in dict(names)]


def hooks(advice: tuple[Advice, ...]) -> list[object]:
    return [one.settings["ddp.comm_hook"] for one in advice if "ddp.comm_hook" in one.settings]


def test_compression_saves_half_of_the_exchange_until_tried() -> None:
    comparison = compared(trial(0, 1000.0, ALONE), held_by_exchange())
    assert advised(comparison)[(("ddp.comm_hook", "fp16"),)] == 1 / 0.85 - 1
    tried = ddp(2, 1500.0, ddp=DdpConfig(comm_hook="fp16"))
    assert hooks(compared(trial(0, 1000.0, ALONE), held_by_exchange(), tried).advice) == []


def test_hook_has_the_precision_of_the_step() -> None:
    single, group = (
        trial(0, 1000.0, ALONE, amp_dtype="bfloat16"),
        held_by_exchange(amp_dtype="bfloat16"),
    )
    assert hooks(compared(single, group).advice) == ["bf16"]
    assert hooks(compared(single, group, environment=CPU).advice) == ["fp16"]


def held_by_loaders(num_workers: int, **more: Any) -> TrialRecord:
    return ddp(
        1,
        790.0,
        with_ranks(1000.0, 1000.0, loaders=(400.0, 400.0), **more),
        num_workers=num_workers,
    )


def test_more_workers_while_cores_are_left() -> None:
    comparison = compared(trial(0, 700.0, ALONE), held_by_loaders(1))
    after_s = joint_s(
        1 / 2400, 1 / 2000, is_overlapped=True
    )  # three times the workers beside the same devices
    assert advised(comparison) == {(("num_workers", 3),): 1 / (1 - (1 / 800 - after_s) * 790) - 1}
    assert (comparison.advice[0].kind, comparison.advice[0].figures["ranks"]) == ("more_workers", 2)


def test_more_cores_where_workers_take_all() -> None:
    comparison = compared(trial(0, 700.0, ALONE), held_by_loaders(4))
    assert [one.settings for one in comparison.advice] == [{}]
    cheaper = comparison.advice[0]
    assert (cheaper.kind, cheaper.figures["cores_needed"]) == ("more_cores_or_cheaper_items", 20)


def test_waiting_items_take_more_workers_than_cores() -> None:
    waiting = make_loader_costs(1e-3, item_cpu_s=1e-4)
    comparison = compared(trial(0, 700.0, ALONE), held_by_loaders(4, loader_costs=waiting))
    assert [one.settings for one in comparison.advice] == [{"num_workers": 10}]


_rates = st.floats(1.0, 1e6)
_known = st.none() | _rates


@given(data=st.data())
def test_shares_and_gains_are_bounded(data: st.DataObject) -> None:
    draw = data.draw
    seconds = st.floats(0, 10)
    talk = Communication(
        step_s=draw(seconds),
        step_alone_s=draw(seconds),
        exchange_s=draw(seconds),
        bytes_exchanged=1,
    )
    measured = with_ranks(
        draw(_known), draw(_known), loaders=(draw(_known), draw(_known)), communication=talk
    )
    group = ddp(
        1,
        draw(_rates),
        measured,
        limit_share=draw(st.floats(0.01, 1.0)),
        micro_batch_size=draw(st.sampled_from([16, 32, 64])),
        num_workers=draw(st.integers(0, 8)),
    )
    single = trial(0, 1000.0, {"device_ceiling": draw(_known)})
    comparison = compared(single, group, environment=draw(st.sampled_from([GPU, CPU])))
    assert all(LEAST_SHARE <= one.share <= 1 for one in comparison.bottlenecks)
    found = [one.share for one in comparison.bottlenecks]
    assert found == sorted(found, reverse=True)
    for one in comparison.advice:
        assert one.expected_gain is None or (
            one.expected_gain >= 0.03 and isfinite(one.expected_gain)
        )
