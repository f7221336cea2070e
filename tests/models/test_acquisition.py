"""The expected gain is that of many draws; redundant trials and likely failures are recognised."""

from __future__ import annotations

from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.training_config import TrainingConfig
from autotune.models.throughput import (
    AMPLE,
    Forecast,
    chance_to_run,
    expected_gain,
    has_failed,
    most_gain,
    redundant_among,
)
from autotune.records.measurement import Block
from autotune.records.trial import Outcome, TrialRecord, TrialResult

SLOW, FAST = 1_000.0, 10_000.0
OWN = TrainingConfig()
FAILED = TrainingConfig(micro_batch_size=256, num_workers=8)
RATES = st.floats(1.0, 1e6)
SDS = st.floats(0.0, 2.0)


def forecast(
    *rates: float,
    sd: float = 0.1,
    loader: float = FAST,
    device: float = FAST,
    copy: float = inf,
    host: float = inf,
    side_sd: float = 0.05,
) -> Forecast:
    ones = np.ones(len(rates))
    return Forecast(
        log_rate=np.log(rates),
        sd=sd * ones,
        loader=loader * ones,
        device=device * ones,
        loader_sd=side_sd * ones,
        device_sd=side_sd * ones,
        copy=copy * ones,
        copy_sd=(side_sd if copy < inf else 0.0) * ones,
        host=host * ones,
        host_sd=(side_sd if host < inf else 0.0) * ones,
        scatter_sd=0.0,
    )


@pytest.mark.parametrize(
    ("log_ratio", "sd"), [(-0.5, 0.4), (-0.1, 0.05), (0.0, 0.2), (0.1, 0.6), (0.4, 0.1)]
)
def test_the_gain_is_the_mean_of_many_draws(log_ratio: float, sd: float) -> None:
    draws = np.exp(np.random.default_rng(0).normal(log_ratio, sd, 400_000))
    gains = np.maximum(draws - 1, 0)
    (gain,) = expected_gain(forecast(SLOW * exp(log_ratio), sd=sd), SLOW)
    assert gain == pytest.approx(gains.mean(), abs=5 * gains.std() / np.sqrt(len(gains)) + 1e-9)


def test_nothing_is_expected_of_what_is_far_below_the_best() -> None:
    (gain,) = expected_gain(forecast(SLOW / 10, sd=0.1), SLOW)
    assert gain == pytest.approx(0.0, abs=1e-12)


def test_without_uncertainty_the_gain_is_the_difference() -> None:
    assert expected_gain(forecast(1.25 * SLOW, 0.8 * SLOW, sd=0.0), SLOW) == pytest.approx(
        [0.25, 0.0]
    )


@given(RATES, RATES, SDS, st.floats(1.0, 3.0))
def test_a_higher_rate_or_a_wider_one_never_lowers_the_gain(
    rate: float, best: float, sd: float, factor: float
) -> None:
    (gain,) = expected_gain(forecast(rate, sd=sd), best)
    (faster,) = expected_gain(forecast(rate * factor, sd=sd), best)
    (vaguer,) = expected_gain(forecast(rate, sd=sd * factor), best)
    assert gain >= max(0.0, rate / best - 1) * (1 - 1e-9)
    assert min(faster, vaguer) >= gain * (1 - 1e-6) - 1e-9


@given(RATES, RATES, SDS, st.floats(0.1, 10.0))
def test_the_gain_is_a_share_whatever_the_unit(
    rate: float, best: float, sd: float, factor: float
) -> None:
    gains = [expected_gain(forecast(rate * by, sd=sd), best * by)[0] for by in (1.0, factor)]
    assert gains[0] == pytest.approx(gains[1], rel=1e-6, abs=1e-9)


def test_a_wild_forecast_has_a_finite_gain() -> None:
    assert np.isfinite(expected_gain(forecast(1e30, sd=20.0), 1.0)).all()


def workers(count: int, **settings: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"num_workers": count, "micro_batch_size": 32, **settings})


