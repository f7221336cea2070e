"""The names of a trial's files."""

from __future__ import annotations

from pathlib import Path

from autotune.protocol.disk import TrialFolder


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    assert folder.report_of(0) == folder.report
    names = {
        one.name for rank in range(3) for one in (folder.report_of(rank), folder.stack_of(rank))
    }
    assert len(names) == 6
    assert folder.stack_of(0).name == "stack-0.txt"
    assert folder.report_of(1).name == "report-1.json"


def test_a_stack_is_there_once_a_rank_has_written_one(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path)
    assert not TrialFolder(tmp_path / "gone").has_stacks()
    folder.stack_of(0).touch()
    folder.stack_of(3).touch()
    assert not folder.has_stacks(), "faulthandler's files are made at the start"
    folder.stack_of(3).write_text("Timeout!")
    assert folder.has_stacks()
