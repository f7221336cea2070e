"""Replaces the functions of os that change a file's length, permissions, owner, times and attributes.

What existed before is copied first. The permissions and times of an existing folder or device, and of a file that is
given by its descriptor, stay as they are, whatever is asked.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from autotune.worker.attach.redirect.paths import ErrorsName, error_of, is_descriptor, text_of
from autotune.worker.attach.redirect.real import real_os
from autotune.worker.attach.redirect.view import View

__all__ = ["Amendments", "check_access"]


class Amendments:
    """Such functions, each given the original one first."""

    def __init__(self, view: View) -> None:
        self._view = view

    def amend(self, function: Callable[..., None], path: Any, *arguments: Any, **named: Any) -> None:
        """Do as a function that takes a path, or a descriptor too."""
        if is_descriptor(path):
            self.amend_descriptor(function, path, *arguments, **named)
            return
        text = text_of(path)
        follow = named.get("follow_symlinks", True) and function is not real_os.lchown
        if not text:
            function(text, *arguments, **named)  # raises
        with ErrorsName(path), self._view.changing():
            logical = self._view.logical(text, named.pop("dir_fd", None), follow=follow)
            physical, status = self._view.physical(logical), self._view.status(logical)
            if physical is None or status is None:
                function(self._view.seen(text, follow=follow), *arguments, **named)  # raises
                raise error_of(errno.ENOENT)
            if not self._view.is_own(physical):
                if function is real_os.truncate:
                    check_access(physical, os.O_WRONLY)
                elif os.geteuid() not in {0, status.st_uid}:
                    raise error_of(errno.EPERM)
                if stat.S_ISREG(status.st_mode):
                    physical = self._view.copy(logical, physical)
                elif function is not real_os.truncate:
                    return
            function(physical, *arguments, **named)

    def amend_descriptor(self, function: Callable[..., None], fd: Any, *arguments: Any, **named: Any) -> None:
        """Do as a function that takes a descriptor."""
        with suppress(OSError):
            path = real_os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith("/") and not self._view.is_own(path):
                at, opened = real_os.stat(path), real_os.fstat(fd)
                if os.path.samestat(at, opened) and (stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode)):
                    return
        function(fd, *arguments, **named)


def check_access(physical: str, flags: int) -> None:
    """Raise what opening a file for writing would, without opening one that may be written."""
    is_read = flags & os.O_RDWR
    if not real_os.access(physical, os.W_OK | (os.R_OK if is_read else 0), effective_ids=True):
        real_os.close(real_os.open(physical, os.O_RDWR if is_read else os.O_WRONLY))
        raise error_of(errno.EACCES)
