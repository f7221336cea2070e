"""Searches whose trials run at once: the fake launcher as a cluster, held up by events and barriers, never by time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.api.setup import kept_interrupts
from autotune.config.training_config import TrainingConfig
from autotune.errors import LauncherError, RepeatedFailureError, RunFolderError
from autotune.launch.launcher import Exit, Launch
from autotune.messages.search import no_time_for_a_trial, space_exhausted, trials_asked_for
from autotune.protocol.messages import DescribeJob, read_job
from autotune.records.result import Progress
from autotune.records.trial import Failure, TrialRecord, reference_of
from autotune.space import constraints as rules
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost
from autotune.tuning.loop import Search
from tests.factories.searches import FIXED, GIB, NARROW, figures_of, make_search

AT_LAST_S = 60.0  # no test takes this long: a search that does not do what it must ends so
TINY: dict[str, Any] = {
    **FIXED,
    "micro_batch_size": [32, 64],
    "num_workers": [0, 2, 4],
    "channels_last": False,
    "intra_op_threads": None,
    "compile": False,
}


@dataclass(slots=True)
class Watched(FakeLauncher):
    """Knows what runs at once; `before` gets a trial's number, and may hold it up or end it by an exception."""

    before: Callable[[int], object] = lambda _: None
    running: list[str] = field(default_factory=list)
    """Behaviour keys of the jobs that run."""
    most: int = 0
    """Jobs that ran at once, the guard's among them."""
    twice: list[str] = field(default_factory=list)
    """Keys of which two trials ran at once."""
    beside_the_baseline: int = 0
    threads: set[str] = field(default_factory=set)
    repeats: int = 0

    def launch(self, launch: Launch) -> Exit:
        """Note what begins and ends."""
        job = read_job(launch.folder.job)
        assert not isinstance(job, DescribeJob)
        key = f"{job.kind}: {rules.same_behaviour_key(job.config, self.facts, self.environment)}"
        with self._lock:
            self.twice += [key] if key in self.running else []
            self.beside_the_baseline += len(self.running) if not self.launched else 0
            self.running.append(key)
            self.most = max(self.most, len(self.running))
            self.threads.add(threading.current_thread().name)
        try:
            number = launch.log.stem.removeprefix("trial-")
            self.repeats += job.kind == "trial" and not number.isdigit()
            if job.kind == "trial" and number.isdigit():
                self.before(int(number))
            return FakeLauncher.launch(self, launch)
        finally:
            with self._lock:
                self.running.remove(key)


def make_parallel(folder: Path, launcher: FakeLauncher, **more: Any) -> Search:
    """A search with as many slots as its launcher has."""
    search = make_search(folder, launcher, **{**NARROW, **more})
    search.time.slots = lambda: launcher.slots
    return search


def numbers_of(search: Search) -> list[int]:
    return [record.number for record in search.study.records]


def keys_of(search: Search) -> list[str]:
    space = search.space
    configs = (record.config for record in search.study.records)
    return [rules.same_behaviour_key(config, space.facts, space.environment) for config in configs]


def numbers_in(search: Search, state: str) -> list[int]:
    return [trial.number for trial in search.study.optuna_study.trials if trial.state.name == state]


@contextmanager
def let_go(event: threading.Event) -> Iterator[None]:
    """In the end, let go the trials that wait for an event, and wait for their threads, which nobody else does."""
    try:
        yield
    finally:
        event.set()
        for thread in threading.enumerate():
            if thread.name.startswith("autotune-trial"):
                thread.join(AT_LAST_S)


def assert_ends_at_once(
    search: Search, error: type[Exception], never: threading.Event, *, match: str
) -> None:
    """The search raises this, with such words, while a trial waits for what never comes."""
    with let_go(never):
        with pytest.raises(error, match=match):
            search.run()
        assert not never.is_set(), "nobody waited for what ran"


