"""Show the progress of a search: a live line on a terminal, a plain line for each trial elsewhere.

Takes a Progress after every step; writes to stderr, in a notebook to stdout. It never disturbs the
search: once the stream fails (closed, or its reader gone), nothing more is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, isfinite
from typing import IO, Literal, TextIO, cast

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from autotune.messages.units import OUTCOMES, format_count, show
from autotune.protocol.disk import monotonic
from autotune.records.result import Known, Progress
from autotune.records.trial import TrialRecord
from autotune.report.words import describe_settings, one_line, shorten

ProgressMode = Literal["auto"] | bool
ShowProgress = Callable[[Progress], None]

_NARROWEST_TEXT = 8  # terminal cells; a text cut shorter is useless. Source: our convention
_BROKEN = (OSError, ValueError)  # a stream that is gone, or closed
_OFF_FROM = 0.25
"""Relative change of the expected duration from which on it is shown again. Source: our
convention."""
_ALONE = {
    "probe": (
        "examining model, data and machine",
        "Examining the model, the data and the machine.",
    ),
    "measure": ("measuring your settings", "Measuring your settings."),
    "curves": (
        "measuring loader and device alone",
        "Measuring loader and device alone, with your settings and others.",
    ),
}
"""Texts of phases without steps: on the live line, and as a plain line."""


@contextmanager
def make_progress(mode: ProgressMode) -> Iterator[ShowProgress]:
    """Yield a callable that shows each Progress it gets.

    Args:
        mode: "auto" or True for a live line if stderr is a terminal and plain lines otherwise;
            False for nothing.
    """
    is_notebook = _is_notebook()
    stream = sys.stdout if is_notebook else sys.stderr
    if mode is False or stream is None:
        yield lambda _: None
        return
    # rich writes only to the wrapped stream, and from its refreshing thread as well: the wrapper
    # must not raise.
    console = Console(
        file=cast("IO[str]", _QuietStream(stream)),
        force_jupyter=False,
        highlight=False,
        emoji=False,
    )
    if is_notebook or not console.is_terminal or console.is_dumb_terminal:
        yield _plain_lines(console)
        return
    line = _LiveLine(console)
    with Live(
        get_renderable=line.render,
        console=console,
        transient=True,
        refresh_per_second=2,
        redirect_stdout=False,  # rich would send the caller's stdout to stderr
    ):
        yield line.show


def _is_notebook() -> bool:
    """Return whether an ipykernel runs this process; don't import IPython to find out."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return any("ipykernel" in base.__module__ for base in type(get_shell()).__mro__)


class _QuietStream:
    """A text stream that writes nothing more after its first failure."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding: str = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._attempt(
            lambda stream: stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        )
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return bool(self._attempt(lambda stream: stream.isatty()))

    def _attempt(self, action: Callable[[TextIO], object]) -> object:
        """Apply an action to the stream, unless the stream has failed."""
        try:
            return None if self._stream is None else action(self._stream)
        except _BROKEN:
            self._stream = None
            return None


def _plain_lines(console: Console) -> ShowProgress:
    """Print a line for each phase, each finished trial, and each change of the expected duration."""
    latest: dict[str, object] = {}
    shown_s: float | None = None

    def print_new(kind: str, key: object, line: str) -> None:
        if latest.get(kind) != key:
            latest[kind] = key
            console.print(Text(line, no_wrap=True, overflow="ellipsis"))

    def print_progress(progress: Progress) -> None:
        nonlocal shown_s
        print_new("phase", progress.phase, _describe_phase(progress))
        _print_warnings(progress, console)
        if progress.last is not None:
            step = (progress.done, progress.last.number, len(progress.last.repeats))
            print_new("trial", step, _describe_trial(progress, progress.last, console.width))
        known = progress.known
        if known is not None and known.speedup.low > 1:
            claim = (known.is_proven, known.number)
            print_new("known", claim, _describe_known(progress, known, console.width))
        else:
            lost = "The best so far is no longer known to be faster than the baseline."
            print_new("known", None, lost)
        if progress.phase != "search" or progress.remaining_s is None or progress.remaining_s < 5.0:
            return
        whole_s = progress.elapsed_s + progress.remaining_s
        shown_s = shown_s or whole_s
        if abs(whole_s / shown_s - 1) > _OFF_FROM:
            console.print(Text(f"Now about {show(progress.remaining_s, 'duration')} are left."))
            shown_s = whole_s

    return print_progress


class _LiveLine:
    """The latest Progress as one line; its clock runs between steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._came_at = monotonic()

    def show(self, progress: Progress) -> None:
        """Keep the latest Progress for the next refresh."""
        self._progress = progress
        self._came_at = monotonic()
        _print_warnings(progress, self._console)

    def render(self) -> Text:
        """Return the line, no wider than the console."""
        if self._progress is None:
            return Text("")
        line = _describe_state(self._progress, monotonic() - self._came_at, self._console.width - 1)
        return Text(line, no_wrap=True, overflow="ellipsis")


def _print_warnings(progress: Progress, console: Console) -> None:
    """Print each warning in full, above a live line."""
    for warning in progress.warnings:
        console.print(Text(f"Note: {one_line(str(warning))}", style="bold"))


def _describe_phase(progress: Progress) -> str:
    if progress.phase in _ALONE:
        return _ALONE[progress.phase][1]
    if progress.phase == "confirm":
        return "Deciding: the best and the baseline run again, alternately."
    trials = format_count(progress.total, "trial")
    if progress.remaining_s is None:
        return f"Searching: at most {trials}."
    return f"Searching: at most {trials}, about {show(progress.remaining_s, 'duration')}."


