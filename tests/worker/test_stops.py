"""Notice stops of this process and its children within a measurement, and only then."""

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


@pytest.mark.parametrize("ends", [False, True])
def test_stopped_child(ends: bool, child: subprocess.Popen[bytes]) -> None:
    probe = started()
    stop_and_go_on(child.pid)
    if ends:
        child.kill()
        child.wait()
    assert list(probe.stop()) == STOPPED
    child.kill()
    assert child.wait() == -signal.SIGKILL  # it was not reaped by the probe


def test_end_of_a_child_is_no_stop() -> None:
    calls = list[int]()
    before = signal.signal(signal.SIGCHLD, lambda number, _: calls.append(number))
    try:
        own = signal.getsignal(signal.SIGCHLD)
        probe = started()
        subprocess.run(["true"], check=True)
        assert list(probe.stop()) == []
        assert calls
        assert signal.getsignal(signal.SIGCHLD) is own
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_later_handler_stays() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    try:
        probe = started()
        within = signal.getsignal(signal.SIGCHLD)
        assert callable(within)
        later = partial(within)  # as torch chains its own
        signal.signal(signal.SIGCHLD, later)
        assert list(probe.stop()) == []
        assert signal.getsignal(signal.SIGCHLD) is later
        subprocess.run(["true"], check=True)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_earlier_stops_do_not_count(child: subprocess.Popen[bytes]) -> None:
    stop_and_go_on(child.pid)
    assert list(started().stop()) == []


def test_stop_of_this_process() -> None:
    calls = list[int]()

    def own(number: int, _: object) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGCONT, own)
    try:
        probe = started()
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


def started() -> StopProbe:
    probe = StopProbe()
    probe.start()
    return probe


def stop_and_go_on(pid: int) -> None:
    process = psutil.Process(pid)
    for number, is_stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        os.kill(pid, number)
        while (process.status() == psutil.STATUS_STOPPED) != is_stopped:
            time.sleep(0.001)
