"""What is recommended from runs of several trials, one of which may be proven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import evidence_of_runs
from autotune.records.result import RunVariation
from autotune.records.trial import TrialRecord
from autotune.tuning.outcomes import SearchOutcome
from autotune.tuning.select import select
from tests.factories import make_measurement, make_space, make_trial, run_again


def found_of(rates: Mapping[int, Sequence[float]], proven: Mapping[int, float]) -> SearchOutcome:
    """A search of trials that ran at these rates, number 0 the baseline; what is proven of which."""
    records: list[TrialRecord] = []
    for number, (first, *further) in rates.items():
        trial = make_trial(
            number, TrainingConfig(num_workers=number), measurement=make_measurement(first)
        )
        assert trial.score is not None
        trial = trial.model_copy(update={"score": trial.score.model_copy(update={"value": first})})
        records.append(run_again(trial, *further))
    spread = RunVariation(sd=0.1, degrees_of_freedom=2)
    evidence = evidence_of_runs(records, spread)
    return SearchOutcome(
        space=make_space(baseline=TrainingConfig(num_workers=0)),
        records=tuple(records),
        ended_because=None,
        evidence=evidence,
        believed={number: log(sum(of) / len(of)) for number, of in rates.items()},
        proven=proven,
        is_settled=True,
    )


@pytest.mark.parametrize(
    ("rates_of_2", "chosen"),
    [
        (
            (940.0, 780.0),
            1,
        ),  # two runs, one of them lucky: seen on a machine whose runs differ by 13 %
        ((1600.0, 1620.0, 1610.0, 1590.0), 2),  # beyond noise
    ],
)
def test_what_is_proven_stays_unless_another_is_faster_beyond_noise(
    rates_of_2: Sequence[float], chosen: int
) -> None:
    rates = {0: (540.0, 530.0, 550.0, 545.0), 1: (820.0, 800.0, 830.0, 815.0), 2: rates_of_2}
    best = select(found_of(rates, {1: log(1.3)}))
    assert best is not None
    assert best.number == chosen
    assert best.verdict == ("faster" if chosen == 1 else "unconfirmed")


def test_a_larger_batch_that_is_not_worth_it_is_not_kept_for_its_proof() -> None:
    found = found_of(
        {0: (500.0, 505.0, 495.0, 500.0), 1: (1000.0, 1005.0, 995.0, 1000.0), 2: (1000.0,)},
        {1: log(1.5)},
    )
    larger = found.records[1].config.model_copy(
        update={"micro_batch_size": 4 * found.space.baseline.micro_batch_size}
    )
    records = (
        found.records[0],
        found.records[1].model_copy(update={"config": larger}),
        found.records[2],
    )
    best = select(replace(found, records=records))
    assert best is not None
    assert best.number == 2


def test_winner_without_proof() -> None:
    best = select(found_of({0: (540.0, 530.0), 1: (820.0, 800.0), 2: (940.0, 780.0)}, {}))
    assert best is not None
    assert best.number == 2
