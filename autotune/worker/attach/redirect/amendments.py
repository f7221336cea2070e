"""Stands in for the functions of os that change a file's length, permissions, owner, times and attributes.

Comes in: their own arguments. Goes out: nothing; what existed before is copied first. The permissions and times of an
existing folder or device, and of a file that is given by its descriptor, stay as they are, whatever is asked.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from autotune.worker.attach.redirect.paths import Told, error_of, is_descriptor, text_of
from autotune.worker.attach.redirect.real import FUNCTIONS as REAL
from autotune.worker.attach.redirect.view import View

__all__ = ["Amendments", "check_access"]


class Amendments:
    """Makes such functions for a view."""

    def __init__(self, view: View) -> None:
        self._view = view

    def amending(self, name: str) -> Callable[..., None]:
        """What stands in for a function that takes a path."""
        function = REAL[name]

        def amend(path: Any, *arguments: Any, **named: Any) -> None:
            if is_descriptor(path):
                self._amend_descriptor(function, path, arguments, named)
                return
            with Told(path):
                self._amend(function, text_of(path), arguments, named)

        return amend

    def amending_descriptor(self, name: str) -> Callable[..., None]:
        """What stands in for a function that takes a descriptor alone."""

        def amend(fd: int, *arguments: Any, **named: Any) -> None:
            self._amend_descriptor(REAL[name], fd, arguments, named)

        return amend

    def _amend(
        self, function: Callable[..., None], text: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        follow = named.get("follow_symlinks", True) and function is not REAL["lchown"]
        if not text:
            function(text, *arguments, **named)
            return
        with self._view.changing():
            logical = self._view.logical(text, named.pop("dir_fd", None), follow=follow)
            physical, status = self._view.physical(logical), self._view.status(logical)
            if physical is None or status is None:
                function(self._view.seen(text, follow=follow), *arguments, **named)  # raises
                raise error_of(errno.ENOENT)
            is_file = stat.S_ISREG(status.st_mode)
            if not self._view.is_own(physical):
                if function is REAL["truncate"]:
                    check_access(physical, os.O_WRONLY)
                elif os.geteuid() not in {0, status.st_uid}:
                    raise error_of(errno.EPERM)
                if not is_file and function is not REAL["truncate"]:
                    return
                if is_file:
                    physical = self._view.copy(logical, physical)
            function(physical, *arguments, **named)

    def _amend_descriptor(
        self, function: Callable[..., None], fd: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        with suppress(OSError):
            path = REAL["readlink"](f"/proc/self/fd/{fd}")
            if path.startswith("/") and not self._view.is_own(path):
                at, opened = REAL["stat"](path), REAL["fstat"](fd)
                if os.path.samestat(at, opened) and (stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode)):
                    return
        function(fd, *arguments, **named)


def check_access(physical: str, flags: int) -> None:
    """Raise what opening a file for writing would; it is opened only where it can't be."""
    wanted = (os.O_WRONLY, os.W_OK) if flags & os.O_WRONLY or not flags & os.O_RDWR else (os.O_RDWR, os.R_OK | os.W_OK)
    if not REAL["access"](physical, wanted[1], effective_ids=True):
        REAL["close"](REAL["open"](physical, wanted[0]))
        raise error_of(errno.EACCES)
