"""What a trial's processes have redirected so far, on disk: lines that each of them appends and the others read.

The journal's length lies in a small file that every process maps, so that seeing whether there are new lines is
cheap. Changes hold a lock, reads none.
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

from autotune.worker.attach.redirect.paths import error_of
from autotune.worker.attach.redirect.real import opened, real_os

__all__ = ["STAMP_BYTES", "Journal", "Record"]

STAMP_BYTES = 8
Record = list[str | int | None]


class Journal:
    """A trial's journal, as one process sees it."""

    def __init__(self, scratch: str) -> None:
        self.path = f"{scratch}/journal"
        self._stamp_path = f"{scratch}/stamp"
        self._lock_path = f"{scratch}/lock"
        self._thread_lock = threading.RLock()
        self._depth = 0
        self.position = 0
        with self.locked():
            with opened(self.path, os.O_WRONLY | os.O_CREAT):
                pass
            with opened(self._stamp_path, os.O_RDWR | os.O_CREAT) as descriptor:
                if real_os.fstat(descriptor).st_size < STAMP_BYTES:
                    _write_all(descriptor, bytes(STAMP_BYTES))
                self.stamp = mmap.mmap(descriptor, STAMP_BYTES, prot=mmap.PROT_READ)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the trial's other processes and threads from changing anything; may be nested."""
        with self._thread_lock:
            if self._depth == 0:
                descriptor = real_os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX)  # a fork does not inherit it, as it would flock's
                except OSError:
                    real_os.close(descriptor)
                    raise
                self._held = descriptor
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    real_os.close(self._held)

    def forked(self) -> None:
        """Begin again in a child: another thread of the parent may have held the lock."""
        self._thread_lock = threading.RLock()
        self._depth = 0
        self.position = 0

    def append(self, records: Sequence[Record]) -> None:
        """Write records whole or not at all; needs the lock, and everything read.

        Raises:
            OSError: Scratch is full or can't be written.
        """
        data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        with opened(self.path, os.O_WRONLY | os.O_APPEND) as descriptor:
            before = real_os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, data)
            except OSError:
                real_os.ftruncate(descriptor, before)
                raise
        self.position = before + len(data)
        with opened(self._stamp_path, os.O_WRONLY) as descriptor:  # through the map, a full disk would be a SIGBUS
            real_os.pwrite(descriptor, self.position.to_bytes(STAMP_BYTES, "little"), 0)

    def unread(self) -> list[Record]:
        """Return the whole lines that were written since the last call."""
        parts = []
        with opened(self.path, os.O_RDONLY) as descriptor:
            os.lseek(descriptor, self.position, os.SEEK_SET)
            while part := real_os.read(descriptor, 1 << 20):
                parts.append(part)
        data = b"".join(parts)
        data = data[: data.rfind(b"\n") + 1]
        self.position += len(data)
        return [json.loads(line) for line in data.splitlines()]


def _write_all(descriptor: int, data: bytes) -> None:
    if real_os.write(descriptor, data) != len(data):
        raise error_of(errno.ENOSPC)
