"""Shared memory that the ranks of a killed group have left: NCCL removes its files once all ranks have them open.

Takes what was there before a trial; removes what has come since and is not used. Source: NCCL's src/misc/shmutils.cc
(ncclShmOpen): mkstemp of "/dev/shm/nccl-XXXXXX", unlinked by the last rank that attaches.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["free_segments", "segments"]

_PLACE = Path("/dev/shm")  # noqa: S108 - NCCL's own place
_NAME = "nccl-"


def segments() -> frozenset[int]:
    """Inodes of this user's files that are there now."""
    return frozenset(_own())


def free_segments(before: Collection[int]) -> None:
    """Remove the files that were not there before, and that no living process has open or mapped.

    Processes of other containers that share /dev/shm are not visible: a group of this user's that starts in one while a
    trial's ranks run here may lose its file. Hence this is called after groups only, which may have left some.
    """
    new = {inode: path for inode, path in _own().items() if inode not in before}
    if not new:
        return
    used = _used_names()
    for path in new.values():
        if path.name not in used:
            with suppress(OSError):  # its owner has removed it
                path.unlink()


def _own() -> dict[int, Path]:
    found = {}
    for path in _PLACE.glob(f"{_NAME}*"):
        with suppress(OSError):
            status = path.stat(follow_symlinks=False)
            if status.st_uid == os.getuid():
                found[status.st_ino] = path
    return found


def _used_names() -> set[str]:
    """Names of such files that living processes have open or mapped."""
    targets = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            targets += (process / "maps").read_text(errors="replace").splitlines()
        with suppress(OSError):
            targets += [_target(descriptor) for descriptor in (process / "fd").iterdir()]
    prefix = f"{_PLACE}/{_NAME}"
    return {Path(target[target.index(prefix) :]).name for target in targets if prefix in target}


def _target(link: Path) -> str:
    with suppress(OSError):
        return str(link.readlink())
    return ""
