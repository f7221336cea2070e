"""The contract of a launcher, held by each: whatever a trial does is an outcome, and nothing of it is left.

What goes on inside a rank, and what other jobs than a trial answer, is in test_user_faults.py: it does not depend on
how the rank was started. Of groups, two gloo ranks on the CPU, all else is in test_groups.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from autotune.errors import LauncherError
from autotune.launch import local
from autotune.launch.launcher import Launch
from autotune.launch.local import LocalLauncher
from autotune.launch.machine import KEEPING
from autotune.protocol.disk import TrialFolder, write_model
from autotune.protocol.messages import DescribeJob
from autotune.records.trial import TrialResult
from tests.factories import make_process
from tests.launch.conftest import Rig, forked_first, rig_over


@dataclass(frozen=True, kw_only=True)
class GoodTrial:
    """A trial that measures while it prints a flood and leaves a daemon, and what was there when it had ended."""

    rig: Rig
    cwd: Path
    result: TrialResult
    left_over: list[str]
    files: list[str]


@pytest.fixture(scope="module")
def good_trial(any_launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> GoodTrial:
    """One for all rules that such a trial can be held against: to start an interpreter takes seconds."""
    folder, cwd = tmp_path_factory.mktemp("trial"), tmp_path_factory.mktemp("cwd")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setenv("PYTHONPATH", "/somewhere/of/mine")
        rig = rig_over(any_launcher, folder)
        result = rig.run(model="flooding_and_leaving_a_daemon", settings={"num_workers": 1})
    files = sorted(one.name for one in folder.iterdir())
    return GoodTrial(rig=rig, cwd=cwd, result=result, left_over=rig.left_over(), files=files)


def test_a_trial_measures_and_its_log_is_named(good_trial: GoodTrial) -> None:
    result = good_trial.result
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert result.measurement.peak_memory_bytes > 0
    assert result.log == f"{good_trial.rig.folder.name}/trial.log"
    assert result.wall_s > 0
    assert good_trial.files == ["payload", "trial.log"], "nothing else is left"


def test_of_a_flood_of_output_the_log_keeps_beginning_and_end(good_trial: GoodTrial) -> None:
    log = good_trial.rig.log
    assert len(log) < 2**20
    assert log.startswith(b"the beginning")
    assert log.rstrip().endswith(b"the end")
    assert b"bytes left out" in log


def test_a_daemon_in_a_session_of_its_own_does_not_outlive_its_trial(good_trial: GoodTrial) -> None:
    assert not is_alive(int((good_trial.cwd / "daemon").read_text()))
    assert not good_trial.left_over


def test_a_trial_sees_the_callers_world(good_trial: GoodTrial) -> None:
    world = json.loads((good_trial.cwd / "world").read_text())
    assert world["variable"] == "1"
    assert world["python_path"] == "/somewhere/of/mine"
    assert world["sys_path"][: len(sys.path)] == sys.path
    assert world["folder"] == str(good_trial.cwd)
    assert world["oom_score_adj"] > int(Path("/proc/self/oom_score_adj").read_text())
    assert world["is_session_leader"]
    assert world["interrupt"]
    assert world["input"] == ""


def test_a_trials_process_or_its_server_began_with_a_malloc_that_keeps_memory(
    good_trial: GoodTrial,
) -> None:
    """glibc reads the variables when a process begins, and a fork goes on with what its server has read."""
    world = json.loads((good_trial.cwd / "world").read_text())
    switches = {f"{name}={value}" for name, value in KEEPING.items()}
    assert switches <= set(world["begun_with"])


@forked_first
def test_an_ending_by_os_exit_is_told_with_its_code(any_rig: Rig) -> None:
    result = any_rig.run(model="exiting_hard")
    assert result.outcome == "crashed"
    assert "3" in result.reason


@forked_first
def test_a_hang_that_ignores_signals_ends_at_its_deadline(any_rig: Rig) -> None:
    result = any_rig.run(model="hanging_deaf", deadline_s=3)
    assert result.outcome == "timeout"
    assert "3 s" in result.reason
    if any_rig.server_pid is not None:  # a fresh interpreter may not have come to hang by then
        assert b"in hang" in any_rig.log, "where it hung is in the log"
    assert not any_rig.left_over()


@forked_first
def test_what_grows_far_beyond_the_limit_is_ended(any_rig: Rig) -> None:
    result = any_rig.run_limited(600 * 2**20, model="growing")
    assert result.outcome == "host_oom"
    assert result.violation is not None
    assert result.violation > 0
    assert not any_rig.left_over()


@forked_first
def test_a_group_is_one_measurement_with_each_ranks_own_figures(any_rig: Rig) -> None:
    result = any_rig.run_group("speaking", num_workers=1)
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert [one.rank for one in result.measurement.ranks] == [0, 1]
    assert result.measurement.samples_per_s > 0
    assert b"rank 0 of 2 speaks" in any_rig.log
    assert b"rank 1 of 2 speaks" in any_rig.log
    assert sorted(one.name for one in any_rig.folder.iterdir()) == ["payload", "trial.log"], (
        "nothing else is left"
    )
    assert not any_rig.left_over()


@forked_first
def test_a_rank_that_is_killed_ends_its_group(any_rig: Rig) -> None:
    result = any_rig.with_ending(follow_within_s=0.5).run_group("killing_itself_in_build_of_1")
    assert result.outcome == "crashed"
    assert result.reason.startswith("rank 1: ")
    assert "SIGKILL" in result.reason
    assert result.failure is None
    assert result.measurement is None
    assert not any_rig.left_over()
    if any_rig.server_pid is not None:
        any_rig.assert_next_trial_works()


def test_a_refused_start_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LauncherError("no process")

    monkeypatch.setattr(local, "start_worker", refuse)
    folder = TrialFolder(tmp_path)
    write_model(folder.job, DescribeJob(process=make_process(tmp_path)))
    before = psutil.Process().num_fds()
    with pytest.raises(LauncherError):
        LocalLauncher(None).launch(Launch(folder=folder, log=tmp_path / "log", deadline_s=1.0))
    assert psutil.Process().num_fds() == before


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
