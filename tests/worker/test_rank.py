"""The look at what forks can open: it leaves no trace in the process whose forks the ranks are."""

from __future__ import annotations

import multiprocessing
import sys

import pytest

from autotune.worker import rank
from autotune.worker.rank import bad_fork_devices_of_children


def test_a_look_at_what_forks_can_open_does_not_renumber_the_users_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "_bad_fork_devices", lambda: ("cuda", "xpu"))
    (before,) = multiprocessing.Process()._identity
    assert bad_fork_devices_of_children() == ("cuda", "xpu")
    assert multiprocessing.Process()._identity == (before + 1,)


def test_a_look_that_fails_says_nothing_and_ends_in_its_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "_bad_fork_devices", lambda: sys.exit("the fork ran on"))
    assert bad_fork_devices_of_children() == ()
