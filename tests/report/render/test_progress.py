"""Progress: what it shows where, and that it never troubles the search."""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from types import ModuleType
from typing import Any

import pytest
from rich.cells import cell_len

from autotune.records.run_summary import Progress
from autotune.records.trial import TrialRecord
from autotune.report.render import progress
from autotune.report.render.progress import ProgressMode, make_progress
from tests.factories import BASELINE, FAST, make_measurement, make_trial, make_trials

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


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


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")


def make_step(last: TrialRecord | None, **parts: Any) -> Progress:
    trials = make_trials()
    given: dict[str, Any] = {
        "phase": "search",
        "done": 7,
        "total": 40,
        "elapsed_s": 30.0,
        "remaining_s": 80.0,
        "baseline": trials[0],
        "best": trials[1],
        "last": last,
    }
    return Progress(**{**given, **parts})


def make_steps() -> list[Progress]:
    trials = make_trials()
    start = {"baseline": None, "best": None, "done": 0}
    return [
        make_step(None, phase="probe", total=1, **start),
        make_step(None, **start),
        *(make_step(trial, done=trial.number + 1) for trial in trials),
        make_step(None, phase="confirm", done=0, total=9, remaining_s=None),
        make_step(trials[1], phase="confirm", done=1, total=9, remaining_s=None),
    ]


def show(mode: ProgressMode, steps: list[Progress], stderr: StringIO | None = None) -> tuple[str, str]:
    """What is written to stdout and to stderr; pytest's own capturing stays out of it."""
    stdout, stderr = StringIO(), StringIO() if stderr is None else stderr
    with redirect_stdout(stdout), redirect_stderr(stderr), make_progress(mode) as step_done:
        for step in steps:
            step_done(step)
    return stdout.getvalue(), "" if stderr.closed else stderr.getvalue()


@pytest.mark.parametrize("mode", ["auto", True])
def test_elsewhere_than_on_a_terminal_each_trial_is_a_plain_line(mode: ProgressMode) -> None:
    stdout, stderr = show(mode, make_steps())
    lines = stderr.splitlines()
    assert len([line for line in lines if "#" in line]) == len(make_trials()) + 1
    assert [line for line in lines if cell_len(line) > 80] == []
    assert "\x1b" not in stderr
    assert stdout == ""


def test_a_plain_line_tells_rate_best_and_settings() -> None:
    _, stderr = show("auto", [make_step(make_trials()[1])])
    line = stderr.splitlines()[-1]
    for said in (" 7/40", "#1", "12,346 samples/s", "best 2.41×", "batch 128, 4 workers, bfloat16"):  # noqa: RUF001 - a times sign
        assert said in line


def test_a_failure_tells_its_reason_cut_with_an_ellipsis() -> None:
    _, stderr = show("auto", [make_step(make_trials()[6])])
    line = stderr.splitlines()[-1]
    assert "crashed" in line
    assert ": ValueError" in line
    assert line.endswith("…")


def test_a_failures_reason_is_never_taken_for_markup() -> None:
    _, stderr = show("auto", [make_step(make_trial(6, BASELINE, "crashed", reason="[red]x[/red]"))])
    assert "[red]x[/red]" in stderr


def test_the_same_step_sent_twice_is_one_line() -> None:
    _, stderr = show("auto", [make_step(make_trials()[1])] * 3)
    assert stderr.count("#1") == 1


def test_without_a_baseline_the_best_is_told_as_a_rate() -> None:
    _, stderr = show("auto", [make_step(make_trials()[1], baseline=None)])
    assert "best 12,346" in stderr


def test_false_shows_nothing() -> None:
    assert show(False, make_steps(), Terminal()) == ("", "")


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
        _, stderr = show("auto", [step], Terminal())
        lines = {line for line in ESCAPES.sub("", stderr).replace("\r", "\n").splitlines() if line.strip()}
        assert len(lines) == 1
        assert max(map(cell_len, lines)) <= width


def test_the_live_line_tells_step_best_and_time_left() -> None:
    _, stderr = show("auto", [make_step(make_trials()[1])], Terminal())
    for said in ("trial 7/40", "12,346 samples/s, 2.41×", "(batch 128", "min 20 s left"):  # noqa: RUF001 - a times sign
        assert said in stderr


