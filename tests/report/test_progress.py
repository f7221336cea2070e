"""Progress: what it shows where, and that it never troubles the search."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr
from io import StringIO
from types import ModuleType
from typing import Any

import pytest
from rich.cells import cell_len

from autotune.records.result import Known, Progress
from autotune.report.progress import ProgressMode, make_progress
from tests.factories import (
    BASELINE,
    make_trial,
    make_trials,
    run_again,
    run_once,
)
from tests.report.forms import (
    ESCAPES,
    Terminal,
    known,
    live_line,
    make_step,
    make_steps,
    show_progress,
)

pytestmark = pytest.mark.usefixtures("plain_terminal")

TRIALS = run_once(make_trials())


class Broken(StringIO):
    """A stream whose reader is gone after a number of writes."""

    def __init__(self, error: Exception, writes: int = 0, *, is_terminal: bool = False) -> None:
        super().__init__()
        self.left, self.error, self.is_terminal, self.failures = writes, error, is_terminal, 0

    def write(self, text: str) -> int:
        if self.left == 0:
            self.failures += 1
            raise self.error
        self.left -= 1
        return super().write(text)

    def isatty(self) -> bool:
        return self.is_terminal


def plain(*steps: Progress) -> str:
    """Return the plain lines of these steps."""
    return show_progress("auto", steps)[1]


@pytest.mark.parametrize("mode", ["auto", True])
def test_each_trial_is_a_plain_line(mode: ProgressMode) -> None:
    stdout, stderr = show_progress(mode, make_steps())
    lines = stderr.splitlines()
    assert len([line for line in lines if "#" in line]) == len(TRIALS) + 3, "three ran again"
    assert [line for line in lines if cell_len(line) > 80] == []
    assert "\x1b" not in stderr
    assert stdout == ""


def test_failure_has_its_reason() -> None:
    line = plain(make_step(TRIALS[6])).splitlines()[-1]
    assert "crashed" in line
    assert ": ValueError" in line
    assert line.endswith("…")
    marked = make_trial(6, BASELINE, "crashed", reason="[red]x[/red]")
    assert "[red]x[/red]" in plain(make_step(marked)), "no markup"


def test_each_run_is_a_line_once() -> None:
    assert plain(*[make_step(TRIALS[1])] * 3).count("#1") == 1
    again = run_again(TRIALS[1], 11_000.0)
    crashed = run_again(again, None)
    assert crashed.outcome == "ok", "its first run"
    *_, first, second = plain(*map(make_step, (again, again, crashed))).splitlines()
    assert "again  #1      11,000 samples/s" in first
    assert "again  #1 " in second
    assert "crashed" in second
    assert second.endswith(": ValueError: no")


def test_speedup_is_shown_once_probable_and_once_proven() -> None:
    ends = [(0.9, 3.0, False), (1.2, 2.8, False), (1.3, 2.7, False), (1.61, 2.6, True)]
    steps = [
        make_step(trial, known=known(low, high, is_proven=is_proven))
        for trial, (low, high, is_proven) in zip(TRIALS, ends, strict=False)
    ]
    lines = [line for line in plain(*steps).splitlines() if "#" not in line]
    assert ["0.9" in lines[1], "1.20" in lines[1], "1.61" in lines[2]] == [False, True, True]
    assert len(lines) == 3


def test_claim_of_another_trial_and_a_lost_one_are_shown_once() -> None:
    first = known(1.2, 2.8)
    claims = [first, first.model_copy(update={"number": 2}), known(0.9, 3.0), None]
    steps = [make_step(trial, known=claim) for trial, claim in zip(TRIALS, claims, strict=False)]
    lines = [line for line in plain(*steps).splitlines() if "#" not in line]
    assert ["1.20" in line for line in lines[1:]] == [True, True, False]


def test_time_is_shown_again_once_it_is_off_by_a_quarter() -> None:
    left = {0.0: 60.0, 20.0: 50.0, 30.0: 60.0, 40.0: 50.0}
    steps = [
        make_step(trial, elapsed_s=elapsed_s, remaining_s=remaining_s)
        for trial, (elapsed_s, remaining_s) in zip(TRIALS, left.items(), strict=False)
    ]
    (shown,) = (line for line in plain(*steps).splitlines() if "left" in line)
    assert "1 min" in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_speedup_is_one_line_with_settings_that_fit(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    before = plain(make_step(TRIALS[1]))
    line = plain(make_step(TRIALS[1], known=known(1.1, 3.0))).removeprefix(before)
    assert ("prefetch 4)" in line) == (width == 200)
    assert len(line.splitlines()) == (2 if width == 40 else 1)


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (known(0.9, 3.0), "2.41×"),  # noqa: RUF001 - a times sign
        (known(1.2, 3.0), "probably 1.20×"),  # noqa: RUF001
        (known(1.6, 2.6, is_proven=True), "proven 1.60×"),  # noqa: RUF001
    ],
)
def test_live_line_claims_what_is_known(step: Known, shown: str) -> None:
    line = live_line(make_step(None, known=step))
    assert shown in line
    assert ("2.41" in line) == (step.speedup.low <= 1)


def test_live_line_counts_pairs_while_deciding() -> None:
    step = make_step(None, phase="confirm", done=3, total=40, known=known(1.2, 3.0))
    assert "3 pairs" in live_line(step)


def test_without_a_baseline_the_best_is_a_throughput() -> None:
    assert "best 12,346" in plain(make_step(TRIALS[1], baseline=None))


def test_nothing_is_shown_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show_progress(False, make_steps(), Terminal()) == ("", "")
    monkeypatch.setattr(sys, "stderr", None)
    with make_progress("auto") as step_done:
        step_done(make_step(None))


@pytest.mark.parametrize("can_win", [None, 0.12, 99.0])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_line_never_wraps(
    monkeypatch: pytest.MonkeyPatch, width: int, can_win: float | None
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for step in [step.model_copy(update={"can_win": can_win}) for step in make_steps()]:
        _, stderr = show_progress("auto", [step], Terminal())
        lines = {
            line
            for line in ESCAPES.sub("", stderr).replace("\r", "\n").splitlines()
            if line.strip()
        }
        assert len(lines) == 1
        assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize(
    ("can_win", "shown"), [(0.0099, "1 %"), (0.124, "13 %"), (1.0, "100 %"), (23.456, "2,346 %")]
)
def test_most_that_can_be_gained_is_rounded_up(
    monkeypatch: pytest.MonkeyPatch, can_win: float, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    line = live_line(make_step(None, can_win=can_win))
    assert f" {shown} " in line
    assert line.index("(batch 128, ") < line.index(shown)
    assert plain(make_step(None, can_win=can_win)) == plain(make_step(None))


@pytest.mark.parametrize(
    "parts",
    [
        {"can_win": float("inf")},
        {"can_win": 0.5, "best": None},
        {"can_win": 12.0, "remaining_s": 7500.0, "done": 100, "total": 200},
    ],
    ids=["unknown", "no best", "no room"],
)
def test_most_that_can_be_gained_may_be_left_out(parts: dict[str, Any]) -> None:
    line = live_line(make_step(None, **parts))
    assert "%" not in line
    assert line == live_line(make_step(None, **parts | {"can_win": None}))


def test_stdout_is_left_alone() -> None:
    stderr = Terminal()
    with redirect_stderr(stderr):
        before = sys.stdout
        with make_progress("auto"):
            assert sys.stdout is before
        assert sys.stderr is stderr


def test_dumb_terminal_has_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    _, stderr = show_progress("auto", make_steps(), Terminal())
    assert "\r" not in stderr
    assert "#1" in stderr


def test_notebook_has_plain_lines_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = type("ZMQInteractiveShell", (), {"__module__": "ipykernel.zmqshell"})
    shell = type("ShellOfItsOwn", (kernel,), {"__module__": "somewhere_else"})()
    ipython = ModuleType("IPython")
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    stdout, stderr = show_progress("auto", make_steps(), Terminal())
    assert stderr == ""
    assert "#1" in stdout


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(), ValueError("I/O operation on closed file"), OSError(28, "full")]
)
def test_broken_stream_stays_silent(error: Exception, is_terminal: bool) -> None:
    stream = Broken(error, writes=1, is_terminal=is_terminal)
    show_progress("auto", make_steps(), stream)
    assert stream.failures == 1


def test_closed_stream_stays_silent() -> None:
    stream = StringIO()
    stream.close()
    show_progress("auto", make_steps(), stream)


def test_ascii_stream_gets_replacements() -> None:
    class Ascii(StringIO):
        encoding = "ascii"

    _, stderr = show_progress("auto", [make_step(TRIALS[1])], Ascii())
    assert "best 2.41?" in stderr
