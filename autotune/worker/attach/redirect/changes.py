"""Replaces open and the functions of os that change files: what existed before stays as it is.

Opened for writing, an existing file is copied to scratch first; removed, it is marked; renamed, it is seen elsewhere
and lies where it was. Errors name the path that was asked for.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any

from autotune.worker.attach.redirect.amendments import Amendments, check_access
from autotune.worker.attach.redirect.copying import copy_file
from autotune.worker.attach.redirect.journal import Record
from autotune.worker.attach.redirect.paths import AnyPath, ErrorsName, error_of, is_dots, parent_of, text_of
from autotune.worker.attach.redirect.real import open_file, real_os
from autotune.worker.attach.redirect.renames import check_rename, move
from autotune.worker.attach.redirect.view import View

__all__ = ["Changes"]

_READING = frozenset({"r", "rb", "br", "rt", "tr"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Changes:
    """The functions of os that change a view; bound methods all, as those of Reads."""

    def __init__(self, view: View) -> None:
        self._view = view
        amendments = Amendments(view)
        self.rename = self.replace
        self.remove = self.unlink
        for name in ("chmod", "chown", "lchown", "removexattr", "setxattr", "truncate", "utime"):
            setattr(self, name, MethodType(amendments.amend, getattr(real_os, name)))
        for name in ("fchmod", "fchown"):
            setattr(self, name, MethodType(amendments.amend_descriptor, getattr(real_os, name)))
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
        """Do as builtins.open, with a descriptor from elsewhere."""
        if opener is None and not isinstance(file, int) and not (mode in _READING and self._view.is_idle()):
            opener = self._opened
        return open_file(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Do as os.open."""
        if not flags & _WRITING and self._view.is_idle():
            return real_os.open(path, flags, mode, dir_fd=dir_fd)
        text = text_of(path)
        with ErrorsName(path):
            if not text or not flags & _WRITING or flags & os.O_TMPFILE == os.O_TMPFILE:
                real = self._view.seen(path, dir_fd, follow=not flags & os.O_NOFOLLOW)
                return real_os.open(real, flags, mode)
            return self._open_writing(text, flags, mode, dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Do as os.unlink."""
        with ErrorsName(path), self._view.changing():
            logical, status = self._existing(path, dir_fd)
            if stat.S_ISDIR(status.st_mode):
                raise error_of(errno.EISDIR)
            if text_of(path).endswith("/"):
                raise error_of(errno.ENOTDIR)
            self._removed(logical, status, real_os.unlink)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Do as os.rmdir."""
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
        """Do as os.symlink."""
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
        """Do as os.link; of a file that existed before, make a copy."""
        del follow_symlinks  # link(2) follows none on Linux
        if text_of(src).startswith("/proc/"):  # an unnamed file that gets a name
            self._make(lambda at: real_os.link(src, at, follow_symlinks=True), dst, dir_fd=dst_dir_fd)
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

    def replace(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """Do as os.rename and os.replace."""
        with ErrorsName(src, dst), self._view.changing():
            if not text_of(dst):
                raise error_of(errno.ENOENT)
            self._view.check_folder(parent_of(self._view.logical(text_of(src).rstrip("/"), src_dir_fd, follow=False)))
            to = self._view.logical(text_of(dst).rstrip("/"), dst_dir_fd, follow=False)
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
        """Return where native code may write to a path of the script; it exists then, with its content."""
        real_os.close(self.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        return self._view.seen(path)

    def emptied(self, path: AnyPath) -> str:
        """Return where native code may write a path of the script from the beginning; it exists then, and is empty."""
        real_os.close(self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        return self._view.seen(path)

    def replaced(self, physical: str) -> None:
        """Record a file of the trial's once more: native code may have put another one in its place."""
        with self._view.changing():
            if self._view.is_own(physical):
                self._view.commit(self._view.made(physical))

    def _opened(self, path: str, flags: int) -> int:
        return self.open(path, flags, 0o666)

    def _open_writing(self, text: str, flags: int, mode: int, dir_fd: int | None) -> int:
        is_new = flags & os.O_CREAT and flags & os.O_EXCL
        follow = not (flags & os.O_NOFOLLOW or is_new)
        end = "/" if text.endswith("/") else ""
        self._view.is_idle()  # learns what other processes have changed
        logical = self._view.logical(text, dir_fd, follow=follow)
        physical = self._view.physical(logical)
        if physical is not None and self._view.is_own(physical):
            makes_none = not flags & os.O_CREAT or self._view.is_free(physical)
            if makes_none or self._view.status(logical) is not None:
                return real_os.open(physical + end, flags, mode)
        with self._view.changing():
            logical = self._view.logical(text, dir_fd, follow=follow)
            physical, status = self._view.physical(logical), self._view.status(logical)
            if status is None:
                self._view.check_folder(parent_of(logical))
            if status is None and not (flags & os.O_CREAT):
                raise error_of(errno.ENOENT)
            if end and flags & os.O_CREAT:
                self._view.folder_of(logical)
                raise error_of(errno.EISDIR)
            if physical is None or (status is None and not self._view.is_free(physical)):
                made: int = self._view.create(logical, lambda at: real_os.open(at, flags | os.O_EXCL, mode))
                return made
            if is_new and status is not None:
                raise error_of(errno.EEXIST)
            is_read = not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
            if status is not None and stat.S_ISREG(status.st_mode) and not self._view.is_own(physical) and not is_read:
                if end:
                    raise error_of(errno.ENOTDIR)
                check_access(physical, flags)
                physical = self._view.copy(logical, physical, is_empty=bool(flags & os.O_TRUNC))
        return real_os.open(f"{physical or '/'}{end}", flags, mode)

    def _make(
        self, make: Callable[..., Any], path: Any, *arguments: Any, dir_fd: int | None = None, **named: Any
    ) -> None:
        with ErrorsName(path), self._view.changing():
            text = text_of(path)
            if not text:
                raise error_of(errno.ENOENT)
            logical = self._view.logical(text if is_dots(text) else text.rstrip("/"), dir_fd, follow=False)
            if self._view.status(logical) is not None:
                raise error_of(errno.EEXIST)
            if text.endswith("/") and make is not real_os.mkdir:
                self._view.check_folder(parent_of(logical))
                raise error_of(errno.ENOENT)
            self._view.create(logical, lambda at: make(at, *arguments, **named))

    def _existing(self, path: AnyPath, dir_fd: int | None) -> tuple[str, os.stat_result]:
        text = text_of(path)
        if not text:
            raise error_of(errno.ENOENT)
        logical = self._view.logical(text if is_dots(text) else text.rstrip("/"), dir_fd, follow=False)
        status = self._view.status(logical)
        if status is None:
            self._view.check_folder(parent_of(logical))
            raise error_of(errno.ENOENT)
        if text.endswith("/") and not stat.S_ISDIR(status.st_mode):
            raise error_of(errno.ENOTDIR)
        return logical, status

    def _removed(self, logical: str, status: os.stat_result, remove: Callable[[str], None]) -> None:
        physical = self._view.physical(logical) or "/"
        self._check_folder_of(logical, status)
        records: list[Record] = [["unmap_below", logical]] if stat.S_ISDIR(status.st_mode) else []
        if not self._view.is_own(physical):
            self._view.commit([*records, self._view.hide(logical)])
            return
        is_folder = stat.S_ISDIR(status.st_mode)
        try:
            remove(physical)
        except OSError as error:
            if not is_folder or error.errno != errno.ENOTEMPTY:
                raise  # else what was renamed out of it still lies in it, unseen
        self._view.commit([*records, ["old", physical], self._view.hide(logical)])

    def _check_folder_of(self, logical: str, status: os.stat_result) -> None:
        """Raise what the system would on removing a name from its folder."""
        folder = self._view.physical(parent_of(logical)) or "/"
        if not real_os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise error_of(errno.EACCES)
        above, user = real_os.stat(folder), os.geteuid()
        if above.st_mode & stat.S_ISVTX and user not in {0, status.st_uid, above.st_uid}:
            raise error_of(errno.EPERM)
