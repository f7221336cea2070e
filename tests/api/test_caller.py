from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from typing import Any

import pytest

from autotune.api.setup import kept_interrupts, without_interrupts


class Thing:
    """Something to hold weakly."""


def test_an_interrupt_in_a_weakrefs_callback_comes_again() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    thing = Thing()
    reference = weakref.ref(thing, interrupt)
    with pytest.raises(KeyboardInterrupt), kept_interrupts():  # noqa: PT012 - it may come anywhere in here
        del thing
        threading.Event().wait(30)
    assert reference() is None


def test_other_exceptions_that_python_ignores_go_where_they_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    def fail(_: object) -> None:
        raise ValueError

    thing = Thing()
    reference = weakref.ref(thing, fail)
    with kept_interrupts():
        del thing
    assert reference() is None
    assert [unraisable.exc_type for unraisable in seen] == [ValueError]
    assert sys.unraisablehook == seen.append


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_cuts_off_what_is_being_saved(number: signal.Signals) -> None:
    before, saved = signal.getsignal(number), []
    with without_interrupts():
        os.kill(os.getpid(), number)
        saved.append("all")
    assert saved == ["all"]
    assert signal.getsignal(number) == before


def test_saving_in_another_thread_leaves_signals_alone() -> None:
    saved = list[str]()

    def save() -> None:
        with without_interrupts():
            saved.append("all")

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert saved == ["all"]
