"""Batches without padding: advised where they gain, with the interval of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import BucketForecast, Ceilings, Lengths, PackForecast
from autotune.records.result import Advice
from tests.factories import make_evidence, make_facts
from tests.factories.scripts import make_script

BUCKETS, ROWS = "batch_like_lengths", "pack_sequences"
FIGURES: dict[str, dict[str, Any]] = {
    BUCKETS: {"padding": 0.45, "bucket_padding": 0.1},
    ROWS: {"padding": 0.45, "packed_padding": 0.02, "row_tokens": 90, "samples_per_row": 2.9},
}
LOADER_BOUND = {"loader_ceiling": 1000.0, "device_ceiling": 5000.0}


def lengths(
    buckets: float | None, rows: float | None = None, low: float = 0.0, high: float = 0.0
) -> Lengths:
    """Make lengths whose batches of similar lengths, or full rows, need these shares of the device's time."""
    packed = None
    if rows is not None:
        packed = PackForecast(
            row_tokens=90,
            samples_per_row=2.9,
            padding=0.02,
            device_time=rows,
            device_time_ci=(rows - low, rows + high),
        )
    return Lengths(
        items=500,
        mean=30.0,
        median=25.0,
        longest=90,
        padding=0.45,
        buckets=BucketForecast(
            pool_batches=50,
            random_padding=0.5,
            bucket_padding=0.1,
            device_time=buckets,
            device_time_ci=None if buckets is None else (buckets - low, buckets + high),
        ),
        packed=packed,
    )


def advised(kind: str, own: Lengths | None, **measured: Any) -> Advice | None:
    """Return the advice of this kind to a run of 1,000 samples/s."""
    evidence = make_evidence(1000.0, lengths=own, **measured)
    found = rank_advice(evidence, find_bottlenecks(evidence))
    return next((piece for piece in found if piece.kind == kind), None)


@pytest.mark.parametrize(
    ("kind", "own"),
    [(BUCKETS, lengths(0.5, None, 0.1, 0.3)), (ROWS, lengths(None, 0.5, 0.1, 0.3))],
)
def test_gain_is_what_the_device_saves(kind: str, own: Lengths) -> None:
    advice = advised(kind, own)
    assert advice is not None
    assert advice.expected_gain == pytest.approx(1.0)
    ends = [advice.figures["gain_low"], advice.figures["gain_high"]]
    assert ends == pytest.approx([0.25, 1.5], abs=0.01)
    assert advice.figures.items() >= FIGURES[kind].items()
    bounded = advised(kind, own, loader_ceiling=1200.0)
    assert bounded is not None
    assert bounded.expected_gain == pytest.approx(0.2, abs=0.05), "no more than the loader allows"


@pytest.mark.parametrize(("relative_sd", "is_given"), [(0.0, True), (0.02, True), (2.2, False)])
def test_error_of_the_loader_counts(relative_sd: float, is_given: bool) -> None:
    loader = Ceiling(
        samples_per_s=1500.0, samples=1500, seconds=1.0, batches=50, relative_sd=relative_sd
    )
    ceilings = Ceilings(loader=loader)
    found = advised(BUCKETS, lengths(0.5), loader_ceiling=1500.0, ceilings=ceilings)
    assert (found is not None) == is_given


@pytest.mark.parametrize(
    ("kind", "own", "measured"),
    [
        (BUCKETS, None, {}),
        (BUCKETS, lengths(None), {}),
        (BUCKETS, lengths(0.5), LOADER_BOUND),
        (BUCKETS, lengths(0.3), {"loader_ceiling": 1060.0, "device_ceiling": 1200.0}),
        (BUCKETS, lengths(0.98), {}),
        (BUCKETS, lengths(0.8, None, 0.3, 0.3), {}),
        (ROWS, lengths(0.5), {}),
        (ROWS, lengths(0.5, 0.49), {}),
        (ROWS, lengths(0.5, 0.7), {}),
        (ROWS, lengths(None, 0.8, 0.3, 0.3), {}),
        (ROWS, lengths(None, 0.5), LOADER_BOUND),
    ],
    ids=[
        "equal lengths",
        "not timed",
        "loader is the bottleneck",
        "loader is near",
        "little to save",
        "interval includes no gain",
        "rows not timed",
        "buckets gain as much",
        "attention over whole rows costs more",
        "rows: interval includes no gain",
        "rows: loader is the bottleneck",
    ],
)
def test_no_advice_without_a_gain(
    kind: str, own: Lengths | None, measured: dict[str, float]
) -> None:
    assert advised(kind, own, **measured) is None


def test_lengths_of_a_script_give_an_estimate_by_its_tokens() -> None:
    facts = make_facts(script=make_script())
    found = advised(BUCKETS, lengths(None), facts=facts)
    assert found is not None
    assert found.is_fault
    assert found.figures["timed"] == 0
    # 55 % of the tokens are real now, 90 % then
    assert found.expected_gain == pytest.approx(0.9 / 0.55 - 1, rel=0.05)
    assert found.gain_interval is not None
    assert found.gain_interval.low < found.gain_interval.value < found.gain_interval.high
    little = lengths(None).model_copy(update={"padding": 0.12})
    assert advised(BUCKETS, little, facts=facts) is None
