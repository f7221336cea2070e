"""Removes what a script has made in its user's folders during a trial, once all processes of the trial have ended.

Comes in: the trial's overlay, in whose journal the script's processes have recorded what they made (see
`autotune.worker.attach.redirect`). Goes out: the folders as the trial has found them, and the paths that had to stay.

Removed are the files and folders that a record names and that are still the same ones, by device and inode; and what
native code or another program has written into such a folder, as long as it is no folder itself: that may be somebody
else's. What was recorded as kept, in a cache or by a download, stays.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

__all__ = ["remove_made"]

_Made = dict[str, tuple[int, ...]]
"""Paths with the device and inode of what was made there; empty where it was gone before it was recorded."""


def remove_made(overlay: Path) -> tuple[str, ...]:
    """Remove what a trial has made outside its own folder.

    Args:
        overlay: the trial's, whose journal is read; where there is none, nothing was made.

    Returns:
        What is still there and was not to be kept, sorted.
    """
    made, kept = _recorded(overlay / "journal")
    left = list[str]()
    for path in sorted(made, reverse=True):  # what lies in a folder before the folder
        left += _remove(path, made, kept)
    left = [path for path in left if os.path.lexists(path)]
    return tuple(sorted(path for path in left if not any(one.startswith(f"{path}/") for one in left)))


def _recorded(journal: Path) -> tuple[_Made, _Made]:
    """What the trial has made and is to be removed, by its last path, and what is to be kept."""
    made, kept = _Made(), _Made()
    if not journal.is_file():
        return made, kept
    status, is_own = journal.stat(), False
    for line in journal.read_text("utf-8", errors="replace").splitlines():
        try:
            kind, path, *rest = json.loads(line)
        except (ValueError, TypeError):  # a line that a process was killed in
            continue
        if kind == "journal":  # else a copy, which somebody else may have written
            is_own = rest == [status.st_dev, status.st_ino]
        if kind in {"new", "kept", "old"}:
            made.pop(path, None)
            kept.pop(path, None)
        if kind in {"new", "kept"}:
            (kept if kind == "kept" else made)[path] = tuple(rest)
        elif kind == "moved":
            for known in (made, kept):
                for below in [one for one in known if one.startswith(f"{path}/")]:
                    known[f"{rest[0]}{below[len(path) :]}"] = known.pop(below)
    return (made, kept) if is_own else (_Made(), _Made())


def _remove(path: str, made: _Made, kept: _Made) -> list[str]:
    """Remove one file, or one folder with the files in it; what had to stay and was not to be kept."""
    try:
        status = os.lstat(path)
        if (status.st_dev, status.st_ino) != made[path]:  # replaced by somebody else
            return [path]
        if not stat.S_ISDIR(status.st_mode):
            Path(path).unlink()
            return []
        with os.scandir(path) as entries:
            inside = {entry.path: entry.is_dir(follow_symlinks=False) for entry in entries}
        staying = [one for one, is_folder in inside.items() if is_folder or one in kept]
        for one in inside.keys() - staying:
            Path(one).unlink()
        if not staying:
            Path(path).rmdir()
    except FileNotFoundError:
        return []
    except OSError:
        return [path]
    return [one for one in staying if one not in made and one not in kept]
