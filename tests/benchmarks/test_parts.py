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

from autotune.config.training_config import TrainingConfig
from autotune.models.memory import MemoryLine, MemoryModel, Peak
from autotune.records.trial import Outcome, TrialResult
from benchmarks import gpu
from benchmarks.gpu import PARTS, Part, parts_that_fit, run_parts, wanted_parts
from benchmarks.measures import (
    gpu_checks,
    gpu_launch,
    gpu_memory,
    gpu_ranks,
    gpu_rates,
    gpu_searches,
    gpu_settings,
    gpu_windows,
    part_guard,
)
from benchmarks.measures.gpu_scale import SMOKE, Task
from benchmarks.measures.part_guard import Figures, Keep, run_guarded
from benchmarks.measures.recording import Recording, git_revision, read_results

LONG_S = 60.0
GIB = 1 << 30


def test_figures_of_a_part_come_back_those_kept_on_the_way_included() -> None:
    def work(keep: Keep) -> Figures:
        keep({"first": 1, "second": 1})
        return {"second": 2}

    assert run_guarded(work, limit_s=LONG_S) == {"first": 1, "second": 2}


def test_a_part_within_a_part_comes_to_its_end() -> None:
    def work(keep: Keep) -> Figures:
        return {"outer": 1, **run_guarded(lambda _: {"inner": 2}, limit_s=LONG_S / 2)}

    assert run_guarded(work, limit_s=LONG_S) == {"outer": 1, "inner": 2}


def test_a_part_that_raises_is_written_down_with_its_traceback_and_what_it_kept() -> None:
    def work(keep: Keep) -> Figures:
        keep({"first": 1})
        raise KeyError("no kernel")

    figures = run_guarded(work, limit_s=LONG_S)
    assert figures["first"] == 1
    assert figures["error"].splitlines()[-1] == "KeyError: 'no kernel'"


def test_a_part_that_dies_is_written_down_with_what_it_kept() -> None:
    def work(keep: Keep) -> Figures:
        keep({"first": 1})
        signal.raise_signal(signal.SIGSEGV)  # to this thread, at once
        return {}

    figures = run_guarded(work, limit_s=LONG_S)
    assert figures["first"] == 1
    assert "ended with -11" in figures["error"]
    assert Path(__file__).name in figures["error"], "where it stood"


def test_a_part_that_dies_tells_where_it_stood_whatever_handler_a_library_has_left() -> None:
    code = """
import faulthandler, signal
from benchmarks.measures.part_guard import run_guarded
def die(keep):
    signal.raise_signal(signal.SIGSEGV)
faulthandler.enable()
signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # over that of faulthandler
print(run_guarded(die, limit_s=60.0)["error"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LONG_S
    )
    assert "in die" in done.stdout


def test_figures_that_json_does_not_know_are_a_failure_of_the_part() -> None:
    assert "TypeError" in run_guarded(lambda _: {"value": object()}, limit_s=LONG_S)["error"]


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_part_that_hangs_is_ended_with_all_that_it_has_started(
    is_deaf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_guard, "_ENDS_WITHIN_S", 0.5)
    noted = tmp_path / "pid"

    def work(keep: Keep) -> Figures:
        if is_deaf:
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # as a call that never comes back to Python
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        noted.write_text(str(child.pid))
        keep({"first": 1})
        child.wait()
        return {}

    figures = run_guarded(work, limit_s=2.0)
    assert figures["first"] == 1
    assert figures["error"].splitlines()[-1].startswith("TimeoutError: ")
    assert "in work" in figures["error"], "where it stood"
    pid = int(noted.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """A file that holds an earlier run's parts."""
    recording = Recording(
        benchmark="gpu", arguments={}, machine={}, path=tmp_path / "gpu.json", started="now"
    )
    recording.add("trial", {"value": 1})
    recording.add("jpeg", {"value": 2})
    return recording


def written(recording: Recording) -> Figures:
    results: Figures = json.loads(recording.path.read_text())["results"]
    return results


def part(run: object, needs_s: float = 10.0) -> Part:
    return Part(run=run, needs_s=needs_s, most_s=20.0, proves="nothing")  # type: ignore[arg-type] # a lambda


def test_a_run_replaces_the_parts_it_was_given_and_keeps_the_others(recording: Recording) -> None:
    run_parts({"jpeg": part(lambda _: {"value": 3})}, recording, SMOKE, budget_s=LONG_S)
    results = written(recording)
    assert results["trial"] == {"value": 1}
    assert results["jpeg"]["value"] == 3
    assert {"revision", "at", "wall_s", "given_s"} <= results["jpeg"].keys()
    assert read_results(recording.path, fresh=False) == results


