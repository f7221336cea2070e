"""Copies one file to scratch, sharing its blocks where the file system can.

Comes in: two physical paths. Goes out: a file with the same bytes, permissions and times.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from autotune.worker.attach.redirect.real import FUNCTIONS as REAL

__all__ = ["copy_file"]

_COPY_BYTES = 1 << 30


def copy_file(source: str, to: str, *, is_empty: bool = False) -> None:
    """Copy a file's bytes, permissions and times; shares its blocks where the file system can.

    Raises:
        OSError: as the system says.
    """
    status = REAL["stat"](source)
    out = REAL["open"](to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if not is_empty:
            read = REAL["open"](source, os.O_RDONLY)
            try:
                _copy_bytes(read, out)
            finally:
                REAL["close"](read)
        with suppress(OSError):  # only root may give it to another
            REAL["fchown"](out, status.st_uid, status.st_gid)
        REAL["fchmod"](out, stat.S_IMODE(status.st_mode))
        if not is_empty:
            REAL["utime"](out, ns=(status.st_atime_ns, status.st_mtime_ns))
    finally:
        REAL["close"](out)


def _copy_bytes(read: int, out: int) -> None:
    try:
        while REAL["copy_file_range"](read, out, _COPY_BYTES):
            pass
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}:
            raise
    while part := REAL["read"](read, 1 << 20):  # the rest, or all where the two lie on different file systems
        while part:
            part = part[REAL["write"](out, part) :]
