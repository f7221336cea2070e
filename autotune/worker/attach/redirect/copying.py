"""Copies a file to scratch, sharing its blocks where the file system can."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from autotune.worker.attach.redirect.real import opened, real_os

__all__ = ["copy_file"]

_COPY_BYTES = 1 << 30
_CANT_SHARE = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
)  # copy_file_range(2), of two file systems, or of one that can't


def copy_file(source: str, to: str, *, is_empty: bool = False) -> None:
    """Copy a file's bytes, permissions and times to a physical path where there is nothing.

    Args:
        source: The file's physical path.
        to: That of the copy.
        is_empty: Copy the permissions alone, since the script truncates it anyway.

    Raises:
        OSError: As the system says.
    """
    status = real_os.stat(source)
    with opened(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as out:
        if not is_empty:
            with opened(source, os.O_RDONLY) as read:
                _copy_bytes(read, out)
        with suppress(OSError):  # only root may give it to another
            real_os.fchown(out, status.st_uid, status.st_gid)
        real_os.fchmod(out, stat.S_IMODE(status.st_mode))
        if not is_empty:
            real_os.utime(out, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_bytes(read: int, out: int) -> None:
    try:
        while real_os.copy_file_range(read, out, _COPY_BYTES):
            pass
    except OSError as error:
        if error.errno not in _CANT_SHARE:
            raise
    while part := real_os.read(read, 1 << 20):  # the rest, or all of it
        while part:
            part = part[real_os.write(out, part) :]
