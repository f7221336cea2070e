"""Replaces the functions of os that only read: in an untouched tree they cost one comparison more."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import MethodType
from typing import Any, Self

from autotune.worker.attach.redirect.paths import AnyPath, ErrorsName, is_descriptor, text_of
from autotune.worker.attach.redirect.real import real_os
from autotune.worker.attach.redirect.view import View

__all__ = ["Reads"]

_LOOKS = ("getxattr", "listxattr", "lstat", "readlink", "stat", "statvfs")
_OF_LINKS = frozenset({real_os.lstat, real_os.readlink})


class Reads:
    """The functions of os that read a view.

    Bound methods all, since a class that keeps one as an attribute must not bind it to its own objects.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        for name in _LOOKS:
            setattr(self, name, MethodType(self._look, getattr(real_os, name)))

    def access(self, path: Any, mode: int, **named: Any) -> bool:
        """Do as os.access."""
        with suppress(OSError):
            return bool(self._look(real_os.access, path, mode, **named))
        return False

    def listdir(self, path: Any = None) -> list[Any]:
        """Do as os.listdir."""
        if self._is_real(path):
            return real_os.listdir(path)
        with ErrorsName(path):
            names = self._view.names(self._folder(path))
        return [os.fsencode(name) for name in names] if path is not None and _is_bytes(path) else names

    def scandir(self, path: Any = None) -> Any:
        """Do as os.scandir, with entries of our own where anything of the folder lies elsewhere."""
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
        """Do as os.chdir."""
        if self._is_real(path):
            real_os.chdir(path)
            return
        with ErrorsName(path):
            self._view.enter(self._folder(path), self._view.seen(path).rstrip("/"))

    def getcwd(self) -> str:
        """Do as os.getcwd."""
        return self._view.cwd()

    def getcwdb(self) -> bytes:
        """Do as os.getcwdb."""
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
        return self._view.is_idle() or is_descriptor(path) or (path is not None and not text_of(path))

    def _folder(self, path: AnyPath | None) -> str:
        return self._view.logical("." if path is None else text_of(path))


class _Entry:
    """Do as os.DirEntry."""

    def __init__(self, folder: str, name: str, *, is_bytes: bool) -> None:
        path = os.path.join(folder, name)  # noqa: PTH118 - as os.scandir joins
        self.name = os.fsencode(name) if is_bytes else name
        self.path = os.fsencode(path) if is_bytes else path

    def __fspath__(self) -> str | bytes:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Do as os.DirEntry.stat."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)  # noqa: PTH116 - the replacement

    def inode(self) -> int:
        """Do as os.DirEntry.inode."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Do as os.DirEntry.is_dir."""
        return stat.S_ISDIR(self._mode(follow_symlinks=follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Do as os.DirEntry.is_file."""
        return stat.S_ISREG(self._mode(follow_symlinks=follow_symlinks))

    def is_symlink(self) -> bool:
        """Do as os.DirEntry.is_symlink."""
        return stat.S_ISLNK(self._mode(follow_symlinks=False))

    def is_junction(self) -> bool:
        """Do as os.DirEntry.is_junction: on Windows alone."""
        return False

    def _mode(self, *, follow_symlinks: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except FileNotFoundError:
            return 0


class _Entries:
    """As what os.scandir returns."""

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
