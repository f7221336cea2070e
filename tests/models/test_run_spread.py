"""Learn the run-to-run variation from repeats, and widen intervals by it."""

from __future__ import annotations

from math import exp, inf, isinf, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.evidence import (
    Run,
    assumed_variation,
    learn_variation,
    rate_of_runs,
    ratio_of_runs,
    run_of,
    with_run_variation,
)
from autotune.records.measurement import Block, Interval
from autotune.records.result import RunVariation
from tests.factories import make_measurement, make_window

_SPREADS = st.builds(RunVariation, sd=st.floats(0.002, 0.3), degrees_of_freedom=st.floats(3, 100))
_RATES = st.floats(0.1, 1e5)


def runs(*log_rates: float, variance: float = 0.0) -> list[Run]:
    return [Run(log_rate, variance) for log_rate in log_rates]


@given(_RATES, st.floats(0, 0.99), st.floats(0, 1), _SPREADS)
def test_interval_of_another_run(
    value: float, below: float, above: float, spread: RunVariation
) -> None:
    window = Interval(value=value, low=value * (1 - below), high=value * (1 + above))
    run = with_run_variation(window, spread)
    assert run.value == value
    assert run.low < value * exp(-1.9 * sqrt(2) * spread.sd)
    assert run.high > value * exp(1.9 * sqrt(2) * spread.sd)


def test_unknown_variation_widens_the_interval() -> None:
    window = Interval(value=100.0, low=99.0, high=101.0)
    known, assumed = (
        with_run_variation(window, RunVariation(sd=0.05, degrees_of_freedom=degrees))
        for degrees in (60, 3)
    )
    assert known.high == pytest.approx(100 * exp(2.0 * sqrt(2) * 0.05), rel=0.003)
    assert assumed.high == pytest.approx(100 * exp(3.18 * sqrt(2) * 0.05), rel=0.01)


def test_one_block_leaves_the_upper_end_open() -> None:
    run = with_run_variation(Interval(value=100.0, low=0.0, high=inf), assumed_variation("cuda"))
    assert isinf(run.high)
    assert run.low == 0.0


@pytest.mark.parametrize(("sd", "window_sd"), [(0.015, 0.005), (0.05, 0.01), (0.1, 0.02)])
def test_interval_covers_another_run(sd: float, window_sd: float) -> None:
    """Learn from six repeats each time, with a prior that knows nothing of this machine."""
    random, covered, count = np.random.default_rng(0), 0, 2_000
    for _ in range(count):
        seen = runs(*random.normal(0.0, sqrt(sd**2 + window_sd**2), 7), variance=window_sd**2)
        spread = learn_variation(assumed_variation("cpu"), [seen])
        own, other = random.normal(0.0, sqrt(sd**2 + window_sd**2)), random.normal(0.0, sd)
        half = 2.262 * window_sd
        rate = with_run_variation(
            Interval(value=exp(own), low=exp(own - half), high=exp(own + half)), spread
        )
        covered += rate.low <= exp(other) <= rate.high
    assert covered / count >= 0.92


def test_repeats_update_the_variation() -> None:
    prior = assumed_variation("cpu")
    learned = learn_variation(prior, [runs(0.0, 0.01)] * 2_000)
    assert learned.sd == pytest.approx(0.01 / sqrt(2), rel=0.1)
    assert (learned.degrees_of_freedom, learned.source) == (
        prior.degrees_of_freedom + 2_000,
        "workload",
    )


def test_nothing_is_learned_from_single_runs() -> None:
    prior = assumed_variation("cuda")
    assert learn_variation(prior, [runs(1.0), []]) == prior


def test_disturbed_runs_teach_nothing() -> None:
    prior, steady = assumed_variation("cpu"), runs(0.0, 0.01, -0.01)
    disturbed = [*steady, Run(-0.5, 0.0, is_disturbed=True), *runs(-3.0)]
    assert learn_variation(prior, [disturbed]) == learn_variation(prior, [steady])


def test_what_windows_explain_is_no_variation() -> None:
    seen = runs(0.0, 0.1, variance=0.005)
    assert learn_variation(assumed_variation("cpu"), [seen] * 10_000).sd == pytest.approx(0.002)


def test_runs_narrow_the_prediction_interval() -> None:
    spread = RunVariation(sd=0.05, degrees_of_freedom=100)
    widths = [
        log(rate.high / rate.value)
        for rate in (
            rate_of_runs([make_measurement(100.0)] * count, spread) for count in (1, 2, 50)
        )
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx(1.98 * 0.05 * sqrt(1 + 1 / 50), rel=0.01)


def test_ratio_counts_both_variations() -> None:
    spread = RunVariation(sd=0.05, degrees_of_freedom=100)
    ratio = ratio_of_runs([make_measurement(200.0)], [make_measurement(100.0)], spread)
    assert ratio.value == pytest.approx(2.0)
    assert log(ratio.high / ratio.value) == pytest.approx(1.98 * sqrt(2) * 0.05, rel=0.01)


def test_variance_of_a_run() -> None:
    even, odd = (
        Block(samples=samples, batches=4, seconds=1.0, data_wait_s=0.0) for samples in (90, 110)
    )
    run = run_of(make_measurement(100.0, window=make_window(blocks=[even, odd] * 5)))
    assert run.log_rate == pytest.approx(log(100))
    assert sqrt(run.variance) == pytest.approx(0.1 * sqrt(10 / 9) / sqrt(10), rel=0.1)


def test_device_variation_needs_all_runs() -> None:
    cpu, spread = assumed_variation("cpu"), assumed_variation("cuda")
    assert cpu.of([True]) is cpu
    assert spread.device is not None
    assert (cpu.sd, spread.sd, spread.device.sd) == (0.1, 0.1, 0.004)
    assert spread.of([True, True]) is spread.device
    assert spread.of([True, False]) is spread.of([]) is spread


def test_kinds_are_learned_apart() -> None:
    prior = assumed_variation("cuda")
    steady, mixed = (
        [Run(0.0, 0.0, True), Run(0.002, 0.0, True)],
        [Run(0.0, 0.0, True), Run(0.002, 0.0)],
    )
    of_device = learn_variation(prior, [steady])
    assert (of_device.sd, of_device.source) == (prior.sd, "assumed")
    assert of_device.device is not None
    assert (of_device.device.degrees_of_freedom, of_device.device.source) == (3.0, "workload")
    of_host = learn_variation(prior, [runs(0.0, 0.4)])
    assert of_host.sd > prior.sd
    assert (of_host.source, of_host.device) == ("workload", prior.device)
    assert learn_variation(prior, [mixed]) == prior, "one of the two is at the limit of its kind"


def test_an_interval_is_that_of_the_runs_kind() -> None:
    spread = assumed_variation("cuda")
    own, held = (
        make_measurement(100.0),
        make_measurement(100.0, window=make_window(host_ahead_s=1.0)),
    )
    widths = [
        log(rate.high / rate.value) for rate in (rate_of_runs([run], spread) for run in (own, held))
    ]
    assert widths[1] < widths[0] / 10
    assert ratio_of_runs([own], [held], spread).high == pytest.approx(
        ratio_of_runs([own], [own], spread).high
    )