def test_a_part_that_fails_leaves_the_next_its_turn_and_is_in_the_file_by_then(
    recording: Recording,
) -> None:
    def fail(_: Task) -> Figures:
        raise RuntimeError("broken")

    def look(_: Task) -> Figures:
        return {"seen": written(recording)["gpt2"]["error"].splitlines()[-1]}

    run_parts({"gpt2": part(fail), "nccl": part(look)}, recording, SMOKE, budget_s=LONG_S)
    assert written(recording)["nccl"]["seen"] == "RuntimeError: broken"


def test_a_part_without_the_time_it_needs_is_skipped_and_a_smaller_one_behind_it_runs(
    recording: Recording,
) -> None:
    parts = {"gpt2": part(lambda _: {}, needs_s=100.0), "nccl": part(lambda _: {"value": 3})}
    run_parts(parts, recording, SMOKE, budget_s=15.0)
    assert "needs 100 s" in written(recording)["gpt2"]["skipped"]
    assert written(recording)["nccl"]["value"] == 3


def test_a_part_without_time_keeps_the_figures_that_it_has(recording: Recording) -> None:
    run_parts({"trial": part(lambda _: {}, needs_s=100.0)}, recording, SMOKE, budget_s=1.0)
    assert recording.results["trial"] == {"value": 1}


def test_the_parts_that_fill_the_time_best_are_chosen_earlier_ones_counting_for_more() -> None:
    needs = {"first": 30.0, "second": 100.0, "third": 60.5, "fourth": 20.0}
    parts = {name: part(None, needs_s) for name, needs_s in needs.items()}
    assert parts_that_fit(parts, 400.0) == list(parts)
    assert parts_that_fit(parts, 135.0) == ["first", "second"], (
        "by the order, though three others take 111 s"
    )
    assert parts_that_fit(parts, 120.0) == ["second", "fourth"], "the first would leave 29 s unused"
    assert parts_that_fit(parts, 60.4) == ["first", "fourth"], "what a part needs is there in full"
    assert parts_that_fit(parts, 19.9) == []
    assert parts_that_fit(parts, -1.0) == []
    assert parts_that_fit({}, 100.0) == []


def test_a_part_is_given_what_the_others_that_fit_leave_up_to_its_most(
    recording: Recording,
) -> None:
    parts = {"gpt2": part(lambda _: {}), "nccl": part(lambda _: {})}
    run_parts(parts, recording, SMOKE, budget_s=25.0)
    assert written(recording)["gpt2"]["given_s"] <= 15.0


def test_what_a_part_has_kept_lies_beside_the_json_until_the_part_is_in_it(
    recording: Recording,
) -> None:
    beside = recording.path.with_suffix("") / "gpt2.kept.json"

    def work(task: Task) -> Figures:
        task.keep({"first": 1})
        return {"beside": json.loads(beside.read_text())}

    run_parts({"gpt2": part(work)}, recording, SMOKE, budget_s=LONG_S)
    assert written(recording)["gpt2"]["beside"] == {"first": 1}
    assert not beside.exists()


def test_parts_that_are_named_run_anew_and_else_those_without_figures_then_those_that_failed() -> (
    None
):
    results = {"machine": {}, "trial": {"error": "gone"}, "starved": {"skipped": "no time"}}
    assert list(wanted_parts(results, ["nccl", "machine"])) == ["machine", "nccl"]
    assert list(wanted_parts(results, [])) == [
        name for name in PARTS if name not in {"machine", "trial"}
    ] + ["trial"]


def test_what_was_not_judged_runs_again_where_it_can_be_given_more_time_and_only_then() -> None:
    results = {name: Figures() for name in PARTS}
    short = {"why_not_judged": "too few pairs", "given_s": 200.0}
    wanted = wanted_parts({**results, "fidelity": short, "baselines": {"promises": {}}}, [])
    assert list(wanted) == ["fidelity"]
    assert wanted["fidelity"].needs_s > 200.0
    assert not wanted_parts(
        {**results, "fidelity": {**short, "given_s": PARTS["fidelity"].most_s}}, []
    )


