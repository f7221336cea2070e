"""Trials that share a process: one build for all, every fault costs one trial, and nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import psutil
import pytest

from autotune.config.plan import Ref, Workload
from autotune.config.training_config import TrainingConfig
from autotune.launch import processes
from autotune.launch.launcher import Exit, Launch, is_sharing
from autotune.launch.local import LocalLauncher
from autotune.launch.processes import Ranks
from autotune.launch.runner import TrialRunner
from autotune.policy import POLICY, WindowRules
from autotune.protocol.messages import Extras
from autotune.protocol.payload import write_payload
from autotune.records.measurement import Block, MemoryLimits
from autotune.records.trial import TrialResult
from tests.launch.conftest import GENEROUS_S, SHORT, forked_first, in_user_code, sharing
from tests.launch.user_series import CRASHES, DIES, HANGS

USER_SERIES = Path(__file__).with_name("user_series.py")


@pytest.fixture
def warm(
    fork_server: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalLauncher]:
    """A launcher of warm workers over the fork server; nothing of it may be left."""
    monkeypatch.chdir(tmp_path)
    with sharing(fork_server):
        yield fork_server


@pytest.fixture
def any_warm(
    any_launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalLauncher]:
    """The same over each launcher in turn."""
    monkeypatch.chdir(tmp_path)
    with sharing(any_launcher):
        yield any_launcher


def runner_of(
    launcher: LocalLauncher, dataset: Ref | None = None, *, model: str | None = None
) -> TrialRunner:
    """A runner of the telling model, or of one from user_code.py, in the working directory."""
    folder, telling = Path.cwd(), Ref(target=f"{USER_SERIES}:telling")
    (folder / "payload").mkdir(exist_ok=True)
    own = in_user_code(model) if model else telling
    write_payload(Workload(model=own, dataset=dataset or in_user_code("pairs")), folder / "payload")
    return TrialRunner(
        launcher=launcher,
        payload=folder / "payload",
        scratch=folder,
        logs=folder,
        device="cpu",
        seed=0,
    )


def run(runner: TrialRunner, deadline_s: float = GENEROUS_S, **settings: Any) -> TrialResult:
    """One trial."""
    config = TrainingConfig(**({"micro_batch_size": 4} | settings))
    return runner.run(config, name="trial", deadline_s=deadline_s, window=SHORT)


def told() -> list[str]:
    """Lines that the model has written: a build, or pid, batch and bias at the start of a training."""
    return Path("told").read_text().splitlines()


def pids() -> list[str]:
    return [line.split()[0] for line in told() if line != "built"]


def earlier_of(results: list[TrialResult]) -> list[int]:
    """How many trials each had before it in its process."""
    measured = [result.measurement for result in results]
    return [-1 if one is None else one.earlier_trials for one in measured]


@forked_first
def test_trials_share_a_process_that_builds_once(any_warm: LocalLauncher) -> None:
    runner = runner_of(any_warm)
    settings: list[dict[str, Any]] = [
        {},
        {"micro_batch_size": 8, "channels_last": True, "amp_dtype": "bfloat16"},
        {"num_workers": 1, "lr": 0.1},
        {"amp_dtype": "tf32", "intra_op_threads": 1},
        {"grad_accum_steps": 2},
    ]
    results = [run(runner, **one) for one in settings]
    assert [(result.outcome, result.reason) for result in results] == 5 * [("ok", "")]
    assert earlier_of(results) == [0, 1, 2, 3, 4]
    assert told().count("built") == 1
    assert len(set(pids())) == 1
    assert "built" not in Path("trial.log").read_text(), "a log holds what its own trial printed"


def run_until_lost(runner: TrialRunner, see: Callable[[], object] = lambda: None) -> TrialResult:
    """One trial that is stopped early, once it has shown four blocks."""

    def has_lost(blocks: tuple[Block, ...]) -> str | None:
        if len(blocks) < 4:
            return None
        see()
        return "it can't win"

    endless = WindowRules(max_s=600.0, precision=1e-9, block_s=0.02)
    config = TrainingConfig(micro_batch_size=4, num_workers=1)
    return runner.run(
        config, name="trial", deadline_s=GENEROUS_S, window=endless, should_end=has_lost
    )


@pytest.mark.slow
def test_trials_that_are_stopped_early_leave_their_process_to_the_next(
    any_warm: LocalLauncher,
) -> None:
    runner = runner_of(any_warm)
    held = []
    for _ in range(3):
        stopped = run_until_lost(runner)
        assert (stopped.outcome, stopped.reason) == ("pruned", "it can't win")
        assert stopped.blocks
        (shared,) = (psutil.Process(int(pid)) for pid in set(pids()))
        assert [
            child.name()
            for child in shared.children()
            if "resource_tracker" not in str(child.cmdline())
        ] == []
        held.append(shared.num_fds())
    assert held[2] <= held[1]
    assert earlier_of([run(runner)]) == [3]
    assert told().count("built") == 1


@pytest.mark.slow
def test_a_process_that_begins_with_a_guard_draws_and_trains_as_a_new_one_does(
    warm: LocalLauncher,
) -> None:
    runner = runner_of(warm)
    warm.is_sharing = False
    assert run(runner).outcome == "ok"
    warm.is_sharing = True
    half = TrainingConfig(micro_batch_size=4, amp_dtype="bfloat16", lr=10.0)
    assert runner.guard(half, name="guard", deadline_s=GENEROUS_S).guard is not None
    assert run(runner).outcome == "ok"
    begun = [line.split(maxsplit=1) for line in told() if line != "built"]
    assert begun[0][0] != begun[-1][0]
    assert begun[0][1] == begun[-1][1], "batch, weights and layout"


@pytest.mark.slow
def test_one_that_hangs_once_it_is_to_end_is_ended_with_its_process(
    warm: LocalLauncher,
) -> None:
    impatient = replace(POLICY, ending=replace(POLICY.ending, block_within_s=0.5))
    runner = replace(runner_of(warm, Ref(target=f"{USER_SERIES}:stalling_later")), policy=impatient)
    stopped = run_until_lost(runner, see=Path("now").touch)
    assert (stopped.outcome, stopped.reason) == ("pruned", "it can't win")
    assert stopped.wall_s < GENEROUS_S
    Path("now").unlink()
    assert earlier_of([run(runner)]) == [0]


@pytest.mark.slow
def test_one_that_fails_after_others_may_be_stopped_early_when_it_is_run_again(
    warm: LocalLauncher,
) -> None:
    runner = runner_of(warm, Ref(target=f"{USER_SERIES}:read_once"))
    assert run(runner).outcome == "ok"
    again = run_until_lost(runner)
    assert (again.outcome, again.reason) == ("pruned", "it can't win")
    assert len(set(pids())) == 2


@pytest.mark.slow
def test_guards_and_curves_run_in_the_same_process_and_extras_too(warm: LocalLauncher) -> None:
    runner = runner_of(warm)
    config = TrainingConfig(micro_batch_size=4)
    extras = Extras(
        loader_ceiling=True, device_ceiling=True, breakdown=True, activations=True, stretch_s=0.05
    )
    first = runner.run(config, name="trial", deadline_s=GENEROUS_S, window=SHORT, extras=extras)
    half = config.model_copy(update={"amp_dtype": "bfloat16"})
    guard = runner.guard(half, name="guard", deadline_s=GENEROUS_S)
    curves = runner.curves(config, [half], deadline_s=GENEROUS_S, stretch_s=0.05)
    last = run(runner)
    assert first.measurement is not None
    assert first.measurement.breakdown is not None
    assert guard.guard is not None, guard.result.reason
    assert curves.curves is not None, curves.result.reason
    assert not curves.curves.is_cut
    assert earlier_of([first, last]) == [0, 1]
    assert told().count("built") == 1


@pytest.mark.slow
def test_each_begins_with_the_first_weights_in_their_first_layout_and_with_the_first_batch(
    warm: LocalLauncher,
) -> None:
    runner = runner_of(warm)
    for settings in ({}, {"channels_last": True, "lr": 10.0}, {}):
        assert run(runner, **settings).outcome == "ok"
    begun = [line.split(maxsplit=2)[2] for line in told() if line != "built"]
    first, moved, last = begun
    assert first == last
    assert moved.split()[:2] == first.split()[:2], (
        "the bias, from before a large step, and the batch"
    )
    assert moved.split()[2:] != first.split()[2:], "the layout"


@pytest.mark.slow
def test_another_choice_of_algorithms_needs_another_process(warm: LocalLauncher) -> None:
    runner = runner_of(warm)
    results = [run(runner, cudnn_benchmark=is_on) for is_on in (False, True, True)]
    assert earlier_of(results) == [0, 0, 1]


@pytest.mark.slow
def test_what_a_shared_process_cannot_change_has_its_own_and_ends_the_shared_one(
    warm: LocalLauncher,
) -> None:
    runner = runner_of(warm)
    results = [run(runner), run(runner, strategy="ddp", world_size=2), run(runner)]
    assert [result.reason for result in results] == ["", "", ""]
    assert earlier_of(results) == [0, 0, 0]
    assert len(set(pids())) == 4, "two ranks among them"


@pytest.mark.parametrize(
    ("batch", "reason"),
    [(CRASHES, "ArithmeticError"), pytest.param(DIES, "9", marks=pytest.mark.slow)],
)
def test_a_trial_that_fails_is_tried_as_the_first_of_a_new_process_and_costs_no_other(
    warm: LocalLauncher, batch: int, reason: str
) -> None:
    runner = runner_of(warm)
    results = [run(runner), run(runner, micro_batch_size=batch), run(runner), run(runner)]
    assert [result.outcome for result in results] == ["ok", "crashed", "ok", "ok"]
    assert reason in results[1].reason
    assert earlier_of(results) == [0, -1, 0, 1]
    assert told().count("built") == 3, "the first process, the one that failed again, and the third"
    once_more = [run(runner, micro_batch_size=batch), run(runner)]
    assert [result.outcome for result in once_more] == ["crashed", "ok"]
    assert told().count("built") == 4, "what has failed twice is not tried twice again"
    assert not warm.notes


def test_a_trial_that_hangs_ends_at_its_deadline_and_the_next_has_a_new_process(
    warm: LocalLauncher,
) -> None:
    runner = runner_of(warm)
    assert run(runner).outcome == "ok"
    hung = run(runner, micro_batch_size=HANGS, deadline_s=2.0)
    assert hung.outcome == "timeout"
    assert 2 <= hung.wall_s < 30
    after = run(runner)
    assert earlier_of([after]) == [0]


@pytest.mark.slow
def test_after_a_device_is_lost_curves_go_on_in_a_new_process(warm: LocalLauncher) -> None:
    runner = runner_of(warm, model="losing_the_device_at_8")
    own = TrainingConfig(micro_batch_size=4)
    sizes = [own.model_copy(update={"micro_batch_size": size}) for size in (8, 2)]
    report = runner.curves(own, sizes, deadline_s=GENEROUS_S, stretch_s=0.01)
    assert report.curves is not None
    assert not report.curves.is_cut
    assert [point.ceiling is not None for point in report.curves.device] == [True, False, True]
    assert earlier_of([run(runner)]) == [0]
    assert len({line.split()[0] for line in Path("sizes").read_text().splitlines()}) == 2


@pytest.mark.slow
def test_one_that_somebody_kills_is_measured_anew(warm: LocalLauncher) -> None:
    runner = runner_of(warm)
    assert run(runner).outcome == "ok"
    first = int(pids()[0])

    window = WindowRules(max_s=5.0, precision=0.0, block_s=0.01)
    killer = Thread(target=kill_in_training, args=(first, len(pids()) + 1))
    killer.start()
    again = runner.run(
        TrainingConfig(micro_batch_size=4), name="trial", deadline_s=GENEROUS_S, window=window
    )
    killer.join()
    assert again.outcome == "ok"
    assert again.measurement is not None
    assert again.measurement.earlier_trials == 0
    assert "rerun_after_signal" in {note.code for note in again.measurement.notes}
    assert warm.is_sharing
    assert not warm.notes


def kill_in_training(pid: int, trainings: int) -> None:
    """Kill a process once so many trainings have begun."""
    while len(pids()) < trainings:
        sleep(0.01)
    psutil.Process(pid).send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_what_can_be_read_once_has_processes_of_its_own_from_then_on(
    warm: LocalLauncher,
) -> None:
    runner = runner_of(warm, Ref(target=f"{USER_SERIES}:read_once"))
    results = [run(runner) for _ in range(4)]
    assert [(result.outcome, result.reason) for result in results] == 4 * [("ok", "")]
    assert earlier_of(results) == [0, 0, 0, 0]
    (note,) = warm.notes
    assert note.code == "trials_cannot_share"
    kept = Path("trial-shared.log")
    assert str(note.figures["log"]).endswith(f"/{kept.name}")
    assert kept.read_bytes() != Path("trial.log").read_bytes()


@pytest.mark.slow
def test_ctrl_c_ends_the_shared_process(warm: LocalLauncher) -> None:
    runner = runner_of(warm)
    window = WindowRules(max_s=60.0, precision=0.0, block_s=0.01)
    with (
        pytest.raises(KeyboardInterrupt),
        interrupted_once(lambda: bool(pids()) if Path("told").exists() else False),
    ):
        runner.run(
            TrainingConfig(micro_batch_size=4), name="trial", deadline_s=GENEROUS_S, window=window
        )
    assert not psutil.pid_exists(int(pids()[0]))


@contextmanager
def interrupted_once(is_time: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C in this thread as soon as it is time."""

    def watch() -> None:
        while not is_time():
            sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        watcher.join()


