"""Removes what a script has made in its user's folders during a trial, once all processes of the trial have ended.

Comes in: the trial's overlay, in whose journal the script's processes have recorded what they made (see
`autotune.worker.attach.redirect`). Goes out: the folders as the trial has found them, and the paths that had to stay.

Removed are the files and folders that a record names and that are still the same ones, by device and inode. In such a
folder, files that no record names are removed as well, as native code or another program of the trial writes them:
those that are younger than the folder. A folder that no record names stays, and so does an older file, which was moved
there. What was recorded as kept, in a cache or by a download, stays, but for the lock of a build of an extension: torch
waits for as long as that file exists, so after a trial that was killed amidst the build, all later ones would.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

__all__ = ["Made", "list_names", "remove_made"]

_SQLITE = b"SQLite format 3\0"
_OF_SQLITE = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps with a database. Source: sqlite.org, "Temporary files used by SQLite"."""
_Entries = dict[str, tuple[int, ...]]
"""Paths with the device, the inode and the time of change, in nanoseconds, of what was made there when it was recorded;
empty where it was gone by then."""
_MOST_NAMES = 5000
"""In all folders that are looked at for what native code has left there; one of data has more. Our own convention."""


def remove_made(
    overlay: Path, *, until_ns: float = inf, before: Mapping[str, frozenset[str]] | None = None
) -> tuple[str, ...]:
    """Remove what a trial has made outside its own folder.

    Args:
        overlay: The trial's, whose journal is read; where there is none, nothing was made.
        until_ns: The trial's last sign of life, where it may have ended long ago: a file that has changed since stays.
        before: What some folders held before the trial, as `list_names` lists it. What else is in them by now native
            code has made, which no journal names, or another program: it stays.

    Returns:
        What is still there and was not to be kept, sorted.
    """
    records, left = _recorded(overlay / "journal"), list[str]()
    for path in sorted(records.made, reverse=True):  # what lies in a folder before the folder
        left += _remove(path, records.made, records.kept, until_ns)
    for path in records.kept:
        if _is_build_lock(path):
            _remove(path, records.kept, {}, until_ns)
    appeared = _appeared(before or {})
    left = [path for path in (*left, *appeared) if os.path.lexists(path) and path not in records.kept]
    return tuple(sorted(path for path in {*left} if not any(one.startswith(f"{path}/") for one in left)))


def _is_build_lock(path: str) -> bool:
    """Return whether a path is that of a lock of torch.utils.cpp_extension (`FileBaton`): its existence is the lock."""
    roots = (os.environ.get("TORCH_EXTENSIONS_DIR") or "/torch_extensions/", "/torch_extensions/")
    return path.endswith("/lock") and any(root in path for root in roots)


def list_names(folder: Path) -> dict[str, frozenset[str]]:
    """List what a folder and the folders right in it hold; those with very many names are left out."""
    found, left = dict[str, frozenset[str]](), _MOST_NAMES
    for path in (folder, *_folders_in(folder)):
        names = _names(path) if left > 0 else None
        if names is not None:
            found[str(path)], left = names, left - len(names)
    return found


def _folders_in(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in islice(entries, _MOST_NAMES) if entry.is_dir(follow_symlinks=False)]
    return []


def _appeared(before: Mapping[str, frozenset[str]]) -> list[str]:
    """Return the paths of what these folders hold by now and did not before, but for what Python compiles."""
    found = list[str]()
    for folder, known in before.items():
        found += [f"{folder}/{name}" for name in (_names(Path(folder)) or known) - known - {"__pycache__"}]
    return found


def _names(folder: Path) -> frozenset[str] | None:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES + 1)]
    except OSError:
        return None
    return frozenset(names) if len(names) <= _MOST_NAMES else None


