"""A loop turned inside out: the measurement gives batches in the script's place, and either may end first."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.worker.feed import FeedEnded
from autotune.worker.script.feeds import Conductor, HeldBatches


def conducted(work: Callable[[Conductor], None]) -> Conductor:
    """A conductor whose measurement does some work."""
    conductor = Conductor(lambda: work(conductor))
    return conductor


@given(st.lists(st.lists(st.integers(), max_size=8), max_size=5))
def test_script_sees_the_batches_and_epochs(epochs: list[list[int]]) -> None:
    def work(conductor: Conductor) -> None:
        for epoch in epochs:
            for batch in epoch:
                conductor.give(batch)
            conductor.give_error(StopIteration)

    conductor = conducted(work)
    assert [list(HeldBatches(conductor)) for _ in epochs] == epochs


def test_give_returns_when_the_script_asks_again() -> None:
    order: list[object] = []

    def work(conductor: Conductor) -> None:
        for number in range(2):
            order.append(("give", number, conductor.is_measuring))
            conductor.give(number)
        conductor.give_error(StopIteration)

    conductor = conducted(work)
    for number in range(2):
        assert conductor.ask() == number
        order.append(("train", number, conductor.is_measuring))
    assert order == [(act, n, act == "give") for n in range(2) for act in ("give", "train")]


def test_script_that_ends_first() -> None:
    ends: list[str] = []

    def work(conductor: Conductor) -> None:
        for _ in range(3):
            try:
                conductor.give(1)
            except FeedEnded:
                ends.append("ended")

    conductor = conducted(work)
    assert conductor.ask() == 1
    for _ in range(2):  # a second time makes no difference
        conductor.end()
        assert ends == ["ended"] * 3


def test_exception_of_the_measurement_reaches_the_script() -> None:
    def work(_: Conductor) -> None:
        raise ValueError("of measuring")

    with pytest.raises(ValueError, match="of measuring"):
        conducted(work).ask()


def test_an_epochs_end_holds_nothing_of_the_script() -> None:
    """Held in a circle until the collector runs, an iterator's workers would live on."""
    iterator = HeldBatches(conducted(lambda conductor: conductor.give_error(StopIteration)))
    held = ref(iterator)
    gc.disable()
    try:
        with suppress(StopIteration):  # pytest.raises would keep it
            next(iterator)
        del iterator
        assert held() is None
    finally:
        gc.enable()
