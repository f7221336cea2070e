"""The lock of a run folder: one search at a time works there, and who it is can be read.

Comes in: the folder's names. Goes out: a lock that is held inside a context, or the sentence that says who holds it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from autotune.errors import RunFolderError
from autotune.frozen import FrozenModel
from autotune.protocol.disk import disk_error, read_model, write_model

__all__ = ["held_lock"]

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""What a file system answers that has no locks. Source: man 2 flock, man 5 nfs (nolock, local_lock)."""


class _Holder(FrozenModel):
    """The process of a search that works in a run folder."""

    pid: int
    host: str


@contextmanager
def held_lock(lock: Path, holder: Path) -> Iterator[None]:
    """Hold a run folder's lock; the file `holder` says meanwhile by which process.

    Raises:
        RunFolderError: another search holds it, or the folder can't be written or has no file locks.
    """
    held = FileLock(lock, timeout=0, mode=0o600)
    try:
        os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))  # FileLock may follow a link
        held.acquire()
    except Timeout:
        raise RunFolderError(
            f"one search at a time may use a run folder, but another works in {lock.parent}{_who(holder)}; wait for "
            "its end, or name another run_dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise disk_error(lock.parent, error) from error
        raise RunFolderError(
            f"a run folder must lie where files can be locked, which keeps two searches apart and the study whole, but "
            f"{lock.parent} is on a file system without locks ({error.strerror}); name a run_dir on a local disk"
        ) from error
    try:
        write_model(holder, _Holder(pid=os.getpid(), host=socket.gethostname()))
        yield
    finally:
        with suppress(OSError):
            holder.unlink(missing_ok=True)
        held.release()


def _who(holder: Path) -> str:
    """Return the process that holds a lock, for a sentence; "" where it is not written yet."""
    with suppress(OSError, ValidationError):
        found = read_model(holder, _Holder)
        return f" (process {found.pid} on {found.host})"
    return ""