def are_redundant(
    configs: list[TrainingConfig],
    tried: list[TrainingConfig],
    *,
    loader: list[float],
    device: list[float],
    copy: list[float] | None = None,
    host: list[float] | None = None,
) -> list[bool]:
    """Which configurations are redundant, by the rates of the sides of each."""
    sides = forecast(*np.minimum(loader, device), side_sd=0.02)
    known = Forecast(
        log_rate=sides.log_rate,
        sd=sides.sd,
        loader=np.array(loader),
        device=np.array(device),
        loader_sd=sides.loader_sd,
        device_sd=sides.device_sd,
        copy=np.array(copy or [inf] * len(configs)),
        copy_sd=sides.copy_sd if copy is None else sides.device_sd,
        host=np.array(host or [inf] * len(configs)),
        host_sd=sides.host_sd if host is None else sides.device_sd,
        scatter_sd=0.0,
    )
    return [bool(value) for value in redundant_among(configs, known, tried)]


def test_more_workers_than_the_device_needs_are_redundant() -> None:
    configs = [workers(2), workers(4), workers(8)]
    assert are_redundant(configs, configs[:1], loader=[FAST] * 3, device=[SLOW] * 3)[1:] == [
        True,
        True,
    ]


def test_a_faster_device_behind_a_slow_loader_is_redundant() -> None:
    configs = [workers(2), workers(2, amp_dtype="bfloat16")]
    assert are_redundant(configs, configs[:1], loader=[SLOW] * 2, device=[FAST] * 2)[1]


def test_fewer_threads_beside_a_slow_loader_are_not_redundant() -> None:
    configs = [workers(2, intra_op_threads=2), workers(2, intra_op_threads=1)]
    assert not are_redundant(configs, configs[:1], loader=[SLOW] * 2, device=[FAST] * 2)[1]


def test_more_workers_are_not_redundant_where_the_tried_loader_was_the_bottleneck() -> None:
    configs = [workers(1), workers(8)]
    assert not are_redundant(configs, configs[:1], loader=[SLOW / 4, FAST], device=[SLOW] * 2)[1]


def test_a_faster_device_is_not_redundant_where_the_tried_device_was_the_bottleneck() -> None:
    configs = [workers(4), workers(4, amp_dtype="bfloat16")]
    assert not are_redundant(configs, configs[:1], loader=[SLOW] * 2, device=[SLOW / 4, FAST])[1]


def test_a_side_must_be_ample_with_its_uncertainty() -> None:
    configs = [workers(2), workers(4)]
    barely = AMPLE * exp(2 * 0.02 + 2 * 0.02)
    for factor, is_ample in ((1.01, True), (0.99, False)):
        ample = [SLOW * barely * factor] * 2
        assert are_redundant(configs, configs[:1], loader=ample, device=[SLOW] * 2)[1] is is_ample


def test_a_trial_without_workers_makes_none_with_workers_redundant() -> None:
    configs = [workers(0), workers(4)]
    assert not are_redundant(configs, configs[:1], loader=[FAST] * 2, device=[SLOW] * 2)[1]


def test_without_workers_a_faster_device_always_is_not_redundant() -> None:
    configs = [workers(0), workers(0, amp_dtype="bfloat16")]
    assert not are_redundant(configs, configs[:1], loader=[SLOW] * 2, device=[2 * SLOW, FAST])[1]


@pytest.mark.parametrize("place", [0, 1])
def test_any_trial_of_the_same_device_makes_another_redundant_in_any_order(place: int) -> None:
    tried = [workers(0)]
    tried.insert(place, workers(2))
    configs = [workers(0), workers(2), workers(8)]
    assert are_redundant(configs, tried, loader=[SLOW, FAST, FAST], device=[SLOW] * 3)[2]


def test_another_batch_is_not_redundant_since_both_sides_change() -> None:
    configs = [workers(2), workers(4, micro_batch_size=64)]
    assert not are_redundant(configs, configs[:1], loader=[FAST] * 2, device=[SLOW] * 2)[1]


PINS = [workers(4, pin_memory=False), workers(4, pin_memory=True)]


