"""Ranks that have ended keep their numbers until their sessions are swept: killpg can't reach another's group."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from autotune.launch import processes
from autotune.launch.processes import exit_code, kill_all
from tests.launch.conftest import Rig


@pytest.mark.parametrize(
    ("script", "code"),
    [("kill -KILL $$", -signal.SIGKILL), ("exit 3", 3), ("exit 0", 0)],
    ids=["killed", "3", "0"],
)
def test_an_exit_code_is_read_without_reaping_the_child(script: str, code: int) -> None:
    with subprocess.Popen(["/bin/sh", "-c", script]) as child:
        while (found := exit_code(child)) is None:
            pass
        assert found == code
        assert exit_code(child) == code, "it can be asked for again"
        assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
        assert child.wait() == code
        assert exit_code(child) == code
    assert not psutil.pid_exists(child.pid)


def test_a_child_that_runs_has_no_exit_code() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE, start_new_session=True
    ) as child:
        assert exit_code(child) is None
        kill_all([child.pid], "no such token")
        assert exit_code(child) == -signal.SIGKILL


def test_shared_memory_of_what_the_end_of_a_group_ends_is_freed() -> None:
    script = ["/bin/sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        left = Path(f"/dev/shm/torch_{int(leader.stdout.readline())}_1_0")
        left.touch()
        try:
            kill_all([leader.pid], "no such token")
            assert not left.exists()
        finally:
            left.unlink(missing_ok=True)


@pytest.mark.slow
def test_what_an_ended_rank_has_left_in_its_session_is_ended(
    any_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank kills itself by SIGKILL; its number is still its own when its session is swept, and given back then.

    It does so twice: the first time it might have been somebody else.
    """
    ranks, seen, sweep = set[int](), list[str](), processes.kill_all

    def sweep_and_look(leaders: Collection[int], token: str, *, spare: int | None = None) -> None:
        ranks.update(leaders)
        seen.extend(psutil.Process(leader).status() for leader in leaders)
        sweep(leaders, token, spare=spare)
        seen.extend(psutil.Process(leader).status() for leader in leaders)

    monkeypatch.setattr(processes, "kill_all", sweep_and_look)
    result = any_rig.run(model="killing_itself")
    assert (result.outcome, "SIGKILL" in result.reason) == ("crashed", True)
    assert seen == [psutil.STATUS_ZOMBIE] * 4
    monkeypatch.undo()
    if any_rig.server_pid is not None:
        any_rig.assert_next_trial_works()
    assert not any(psutil.pid_exists(rank) for rank in ranks), (
        "the server reaps before it forks again"
    )