def live_line(step: Progress) -> str:
    """The line of a terminal whose clock stands still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "monotonic", lambda: 0.0)
        _, stderr = show("auto", [step], Terminal())
    (line,) = {line for line in ESCAPES.sub("", stderr).replace("\r", "\n").splitlines() if line.strip()}
    return line.strip()


def test_the_live_line_tells_what_can_still_be_won() -> None:
    line = live_line(make_step(None, can_win=0.12))
    assert line == "trial 7/40 | best 12,346 samples/s, 2.41× | at most 12 % more | 1 min 20 s left"  # noqa: RUF001 - a times sign


def test_what_can_be_won_stands_beside_the_settings_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    line = live_line(make_step(None, can_win=0.12))
    assert "(batch 128, 4 workers, bfloat16" in line
    assert ") | at most 12 % more | 1 min 20 s left" in line


def test_what_can_be_won_is_left_out_where_there_is_no_room_for_it() -> None:
    step = make_step(None, can_win=12.0, remaining_s=7500.0, done=100, total=200)
    line = live_line(step)
    assert "more" not in line
    assert line == live_line(step.model_copy(update={"can_win": None}))
    assert line.endswith(" | 2 h 5 min left")


@pytest.mark.parametrize(
    ("can_win", "told"),
    [
        (0.0, "less than 1 % more"),
        (0.0099, "less than 1 % more"),
        (0.01, "at most 1 % more"),
        (0.07, "at most 7 % more"),
        (0.124, "at most 13 % more"),
        (1.0, "at most 100 % more"),
        (23.456, "at most 2,346 % more"),
    ],
)
def test_what_can_be_won_at_the_most_is_never_rounded_down(
    monkeypatch: pytest.MonkeyPatch, can_win: float, told: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert f" | {told} | " in live_line(make_step(None, can_win=can_win))


@pytest.mark.parametrize("parts", [{"can_win": None}, {"can_win": float("inf")}, {"can_win": 0.5, "best": None}])
def test_what_can_be_won_is_told_only_where_it_and_a_best_are_known(parts: dict[str, Any]) -> None:
    assert "more" not in live_line(make_step(None, **parts))


def test_plain_lines_do_not_tell_what_can_be_won() -> None:
    steps = [make_step(None, can_win=0.5), *(make_step(trial, can_win=0.5) for trial in make_trials())]
    assert show("auto", steps) == show("auto", [step.model_copy(update={"can_win": None}) for step in steps])


def test_the_callers_stdout_is_left_alone_while_the_line_lives() -> None:
    stderr = Terminal()
    with redirect_stderr(stderr):
        before = sys.stdout
        with make_progress("auto"):
            assert sys.stdout is before
        assert sys.stderr is stderr


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    _, stderr = show("auto", make_steps(), Terminal())
    assert "\r" not in stderr
    assert "#1" in stderr


def test_a_notebook_gets_plain_lines_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = type("ZMQInteractiveShell", (), {"__module__": "ipykernel.zmqshell"})
    shell = type("ShellOfItsOwn", (kernel,), {"__module__": "somewhere_else"})()
    ipython = ModuleType("IPython")
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    stdout, stderr = show("auto", make_steps(), Terminal())
    assert stderr == ""
    assert "#1" in stdout


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file"), OSError(28, "full")])
def test_a_broken_stream_is_left_silent_for_good(error: Exception, is_terminal: bool) -> None:
    stream = Broken(error, writes=1, is_terminal=is_terminal)
    show("auto", make_steps(), stream)
    assert stream.failures == 1


def test_a_closed_stream_is_left_silent() -> None:
    stream = StringIO()
    stream.close()
    show("auto", make_steps(), stream)


def test_a_stream_of_few_characters_gets_replacements() -> None:
    class Ascii(StringIO):
        encoding = "ascii"

    _, stderr = show("auto", [make_step(make_trial(3, FAST, measurement=make_measurement(10.0)))], Ascii())
    assert "best 2.41?" in stderr
