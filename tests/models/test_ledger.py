"""Keep the error of proofs over all interim analyses of all configurations."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from autotune.models.evidence import Ledger, Run
from autotune.policy import POLICY
from autotune.records.result import RunVariation
from autotune.records.trial import TrialRecord, TrialResult
from tests.factories import make_measurement, make_record

SPREAD = RunVariation(sd=0.08, degrees_of_freedom=3.0)


def ledger_of(
    *runs: tuple[int, float], settles_after: int | None = None, spread: RunVariation = SPREAD
) -> Ledger:
    """Build a ledger of runs, configuration and rate; it settles on configuration 1 after some of them."""
    ledger = Ledger(spread)
    for place, (number, rate) in enumerate(runs):
        if place == settles_after:
            ledger.settle(1)
        ledger.add(Run(log(rate), 1e-4, number=number, at_s=5.0 * place))
    return ledger


def test_clear_gain_takes_two_runs_each() -> None:
    assert ledger_of((0, 100), (1, 900)).proven == {}
    assert ledger_of((0, 100), (1, 900), (0, 101)).proven == {}
    proven = ledger_of((0, 100), (1, 900), (0, 101), (1, 890)).proven
    assert set(proven) == {1}
    assert 2 < exp(proven[1]) < 9


def test_small_gain_is_proven_after_settling() -> None:
    ledger = ledger_of(*[(0, 100), (1, 110)] * 2)
    assert ledger.proven == {}
    ledger.settle(1)
    for pair in range(9):
        for number, rate in ((0, 100 + pair % 2), (1, 110 + pair % 2)):
            ledger.add(Run(log(rate), 1e-4, number=number, at_s=100.0 + 5 * pair + number))
        ledger.analyze((pair + 1) / 9)
    assert set(ledger.proven) == {1}


def test_a_proof_is_never_taken_back() -> None:
    ledger = ledger_of((0, 100), (1, 900), (0, 101), (1, 890))
    before = ledger.proven[1]
    for place in range(4):
        ledger.add(Run(log(90), 1e-4, number=1, at_s=100.0 + place))
    assert ledger.proven[1] >= before


def test_lucky_leader_is_not_proven() -> None:
    """Twice a lucky candidate, and no faster than the baseline once it was settled on."""
    runs = [(0, 100.0), (1, 140.0), (0, 100.0), (1, 130.0)]
    ledger = ledger_of(*runs, *[(0, 100.0), (1, 101.0)] * 4, settles_after=4)
    ledger.analyze(1.0, is_last=True)
    assert ledger.proven == {}


def test_second_leader_can_be_proven() -> None:
    ledger = ledger_of((0, 100), (1, 105), (0, 100), (1, 105))
    ledger.settle(1)
    ledger.settle(2)
    for pair in range(4):
        ledger.add(Run(log(100), 1e-4, number=0, at_s=200.0 + pair))
        ledger.add(Run(log(200), 1e-4, number=2, at_s=200.5 + pair))
    ledger.analyze(1.0, is_last=True)
    assert set(ledger.proven) == {2}


def record_of(number: int, *rates: float) -> TrialRecord:
    """Build a trial whose runs had these rates, a minute apart."""
    runs = [
        TrialResult(outcome="ok", measurement=make_measurement(rate), at_s=60.0 * place + number)
        for place, rate in enumerate(rates)
    ]
    return make_record(number, results=tuple(runs))


def test_resumed_ledger() -> None:
    ledger = Ledger.going_on(
        SPREAD, [record_of(0, 100.0, 101.0), record_of(1, 900.0, 890.0)], POLICY
    )
    assert [run.number for run in ledger.runs] == [0, 1, 0, 1]
    assert set(ledger.proven) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("sd", [0.015, 0.05, 0.1, 0.2])
def test_false_proofs_are_rare(sd: float) -> None:
    """Eight configurations run once, the best again, then it and the baseline eight times each; 400 searches.

    It is the worst case: whole searches mostly see that nothing is worth a change before they settle.
    """
    false = 0
    for seed in range(400):
        random = np.random.default_rng(seed)

        def draw(number: int, at_s: float, random: np.random.Generator = random) -> Run:
            return Run(random.normal(0.0, sd), 1e-4, number=number, at_s=at_s)

        ledger = Ledger(SPREAD)
        for number in (0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 8):
            ledger.add(draw(number, 3.0 * len(ledger.runs)))
        best = max(
            range(1, 9),
            key=lambda number: next(one.log_rate for one in ledger.runs if one.number == number),
        )
        ledger.add(draw(best, 40.0))
        ledger.settle(best)
        for pair in range(8):
            ledger.add(draw(0, 45.0 + 5 * pair))
            ledger.add(draw(best, 47.0 + 5 * pair))
            ledger.analyze((pair + 1) / 8, is_last=pair == 7)
        false += bool(ledger.proven)
    assert false <= 8
