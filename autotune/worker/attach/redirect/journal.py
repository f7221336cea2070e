"""What a trial's processes have redirected so far, on disk: lines that each of them appends and the others read on.

Comes in: records. Goes out: the records that other processes have written since. Whether there are any is cheap to
see: `stamp`, the journal's length, lies in a small file that every process maps. Changes hold a lock, reads none.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from autotune.worker.attach.redirect.real import FUNCTIONS as REAL

__all__ = ["STAMP_BYTES", "Journal", "Record", "read_records"]

STAMP_BYTES = 8
Record = list[str | int | None]


class Journal:
    """A trial's journal, as one process sees it."""

    def __init__(self, scratch: str) -> None:
        self.path, self._stamp_path, self._lock_path = (f"{scratch}/{name}" for name in ("journal", "stamp", "lock"))
        self._thread_lock = threading.RLock()
        self._depth = 0
        self.position = 0
        with self.locked():
            REAL["close"](REAL["open"](self.path, os.O_WRONLY | os.O_CREAT, 0o600))
            descriptor = REAL["open"](self._stamp_path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if REAL["fstat"](descriptor).st_size < STAMP_BYTES:
                    _write_all(descriptor, bytes(STAMP_BYTES))
                self.stamp = mmap.mmap(descriptor, STAMP_BYTES, prot=mmap.PROT_READ)
            finally:
                REAL["close"](descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the trial's other processes and threads from changing anything; may be held several times."""
        with self._thread_lock:
            if self._depth == 0:
                descriptor = REAL["open"](self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX)  # a fork does not inherit it, as it would flock's
                except OSError:
                    REAL["close"](descriptor)
                    raise
                self._held = descriptor
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    REAL["close"](self._held)

    def forked(self) -> None:
        """In a child: another thread of the parent may have held the lock."""
        self._thread_lock = threading.RLock()
        self._depth = 0
        self.position = 0

    def append(self, records: Sequence[Record]) -> None:
        """Write records whole or not at all; needs the lock, and everything read.

        Raises:
            OSError: scratch is full or can't be written.
        """
        data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        descriptor = REAL["open"](self.path, os.O_WRONLY | os.O_APPEND)
        try:
            before = REAL["fstat"](descriptor).st_size
            try:
                _write_all(descriptor, data)
            except OSError:
                REAL["ftruncate"](descriptor, before)
                raise
            self.position = before + len(data)
        finally:
            REAL["close"](descriptor)
        descriptor = REAL["open"](self._stamp_path, os.O_WRONLY)
        try:
            REAL["pwrite"](descriptor, self.position.to_bytes(STAMP_BYTES, "little"), 0)
        finally:
            REAL["close"](descriptor)

    def unread(self) -> list[Record]:
        """What was written since the last look."""
        records, self.position = read_records(self.path, self.position)
        return records


def read_records(path: str, position: int = 0) -> tuple[list[Record], int]:
    """The whole lines of a journal from a position on, and where they end."""
    descriptor = REAL["open"](path, os.O_RDONLY)
    try:
        os.lseek(descriptor, position, os.SEEK_SET)
        parts = []
        while part := REAL["read"](descriptor, 1 << 20):
            parts.append(part)
    finally:
        REAL["close"](descriptor)
    data = b"".join(parts)
    data = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in data.splitlines()], position + len(data)


def _write_all(descriptor: int, data: bytes) -> None:
    if REAL["write"](descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