@pytest.mark.parametrize(
    ("copies_over_device", "is_redundant"),
    [(2.0, False), (50.0, False), (100 * exp(0.1), True), (inf, True)],
)
def test_pinning_alone_is_redundant_only_where_copies_are_too_short_to_count(
    copies_over_device: float, is_redundant: bool
) -> None:
    copy = [copies_over_device * SLOW, 3 * copies_over_device * SLOW]
    assert (
        are_redundant(PINS, PINS[:1], loader=[FAST] * 2, device=[SLOW] * 2, copy=copy)[1]
        is is_redundant
    )


def test_short_copies_from_pinned_memory_do_not_make_long_ones_from_other_memory_redundant() -> (
    None
):
    copy = [2 * SLOW, 1_000 * SLOW]
    assert not are_redundant(PINS, PINS[:1], loader=[FAST] * 2, device=[SLOW] * 2, copy=copy)[1]


def test_a_loader_need_not_be_faster_than_what_copies_leave_of_the_device() -> None:
    configs = [workers(4), workers(8)]
    sides = {"loader": [2 * SLOW, 4 * SLOW], "device": [FAST] * 2}
    assert not are_redundant(configs, configs[:1], **sides)[1]
    assert are_redundant(configs, configs[:1], **sides, copy=[SLOW] * 2)[1], (
        "copies hold it up to their own rate"
    )


def test_a_faster_device_behind_a_loader_that_its_copies_fall_behind_is_not_redundant() -> None:
    configs = [workers(2), workers(2, amp_dtype="bfloat16")]
    sides = {"loader": [SLOW] * 2, "device": [FAST] * 2}
    assert are_redundant(configs, configs[:1], **sides, copy=[FAST] * 2)[1]
    assert not are_redundant(configs, configs[:1], **sides, copy=[SLOW] * 2)[1]


def test_memory_that_was_not_tried_is_left_out_where_short_copies_leave_the_same_without_it() -> (
    None
):
    other = [workers(4, pin_memory=pin, amp_dtype="bfloat16") for pin in (False, True)]
    configs, sides = [*PINS, *other], {"loader": [SLOW] * 4, "device": [SLOW] * 4}
    short = are_redundant(configs, PINS[:1], **sides, copy=[1_000 * SLOW] * 4)
    assert short == [False, True, False, True]
    assert not any(are_redundant(configs, PINS[:1], **sides, copy=[20 * SLOW] * 4))
    pinned_alone = [10 * SLOW, 1_000 * SLOW] * 2
    assert not any(are_redundant(configs, PINS[:1], **sides, copy=pinned_alone)), (
        "pinning makes them short"
    )
    assert not any(are_redundant(configs, PINS[:1], **sides)), "what copies take is not known"
    without = [configs[0], other[1]]
    assert not are_redundant(
        without, PINS[:1], loader=[SLOW] * 2, device=[SLOW] * 2, copy=[1_000 * SLOW] * 2
    )[1]
    tried = {"loader": [SLOW] * 2, "device": [SLOW] * 2, "copy": [1_000 * SLOW] * 2}
    assert are_redundant(PINS, PINS[:1], **tried)[1], "the same was tried without it"


def test_copies_hold_the_gain_to_their_own_rate() -> None:
    known = forecast(SLOW, loader=FAST, device=FAST, copy=2 * SLOW, side_sd=0.0)
    assert most_gain(known, SLOW) == pytest.approx([1.0])
    assert most_gain(forecast(SLOW, loader=FAST, device=FAST, side_sd=0.0), SLOW) == pytest.approx(
        [FAST / SLOW - 1]
    )


def test_another_binding_is_not_redundant_since_it_places_both_sides() -> None:
    configs = [workers(2), workers(2, numa_binding="node")]
    for loader, device in ((FAST, SLOW), (SLOW, FAST)):
        assert not are_redundant(configs, configs[:1], loader=[loader] * 2, device=[device] * 2)[1]


def test_where_nothing_was_tried_everything_is_not_redundant() -> None:
    assert not any(
        are_redundant([workers(1), workers(2)], [], loader=[FAST] * 2, device=[SLOW] * 2)
    )


def test_the_best_so_far_is_no_gain() -> None:
    (gain,) = expected_gain(forecast(SLOW, sd=1e-6), SLOW)
    assert gain < 1e-5
    assert log(SLOW) == pytest.approx(forecast(SLOW).log_rate[0])


