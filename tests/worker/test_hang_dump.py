"""When a rank is to write down where it stands: its timer is set, and looked at instead of waited for."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from autotune.worker import failures as last_words
from autotune.worker.failures import HangDump

NOW = 1000.0


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the timers that were set one after the other, each in place of the one before."""
    found: list[float] = []

    def note(seconds: float, **rest: Any) -> None:
        assert rest == {"exit": False, "file": sys.stderr}
        found.append(seconds)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", note)
    monkeypatch.setattr(last_words, "perf_counter", lambda: NOW)
    return found


@pytest.mark.parametrize(
    ("left_s", "ask", "expected_s"),
    [
        pytest.param(60.0, HangDump.before_deadline, 59.5, id="shortly before the deadline"),
        pytest.param(-3.0, HangDump.before_deadline, 0.1, id="at once where that is over"),
        pytest.param(
            60.0, lambda words: words.unless_a_block_ends(0.2), 30.0, id="no standstill is shorter"
        ),
        pytest.param(
            60.0,
            lambda words: words.unless_a_block_ends(4.0),
            40.0,
            id="ten times the longest block",
        ),
        pytest.param(
            60.0, lambda words: words.unless_a_block_ends(9.0), 59.5, id="never after the deadline"
        ),
    ],
)
def test_seconds_until_the_dump(
    timers: list[float], left_s: float, ask: Callable[[HangDump], None], expected_s: float
) -> None:
    ask(HangDump(file=sys.stderr, ends_at=NOW + left_s))
    assert timers == [pytest.approx(expected_s)]


def test_forked_child_has_no_dump(timers: list[float]) -> None:
    """faulthandler would wait there without end for its parent's thread."""
    HangDump(file=sys.stderr, ends_at=NOW + 60.0, pid=os.getpid() + 1).before_deadline()
    assert timers == []


def test_dump_is_erased_after_a_block(tmp_path: Path) -> None:
    path = tmp_path / "stack-1.txt"
    with path.open("w") as file:
        words = HangDump(file=file, ends_at=perf_counter() + 1000.0)
        try:
            words.unless_a_block_ends(0.2)
            faulthandler.dump_traceback(file=file)
            assert path.stat().st_size > 0
            words.unless_a_block_ends(0.2)
            assert path.stat().st_size == 0
            faulthandler.dump_traceback(file=file)
            # at the file's start, not behind a hole
            assert path.read_text().startswith(("Current thread", "Thread"))
        finally:
            faulthandler.cancel_dump_traceback_later()
