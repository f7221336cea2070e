"""A loop turned inside out: measuring hands out batches in the script's place, and either may end first."""

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
    """A conductor whose measuring does some work."""
    conductor: Conductor = Conductor(lambda: work(conductor))
    return conductor


def asked(conductor: Conductor) -> list[object]:
    """What a script is given until an epoch ends."""
    found: list[object] = []
    with suppress(StopIteration):
        while True:
            found.append(conductor.ask())
    return found


@given(st.lists(st.lists(st.integers(), max_size=8), max_size=5))
def test_the_script_sees_the_batches_and_the_epochs_that_measuring_gives(
    epochs: list[list[int]],
) -> None:
    def work(conductor: Conductor) -> None:
        for epoch in epochs:
            for batch in epoch:
                conductor.give(batch)
            conductor.end_epoch()

    conductor = conducted(work)
    assert [asked(conductor) for _ in epochs] == epochs


def test_giving_returns_when_the_script_asks_again() -> None:
    order: list[str] = []

    def work(conductor: Conductor) -> None:
        for number in range(2):
            order.append(f"give {number}")
            conductor.give(number)
        order.append("done")
        conductor.end_epoch()

    conductor = conducted(work)
    for number in range(2):
        assert conductor.ask() == number
        assert not conductor.is_measuring
        order.append(f"train {number}")
    with suppress(StopIteration):
        conductor.ask()
    assert order == ["give 0", "train 0", "give 1", "train 1", "done"]


def test_while_measuring_runs_that_is_known() -> None:
    seen: list[bool] = []

    def work(conductor: Conductor) -> None:
        seen.append(conductor.is_measuring)
        conductor.give(1)
        seen.append(conductor.is_measuring)
        conductor.end_epoch()

    conductor = conducted(work)
    assert not conductor.is_measuring
    asked(conductor)
    assert seen == [True, True]
    assert not conductor.is_measuring


def test_a_script_that_ends_first_is_told_to_measuring() -> None:
    ends: list[str] = []

    def work(conductor: Conductor) -> None:
        try:
            while True:
                conductor.give(1)
        except FeedEnded:
            ends.append("ended")

    conductor = conducted(work)
    assert conductor.ask() == 1
    conductor.end()
    assert ends == ["ended"]
    conductor.end()  # and no second time
    assert ends == ["ended"]


def test_a_script_that_has_ended_is_asked_for_nothing_more() -> None:
    ends: list[str] = []

    def work(conductor: Conductor) -> None:
        for _ in range(3):
            try:
                conductor.give(1)
            except FeedEnded:
                ends.append("ended")

    conductor = conducted(work)
    conductor.ask()
    conductor.end()
    assert ends == ["ended"] * 3


def test_what_measuring_raises_reaches_the_script() -> None:
    def work(_: Conductor) -> None:
        raise ValueError("of measuring")

    with pytest.raises(ValueError, match="of measuring"):
        conducted(work).ask()


def test_what_a_loader_raises_reaches_the_script() -> None:
    def work(conductor: Conductor) -> None:
        conductor.give_error(OSError("broken"))
        conductor.give(1)

    conductor = conducted(work)
    with pytest.raises(OSError, match="broken"):
        conductor.ask()
    assert conductor.ask() == 1


def test_an_epochs_end_holds_nothing_of_the_script() -> None:
    """Held in a circle until the collector runs, an iterator's workers would live on."""

    class Iterator:
        def __next__(self) -> object:
            return conductor.ask()

    conductor, iterator, ended = (
        conducted(lambda conductor: conductor.end_epoch()),
        Iterator(),
        False,
    )
    held = ref(iterator)
    gc.disable()
    try:
        try:
            iterator.__next__()
        except StopIteration:  # pytest.raises would keep it
            ended = True
        del iterator
        assert ended
        assert held() is None
    finally:
        gc.enable()


def test_a_loader_whose_workers_are_gone_is_iterated_over_what_measuring_gives() -> None:
    def work(conductor: Conductor) -> None:
        for batch in (1, 2):
            conductor.give(batch)
        conductor.end_epoch()

    assert list(HeldBatches(conducted(work))) == [1, 2]
