"""Copies ahead of the step and products in float8: given where they win, with the interval of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.records.breakdown import TimeBreakdown
from autotune.records.diagnosis import Advice, Curves, Evidence, Float8Products
from autotune.settings.training_config import TrainingConfig
from tests.factories import CPU, GPU, make_breakdown, make_evidence, make_point, make_roofline

PINNED = TrainingConfig(pin_memory=True)


def advice_of(kind: str, evidence: Evidence) -> Advice | None:
    found = rank_advice(evidence, find_bottlenecks(evidence))
    return next((piece for piece in found if piece.kind == kind), None)


def copying(share: float, interval: tuple[float, float] | None = None) -> TimeBreakdown:
    return make_breakdown(copy=share).model_copy(update={"copy_fraction_ci": interval})


def ahead(breakdown: TimeBreakdown | None, **changes: Any) -> Advice | None:
    return advice_of("prefetch_to_device", make_evidence(1000.0, breakdown=breakdown, **({"config": PINNED} | changes)))


def test_copies_ahead_of_the_step_save_what_nothing_hides() -> None:
    advice = ahead(copying(0.5, (0.4, 0.6)))
    assert advice is not None
    assert advice.expected_gain == pytest.approx(1.0)
    assert advice.figures["gain_low"] == 0, "how much computing hides is not known"
    assert advice.figures["gain_high"] == pytest.approx(1 / 0.4 - 1)
    assert advice.figures["is_spread_known"]


def test_of_a_single_step_the_scatter_of_copies_is_not_known() -> None:
    advice = ahead(copying(0.5))
    assert advice is not None
    assert not advice.figures["is_spread_known"]
    assert (advice.figures["gain_low"], advice.figures["gain_high"]) == pytest.approx((0.0, 1.0))


def test_copies_that_differ_from_step_to_step_are_told_by_what_is_expected() -> None:
    advice = ahead(copying(0.5, (0.0, 1.0)))
    assert advice is not None
    assert advice.expected_gain == pytest.approx(1.0)


def test_copies_ahead_of_the_step_gain_no_more_than_the_loader_allows() -> None:
    advice = ahead(copying(0.5, (0.4, 0.6)), loader_ceiling=1500.0)
    assert advice is not None
    assert advice.expected_gain == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu"])
def test_copies_run_ahead_on_every_device_with_streams(kind: str) -> None:
    assert ahead(copying(0.5), environment=GPU.model_copy(update={"device_kind": kind})) is not None


@pytest.mark.parametrize(
    ("breakdown", "changes"),
    [
        (copying(0.5), {"config": TrainingConfig()}),
        (copying(0.05), {}),
        (copying(0.5), {"environment": CPU}),
        (copying(0.5), {"environment": GPU.model_copy(update={"device_kind": "mps"})}),
        (copying(0.5), {"loader_ceiling": 1000.0}),
        (None, {}),
    ],
    ids=[
        "not pinned",
        "hidden already",
        "the CPU",
        "no streams",
        "the loader comes first",
        "not measured",
    ],
)
def test_nothing_is_said_of_copies_ahead_where_they_win_nothing(
    breakdown: TimeBreakdown | None, changes: dict[str, Any]
) -> None:
    assert ahead(breakdown, **changes) is None


IN_BFLOAT16 = TrainingConfig(amp_dtype="bfloat16", micro_batch_size=32)
"""At 1,000 samples/s a batch takes 32 ms."""


def products(**changes: float) -> Float8Products:
    """20 of the 32 ms in products, 10 ms of them in float8, and 2 ms for casts, or 6 ms operator by operator."""
    values = {"flops": 0.8e9, "bfloat16_s": 20e-3, "float8_s": 10e-3, "cast_s": 6e-3, "moved_cast_s": 2e-3}
    return Float8Products.model_validate(values | changes)


def in_float8(float8: Float8Products | None, *points: Any, **changes: Any) -> Advice | None:
    curves = Curves(device=points, roofline=make_roofline(float8=float8))
    arguments: dict[str, Any] = {"config": IN_BFLOAT16, "loader_ceiling": 1e6} | changes
    return advice_of("train_in_float8", make_evidence(1000.0, curves=curves, **arguments))


def test_float8_saves_what_products_gain_beyond_their_casts() -> None:
    advice = in_float8(products())
    assert advice is not None
    assert advice.expected_gain == pytest.approx(32 / (32 - 8) - 1, rel=0.01)
    assert advice.figures["gain_low"] == pytest.approx(32 / (32 - 4) - 1, rel=0.01)
    assert advice.figures["gain_high"] == pytest.approx(32 / (32 - 10) - 1, rel=0.01)
    told = {name: advice.figures[name] for name in ("flops_fraction", "step_fraction", "products_times")}
    assert told == pytest.approx({"flops_fraction": 0.8, "step_fraction": 20 / 32, "products_times": 2.0})
    assert not advice.figures["is_bfloat16_first"]


def test_from_float32_float8_is_told_with_what_bfloat16_gives() -> None:
    float8 = products(bfloat16_s=8e-3, float8_s=4e-3, cast_s=1e-3, moved_cast_s=1e-3)
    point = make_point(2000.0, amp_dtype="bfloat16")
    advice = in_float8(float8, point, config=TrainingConfig(micro_batch_size=32))
    assert advice is not None
    assert advice.expected_gain == pytest.approx(32 / (16 - 3) - 1, rel=0.01), "16 ms a batch in bfloat16"
    assert advice.figures["is_bfloat16_first"]


def test_the_products_of_each_device_count_for_its_own_samples() -> None:
    group = IN_BFLOAT16.model_copy(update={"strategy": "ddp", "world_size": 2})
    advice = in_float8(products(), config=group)
    assert advice is not None
    assert advice.expected_gain == pytest.approx(64 / (64 - 8) - 1, rel=0.01), "two batches in 64 ms, side by side"


@pytest.mark.parametrize(
    ("float8", "changes"),
    [
        (None, {}),
        (products(flops=0.4e9), {}),
        (products(cast_s=10e-3), {}),
        (products(float8_s=21e-3), {}),
        (products(), {"config": TrainingConfig()}),
        (products(), {"breakdown": make_breakdown(wait=0.6)}),
        (products(), {"loader_ceiling": 1000.0, "device_ceiling": 1400.0}),
    ],
    ids=[
        "no float8 here",
        "most of it is other arithmetic",
        "casts may take what is gained",
        "no faster here",
        "bfloat16 was not measured",
        "the loader comes first",
        "the loader allows no more",
    ],
)
def test_nothing_is_said_of_float8_where_it_wins_nothing(
    float8: Float8Products | None, changes: dict[str, Any]
) -> None:
    assert in_float8(float8, **changes) is None