# Failures


def chances(
    *configs: TrainingConfig, failed: list[TrainingConfig], ran: list[TrainingConfig]
) -> list[float]:
    return [float(chance) for chance in chance_to_run(configs, failed, ran)]


def test_without_a_failure_everything_should_run() -> None:
    assert chances(OWN, FAILED, failed=[], ran=[OWN]) == [1.0, 1.0]


def test_the_more_of_its_new_values_are_shared_with_a_failure_the_less_likely_it_runs() -> None:
    half = [TrainingConfig(micro_batch_size=256), TrainingConfig(num_workers=8)]
    found = chances(OWN, *half, FAILED, failed=[FAILED], ran=[OWN])
    assert found == pytest.approx([1.0, 0.505, 0.505, 0.01])


def test_what_differs_in_nothing_suspect_is_as_unlikely_as_the_failure() -> None:
    sibling = FAILED.model_copy(update={"pin_memory": True})
    assert chances(sibling, failed=[FAILED], ran=[OWN]) == pytest.approx([0.01])


def test_a_value_that_has_run_is_no_suspect() -> None:
    ran = [OWN, TrainingConfig(num_workers=8)]
    found = chances(
        TrainingConfig(num_workers=8, pin_memory=True), FAILED, failed=[FAILED], ran=ran
    )
    assert found == pytest.approx([1.0, 0.01])


def test_where_every_value_has_run_nothing_is_held_against_others() -> None:
    ran = [OWN, TrainingConfig(num_workers=8), TrainingConfig(micro_batch_size=256)]
    assert chances(
        OWN, TrainingConfig(num_workers=8, pin_memory=True), failed=[FAILED], ran=ran
    ) == [1.0, 1.0]


def test_failures_add_up() -> None:
    other = TrainingConfig(micro_batch_size=256, num_workers=4)
    (once,) = chances(TrainingConfig(micro_batch_size=256), failed=[FAILED], ran=[OWN])
    (twice,) = chances(TrainingConfig(micro_batch_size=256), failed=[FAILED, other], ran=[OWN])
    assert twice == pytest.approx(once**2)


@pytest.mark.parametrize(
    ("outcome", "is_failure"),
    [
        ("crashed", True),
        ("invalid", True),
        ("timeout", True),
        ("diverged", True),
        ("oom", False),
        ("host_oom", False),
    ],
)
def test_what_showed_nothing_has_failed_unless_memory_was_missing(
    outcome: Outcome, is_failure: bool
) -> None:
    assert (
        has_failed(TrialRecord(number=1, config=OWN, results=(TrialResult(outcome=outcome),)))
        == is_failure
    )


def test_a_trial_that_was_stopped_early_has_not_failed() -> None:
    block = Block(samples=8, batches=1, seconds=1.0, data_wait_s=0.0)
    for blocks in ((), (block,)):
        result = TrialResult(outcome="pruned", blocks=blocks)
        assert not has_failed(TrialRecord(number=1, config=OWN, results=(result,)))


def test_a_host_holds_the_gain_to_its_own_rate() -> None:
    assert most_gain(forecast(SLOW, host=1.1 * SLOW, side_sd=0.0), SLOW) == pytest.approx([0.1])


def test_pinning_is_not_redundant_where_the_host_may_be_the_limit() -> None:
    configs = [workers(4), workers(4, pin_memory=True)]
    sides: dict[str, list[float]] = {
        "loader": [FAST] * 2,
        "device": [SLOW] * 2,
        "copy": [1_000 * SLOW] * 2,
    }
    assert are_redundant(configs, configs[:1], **sides)[1]
    assert not are_redundant(configs, configs[:1], **sides, host=[SLOW] * 2)[1]


def test_more_workers_beside_a_host_that_is_the_limit_are_redundant() -> None:
    configs = [workers(2), workers(4)]
    sides: dict[str, list[float]] = {"loader": [FAST] * 2, "device": [FAST] * 2}
    assert not are_redundant(configs, configs[:1], **sides)[1]
    assert are_redundant(configs, configs[:1], **sides, host=[SLOW] * 2)[1]