def meeting(parties: int) -> Callable[[int], object]:
    """Trials but the baseline go on only when so many of them have begun."""
    barrier = threading.Barrier(parties)
    return lambda number: barrier.wait(AT_LAST_S) if number > 0 else None


def test_trials_fill_slots_and_baseline_runs_alone(
    tmp_path: Path,
) -> None:
    launcher = Watched(slots=3, before=meeting(3))
    search = make_parallel(tmp_path, launcher, n_trials=7)
    search.run()
    assert launcher.most == 3
    assert launcher.beside_the_baseline == 0
    assert len(launcher.launched) - launcher.repeats == len(search.study.records) == 7
    assert search.ended_because == trials_asked_for(trials=7)
    assert launcher.threads > {threading.current_thread().name}


@pytest.mark.parametrize(("seed", "slots"), [(0, 2), (1, 5)])
def test_every_trial_is_measured_once_and_none_beyond_the_budget(
    tmp_path: Path, seed: int, slots: int
) -> None:
    launcher, kept = Watched(seed=seed, slots=slots), list[TrialRecord]()
    search = make_parallel(tmp_path, launcher, n_trials=10)
    search.on_record = kept.append
    search.run()
    assert launcher.most <= slots
    assert launcher.twice == []
    numbers = numbers_of(search)
    assert numbers == sorted(set(numbers)) == sorted(record.number for record in kept)
    assert (
        len(numbers) == len(set(keys_of(search))) == len(launcher.launched) - launcher.repeats == 10
    )
    assert [record.number for record in search.study.ended] == [record.number for record in kept]
    assert search.study.running == []
    assert numbers_in(search, "RUNNING") == []


@pytest.mark.parametrize("slots", [2, 16])
def test_a_small_space_is_measured_once_and_whole(tmp_path: Path, slots: int) -> None:
    launcher = Watched(slots=slots)
    search = make_parallel(tmp_path, launcher, n_trials=40, **TINY)
    search.run()
    assert (
        len(launcher.launched) - launcher.repeats
        == len(set(launcher.launched))
        == len(search.study.records)
        == 6
    )
    assert launcher.twice == []
    assert search.study.is_exhausted
    assert search.ended_because == space_exhausted()


def test_what_runs_at_the_end_of_the_space_is_awaited(tmp_path: Path) -> None:
    launcher = Watched(slots=6, before=meeting(5))
    search = make_parallel(tmp_path, launcher, n_trials=40, **TINY)
    search.run()
    assert launcher.most == 5, "all but the baseline, and one slot free"
    assert len(search.study.records) == 6
    assert search.ended_because == space_exhausted()


@pytest.mark.parametrize("slots", [0, 1])
def test_with_one_slot_or_none_trials_run_one_by_one_in_the_calling_thread(
    tmp_path: Path, slots: int
) -> None:
    launcher = Watched(slots=slots)
    make_parallel(tmp_path, launcher, n_trials=6).run()
    assert launcher.most == 1
    assert launcher.threads == {threading.current_thread().name}


def test_hosts_that_come_and_go_change_how_many_trials_run(tmp_path: Path) -> None:
    barrier, launcher = threading.Barrier(3), Watched()

    def has_three() -> bool:
        return 4 <= len(launcher.launched) < 7

    launcher.before = lambda _: barrier.wait(AT_LAST_S) if has_three() else None
    search = make_search(tmp_path, launcher, n_trials=10, **NARROW)
    search.time.slots = lambda: 3 if has_three() else 1
    search.run()
    assert launcher.most == 3
    assert len(search.study.records) == 10