def test_a_call_ends_within_nine_minutes_and_has_time_for_each_part() -> None:
    ended_s = part_guard._ENDS_WITHIN_S + part_guard._GONE_WITHIN_S
    assert gpu._BUDGET_S + gpu._GRACE_S + ended_s < 9 * 60 - 10, (
        "the last part may overrun; imports come first"
    )
    before_s = 30.0  # the machine is described
    assert all(
        one.needs_s <= one.most_s and one.needs_s <= gpu._BUDGET_S - before_s
        for one in PARTS.values()
    )


def calls_for_everything(takes: str) -> int:
    """Calls until every part has run, where each takes the least or the most that it may."""
    left, calls = dict(PARTS), 0
    while left:
        left_s = gpu._BUDGET_S - 30.0
        while chosen := parts_that_fit(left, left_s):
            one = left.pop(chosen[0])
            for_others_s = sum(left[name].needs_s for name in chosen[1:])
            left_s -= one.needs_s if takes == "least" else min(one.most_s, left_s - for_others_s)
        calls += 1
    return calls


def test_the_page_says_how_many_calls_prove_everything() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    numbers = {4: "four", 5: "five", 6: "six"}
    least, most = (numbers[calls_for_everything(takes)] for takes in ("least", "most"))
    assert (
        f"Everything takes {least} calls{'' if least == most else f', {most} at the most'}." in page
    )


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


def test_the_list_says_what_was_never_run_and_what_was_never_judged() -> None:
    states = {
        "never run": None,
        "skipped": {"skipped": "no time"},
        "failed": {"error": "gone", "promises": {"one": True}},
        "not judged": {"promises": {"one": True, "other": None}},
        "broken": {"promises": {"one": False, "other": None}},
        "kept": {"promises": {"one": True}},
        "recorded": {"value": 1},
    }
    assert [gpu._state(one) for one in states.values()] == list(states)


def test_a_model_that_is_not_updated_does_not_train_as_eager() -> None:
    eager = [10.99 - 0.01 * step for step in range(20)]
    once_in_two_steps = [10.99 - 0.005 * step for step in range(20)]
    assert gpu_settings.deviation(eager, eager) == 0
    assert gpu_settings.deviation([10.99] * 20, eager) > gpu_settings._MOST_DEVIATION
    assert gpu_settings.deviation(once_in_two_steps, eager) > gpu_settings._MOST_DEVIATION


@pytest.mark.parametrize(("within_s", "told"), [(0.01, False), (LONG_S, None)])
def test_a_default_search_that_is_cut_off_is_judged_once_five_minutes_are_over(
    within_s: float, told: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_searches, "_DEFAULT_WITHIN_S", within_s)
    monkeypatch.setattr(gpu_searches, "search", lambda *_, **__: sleep(LONG_S))
    task = Task(scale=SMOKE, seconds=0.05, folder=tmp_path, keep=lambda _: None)
    assert gpu_searches.search_by_default(task)["promises"] == {"ends_within_5_minutes": told}


@pytest.mark.parametrize(
    ("model_s", "is_possible"),
    [(5e-3, True), (3e-3, False), (20e-3, False)],
    ids=["between", "faster than all workers", "busy without workers"],
)
def test_a_model_that_cannot_go_from_idle_to_busy_is_not_judged(
    model_s: float, is_possible: bool
) -> None:
    assert (gpu_searches._why_no_size(model_s, [45e-3, 3e-3]) is None) is is_possible


@pytest.mark.parametrize(
    ("busy", "limit", "told"),
    [
        ({"baseline": 0.7, "recommended": 0.97}, "host", (True, True)),
        ({"baseline": 0.7, "recommended": 0.8}, "host", (True, False)),
        ({"baseline": 0.7, "recommended": 0.97}, "device", (False, True)),
        ({"baseline": 0.95, "recommended": 0.97}, "host", (None, None)),
        ({"source": None}, "host", (None, None)),
    ],
    ids=["called and cured", "not cured", "not called", "not launch-bound here", "unseen"],
)
def test_a_loop_held_by_launching_is_to_be_called_so_and_cured(
    busy: Figures, limit: str | None, told: tuple[bool | None, bool | None]
) -> None:
    verdict = gpu_searches._launch_verdict(busy, limit, None)
    assert tuple(verdict["promises"].values()) == told
    assert (verdict["why_not_judged"] is None) is (None not in told)


