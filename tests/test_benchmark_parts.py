"""benchmarks/gpu.py: no part can take the others with it, and what was measured stays until it is measured anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # scripts that stand beside each other, not a package

import gpu
from gpu import PARTS, Part, run_parts, wanted_parts
from gpu_scale import SMOKE, Task
from part_guard import Figures, Keep, run_guarded
from recording import Recording, read_results

LONG_S = 60.0


def test_figures_of_a_part_come_back_those_kept_on_the_way_included() -> None:
    def work(keep: Keep) -> Figures:
        keep({"first": 1, "second": 1})
        return {"second": 2}

    assert run_guarded(work, limit_s=LONG_S) == {"first": 1, "second": 2}


def test_a_part_that_raises_is_written_down_with_its_traceback_and_what_it_kept() -> None:
    def work(keep: Keep) -> Figures:
        keep({"first": 1})
        raise KeyError("no such kernel")

    figures = run_guarded(work, limit_s=LONG_S)
    assert figures["first"] == 1
    assert figures["error"].splitlines()[-1] == "KeyError: 'no such kernel'"


def test_a_part_that_dies_is_written_down_with_what_it_kept() -> None:
    def work(keep: Keep) -> Figures:
        keep({"first": 1})
        os.kill(os.getpid(), signal.SIGSEGV)
        return {}

    figures = run_guarded(work, limit_s=LONG_S)
    assert figures["first"] == 1
    assert "ended with -11" in figures["error"]
    assert "test_benchmark_parts.py" in figures["error"], "where it stood"


def test_figures_that_json_does_not_know_are_a_failure_of_the_part() -> None:
    assert "TypeError" in run_guarded(lambda _: {"value": object()}, limit_s=LONG_S)["error"]


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_part_that_hangs_is_ended_with_all_that_it_has_started(is_deaf: bool, tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def work(keep: Keep) -> Figures:
        if is_deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a call that never comes back to Python
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        noted.write_text(str(child.pid))
        keep({"first": 1})
        child.wait()
        return {}

    figures = run_guarded(work, limit_s=2.0)
    assert figures["first"] == 1
    assert figures["error"].splitlines()[-1] == "TimeoutError: the part took more than 2 s"
    assert "in work" in figures["error"], "where it stood"
    pid = int(noted.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """A file that holds an earlier run's parts."""
    recording = Recording(benchmark="gpu", arguments={}, machine={}, path=tmp_path / "gpu.json", started="now")
    recording.add("trial", {"value": 1})
    recording.add("jpeg", {"value": 2})
    return recording


def written(recording: Recording) -> Figures:
    results: Figures = json.loads(recording.path.read_text())["results"]
    return results


def part(run: object, seconds: float = 10.0) -> Part:
    return Part(run=run, seconds=seconds, most_s=20.0, proves="nothing")  # type: ignore[arg-type] # a lambda


def test_a_run_replaces_the_parts_it_was_given_and_keeps_the_others(recording: Recording) -> None:
    run_parts({"jpeg": part(lambda _: {"value": 3})}, recording, SMOKE, budget_s=LONG_S)
    results = written(recording)
    assert results["trial"] == {"value": 1}
    assert results["jpeg"]["value"] == 3
    assert {"revision", "at", "wall_s", "given_s"} <= results["jpeg"].keys()
    assert read_results(recording.path, fresh=False) == results


def test_a_part_that_fails_leaves_the_next_its_turn_and_is_in_the_file_by_then(recording: Recording) -> None:
    def fail(_: Task) -> Figures:
        raise RuntimeError("broken")

    def look(_: Task) -> Figures:
        return {"seen": written(recording)["gpt2"]["error"].splitlines()[-1]}

    run_parts({"gpt2": part(fail), "nccl": part(look)}, recording, SMOKE, budget_s=LONG_S)
    assert written(recording)["nccl"]["seen"] == "RuntimeError: broken"


def test_a_part_without_time_is_written_down_as_skipped(recording: Recording) -> None:
    run_parts({"gpt2": part(lambda _: {}, seconds=100.0)}, recording, SMOKE, budget_s=1.0)
    assert "no time" in written(recording)["gpt2"]["skipped"]


def test_time_that_a_part_has_left_goes_to_the_next(recording: Recording) -> None:
    given = part(lambda task: {"seconds": task.seconds})
    run_parts({"gpt2": given, "nccl": given}, recording, SMOKE, budget_s=24.0)
    results = written(recording)
    assert results["gpt2"]["seconds"] == pytest.approx(12, abs=0.5)
    assert results["nccl"]["seconds"] == 20.0, "all that is left, up to its own most"


def test_parts_that_are_named_run_anew_and_else_those_without_figures() -> None:
    results = {"machine": {}, "trial": {"error": "gone"}, "starved": {"skipped": "no time"}}
    assert wanted_parts(results, ["nccl", "machine"]) == ["machine", "nccl"]
    assert wanted_parts(results, []) == [name for name in PARTS if name != "machine"]


def test_shares_of_a_whole_run_leave_it_under_nine_minutes() -> None:
    assert gpu._BUDGET_S + gpu._GRACE_S < 9 * 60, "the last part may overrun"


def test_a_promise_that_was_not_kept_is_told_by_the_exit_code_one_not_judged_is_not(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exit_code(**promises: bool | None) -> int:
        recording.add("trial", {"promises": promises})
        return gpu.main()

    monkeypatch.setattr(gpu, "start_recording", lambda *_: recording)
    monkeypatch.setattr(gpu, "describe_machine", lambda _: {})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--summary"])
    assert exit_code(kept=True, not_judged=None) == 0
    assert exit_code(kept=True, broken=False) == 1


def test_a_wrong_part_is_refused_with_the_names_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "gpt3"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "gpt2" in capsys.readouterr().err


def test_a_task_knows_what_is_left_of_its_time(tmp_path: Path) -> None:
    task = Task(scale=SMOKE, seconds=5.0, folder=tmp_path, keep=lambda _: None)
    sleep(0.01)
    assert 0 < task.left_s < 5.0