def test_a_crash_in_one_thread_leaves_the_others_their_trials(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        is_bad = config.num_workers == 4 and config.micro_batch_size == 64
        return FakeTrial(outcome="crashed", reason="boom") if is_bad else analytic_cost(config)

    search = make_parallel(tmp_path, Watched(cost=cost, slots=3), n_trials=6, **TINY)
    search.run()
    outcomes = [record.outcome for record in search.study.records]
    assert outcomes.count("crashed") == 1
    assert len(outcomes) - outcomes.count("ok") - outcomes.count("pruned") == 1


def test_records_and_their_order_survive_that_a_trial_is_overtaken(tmp_path: Path) -> None:
    overtaken, ended = threading.Event(), list[int]()
    launcher = Watched(
        slots=2, before=lambda number: overtaken.wait(AT_LAST_S) if number == 1 else None
    )
    search = make_parallel(tmp_path, launcher, n_trials=6, is_kept=True, amp_dtype="float32")

    def keep(record: TrialRecord) -> None:
        ended.append(record.number)
        if len(ended) == 4:
            overtaken.set()

    search.on_record = keep
    with let_go(overtaken):
        search.run()
    assert ended.index(1) >= 4
    assert numbers_of(search) == sorted(ended)
    assert [record.number for record in search.study.ended] == ended
    search.study.close()
    again = make_parallel(tmp_path, launcher, n_trials=6, is_kept=True, amp_dtype="float32")
    assert [record.number for record in again.study.ended] == ended
    assert numbers_of(again) == sorted(ended)


def test_reference_without_feasible_baseline(
    tmp_path: Path,
) -> None:
    ended = threading.Event()

    def rate(config: TrainingConfig) -> float:
        return 100.0 + config.micro_batch_size + 50 * config.num_workers

    def cost(config: TrainingConfig) -> FakeTrial:
        needed = 100 * GIB if config == TrainingConfig() else GIB
        return FakeTrial(samples_per_s=rate(config), peak_memory_bytes=needed)

    launcher = Watched(cost=cost, slots=2, noise=0.0)
    launcher.before = lambda number: ended.wait(AT_LAST_S) if number == 1 else None
    search = make_parallel(tmp_path, launcher, n_trials=6, is_kept=True, **TINY)
    search.on_record = lambda record: ended.set() if record.is_feasible else None
    with let_go(ended):
        search.run()
    first = next(record for record in search.study.ended if record.is_feasible)
    assert first.number > 1
    assert search.study.records[1].is_feasible
    for record in search.study.records[1:]:
        if record.outcome == "pruned":
            continue
        assert record.score is not None
        assert record.score.value == pytest.approx(
            rate(record.config) / rate(first.config), rel=0.01
        )
    search.study.close()
    again = make_parallel(tmp_path, launcher, n_trials=6, is_kept=True, **TINY)
    assert reference_of(again.study.ended) == first


def test_an_interrupt_is_raised_while_two_run_and_both_are_run_again_later(tmp_path: Path) -> None:
    never, both, main = threading.Event(), threading.Barrier(2), threading.main_thread().ident
    assert main == threading.get_ident(), "signals are for the main thread"

    def before(number: int) -> None:
        if number > 0:
            if both.wait(AT_LAST_S) == 0:
                signal.pthread_kill(main, signal.SIGINT)
            never.wait(AT_LAST_S)

    search = make_parallel(tmp_path, Watched(slots=2, before=before), n_trials=6, is_kept=True)
    with let_go(never):
        with kept_interrupts(), pytest.raises(KeyboardInterrupt):
            search.run()
        assert not never.is_set(), "nobody waited for what ran"
    assert numbers_of(search) == [0]
    running = [trial.config for trial in search.study.running]
    assert len(running) == len(numbers_in(search, "RUNNING")) == 2
    search.study.close()

    launcher = Watched(slots=2)
    again = make_parallel(tmp_path, launcher, n_trials=6, is_kept=True)
    again.run()
    assert len(launcher.launched) - launcher.repeats == 5
    assert set(running) <= set(launcher.launched)
    assert len(set(keys_of(again))) == len(set(numbers_of(again))) == len(again.study.records) == 6


def test_what_ends_the_search_is_raised_while_others_run(tmp_path: Path) -> None:
    never = threading.Event()
    failure = Failure(signature="ValueError at net.py:3", traceback="ValueError: no")
    bad = FakeTrial(outcome="crashed", reason="ValueError: no", failure=failure)
    launcher = Watched(
        cost=lambda config: analytic_cost(config) if config == TrainingConfig() else bad, slots=2
    )
    launcher.before = lambda number: never.wait(AT_LAST_S) if number == 1 else None
    search = make_parallel(tmp_path, launcher, n_trials=20, amp_dtype="float32", compile=False)
    assert_ends_at_once(search, RepeatedFailureError, never, match="ended 3")
    assert len(search.study.records) == 4
    assert [trial.number for trial in search.study.running] == [1]


def test_a_launcher_that_fails_in_a_thread_ends_the_search_at_once(tmp_path: Path) -> None:
    never = threading.Event()

    def before(number: int) -> None:
        if number == 1:
            never.wait(AT_LAST_S)
        elif number > 1:
            raise LauncherError("no host")

    search = make_parallel(tmp_path, Watched(slots=2, before=before))
    assert_ends_at_once(search, LauncherError, never, match="no host")
    assert numbers_of(search) == [0]


def test_a_record_that_cant_be_kept_ends_the_search_at_once(tmp_path: Path) -> None:
    never = threading.Event()

    def keep(record: TrialRecord) -> None:
        if record.number > 0:
            raise RunFolderError("disk full")

    launcher = Watched(
        slots=2, before=lambda number: never.wait(AT_LAST_S) if number == 1 else None
    )
    search = make_parallel(tmp_path, launcher)
    search.on_record = keep
    assert_ends_at_once(search, RunFolderError, never, match="disk full")


def test_a_failing_launcher_in_the_calling_thread_is_raised_as_it_is(tmp_path: Path) -> None:
    def before(number: int) -> None:
        raise LauncherError("no process")

    with pytest.raises(LauncherError, match="no process"):
        make_parallel(tmp_path, Watched(slots=4, before=before)).run()


def test_once_time_is_up_no_further_trial_begins_and_what_runs_is_awaited(tmp_path: Path) -> None:
    now, meet = [0.0], meeting(3)

    def before(number: int) -> None:
        meet(number)
        if number > 0:
            now[0] = 95.0

    launcher = Watched(slots=3, before=before)
    search = make_parallel(tmp_path, launcher, n_trials=30, timeout_s=100.0, now=lambda: now[0])
    search.run()
    assert len(search.study.records) == len(launcher.launched) - launcher.repeats == 4
    assert search.ended_because == no_time_for_a_trial(timeout_s=100.0)


@pytest.mark.slow
def test_the_time_left_is_reckoned_with_all_slots(tmp_path: Path) -> None:
    left = dict[int, float]()
    for slots in (1, 3):
        shown = list[Progress]()
        search = make_parallel(
            tmp_path / f"{slots}", FakeLauncher(slots=slots, noise=0.0), n_trials=7
        )
        search.show = shown.append
        search.run()
        left[slots] = shown[1].remaining_s or 0.0
    assert left[1] - left[3] == pytest.approx(1.1 * (6 - 2) * search.study.records[0].result.wall_s)


def test_precision_refused_while_others_run(
    tmp_path: Path,
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return FakeTrial(
            samples_per_s=100.0, peak_memory_bytes=GIB, passes_guard=config.amp_dtype == "float32"
        )

    launcher = Watched(cost=cost, slots=3, before=meeting(3))
    search = make_parallel(tmp_path, launcher, n_trials=40, **{**TINY, "amp_dtype": "bfloat16"})
    search.run()
    assert [record.outcome for record in search.study.records[:4]] == ["ok", *["diverged"] * 3]
    assert not any(record.is_feasible for record in search.study.records[1:])
    assert [job.kind for job in launcher.jobs].count("guard") == 1
    assert [one["amp_dtype"] for one in figures_of(search.notes, "precision_left_out")] == [
        "bfloat16"
    ]
