"""Judge the next trial: expected gain, redundancy, likely failures."""

from __future__ import annotations

from math import exp, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.training_config import TrainingConfig
from autotune.models.throughput import (
    Forecast,
    chance_to_run,
    expected_gain,
    has_failed,
    most_gain,
    redundant_among,
)
from autotune.policy import POLICY
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


def test_gain_without_uncertainty() -> None:
    assert expected_gain(forecast(1.25 * SLOW, 0.8 * SLOW, sd=0.0), SLOW) == pytest.approx(
        [0.25, 0.0]
    )


@given(RATES, RATES, SDS, st.floats(1.0, 3.0))
def test_gain_grows_with_rate_and_sd(rate: float, best: float, sd: float, factor: float) -> None:
    (gain,) = expected_gain(forecast(rate, sd=sd), best)
    (faster,) = expected_gain(forecast(rate * factor, sd=sd), best)
    (vaguer,) = expected_gain(forecast(rate, sd=sd * factor), best)
    assert gain >= max(0.0, rate / best - 1) * (1 - 1e-9)
    assert min(faster, vaguer) >= gain * (1 - 1e-6) - 1e-9


def test_a_wild_forecast_has_a_finite_gain() -> None:
    assert np.isfinite(expected_gain(forecast(1e30, sd=20.0), 1.0)).all()


def workers(count: int, **settings: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"num_workers": count, "micro_batch_size": 32, **settings})


def are_redundant(
    configs: list[TrainingConfig], tried: list[TrainingConfig], **sides: list[float]
) -> list[bool]:
    """Return which configurations are redundant, by the throughput of their sides."""
    ones = np.ones(len(configs))
    sds = {f"{side}_sd": 0.02 * ones for side in ("loader", "device")}
    sds |= {f"{side}_sd": 0.02 * ones * (side in sides) for side in ("copy", "host")}
    rates = {"copy": [inf] * len(configs), "host": [inf] * len(configs), **sides}
    arrays = {side: np.array(values) for side, values in rates.items()}
    known = Forecast(log_rate=ones, sd=ones, scatter_sd=0.0, **arrays, **sds)
    return [bool(value) for value in redundant_among(configs, known, tried, POLICY.trials)]


BLAMED = POLICY.trials.blamed
BARELY = POLICY.trials.ample * exp(2 * POLICY.trials.side_sds * 0.02) * SLOW
PINS = [workers(4, pin_memory=False), workers(4, pin_memory=True)]
HALVES = [workers(4), workers(4, amp_dtype="bfloat16")]
WORKERS = [workers(2), workers(4)]


@pytest.mark.parametrize(
    ("configs", "loader", "device", "others", "is_redundant"),
    [
        (WORKERS, [FAST] * 2, [SLOW] * 2, {}, True),  # more workers than the device needs
        (HALVES, [SLOW] * 2, [FAST] * 2, {}, True),  # a faster device than the loader needs
        # Fewer threads leave a slow loader more of the cores
        (
            [workers(2, intra_op_threads=2), workers(2, intra_op_threads=1)],
            [SLOW] * 2,
            [FAST] * 2,
            {},
            False,
        ),
        # The tried one was the bottleneck
        (WORKERS, [SLOW / 4, FAST], [SLOW] * 2, {}, False),
        (HALVES, [SLOW] * 2, [SLOW / 4, FAST], {}, False),
        # Ample with its uncertainty
        (WORKERS, [1.01 * BARELY] * 2, [SLOW] * 2, {}, True),
        (WORKERS, [0.99 * BARELY] * 2, [SLOW] * 2, {}, False),
        # Without workers
        ([workers(0), workers(4)], [FAST] * 2, [SLOW] * 2, {}, False),
        ([workers(0), workers(0, amp_dtype="bfloat16")], [SLOW] * 2, [2 * SLOW, FAST], {}, False),
        # Both sides change
        ([workers(2), workers(4, micro_batch_size=64)], [FAST] * 2, [SLOW] * 2, {}, False),
        ([workers(2), workers(2, numa_binding="node")], [FAST] * 2, [SLOW] * 2, {}, False),
        ([workers(2), workers(2, numa_binding="node")], [SLOW] * 2, [FAST] * 2, {}, False),
        # Pinning, by the time of copies
        (PINS, [FAST] * 2, [SLOW] * 2, {"copy": [50 * SLOW, 150 * SLOW]}, False),
        (PINS, [FAST] * 2, [SLOW] * 2, {"copy": [111 * SLOW, 333 * SLOW]}, True),
        (PINS, [FAST] * 2, [SLOW] * 2, {}, True),
        (PINS, [FAST] * 2, [SLOW] * 2, {"copy": [2 * SLOW, 1_000 * SLOW]}, False),
        # What copies leave of the device
        (WORKERS, [2 * SLOW, 4 * SLOW], [FAST] * 2, {}, False),
        (WORKERS, [2 * SLOW, 4 * SLOW], [FAST] * 2, {"copy": [SLOW] * 2}, True),
        (HALVES, [SLOW] * 2, [FAST] * 2, {"copy": [FAST] * 2}, True),
        (HALVES, [SLOW] * 2, [FAST] * 2, {"copy": [SLOW] * 2}, False),
        # A host that may be the limit
        (PINS, [FAST] * 2, [SLOW] * 2, {"copy": [1_000 * SLOW] * 2, "host": [SLOW] * 2}, False),
        (WORKERS, [FAST] * 2, [FAST] * 2, {"host": [SLOW] * 2}, True),
        (WORKERS, [FAST] * 2, [FAST] * 2, {}, False),
    ],
)
def test_second_is_redundant_after_first(
    configs: list[TrainingConfig],
    loader: list[float],
    device: list[float],
    others: dict[str, list[float]],
    is_redundant: bool,
) -> None:
    sides = {"loader": loader, "device": device, **others}
    assert are_redundant(configs, configs[:1], **sides)[1] is is_redundant
    assert not any(are_redundant(configs, [], **sides)), "nothing was tried"