@pytest.mark.slow
def test_the_first_job_tells_what_building_took_and_a_probe_counts_as_no_trial(
    warm: LocalLauncher,
) -> None:
    runner = runner_of(warm)
    probe = runner.probe(TrainingConfig(micro_batch_size=4), deadline_s=GENEROUS_S)
    assert probe.workload_build_s is not None
    assert probe.workload_build_s > 0
    assert earlier_of([run(runner), run(runner)]) == [0, 1]
    assert told().count("built") == 1


@pytest.mark.slow
def test_what_is_printed_is_kept_though_the_process_is_ended_at_once(
    warm: LocalLauncher,
) -> None:
    run(runner_of(warm))
    warm.end_shared()
    assert Path("trial.log").read_text().count("built") == 1


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_in_a_later_trial_too(warm: LocalLauncher) -> None:
    runner = runner_of(warm, Ref(target=f"{USER_SERIES}:dying_later"))
    assert [run(runner, num_workers=1).outcome for _ in range(2)] == ["ok", "ok"]
    Path("now").touch()
    killed = run(runner, num_workers=1)
    assert killed.outcome == "host_oom", killed.reason


@pytest.mark.slow
def test_weights_that_are_kept_aside_are_none_of_a_trials_memory(warm: LocalLauncher) -> None:
    runner = runner_of(warm, model="of_200_mib")
    shared = run(runner)
    warm.is_sharing = False
    alone = run(runner)
    assert shared.measurement is not None
    assert alone.measurement is not None
    assert shared.measurement.peak_memory_bytes < alone.measurement.peak_memory_bytes + 100 * 2**20


