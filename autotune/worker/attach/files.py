"""Python's ways to a file, led to an overlay: what existed before a trial is never changed by it.

Comes in: the folder of a trial's overlay. Goes out: patched functions of builtins, io, os, shutil and sqlite3, and,
once they are there, the native writers of torch and safetensors. What else native code writes by itself is not led
there.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.worker.attach.overlay import Overlay, new_files
from autotune.worker.attach.seams.imports import after_import

__all__ = ["new_files", "protect_files", "protect_torch"]

_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_overlay: Overlay | None = None


def protect_files(scratch: Path) -> None:
    """Lead writes of this process, and of those that it forks, to an overlay below a folder; once a process."""
    global _overlay  # noqa: PLW0603 - a process has one
    if _overlay is not None:
        return
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    _overlay = overlay = Overlay(scratch)
    _patch_open(overlay)
    _patch_changes(overlay)
    _patch_questions(overlay)
    shutil._use_fd_functions = False  # type: ignore[attr-defined] # noqa: SLF001 - else rmtree goes by descriptors
    after_import("safetensors", lambda module: _patch_safetensors(module, overlay))
    after_import("safetensors.torch", lambda module: _patch_safetensors(module, overlay))
    _patch_sqlite(overlay)


def protect_torch() -> None:
    """Lead torch's own writer and reader of archives to the overlay; torch must be imported."""
    if _overlay is None:
        return
    overlay, module = _overlay, sys.modules["torch.serialization"]

    def patch(name: str, lead: Callable[[Any], Any]) -> None:
        kind = getattr(module, name, None)
        if kind is None:
            return
        plain = kind.__init__

        @wraps(plain)
        def init(self: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, lead(file) if isinstance(file, str | os.PathLike) else file, *args, **kwargs)

        kind.__init__ = init

    to_write, to_read = _led(overlay.to_write, overlay.to_write), _led(overlay.to_read, overlay.to_read)
    patch("_open_zipfile_writer_file", lambda file: os.fspath(to_write(file, keeps=False)))
    patch("_open_zipfile_reader", lambda file: os.fspath(to_read(file)))


class _Inside(threading.local):
    """Whether this thread is within one of these functions: what they call themselves is led nowhere."""

    on = False


_inside = _Inside()


def _led(plain: Any, lead: Callable[..., Any]) -> Any:
    """A function in place of a plain one, which is called itself from within another of these functions."""

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _inside.on:
            return plain(*args, **kwargs)
        _inside.on = True
        try:
            return lead(*args, **kwargs)
        finally:
            _inside.on = False

    return call


def _patch_open(overlay: Overlay) -> None:
    plain, plain_os = builtins.open, os.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not isinstance(mode, str):
            return plain(file, mode, *args, **kwargs)
        if not set(mode) & set("wax+"):
            return plain(overlay.to_read(file), mode, *args, **kwargs)
        if "x" in mode and _is_seen(overlay, file):
            raise FileExistsError(17, os.strerror(17), os.fspath(file))
        goal = overlay.to_write(file, keeps="w" not in mode and "x" not in mode)
        return plain(goal, mode.replace("x", "w") if goal is not file else mode, *args, **kwargs)

    def os_opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None or isinstance(path, int):
            return plain_os(path, flags, mode, dir_fd=dir_fd)
        if not flags & (_WRITING_FLAGS | os.O_CREAT):
            return plain_os(overlay.to_read(path), flags, mode)
        if flags & os.O_EXCL and flags & os.O_CREAT and _is_seen(overlay, path):
            raise FileExistsError(17, os.strerror(17), os.fspath(path))
        goal = overlay.to_write(path, keeps=not flags & os.O_TRUNC)
        return plain_os(goal, flags & ~os.O_EXCL if goal is not path else flags, mode)

    builtins.open = io.open = _led(plain, opened)
    os.open = _led(plain_os, os_opened)


def _is_seen(overlay: Overlay, path: Any) -> bool:
    with suppress(FileNotFoundError):
        return os.path.lexists(overlay.to_read(path))
    return False


def _patch_changes(overlay: Overlay) -> None:
    """Functions that remove, rename, make or change what a path names."""
    for name in ("unlink", "remove", "rmdir"):
        setattr(os, name, _removing(getattr(os, name), overlay))
    for name in ("rename", "replace"):
        setattr(os, name, _renaming(getattr(os, name), overlay))
    for name in ("truncate", "chmod", "chown", "utime"):
        setattr(os, name, _changing(getattr(os, name), overlay))
    for name in ("link", "symlink"):
        setattr(os, name, _linking(getattr(os, name), overlay))
    os.mkdir = _making(os.mkdir, overlay)