def _describe_known(progress: Progress, known: Known, width: int) -> str:
    """Describe the least speed-up, in one line."""
    certainty = "Proven:" if known.is_proven else "Not proven yet: probably"
    gain = f"{certainty} at least {show(known.speedup.low, 'times')} times as fast"
    if progress.best is None:
        return gain
    rest = max(width - cell_len(f"{gain} ()"), _NARROWEST_TEXT)
    return f"{gain} ({_cut_settings(_describe_settings(progress, progress.best), rest)})"


def _describe_trial(progress: Progress, trial: TrialRecord, width: int) -> str:
    """Describe a trial's last run: a success with the best so far, or a failure with its reason."""
    total = str(progress.total)
    count = f"{progress.done:>{len(total)}}/{total}"
    if trial.repeats:
        count = f"{'again':>{len(count)}}"
    # a trial itself is judged by its first run and the memory limit
    run = trial.repeats[-1] if trial.repeats else trial
    step = f"{count}  #{trial.number:<{len(total)}}"
    settings = _describe_settings(progress, trial)
    if run.outcome == "ok" and run.measurement is not None:
        best = f"best {_describe_gain(progress) or show(_rate_of(progress.best), 'plain_rate')}"
        rate = show(run.measurement.samples_per_s, "plain_rate")
        head = f"{step}  {rate:>9} samples/s  {best:<11}  "
        return head + _cut_settings(settings, max(width - cell_len(head), _NARROWEST_TEXT))
    head = f"{step}  {OUTCOMES[run.outcome]:>19}  "
    rest = max(width - cell_len(head), 2 * _NARROWEST_TEXT)
    if not run.reason:
        return head + _cut_settings(settings, rest)
    settings = _cut_settings(settings, rest // 2)
    return f"{head}{settings}: {shorten(run.reason, rest - cell_len(settings) - 2)}"


def _describe_state(progress: Progress, passed_s: float, width: int) -> str:
    """Describe the state of the search on one line.

    Example: `trial 7/40 | best 2,345 samples/s, 1.90× (batch 64) | at most 12 % more | 80 s left`.
    If it is too wide, settings are left out first, then the gain still possible.
    """  # noqa: RUF002 - a times sign
    if progress.phase in _ALONE:
        step = _ALONE[progress.phase][0]
    elif progress.phase == "confirm":
        step = f"deciding, {format_count(progress.done, 'pair')}"
    else:
        step = f"trial {progress.done}/{progress.total}"
    clock = _describe_clock(progress, passed_s)
    rate = _rate_of(progress.best)
    gain = _describe_gain(progress)
    if progress.best is None or rate is None:
        return f"{step} | {clock}"
    best = f"best {show(rate, 'rate')}"
    if progress.known is not None and progress.known.speedup.low > 1:
        least = f"{show(progress.known.speedup.low, 'times')}×"  # noqa: RUF001 - a times sign
        certainty = "proven" if progress.known.is_proven else "probably"
        best = f"{certainty} {least}, {best}"
    elif gain:
        best += f", {gain}"
    more = _describe_more(progress)
    rest = width - cell_len(f"{step} | {best} | {clock}{more}")
    if rest < 0:
        more, rest = "", rest + cell_len(more)
    rest -= len(" ()")
    settings = ""
    if rest >= _NARROWEST_TEXT:
        settings = f" ({_cut_settings(_describe_settings(progress, progress.best), rest)})"
    return f"{step} | {best}{settings}{more} | {clock}"


def _describe_more(progress: Progress) -> str:
    """Describe the most that other settings can still gain; "" if unknown."""
    if progress.can_win is None or not isfinite(progress.can_win):
        return ""
    if progress.can_win < 0.01:  # a gain is shown in whole per cents
        return " | less than 1 % more"
    # 1e-6: more than floating point adds to a per cent, less than is shown
    return f" | at most {ceil(100 * progress.can_win - 1e-6):,} % more"


def _describe_clock(progress: Progress, passed_s: float) -> str:
    if progress.remaining_s is None:
        return f"{_whole_seconds(progress.elapsed_s + passed_s)} so far"
    return f"{_whole_seconds(progress.remaining_s - passed_s)} left"


def _whole_seconds(seconds: float) -> str:
    return f"{max(round(seconds), 0)} s" if seconds < 60 else show(seconds, "duration")


def _describe_gain(progress: Progress) -> str:
    """Return the best over the baseline; "" if either is unknown."""
    best = _rate_of(progress.best)
    baseline = _rate_of(progress.baseline)
    if best is None or baseline is None:
        return ""
    return f"{show(best / baseline, 'times')}×"  # noqa: RUF001 - a times sign


def _rate_of(trial: TrialRecord | None) -> float | None:
    return None if trial is None or trial.measurement is None else trial.measurement.samples_per_s


def _describe_settings(progress: Progress, trial: TrialRecord) -> str:
    if progress.baseline is None or trial.number == progress.baseline.number:
        return one_line(describe_settings(trial.config))
    return one_line(describe_settings(trial.config, progress.baseline.config))


def _cut_settings(settings: str, width: int) -> str:
    """Return as many whole settings as fit, at least the first, then an ellipsis."""
    parts = settings.split(", ")
    if cell_len(settings) <= width:
        return settings
    while len(parts) > 1 and cell_len(", ".join([*parts, "…"])) > width:
        parts.pop()
    return shorten(", ".join([*parts, "…"]), width)
