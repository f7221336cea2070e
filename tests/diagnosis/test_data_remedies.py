"""Batches without padding, and decoding on the GPU: given where they win, with the interval of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.records.breakdown import ImageDecoding
from autotune.records.diagnosis import Advice, Evidence
from autotune.records.lengths import BucketForecast, Lengths, PackForecast
from autotune.settings.training_config import TrainingConfig
from tests.factories import CPU, GPU, make_breakdown, make_evidence, make_facts, make_loader_costs


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
    return Lengths(items=500, mean=30.0, median=25.0, longest=90, batch_samples=32, padding=0.45, buckets=buckets)


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


def packed(buckets: float | None, rows: float | None, low: float = 0.0, high: float = 0.0) -> Lengths:
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


def decoding(share: float = 0.8, off: float = 0.05) -> ImageDecoding:
    interval = (share - off, share + off)
    return ImageDecoding(items=8, images_per_item=1.0, item_fraction=share, item_fraction_ci=interval)


def short_of_cores(**changes: Any) -> Evidence:
    """Four workers on four cores make items of 4 ms each, of which most is decoding; the device could do 10,000."""
    costs = make_loader_costs(4e-3, decoding=changes.pop("decoding", decoding()))
    arguments: dict[str, Any] = {
        "config": TrainingConfig(num_workers=4),
        "environment": GPU.model_copy(update={"cores": 4}),
        "facts": make_facts(dataset_length=None),
        "breakdown": make_breakdown(wait=0.9),
        "loader_costs": costs,
        "loader_ceiling": 1000.0,
        "device_ceiling": 10_000.0,
    }
    return make_evidence(980.0, **(arguments | changes))


def on_gpu(evidence: Evidence) -> Advice | None:
    return advice_of("decode_on_gpu", evidence)


def test_decoding_on_the_gpu_leaves_the_loader_the_rest_of_an_item() -> None:
    advice = on_gpu(short_of_cores())
    assert advice is not None
    assert advice.figures["loader_samples_per_s"] == pytest.approx(5000.0), "a fifth of each item is left"
    assert advice.expected_gain == pytest.approx(4.0, rel=0.1)
    assert advice.figures["gain_low"] == 0, "what it takes of the GPU is not known"
    assert advice.figures["gain_high"] == pytest.approx(1000 / 150 - 1, rel=0.1)


def test_decoding_that_differs_from_item_to_item_is_told_by_what_is_expected() -> None:
    advice = on_gpu(short_of_cores(decoding=decoding(0.3, 0.3)))
    assert advice is not None
    assert advice.expected_gain == pytest.approx(0.43, rel=0.1)


def test_decoding_on_the_gpu_gives_no_more_than_the_device_does() -> None:
    advice = on_gpu(short_of_cores(device_ceiling=1500.0))
    assert advice is not None
    assert advice.expected_samples_per_s == pytest.approx(1500.0, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"decoding": None},
        {"decoding": decoding(0.01, 0.0)},
        {"environment": CPU},
        {"environment": GPU.model_copy(update={"device_kind": "rocm", "cores": 4})},
        {"environment": GPU.model_copy(update={"cores": 64})},
        {"breakdown": make_breakdown(wait=0.0), "loader_ceiling": 50_000.0, "device_ceiling": 1000.0},
    ],
    ids=[
        "no JPEG files",
        "little of an item",
        "no GPU",
        "no nvJPEG",
        "more workers would do",
        "the device is the bottleneck",
    ],
)
def test_nothing_is_said_of_decoding_where_it_is_not_what_the_cores_lack(changes: dict[str, Any]) -> None:
    assert on_gpu(short_of_cores(**changes)) is None
