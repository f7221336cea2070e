"""Progress: what it shows where, and that it never troubles the search."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr
from io import StringIO
from types import ModuleType
from typing import Any

import pytest
from rich.cells import cell_len

from autotune.records.result import Known
from autotune.report.progress import ProgressMode, make_progress
from tests.factories import (
    BASELINE,
    FAST,
    make_measurement,
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


@pytest.mark.parametrize("mode", ["auto", True])
def test_elsewhere_than_on_a_terminal_each_trial_is_a_plain_line(mode: ProgressMode) -> None:
    stdout, stderr = show_progress(mode, make_steps())
    lines = stderr.splitlines()
    assert len([line for line in lines if "#" in line]) == len(TRIALS) + 3, "three ran again"
    assert [line for line in lines if cell_len(line) > 80] == []
    assert "\x1b" not in stderr
    assert stdout == ""


def test_a_failure_tells_its_reason_cut_with_an_ellipsis() -> None:
    _, stderr = show_progress("auto", [make_step(TRIALS[6])])
    line = stderr.splitlines()[-1]
    assert "crashed" in line
    assert ": ValueError" in line
    assert line.endswith("…")


def test_a_failures_reason_is_never_taken_for_markup() -> None:
    _, stderr = show_progress(
        "auto", [make_step(make_trial(6, BASELINE, "crashed", reason="[red]x[/red]"))]
    )
    assert "[red]x[/red]" in stderr


def test_the_same_step_sent_twice_is_one_line() -> None:
    _, stderr = show_progress("auto", [make_step(TRIALS[1])] * 3)
    assert stderr.count("#1") == 1


def test_a_further_run_that_failed_is_no_success() -> None:
    crashed = run_again(TRIALS[1], None)
    assert crashed.outcome == "ok", "its first run"
    _, stderr = show_progress("auto", [make_step(crashed)])
    line = stderr.splitlines()[-1]
    assert "again  #1 " in line
    assert "crashed" in line
    assert line.endswith(": ValueError: no")


def test_a_further_run_is_shown_with_its_own_throughput() -> None:
    _, stderr = show_progress("auto", [make_step(run_again(TRIALS[1], 11_000.0))])
    assert "again  #1      11,000 samples/s" in stderr


def test_each_further_run_is_a_line() -> None:
    again = run_again(TRIALS[1], 11_000.0)
    steps = [make_step(again), make_step(again), make_step(run_again(again, 11_000.0))]
    assert show_progress("auto", steps)[1].count("again") == 2


def test_what_is_known_is_a_plain_line_once_until_it_changes() -> None:
    first, second = TRIALS[1:3]
    steps = [
        make_step(trial, known=known(*ends))
        for trial, ends in ((first, (0.9, 3.0)), (second, (0.9, 3.0)))
    ]
    assert show_progress("auto", steps)[1].count("0.9") == 1
    steps.append(make_step(run_again(first, 12_000.0), known=known(1.2, 2.8)))
    lines = show_progress("auto", steps)[1].splitlines()
    assert [place for place, line in enumerate(lines) if "#" not in line] == [0, 2, 5]
    assert "1.20" in lines[5]


def test_the_time_is_told_again_once_it_is_off_by_a_quarter() -> None:
    promised = make_step(None, elapsed_s=0.0, remaining_s=60.0)
    near = make_step(TRIALS[1], elapsed_s=20.0, remaining_s=50.0)
    off = make_step(TRIALS[2], elapsed_s=30.0, remaining_s=60.0)
    still = make_step(TRIALS[3], elapsed_s=40.0, remaining_s=50.0)
    _, stderr = show_progress("auto", [promised, near, off, still])
    told = [line for line in stderr.splitlines() if "left" in line]
    assert len(told) == 1
    assert "1 min" in told[0]


def test_where_the_baseline_leads_nothing_is_known() -> None:
    _, stderr = show_progress("auto", [make_step(TRIALS[0], best=TRIALS[0])])
    assert len(stderr.splitlines()) == 2


@pytest.mark.parametrize("width", [40, 80, 200])
def test_what_is_known_is_one_line_with_as_many_settings_as_fit(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _, before = show_progress("auto", [make_step(TRIALS[1])])
    _, after = show_progress("auto", [make_step(TRIALS[1], known=known(0.9, 3.0))])
    line = after.removeprefix(before)
    assert ("prefetch 4)" in line) == (width == 200)
    assert len(line.splitlines()) == (2 if width == 40 else 1)


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (known(0.9, 3.0), "2.41×"),  # noqa: RUF001 - a times sign
        (known(1.2, 3.0), "probably 1.20×"),  # noqa: RUF001
        (known(1.6, 2.6, is_proven=True), "proven 1.60×"),  # noqa: RUF001
    ],
)
def test_the_live_line_promises_no_more_than_is_known(step: Known, told: str) -> None:
    line = live_line(make_step(None, known=step))
    assert told in line
    assert ("2.41" in line) == (step.speedup.low <= 1)


def test_while_it_is_decided_the_live_line_counts_pairs_of_runs() -> None:
    assert "3 pairs" in live_line(
        make_step(None, phase="confirm", done=3, total=40, known=known(1.2, 3.0))
    )


def test_without_a_baseline_the_best_is_told_as_a_rate() -> None:
    _, stderr = show_progress("auto", [make_step(TRIALS[1], baseline=None)])
    assert "best 12,346" in stderr


def test_false_shows_nothing() -> None:
    assert show_progress(False, make_steps(), Terminal()) == ("", "")


def test_no_stream_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with make_progress("auto") as step_done:
        step_done(make_step(None))


@pytest.mark.parametrize("can_win", [None, 0.12, 99.0])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_on_a_terminal_there_is_one_line_that_never_wraps(
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


def test_what_can_be_won_stands_beside_the_settings_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    line = live_line(make_step(None, can_win=0.12))
    assert line.index("(batch 128, ") < line.index("12 %")


def test_what_can_be_won_is_left_out_where_there_is_no_room_for_it() -> None:
    step = make_step(None, can_win=12.0, remaining_s=7500.0, done=100, total=200)
    line = live_line(step)
    assert "%" not in line
    assert line == live_line(step.model_copy(update={"can_win": None}))


@pytest.mark.parametrize(
    ("can_win", "told"),
    [
        (0.0, "1 %"),
        (0.0099, "1 %"),
        (0.01, "1 %"),
        (0.07, "7 %"),
        (0.124, "13 %"),
        (1.0, "100 %"),
        (23.456, "2,346 %"),
    ],
)
def test_what_can_be_won_at_the_most_is_never_rounded_down(
    monkeypatch: pytest.MonkeyPatch, can_win: float, told: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert f" {told} " in live_line(make_step(None, can_win=can_win))


@pytest.mark.parametrize(
    "parts", [{"can_win": None}, {"can_win": float("inf")}, {"can_win": 0.5, "best": None}]
)
def test_what_can_be_won_is_told_only_where_it_and_a_best_are_known(parts: dict[str, Any]) -> None:
    assert "%" not in live_line(make_step(None, **parts))


def test_plain_lines_do_not_tell_what_can_be_won() -> None:
    steps = [make_step(None, can_win=0.5), *(make_step(trial, can_win=0.5) for trial in TRIALS)]
    assert show_progress("auto", steps) == show_progress(
        "auto", [step.model_copy(update={"can_win": None}) for step in steps]
    )


def test_the_callers_stdout_is_left_alone_while_the_line_lives() -> None:
    stderr = Terminal()
    with redirect_stderr(stderr):
        before = sys.stdout
        with make_progress("auto"):
            assert sys.stdout is before
        assert sys.stderr is stderr


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    _, stderr = show_progress("auto", make_steps(), Terminal())
    assert "\r" not in stderr
    assert "#1" in stderr


def test_a_notebook_gets_plain_lines_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_broken_stream_is_left_silent_for_good(error: Exception, is_terminal: bool) -> None:
    stream = Broken(error, writes=1, is_terminal=is_terminal)
    show_progress("auto", make_steps(), stream)
    assert stream.failures == 1


def test_a_closed_stream_is_left_silent() -> None:
    stream = StringIO()
    stream.close()
    show_progress("auto", make_steps(), stream)


def test_a_stream_of_few_characters_gets_replacements() -> None:
    class Ascii(StringIO):
        encoding = "ascii"

    _, stderr = show_progress(
        "auto", [make_step(make_trial(3, FAST, measurement=make_measurement(10.0)))], Ascii()
    )
    assert "best 2.41?" in stderr
