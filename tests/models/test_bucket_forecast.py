"""Forecast the gain of batches of similar lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.forecast import forecast_buckets
from autotune.records.measurement import LengthStep
from tests.factories.lengths import LENGTHS, WIDTHS, longest_of_batches, timed_widths


def test_linear_time_is_saved_like_padding() -> None:
    found = forecast_buckets(
        LENGTHS, 32, longest_of_batches(LENGTHS, 32), timed_widths(lambda width: width / 1e3)
    )
    assert found.device_time is not None
    assert found.device_time == pytest.approx(
        (1 - found.random_padding) / (1 - found.bucket_padding), rel=0.03
    )
    assert found.device_time_ci is not None
    assert found.device_time_ci[0] < found.device_time < found.device_time_ci[1]
    assert found.random_padding > 0.4 > 0.1 > found.bucket_padding


def test_fixed_cost_saves_less_and_attention_more() -> None:
    linear, fixed, squared = (
        forecast_buckets(
            LENGTHS, 32, longest_of_batches(LENGTHS, 32), timed_widths(seconds)
        ).device_time
        for seconds in (lambda width: width, lambda width: 100 + width, lambda width: width**2)
    )
    assert linear is not None
    assert fixed is not None
    assert squared is not None
    assert squared < linear < fixed < 1


def test_batches_already_alike_gain_nothing() -> None:
    whole = len(LENGTHS) - len(LENGTHS) % 8
    own = sorted(LENGTHS)[:whole]
    lengths_today = [max(own[at : at + 8]) for at in range(0, whole, 8)]
    found = forecast_buckets(LENGTHS, 8, lengths_today, timed_widths(lambda width: width))
    assert found.device_time == pytest.approx(1.0, abs=0.05)


def test_equal_padding_has_no_time() -> None:
    steps = [LengthStep(longest=width, padded=64, seconds=1.0, relative_sd=0.0) for width in WIDTHS]
    assert forecast_buckets(LENGTHS, 8, [64] * 50, steps).device_time is None


def test_padding_alone_without_timed_batches() -> None:
    found = forecast_buckets(LENGTHS, 8, longest_of_batches(LENGTHS, 8), ())
    assert (found.device_time, found.device_time_ci) == (None, None)
    assert found.random_padding > found.bucket_padding


def test_relative_sd_widens_the_interval() -> None:
    spans = []
    for relative_sd in (0.0, 0.3):
        found = forecast_buckets(
            LENGTHS,
            8,
            longest_of_batches(LENGTHS, 8),
            timed_widths(lambda width: width, relative_sd=relative_sd),
        )
        assert found.device_time_ci is not None
        spans.append(found.device_time_ci[1] - found.device_time_ci[0])
    assert spans[1] > 2 * spans[0]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(1, 300), st.floats(0, 2))
def test_bucket_padding_at_most_random(lengths: list[int], size: int, relative_sd: float) -> None:
    widths = sorted({min(lengths), max(lengths)})
    found = forecast_buckets(
        lengths,
        size,
        longest_of_batches(lengths, size, 20),
        timed_widths(lambda width: width, widths, relative_sd),
    )
    assert 0 <= found.bucket_padding <= found.random_padding < 1
    assert (found.device_time is None) == (len(widths) == 1)
    if found.device_time is not None and found.device_time_ci is not None:
        assert 0 < found.device_time_ci[0] <= found.device_time_ci[1]
    assert found == forecast_buckets(
        lengths,
        size,
        longest_of_batches(lengths, size, 20),
        timed_widths(lambda width: width, widths, relative_sd),
    )


@pytest.mark.parametrize(("length", "batches"), [(None, 50), (100_000, 50), (640, 5), (64, 1)])
def test_pool_is_at_most_a_quarter_of_an_epoch(length: int | None, batches: int) -> None:
    found = forecast_buckets(
        LENGTHS, 32, longest_of_batches(LENGTHS, 32), (), dataset_length=length
    )
    assert found.pool_batches == batches
    assert (found.bucket_padding < found.random_padding - 0.1) == (batches > 1)
