"""Each moment of a run counts once, in the innermost part; what recurs is recorded with its step."""

from __future__ import annotations

from threading import Thread

import pytest

from autotune.records.watched_run import Recurring, WatchedRun
from autotune.worker.script import watch as module
from autotune.worker.script.watch import Watch


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(module, "perf_counter", own)
    return own


class Script:
    """A training loop that takes given seconds, seen by a watch."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.watch = Watch(started=0.0)
        self.steps = 0

    def iterate(self, seconds: float = 0.0) -> None:
        with self.watch.iterating(self):
            self.clock.now += seconds

    def fetch(self, seconds: float = 0.0, *, ends: bool = False) -> None:
        def draw() -> None:
            with self.watch.fetching(self):
                self.clock.now += seconds
                if ends:
                    raise StopIteration

        if ends:
            with pytest.raises(StopIteration):
                draw()
        else:
            draw()

    def compute(self, forward: float = 1.0, backward: float = 2.0, optimizer: float = 1.0) -> None:
        with self.watch.calling("Net", trains=True):
            self.clock.now += forward
        self.watch.backward_begins(is_synchronised=False)
        with self.watch.inside("backward"):
            self.clock.now += backward
        self.watch.enter("optimizer")
        self.clock.now += optimizer
        self.watch.leave()
        self.steps += 1
        self.watch.stepped(self.steps, 0, ())

    def start(self) -> None:
        """Train for one step, after which the watch counts."""
        self.iterate()
        self.fetch()
        self.compute()

    def found(self) -> WatchedRun:
        found = self.watch.finish(epoch_batches=10)
        assert found is not None
        return found


@pytest.fixture
def script(clock: Clock) -> Script:
    return Script(clock)


def only(found: WatchedRun, part: str) -> Recurring:
    (kind,) = [kind for kind in found.recurring if kind.part == part]
    return kind


def test_the_start_is_split_at_the_loader_and_at_its_first_batch(script: Script) -> None:
    script.clock.now = 5.0
    script.iterate(1.0)
    script.fetch(2.0)
    script.compute()
    startup = script.found().startup
    assert startup.model_dump() == {
        "before_loader_s": 5.0,
        "first_batch_s": 3.0,
        "first_step_s": 4.0,
    }


def test_parts_of_a_step_add_up_to_the_time_watched(script: Script) -> None:
    script.start()
    script.fetch(0.5)
    script.compute()
    script.clock.now += 0.25
    found = script.found()
    assert found.parts_s == {
        "waiting": 0.5,
        "forward": 1.0,
        "backward": 2.0,
        "optimizer": 1.0,
        "other": 0.25,
    }
    assert found.watched_s == sum(found.parts_s.values())
    assert found.steps == found.batches == 1


def test_a_checkpoint_keeps_what_happens_inside_it_but_collections(script: Script) -> None:
    script.start()
    with script.watch.inside("checkpoint", "torch.save"):
        script.clock.now += 1.0
        with script.watch.inside("logging", "print"):
            script.clock.now += 1.0
        with script.watch.inside("collection", "gc.collect"):
            script.clock.now += 0.5
    found = script.found()
    assert found.parts_s["checkpoint"] == 2.0
    assert found.parts_s["collection"] == 0.5
    assert "logging" not in found.parts_s
    assert only(found, "checkpoint").seconds == (2.0,)
    assert only(found, "checkpoint").at_steps == (0,)


def test_an_evaluation_lasts_until_its_loader_is_exhausted(script: Script) -> None:
    script.start()
    script.fetch()
    script.compute()
    script.watch.side_began("Pictures")
    for _ in range(3):
        script.clock.now += 0.5
        script.watch.side_seen()
        with script.watch.calling("Net", trains=False):
            script.clock.now += 1.0
    script.watch.side_ended()
    script.clock.now += 0.25  # the script averages its metrics
    script.fetch()
    found = script.found()
    assert found.parts_s["validation"] == 4.5
    assert found.parts_s["other"] == 0.25
    assert only(found, "validation").what == "Pictures"
    assert only(found, "validation").seconds == (4.5,)


def test_an_evaluation_that_is_left_early_ends_with_its_last_call(script: Script) -> None:
    script.start()
    script.watch.side_began("Pictures")
    script.watch.side_seen()
    with script.watch.calling("Net", trains=False):
        script.clock.now += 1.0
    script.clock.now += 0.5
    script.fetch()
    assert script.found().parts_s["validation"] == 1.0


def test_calls_without_gradients_or_a_loader_are_no_validation(script: Script) -> None:
    script.start()
    for _ in range(2):
        with script.watch.calling("Policy", trains=False):
            script.clock.now += 1.0
        script.clock.now += 0.5  # the environment steps
    script.fetch()
    found = script.found()
    assert found.parts_s["forward"] == 2.0
    assert found.parts_s["other"] == 1.0
    assert not found.recurring


def test_a_second_loader_that_training_reads_from_is_waiting(script: Script) -> None:
    script.start()
    script.fetch(0.5)
    script.watch.side_began("Unlabelled")
    script.clock.now += 1.0
    script.watch.side_seen()
    script.compute()
    found = script.found()
    assert found.parts_s["waiting"] == 1.5
    assert "validation" not in {kind.part for kind in found.recurring}


def test_the_first_batch_of_an_epoch_is_a_restart_beyond_the_usual_wait(script: Script) -> None:
    script.start()
    for _ in range(2):
        script.fetch(0.5)
        script.compute()
    script.fetch(ends=True)
    script.clock.now += 0.75
    script.iterate(2.0)
    script.fetch(1.5)
    found = script.found()
    assert found.epochs_ended == 1
    assert only(found, "restart").seconds == (3.0,)
    assert found.parts_s["restart"] == 3.0
    assert found.parts_s["waiting"] == 1.5
    assert only(found, "other").seconds == (0.75,)


def test_an_exception_leaves_no_part_open(script: Script) -> None:
    script.start()
    script.watch.enter("optimizer")  # a step that raises is not closed
    script.clock.now += 1.0
    script.fetch()
    script.clock.now += 1.0
    assert script.found().parts_s["other"] == 1.0


def test_other_threads_and_the_time_after_the_end_do_not_count(script: Script) -> None:
    script.start()

    def log() -> None:
        with script.watch.inside("logging", "print"):
            script.clock.now += 1.0

    thread = Thread(target=log)
    thread.start()
    thread.join()
    script.watch.finish(None)
    with script.watch.inside("checkpoint", "torch.save"):
        script.clock.now += 1.0
    found = script.watch.so_far(None)
    assert found is not None
    assert not found.recurring


def test_an_evaluation_under_way_at_the_end_is_cut(script: Script) -> None:
    script.start()
    script.watch.side_began("Pictures")
    script.watch.side_seen()
    with script.watch.calling("Net", trains=False):
        script.clock.now += 1.0
    script.clock.now += 3.0
    found = script.found()
    assert only(found, "validation").is_cut
    assert only(found, "validation").seconds == (4.0,)


def test_nothing_is_known_before_the_first_step(script: Script) -> None:
    script.iterate()
    assert script.watch.finish(None) is None


def test_kinds_are_bounded(script: Script) -> None:
    script.start()
    for number in range(200):
        with script.watch.inside("logging", f"log{number}"):
            script.clock.now += 1.0
    found = script.found()
    assert len(found.recurring) <= 51
    assert sum(kind.total_s for kind in found.recurring) == 200.0
