"""Stands in for the functions of os that only look: in an untouched tree they cost one comparison more.

Comes in: their own arguments. Goes out: what they say of the trial's view, errors with the path that was asked for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, Self

from autotune.worker.attach.redirect.paths import AnyPath, is_descriptor, text_of
from autotune.worker.attach.redirect.real import FUNCTIONS as REAL
from autotune.worker.attach.redirect.view import View

__all__ = ["Reads"]


class Reads:
    """The functions of os that look at a view; methods, since a class that keeps one must not bind it anew."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.getxattr = self._looking(REAL["getxattr"])
        self.listxattr = self._looking(REAL["listxattr"])
        self.statvfs = self._looking(REAL["statvfs"])

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        """As os.stat."""
        if self._view.is_idle() or is_descriptor(path):
            return REAL["stat"](path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)  # type: ignore[no-any-return]
        try:
            real = self._view.seen(path, dir_fd, follow=follow_symlinks)
            return REAL["stat"](real, follow_symlinks=follow_symlinks)  # type: ignore[no-any-return]
        except OSError as error:
            error.filename = path
            raise

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        """As os.lstat."""
        if self._view.is_idle():
            return REAL["lstat"](path, dir_fd=dir_fd)  # type: ignore[no-any-return]
        return self.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def access(
        self,
        path: Any,
        mode: int,
        *,
        dir_fd: int | None = None,
        effective_ids: bool = False,
        follow_symlinks: bool = True,
    ) -> bool:
        """As os.access."""
        options = {"effective_ids": effective_ids, "follow_symlinks": follow_symlinks}
        if self._view.is_idle() or is_descriptor(path):
            return REAL["access"](path, mode, dir_fd=dir_fd, **options)  # type: ignore[no-any-return]
        try:
            real = self._view.seen(path, dir_fd, follow=follow_symlinks)
        except OSError:
            return False
        return REAL["access"](real, mode, **options)  # type: ignore[no-any-return]

    def readlink(self, path: Any, *, dir_fd: int | None = None) -> str | bytes:
        """As os.readlink."""
        if self._view.is_idle():
            return REAL["readlink"](path, dir_fd=dir_fd)  # type: ignore[no-any-return]
        try:
            target: str = REAL["readlink"](self._view.seen(path, dir_fd, follow=False))
        except OSError as error:
            error.filename = path
            raise
        return os.fsencode(target) if isinstance(os.fspath(path), bytes) else target

    def listdir(self, path: Any = None) -> list[Any]:
        """As os.listdir."""
        if self._is_real(path):
            return REAL["listdir"](path)  # type: ignore[no-any-return]
        try:
            logical = self._folder(path)
            names = self._view.names(logical)
        except OSError as error:
            error.filename = path
            raise
        return [os.fsencode(name) for name in names] if path is not None and _is_bytes(path) else names

    def scandir(self, path: Any = None) -> Any:
        """As os.scandir; its own entries where anything of the folder lies elsewhere."""
        if self._is_real(path):
            return REAL["scandir"](path)
        try:
            logical = self._folder(path)
            named = os.path.abspath("." if path is None else text_of(path))  # noqa: PTH100 - no link is to be resolved
            if self._view.is_plain(logical) and named == logical:
                return REAL["scandir"](path)
            names = self._view.names(logical)
        except OSError as error:
            error.filename = path
            raise
        given = "." if path is None else text_of(path)
        found = (_Entry(self, given, name, is_bytes=path is not None and _is_bytes(path)) for name in names)
        return _Entries(found)

    def chdir(self, path: Any) -> None:
        """As os.chdir."""
        if self._view.is_idle() or is_descriptor(path):
            REAL["chdir"](path)
            return
        try:
            logical = self._view.logical(text_of(path)) if text_of(path) else text_of(path)
            self._view.enter(logical, self._view.seen(path).rstrip("/"))
        except OSError as error:
            error.filename = path
            raise

    def getcwd(self) -> str:
        """As os.getcwd."""
        return self._view.cwd()

    def getcwdb(self) -> bytes:
        """As os.getcwdb."""
        return os.fsencode(self._view.cwd())

    def _looking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def looking(path: Any, *arguments: Any, **named: Any) -> Any:
            if self._view.is_idle() or is_descriptor(path):
                return function(path, *arguments, **named)
            try:
                return function(self._view.seen(path, follow=named.get("follow_symlinks", True)), *arguments, **named)
            except OSError as error:
                error.filename = path
                raise

        return looking

    def _is_real(self, path: Any) -> bool:
        return self._view.is_idle() or is_descriptor(path) or (path is not None and not text_of(path))

    def _folder(self, path: AnyPath | None) -> str:
        return self._view.logical("." if path is None else text_of(path))


class _Entry:
    """As os.DirEntry."""

    def __init__(self, reads: Reads, folder: str, name: str, *, is_bytes: bool) -> None:
        path = os.path.join(folder, name)  # noqa: PTH118 - as os.scandir joins
        self._reads = reads
        self.name = os.fsencode(name) if is_bytes else name
        self.path = os.fsencode(path) if is_bytes else path

    def __fspath__(self) -> str | bytes:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As os.DirEntry.stat."""
        return self._reads.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """As os.DirEntry.inode."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As os.DirEntry.is_dir."""
        return stat.S_ISDIR(self._mode(follow_symlinks=follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As os.DirEntry.is_file."""
        return stat.S_ISREG(self._mode(follow_symlinks=follow_symlinks))

    def is_symlink(self) -> bool:
        """As os.DirEntry.is_symlink."""
        return stat.S_ISLNK(self._mode(follow_symlinks=False))

    def is_junction(self) -> bool:
        """As os.DirEntry.is_junction: on Windows alone."""
        return False

    def _mode(self, *, follow_symlinks: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except FileNotFoundError:
            return 0


class _Entries:
    """As what os.scandir hands back."""

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
        """Nothing more is handed out."""
        self._entries = iter(())


def _is_bytes(path: AnyPath) -> bool:
    return isinstance(os.fspath(path), bytes)
