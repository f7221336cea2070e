"""Check the learning-rate rules against numbers from the papers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.plan import LrRule, OptimizerFacts
from autotune.messages.space import betas_unchanged, lr_rule_unknown, lr_unchanged, lr_warm_up
from autotune.space.scaling import LrAdvice, scale_lr

_SGD = OptimizerFacts(name="SGD")
_ADAMW = OptimizerFacts(name="AdamW", betas=(0.9, 0.999), eps=1e-8)


def test_linear_rule_is_goyals() -> None:
    # Goyal et al., section 5.1: 0.1 at a batch of 256 becomes 3.2 at 8,192
    advice = scale_lr(0.1, 8192 / 256, "auto", _SGD)
    assert advice.rule == "linear"
    assert advice.lr == pytest.approx(3.2)
    assert advice.betas is None
    assert advice.notes == (lr_warm_up(epochs=5),)


def test_square_root_rule_is_malladis() -> None:
    # k = 4: lr * 2, beta -> 1 - 4 (1 - beta), eps / 2
    advice = scale_lr(1e-3, 4, "auto", _ADAMW)
    assert advice.rule == "sqrt"
    assert advice.lr == pytest.approx(2e-3)
    assert advice.betas == pytest.approx((0.6, 0.996))
    assert advice.eps == pytest.approx(5e-9)


@pytest.mark.parametrize(
    ("betas", "ratio"),
    [((0.9, 0.999), 10), ((0.9, 0.999), 16), ((0.0, 0.99), 1.5)],
)
def test_betas_out_of_range_stay(betas: tuple[float, float], ratio: float) -> None:
    advice = scale_lr(1e-3, ratio, "sqrt", OptimizerFacts(name="Adam", betas=betas, eps=1e-8))
    assert advice.betas is None
    assert advice.lr == pytest.approx(1e-3 * ratio**0.5)
    assert betas_unchanged(betas=betas, batch_ratio=ratio) in advice.notes


@pytest.mark.parametrize("name", ["NAdam", "RMSprop", "LAMB", "FusedAdam", "Adafactor"])
def test_adaptive_optimizers_take_the_square_root(name: str) -> None:
    assert scale_lr(1.0, 4, "auto", OptimizerFacts(name=name)).lr == pytest.approx(2.0)


def test_unknown_optimizer_takes_the_careful_rule() -> None:
    advice = scale_lr(1.0, 4, "auto", OptimizerFacts(name="Muon"))
    assert advice.lr == pytest.approx(2.0)
    assert lr_rule_unknown(optimizer="Muon") in advice.notes


def test_a_rule_that_is_named_beats_the_optimizers() -> None:
    assert scale_lr(1.0, 4, "linear", _ADAMW).lr == pytest.approx(4.0)
    assert scale_lr(1.0, 4, "sqrt", _SGD).lr == pytest.approx(2.0)
    unscaled = scale_lr(1.0, 4, "none", _SGD)
    assert (unscaled.lr, unscaled.rule) == (1.0, "none")
    assert unscaled.notes == (lr_unchanged(),)


@pytest.mark.parametrize("rule", ["auto", "none"])
def test_the_same_batch_changes_nothing(rule: LrRule) -> None:
    assert scale_lr(0.3, 1.0, rule, _ADAMW) == LrAdvice(lr=0.3, rule="none", batch_ratio=1.0)


def test_a_smaller_batch_asks_for_no_warm_up() -> None:
    assert scale_lr(0.2, 0.5, "auto", _SGD).notes == ()


@given(st.floats(1 / 64, 64), st.floats(0, 0.9999), st.floats(0, 0.9999))
def test_scaled_betas_can_be_scaled_back(ratio: float, one: float, two: float) -> None:
    advice = scale_lr(1e-3, ratio, "sqrt", OptimizerFacts(name="Adam", betas=(one, two), eps=1e-8))
    if advice.betas is None:
        assert ratio == 1 or max(ratio * (1 - one), ratio * (1 - two)) > 1 - 1e-6
        return
    assert all(0 < beta < 1 for beta in advice.betas)
    back = scale_lr(
        advice.lr,
        1 / ratio,
        "sqrt",
        OptimizerFacts(name="Adam", betas=advice.betas, eps=advice.eps),
    )
    assert back.lr == pytest.approx(1e-3)
    assert back.eps == pytest.approx(1e-8)
    if back.betas is not None:
        assert back.betas == pytest.approx((one, two), abs=1e-6)
