"""A trial's log: all that its processes print, or the beginning and the end where that is too much."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from autotune.protocol.disk import disk_error

__all__ = ["LogFile", "open_log"]

_HEAD_BYTES = 256 * 1024  # our convention, as the tail's: some thousand lines of each
_TAIL_BYTES = 256 * 1024
_CHUNK_BYTES = 64 * 1024  # what a pipe holds; man 7 pipe
_PUMP_BYTES = 1024 * 1024  # our convention; then the deadline and the memory are checked again


def open_log(path: Path) -> tuple[LogFile, int]:
    """A log, and the descriptor that a trial's processes write to.

    Raises:
        RunFolderError: the log can't be written; nothing stays open.
    """
    reading, writing = os.pipe()
    try:
        return LogFile(path, reading), writing
    except OSError as error:
        os.close(reading)
        os.close(writing)
        raise disk_error(path, error) from error


class LogFile:
    """Writes what comes out of a pipe to a file, at most half a MiB."""

    def __init__(self, path: Path, pipe: int) -> None:
        self._file: BinaryIO = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)  # noqa: PTH123, SIM115 - a descriptor, closed by close()
        self._pipe = pipe
        os.set_blocking(pipe, False)
        self._room = _HEAD_BYTES
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped = 0

    def fileno(self) -> int:
        """The pipe's descriptor, to select on."""
        return self._pipe

    def pump(self) -> bool:
        """Read what is in the pipe now, 1 MiB at most; whether it was full, so that more may wait."""
        taken = 0
        with suppress(BlockingIOError):
            while taken < _PUMP_BYTES and (chunk := os.read(self._pipe, _CHUNK_BYTES)):
                self._keep(chunk)
                taken += len(chunk)
        return taken >= _CHUNK_BYTES

    def close(self) -> None:
        """Read the rest and write the end; a full disk costs the log its end, not the study a trial."""
        while self.pump():
            pass
        if self._dropped:
            self._write(f"\n... {self._dropped:,} bytes left out ...\n".encode())
        for chunk in self._tail:
            self._write(chunk)
        self._file.close()
        os.close(self._pipe)

    def _keep(self, chunk: bytes) -> None:
        head, rest = chunk[: self._room], chunk[self._room :]
        self._room -= len(head)
        self._write(head)
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            gone = self._tail.popleft()
            self._tail_bytes -= len(gone)
            self._dropped += len(gone)

    def _write(self, data: bytes) -> None:
        with suppress(OSError):
            self._file.write(data)
