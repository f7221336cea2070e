"""The JSON document: its keys are stable, and any JSON reader takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.config.training_config import TrainingConfig
from autotune.records.measurement import Interval
from autotune.records.result import RunSummary
from tests.factories import (
    BASELINE,
    FAST,
    make_group_summary,
    make_measurement,
    make_recommendation,
    make_summary,
    make_trial,
    make_variants,
)
from tests.report.forms import as_json, as_markdown

KEYS = [
    "format",
    "verdict",
    "headline",
    "speedup",
    "columns",
    "outcomes",
    "reasons",
    "lr_advice",
    "device_notes",
    "notes",
    "files",
    "summary",
]


def column_of(summary: RunSummary, run_dir: Path, title: str) -> dict[str, Any]:
    document = json.loads(as_json(summary, run_dir))
    return next(column for column in document["columns"] if column["title"] == title)


def test_the_keys_are_the_same_for_every_verdict(any_summary: RunSummary, tmp_path: Path) -> None:
    document = json.loads(as_json(any_summary, tmp_path))
    assert list(document) == KEYS
    assert document["format"] == 2


def test_the_best_settings_make_a_training_config_again(tmp_path: Path) -> None:
    best = column_of(make_summary(), tmp_path, "recommended")
    assert TrainingConfig.model_validate(best["config"]) == make_recommendation().config
    assert len(best["runs"]) == 3
    low, high = best["figures"]["samples_per_s_ci"]
    assert low < best["figures"]["samples_per_s"] < high


def test_what_trials_jsonl_holds_is_left_out(tmp_path: Path) -> None:
    document = json.loads(as_json(make_summary(), tmp_path))
    assert not {"trials"} & {*document["summary"]}
    assert "confirmations" not in document["summary"]["recommendation"]
    assert "window" not in document["columns"][0]["figures"]
    assert "window" not in document["columns"][0]["runs"][0]


def test_each_ranks_figures_are_in_the_document(tmp_path: Path) -> None:
    best = column_of(make_group_summary(), tmp_path, "recommended")
    assert best["config"]["strategy"] == "ddp"
    assert [rank["device"] for rank in best["figures"]["ranks"]] == ["cuda:0", "cuda:1"]
    assert best["figures"]["communication"]["bytes_exchanged"] == 22 * 2**20


def test_nothing_feasible_has_no_best(tmp_path: Path) -> None:
    document = json.loads(as_json(make_variants()["nothing_feasible"], tmp_path))
    assert document["verdict"] == "nothing_feasible"
    assert (document["speedup"], document["summary"]["recommendation"]) == (None, None)
    assert document["outcomes"]["over_memory"] == 3


def test_an_infinite_end_is_the_text_infinity(tmp_path: Path) -> None:
    recommendation = make_recommendation(speedup=Interval(value=2.0, low=0.0, high=float("inf")))
    text = as_json(make_summary(recommendation=recommendation), tmp_path)
    assert json.loads(text)["speedup"] == {"value": 2.0, "low": 0.0, "high": "Infinity"}


def test_files_that_are_there_are_given_by_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "recommended.yaml").touch()
    files = json.loads(as_json(make_summary(), tmp_path))["files"]
    assert files == {"recommended.yaml": str(tmp_path / "recommended.yaml")}


def test_copies_are_a_ceiling_of_the_document_and_of_the_report(tmp_path: Path) -> None:
    measured = make_measurement(
        1000.0, loader_ceiling=5000.0, device_ceiling=2000.0, copy_ceiling=4000.0
    )
    bare = make_measurement(1000.0, loader_ceiling=5000.0, device_ceiling=2000.0)
    shown = {}
    for name, run in (("copied", measured), ("bare", bare)):
        trials = (
            make_trial(0, BASELINE, measurement=run),
            make_trial(1, FAST, measurement=make_measurement(4000.0)),
        )
        found = make_recommendation(same_batch=None, same_batch_number=None)
        summary = make_summary(trials=trials, baseline=BASELINE, recommendation=found)
        shown[name] = as_markdown(summary)
        assert (
            column_of(summary, tmp_path, "baseline")["figures"]["copy_ceiling"] == run.copy_ceiling
        )
    assert "copying alone" in shown["copied"]
    assert "copying alone" not in shown["bare"]
