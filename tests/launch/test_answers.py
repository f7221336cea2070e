"""What a single process has answered, held against how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.launch.answers import NO_LIMITS, read_answer
from autotune.launch.launcher import Exit, Launch
from autotune.protocol.disk import TrialFolder, write_model
from autotune.protocol.reports import RankReport
from autotune.records.diagnosis import Curves
from autotune.records.trial import Outcome, TrialResult


@pytest.mark.parametrize(
    ("is_cut", "end", "outcome", "reason"),
    [
        (True, {"code": None, "ended_for": "deadline"}, "timeout", "the trial did not end within 9 s"),
        (True, {"code": -11}, "crashed", "the trial's process was ended by a segmentation fault (SIGSEGV)"),
        (True, {"code": 0}, "ok", ""),
        (False, {"code": -11}, "ok", ""),
        (False, {"code": None, "ended_for": "deadline"}, "ok", ""),
    ],
)
def test_curves_that_are_cut_are_those_of_a_process_that_ended_as_it_did(
    tmp_path: Path, is_cut: bool, end: dict[str, Any], outcome: Outcome, reason: str
) -> None:
    folder, curves = TrialFolder(tmp_path), Curves(threads=3, is_cut=is_cut)
    write_model(folder.report, RankReport(result=TrialResult(outcome="ok"), curves=curves))
    answer = read_answer(
        Launch(folder=folder, log=tmp_path / "log", deadline_s=9.0), Exit(wall_s=1.0, **end), NO_LIMITS
    )
    assert (answer.result.outcome, answer.result.reason, answer.curves) == (outcome, reason, curves)
