"""Runs as evidence: contrasts between configurations, with the run-to-run variation integrated out."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from autotune.models.evidence import Contrast, Evidence, Run
from autotune.records.result import RunVariation

SPREAD = RunVariation(sd=0.08, degrees_of_freedom=3.0)
BY_KIND = SPREAD.model_copy(update={"device": RunVariation(sd=0.004, degrees_of_freedom=3.0)})


def run(number: int, rate: float, at_s: float = 0.0, *, is_disturbed: bool = False) -> Run:
    return Run(log(rate), 1e-6, number=number, at_s=at_s, is_disturbed=is_disturbed)


def evidence(*runs: Run, spread: RunVariation = SPREAD) -> Evidence:
    return Evidence([replace(one, at_s=60.0 * place) for place, one in enumerate(runs)], spread)


def contrast(*runs: Run, spread: RunVariation = SPREAD, **since: int) -> Contrast:
    found = evidence(*runs, spread=spread).contrast(1, 0, **since)
    assert found is not None
    return found


def test_a_contrast_is_the_ratio_of_the_two_rates() -> None:
    found = contrast(run(0, 100), run(1, 200), run(0, 101), run(1, 198))
    assert exp(found.value) == pytest.approx(1.98, rel=0.01)
    ratio = found.ratio()
    assert ratio.low < ratio.value < ratio.high
    assert found.chance_below(0.0) < 0.01


def test_without_a_run_of_each_nothing_is_known() -> None:
    assert evidence(run(1, 100)).contrast(1, 0) is None
    assert evidence(run(0, 100), run(1, 200)).contrast(1, 0, since=1) is None


def test_single_runs_have_the_prior_interval() -> None:
    """Student's t of three degrees: the 95 % interval of a ratio of two runs."""
    ratio = contrast(run(0, 100), run(1, 200)).ratio()
    assert log(ratio.high / ratio.low) / 2 == pytest.approx(3.18 * 2**0.5 * 0.08, rel=0.25)


def test_repeats_inform_all_contrasts() -> None:
    pair = run(0, 100), run(1, 120)
    agreeing, differing = (
        [run(2, 50), run(2, other), run(2, 50), run(2, other)] for other in (50.5, 80)
    )
    usual, narrow, wide = (contrast(*pair, *others).sd for others in ([], agreeing, differing))
    assert narrow < usual < wide


def test_single_run_of_another_changes_nothing() -> None:
    pair = [run(0, 100), run(1, 120), run(0, 104)]
    assert contrast(*pair, run(7, 3000)).sd == pytest.approx(contrast(*pair).sd)


def test_a_run_that_others_disturbed_hardly_counts() -> None:
    steady = [run(0, 100), run(1, 200), run(1, 202)]
    disturbed = [*steady, run(0, 10, is_disturbed=True)]
    assert exp(contrast(*disturbed).value) == pytest.approx(2.0, rel=0.1)
    assert exp(contrast(*steady, run(0, 10)).value) > 3


def test_only_runs_since_settling_count() -> None:
    runs = [run(0, 100), run(1, 300), run(0, 100), run(1, 200)]
    assert exp(contrast(*runs, since=2).value) == pytest.approx(2.0)
    assert exp(contrast(*runs).value) > 2.3


def test_device_bound_runs_have_their_own_variation() -> None:
    pair = [run(0, 100), run(1, 103), run(0, 100), run(1, 103)]
    held = [replace(one, is_held_by_device=True) for one in pair]
    assert contrast(*held, spread=BY_KIND).chance_below(0.0) < 0.01
    assert contrast(*pair, spread=BY_KIND).chance_below(0.0) > 0.05
    mixed = [held[0], pair[1], held[2], pair[3]]
    assert contrast(*mixed, spread=BY_KIND).sd > 5 * contrast(*held, spread=BY_KIND).sd


@pytest.mark.parametrize("sd", [0.02, 0.08, 0.2])
def test_contrast_coverage(sd: float) -> None:
    """400 sets of four runs each; where runs differ by twice what is expected, a little less often."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        rates = random.normal([0.0, 0.3] * 4, sd)
        ratio = contrast(*(run(place % 2, exp(rate)) for place, rate in enumerate(rates))).ratio()
        held += ratio.low <= exp(0.3) <= ratio.high
    assert held >= (0.92 if sd < 0.2 else 0.87) * 400


def test_quantiles_and_chances_are_inverse() -> None:
    found = contrast(run(0, 100), run(1, 130), run(0, 90))
    for probability in (0.001, 0.025, 0.5, 0.9):
        assert found.chance_below(found.quantile(probability)) == pytest.approx(
            probability, rel=1e-3
        )
