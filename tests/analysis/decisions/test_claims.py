"""What is claimed of a gain: shrunk where noise could have made it, hardly at all where it could not."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.analysis.decisions.claims import believe
from autotune.analysis.decisions.rounds import Difference


def make_difference(value: float, standard_error: float, degrees_of_freedom: float) -> Difference:
    return Difference(
        value, standard_error, degrees_of_freedom, is_carried=True, unit_error=1.0, seen_error=1.0, seen_degrees=1.0
    )


_DIFFERENCES = st.builds(
    make_difference, value=st.floats(-2, 2), standard_error=st.floats(0, 0.5), degrees_of_freedom=st.floats(3, 200)
)


@given(_DIFFERENCES)
def test_a_belief_lies_between_no_gain_and_what_was_measured(measured: Difference) -> None:
    belief = believe(measured)
    assert belief.mean * measured.value >= 0
    assert abs(belief.mean) <= abs(measured.value)
    assert 0 <= belief.worthwhile_probability <= belief.gain_probability <= 1
    assert (belief.gain_probability - 0.5) * measured.value >= -1e-9


@given(_DIFFERENCES)
def test_a_gain_and_a_loss_are_believed_alike(measured: Difference) -> None:
    loss = believe(make_difference(-measured.value, measured.standard_error, measured.degrees_of_freedom))
    belief = believe(measured)
    assert loss.mean == pytest.approx(-belief.mean, abs=1e-9)
    assert loss.gain_probability == pytest.approx(1 - belief.gain_probability, abs=1e-6)


def test_the_noisier_a_gain_the_less_of_it_is_claimed() -> None:
    claimed = [believe(make_difference(0.1, error, 20.0)).mean for error in (0.005, 0.03, 0.06, 0.2)]
    assert claimed == sorted(claimed, reverse=True)
    assert claimed[0] > 0.098
    assert claimed[-1] < 0.03


def test_a_large_gain_is_hardly_shrunk() -> None:
    assert exp(believe(make_difference(log(3.0), 0.05, 20.0)).mean) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("gain", [0.03, 0.1, 0.5])
@pytest.mark.parametrize("error", [0.01, 0.03])
def test_claims_that_are_proven_are_right_in_the_mean(gain: float, error: float) -> None:
    """Only measured gains beyond two errors are claimed: unshrunk these would be too high."""
    random = np.random.default_rng(0)
    measured = random.normal(log1p := log(1 + gain), error, 4_000)
    proven = measured[measured > 2 * error]
    claimed = [exp(believe(make_difference(value, error, 50.0)).mean) for value in proven]
    assert np.mean(claimed) - exp(log1p) == pytest.approx(0.0, abs=0.035 if gain == 0.03 and error == 0.03 else 0.02)
    assert np.mean(claimed) <= np.mean(np.exp(proven))
