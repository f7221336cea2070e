"""The console's forms: what they say, and that they fit 80 columns and obey no foreign markup."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from autotune.config.plan import Objective
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.records.measurement import Interval
from autotune.records.result import RunSummary
from autotune.records.trial import Outcome
from autotune.report.console import print_check
from autotune.report.words import one_line
from autotune.space.ranges import Basis
from autotune.space.space import resolve
from tests.factories import (
    BASELINE,
    FAST,
    RESNET,
    SAME_BATCH,
    SERVER,
    make_measurement,
    make_recommendation,
    make_summary,
    make_trial,
    make_trials,
    make_variants,
    said,
)
from tests.report.forms import on_console, on_console_of


def row_of(text: str, label: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(label)).split()


def assert_fits(text: str, width: int = 80) -> None:
    assert [line for line in text.splitlines() if cell_len(line) > width] == []


def test_every_verdict_fits_80_columns(any_summary: RunSummary, tmp_path: Path) -> None:
    assert_fits(on_console(any_summary, tmp_path))


def test_wide_text_fits_80_columns(tmp_path: Path) -> None:
    ddp = DdpConfig(
        bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True, comm_hook="powersgd"
    )
    config = TrainingConfig(world_size=8, strategy="ddp", ddp=ddp, micro_batch_size=16384)
    recommendation = make_recommendation(config=config, reasons=(said("理由" * 60),))
    run_dir = tmp_path / ("folder" * 30)
    text = on_console(
        make_summary(recommendation=recommendation, notes=(said("x" * 300),)), run_dir
    )
    assert_fits(text)
    assert "comm_hook=" in text


def test_infinite_interval_is_unknown(tmp_path: Path) -> None:
    speedup = Interval(value=2.4, low=0.0, high=float("inf"))
    text = on_console(make_summary(recommendation=make_recommendation(speedup=speedup)), tmp_path)
    assert "(95 %: unknown)" in text
    assert "inf" not in row_of(text, "samples/s")


def test_throughput_is_the_mean_of_all_runs(tmp_path: Path) -> None:
    thrice = on_console(make_summary(), tmp_path)
    assert row_of(thrice, "samples/s")[1:] == ["5,100", "12,300", "9,850"]
    once = on_console(make_variants()["unconfirmed"], tmp_path)
    assert row_of(once, "samples/s")[1:] == ["5,123", "12,346", "9,876"]


def test_recommended_same_batch_has_one_column(tmp_path: Path) -> None:
    same = {"same_batch": SAME_BATCH, "same_batch_number": 2}
    text = on_console(
        make_summary(recommendation=make_recommendation(config=SAME_BATCH, number=2, **same)),
        tmp_path,
    )
    assert "recommended" in text
    assert "same batch" not in text


def test_baseline_as_same_batch_has_no_column(tmp_path: Path) -> None:
    same = {"same_batch": BASELINE, "same_batch_number": 0, "same_batch_speedup": None}
    text = on_console(make_summary(recommendation=make_recommendation(**same)), tmp_path)
    assert "same batch" not in text


def test_foreign_text_is_not_markup(tmp_path: Path) -> None:
    text = " ".join(on_console(make_summary(), tmp_path).split())
    assert "[red](3, 4)[/red]" in text
    assert "[long]" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("outcome", ["oom", "timeout", "diverged"])
def test_guards_refusal_is_its_own_failure(outcome: Outcome, tmp_path: Path) -> None:
    own = make_trial(1, FAST, outcome, reason="own")
    refused = make_trial(
        2, FAST, outcome, reason="precision guard: so", measurement=make_measurement(9000.0)
    )
    text = on_console(make_summary(trials=(make_trials()[0], own, refused)), tmp_path).partition(
        "Failures"
    )[2]
    assert "trial 1: own" in text
    assert "trial 2: precision" in text


def test_only_files_that_are_there_are_listed(tmp_path: Path) -> None:
    (tmp_path / "recommended.yaml").touch()
    text = on_console(make_summary(), tmp_path)
    assert "recommended.yaml" in text
    assert "study.db" not in text


@pytest.mark.parametrize(
    "stale", [None, "runs/[x]/recommended.yaml is stale: driver 550 there, 570\x1b[0m here."]
)
def test_check_says_why_a_result_is_stale(
    stale: str | None,
) -> None:
    space = resolve(
        Basis(given={}, baseline=BASELINE, objective=Objective(), facts=RESNET, environment=SERVER)
    )
    text = on_console_of(lambda console: print_check(SERVER, RESNET, space, console, stale=stale))
    assert_fits(text)
    assert ("stale" in text) == (stale is not None)
    assert stale is None or one_line(stale) in text