@pytest.mark.slow
def test_weights_that_are_kept_are_allowed_for_in_the_next_process_too(
    warm: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, own = list[int](), Ranks.follow

    def follow(self: Ranks, launch: Launch, kept_bytes: int = 0) -> Exit:
        allowed.append(kept_bytes)
        return own(self, launch, kept_bytes)

    monkeypatch.setattr(Ranks, "follow", follow)
    runner = runner_of(warm, model="of_200_mib")
    run(runner)
    warm.end_shared()
    run(runner)
    assert allowed[-1] > 100 * 2**20


@pytest.mark.slow
def test_free_ram_is_noted_before_the_first_trial_alone(
    warm: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, own = list[int](), processes._RamWatch

    def watch(ceiling_bytes: int | None, next_check: float, free_bytes: int) -> processes._RamWatch:
        noted.append(free_bytes)
        return own(ceiling_bytes, next_check, free_bytes)

    monkeypatch.setattr(processes, "_RamWatch", watch)
    runner = runner_of(warm)
    assert earlier_of([run(runner), run(runner)]) == [0, 1]
    assert noted[0] == noted[1]


@pytest.mark.slow
def test_what_is_quick_to_build_has_processes_of_its_own(
    fork_server: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with sharing(fork_server, from_s=3600.0):
        runner = runner_of(fork_server)
        assert fork_server.is_sharing, "as far as is known"
        runner.probe(TrainingConfig(micro_batch_size=4), deadline_s=GENEROUS_S)
        assert not is_sharing(fork_server)
        assert earlier_of([run(runner), run(runner)]) == [0, 0]
    assert told().count("built") == 3


@pytest.mark.slow
def test_a_limit_that_is_known_later_holds_in_the_same_process(warm: LocalLauncher) -> None:
    runner = runner_of(warm)
    assert run(runner).outcome == "ok"
    narrow = replace(
        runner, limits=MemoryLimits(limit_bytes=2**20, ram_bytes=2**36, limit_is_ram=True)
    )
    window = WindowRules(max_s=30.0, precision=0.0, block_s=0.01)
    over = narrow.run(
        TrainingConfig(micro_batch_size=4), name="trial", deadline_s=GENEROUS_S, window=window
    )
    assert over.outcome == "host_oom"
    assert earlier_of([run(runner)]) == [0]
