"""Stop a trial that has fallen behind, and no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.evidence import PruningThreshold, assumed_variation, behind_threshold, luck_of
from autotune.models.statistics import mean_rate
from autotune.policy import POLICY
from autotune.records.measurement import Block

THRESHOLD = PruningThreshold(number=3, low_samples_per_s=1_000.0)


def blocks(*rates: float, seconds: float = 0.2) -> list[Block]:
    return [
        Block(samples=round(rate * seconds), batches=4, seconds=seconds, data_wait_s=0.0)
        for rate in rates
    ]


@given(st.lists(st.floats(1.0, 1e5), max_size=2))
def test_nothing_is_stopped_before_its_third_block(rates: list[float]) -> None:
    assert behind_threshold(blocks(*rates), THRESHOLD, POLICY.stopping) is None


def test_the_note_holds_rate_interval_and_threshold() -> None:
    seen = blocks(500, 505, 495, 500)
    reason = behind_threshold(seen, THRESHOLD, POLICY.stopping)
    assert reason is not None
    assert reason.code == "stopped_early"
    half_width = pytest.approx(6.5, abs=0.1)  # 3.182 * 4.08 / 2
    assert reason.figures == {
        "samples_per_s": 500.0,
        "half_width": half_width,
        "threshold_number": 3,
        "threshold_samples_per_s": 1_000.0,
    }


def test_bursty_trial_is_not_stopped() -> None:
    assert behind_threshold(blocks(500, 500, 500, 500), THRESHOLD, POLICY.stopping) is not None
    assert behind_threshold(blocks(100, 900, 100, 900), THRESHOLD, POLICY.stopping) is None


def test_trial_within_busy_margin_goes_on() -> None:
    assert (
        behind_threshold(blocks(*[980] * 10, seconds=1.0), THRESHOLD, POLICY.stopping) is not None
    )
    assert behind_threshold(blocks(*[981] * 10, seconds=1.0), THRESHOLD, POLICY.stopping) is None


@given(st.lists(st.floats(1.0, 5_000.0), min_size=3, max_size=30))
def test_trial_at_threshold_is_not_stopped(rates: list[float]) -> None:
    seen = blocks(*rates, seconds=1.0)
    is_at_it = mean_rate(seen)[0] >= THRESHOLD.low_samples_per_s
    assert not is_at_it or behind_threshold(seen, THRESHOLD, POLICY.stopping) is None


def runs_that_are_stopped(
    mean: float, *, spread: float, correlation: float, runs: int = 400
) -> float:
    """Share of windows of ten blocks that are stopped in their course, each block's rate near the one before."""
    random, lost = np.random.default_rng(0), 0
    for _ in range(runs):
        rates = _wandering(random, mean, spread, correlation)
        lost += any(
            behind_threshold(blocks(*rates[:count], seconds=1.0), THRESHOLD, POLICY.stopping)
            is not None
            for count in range(1, 11)
        )
    return lost / runs


@pytest.mark.parametrize(
    ("spread", "correlation"), [(0.02, 0.0), (0.1, 0.0), (0.3, 0.0), (0.1, 0.5)]
)
def test_equal_trials_are_rarely_stopped(spread: float, correlation: float) -> None:
    assert runs_that_are_stopped(1_050.0, spread=spread, correlation=correlation) < 0.1


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_half_as_fast_trials_are_stopped(spread: float) -> None:
    assert runs_that_are_stopped(500.0, spread=spread, correlation=0.0) > 0.95


def _wandering(
    random: np.random.Generator, mean: float, spread: float, correlation: float
) -> Sequence[float]:
    steps = random.standard_normal(10) * np.sqrt(1 - correlation**2)
    place, rates = random.standard_normal(), []
    for step in steps:
        place = correlation * place + step
        rates.append(max(1.0, mean * (1 + spread * place)))
    return rates


def test_luck_of() -> None:
    spread = assumed_variation("cuda")
    assert spread.device is not None
    by_chance = 2.920  # Student's t of two degrees of freedom, one-sided 95 %
    assert luck_of(spread, spread, POLICY.stopping) == pytest.approx(
        by_chance * 2**0.5 * 0.1, rel=1e-3
    )
    assert luck_of(spread.device, spread, POLICY.stopping) == pytest.approx(
        by_chance * (0.1**2 + 0.004**2) ** 0.5, rel=1e-3
    )
    one_kind = assumed_variation("cpu")
    assert luck_of(one_kind, one_kind, POLICY.stopping) == pytest.approx(1.64 * 2**0.5 * 0.1)


def warm(*rates: float, seconds: float = 0.3, made: float | None = None) -> list[Block]:
    update = {"is_warm_up": True, "made": None if made is None else made * seconds}
    return [block.model_copy(update=update) for block in blocks(*rates, seconds=seconds)]


@pytest.mark.parametrize(
    ("seen", "is_stopped"),
    [
        (warm(400, 450), True),
        (warm(400), False),  # one block
        (warm(400, 400, seconds=0.2), False),  # less than half a second
        (warm(600, 600), False),  # above half of it
        (warm(1500, 1500) + warm(10, seconds=5.0), False),  # a pause
        (warm(1500, 1500, made=300.0) + warm(300, seconds=5.0), True),  # a queue that is used up
        (warm(400) + blocks(400, 400), True),  # with those of the window
    ],
)
def test_a_warm_up_ends_only_what_is_hopeless(seen: list[Block], is_stopped: bool) -> None:
    assert (behind_threshold(seen, THRESHOLD, POLICY.stopping) is not None) == is_stopped


def test_a_window_is_judged_without_its_warm_up() -> None:
    assert (
        behind_threshold(warm(5_000, 5_000) + blocks(500, 505, 495), THRESHOLD, POLICY.stopping)
        is not None
    )
    assert (
        behind_threshold(warm(10, 10) + blocks(1_000, 1_010, 990), THRESHOLD, POLICY.stopping)
        is None
    )