@pytest.mark.parametrize("place", [0, 1])
def test_redundant_in_any_order(place: int) -> None:
    tried = [workers(0)]
    tried.insert(place, workers(2))
    configs = [workers(0), workers(2), workers(8)]
    assert are_redundant(configs, tried, loader=[SLOW, FAST, FAST], device=[SLOW] * 3)[2]


def test_untried_pinning_with_short_copies() -> None:
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
    two = {"loader": [SLOW] * 2, "device": [SLOW] * 2, "copy": [1_000 * SLOW] * 2}
    assert not are_redundant([configs[0], other[1]], PINS[:1], **two)[1]
    assert are_redundant(PINS, PINS[:1], **two)[1], "the same was tried without it"


def test_the_slowest_side_bounds_the_gain() -> None:
    for side, gain in ({"copy": 2 * SLOW}, 1.0), ({"host": 1.1 * SLOW}, 0.1), ({}, 9.0):
        assert most_gain(
            forecast(SLOW, **side, side_sd=0.0), SLOW, POLICY.trials.side_sds
        ) == pytest.approx([gain])


# Failures


@pytest.mark.parametrize(
    ("config", "ran", "chance"),
    [
        (OWN, [], 1.0),
        # Half of the values that have not run, and all
        (TrainingConfig(micro_batch_size=256), [], 0.505),
        (TrainingConfig(num_workers=8), [], 0.505),
        (FAILED, [], 0.01),
        (FAILED.model_copy(update={"pin_memory": True}), [], 0.01),
        # Values that have run
        (TrainingConfig(num_workers=8, pin_memory=True), [TrainingConfig(num_workers=8)], 1.0),
        (FAILED, [TrainingConfig(num_workers=8)], 0.01),
        (FAILED, [TrainingConfig(num_workers=8), TrainingConfig(micro_batch_size=256)], 1.0),
    ],
)
def test_chance_to_run(config: TrainingConfig, ran: list[TrainingConfig], chance: float) -> None:
    assert chance_to_run([config], [FAILED], [OWN, *ran], BLAMED) == pytest.approx([chance])
    assert chance_to_run([config], [], [OWN, *ran], BLAMED) == [1.0]


def test_failures_add_up() -> None:
    other, asked = (
        TrainingConfig(micro_batch_size=256, num_workers=4),
        TrainingConfig(micro_batch_size=256),
    )
    (once,), (twice,) = (
        chance_to_run([asked], failed, [OWN], BLAMED) for failed in ([FAILED], [FAILED, other])
    )
    assert twice == pytest.approx(once**2)


BLOCK = Block(samples=8, batches=1, seconds=1.0, data_wait_s=0.0)


@pytest.mark.parametrize(
    ("outcome", "blocks", "is_failure"),
    [
        ("crashed", (), True),
        ("timeout", (), True),
        ("diverged", (), True),
        ("oom", (), False),
        ("host_oom", (), False),
        ("pruned", (), False),
        ("pruned", (BLOCK,), False),
    ],
)
def test_has_failed(outcome: Outcome, blocks: tuple[Block, ...], is_failure: bool) -> None:
    result = TrialResult(outcome=outcome, blocks=blocks)
    assert has_failed(TrialRecord(number=1, config=OWN, results=(result,))) == is_failure
