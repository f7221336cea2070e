"""Run a command in processes of its own: what it prints, line by line with its second, and how it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Literal

import psutil

__all__ = ["Line", "RunCommand", "read_log", "run_command", "write_log"]

_END_WITHIN_S = 10.0
_LAST_WORDS_S = 5.0  # for the pipes of a command that has ended; a process that it left behind may hold them open
_LONGEST_LOG = 400_000  # characters

Stream = Literal["out", "err"]


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """A line that a command printed; a carriage return ends one as well, as progress bars use it."""

    at_s: float
    """Seconds since the command's start."""
    stream: Stream
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """A command that has ended."""

    code: int | None
    """Exit code; None: it ran until it was ended."""
    begun_s: float
    """Time of time.monotonic at its start."""
    seconds: float
    lines: tuple[Line, ...]
    """In the order in which they came."""

    def texts(self, stream: Stream) -> list[str]:
        """Return the lines of a stream, without blanks around them and without empty ones."""
        return [
            line.text.strip() for line in self.lines if line.stream == stream and line.text.strip()
        ]


def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    within_s: float,
    ends_by: signal.Signals = signal.SIGTERM,
) -> RunCommand:
    """Run a command to its end, or end it and all that it has started after `within_s` seconds.

    Args:
        command: Its words.
        folder: Where it runs.
        environment: Its environment.
        within_s: Seconds that it may run.
        ends_by: The signal that all its processes get then; what is left 10 s later is killed.
    """
    begun_s, lines = monotonic(), list[Line]()
    process = psutil.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )

    def read(pipe: IO[bytes], stream: Stream) -> None:
        pending = b""
        with pipe:
            while part := os.read(pipe.fileno(), 65_536):
                *whole, pending = re.split(rb"[\r\n]", pending + part)
                at_s = monotonic() - begun_s
                lines.extend(
                    Line(at_s, stream, one.decode(errors="replace")) for one in whole if one
                )
        if pending:
            lines.append(Line(monotonic() - begun_s, stream, pending.decode(errors="replace")))

    readers = [
        threading.Thread(target=read, args=(process.stdout, "out"), daemon=True),
        threading.Thread(target=read, args=(process.stderr, "err"), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        code = process.wait(within_s)
    except psutil.TimeoutExpired:
        code = None
        _end(process, ends_by)
    seconds = monotonic() - begun_s
    for reader in readers:
        reader.join(_LAST_WORDS_S)
    return RunCommand(
        code=code,
        begun_s=begun_s,
        seconds=seconds,
        lines=tuple(sorted(lines, key=lambda one: one.at_s)),
    )


def _end(process: psutil.Popen, ends_by: signal.Signals) -> None:
    tree = [process, *process.children(recursive=True)]
    for one in tree:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(ends_by)
    for one in psutil.wait_procs(tree, timeout=_END_WITHIN_S)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def write_log(path: Path, lines: Sequence[Line]) -> None:
    """Write lines down, each with its second and stream; of a long log the beginning."""
    text = "".join(f"{line.at_s:7.2f} {line.stream} {line.text}\n" for line in lines)
    path.write_text(text[:_LONGEST_LOG])


def read_log(path: Path) -> list[Line]:
    """Read lines that `write_log` has written."""
    lines = list[Line]()
    for text in path.read_text().split("\n"):
        if text:
            at_s, stream, words = text.lstrip().split(" ", 2)
            lines.append(Line(float(at_s), "out" if stream == "out" else "err", words))
    return lines
