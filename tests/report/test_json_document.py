"""The JSON document: its keys are stable, and any JSON reader takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.records.measurement import Interval
from autotune.records.result import Bottleneck, Diagnosis, Finding, RunSummary
from autotune.report.json_document import diagnosis_json
from tests.factories import (
    make_recommendation,
    make_summary,
    make_variants,
)
from tests.report.cases import diagnosis_cases, make_advice
from tests.report.forms import as_json

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


def test_keys_are_the_same_for_every_verdict(any_summary: RunSummary, tmp_path: Path) -> None:
    document = json.loads(as_json(any_summary, tmp_path))
    assert list(document) == KEYS
    assert document["format"] == 2


def test_best_settings_make_a_training_config(tmp_path: Path) -> None:
    best = column_of(make_summary(), tmp_path, "recommended")
    assert TrainingConfig.model_validate(best["config"]) == make_recommendation().config
    assert len(best["runs"]) == 3
    low, high = best["figures"]["samples_per_s_ci"]
    assert low < best["figures"]["samples_per_s"] < high


def test_raw_figures_are_left_out(tmp_path: Path) -> None:
    document = json.loads(as_json(make_summary(), tmp_path))
    assert not {"trials"} & {*document["summary"]}
    assert "confirmations" not in document["summary"]["recommendation"]
    assert "window" not in document["columns"][0]["figures"]
    assert "window" not in document["columns"][0]["runs"][0]


def test_nothing_feasible_has_no_best(tmp_path: Path) -> None:
    document = json.loads(as_json(make_variants()["nothing_feasible"], tmp_path))
    assert document["verdict"] == "nothing_feasible"
    assert (document["speedup"], document["summary"]["recommendation"]) == (None, None)
    assert document["outcomes"]["over_memory"] == 3


def test_infinite_end_is_a_text(tmp_path: Path) -> None:
    recommendation = make_recommendation(speedup=Interval(value=2.0, low=0.0, high=float("inf")))
    text = as_json(make_summary(recommendation=recommendation), tmp_path)
    assert json.loads(text)["speedup"] == {"value": 2.0, "low": 0.0, "high": "Infinity"}


def test_files_are_absolute_paths(tmp_path: Path) -> None:
    (tmp_path / "recommended.yaml").touch()
    files = json.loads(as_json(make_summary(), tmp_path))["files"]
    assert files == {"recommended.yaml": str(tmp_path / "recommended.yaml")}


SHARES = [
    "start_up",
    "data",
    "copy",
    "forward",
    "backward",
    "optimizer",
    "host_sync",
    "checkpoint",
    "validation",
    "logging",
    "garbage_collection",
    "restart",
    "other",
]


@pytest.mark.parametrize("case", diagnosis_cases().values(), ids=diagnosis_cases())
def test_a_diagnosis_names_every_share_and_a_cause(case: Diagnosis) -> None:
    document = json.loads(diagnosis_json(case))
    assert set(SHARES) <= set(document["shares"])
    assert document["verdict"] == case.verdict
    assert len(document["causes"]) >= len(case.advice)
    keys = {"code", "share", "location", "remedy", "change"}
    assert all(set(cause) == keys for cause in document["causes"])


@pytest.mark.parametrize("code", ["checkpoint", "denormals", "script", "cores", "repeats"])
def test_settings_are_not_against_what_no_setting_removes(code: Bottleneck) -> None:
    case = diagnosis_cases()["healthy"]
    piece = make_advice("Set num_workers=8", gain=(0.25, 0.18, 0.33), num_workers=8)
    first = Finding(bottleneck=code, share=0.5, evidence="")
    waiting = Finding(bottleneck="data_io", share=0.2, evidence="")
    for findings, named in (((first, waiting), "data_io"), ((first,), "unknown")):
        found = case.model_copy(update={"advice": (piece,), "findings": findings})
        (cause, *rest) = json.loads(diagnosis_json(found))["causes"]
        assert (cause["code"], cause["change"]) == (named, {"num_workers": 8})
        assert code in [one["code"] for one in rest]
