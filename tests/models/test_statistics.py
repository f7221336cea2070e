"""Intervals cover what they promise, also for correlated series."""

from __future__ import annotations

from math import isinf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.statistics import BATCH_MEANS, batch_means_half_width, ratio_interval, t_95


def test_t_95_is_that_of_the_tables() -> None:
    quantiles = {1: 12.706, 2: 4.303, 9: 2.262, 30: 2.042, 100: 1.984, 10**6: 1.960}
    assert {degrees: round(t_95(degrees), 3) for degrees in quantiles} == quantiles


def test_t_95_falls_with_degrees_of_freedom() -> None:
    values = [t_95(degrees) for degrees in range(200)]
    assert isinf(values[0])
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("blocks", "correlation"), [(200, 0.0), (200, 0.6), (400, 0.8)])
def test_batch_means_cover_a_correlated_series(blocks: int, correlation: float) -> None:
    random, runs, covered = np.random.default_rng(0), 500, 0
    for _ in range(runs):
        seconds = 1 + 0.05 * _ar1(random, blocks, correlation)
        half = batch_means_half_width([1.0] * blocks, seconds.tolist())
        covered += abs(blocks / seconds.sum() - 1.0) <= half
    assert 0.88 <= covered / runs <= 0.98


def test_batch_means_cover_a_pausing_loader() -> None:
    """One block in five holds a pause that is twenty times as long as what a block takes: batches' rates say little."""
    random, truth, halves, covered = (
        np.random.default_rng(0),
        1 / (0.2 * 21 + 0.8),
        list[float](),
        0,
    )
    for _ in range(500):
        seconds = np.where(random.random(40) < 0.2, 21.0, 1.0)
        halves.append(batch_means_half_width([1.0] * 40, seconds.tolist()))
        covered += abs(40 / seconds.sum() - truth) <= halves[-1]
    assert covered / 500 >= 0.88
    assert np.median(halves) < truth


def test_batch_means_need_two_blocks() -> None:
    assert isinf(batch_means_half_width([], []))
    assert isinf(batch_means_half_width([10.0], [1.0]))
    assert batch_means_half_width([10.0, 10.0], [1.0, 1.0]) == 0.0


def test_blocks_are_joined_into_ten_batches() -> None:
    # Alternating fast and slow blocks: any pair has the same rate, so ten joined batches show no spread at all.
    amounts, seconds = [1.0, 1.0] * BATCH_MEANS, [1.0, 3.0] * BATCH_MEANS
    assert batch_means_half_width(amounts, seconds) == pytest.approx(0.0, abs=1e-12)
    assert batch_means_half_width(amounts[:-2], seconds[:-2]) > 0.1


@given(
    st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.01, 1e2)), min_size=2, max_size=60),
    st.floats(0.1, 10),
)
def test_a_half_width_scales_with_the_clock(
    blocks: list[tuple[float, float]], factor: float
) -> None:
    amounts, seconds = [amount for amount, _ in blocks], [time for _, time in blocks]
    half = batch_means_half_width(amounts, seconds)
    assert half >= 0
    slower = batch_means_half_width(amounts, [time * factor for time in seconds])
    assert slower * factor == pytest.approx(half, rel=1e-6, abs=1e-6 * max(amounts) / min(seconds))


def _ar1(
    random: np.random.Generator, length: int, correlation: float
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return a stationary series of unit variance."""
    noise = random.standard_normal(length) * np.sqrt(1 - correlation**2)
    series = np.empty(length)
    series[0] = random.standard_normal()
    for index in range(1, length):
        series[index] = correlation * series[index - 1] + noise[index]
    return series


def test_ratio_of_pairs_covers_the_true_one() -> None:
    random, runs, covered = np.random.default_rng(0), 500, 0
    for _ in range(runs):
        found = ratio_interval([*(3.0 * np.exp(random.normal(0, 0.1, 8)))])
        covered += found.low <= 3.0 <= found.high
    assert 0.92 <= covered / runs <= 0.98


def test_single_pair_has_no_interval() -> None:
    found = ratio_interval([2.0])
    assert found.value == pytest.approx(2.0)
    assert found.low == 0
    assert isinf(found.high)
