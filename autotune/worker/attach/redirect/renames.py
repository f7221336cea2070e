"""The heart of a rename: what is the script's own is moved, what existed before is only seen elsewhere.

Comes in: two logical paths that were looked at. Goes out: nothing; the view has learnt it.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from autotune.worker.attach.redirect.journal import Record
from autotune.worker.attach.redirect.paths import error_of
from autotune.worker.attach.redirect.real import real_os
from autotune.worker.attach.redirect.view import View

__all__ = ["check_rename", "move"]


def check_rename(source: str, status: os.stat_result, to: str, there: os.stat_result | None) -> None:
    """Raise what the system would say of two things that are not to be exchanged."""
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
    """The heart of a rename: what is the script's own is moved, what existed before is only seen elsewhere."""
    physical, target = view.physical(source) or "/", view.physical(to)
    is_moved = view.is_own(physical) and not view.is_stored(physical)
    is_folder = there is not None and stat.S_ISDIR(there.st_mode)
    is_own_target = there is not None and target is not None and view.is_own(target)
    if is_own_target and target is not None and is_folder:
        with suppress(OSError):  # what was renamed out of it may still lie in it, unseen
            real_os.rmdir(target)
    at, records = physical, list[Record]()
    if is_moved and is_own_target and target is not None and not is_folder and not view.is_stored(target):
        at = target
        real_os.replace(physical, target)  # in one step, as readers expect
        records = view.made(at)
    elif is_moved:
        at, records = _taken(view, to, physical, there)
    elif view.folder_of(to) is not None:
        records = [["unmap", to] if view.beneath(to) == physical else ["map", to, physical]]
    is_tree = stat.S_ISDIR(real_os.lstat(at).st_mode)
    moved: list[Record] = [["old", physical], ["moved", physical, at, is_tree]] if at != physical else []
    hidden = view.hide(source)
    try:
        view.commit([["unmap_below", to], ["renamed", source, to], *moved, *records, hidden])
    except OSError:
        if at not in {physical, target}:
            real_os.rename(at, physical)
        raise
    if is_own_target and target is not None and not is_folder and at != target:
        with suppress(OSError):
            real_os.unlink(target)


def _taken(view: View, to: str, physical: str, there: os.stat_result | None) -> tuple[str, list[Record]]:
    """Move something of the script's own to where there is nothing of its own, or to scratch."""
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
