"""The outcome of a single process: its recorded exit and its report in, one result out. No process is started here."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from autotune.launch.answers import read_answer
from autotune.launch.launcher import Exit, Launch
from autotune.protocol.disk import TrialFolder, write_model
from autotune.protocol.messages import REPORT_UNWRITTEN, RankReport
from autotune.records.measurement import MemoryLimits
from autotune.records.result import Curves
from autotune.records.trial import Outcome, TrialResult

MIB = 2**20
KILLED = -signal.SIGKILL
LATE: dict[str, Any] = {"code": None, "ended_for": "deadline"}


def answer_of(folder: Path, limits: MemoryLimits | None = None, **end: Any) -> RankReport:
    """Read the answer of a process that ended so; its deadline was 9 s."""
    launch = Launch(folder=TrialFolder(folder), log=folder / "log", deadline_s=9.0)
    return read_answer(launch, Exit(wall_s=1.0, **end), limits or MemoryLimits())


@pytest.mark.parametrize(
    ("end", "outcome", "named"),
    [
        ({"code": 0}, "crashed", "0"),
        ({"code": 3}, "crashed", "3"),
        ({"code": KILLED}, "crashed", "SIGKILL"),
        ({"code": -signal.SIGSEGV}, "crashed", "SIGSEGV"),
        ({"code": -signal.SIGABRT}, "crashed", "SIGABRT"),
        ({"code": -signal.SIGBUS}, "crashed", "SIGBUS"),
        ({"code": -63}, "crashed", "63"),
        ({"code": REPORT_UNWRITTEN}, "crashed", "log"),
        ({"code": KILLED, "was_oom_killed": True}, "host_oom", ""),
        ({"code": -signal.SIGSEGV, "was_oom_killed": True}, "crashed", "SIGSEGV"),
        (LATE, "timeout", "9 s"),
        ({"code": None, "ended_for": "memory", "memory_bytes": 900 * MIB}, "host_oom", "900 MiB"),
        ({"code": None, "ended_for": "cancelled"}, "pruned", ""),
    ],
)
def test_an_end_without_a_report_is_an_outcome_with_a_reason(
    tmp_path: Path, end: dict[str, Any], outcome: Outcome, named: str
) -> None:
    result = answer_of(tmp_path, **end).result
    assert result.outcome == outcome
    assert result.reason
    assert named in result.reason
    assert (result.measurement, result.failure) == (None, None)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        ("ok", {"code": -signal.SIGSEGV}),
        ("ok", {"code": None, "ended_for": "cancelled"}),
        ("oom", LATE),
        ("diverged", {"code": 0}),
    ],
)
def test_a_report_that_was_written_counts_however_its_process_ended(
    tmp_path: Path, outcome: Outcome, end: dict[str, Any]
) -> None:
    written = RankReport(result=TrialResult(outcome=outcome, reason="as written"))
    write_model(TrialFolder(tmp_path).report, written)
    assert answer_of(tmp_path, **end) == written


@pytest.mark.parametrize("code", [0, REPORT_UNWRITTEN, KILLED])
@pytest.mark.parametrize("kind", ["garbage", "folder", "of another version"])
def test_what_lies_in_a_reports_place_is_a_crash(tmp_path: Path, kind: str, code: int) -> None:
    report = TrialFolder(tmp_path).report
    if kind == "folder":
        report.mkdir()
    else:
        report.write_bytes(b"\xff{]garbage" if kind == "garbage" else b"{}")
    assert answer_of(tmp_path, code=code).result.outcome == "crashed"


def test_the_violation_is_the_share_by_which_the_limit_was_passed(tmp_path: Path) -> None:
    limits = MemoryLimits(limit_bytes=600 * MIB, ram_bytes=2**36, limit_is_ram=True)
    end: dict[str, Any] = {"code": None, "ended_for": "memory"}
    assert answer_of(
        tmp_path, limits, memory_bytes=900 * MIB, **end
    ).result.violation == pytest.approx(0.5)
    assert answer_of(
        tmp_path, limits, memory_bytes=500 * MIB, **end
    ).result.violation == pytest.approx(0.01)
    assert answer_of(tmp_path, limits, code=KILLED, was_oom_killed=True).result.violation is None


@pytest.mark.parametrize(
    ("is_cut", "end", "outcome", "named"),
    [
        (True, LATE, "timeout", "9 s"),
        (True, {"code": -signal.SIGSEGV}, "crashed", "SIGSEGV"),
        (True, {"code": 0}, "ok", ""),
        (False, {"code": -signal.SIGSEGV}, "ok", ""),
        (False, LATE, "ok", ""),
    ],
)
def test_curves_that_are_cut_are_those_of_a_process_that_ended_as_it_did(
    tmp_path: Path, is_cut: bool, end: dict[str, Any], outcome: Outcome, named: str
) -> None:
    curves = Curves(threads=3, is_cut=is_cut)
    write_model(
        TrialFolder(tmp_path).report, RankReport(result=TrialResult(outcome="ok"), curves=curves)
    )
    answer = answer_of(tmp_path, **end)
    assert (answer.result.outcome, answer.curves) == (outcome, curves)
    assert named in answer.result.reason
