"""Advice that benchmarks/advice.py follows: each kind has its words, and a promise is held against what was reached."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from torch import nn

from autotune.messages import advice
from benchmarks.advice import FOLLOWED_CASES
from benchmarks.cases.advice_data import DATA_CASES
from benchmarks.cases.cpu import Case
from benchmarks.measures.followed import follow, kept


def found(figures: dict[str, float] | None, *pairs: tuple[float, float]) -> dict[str, Any]:
    """Return the verdict of follow() for pairs of throughputs."""
    sides = [[{"samples_per_s": value} for value in pair] for pair in pairs]
    return {
        "promised": None if figures is None else {"figures": figures},
        "pairs": [{"today": today, "followed": followed} for today, followed in sides],
    }


def test_each_case_follows_advice_that_is_given() -> None:
    assert {case.kind for case in FOLLOWED_CASES} <= {*vars(advice)}
    assert len({case.name for case in FOLLOWED_CASES}) == len(FOLLOWED_CASES)


def test_a_rate_is_of_todays_samples_and_is_held_against_its_interval() -> None:
    pairs = (100.0, 50.0), (100.0, 60.0), (100.0, 100.0)
    said = kept(found({"gain_low": 0.5, "gain_high": 1.5}, *pairs), samples_per_item=4.0)
    assert said["reached"] == pytest.approx([1.0, 1.4, 3.0]), "four samples to a row"
    assert (said["interval"], said["is_within"], said["pairs_within"]) == ([0.5, 1.5], True, 2)


@pytest.mark.parametrize(
    ("followed", "is_within"), [(40.0, False), (148.0, False), (160.0, True), (280.0, False)]
)
def test_what_lies_beside_the_interval_is_not_kept(followed: float, is_within: bool) -> None:
    assert (
        kept(found({"gain_low": 0.5, "gain_high": 1.5}, (100.0, followed)))["is_within"]
        is is_within
    )


@pytest.mark.parametrize("figures", [None, {"padding": 0.3}])
def test_without_a_promise_nothing_can_be_kept(figures: dict[str, float] | None) -> None:
    said = kept(found(figures, (100.0, 200.0)))
    assert said == {"reached": [1.0], "interval": None, "is_within": None, "pairs_within": None}


@pytest.mark.parametrize(
    ("promised", "batch"), [({"micro_batch_size": 16}, 16), ({"gain_low": 0.5}, 32), (None, 32)]
)
def test_the_followed_job_takes_the_batch_that_is_promised(
    monkeypatch: pytest.MonkeyPatch, promised: dict[str, float] | None, batch: int
) -> None:
    today, opened = (
        Case(model=nn.Identity, dataset=[], settings={"micro_batch_size": 8, "lr": 0.1}),
        list[Case](),
    )

    def trials(case: Case, **_: Any) -> nullcontext[None]:
        opened.append(case)
        return nullcontext()

    advice = None if promised is None else Mock(kind="a", figures=promised)
    found = Mock(headline="", advice=[] if advice is None else [advice])
    monkeypatch.setattr("benchmarks.measures.followed.diagnose_plan", lambda *_, **__: found)
    monkeypatch.setattr("benchmarks.measures.followed.open_trials", trials)
    rates = {"samples_per_s": 1.0}
    monkeypatch.setattr("benchmarks.measures.followed._pair", lambda *_, **__: (rates, rates))
    follow("name", "a", today, replace(today, settings={"micro_batch_size": 32, "lr": 0.1}), 1.0, 1)
    assert [dict(case.settings) for case in opened] == [
        {"micro_batch_size": 8, "lr": 0.1},
        {"micro_batch_size": batch, "lr": 0.1},
    ]


def test_packed_rows_hold_the_same_tokens_in_the_same_sequences() -> None:
    case = next(case for case in DATA_CASES if case.kind == "pack_sequences")
    sequences, rows = (
        [side.dataset[index] for index in range(len(side.dataset))]
        for side in (case.today, case.followed)
    )
    assert sum(map(len, rows)) == sum(map(len, sequences))
    assert max(map(len, rows)) == max(map(len, sequences))
    assert case.samples_per_item == len(sequences) / len(rows)
    counts = [
        {number: sum(int((row == number).sum()) for row in side) for number in range(1, 100)}
        for side in (sequences, rows)
    ]
    assert counts[0] == counts[1]