def _removing(plain: Any, overlay: Overlay) -> Any:
    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            plain(path, dir_fd=dir_fd)
        else:
            overlay.remove(path, plain)

    return _led(plain, remove)


def _renaming(plain: Any, overlay: Overlay) -> Any:
    def rename(source: Any, target: Any, **descriptors: Any) -> None:
        if any(descriptor is not None for descriptor in descriptors.values()):
            plain(source, target, **descriptors)
        else:
            overlay.rename(source, target, plain)

    return _led(plain, rename)


def _making(plain: Any, overlay: Overlay) -> Any:
    def make(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is None and overlay.made_folder(path):
            return
        plain(path, mode, dir_fd=dir_fd)
        if dir_fd is None:
            overlay.note_new(os.path.realpath(os.fsdecode(path)))

    return _led(plain, make)


def _changing(plain: Any, overlay: Overlay) -> Any:
    """A function that changes a file, led to its copy; a folder's own mode and times are left as they are."""

    def change(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, int) or kwargs.get("dir_fd") is not None:
            return plain(path, *args, **kwargs)
        place = os.path.realpath(os.fsdecode(overlay.to_read(path)))
        if overlay.existed(place) and os.path.isdir(place):
            return None
        is_there = os.path.lexists(place)
        return plain(overlay.to_write(path, keeps=True) if is_there else path, *args, **kwargs)

    return _led(plain, change)


def _linking(plain: Any, overlay: Overlay) -> Any:
    def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        plain(source, target, *args, **kwargs)
        if kwargs.get("dir_fd") is None and kwargs.get("dst_dir_fd") is None:
            name = os.fsdecode(target)
            overlay.note_new(os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name)))

    return _led(plain, link)


def _patch_questions(overlay: Overlay) -> None:
    """Functions that ask what is there."""
    listdir, scandir = os.listdir, os.scandir

    def names(path: Any = ".") -> list[Any]:
        return listdir(path) if isinstance(path, int | bytes) else overlay.names_in(path)

    def entries(path: Any = ".") -> Any:
        return scandir(path) if isinstance(path, int | bytes) else _Scan(scandir(path), overlay)

    os.stat, os.lstat = _asking(os.stat, overlay), _asking(os.lstat, overlay)
    os.listdir, os.scandir = _led(listdir, names), _led(scandir, entries)


def _asking(plain: Any, overlay: Overlay) -> Any:
    def ask(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, int) or kwargs.get("dir_fd") is not None:
            return plain(path, *args, **kwargs)
        return plain(overlay.to_read(path), *args, **kwargs)

    return _led(plain, ask)


class _Scan:
    """os.scandir without what the script has removed."""

    def __init__(self, plain: Any, overlay: Overlay) -> None:
        self._plain, self._overlay = plain, overlay

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for entry in self._plain:
            if not self._overlay.is_gone(os.path.abspath(entry.path)):
                return entry
        raise StopIteration

    def close(self) -> None:
        """As os.scandir's own."""
        self._plain.close()


def _patch_sqlite(overlay: Overlay) -> None:
    plain = sqlite3.connect

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        is_file = isinstance(database, str | os.PathLike) and str(database) != ":memory:" and not kwargs.get("uri")
        return plain(overlay.to_write(database, keeps=True) if is_file else database, *args, **kwargs)

    sqlite3.connect = sqlite3.dbapi2.connect = _led(plain, connect)


def _patch_safetensors(module: ModuleType, overlay: Overlay) -> None:
    """Its native functions, which take a path; once a module."""
    writes, reads = getattr(module, "serialize_file", None), getattr(module, "safe_open", None)
    if writes is not None and not hasattr(writes, "__wrapped__"):
        to_write = _led(overlay.to_write, overlay.to_write)

        @wraps(writes)
        def write(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            return writes(tensors, to_write(filename, keeps=False), *args, **kwargs)

        vars(module)["serialize_file"] = write
    if isinstance(reads, type):
        to_read = _led(overlay.to_read, overlay.to_read)
        vars(module)["safe_open"] = lambda filename, *args, **kwargs: reads(to_read(filename), *args, **kwargs)
