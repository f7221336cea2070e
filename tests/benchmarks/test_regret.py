"""benchmarks/regret.py: what is told is what a user gets, and each search can be held against the file's points."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from autotune import TrainingConfig
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialResult
from benchmarks import regret
from benchmarks.replay.landscapes import LANDSCAPES
from benchmarks.replay.methods import METHODS
from benchmarks.replay.replay import SURFACES, RecordedTrial, Surface, read_surface
from benchmarks.tables.regret import (
    compare_to_tpe,
    ends,
    error_of_median,
    promises_kept,
    regret_of,
    seconds_to,
)

GROUND: dict[str, Any] = {
    "is_simulated": False,
    "floor": {"median": 0.04},
    "best": 2,
    "points": {
        "samples_per_s": [50.0, 95.0, 100.0, None],
        "standard_error": [0.01, 0.03, 0.04, None],
    },
    "methods": {
        "autotune": {
            "recommended": [1, 2, 2],
            "before_confirmation": [2, 2, 3],
            "trial_s": [10.0, 10.0, 10.0],
            "whole_s": [30.0, 40.0, 50.0],
            "steps": ["0.0 0, 10.0 2", "0.0 0, 8.0 2", "0.0 0, 9.0 1, 9.5 3"],
        },
        "TPE": {
            "trial_s": [100.0, 100.0, 100.0],
            "whole_s": [103.0, 103.0, 103.0],
            "steps": ["0.0 0, 60.0 2", "0.0 0, 50.0 2, 55.0 1, 70.0 2", "0.0 0, 80.0 2"],
        },
    },
}


def test_a_promise_is_kept_where_the_search_takes_as_long_within_a_quarter() -> None:
    kept = {"methods": {"autotune": {"promised": [[1.3, 1.2, 1.0], [0.7, 0.9, 1.1]]}, "TPE": {}}}
    assert promises_kept({"digits": kept, "older": {"methods": {"TPE": {"promised": [[]]}}}}) == [
        0.0,
        1.0,
        1.0,
    ]


@pytest.fixture(scope="module")
def cliff() -> Surface:
    return read_surface(min(SURFACES.glob("cliff-*.jsonl")))


def test_a_point_that_may_not_be_used_has_a_regret_of_one() -> None:
    assert [regret_of(GROUND, point) for point in range(4)] == pytest.approx([0.5, 0.05, 0.0, 1.0])


def test_the_regret_in_the_end_is_that_after_the_confirmation() -> None:
    assert ends(GROUND, "autotune") == pytest.approx([0.05, 0.0, 0.0])
    assert ends(GROUND, "autotune", "before_confirmation") == pytest.approx([0.0, 0.0, 1.0])
    assert error_of_median(GROUND, "autotune") == 0.0, "the best point is the best point"


def test_seconds_to_a_regret_count_from_when_it_stays() -> None:
    steps = GROUND["methods"]["TPE"]["steps"][1]
    assert (seconds_to(GROUND, steps, 0.04), seconds_to(GROUND, steps, 0.051)) == (70.0, 50.0)
    assert seconds_to(GROUND, "0.0 0", 0.05) == inf


def test_both_are_compared_at_the_same_regret_and_no_lower_than_the_floor() -> None:
    one = compare_to_tpe(GROUND)
    assert one is not None
    assert (one.regret, one.ours_s, one.theirs_s) == (0.04, 10.0, 70.0)
    assert (one.ours_whole_s, one.theirs_whole_s) == (40.0, 73.0), (
        "the whole of ours, the baseline in theirs"
    )


def test_the_references_between_the_points_are_visits_of_the_baseline_that_measured_no_more(
    cliff: Surface,
) -> None:
    references = [trial.result for trial in cliff.trials if trial.visit == "reference"]
    pooled = cliff.visits[cliff.baseline]
    assert len(references) > 20
    assert len(pooled) > len(references)
    for result in pooled:
        assert isinstance(result.measurement, Measurement)
        assert (result.measurement.breakdown, result.own_s) == (None, result.wall_s)
    assert cliff.truth.errors[cliff.baseline] < 0.5 * median(cliff.truth.errors.values())


def test_a_sitting_begins_after_a_pause_or_where_it_was_noted(
    cliff: Surface, tmp_path: Path
) -> None:
    assert {trial.sitting for trial in cliff.trials} == {0, 1}
    path = min(SURFACES.glob("cliff-*.jsonl"))
    lines = path.read_text().splitlines()[:6]
    noted = {"kind": "sitting", "at": json.loads(lines[3])["at"]}
    (tmp_path / "one.jsonl").write_text("\n".join([*lines[:4], json.dumps(noted), *lines[4:]]))
    sittings = [trial.sitting for trial in read_surface(tmp_path / "one.jsonl").trials]
    assert sorted(set(sittings)) == [0, 1]
    assert sittings == sorted(sittings)


def test_a_truth_holds_no_point_that_failed_in_a_visit() -> None:
    config = TrainingConfig()
    surface = Surface(
        {"limit_bytes": 1}, (RecordedTrial(config, 0, TrialResult(outcome="crashed")),), None, 0.0
    )
    assert dict(surface.truth.rates) == {}


@pytest.mark.parametrize("name", ["shared_cores, 3 %", "cliff_and_limit, 3 %"])
def test_the_settings_of_a_landscape_can_not_be_chosen_one_by_one(name: str) -> None:
    ground = LANDSCAPES[name]
    best = {name: getattr(ground.truth.best, name) for name in ground.domains}
    changed = [
        setting for setting, value in best.items() if value != getattr(ground.baseline, setting)
    ]
    near = [
        ground.baseline.model_copy(update={setting: best[setting]})
        for setting in changed
        if "worker" not in setting
    ]
    rates = [ground.truth.rates.get(config, 0.0) for config in near]
    assert min(rates) < ground.truth.rates[ground.baseline], "what the best has is worse by itself"


@pytest.mark.parametrize("name", ["cliff_and_limit, 3 %"])
def test_what_a_search_takes_is_the_sum_of_its_parts_and_what_it_recommends_a_point(
    name: str,
) -> None:
    ground = LANDSCAPES[name]
    course = METHODS["autotune"](ground, 0)
    assert sum(course.spent_s.values()) == pytest.approx(course.whole_s)
    assert course.spent_s["stress"] > 12, "the stress run takes its time"
    assert 0 < course.seconds < course.whole_s
    assert course.recommended in ground.configs
    theirs = METHODS["TPE"](ground, 0)
    assert 0 < theirs.seconds < theirs.whole_s
    assert theirs.out_of_memory > 0, "the landscape has a limit"


def test_the_file_keeps_every_point_and_what_each_search_recommends() -> None:
    ground = LANDSCAPES["cliff_and_limit, 3 %"]
    told, course = regret.describe(ground), METHODS["autotune"](ground, 0)
    figures = regret._figures(ground, [course])
    told["methods"] = {"autotune": figures}
    columns = told["points"]["settings"]
    point = figures["recommended"][0]
    assert all(
        column[point] == getattr(course.recommended, name) for name, column in columns.items()
    )
    assert ends(told, "autotune") == pytest.approx(
        [ground.truth.regret(course.recommended)], abs=1e-4
    )
    assert seconds_to(told, figures["steps"][0], 1.0) == 0.0


def test_what_was_measured_on_another_recording_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "cliff-here.jsonl"
    lines = min(SURFACES.glob("cliff-*.jsonl")).read_text().splitlines()
    path.write_text("\n".join(lines[:-1]))
    known = {**regret._known(path, None), "methods": {"TPE": {"seeds": 20}}}
    known["points"] = {}
    again = regret._known(path, known)
    assert again["methods"] == known["methods"]
    assert again["points"]["visits"], "the truth is always that of today's model"
    path.write_text("\n".join(lines[:-2]))
    assert regret._known(path, known)["methods"] == {}


def test_a_slice_goes_on_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "git_revision", lambda: "new")
    known = {name: {"seeds": 20, "revision": "old"} for name in METHODS if name != "GP"}
    known["random"]["seeds"] = 3
    assert regret._missing(known, 20, None) == ["GP", "random"]
    assert regret._missing(known, 20, ["TPE"]) == ["TPE"]
    known["TPE"]["revision"] = "new"
    assert regret._missing(known, 20, ["TPE"]) == []
