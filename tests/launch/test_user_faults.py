"""Whatever user code does to its trial is an outcome with a reason and a log, and the next trial works.

Over the fork server alone: none of this depends on how the process was started. One process for each kind of outcome
here: what every exit code, signal and exception means is tested on recorded ones, in test_answers.py and
worker/test_place.py.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from autotune.config.training_config import TrainingConfig
from autotune.records.trial import TrialResult
from tests.launch.conftest import USER_CODE, Rig


def test_the_machine_is_described_without_a_workload(rig: Rig) -> None:
    report = rig.runner().describe(deadline_s=60)
    assert report.environment is not None
    assert report.environment.device == "cpu"


def test_an_exception_is_an_outcome_with_the_users_frames_alone(rig: Rig) -> None:
    result = rig.run(model="raising")
    assert result.outcome == "crashed"
    assert result.failure is not None
    assert result.failure.signature == "ValueError at user_code.py:{model}".format(**marked_lines())
    assert "_raise" in result.failure.traceback
    assert "/autotune/worker/" not in result.failure.traceback
    assert result.failure.traceback.encode() in rig.log


def test_after_a_process_that_was_killed_the_next_trial_works(rig: Rig) -> None:
    result = rig.run(model="killing_itself")
    assert result.outcome == "crashed"
    assert "SIGKILL" in result.reason
    assert result.log is not None
    rig.assert_next_trial_works()


@pytest.mark.slow
def test_a_segmentation_fault_is_logged_with_its_place(rig: Rig) -> None:
    result = rig.run(model="segfaulting")
    assert result.outcome == "crashed"
    assert "SIGSEGV" in result.reason
    assert b"user_code.py" in rig.log


@pytest.mark.slow
@pytest.mark.parametrize("model", ["closing_streams_and_raising", "killing_its_parent"])
def test_an_end_of_its_process_is_a_crash_and_the_next_trial_works(rig: Rig, model: str) -> None:
    result = rig.run(model=model)
    assert result.outcome == "crashed"
    assert result.log is not None
    rig.assert_next_trial_works()


def test_the_signature_of_a_loader_workers_failure_is_its_type_and_the_users_line(rig: Rig) -> None:
    result = rig.run(dataset="raising_item", settings={"num_workers": 2})
    assert result.outcome == "crashed"
    assert result.failure is not None
    assert result.failure.signature == "OSError at user_code.py:{item}".format(**marked_lines())
    assert str(Path("autotune", "worker")) not in result.failure.traceback
    assert result.reason.startswith("OSError: item ")


@pytest.mark.parametrize(
    ("model", "outcome"), [("allocating_too_much", "host_oom"), ("filling_the_device", "oom")]
)
def test_an_allocation_that_fails_is_an_outcome_of_the_configuration(
    rig: Rig, model: str, outcome: str
) -> None:
    result = rig.run(model=model)
    assert result.outcome == outcome
    assert result.violation is None, "nobody knows how much was missing"


@pytest.mark.slow
def test_a_flood_of_output_does_not_hide_what_grows(rig: Rig) -> None:
    result = rig.run_limited(600 * 2**20, model="growing_and_printing")
    assert result.outcome == "host_oom"
    rig.assert_next_trial_works()


def test_a_hang_in_a_loader_worker_ends_at_the_deadline_and_the_next_trial_works(rig: Rig) -> None:
    result = rig.run(dataset="hanging_item", settings={"num_workers": 2}, deadline_s=2)
    assert result.outcome == "timeout"
    assert_gone(rig)
    rig.assert_next_trial_works()


@pytest.mark.slow
def test_loader_workers_of_a_killed_rank_are_gone_with_the_trial(rig: Rig) -> None:
    result = rig.run(
        model="killing_itself_with_pid", dataset="noting_items", settings={"num_workers": 2}
    )
    assert result.outcome == "crashed"
    assert_gone(rig)


@pytest.mark.slow
def test_no_shared_memory_of_a_killed_trial_is_left(rig: Rig) -> None:
    result = rig.run(
        model="wide_linear_killing_itself",
        dataset="large_noting_items",
        settings={"num_workers": 2, "prefetch_factor": 4},
    )
    assert "SIGKILL" in result.reason
    pids = assert_gone(rig)
    assert not [
        one for one in Path("/dev/shm").iterdir() if any(f"_{pid}_" in one.name for pid in pids)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["linear", "killing_itself"])
def test_no_socket_of_a_loader_worker_is_left(
    rig: Rig, model: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    result = rig.run(model=model, dataset="noting_sockets", settings={"num_workers": 2})
    assert result.outcome == ("ok" if model == "linear" else "crashed")
    assert Path(rig.note("sockets").splitlines()[0]).parent == places, (
        "not where only a clean end would remove it"
    )
    assert not [*places.iterdir()]


@pytest.mark.slow
def test_a_loader_worker_can_bind_its_socket_however_long_the_name_of_the_temporary_folder(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("long" * 20)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    result = rig.run(dataset="noting_sockets", settings={"num_workers": 2}, deadline_s=30)
    assert result.outcome == "ok", result.reason
    sockets = Path(rig.note("sockets").splitlines()[0])
    assert not sockets.is_relative_to(place)
    assert not sockets.exists()


@pytest.mark.slow
def test_a_daemon_that_bears_nothing_of_its_trial_does_not_outlive_it(rig: Rig) -> None:
    result = rig.run(model="spawning_nameless_daemon")
    assert result.outcome == "ok", result.reason
    assert not Path("/proc", rig.note().strip()).exists()


def test_a_loss_that_is_not_finite_is_divergence(rig: Rig) -> None:
    result = rig.run(loss="not_a_number")
    assert result.outcome == "diverged"
    assert "0.001" in result.reason, "the learning rate"


def test_a_workload_that_can_not_be_used_is_invalid(rig: Rig) -> None:
    report = rig.runner(dataset="nothing").probe(TrainingConfig(micro_batch_size=4), deadline_s=60)
    assert report.result.outcome == "invalid"
    assert report.is_workload_fault


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "closing_streams",
        "closing_descriptors",
        "moving_away",
        "installing_handlers",
        "flooding_the_channel",
    ],
)
def test_what_user_code_does_to_its_own_process_stays_there(rig: Rig, model: str) -> None:
    result = rig.run(model=model)
    assert result.outcome == "ok", result.reason
    rig.assert_next_trial_works()


@pytest.mark.slow
def test_an_exception_is_told_also_where_no_file_can_be_opened_any_more(rig: Rig) -> None:
    result = rig.run(model="using_up_descriptors")
    assert result.outcome == "crashed"
    assert result.failure is not None
    assert result.failure.signature == "ValueError at user_code.py:{model}".format(**marked_lines())
    rig.assert_next_trial_works()


@pytest.mark.slow
def test_a_report_that_can_not_be_written_is_told_as_that(rig: Rig) -> None:
    result = rig.run(model="taking_its_folder_away")
    assert result.outcome == "crashed"
    assert result.failure is None
    assert b"ValueError" in rig.log


@pytest.mark.slow
@pytest.mark.parametrize(("model", "outcome"), [("overwriting", "ok"), ("deleting", "crashed")])
def test_meddling_with_the_trials_folder_is_an_outcome(rig: Rig, model: str, outcome: str) -> None:
    result: TrialResult = rig.run(model=model)
    assert result.outcome == outcome
    rig.assert_next_trial_works()


def assert_gone(rig: Rig) -> set[int]:
    """That no process which wrote its number down runs any more, nor any other of the trial; their numbers."""
    pids = {int(line) for line in rig.note("pids").split()}
    assert len(pids) >= 2
    assert not [pid for pid in pids if runs(pid)]
    assert not rig.left_over()
    return pids


def runs(pid: int) -> bool:
    """Whether there is such a process; one that is dead and that its new parent has yet to read runs no more."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def marked_lines() -> dict[str, int]:
    """The lines of user_code.py that bear a mark, by its name."""
    lines = USER_CODE.read_text().splitlines()
    return {
        line.partition("# MARK: ")[2]: number
        for number, line in enumerate(lines, 1)
        if "# MARK: " in line
    }
