"""benchmarks/decisions_here.py: the gain of a step is the one that is told, and ratios are searched in turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from autotune import TrainingConfig
from autotune.records.measurement import Interval
from autotune.records.result import Recommendation
from autotune.space.scaling import LrAdvice
from benchmarks import decisions_here
from benchmarks.cases import known_gain
from benchmarks.decisions_here import RATIOS, name_of
from benchmarks.measures.recording import Recording
from benchmarks.measures.verdicts import claim_of, is_proven, recommended_of

WORK_S, BETWEEN_S = 0.02, 0.005
BATCH = [torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.long)]


class Clock:
    """Time that only work, sleeping and looking at it moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("time.perf_counter", self.look)
        monkeypatch.setattr("time.sleep", self.move)
        monkeypatch.setattr("hashlib.sha256", lambda _: self.move(WORK_S))

    def look(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def move(self, seconds: float) -> None:
        self.now_s += seconds


def step_s(clock: Clock, ratio: float, carrier: known_gain.Carrier, *, is_on: bool) -> float:
    """Seconds of a step and of what lies between two steps, in the long run."""
    step = known_gain.known_gain(ratio, carrier).step
    model = known_gain._model()
    if is_on and carrier == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch has it, untyped
    assert step is not None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on and carrier == "amp_dtype"):
        step(model, BATCH)
        begun_s = clock.now_s
        for _ in range(5):
            clock.move(BETWEEN_S)
            step(model, BATCH)
    return (clock.now_s - begun_s) / 5


@pytest.mark.parametrize("carrier", known_gain.CARRIERS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_step_without_the_setting_takes_the_ratio_times_as_long(
    ratio: float, carrier: known_gain.Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    fast, slow = (step_s(clock, ratio, carrier, is_on=is_on) for is_on in (True, False))
    assert fast == pytest.approx(WORK_S + BETWEEN_S, rel=1e-3)
    assert slow / fast == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("carrier", known_gain.CARRIERS)
def test_the_gain_that_is_told_is_that_of_the_setting_that_carries_it(
    carrier: known_gain.Carrier,
) -> None:
    on = {"amp_dtype": "bfloat16"} if carrier == "amp_dtype" else {"channels_last": True}
    assert known_gain.true_ratio(TrainingConfig.model_validate(on), 1.1, carrier) == 1.1
    assert (
        known_gain.true_ratio(TrainingConfig.model_validate(known_gain.BASELINE), 1.1, carrier)
        == 1.0
    )


def test_the_ratio_with_the_fewest_searches_is_next_and_none_when_each_has_enough() -> None:
    counted = {name_of(ratio): {"count": 2} for ratio in RATIOS}
    assert decisions_here._next({}, 1) == 1.0
    assert decisions_here._next({**counted, name_of(1.1): {"count": 1}}, 3) == 1.1
    assert decisions_here._next(counted, 2) is None


def test_searches_are_added_to_those_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures: dict[str, Any] = {
        "verdict": "faster",
        "claim": [1.2, 1.1, 1.3],
        "falsely_proven": 0,
        "repeated": [],
        "truth": 1.1,
        "best": 1.1,
    }
    monkeypatch.setattr(decisions_here, "search", lambda *_, **__: None)
    monkeypatch.setattr(
        decisions_here, "figures_of", lambda *_: {**figures, "best": 1.1, "trials": 3}
    )
    recording = Recording(
        benchmark="x", arguments={}, machine={}, path=tmp_path / "x.json", started=""
    )
    for _ in range(3):
        decisions_here._add(recording, 1.1, None)
    part = json.loads((tmp_path / "x.json").read_text())["results"][name_of(1.1)]
    assert part["count"] == 3
    assert [one["seed"] for one in part["searches"]] == [0, 1, 2]
    assert [one["carrier"] for one in part["searches"]] == [
        "amp_dtype",
        "channels_last",
        "amp_dtype",
    ]
    assert (part["said_faster"][0], part["claims_covered"][0]) == (1.0, 1.0)


def test_a_slice_begins_no_search_that_may_end_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--minutes", "1", "--results", str(tmp_path)])
    monkeypatch.setattr(decisions_here, "describe_machine", lambda _: {})
    monkeypatch.setattr(
        decisions_here, "_add", lambda *_, **__: pytest.fail("a search takes four minutes")
    )
    assert decisions_here.main() == 0
    capsys.readouterr()


def said(number: int = 1, verdict: Literal["faster", "unconfirmed"] = "faster") -> Recommendation:
    """A recommendation of a trial."""
    return Recommendation(
        config=TrainingConfig(lr=0.4),
        number=number,
        verdict=verdict,
        speedup=Interval(value=2, low=1, high=3),
        lr_advice=LrAdvice(lr=0.4, rule="linear", batch_ratio=4.0),
    )


def test_nothing_is_claimed_of_the_baseline_and_the_learning_rate_is_no_part_of_what_is_compared() -> (
    None
):
    assert claim_of(said()) == Interval(value=2, low=1, high=3)
    assert claim_of(said(number=0)) is None
    assert [is_proven(said(verdict=verdict)) for verdict in ("faster", "unconfirmed")] == [
        True,
        False,
    ]
    assert recommended_of(said(), TrainingConfig(lr=0.1)) == TrainingConfig(lr=0.1)
    assert recommended_of(None, TrainingConfig(lr=0.1)) == TrainingConfig(lr=0.1)
