"""The contract of a launcher, held by each: whatever a trial does is an outcome, and nothing of it is left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from launch.conftest import Rig


def test_a_trial_measures_and_its_log_is_named(any_rig: Rig) -> None:
    result = any_rig.run(settings={"num_workers": 1})
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert result.measurement.peak_memory_bytes > 0
    assert result.log == f"{any_rig.folder.name}/trial.log"
    assert result.wall_s > 0
    assert not any_rig.left_over()
    assert sorted(one.name for one in any_rig.folder.iterdir()) == ["payload", "trial.log"], "nothing else is left"


def test_the_machine_is_described_without_a_workload(any_rig: Rig) -> None:
    report = any_rig.runner().describe(deadline_s=60)
    assert report.environment is not None
    assert report.environment.device == "cpu"


def test_an_exception_is_an_outcome_with_the_users_frames_alone(any_rig: Rig) -> None:
    result = any_rig.run(model="raising")
    assert result.outcome == "crashed"
    assert result.reason == "ValueError: the model is broken"
    assert result.failure is not None
    assert "_raise" in result.failure.traceback
    assert "/autotune/worker/" not in result.failure.traceback
    assert result.failure.traceback.encode() in any_rig.log


def test_an_ending_by_os_exit_is_told_with_its_code(any_rig: Rig) -> None:
    result = any_rig.run(model="exiting_hard")
    assert result.outcome == "crashed"
    assert "exit code 3" in result.reason


def test_a_segmentation_fault_is_told_by_its_signal_and_logged(any_rig: Rig) -> None:
    result = any_rig.run(model="segfaulting")
    assert result.outcome == "crashed"
    assert "SIGSEGV" in result.reason
    assert b"Segmentation fault" in any_rig.log
    assert b"user_code.py" in any_rig.log


def test_a_hang_that_ignores_signals_ends_at_its_deadline(any_rig: Rig) -> None:
    result = any_rig.run(model="hanging_deaf", deadline_s=10)
    assert (result.outcome, result.reason) == ("timeout", "the trial did not end within 10 s")
    assert b"in hang" in any_rig.log, "where it hung is in the log"
    assert not any_rig.left_over()


def test_of_a_flood_of_output_the_log_keeps_beginning_and_end(any_rig: Rig) -> None:
    result = any_rig.run(model="flooding")
    assert result.outcome == "ok", result.reason
    assert len(any_rig.log) < 2**20
    assert any_rig.log.startswith(b"the beginning")
    assert any_rig.log.rstrip().endswith(b"the end")
    assert b"bytes left out" in any_rig.log


def test_what_grows_far_beyond_the_limit_is_ended(any_rig: Rig) -> None:
    result = any_rig.run_limited(600 * 2**20, model="growing")
    assert result.outcome == "host_oom"
    assert result.violation is not None
    assert result.violation > 0
    assert not any_rig.left_over()


def test_a_daemon_in_a_session_of_its_own_does_not_outlive_its_trial(any_rig: Rig) -> None:
    result = any_rig.run(model="spawning_daemon")
    assert result.outcome == "ok", result.reason
    assert not is_alive(int(any_rig.note()))


def test_a_trial_sees_the_callers_world(any_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/of/mine")
    result = any_rig.run(model="noting_world")
    assert result.outcome == "ok", result.reason
    world = json.loads(any_rig.note())
    assert world["variable"] == "1"
    assert world["python_path"] == "/somewhere/of/mine"
    assert world["sys_path"][: len(sys.path)] == sys.path
    assert world["folder"] == str(Path.cwd())
    assert world["oom_score_adj"] > int(Path("/proc/self/oom_score_adj").read_text())
    assert world["is_session_leader"]
    assert world["interrupt"]
    assert world["input"] == ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
