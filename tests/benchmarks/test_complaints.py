"""A diagnosis is held against what it should have found; each complaint's script has an expectation."""

from __future__ import annotations

import ast
import re
from typing import Any, get_args

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.records.result import Bottleneck
from benchmarks.cases.complaints.expectations import (
    ANY,
    EXPECTATIONS,
    SCRIPTS,
    SHARED_MODULE,
    Expectation,
    Remedies,
)
from benchmarks.complaints import first_verdict_s
from benchmarks.measures.commands import Line
from benchmarks.measures.judged import judge, promise, reach, summarize

NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.name != SHARED_MODULE)
EXPECTED = Expectation(
    name="one",
    causes=frozenset({"checkpoint"}),
    right=Remedies(kinds=frozenset({"save_less_often"}), words=r"less often"),
    wrong=Remedies(kinds=frozenset({"cache_items"}), settings={"amp_dtype": ANY}),
)


def piece(kind: str, text: str = "", **settings: object) -> dict[str, Any]:
    return {"kind": kind, "text": text, "basis": "", "settings": settings, "expected_gain": 0.5}


def document(*advice: dict[str, Any], verdict: str = "checkpoint") -> dict[str, Any]:
    return {
        "verdict": verdict,
        "headline": "Training is slow. Save less: +50 % expected.",
        "headline_notes": [{"code": "best_setting", "figures": {"settings": {"amp_dtype": "x"}}}],
        "findings": [{"bottleneck": verdict, "evidence": "40 % of the hour"}],
        "advice": list(advice),
        "notes": [{"code": "growth", "text": "Memory grows."}],
    }


def test_each_script_parses_and_cites_its_threads() -> None:
    for name in NAMES:
        module = ast.parse((SCRIPTS / f"{name}.py").read_text())
        assert "https://" in (ast.get_docstring(module) or ""), name


def test_each_script_has_one_expectation() -> None:
    assert sorted(expected.name for expected in EXPECTATIONS) == NAMES


@pytest.mark.parametrize("expected", EXPECTATIONS, ids=lambda expected: expected.name)
def test_an_expectation_can_be_met(expected: Expectation) -> None:
    assert expected.causes <= set(get_args(Bottleneck))
    assert expected.causes or expected.says
    assert expected.right.kinds or expected.right.settings or expected.right.words
    assert {*expected.right.settings, *expected.wrong.settings} <= {*TrainingConfig.model_fields}
    for pattern in (expected.says, expected.right.words, expected.wrong.words):
        re.compile(pattern)


def test_the_right_remedy_is_found_by_kind_or_words_or_setting() -> None:
    assert judge(document(piece("save_less_often")), EXPECTED)["rank"] == 1
    assert judge(document(piece("other", "Save less often")), EXPECTED)["rank"] == 1
    by_setting = Expectation(
        name="two",
        causes=frozenset(),
        right=Remedies(settings={"num_workers": (0, 1), "in_order": (False,)}),
        wrong=Remedies(),
    )
    assert judge(document(piece("set", in_order=False)), by_setting)["rank"] == 1
    assert judge(document(piece("set", num_workers=2)), by_setting)["rank"] is None
    assert judge(document(piece("set", num_workers=False)), by_setting)["rank"] is None


def test_a_line_that_is_named_counts_with_its_text_and_its_function() -> None:
    source = "def update(means):\n    for mean in means:\n        mean.mul_(0.9)\n"
    expected = Expectation(
        name="four",
        causes=frozenset(),
        says=r"mul_",
        right=Remedies(words=r"\bupdate\b"),
        wrong=Remedies(),
    )
    named = piece("shorten_own_code", "Shorten it") | {"place": "train.py:3"}
    found = judge(document(named, piece("other", "See train.py:3")), expected, source)
    assert (found["rank"], found["is_cause_right"]) == (1, True)
    other = judge(document(piece("shorten_own_code", "Shorten train.py:99")), expected, source)
    assert (other["rank"], other["is_cause_right"]) == (None, False)


def test_false_remedies_count_only_above_the_right_one() -> None:
    right = piece("save_less_often")
    false = piece("set", amp_dtype="bfloat16")
    other = piece("neither")
    assert judge(document(other, false, right), EXPECTED)["false_above"] == [
        "set(amp_dtype=bfloat16)"
    ]
    assert judge(document(other, right, false), EXPECTED)["false_above"] == []
    assert judge(document(false, other), EXPECTED)["false_above"], "without the right one, all do"


@pytest.mark.parametrize(
    ("verdict", "says", "is_right"),
    [
        ("checkpoint", "", True),
        ("compute", "", False),
        ("checkpoint", "hour", True),
        ("checkpoint", "MEMORY", True),
        ("checkpoint", "anomaly", False),
    ],
)
def test_the_cause_is_right_by_its_code_and_what_is_said(
    verdict: str, says: str, is_right: bool
) -> None:
    expected = Expectation(
        name="three", causes=EXPECTED.causes, says=says, right=EXPECTED.right, wrong=EXPECTED.wrong
    )
    assert judge(document(verdict=verdict), expected)["is_cause_right"] is is_right


def test_a_remedy_is_the_headlines_by_its_text_or_settings() -> None:
    assert judge(document(piece("save_less_often", "Save less.")), EXPECTED)["is_headline"]
    by_setting = piece("save_less_often", "Nothing of it.", amp_dtype="x")
    assert judge(document(by_setting), EXPECTED)["is_headline"]
    assert not judge(document(piece("save_less_often", "Buy disks.")), EXPECTED)["is_headline"]


def test_a_promise_has_the_interval_of_its_advice() -> None:
    plain = piece("any")
    assert promise(plain) == {"gain": 0.5, "low": None, "high": None}
    assert promise(plain | {"gain_interval": {"low": 0.1, "high": 0.9}}) == {
        "gain": 0.5,
        "low": 0.1,
        "high": 0.9,
    }
    assert promise(plain | {"expected_gain": None}) is None


@pytest.mark.parametrize(("high", "is_within"), [(1.2, True), (0.8, False), (None, None)])
def test_a_gain_is_held_against_its_interval(high: float | None, is_within: bool | None) -> None:
    pairs = [(10.0, 20.0), (10.0, 19.0), (10.0, 50.0)]
    found = reach(pairs, {"gain": 0.7, "low": 0.5, "high": high})
    assert found["gain"] == pytest.approx(1.0)
    assert found["is_within"] is is_within


def test_a_failed_diagnosis_counts_as_wrong() -> None:
    good = {"judged": judge(document(piece("save_less_often")), EXPECTED)}
    reached = {"reached": {"is_within": True}}
    found = summarize({"good": good | reached, "bad": {"judged": None}})
    assert (found["cases"], found["failed"], found["promises"]) == (2, 1, 1)
    assert [found[key] for key in ("cause", "first", "headline", "no_false_above", "within")] == [
        0.5,
        0.5,
        0.5,
        0.5,
        1.0,
    ]


def test_the_first_verdict_is_that_of_progress_less_the_scripts_start() -> None:
    lines = [
        Line(3.0, "err", "measuring"),
        Line(9.0, "err", "Compute-bound (96 %)"),
        Line(30.0, "err", "compute-bound"),
    ]
    startup = {"before_loader_s": 1.0, "first_batch_s": 0.5, "first_step_s": 0.5}
    watched: dict[str, Any] = {"evidence": {"watched": {"startup": startup}}}
    assert first_verdict_s(lines, watched, 40.0) == 7.0
    assert first_verdict_s(lines[:1], {"evidence": {}}, 40.0) == 40.0
