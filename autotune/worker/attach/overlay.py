"""Where a script's writes to files that existed before a trial go: an overlay on disk, below the trial's scratch.

Comes in: paths as the script names them. Goes out: the path to use in their place. A file that is written is a copy
below `led/files/`, by its absolute path; one that is removed has a mark below `led/gone/`; files that the script
makes are written where it wants them, and listed in `new`. All of it lies on disk, so that every process of a trial,
forked or fresh, sees the same. What native code writes by itself (HDF5, a subprocess) is not seen here.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Overlay", "new_files"]

_SPECIAL = ("/dev/", "/proc/", "/sys/")
_stat, _lstat, _open, _mkdir, _makedirs = os.stat, os.lstat, os.open, os.mkdir, os.makedirs
_unlink, _rmdir, _replace, _listdir = os.unlink, os.rmdir, os.replace, os.listdir
"""Python's own, which are patched later (file_calls)."""


class Overlay:
    """The overlay of a trial.

    Args:
        scratch: The folder that holds it.
    """

    def __init__(self, scratch: Path) -> None:
        self.root = os.path.realpath(scratch)
        self._led = f"{self.root}/led"
        self._files, self._gone = f"{self._led}/files", f"{self._led}/gone"
        self._list = f"{self.root}/new"
        self._new = set[str]()
        self._read_to = 0

    def to_read(self, path: Any) -> Any:
        """The path to read, or to ask about, in place of one.

        Raises:
            FileNotFoundError: the script has removed it.
        """
        if not self._is_used():
            return path
        place = _place(path)
        if place is None or place.startswith(self.root):
            return path
        copy = self._files + place
        if _is_there(copy):
            return copy
        if self.is_gone(place):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return path

    def to_write(self, path: Any, *, keeps: bool) -> Any:
        """The path to write in place of one; with `keeps`, what it held is there to be added to or changed."""
        place = _place(path)
        if place is None or place.startswith((self.root, *_SPECIAL)):
            return path
        copy = self._files + place
        if _is_there(copy):
            return copy
        if self.is_gone(place):
            self._unmark(place)
            _makedirs(os.path.dirname(copy), mode=0o700, exist_ok=True)
            return copy
        if not _is_there(place):
            self.note_new(place)
            return path
        if self.is_new(place) or not os.path.isfile(place):
            return path
        _makedirs(os.path.dirname(copy), mode=0o700, exist_ok=True)
        if keeps:
            shutil.copy2(place, copy)
        else:
            os.close(_open(copy, os.O_WRONLY | os.O_CREAT, _stat(place).st_mode & 0o777))
        return copy

    def remove(self, path: Any, act: Any) -> None:
        """Remove a file or an empty folder as the script sees it; `act` removes what is not of before."""
        place = _place(path, follows=False)
        if place is None or place.startswith((self.root, *_SPECIAL)):
            act(path)
            return
        copy = self._files + place
        if self.is_gone(place):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        if not self.existed(place):
            act(copy if _is_there(copy) and not _is_there(place) else path)
            return
        is_folder = os.path.isdir(place) and not os.path.islink(place)
        if is_folder and act is not _rmdir:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if is_folder and self.names_in(place):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        if _is_there(copy) and not is_folder:
            _unlink(copy)
        self._mark(place)

    def rename(self, source: Any, target: Any, act: Any) -> None:
        """Rename as the script sees it: what existed before stays, and is copied; `act` renames what is new."""
        old, new = _place(source, follows=False), _place(target, follows=False)
        if old is None or new is None:
            act(source, target)
            return
        own = self.to_read(source)  # raises where it is gone
        is_kept = self.existed(old)
        if is_kept and os.path.isdir(own):
            self._copy_folder(old, new)
            return
        goal = self.to_write(target, keeps=False)
        if not is_kept:
            _replace(own, goal)
            return
        shutil.copy2(own, goal, follow_symlinks=False)
        copy = self._files + old
        if _is_there(copy):
            _unlink(copy)
        self._mark(old)

    def made_folder(self, path: Any) -> bool:
        """Whether a folder that the script had removed is there again by this call."""
        place = _place(path)
        if place is None or not self._is_used() or not self.is_gone(place):
            return False
        self._unmark(place)
        return True

    def names_in(self, path: Any) -> list[str]:
        """The names in a folder as the script sees it."""
        place = _place(path)
        own = _listdir(path)
        if place is None or not self._is_used():
            return own
        with suppress(FileNotFoundError):
            own += [name for name in _listdir(self._files + place) if name not in own]
        return [name for name in own if not self.is_gone(f"{place.rstrip('/')}/{name}")]

    def existed(self, place: str) -> bool:
        """Whether there is something at an absolute path that the trial has not made."""
        return _is_there(place) and not self.is_new(place) and not place.startswith((self.root, *_SPECIAL))

    def is_gone(self, place: str) -> bool:
        """Whether the script has removed what existed at an absolute path, or a folder above it."""
        at = self._gone
        if not _is_there(at):
            return False
        for part in place.strip("/").split("/"):
            at = f"{at}/{part}"
            if not _is_there(at):
                return False
            if os.path.isfile(at):
                return not _is_there(self._files + place)
        return False

    def is_new(self, place: str) -> bool:
        """Whether the trial, in any of its processes, has made what is at an absolute path."""
        if place in self._new:
            return True
        with suppress(FileNotFoundError), open(_open(self._list, os.O_RDONLY), "rb") as noted:
            noted.seek(self._read_to)
            text = noted.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_to += len(whole)
            self._new.update(json.loads(line) for line in whole.splitlines())
        return place in self._new

    def note_new(self, place: str) -> None:
        """The trial is about to make what is not there yet."""
        self._new.add(place)
        noted = _open(self._list, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(noted, f"{json.dumps(place)}\n".encode())
        finally:
            os.close(noted)

    def _is_used(self) -> bool:
        return _is_there(self._led)  # one question to the system for each file that is read

    def _mark(self, place: str) -> None:
        mark = self._gone + place
        if os.path.isdir(mark):
            shutil.rmtree(mark)
        _makedirs(os.path.dirname(mark), mode=0o700, exist_ok=True)
        os.close(_open(mark, os.O_WRONLY | os.O_CREAT, 0o600))

    def _unmark(self, place: str) -> None:
        """Take a mark away; of a folder, what it held stays gone."""
        mark = self._gone + place
        if os.path.isfile(mark):
            _unlink(mark)
        if os.path.isdir(place):
            for name in _listdir(place):
                self._mark(f"{place}/{name}")

    def _copy_folder(self, old: str, new: str) -> None:
        self.note_new(new)
        _mkdir(new)
        for name in self.names_in(old):
            own, goal = self.to_read(f"{old}/{name}"), f"{new}/{name}"
            if os.path.isdir(own):
                self._copy_folder(f"{old}/{name}", goal)
            else:
                self.note_new(goal)
                shutil.copy2(own, goal, follow_symlinks=False)
        self._mark(old)


def new_files(scratch: Path) -> tuple[str, ...]:
    """The files that a trial has made and left outside of its own folder, temporary ones left out; as it made them."""
    hidden = (os.path.realpath(tempfile.gettempdir()) + os.sep, "/dev/shm/", os.path.realpath(scratch))  # noqa: S108 - what is not listed
    with suppress(FileNotFoundError):
        lines = (Path(scratch) / "new").read_bytes().splitlines()
        found = dict.fromkeys(json.loads(line) for line in lines)
        return tuple(path for path in found if os.path.isfile(path) and not path.startswith(hidden))
    return ()


def _is_there(path: str) -> bool:
    try:
        _lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _place(path: Any, *, follows: bool = True) -> str | None:
    """A path's absolute form; None for a descriptor. A link itself is kept where it is not to be followed."""
    if isinstance(path, int):
        return None
    text = os.fsdecode(path)
    if follows:
        return os.path.realpath(text)
    return os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))
