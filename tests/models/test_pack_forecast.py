"""Forecast the gain of full rows, from items' lengths and batches timed by their length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.forecast import forecast_packing
from autotune.records.measurement import LengthStep, PackForecast
from tests.factories.lengths import LENGTHS, longest_of_batches, timed_widths


def packed(
    seconds: Callable[[float], float], lengths: Sequence[int] = LENGTHS, sd: float = 0.0
) -> PackForecast:
    found = forecast_packing(
        lengths, longest_of_batches(lengths), timed_widths(seconds, relative_sd=sd)
    )
    assert found is not None
    return found


def test_linear_time_is_saved_like_padding() -> None:
    found, padding = packed(lambda width: width / 1e3), 1 - sum(LENGTHS) / len(LENGTHS) / 64
    assert found.device_time == pytest.approx((1 - padding) / (1 - found.padding), rel=0.03)
    assert found.device_time_ci[0] < found.device_time < found.device_time_ci[1]
    assert found.row_tokens == 64
    assert found.samples_per_row == pytest.approx(
        64 * (1 - found.padding) / (sum(LENGTHS) / len(LENGTHS))
    )


def test_rows_are_nearly_full() -> None:
    assert packed(lambda width: width).padding < 0.02
    halves = packed(lambda width: width, [33] * 300 + [64] * 300)
    assert halves.padding == pytest.approx(1 - 97 / 128), "two of 33 don't fit into 64"


def test_larger_batch_is_no_gain_of_packing() -> None:
    """Expect no gain if any batch costs the same, though rows hold more samples."""
    found = packed(lambda _: 1.0)
    assert found.device_time == pytest.approx(1.0)
    assert found.device_time_ci[0] < 0.5, "which those have who take it"


def test_attention_over_rows_costs() -> None:
    found = packed(lambda width: width**2)
    linear = packed(lambda width: width)
    assert found.device_time == pytest.approx(linear.device_time, rel=0.1), (
        "64 squared for each 64 tokens"
    )
    assert found.device_time_ci[0] < 0.6 * found.device_time, "within each sample it costs less"


def test_attention_may_cost_more_than_padding() -> None:
    lengths = [8] * 597 + [64] * 3
    found = forecast_packing(lengths, [8] * 390 + [64] * 10, timed_widths(lambda width: width**2))
    assert found is not None
    assert found.device_time > 1


@pytest.mark.parametrize(
    ("padded", "steps"),
    [
        ([], timed_widths(lambda width: width)),
        ([64], []),
        ([64], timed_widths(lambda width: width, (64,))),
    ],
)
def test_no_forecast_without_two_lengths(padded: list[int], steps: list[LengthStep]) -> None:
    assert forecast_packing(LENGTHS, padded, steps) is None


@given(st.lists(st.integers(1, 64), min_size=64, max_size=200), st.floats(0.0, 0.2))
def test_the_expected_time_lies_within_its_interval(lengths: list[int], sd: float) -> None:
    found = forecast_packing(
        lengths,
        longest_of_batches(lengths, 8, 30),
        timed_widths(lambda width: 1 + width, relative_sd=sd),
    )
    assert found is not None
    assert found.device_time_ci[0] <= found.device_time <= found.device_time_ci[1] + 1e-9
    assert 0 <= found.padding < 1
    assert found.samples_per_row >= 1
