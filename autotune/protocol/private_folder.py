"""Who may reach what a search writes: folders that only their owner can enter, and that nobody can put another in.

Comes in: paths that autotune is about to write to. Goes out: folders made so, or a RunFolderError that says what is in
the way. A file system without owners or modes (FAT, a drive of Windows) shows the same for all; nothing is refused
there for that.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autotune.errors import RunFolderError

__all__ = ["make_private", "may_be_swapped", "private_file", "refuse_unfit"]

_PRIVATE = 0o700
_ABOVE = 0o755
"""Of folders above a private one that are made with it: less the umask, and never for others to write."""


def make_private(path: Path) -> None:
    """Make a folder that its owner alone may enter, if it is not there, with those above it.

    Raises:
        OSError: it can't be made.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=_ABOVE, exist_ok=True)
    path.mkdir(mode=_PRIVATE, exist_ok=True)


def private_file(path: str, flags: int) -> int:
    """An opener for `open`, which makes a file that its owner alone may read."""
    return os.open(path, flags, 0o600)


def may_be_swapped(path: Path) -> bool:
    """Whether any user of the machine may rename a folder or one above it, and so put another in its place.

    In a folder with the sticky bit, such as /tmp, nobody renames what another owns. Source: man 7 inode.
    """
    modes = (folder.stat().st_mode for folder in (path, *path.parents))
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in modes)


def refuse_unfit(path: Path) -> None:
    """Raise where trials can't be told the folder's name, or where the umask would lock its owner out.

    Raises:
        RunFolderError: one of both.
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
