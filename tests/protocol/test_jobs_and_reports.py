"""Jobs and reports are read as they were written, each as its own kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from autotune.config.training_config import TrainingConfig
from autotune.protocol.disk import read_model, write_model
from autotune.protocol.messages import DescribeJob, Job, ProbeJob, RankReport, read_job
from autotune.records.measurement import Block, Measurement, MemorySample, Window
from autotune.records.result import Curves
from autotune.records.trial import Failure, TrialResult
from tests.factories import make_process

EVERY_KIND: list[dict[str, Any]] = [
    {"kind": "describe"},
    {"kind": "probe"},
    {
        "kind": "trial",
        "rendezvous": "tcp://a:1",
        "part": {"host": 1, "first_rank": 2, "ranks": 2},
        "streams_blocks": True,
    },
    {"kind": "guard"},
    {
        "kind": "curves",
        "variations": [TrainingConfig(num_workers=1)],
        "known": Curves(is_cut=True),
        "roofline": True,
    },
    {"kind": "stress", "train_s": 12.0},
]


@pytest.mark.parametrize("fields", EVERY_KIND, ids=lambda fields: str(fields["kind"]))
def test_a_job_of_each_kind_comes_back_as_it_was_sent(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    (kind,) = (
        kind
        for kind in get_args(get_args(Job)[0])
        if kind.model_fields["kind"].default == fields["kind"]
    )
    process = make_process(tmp_path, seed=1, deadline_s=5, sys_path=("", "/a"), limit_bytes=7)
    config = TrainingConfig(num_workers=2, prefetch_factor=4)
    workload = {} if kind is DescribeJob else {"payload": tmp_path, "config": config}
    job = kind.model_validate({"process": process} | workload | fields)
    write_model(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job
    assert type(read_job(tmp_path / "job.json")) is kind


@pytest.mark.parametrize(
    "fields", [{}, {"kind": "dance"}, {"kind": "probe", "train_s": 1.0}, {"kind": "stress"}]
)
def test_what_is_no_job_or_has_another_kinds_fields_is_refused(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    probe = ProbeJob(process=make_process(tmp_path), payload=tmp_path, config=TrainingConfig())
    changed = probe.model_dump(mode="json", exclude={"kind"}) | fields
    (tmp_path / "job.json").write_text(json.dumps(changed))
    with pytest.raises(ValidationError):
        read_job(tmp_path / "job.json")


@pytest.mark.parametrize("high", [1.5, float("inf")])
def test_a_report_comes_back_as_it_was_sent(high: float, tmp_path: Path) -> None:
    window = Window(
        blocks=(Block(samples=8, batches=2, seconds=0.5, data_wait_s=0.1),),
        whole_epochs=False,
        epoch_samples=None,
        queue_capacity=0,
        queue_at_start=0,
        queue_at_end=None,
        warm_up_batches=1,
        warm_up_s=0.1,
        is_drained=True,
        is_steady=True,
        stopped_by="time",
    )
    measurement = Measurement(
        samples_per_s=1.0,
        samples_per_s_ci=(0.5, high),
        busy_fraction=None,
        busy_source=None,
        data_wait_fraction=0.0,
        peak_memory_bytes=1,
        startup_s=0.1,
        build_s=0.1,
        memory=MemorySample(peak_bytes=1, source="none"),
        window=window,
        loss=0.1,
    )
    failure = Failure(signature="E at f:1", traceback="é\ud7ff")
    report = RankReport(result=TrialResult(outcome="ok", measurement=measurement, failure=failure))
    write_model(tmp_path / "report.json", report)
    assert read_model(tmp_path / "report.json", RankReport) == report


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"version": 2, "result": {"outcome": "ok"}}'])
def test_what_is_no_report_of_this_version_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValidationError):
        read_model(tmp_path / "report.json", RankReport)
