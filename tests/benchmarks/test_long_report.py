"""The made-up run folder of a long report is one that the product reads, and its report is timed from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.files.run_folder import read_summary
from benchmarks.measures.endurance import long_report
from benchmarks.measures.endurance.long_report import make_long_folder, time_report


def test_a_long_folder_has_so_many_trials_and_its_report_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_report, "_REPORTS", 1)
    folder = make_long_folder(90, tmp_path)
    trials = read_summary(folder).trials
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len(trials) == 90
    found = time_report(folder)
    assert found["exit"] == 0
    assert found["page_bytes"] > 0
    assert found["report_s"] >= found["shown_s"] > 0
