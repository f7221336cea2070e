"""The headline of a search and the advice on the learning rate: every branch of their templates is read here."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from autotune.records.host_load import HostLoad
from autotune.records.recommendation import BreakEven, LargerBatch, Ratio
from autotune.records.run_summary import RunSummary
from autotune.space.learning_rate import LrAdvice
from tests.factories import BASELINE, FAST, SAME_BATCH, make_measurement, make_recommendation, make_summary, make_trial
from tests.report.forms import report_of

ONE_DEVICE: dict[str, Any] = {"confirmations": (), "same_batch": None, "same_batch_number": None}


def case(verdict: str, **parts: Any) -> RunSummary:
    """Single trials of 1,000 and 2,000 samples/s, and what is recommended after them."""
    trials = (
        make_trial(0, BASELINE, measurement=make_measurement(1000.0)),
        make_trial(1, FAST, measurement=make_measurement(2000.0)),
    )
    found = make_recommendation(verdict=verdict, **ONE_DEVICE, **parts)
    return make_summary(trials=trials, baseline=BASELINE, recommendation=found)


@pytest.mark.parametrize(
    ("summary", "headline"),
    [
        (case("faster"), "Proven: 2.41 times as fast as your configuration (95 %: 2.35 to 2.47)."),
        (case("faster", speedup=None), "Faster than your configuration; by how much was not measured."),
        (
            case("unconfirmed", speedup=None),
            "Not confirmed: about 2.00 times as fast as your configuration, judging by single runs.",
        ),
        (
            case("unconfirmed", speedup=None, config=BASELINE, number=0),
            "Not confirmed: nothing faster than your configuration was found so far.",
        ),
        (
            case("already_best", speedup=None, config=BASELINE, number=0),
            "Your configuration is already the best found: no measurable gain.",
        ),
        (
            case("already_best", speedup=None, config=BASELINE, number=0, overloaded=(1,)),
            "No faster configuration is known to stay within the memory limit on the largest samples: keep yours.",
        ),
        (
            case("baseline_infeasible", speedup=None),
            (
                "Your configuration failed when it was measured again, so no speed-up can be given. The recommended "
                "settings work."
            ),
        ),
        (make_summary(trials=(), recommendation=None), "Nothing was measured."),
    ],
    ids=lambda value: "" if isinstance(value, RunSummary) else value[:30],
)
def test_each_verdict_has_its_headline(summary: RunSummary, headline: str) -> None:
    assert report_of(summary).headline == headline


def loaded(baseline: float, fast: float) -> RunSummary:
    """As `case`, on two cores, of which others used so many beside a trial that used one."""
    summary = case("faster")
    loads = [
        HostLoad(seconds=1.0, cores=2, reachable_cores=2, busy_s=1.0 + others, own_s=1.0, stolen_s=0.0)
        for others in (baseline, fast)
    ]
    trials = [
        make_trial(trial.number, trial.config, measurement=make_measurement(1000.0, host_load=load))
        for trial, load in zip(summary.trials, loads, strict=True)
    ]
    return summary.model_copy(update={"trials": tuple(trials)})


@pytest.mark.parametrize(("others", "told"), [((0.9, 0.1), "0.9"), ((0.0, 0.5), "0.5"), ((0.3, 0.8), "0.8")])
def test_a_ratio_of_windows_that_others_loaded_says_so_beside_it(others: tuple[float, float], told: str) -> None:
    report = report_of(loaded(*others))
    assert report.headline.endswith(f"2.35 to 2.47). Other programs used {told} of the 2 cores meanwhile.")
    (doubt,) = report.doubts
    assert doubt.startswith(
        "Other programs used the cores during these measurements: "
        f"baseline {others[0]:.1f} of 2, recommended {others[1]:.1f} of 2. They slow some settings more than others"
    )


def test_a_quiet_machine_is_no_words_worth() -> None:
    report = report_of(loaded(0.1, 0.1))
    assert report.headline.endswith("2.35 to 2.47).")
    assert report.doubts == ()


def test_the_learning_rate_is_advised_with_what_goes_with_it() -> None:
    advice = LrAdvice(lr=0.004, rule="linear", batch_ratio=4.0, betas=(0.6, 0.996), eps=5e-9, notes=())
    assert report_of(case("faster", lr_advice=advice)).lr_advice == (
        "Change lr from 0.001 to 0.004: the global batch is 4 times the baseline's (linear rule).",
        "Set the optimizer's betas to (0.6, 0.996).",
        "Set the optimizer's eps to 5e-09.",
    )


OVER = Ratio(value=1.25, low=1.2, high=1.3)
PAYS = BreakEven(samples=640.0, low=500.0, high=830.0)


def batches(over: Ratio = OVER, break_even: BreakEven | None = PAYS, **parts: Any) -> str:
    """What the headline says behind the speed-up, where FAST has the larger batch."""
    is_worth_it = parts.pop("is_worth_it", True)
    larger = LargerBatch(
        config=FAST,
        number=1,
        speedup=None,
        over_same_batch=over,
        is_worth_it=is_worth_it,
        break_even=break_even,
    )
    found = make_recommendation(larger_batch=larger, **parts)
    headline = report_of(make_summary(recommendation=found)).headline
    return headline.partition("). ")[2]


CHOSEN_OWN: dict[str, Any] = {"config": SAME_BATCH, "number": 2, "is_worth_it": False}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            batches(),
            (
                "That is at a global batch of 128; at yours, 32, the best is 1.93 times as fast as your configuration "
                "(1.90 to 1.96). In training the larger batch pays if your gradient noise scale is above 640 samples "
                "(500 to 830)."
            ),
        ),
        (
            batches(same_batch=BASELINE, same_batch_number=0, break_even=BreakEven(samples=0.0, low=0.0, high=0.0)),
            (
                "That is at a global batch of 128; at yours, 32, nothing faster was found. In training the "
                "larger batch pays "
                "whatever your gradient noise scale is."
            ),
        ),
        (
            batches(same_batch_speedup=None, break_even=BreakEven(samples=640.0, low=500.0, high=inf)),
            (
                "That is at a global batch of 128; at yours, 32, the best was not measured in turns with your "
                "configuration. "
                "In training the larger batch pays if your gradient noise scale is above 640 samples (500 or more)."
            ),
        ),
        (
            batches(Ratio(value=1.04, low=1.02, high=1.06), **CHOSEN_OWN),
            (
                "At a global batch of 128 in place of 32 the best has 1.040 times the samples/s (1.020 to "
                "1.060), less than the "
                "5 % more that a larger batch must bring. In training the larger batch pays if your gradient "
                "noise scale is "
                "above 640 samples (500 to 830)."
            ),
        ),
        (
            batches(Ratio(value=1.01, low=0.97, high=1.05), **CHOSEN_OWN),
            (
                "At a global batch of 128 in place of 32 the best has 1.010 times the samples/s (0.970 to "
                "1.050), which may be "
                "noise."
            ),
        ),
        (batches(break_even=None), ""),
    ],
    ids=["larger", "own is none", "not in turns", "too little", "noise", "none"],
)
def test_the_headline_tells_both_batches_and_from_which_noise_scale_the_larger_one_pays(said: str, told: str) -> None:
    assert said == told
