"""Keep what a search writes to its user alone: folders of mode 0700 that belong to them, files of mode 0600.

Comes in: paths that autotune is about to write to. Goes out: folders made so, or a RunFolderError that says what is in
the way.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autotune.errors import RunFolderError

__all__ = ["make_private", "private_file", "refuse_foreign", "refuse_unfit"]

_PRIVATE = 0o700


def make_private(path: Path) -> None:
    """Make a folder that its owner alone may enter, if it is not there, with those above it.

    Raises:
        OSError: it can't be made.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o755, exist_ok=True)  # less the umask, and never for others to write
    path.mkdir(mode=_PRIVATE, exist_ok=True)


def private_file(path: str, flags: int) -> int:
    """Open a file that its owner alone may read, and follow no link: an opener for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def refuse_foreign(path: Path) -> None:
    """Refuse a folder that belongs to another user, or in which anybody may write.

    Others could have put files there that trials would run. Its mode is not changed: it may be shared on purpose, as
    /tmp is. Accepted is one that others may read, since the files in it are private, and one that the user's group may
    write: its members can change the user's code as well.

    Raises:
        RunFolderError: it belongs to another user, or anybody may write in it.
        OSError: it can't be asked.
    """
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise RunFolderError(
            f"a run folder must belong to the user who runs autotune (user id {os.geteuid()}), but {path} belongs to "
            f"user id {status.st_uid}; name another folder by run_dir"
        )
    if status.st_mode & stat.S_IWOTH:
        raise RunFolderError(
            f"others must not be able to write in a run folder, but {path} has mode "
            f"{stat.S_IMODE(status.st_mode):04o}; name another folder by run_dir, or close it with chmod 700"
        )


def refuse_unfit(path: Path) -> None:
    """Raise where trials can't be told the folder's name, or where the umask would lock its owner out.

    Raises:
        RunFolderError: a name is no UTF-8, or the umask takes the owner's own rights away.
    """
    for name, what in ((path, "the run folder"), (Path.cwd(), "the working directory")):
        try:
            str(name).encode()
        except UnicodeEncodeError:
            raise RunFolderError(
                f"the names of folders must be UTF-8, but that of {what} is {os.fsencode(name)!r}; rename it"
            ) from None
    umask = os.umask(0o077)  # there is no way to read it alone; for a moment others of this process write privately
    os.umask(umask)
    if umask & stat.S_IRWXU:
        raise RunFolderError(
            f"the umask must leave you your own files, but it is {umask:04o}; set it to 0077 or 0022 (umask 0077)"
        )
