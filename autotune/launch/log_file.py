"""A trial's log: whatever its processes print, of a flood the beginning and the end."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["LogFile"]

_HEAD_BYTES = 256 * 1024
_TAIL_BYTES = 256 * 1024
_CHUNK_BYTES = 64 * 1024


class LogFile:
    """Takes what comes out of a pipe; the disk never gets more than half a MiB of it."""

    def __init__(self, path: Path, pipe: int) -> None:
        self._file: BinaryIO = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)  # noqa: SIM115 - closed by close()
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
        """Take what lies in the pipe now, one chunk at most; False at its end, or where it is empty."""
        try:
            chunk = os.read(self._pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            return False
        self._keep(chunk)
        return True

    def close(self) -> None:
        """Take the rest and write the end down; a full disk costs the log its end, not the study a trial."""
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
