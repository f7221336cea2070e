"""Shrink gains that noise could explain, and hardly any other."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.evidence import Contrast, believe, chance_worthwhile
from autotune.policy import POLICY


def make_contrast(value: float, sd: float) -> Contrast:
    return Contrast(np.ones(1), np.array([value]), np.array([sd]))


_CONTRASTS = st.builds(make_contrast, value=st.floats(-2, 2), sd=st.floats(1e-3, 0.5))


@given(_CONTRASTS)
def test_belief_shrinks_towards_no_gain(measured: Contrast) -> None:
    belief = believe(measured, POLICY.proof)
    assert belief.value * measured.value >= 0
    assert abs(belief.value) <= abs(measured.value) + 1e-12
    assert 0 <= chance_worthwhile(measured, POLICY.proof) <= 1 - belief.chance_below(0.0) + 1e-9


@given(_CONTRASTS)
def test_a_gain_and_a_loss_are_believed_alike(measured: Contrast) -> None:
    loss, belief = (
        believe(make_contrast(-measured.value, float(measured.sds[0])), POLICY.proof),
        believe(measured, POLICY.proof),
    )
    assert loss.value == pytest.approx(-belief.value, abs=1e-9)
    assert loss.chance_below(0.0) == pytest.approx(1 - belief.chance_below(0.0), abs=1e-6)


def test_noisy_gains_shrink_more() -> None:
    claimed = [
        believe(make_contrast(0.1, error), POLICY.proof).value for error in (0.005, 0.03, 0.06, 0.2)
    ]
    assert claimed == sorted(claimed, reverse=True)
    assert claimed[0] > 0.098
    assert claimed[-1] < 0.03


@pytest.mark.parametrize("gain", [2.33, 9.1, 22.0])
def test_a_large_gain_is_claimed_as_it_was_measured(gain: float) -> None:
    ratio = believe(make_contrast(log(gain), 0.1), POLICY.proof).ratio()
    assert ratio.value == pytest.approx(gain, rel=0.03)
    assert ratio.low > 1 + (gain - 1) / 2


@pytest.mark.parametrize("gain", [0.03, 0.1, 2.0])
@pytest.mark.parametrize("error", [0.01, 0.03])
def test_proven_claims_are_right_in_the_mean(gain: float, error: float) -> None:
    """Only measured gains beyond two errors are claimed: unshrunk these would be too high."""
    random = np.random.default_rng(0)
    measured = random.normal(log(1 + gain), error, 1_000)
    proven = measured[measured > 2 * error]
    claimed = [exp(believe(make_contrast(value, error), POLICY.proof).value) for value in proven]
    assert np.mean(claimed) - (1 + gain) == pytest.approx(
        0.0, abs=0.035 if gain == error == 0.03 else 0.02
    )
