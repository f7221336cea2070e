"""What the precision guard lets pass: rounding, the model's own randomness, a GradScaler that finds its scale."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.training_config import TrainingConfig
from autotune.messages.search import (
    gradient_not_finite,
    gradients_differ,
    loss_not_finite,
    steps_skipped,
    too_few_steps_compared,
)
from autotune.records.trial import (
    PrecisionFigures,
    deviation_of,
    guard_key,
    needs_guard,
    objection,
    shortfall,
)

FALLING = tuple(1.0 / (step + 1) for step in range(20))
LOSSES = st.lists(st.floats(0.01, 100), min_size=1, max_size=20)


def figures(**changes: Any) -> PrecisionFigures:
    values = {
        "steps": 20,
        "micro_batch_size": 32,
        "reference_losses": FALLING,
        "losses": FALLING,
        "gradient_cosine": 1.0,
        "repeat_cosine": 1.0,
        "repeat_deviation": 0.0,
    }
    return PrecisionFigures.model_validate(values | changes)


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * loss for loss in FALLING)


def test_equal_steps_are_no_objection() -> None:
    assert objection(figures()) is None


def test_rounding_is_tolerated_and_ten_times_as_much_is_not() -> None:
    assert objection(figures(losses=scaled(1.004))) is None
    against = objection(figures(losses=scaled(1.08)))
    assert against is not None
    assert against.code == "losses_deviate"
    assert against.figures["deviation_fraction"] == pytest.approx(0.08)
    assert against.figures["allowed_fraction"] == pytest.approx(0.05)


def test_what_float32_itself_deviates_by_is_tolerated_on_top() -> None:
    assert objection(figures(losses=scaled(1.08), repeat_deviation=0.04)) is None


@pytest.mark.parametrize("value", [inf, nan])
def test_a_loss_that_is_not_finite_is_told_with_its_step(value: float) -> None:
    against = objection(figures(losses=(1.0, value), reference_losses=(1.0, 0.5), steps=2))
    assert against == loss_not_finite(loss=str(value), step=2, steps=20)


def test_losses_that_float32_does_not_keep_finite_are_no_objection() -> None:
    assert objection(figures(losses=(1.0, nan), reference_losses=(1.0, inf), steps=2)) is None


def test_a_scaler_that_finds_its_scale_passes_and_one_that_still_skips_does_not() -> None:
    found = (True, True, *[False] * 20)
    assert objection(figures(skipped_steps=found)) is None
    against = objection(figures(skipped_steps=(*found, True)))
    assert against == steps_skipped(last_skipped=1, last=5, skipped=3, attempts=23)


def test_another_gradient_is_told_by_its_cosine() -> None:
    assert objection(figures(gradient_cosine=0.5)) == gradients_differ(
        cosine=0.5, least_cosine=0.95
    )
    assert objection(figures(gradient_cosine=None)) == gradient_not_finite()


def test_a_model_that_draws_at_random_is_asked_for_half_of_its_own_cosine() -> None:
    assert objection(figures(gradient_cosine=0.35, repeat_cosine=0.6)) is None
    assert objection(figures(gradient_cosine=0.25, repeat_cosine=0.6)) is not None


def test_a_gradient_that_is_chance_is_not_judged() -> None:
    assert objection(figures(gradient_cosine=-0.1, repeat_cosine=0.05)) is None
    assert objection(figures(gradient_cosine=None, repeat_cosine=None)) is None


def test_few_steps_are_too_few_unless_a_loss_or_the_scaler_ended_them() -> None:
    few = {"steps": 3, "losses": FALLING[:3], "reference_losses": FALLING[:3]}
    assert shortfall(figures(**few)) == too_few_steps_compared(steps=3, least_steps=5)
    assert shortfall(figures()) is None
    assert shortfall(figures(steps=1, losses=(nan,), reference_losses=(1.0,))) is None
    assert (
        shortfall(figures(steps=0, losses=(), reference_losses=(), skipped_steps=(True,) * 37))
        is None
    )


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"num_workers": 4, "micro_batch_size": 256}, False),
        ({"amp_dtype": "bfloat16"}, True),
        ({"amp_dtype": "tf32"}, True),
        ({"compile": True}, True),
        ({"fused": True}, False),
        ({"cudnn_benchmark": True}, False),
    ],
)
def test_what_computes_less_exactly_needs_the_guard(changes: dict[str, Any], needs: bool) -> None:
    assert needs_guard(TrainingConfig(**changes), TrainingConfig()) is needs


def test_what_the_user_runs_today_needs_no_guard() -> None:
    today = TrainingConfig(amp_dtype="bfloat16")
    assert not needs_guard(TrainingConfig(amp_dtype="bfloat16", micro_batch_size=64), today)
    assert not needs_guard(TrainingConfig(), today)
    assert guard_key(today) != guard_key(TrainingConfig(amp_dtype="bfloat16", compile=True))


def test_each_mode_of_a_compiled_model_is_compared_by_itself_and_a_fused_optimizer_is_not() -> None:
    compiled, tuned = (
        TrainingConfig(compile=True, compile_mode=mode) for mode in ("default", "max-autotune")
    )
    assert needs_guard(tuned, compiled)
    assert guard_key(compiled) == guard_key(TrainingConfig(compile=True, fused=True))


@given(LOSSES, st.floats(0.5, 2))
def test_the_deviation_is_the_share_by_which_losses_are_off(
    losses: list[float], factor: float
) -> None:
    assert deviation_of(losses, losses) == 0
    assert deviation_of(losses, [factor * loss for loss in losses]) == pytest.approx(
        abs(factor - 1), abs=1e-9
    )


@given(LOSSES, LOSSES)
def test_any_figures_survive_json(losses: list[float], others: list[float]) -> None:
    steps = min(len(losses), len(others))
    measured = figures(
        steps=steps, losses=(*losses[:steps], inf), reference_losses=(*others[:steps], nan)
    )
    assert (
        PrecisionFigures.model_validate_json(measured.model_dump_json()).losses == measured.losses
    )
