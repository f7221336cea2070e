"""The soak in short, and its line: what is added each time is a slope, what is there from some trial on is none."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import pytest

from autotune.api import calls
from autotune.api import search as searching
from benchmarks.measures.endurance.soak import SOAK
from benchmarks.measures.endurance.trend import trend_of


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_trials_leave_nothing_with_the_process_that_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the soak gives both a place of their own
    monkeypatch.setattr(tempfile, "tempdir", None)
    for module in (
        calls,
        searching,
    ):  # the soak has them decide by few runs: here, for this test alone
        monkeypatch.setattr(module, "run_plan", module.run_plan)
    found = SOAK.run("one_search_of_10", tmp_path)
    assert found["outcomes"] == {"ok": 10}
    held = ("descriptors", "threads", "children", "temporary")
    assert {name: found["trends"][name]["grown"] for name in held} == dict.fromkeys(held, 0.0)


def test_what_each_trial_adds_is_the_slope_whatever_single_notes_show() -> None:
    chance = random.Random(0)
    found = trend_of(
        [
            100.0 + 20.0 * trial + chance.gauss(0, 30) + (5000.0 if trial == 70 else 0)
            for trial in range(200)
        ]
    )
    assert found.low < 20.0 < found.high
    assert found.high - found.low < 2.0


def test_what_came_in_the_first_quarter_is_no_growth() -> None:
    found = trend_of([min(trial, 20) for trial in range(100)])
    assert (found.slope, found.grown) == (0.0, 0.0)


def test_a_descriptor_more_in_the_end_is_a_growth() -> None:
    assert trend_of([10.0] * 80 + [11.0] * 40).grown == 1.0


def test_too_few_notes_are_refused() -> None:
    with pytest.raises(ValueError, match="got 3"):
        trend_of([1.0, 2.0, 3.0])


def test_what_could_not_be_judged_is_said_so() -> None:
    assert set(SOAK.judge({})["promises"].values()) == {None}
