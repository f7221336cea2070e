from __future__ import annotations

import threading

import pytest

from autotune.errors import LauncherError
from autotune.launch.launcher import SideBySide

AT_LAST_S = 60.0  # no test takes this long: one whose rule is broken ends so


def test_runs_are_handed_over_in_the_order_in_which_they_end() -> None:
    ended = [threading.Event() for _ in range(3)]

    def run(number: int) -> int:
        if number + 1 < len(ended):
            ended[number + 1].wait(AT_LAST_S)
        return number

    with SideBySide[int](3) as under_way:
        for number in range(3):
            under_way.begin(lambda number=number: run(number))  # type: ignore[misc] # its own number
        assert len(under_way) == 3
        order = []
        for _ in range(3):
            order.append(under_way.next_ended())
            ended[order[-1]].set()
    assert order == [2, 1, 0]


def test_what_a_thread_raises_is_raised_where_its_end_is_taken_and_nobody_waits_for_the_others() -> (
    None
):
    never, gone = threading.Event(), threading.Event()

    def fail() -> None:
        raise LauncherError("no host is left")

    def hold() -> None:
        never.wait(AT_LAST_S)
        gone.set()

    def take_first() -> None:
        with SideBySide[None](2) as under_way:
            under_way.begin(hold)
            under_way.begin(fail)
            under_way.next_ended()

    with pytest.raises(LauncherError, match="no host"):
        take_first()
    assert not never.is_set()
    never.set()
    assert gone.wait(AT_LAST_S)
