"""The sentences on ceilings: true in each case."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records.ceilings import Ceiling
from autotune.records.measurement import Ceilings
from autotune.records.recommendation import Ratio
from autotune.records.run_summary import RunSummary
from autotune.settings.training_config import TrainingConfig
from tests.factories import BASELINE, FAST, NO_ADVICE, make_measurement, make_recommendation, make_summary, make_trial
from tests.report.forms import report_of

Known = dict[str, float]


def say_headroom(summary: RunSummary) -> str:
    return report_of(summary).headroom


def make_case(own: Known, best: Known, baseline: TrainingConfig = BASELINE, **parts: Any) -> RunSummary:
    """The baseline does 1,000 samples/s and the recommended settings 4,000, with these ceilings."""
    trials = (
        make_trial(0, baseline, measurement=make_measurement(1000.0, **own)),
        make_trial(1, FAST, measurement=make_measurement(4000.0, **best)),
    )
    recommendation = make_recommendation(confirmations=(), same_batch=None, same_batch_number=None, **parts)
    return make_summary(trials=trials, baseline=baseline, recommendation=recommendation)


def ceilings(loader: float | None = None, device: float | None = None) -> Known:
    known = {"loader_ceiling": loader, "device_ceiling": device}
    return {name: rate for name, rate in known.items() if rate is not None}


def test_both_ceilings_say_what_holds_and_what_is_left() -> None:
    summary = make_case(ceilings(1050.0, 2300.0), ceilings(9000.0, 4160.0))
    assert say_headroom(summary) == (
        "You run at 43 % of what this device can do; the loader is the bottleneck. The best found reaches 96 % of the "
        "lowest ceiling, the device's; as long as that stays, tuning can't gain more than 4.0 %."
    )


@pytest.mark.parametrize(
    ("own", "workers", "said"),
    [
        (
            ceilings(5000.0, 1010.0),
            2,
            "You run at 99 % of what this device can do; the device itself is the bottleneck.",
        ),
        (ceilings(2000.0, 2000.0), 0, "You run at 50 % of what this device can do; without workers, loading and "),
        (ceilings(2000.0, 2000.0), 2, "no side alone limits it: it reaches 50 % of the lowest ceiling."),
        (ceilings(None, 2000.0), 0, "You run at 50 % of what this device can do; the loader alone was not measured."),
        (ceilings(2000.0), 0, "You run at 50 % of what your loader delivers alone; the device alone was not measured."),
        (
            ceilings(5000.0, 980.0),
            0,
            "You run at 100 % of what this device can do; the device itself is the bottleneck.",
        ),
        (
            ceilings(5000.0, 500.0),
            0,
            "You run at 200 % of the device's ceiling as measured: that ceiling is too low",
        ),
        (
            {"copy_ceiling": 500.0} | ceilings(5000.0, 2000.0),
            0,
            "You run at 200 % of the copies' ceiling as measured: that ceiling is too low",
        ),
    ],
)
def test_each_case_of_the_baseline_is_said(own: Known, workers: int, said: str) -> None:
    summary = make_case(own, {}, TrainingConfig(num_workers=workers))
    assert said in say_headroom(summary)


def test_copies_that_hold_the_rate_are_named() -> None:
    own, best = {"copy_ceiling": 1100.0}, {"copy_ceiling": 4100.0}
    said = say_headroom(make_case(ceilings(9000.0, 2300.0) | own, ceilings(9000.0, 5000.0) | best))
    assert "You run at 43 % of what this device can do; copying batches to it is the bottleneck." in said
    assert "reaches 98 % of the lowest ceiling, the copies'" in said


def test_a_lone_ceiling_far_below_the_rate_says_nothing() -> None:
    assert "You run" not in say_headroom(make_case(ceilings(None, 500.0), {}))


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (
            ceilings(9000.0, 4000.0),
            "reaches 100 % of the lowest ceiling, the device's; as long as that stays, tuning can't gain more.",
        ),
        (
            ceilings(9000.0, 3900.0),
            "reaches 100 % of the lowest ceiling, the device's; as long as that stays, tuning can't gain more.",
        ),
        (
            ceilings(8000.0, 9000.0),
            "reaches 50 % of the lowest ceiling, the loader's, which leaves room for 100 % more.",
        ),
        (
            ceilings(900.0, 9000.0),
            "runs at 444 % of the loader's ceiling as measured: that ceiling is too low to judge by.",
        ),
    ],
)
def test_each_case_of_the_best_is_said(best: Known, said: str) -> None:
    sentence = say_headroom(make_case({}, best))
    assert sentence.startswith("The best found ")
    assert said in sentence


def test_without_ceilings_nothing_is_said() -> None:
    assert say_headroom(make_case({}, {})) == ""


def test_nothing_is_said_of_a_baseline_that_is_no_reference() -> None:
    summary = make_case(ceilings(2000.0, 2000.0), ceilings(9000.0, 4100.0), verdict="baseline_infeasible", speedup=None)
    sentence = say_headroom(summary)
    assert sentence.startswith("The best found")


def test_a_baseline_that_is_the_best_is_spoken_of_as_yours() -> None:
    one = Ratio(value=1.0, low=1.0, high=1.0)
    own: dict[str, Any] = {
        "config": BASELINE,
        "number": 0,
        "verdict": "already_best",
        "speedup": one,
        "lr_advice": NO_ADVICE,
    }
    said = say_headroom(make_case(ceilings(5000.0, 1020.0), {}, **own))
    assert ". Your configuration reaches 98 % of the lowest ceiling, the device's;" in said


def test_a_ceiling_comes_from_a_run_that_shares_what_it_depends_on() -> None:
    """The device's ceiling of the same step, measured in a trial with other loader settings."""
    other = FAST.model_copy(update={"num_workers": 2})
    ceiling = Ceiling(samples_per_s=8000.0, samples=800, seconds=0.1, batches=8)
    donor = make_measurement(3000.0, ceilings=Ceilings(device=ceiling), device_ceiling=8000.0)
    summary = make_case({}, ceilings(4100.0))
    assert say_headroom(summary) == ""
    summary = summary.model_copy(update={"trials": (*summary.trials, make_trial(2, other, measurement=donor))})
    assert say_headroom(summary).startswith("The best found reaches 98 % of the lowest ceiling, the loader's")


rates = st.one_of(st.floats(min_value=1e-3, max_value=1e9), st.floats(min_value=500.0, max_value=10_000.0))
SHARE = re.compile(r"(?:run at|reaches) <?([\d.]+) % of")
ABOVE_THE_WHOLE = re.compile(
    r"at ([\d.]+) % of the (?:loader|device)'s ceiling as measured: that ceiling is too low to judge by"
)


@given(own=st.tuples(rates, rates), best=st.tuples(rates, rates))
def test_no_share_above_the_whole_and_no_unknown_is_ever_said(
    own: tuple[float, float], best: tuple[float, float]
) -> None:
    said = say_headroom(make_case(ceilings(*own), ceilings(*best)))
    sentences = said.removesuffix(".").split(". ")
    assert len(sentences) == 2
    for sentence in sentences:
        doubted = ABOVE_THE_WHOLE.search(sentence)
        if doubted is not None:
            assert float(doubted[1]) >= 110
            continue
        share = SHARE.search(sentence)
        assert share is not None, sentence
        assert float(share[1]) <= 100
        assert not {"unknown", "nan", "inf"} & set(re.findall(r"\w+", sentence))
