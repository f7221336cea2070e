"""A stop of this process or of a child is seen, whenever it came within the watch, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

from autotune.messages.trials import window_stopped
from autotune.worker.failures import StopProbe

STOPPED = [window_stopped()]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_what_goes_on_undisturbed_leaves_no_remark(child: subprocess.Popen[bytes]) -> None:
    probe = StopProbe()
    probe.start()
    assert child.poll() is None
    assert list(probe.stop()) == []


def test_a_child_that_was_stopped_is_told_and_still_reaped_by_its_owner(
    child: subprocess.Popen[bytes],
) -> None:
    probe = StopProbe()
    probe.start()
    stop_and_go_on(child.pid)
    assert list(probe.stop()) == STOPPED
    child.kill()
    assert child.wait() == -signal.SIGKILL


def test_a_child_that_was_stopped_and_has_ended_since_is_told(
    child: subprocess.Popen[bytes],
) -> None:
    probe = StopProbe()
    probe.start()
    stop_and_go_on(child.pid)
    child.kill()
    child.wait()
    assert list(probe.stop()) == STOPPED


def test_the_end_of_a_child_is_no_stop_and_who_handles_it_does_so_still() -> None:
    calls = list[int]()
    before = signal.signal(signal.SIGCHLD, lambda number, _: calls.append(number))
    try:
        own = signal.getsignal(signal.SIGCHLD)
        probe = StopProbe()
        probe.start()
        subprocess.run(["true"], check=True)
        assert list(probe.stop()) == []
        assert calls
        assert signal.getsignal(signal.SIGCHLD) is own
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_handler_that_came_within_the_watch_stays() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    try:
        probe = StopProbe()
        probe.start()
        within = signal.getsignal(signal.SIGCHLD)
        assert callable(within)
        later = partial(within)  # as torch chains its own
        signal.signal(signal.SIGCHLD, later)
        assert list(probe.stop()) == []
        assert signal.getsignal(signal.SIGCHLD) is later
        subprocess.run(["true"], check=True)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_was_before_the_watch_does_not_count(child: subprocess.Popen[bytes]) -> None:
    stop_and_go_on(child.pid)
    probe = StopProbe()
    probe.start()
    assert list(probe.stop()) == []


def test_a_stop_of_this_process_is_told_and_the_users_own_handler_is_called_and_kept() -> None:
    calls = list[int]()

    def own(number: int, _: object) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGCONT, own)
    try:
        probe = StopProbe()
        probe.start()
        subprocess.run(
            ["sh", "-c", f"kill -STOP {os.getpid()}; sleep 0.1; kill -CONT {os.getpid()}"],
            check=True,
        )
        while (
            not calls
        ):  # another thread of this process may be the one that the signal comes to, a little later
            time.sleep(0.01)
        assert list(probe.stop()) == STOPPED
        assert calls == [signal.SIGCONT]
        assert signal.getsignal(signal.SIGCONT) is own
    finally:
        signal.signal(signal.SIGCONT, before)


def stop_and_go_on(pid: int) -> None:
    process = psutil.Process(pid)
    for number, is_stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        os.kill(pid, number)
        while (process.status() == psutil.STATUS_STOPPED) != is_stopped:
            time.sleep(0.001)