@pytest.mark.parametrize(
    ("short", "told"),
    [([100.2, 47.9, 74.9], True), ([90.0, 45.0, 67.0], False), ([94.0, 52.0, 75.0], None)],
    ids=["alike in each round", "less in each round", "now less, now more"],
)
def test_blocks_are_judged_by_the_ratios_of_rounds_whatever_the_machines_speed_does_between_them(
    short: list[float], told: bool | None
) -> None:
    rounds = [
        {"0.2 s": one, "1.0 s": long} for one, long in zip(short, [100.0, 48.0, 75.0], strict=True)
    ]
    failed = {"0.2 s": 1.0}
    mean = gpu_windows._short_over_long([*rounds, failed])
    assert mean is not None
    assert mean.is_one_within(0.01) is told
    assert gpu_windows._short_over_long([failed]) is None


def test_a_single_round_judges_nothing() -> None:
    mean = gpu_windows._short_over_long([{"0.2 s": 100.0, "1.0 s": 100.0}])
    assert mean is not None
    assert mean.is_one_within(0.01) is None


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ({"a": "ok", "b": "ok"}, True),
        ({"a": "ok", "b": None}, None),
        ({"a": "crashed", "b": None}, False),
    ],
    ids=["all", "one unknown", "one against it"],
)
def test_a_precision_that_never_came_to_its_end_is_no_verdict(
    outcomes: dict[str, str | None], verdict: bool | None
) -> None:
    assert gpu_checks._all_ended(outcomes, "ok") is verdict


PEAKS = [
    Peak(TrainingConfig(micro_batch_size=batch), peak * GIB) for batch, peak in ((4, 5), (8, 6))
]
LINE = MemoryLine(
    model=MemoryModel(observed=PEAKS, has_workers_in_ram=False),
    config=TrainingConfig(),
    batches=(4, 8),
)


@pytest.mark.parametrize(
    ("outcome", "limit", "holds"),
    [("oom", 7 * GIB, True), ("oom", 40 * GIB, False), ("timeout", 40 * GIB, None)],
    ids=["near the limit", "far below the limit", "cut off"],
)
def test_a_batch_that_the_line_put_far_below_the_limit_must_not_be_out_of_memory(
    outcome: Outcome, limit: int, holds: bool | None
) -> None:
    assert gpu_memory._prediction(LINE, 16, TrialResult(outcome=outcome), limit)["holds"] is holds


def test_ranks_without_time_for_a_trial_are_skipped_not_judged(tmp_path: Path) -> None:
    task = Task(scale=SMOKE, seconds=0.1, folder=tmp_path, keep=lambda _: None)
    assert list(gpu_ranks.check_ranks(task)) == ["skipped"]


def test_pairs_and_plain_loops_without_time_are_skipped_not_judged(tmp_path: Path) -> None:
    for part in (gpu_rates.compare_to_plain, gpu_rates.measure_baselines):
        assert list(part(Task(scale=SMOKE, seconds=0.1, folder=tmp_path, keep=lambda _: None))) == [
            "skipped"
        ]


def test_regimes_of_launching_are_chosen_by_name_and_one_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: object) -> Figures:
        raise RuntimeError("no graph")

    def tell_process(_: object) -> Figures:
        return {"pid": os.getpid()}

    regimes = [
        gpu_launch.Regime(name="first", run=tell_process),
        gpu_launch.Regime(name="second", run=tell_process),
        gpu_launch.Regime(name="left", run=tell_process),
        gpu_launch.Regime(name="alone", run=tell_process, is_alone=True),
        gpu_launch.Regime(name="broken", run=fail, is_alone=True),
        gpu_launch.Regime(name="last", run=tell_process),
    ]
    monkeypatch.setattr(gpu_launch, "REGIMES", regimes)
    asked = ["last", "first", "second", "alone", "broken"]
    task = Task(scale=SMOKE, seconds=LONG_S, folder=tmp_path, keep=lambda _: None, regimes=asked)
    found = gpu_launch.measure_launching(task)
    process = {name: figures["pid"] for name, figures in found["regimes"].items()}
    assert list(process) == ["first", "second", "alone", "last"]
    assert process["first"] == process["second"]
    assert len(set(process.values())) == 3
    assert found["left_out"] == list(found["errors"]) == ["broken"]


def test_the_first_four_settings_are_enough_to_judge_what_is_promised_of_fidelity() -> None:
    held_by = [setting.held_by for setting in gpu_rates._SETTINGS[:4]]
    trials = {kind: 2 * held_by.count(kind) for kind in gpu_rates._MOST_BIAS}
    assert min(trials.values()) >= gpu_rates._FEWEST_TRIALS


def test_a_tree_without_git_tells_its_revision_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AUTOTUNE_REVISION", "abc123")
    assert git_revision() == "abc123"


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
