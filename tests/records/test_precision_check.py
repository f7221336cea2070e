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
from autotune.note import Note
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


FINDS_ITS_SCALE = (True, True, *[False] * 20)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"losses": scaled(1.004)},  # rounding
        {"losses": scaled(1.08), "repeat_deviation": 0.04},  # float32's own deviation is added
        {"losses": (1.0, nan), "reference_losses": (1.0, inf), "steps": 2},
        {"skipped_steps": FINDS_ITS_SCALE},
        {"gradient_cosine": 0.35, "repeat_cosine": 0.6},  # a model that draws at random
        {"gradient_cosine": -0.1, "repeat_cosine": 0.05},  # a gradient that is chance
        {"gradient_cosine": None, "repeat_cosine": None},
    ],
)
def test_no_objection(changes: dict[str, Any]) -> None:
    assert objection(figures(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "against"),
    [
        (
            {"losses": (1.0, nan), "reference_losses": (1.0, 0.5), "steps": 2},
            loss_not_finite(loss="nan", step=2, steps=20),
        ),
        (
            {"skipped_steps": (*FINDS_ITS_SCALE, True)},
            steps_skipped(last_skipped=1, last=5, skipped=3, attempts=23),
        ),
        ({"gradient_cosine": 0.5}, gradients_differ(cosine=0.5, least_cosine=0.95)),
        (
            {"gradient_cosine": 0.25, "repeat_cosine": 0.6},
            gradients_differ(cosine=0.25, least_cosine=0.3),
        ),
        ({"gradient_cosine": None}, gradient_not_finite()),
    ],
)
def test_objection(changes: dict[str, Any], against: Note) -> None:
    assert objection(figures(**changes)) == against


def test_ten_times_the_rounding_is_objected_to() -> None:
    against = objection(figures(losses=scaled(1.08)))
    assert against is not None
    assert against.code == "losses_deviate"
    assert against.figures["deviation_fraction"] == pytest.approx(0.08)
    assert against.figures["allowed_fraction"] == pytest.approx(0.05)


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


def test_figures_survive_json() -> None:
    measured = figures(losses=(*FALLING[:-1], inf), reference_losses=(*FALLING[:-1], nan))
    read = PrecisionFigures.model_validate_json(measured.model_dump_json())
    assert read.losses == measured.losses
