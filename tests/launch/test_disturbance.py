"""What somebody else does to a trial's processes is not taken for what its configuration does: it is run anew."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from autotune.config.plan import Ref
from autotune.config.training_config import TrainingConfig
from autotune.launch.answers import disturbance_of
from autotune.launch.launcher import Exit
from autotune.messages.trials import rerun_after_signal
from autotune.policy import WindowRules
from autotune.protocol.messages import RankReport
from autotune.records.trial import Failure, Outcome, TrialResult
from tests.launch.conftest import Rig

CODE = Path(__file__).with_name("user_disturbances.py")
KILLED, STOPPED = rerun_after_signal(why="killed"), rerun_after_signal(why="stopped")
LOST_WORKER = "a loader worker was killed: DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("what", "workers", "note"),
    [
        ("killed_rank", 0, KILLED),
        pytest.param("killed_rank", 1, KILLED, marks=pytest.mark.slow),
        pytest.param("killed_server", 0, KILLED, marks=pytest.mark.slow),
        pytest.param("stopped_rank", 0, STOPPED, marks=pytest.mark.slow),
        pytest.param("stopped_rank", 1, STOPPED, marks=pytest.mark.slow),
    ],
    ids=["rank killed", "worker killed", "server killed", "rank stopped", "worker stopped"],
)
def test_a_trial_that_was_disturbed_is_measured_anew_and_says_so(
    rig: Rig, what: str, workers: int, note: object
) -> None:
    runner = rig.runner(model=_named("linear"), dataset=_named(what))
    config = TrainingConfig(micro_batch_size=10, num_workers=workers)
    result = runner.run(
        config, name="trial", deadline_s=120.0, window=WindowRules(max_s=1.0, precision=0.0)
    )
    assert result.outcome == "ok", result.reason
    assert result.measurement is not None
    assert result.measurement.notes == (note,)
    assert Path("happened").exists()
    assert (rig.folder / "trial-rerun.log").exists()
    assert not rig.left_over()


@pytest.mark.parametrize(
    ("outcome", "code", "was_oom_killed", "expected"),
    [
        ("crashed", -signal.SIGKILL, False, KILLED),
        ("crashed", -signal.SIGKILL, True, None),
        ("crashed", -signal.SIGSEGV, False, None),
        ("crashed", None, False, None),
        ("host_oom", 0, False, KILLED),
        ("host_oom", 0, True, None),
        ("ok", -signal.SIGKILL, False, None),
    ],
)
def test_only_a_kill_that_nobody_here_has_sent_is_somebody_elses(
    outcome: Outcome, code: int | None, was_oom_killed: bool, expected: object
) -> None:
    report = RankReport(result=TrialResult(outcome=outcome, reason=LOST_WORKER))
    exit_ = Exit(code=code, codes=(code,), was_oom_killed=was_oom_killed, wall_s=1.0)
    assert disturbance_of(report, exit_) == expected


@pytest.mark.parametrize(
    ("signature", "through", "expected"),
    [
        (
            "ConnectionResetError at connection.py:395",
            "torch/multiprocessing/reductions.py",
            KILLED,
        ),
        ("EOFError at reduction.py:164", "torch/multiprocessing/reductions.py", KILLED),
        ("FileNotFoundError at connection.py:630", "torch/multiprocessing/reductions.py", KILLED),
        ("ConnectionResetError at connection.py:395", "my/connection.py", None),
        ("ValueError at reduction.py:12", "torch/multiprocessing/reductions.py", None),
    ],
)
def test_a_worker_that_is_gone_before_the_system_tells_it_was_killed(
    signature: str, through: str, expected: object
) -> None:
    failure = Failure(
        signature=signature, traceback=f'  File "/x/{through}", line 7, in rebuild_storage_fd'
    )
    report = RankReport(result=TrialResult(outcome="crashed", reason="as it was", failure=failure))
    assert disturbance_of(report, Exit(code=0, wall_s=1.0)) == expected


@pytest.mark.parametrize(
    ("reason", "cause", "expected"),
    [
        (
            "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly",
            "_queue.Empty",
            KILLED,
        ),
        (
            "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
            "RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details are lost",
            None,
        ),
        ("RuntimeError: worker (pid(s) 7) exited unexpectedly", "_queue.Empty", None),
    ],
    ids=["its code unknown", "its code known", "another library's"],
)
def test_a_worker_whose_end_nobody_saw_may_have_been_killed(
    reason: str, cause: str, expected: object
) -> None:
    failure = Failure(
        signature="RuntimeError at dataloader.py:1304", traceback=f"{cause}\n\n{reason}"
    )
    report = RankReport(result=TrialResult(outcome="crashed", reason=reason, failure=failure))
    assert disturbance_of(report, Exit(code=0, wall_s=1.0)) == expected


def _named(name: str) -> Ref:
    return Ref(target=f"{CODE}:{name}")