@dataclass(slots=True)
class Made:
    """What a trial has made, as the records of its journal name it."""

    made: _Entries = field(default_factory=dict)
    """Files and folders to remove, by their last path."""
    kept: _Entries = field(default_factory=dict)
    """Files and folders to keep: caches and downloads."""
    _gone: _Entries = field(default_factory=dict)
    """Entries that were removed or moved; a later record takes their first time of change."""

    def __contains__(self, path: str) -> bool:
        return path in self.made or path in self.kept

    def learn(self, kind: str, path: str, rest: list[Any]) -> None:
        """Apply one record, in the journal's order."""
        if kind in {"new", "kept", "old"}:
            before = self.made.pop(path, None) or self.kept.pop(path, None) or self._gone.pop(path, None)
            if kind != "old":
                (self.kept if kind == "kept" else self.made)[path] = _with_first_time(rest, before)
            elif before:
                self._gone[path] = before
        elif kind == "moved":
            if path in self._gone:
                self._gone[rest[0]] = self._gone.pop(path)
            for known in (self.made, self.kept) if rest[1] else ():  # a folder, with what was made in it
                for below in [one for one in known if one.startswith(f"{path}/")]:
                    known[f"{rest[0]}{below[len(path) :]}"] = known.pop(below)


def _recorded(journal: Path) -> Made:
    """Read a journal; of a copy of one, which somebody else may have written, nothing."""
    records, is_own = Made(), False
    if not journal.is_file():
        return records
    status = journal.stat()
    for line in journal.read_text("utf-8", errors="replace").splitlines():
        try:
            kind, path, *rest = json.loads(line)
            records.learn(kind, path, rest)
        except (ValueError, TypeError, LookupError):  # a line that a process was killed in
            continue
        is_own |= kind == "journal" and rest[:2] == [status.st_dev, status.st_ino]
    return records if is_own else Made()


def _with_first_time(entry: list[int], before: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return what is recorded of something, with the time at which it was made where it has only moved."""
    if before is None or not entry or tuple(entry[:2]) != before[:2]:
        return tuple(entry)
    return (*before[:2], min(before[2], entry[2]))


def _remove(path: str, made: _Entries, kept: _Entries, until_ns: float) -> list[str]:
    """Remove one file, or one folder with the files in it; return what had to stay and was not to be kept."""
    try:
        status = os.lstat(path)
        is_folder = stat.S_ISDIR(status.st_mode)
        if (status.st_dev, status.st_ino) != made[path][:2] or (not is_folder and status.st_mtime_ns > until_ns):
            return [path]  # somebody else's by now
        if not is_folder:
            is_file = stat.S_ISREG(status.st_mode)
            own = _sides_of_database(path, made[path][2], until_ns) if is_file else []
            for one in (path, *own):
                Path(one).unlink()
            return []
        staying = _remove_strangers(path, made, kept, until_ns)
        if not staying:
            Path(path).rmdir()
    except FileNotFoundError:
        return []
    except OSError:
        return [path]
    return [one for one in staying if one not in made and one not in kept]


def _sides_of_database(path: str, since_ns: float, until_ns: float) -> list[str]:
    """Return SQLite's own files of a database that the trial has made; an older one of such a name is the user's."""
    found = list[str]()
    try:
        with Path(path).open("rb") as file:
            begin = file.read(len(_SQLITE))
    except OSError:  # it may be removed all the same
        return found
    if begin not in {_SQLITE, b""}:  # amid its first transaction it is empty
        return found
    for end in _OF_SQLITE:
        with suppress(FileNotFoundError):
            if since_ns <= os.lstat(f"{path}{end}").st_mtime_ns <= until_ns:
                found.append(f"{path}{end}")
    return found


def _remove_strangers(folder: str, made: _Entries, kept: _Entries, until_ns: float) -> list[str]:
    """Remove the files in a folder that no record names and that are younger than it; return what stays there."""
    with os.scandir(folder) as entries:
        inside = list(entries)
    staying = list[str]()
    for entry in inside:
        is_known = entry.path in made or entry.path in kept
        is_young = made[folder][2] <= entry.stat(follow_symlinks=False).st_mtime_ns <= until_ns
        if is_known or entry.is_dir(follow_symlinks=False) or not is_young:
            staying.append(entry.path)
        else:
            Path(entry.path).unlink()
    return staying
