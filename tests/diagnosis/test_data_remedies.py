"""Batches without padding: given where they win, with the interval of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import BucketForecast, Ceilings, Lengths, PackForecast
from autotune.records.result import Advice, Evidence
from tests.factories import make_evidence


def advice_of(kind: str, evidence: Evidence) -> Advice | None:
    found = rank_advice(evidence, find_bottlenecks(evidence))
    return next((piece for piece in found if piece.kind == kind), None)


def lengths(device_time: float | None, low: float = 0.0, high: float = 0.0) -> Lengths:
    interval = None if device_time is None else (device_time - low, device_time + high)
    buckets = BucketForecast(
        pool_batches=50,
        random_padding=0.5,
        bucket_padding=0.1,
        device_time=device_time,
        device_time_ci=interval,
    )
    return Lengths(
        items=500,
        mean=30.0,
        median=25.0,
        longest=90,
        padding=0.45,
        buckets=buckets,
    )


def like_lengths(evidence: Evidence) -> Advice | None:
    return advice_of("batch_like_lengths", evidence)


def test_like_lengths_win_what_the_device_saves() -> None:
    advice = like_lengths(make_evidence(1000.0, lengths=lengths(0.5, 0.1, 0.3)))
    assert advice is not None
    assert advice.expected_gain == pytest.approx(1.0)
    assert advice.figures["gain_low"] == pytest.approx(0.25, abs=0.01)
    assert advice.figures["gain_high"] == pytest.approx(1.5, abs=0.01)
    assert (advice.figures["padding"], advice.figures["bucket_padding"]) == (0.45, 0.1)


def test_like_lengths_win_no_more_than_the_loader_allows() -> None:
    advice = like_lengths(make_evidence(1000.0, loader_ceiling=1200.0, lengths=lengths(0.5)))
    assert advice is not None
    assert advice.expected_gain == pytest.approx(0.2, abs=0.05), "of 100 % on the device"


@pytest.mark.parametrize(("relative_sd", "is_given"), [(0.0, True), (0.02, True), (2.2, False)])
def test_like_lengths_are_not_advised_where_the_loaders_own_error_may_take_what_they_save(
    relative_sd: float, is_given: bool
) -> None:
    loader = Ceiling(
        samples_per_s=1500.0, samples=1500, seconds=1.0, batches=50, relative_sd=relative_sd
    )
    ceilings = Ceilings(loader=loader)
    evidence = make_evidence(1000.0, loader_ceiling=1500.0, ceilings=ceilings, lengths=lengths(0.5))
    assert (like_lengths(evidence) is not None) == is_given


@pytest.mark.parametrize(
    "measured",
    [
        {"lengths": None},
        {"lengths": lengths(None)},
        {"lengths": lengths(0.5), "loader_ceiling": 1000.0, "device_ceiling": 5000.0},
        {"lengths": lengths(0.3), "loader_ceiling": 1060.0, "device_ceiling": 1200.0},
        {"lengths": lengths(0.98)},
        {"lengths": lengths(0.8, 0.3, 0.3)},
    ],
    ids=[
        "equal lengths",
        "not timed",
        "the loader is the bottleneck",
        "the loader is near",
        "little to save",
        "left open by its scatter",
    ],
)
def test_nothing_is_said_of_like_lengths_where_they_win_nothing(measured: dict[str, Any]) -> None:
    assert like_lengths(make_evidence(1000.0, **measured)) is None


def packed(
    buckets: float | None, rows: float | None, low: float = 0.0, high: float = 0.0
) -> Lengths:
    if rows is None:
        return lengths(buckets)
    forecast = PackForecast(
        row_tokens=90,
        samples_per_row=2.9,
        padding=0.02,
        device_time=rows,
        device_time_ci=(rows - low, rows + high),
    )
    return lengths(buckets).model_copy(update={"packed": forecast})


def packing(evidence: Evidence) -> Advice | None:
    return advice_of("pack_sequences", evidence)


def test_full_rows_win_what_the_device_saves() -> None:
    advice = packing(make_evidence(1000.0, lengths=packed(0.6, 0.5, 0.1, 0.3)))
    assert advice is not None
    assert advice.expected_gain == pytest.approx(1.0)
    assert advice.figures["gain_low"] == pytest.approx(0.25, abs=0.01)
    assert advice.figures["gain_high"] == pytest.approx(1.5, abs=0.01)
    told = ("padding", "packed_padding", "row_tokens", "samples_per_row")
    assert [advice.figures[name] for name in told] == [0.45, 0.02, 90, 2.9]


def test_full_rows_are_advised_where_batches_of_like_lengths_were_not_forecast() -> None:
    evidence = make_evidence(1000.0, lengths=packed(None, 0.5))
    assert packing(evidence) is not None
    assert like_lengths(evidence) is None


def test_full_rows_win_no_more_than_the_loader_allows() -> None:
    advice = packing(make_evidence(1000.0, loader_ceiling=1200.0, lengths=packed(None, 0.5)))
    assert advice is not None
    assert advice.expected_gain == pytest.approx(0.2, abs=0.05), "of 100 % on the device"


@pytest.mark.parametrize(
    "measured",
    [
        {"lengths": None},
        {"lengths": packed(0.5, None)},
        {"lengths": packed(0.5, 0.49)},
        {"lengths": packed(0.5, 0.7)},
        {"lengths": packed(None, 0.8, 0.3, 0.3)},
        {"lengths": packed(None, 0.5), "loader_ceiling": 1000.0, "device_ceiling": 5000.0},
    ],
    ids=[
        "equal lengths",
        "not timed",
        "buckets win as much",
        "attention over whole rows costs more",
        "left open by its scatter",
        "the loader is the bottleneck",
    ],
)
def test_nothing_is_said_of_full_rows_where_they_win_nothing_more(measured: dict[str, Any]) -> None:
    assert packing(make_evidence(1000.0, **measured)) is None
