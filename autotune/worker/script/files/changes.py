"""Replace `open` and the functions of os, so that files that existed before a trial stay unchanged.

In: calls of the script. Out: the same results as the originals, on a View. A file opened for
writing is copied to scratch first; a removed one is only marked as removed; a renamed one is seen
elsewhere and stays where it was. Errors name the path that the script gave.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import MethodType
from typing import Any, Self

from autotune.worker.script.files.view import (
    AnyPath,
    ErrorsName,
    Record,
    View,
    copy_file,
    error_of,
    is_descriptor,
    is_dots,
    parent_of,
    text_of,
)
from autotune.worker.script.patching import open_file, real_os

# Functions that only read; in an unchanged tree they cost one comparison more


_LOOKS = ("getxattr", "listxattr", "lstat", "readlink", "stat", "statvfs")
_OF_LINKS = frozenset({real_os.lstat, real_os.readlink})


class Reads:
    """Replacements for the functions of os that read, on a view.

    All are bound methods: a class that keeps one as an attribute must not bind it to its own
    objects.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        for name in _LOOKS:
            setattr(self, name, MethodType(self._look, getattr(real_os, name)))

    def access(self, path: Any, mode: int, **named: Any) -> bool:
        """Replace os.access."""
        with suppress(OSError):
            return bool(self._look(real_os.access, path, mode, **named))
        return False

    def listdir(self, path: Any = None) -> list[Any]:
        """Replace os.listdir."""
        if self._is_real(path):
            return real_os.listdir(path)
        with ErrorsName(path):
            names = self._view.names(self._folder(path))
        if path is not None and _is_bytes(path):
            return [os.fsencode(name) for name in names]
        return names

    def scandir(self, path: Any = None) -> Any:
        """Replace os.scandir, with our own entries if anything in the folder lies elsewhere."""
        if self._is_real(path):
            return real_os.scandir(path)
        given = "." if path is None else text_of(path)
        with ErrorsName(path):
            logical = self._folder(path)
            named = os.path.abspath(given)  # noqa: PTH100 - no link is to be resolved
            if self._view.is_plain(logical) and named == logical:
                return real_os.scandir(path)
            names = self._view.names(logical)
        is_bytes = path is not None and _is_bytes(path)
        return _Entries(_Entry(given, name, is_bytes=is_bytes) for name in names)

    def chdir(self, path: Any) -> None:
        """Replace os.chdir."""
        if self._is_real(path):
            real_os.chdir(path)
            return
        with ErrorsName(path):
            self._view.enter(self._folder(path), self._view.seen(path).rstrip("/"))

    def getcwd(self) -> str:
        """Replace os.getcwd."""
        return self._view.cwd()

    def getcwdb(self) -> bytes:
        """Replace os.getcwdb."""
        return os.fsencode(self._view.cwd())

    def _look(self, function: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> Any:
        if self._view.is_idle() or is_descriptor(path):
            return function(path, *arguments, **named)
        with ErrorsName(path):
            follow = named.get("follow_symlinks", function not in _OF_LINKS)
            real: str | bytes = self._view.seen(path, named.pop("dir_fd", None), follow=follow)
            if _is_bytes(path):
                real = os.fsencode(real)
            return function(real, *arguments, **named)

    def _is_real(self, path: Any) -> bool:
        """Return whether the original function can be called with the path as it is."""
        if self._view.is_idle() or is_descriptor(path):
            return True
        return path is not None and not text_of(path)

    def _folder(self, path: AnyPath | None) -> str:
        return self._view.logical("." if path is None else text_of(path))


class _Entry:
    """Replace os.DirEntry."""

    def __init__(self, folder: str, name: str, *, is_bytes: bool) -> None:
        path = os.path.join(folder, name)  # noqa: PTH118 - as os.scandir joins
        self.name = os.fsencode(name) if is_bytes else name
        self.path = os.fsencode(path) if is_bytes else path

    def __fspath__(self) -> str | bytes:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Replace os.DirEntry.stat."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)  # noqa: PTH116 - the replacement

    def inode(self) -> int:
        """Replace os.DirEntry.inode."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Replace os.DirEntry.is_dir."""
        return stat.S_ISDIR(self._mode(follow_symlinks=follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Replace os.DirEntry.is_file."""
        return stat.S_ISREG(self._mode(follow_symlinks=follow_symlinks))

    def is_symlink(self) -> bool:
        """Replace os.DirEntry.is_symlink."""
        return stat.S_ISLNK(self._mode(follow_symlinks=False))

    def is_junction(self) -> bool:
        """Replace os.DirEntry.is_junction; there are junctions on Windows only."""
        return False

    def _mode(self, *, follow_symlinks: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except FileNotFoundError:
            return 0


class _Entries:
    """Replace the iterator that os.scandir returns."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Yield nothing more."""
        self._entries = iter(())


def _is_bytes(path: AnyPath) -> bool:
    return isinstance(os.fspath(path), bytes)


# Checks, and rename


def check_access(physical: str, flags: int) -> None:
    """Raise the error that opening a file for writing would; a writable one is not opened."""
    is_read = flags & os.O_RDWR
    if not real_os.access(physical, os.W_OK | (os.R_OK if is_read else 0), effective_ids=True):
        real_os.close(real_os.open(physical, os.O_RDWR if is_read else os.O_WRONLY))
        raise error_of(errno.EACCES)


def check_rename(
    source: str, status: os.stat_result, to: str, there: os.stat_result | None
) -> None:
    """Raise the error that the system would if one path can't take the place of another.

    Args:
        source: Logical path to rename.
        status: Its status.
        to: Logical path of the target.
        there: The target's status; None if there is none.
    """
    if f"{to}/".startswith(f"{source}/") and to != source:
        raise error_of(errno.EINVAL)
    if f"{source}/".startswith(f"{to}/") and to != source:
        raise error_of(errno.ENOTEMPTY)
    if there is None:
        return
    if stat.S_ISDIR(status.st_mode) and not stat.S_ISDIR(there.st_mode):
        raise error_of(errno.ENOTDIR)
    if stat.S_ISDIR(there.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise error_of(errno.EISDIR)


def move(view: View, source: str, to: str, there: os.stat_result | None) -> None:
    """Rename after all checks: move the script's own files, redirect those that existed before.

    Args:
        view: The view, which records the rename.
        source: Logical path to rename.
        to: Logical path of the target.
        there: The target's status; None if there is none.
    """
    physical = view.physical(source) or "/"
    target = view.physical(to)
    is_moved = view.is_own(physical) and not view.is_stored(physical)
    own_file: str | None = None  # the trial's own file, which is replaced
    if there is not None and target is not None and view.is_own(target):
        if stat.S_ISDIR(there.st_mode):
            with suppress(OSError):  # files renamed out of it may still lie in it, hidden
                real_os.rmdir(target)
        else:
            own_file = target

    # Move the file itself, if it is the script's own and not in scratch anyway.
    at = physical
    records = list[Record]()
    if is_moved and own_file is not None and not view.is_stored(own_file):
        at = own_file
        real_os.replace(physical, at)  # atomic, as readers expect
        records = view.made(at)
    elif is_moved:
        at, records = _taken(view, to, physical, there)
    elif view.folder_of(to) is not None:
        records = [["unmap", to] if view.beneath(to) == physical else ["map", to, physical]]

    # Record it; if that fails, move the file back.
    is_tree = stat.S_ISDIR(real_os.lstat(at).st_mode)
    moved = list[Record]()
    if at != physical:
        moved = [["old", physical], ["moved", physical, at, is_tree]]
    hidden = view.hide(source)
    try:
        view.commit([["unmap_below", to], ["renamed", source, to], *moved, *records, hidden])
    except OSError:
        if at not in {physical, target}:
            real_os.rename(at, physical)
        raise
    if own_file is not None and at != own_file:
        with suppress(OSError):
            real_os.unlink(own_file)


def _taken(
    view: View, to: str, physical: str, there: os.stat_result | None
) -> tuple[str, list[Record]]:
    """Move the script's own file to a path where it has none, or to scratch; return path and records."""
    if there is not None and view.physical(to) is not None and view.status(to) is not None:
        at = view.stow(to, physical)
        return at, [["map", to, at]]
    at, records = view.place(to)
    try:
        real_os.rename(physical, at)
    except OSError as error:
        if error.errno != errno.EXDEV or not view.is_stored(at):
            raise
        at = view.stow(to, physical)
        records = [["map", to, at]]
    return at, records


# Functions that open, make, rename and remove files


_READING = frozenset({"r", "rb", "br", "rt", "tr"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Changes:
    """Replacements for `open` and the functions of os that change files, on a view.

    All are bound methods, as in Reads.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self.rename = self.replace
        self.remove = self.unlink
        for name in ("chmod", "chown", "lchown", "removexattr", "setxattr", "truncate", "utime"):
            setattr(self, name, MethodType(self._amend, getattr(real_os, name)))
        for name in ("fchmod", "fchown"):
            setattr(self, name, MethodType(self._amend_descriptor, getattr(real_os, name)))
        for name in ("mkdir", "mkfifo", "mknod"):
            setattr(self, name, MethodType(self._make, getattr(real_os, name)))

    def open_file(  # noqa: PLR0913, PLR0917 - as builtins.open
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        """Replace builtins.open; the descriptor comes from the view."""
        is_plain_read = mode in _READING and self._view.is_idle()
        if opener is None and not isinstance(file, int) and not is_plain_read:
            opener = self._opened
        return open_file(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Replace os.open."""
        if not flags & _WRITING and self._view.is_idle():
            return real_os.open(path, flags, mode, dir_fd=dir_fd)
        text = text_of(path)
        with ErrorsName(path):
            if not text or not flags & _WRITING or flags & os.O_TMPFILE == os.O_TMPFILE:
                real = self._view.seen(path, dir_fd, follow=not flags & os.O_NOFOLLOW)
                return real_os.open(real, flags, mode)
            return self._open_writing(text, flags, mode, dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Replace os.unlink."""
        with ErrorsName(path), self._view.changing():
            logical, status = self._existing(path, dir_fd)
            if stat.S_ISDIR(status.st_mode):
                raise error_of(errno.EISDIR)
            if text_of(path).endswith("/"):
                raise error_of(errno.ENOTDIR)
            self._removed(logical, status, real_os.unlink)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Replace os.rmdir."""
        with ErrorsName(path), self._view.changing():
            logical, status = self._existing(path, dir_fd)
            if not stat.S_ISDIR(status.st_mode):
                raise error_of(errno.ENOTDIR)
            if text_of(path).rstrip("/").rpartition("/")[2] == ".":
                raise error_of(errno.EINVAL)
            if self._view.names(logical):
                raise error_of(errno.ENOTEMPTY)
            self._removed(logical, status, real_os.rmdir)

    def symlink(
        self,
        src: Any,
        dst: Any,
        target_is_directory: bool = False,
        *,
        dir_fd: int | None = None,
    ) -> None:
        """Replace os.symlink."""
        del target_is_directory
        self._make(lambda at: real_os.symlink(text_of(src), at), dst, dir_fd=dir_fd)

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """Replace os.link; a file that existed before is copied instead."""
        del follow_symlinks  # link(2) follows none on Linux
        if text_of(src).startswith("/proc/"):  # an unnamed file (O_TMPFILE) that gets a name
            self._make(
                lambda at: real_os.link(src, at, follow_symlinks=True), dst, dir_fd=dst_dir_fd
            )
            return
        with ErrorsName(src, dst), self._view.changing():
            logical, status = self._existing(src, src_dir_fd)
            if stat.S_ISDIR(status.st_mode):
                raise error_of(errno.EPERM)
            physical = self._view.physical(logical) or "/"
            is_own = self._view.is_own(physical)

            def make(at: str) -> None:
                if is_own:
                    with suppress(OSError):
                        real_os.link(physical, at)
                        return
                if stat.S_ISLNK(status.st_mode):
                    real_os.symlink(real_os.readlink(physical), at)
                else:
                    copy_file(physical, at)

            self._make(make, dst, dir_fd=dst_dir_fd)

    def replace(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """Replace os.rename and os.replace; the checks come in the order of Linux."""
        with ErrorsName(src, dst), self._view.changing():
            self._view.check_folder(parent_of(self._named(src, src_dir_fd)))
            to = self._named(dst, dst_dir_fd)
            self._view.check_folder(parent_of(to))
            source, status = self._existing(src, src_dir_fd)
            if is_dots(text_of(src)) or is_dots(text_of(dst)):
                raise error_of(errno.EBUSY)
            there = self._view.status(to)
            if text_of(dst).endswith("/") and not stat.S_ISDIR(status.st_mode):
                raise error_of(errno.ENOTDIR)
            check_rename(source, status, to, there)
            if there is not None and os.path.samestat(status, there):
                return
            if there is not None and stat.S_ISDIR(there.st_mode) and self._view.names(to):
                raise error_of(errno.ENOTEMPTY)
            self._check_folder_of(source, status)
            if there is not None:
                self._check_folder_of(to, there)
            move(self._view, source, to, there)

    def prepared(self, path: AnyPath) -> str:
        """Return the physical path where native code may change a file; make it if there is none."""
        real_os.close(self.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        return self._view.seen(path)

    def emptied(self, path: AnyPath) -> str:
        """Return the physical path where native code may write a file; make or empty it."""
        real_os.close(self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        return self._view.seen(path)

    def replaced(self, physical: str) -> None:
        """Record one of the trial's files again: native code may have replaced it."""
        with self._view.changing():
            if self._view.is_own(physical):
                self._view.commit(self._view.made(physical))

    def _opened(self, path: str, flags: int) -> int:
        return self.open(path, flags, 0o666)

    def _open_writing(self, text: str, flags: int, mode: int, dir_fd: int | None) -> int:
        is_new = flags & os.O_CREAT and flags & os.O_EXCL
        follow = not (flags & os.O_NOFOLLOW or is_new)
        end = "/" if text.endswith("/") else ""

        # A file of the trial's own needs no lock, unless a new one has to be recorded.
        self._view.is_idle()  # reads the changes of other processes
        logical = self._view.logical(text, dir_fd, follow=follow)
        physical = self._view.physical(logical)
        if physical is not None and self._view.is_own(physical):
            makes_none = not flags & os.O_CREAT or self._view.is_free(physical)
            if makes_none or self._view.status(logical) is not None:
                return real_os.open(physical + end, flags, mode)

        # Make a new file, or copy an existing one.
        with self._view.changing():
            logical = self._view.logical(text, dir_fd, follow=follow)
            physical = self._view.physical(logical)
            status = self._view.status(logical)
            if status is None:
                self._view.check_folder(parent_of(logical))
            if status is None and not (flags & os.O_CREAT):
                raise error_of(errno.ENOENT)
            if end and flags & os.O_CREAT:
                self._view.folder_of(logical)
                raise error_of(errno.EISDIR)
            if physical is None or (status is None and not self._view.is_free(physical)):
                made: int = self._view.create(
                    logical, lambda at: real_os.open(at, flags | os.O_EXCL, mode)
                )
                return made
            if is_new and status is not None:
                raise error_of(errno.EEXIST)
            is_written = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
            is_file = status is not None and stat.S_ISREG(status.st_mode)
            if is_file and is_written and not self._view.is_own(physical):
                if end:
                    raise error_of(errno.ENOTDIR)
                check_access(physical, flags)
                physical = self._view.copy(logical, physical, is_empty=bool(flags & os.O_TRUNC))
        return real_os.open(f"{physical or '/'}{end}", flags, mode)

    def _amend(
        self, function: Callable[..., None], path: Any, *arguments: Any, **named: Any
    ) -> None:
        """Change a file's length, permissions, owner, times or attributes.

        An existing file is copied first. The permissions and times of an existing folder or
        device, and of a file given by its descriptor, silently stay as they are.

        Args:
            function: The original function of os.
            path: The path, or a descriptor.
            arguments: Further arguments of the function.
            named: The same, by name.
        """
        if is_descriptor(path):
            self._amend_descriptor(function, path, *arguments, **named)
            return
        text = text_of(path)
        follow = named.get("follow_symlinks", True) and function is not real_os.lchown
        if not text:
            function(text, *arguments, **named)  # raises
        with ErrorsName(path), self._view.changing():
            logical = self._view.logical(text, named.pop("dir_fd", None), follow=follow)
            physical = self._view.physical(logical)
            status = self._view.status(logical)
            if physical is None or status is None:
                function(self._view.seen(text, follow=follow), *arguments, **named)  # raises
                raise error_of(errno.ENOENT)
            if not self._view.is_own(physical):
                # Check what the system would check on the original, then work on a copy.
                if function is real_os.truncate:
                    check_access(physical, os.O_WRONLY)
                elif os.geteuid() not in {0, status.st_uid}:
                    raise error_of(errno.EPERM)
                if stat.S_ISREG(status.st_mode):
                    physical = self._view.copy(logical, physical)
                elif function is not real_os.truncate:
                    return
            function(physical, *arguments, **named)

    def _amend_descriptor(
        self, function: Callable[..., None], fd: Any, *arguments: Any, **named: Any
    ) -> None:
        """Run a function that takes a descriptor; do nothing on a file that existed before."""
        with suppress(OSError):
            path = real_os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith("/") and not self._view.is_own(path):
                at = real_os.stat(path)
                is_kept = stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode)
                if is_kept and os.path.samestat(at, real_os.fstat(fd)):
                    return
        function(fd, *arguments, **named)

    def _make(
        self,
        make: Callable[..., Any],
        path: Any,
        *arguments: Any,
        dir_fd: int | None = None,
        **named: Any,
    ) -> None:
        """Make something new at a path, by a function that takes its physical path first."""
        with ErrorsName(path), self._view.changing():
            logical = self._named(path, dir_fd)
            if self._view.status(logical) is not None:
                raise error_of(errno.EEXIST)
            if text_of(path).endswith("/") and make is not real_os.mkdir:
                self._view.check_folder(parent_of(logical))
                raise error_of(errno.ENOENT)
            self._view.create(logical, lambda at: make(at, *arguments, **named))

    def _named(self, path: AnyPath, dir_fd: int | None) -> str:
        """Return the logical path of a name, without following a link in it."""
        text = text_of(path)
        if not text:
            raise error_of(errno.ENOENT)
        name = text if is_dots(text) else text.rstrip("/")
        return self._view.logical(name, dir_fd, follow=False)

    def _existing(self, path: AnyPath, dir_fd: int | None) -> tuple[str, os.stat_result]:
        """Return the logical path and the status of something that must exist."""
        logical = self._named(path, dir_fd)
        status = self._view.status(logical)
        if status is None:
            self._view.check_folder(parent_of(logical))
            raise error_of(errno.ENOENT)
        if text_of(path).endswith("/") and not stat.S_ISDIR(status.st_mode):
            raise error_of(errno.ENOTDIR)
        return logical, status

    def _removed(self, logical: str, status: os.stat_result, remove: Callable[[str], None]) -> None:
        """Remove the trial's own file or folder; hide one that existed before."""
        physical = self._view.physical(logical) or "/"
        self._check_folder_of(logical, status)
        is_folder = stat.S_ISDIR(status.st_mode)
        records: list[Record] = [["unmap_below", logical]] if is_folder else []
        if not self._view.is_own(physical):
            self._view.commit([*records, self._view.hide(logical)])
            return
        try:
            remove(physical)
        except OSError as error:
            # A folder may still hold files that were renamed out of it, hidden.
            if not is_folder or error.errno != errno.ENOTEMPTY:
                raise
        self._view.commit([*records, ["old", physical], self._view.hide(logical)])

    def _check_folder_of(self, logical: str, status: os.stat_result) -> None:
        """Raise the error that the system would on removing a name from its folder."""
        folder = self._view.physical(parent_of(logical)) or "/"
        if not real_os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise error_of(errno.EACCES)
        above = real_os.stat(folder)
        user = os.geteuid()
        if above.st_mode & stat.S_ISVTX and user not in {0, status.st_uid, above.st_uid}:
            raise error_of(errno.EPERM)
