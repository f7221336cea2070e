"""Where a path of the script really lies, and which paths the trial may change there.

Comes in: paths as the script gives them. Goes out: *logical* paths (absolute, without symbolic links, as the script
sees the tree) and *physical* ones (where the bytes are). What was redirected is mapped: a file to its copy in scratch,
a renamed file or folder to where it has always been, a removed one to None; what lies below a mapped folder follows.
The trial's own are paths in scratch, what it has made itself, and what lies below a folder that it has made.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from autotune.worker.attach.redirect.copying import copy_file
from autotune.worker.attach.redirect.journal import STAMP_BYTES, Journal, Record
from autotune.worker.attach.redirect.paths import AnyPath, error_of, parent_of, text_of
from autotune.worker.attach.redirect.real import real_os
from autotune.worker.attach.redirect.redirections import Redirections

__all__ = ["View"]


class View:
    """The map of a trial, as one process sees it."""

    def __init__(self, scratch: str, free: tuple[str, ...], caches: tuple[str, ...] = ()) -> None:
        self.scratch = scratch
        self._store = f"{scratch}/files"
        self._free = tuple(f"{folder}/" for folder in (scratch, *free, "/proc", "/sys"))
        self._caches = tuple(f"{folder}/" for folder in caches)
        self._keeping = threading.local()
        self._redirected = Redirections()
        self._links: dict[str, str] = {}
        self._read = b""
        self._idle = b""
        self._cwd: tuple[str, str] | None = None
        self._reading = threading.RLock()
        self._journal = Journal(scratch)
        self._stamp = self._journal.stamp
        with self.changing():
            if self._journal.position == 0:
                self.commit([["journal", self._journal.path]])
            with suppress(FileExistsError):
                real_os.mkdir(self._store, 0o700)

    def is_idle(self) -> bool:
        """Whether every path is where it is: the one thing that a read asks first."""
        return self._stamp[:STAMP_BYTES] == self._idle or self._synced()

    def forked(self) -> None:
        """In a child: another thread of the parent may have been amidst a change."""
        self._journal.forked()
        self._reading = threading.RLock()
        self._redirected, self._links, self._read, self._idle = Redirections(), {}, b"", b""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Alone in the trial, and with all that was changed before."""
        with self._journal.locked():
            self._synced()
            yield

    def commit(self, records: list[Record]) -> None:
        """Make a change known to the trial's processes, this one too; needs `changing`, and what is new to be there."""
        for record in records:
            if record[0] in {"journal", "new", "kept"}:
                status = _status(str(record[1]))
                record[2:] = () if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns)
        if records:
            with self._reading:
                self._journal.append(records)
                self._learn(records, self._stamp[:STAMP_BYTES])

    def _synced(self) -> bool:
        if self._stamp[:STAMP_BYTES] != self._read:
            with self._reading:
                stamp = self._stamp[:STAMP_BYTES]  # before the records: a later one is seen at the next look
                self._learn(self._journal.unread(), stamp)
        return not self._redirected

    def _learn(self, records: list[Record], stamp: bytes) -> None:
        self._redirected.apply(records)
        self._links = {}
        self._read = stamp
        self._idle = b"" if self._redirected else stamp

    def logical(self, path: str, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """A path as the script sees the tree; the last name's symbolic link is followed where that is wanted.

        Raises:
            OSError: symbolic links lead in a circle, or `..` leaves what is no folder.
        """
        if not path.startswith("/"):
            path = f"{self.cwd() if dir_fd is None else real_os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
        folder, _, name = path.rpartition("/")
        if name in {"", ".", ".."}:
            return self._walk(path)
        known = self._links.get(folder)
        if known is None:
            known = self._links[folder] = self._walk(folder)
        found = f"{known}/{name}"
        if follow and (target := self._target(found)) is not None:
            return self._walk(target if target.startswith("/") else f"{known}/{target}")
        return found

    def physical(self, logical: str) -> str | None:
        """Where a logical path is or would be; None where it or a folder above was removed."""
        return self._redirected.physical(logical)

    def seen(self, path: AnyPath, dir_fd: int | None = None, *, follow: bool = True) -> str:
        """The path on which a read really works; where the script sees none, one that does not exist."""
        text = text_of(path)
        if not text:
            return text
        logical = self.logical(text, dir_fd, follow=follow)
        found = self.physical(logical)
        end = "/" if text.endswith("/") else ""
        return f"{self.scratch}/none" if found is None else f"{found or '/'}{end}"

    def is_own(self, physical: str) -> bool:
        """Whether the trial may change what lies there."""
        return self.is_free(physical) or self._redirected.is_made(physical)

    def is_free(self, physical: str) -> bool:
        """Whether it lies in a folder of the trial's own, where nothing is recorded."""
        return f"{physical}/".startswith(self._free)

    def is_stored(self, physical: str) -> bool:
        """Whether it lies in scratch."""
        return f"{physical}/".startswith(self._free[0])

    def beneath(self, logical: str) -> str | None:
        """Where a logical path would be if it were not redirected itself."""
        parent = self.physical(parent_of(logical))
        return None if parent is None else f"{parent}/{logical.rpartition('/')[2]}"

    def status(self, logical: str) -> os.stat_result | None:
        """What lies at a logical path, symbolic links not followed; None where there is nothing."""
        physical = self.physical(logical)
        return None if physical is None else _status(physical or "/")

    def names(self, logical: str) -> list[str]:
        """What the script sees in a folder."""
        physical = self.physical(logical)
        names = dict.fromkeys(real_os.listdir(f"{self.scratch}/none" if physical is None else physical or "/"))
        for name, is_seen in self._redirected.inside(logical).items():
            if is_seen:
                names[name] = None
            else:
                names.pop(name, None)
        return list(names)

    def is_plain(self, logical: str) -> bool:
        """Whether a folder is where it is, with everything in it."""
        return self.physical(logical) == logical and not self._redirected.inside(logical)

    def create(self, logical: str, make: Callable[[str], Any]) -> Any:
        """Make something where there is nothing; needs `changing`.

        Raises:
            OSError: as `make` does; or scratch can't be written, and nothing is made.
        """
        at, records = self.place(logical)
        made = make(at)
        try:
            self.commit(records)
        except OSError:
            if isinstance(made, int):
                real_os.close(made)
            remove = real_os.rmdir if stat.S_ISDIR(real_os.lstat(at).st_mode) else real_os.unlink
            remove(at)
            raise
        return made

    def place(self, logical: str) -> tuple[str, list[Record]]:
        """Where something new is to lie (where the script wants it, if that is free), and what is then to be known."""
        parent = self.folder_of(logical)
        beneath = f"{parent}/{logical.rpartition('/')[2]}"
        if _status(beneath) is None and (beneath == logical or self.is_own(parent)):
            records: list[Record] = [["unmap", logical]] if logical in self._redirected else []
            return beneath, [*records, *self.made(beneath)]
        at = self._slot(logical)
        return at, [["map", logical, at]]

    def made(self, physical: str) -> list[Record]:
        """What is to be known of something that the trial has made there: whether it is to be removed or kept."""
        if self.is_free(physical):
            return []
        is_kept = getattr(self._keeping, "depth", 0) or f"{physical}/".startswith(self._caches)
        return [["kept" if is_kept else "new", physical]]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what this thread makes for later trials: a download."""
        self._keeping.depth = getattr(self._keeping, "depth", 0) + 1
        try:
            yield
        finally:
            self._keeping.depth -= 1

    def folder_of(self, logical: str) -> str:
        """The physical folder in which something new is to appear.

        Raises:
            OSError: there is none, or it can't be written.
        """
        self.check_folder(parent_of(logical))
        parent = self.physical(parent_of(logical)) or ""
        if not real_os.access(parent or "/", os.W_OK | os.X_OK, effective_ids=True):
            raise error_of(errno.EACCES)
        return parent

    def check_folder(self, logical: str) -> None:
        """Raise what the system would where a folder is none."""
        is_there = True
        while (status := self.status(logical)) is None:
            logical, is_there = parent_of(logical), False
        if not stat.S_ISDIR(status.st_mode):
            raise error_of(errno.ENOTDIR)
        if not is_there:
            raise error_of(errno.ENOENT)

    def copy(self, logical: str, physical: str, *, is_empty: bool = False) -> str:
        """Redirect a file to a copy in scratch; needs `changing`.

        Raises:
            OSError: the file can't be read, or scratch can't be written or is full.
        """
        at = self._slot(logical)
        try:
            copy_file(physical, at, is_empty=is_empty)
            self.commit([["map", logical, at]])
        except OSError:
            with suppress(OSError):
                real_os.unlink(at)
            raise
        return at

    def hide(self, logical: str) -> Record:
        """What is to be known once nothing is to be seen at a logical path any more."""
        beneath = self.beneath(logical)
        is_there = beneath is not None and _status(beneath) is not None
        return ["map", logical, None] if is_there else ["unmap", logical]

    def stow(self, logical: str, physical: str) -> str:
        """Move something of the trial's own to scratch; a folder on another disk stays where it is."""
        at = self._slot(logical)
        try:
            real_os.rename(physical, at)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            kind = real_os.lstat(physical).st_mode
            if stat.S_ISDIR(kind):
                return physical
            if stat.S_ISLNK(kind):
                real_os.symlink(real_os.readlink(physical), at)
            else:
                copy_file(physical, at)
            real_os.unlink(physical)
        return at

    def cwd(self) -> str:
        """The current folder as the script sees it."""
        real: str = real_os.getcwd()
        return self._cwd[1] if self._cwd is not None and self._cwd[0] == real else real

    def enter(self, logical: str, physical: str) -> None:
        """Change to a folder that may lie elsewhere."""
        real_os.chdir(physical or "/")
        self._cwd = None if logical == physical else (real_os.getcwd(), logical or "/")

    def _slot(self, logical: str) -> str:
        number = self._journal.position
        while True:
            folder = f"{self._store}/{number}"
            try:
                real_os.mkdir(folder, 0o700)
            except FileExistsError:
                number += 1
            else:
                return f"{folder}/{logical.rpartition('/')[2]}"

    def _target(self, logical: str) -> str | None:
        if f"{logical}/".startswith("/proc/"):  # its links are no paths: pipe:[1]
            return None
        physical = self.physical(logical)
        try:
            return None if physical is None else real_os.readlink(physical)
        except OSError:
            return None

    def _walk(self, path: str) -> str:
        """An absolute path with its symbolic links resolved in the view."""
        left, found, links = path.split("/")[::-1], "", 0
        while left:
            name = left.pop()
            if name in {"", "."}:
                continue
            if name == "..":
                self.check_folder(found)
                found = parent_of(found)
                continue
            found = f"{found}/{name}"
            target = self._target(found)
            if target is None:
                continue
            links += 1
            if links > 40:  # as Linux: MAXSYMLINKS, path_resolution(7)
                raise error_of(errno.ELOOP)
            found = "" if target.startswith("/") else parent_of(found)
            left.extend(target.split("/")[::-1])
        return found


def _status(physical: str) -> os.stat_result | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return real_os.lstat(physical)
    return None
