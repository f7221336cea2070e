"""What torch.compile keeps: in a folder that only this user can have filled, and of a winner in the user's own cache.

torch runs and unpickles what it finds in its folder. Comes in: a trial's folder; a model that was compiled here. Goes
out: the variable that names a folder in it, where torch's is not ours; a file for the training that follows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from autotune.protocol.disk import remove_unfinished, write_atomic
from autotune.protocol.private_folder import make_private
from autotune.settings.applied.compiled_code import own_torch_cache, sealed

__all__ = ["begin_with_empty_cache", "keep_compiled", "keep_compiled_code_private", "own_code_file"]

_LOG = logging.getLogger(__name__)
_MOST_BYTES = 2**30
"""Of all files in the user's cache: our own convention, some ten large models."""
_MOST_OF_ONE_BYTES = 2**28


def keep_compiled_code_private(scratch: Path) -> None:
    """Leave torch its usual folder, which is made here if it is not there, unless others own or may write it.

    A folder that the user has named stays as it is.
    """
    if own_torch_cache() is None:
        begin_with_empty_cache(scratch)


def begin_with_empty_cache(scratch: Path) -> None:
    """Give torch a folder of compiled code in a trial's own, in which there is nothing yet; Triton's lies in it."""
    os.environ.pop("TRITON_CACHE_DIR", None)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "compiled")


def own_code_file(find: Callable[[], Path | None]) -> Path | None:
    """Where what is compiled here goes, or None where a model or a driver won't tell what that depends on."""
    try:
        return find()
    except Exception as error:  # noqa: BLE001 - of the user's modules, among others
        _LOG.info("compiled code is not kept: %s", error)
        return None


def keep_compiled(file: Path | None) -> bool:
    """Keep what this process has compiled in a file of the user's cache; whether it was kept.

    Whatever goes wrong is no error: training compiles anew.
    """
    try:
        saved = torch.compiler.save_cache_artifacts()
        if file is None or saved is None or len(saved[0]) > _MOST_OF_ONE_BYTES:
            return False
        make_private(file.parent)
        file.parent.chmod(0o700)  # of one that is not ours this fails
        remove_unfinished(file.parent)
        write_atomic(file, sealed(saved[0]))
        _remove_oldest(file.parent)
    except Exception as error:  # noqa: BLE001 - whatever torch, a disk or a model makes of it
        _LOG.info("compiled code is not kept: %s", error)
        return False
    return True


def _remove_oldest(folder: Path) -> None:
    """Remove files until what is left takes no more than it may; the one just written is the latest."""
    found = []
    for file in folder.glob("*.bin"):
        with suppress(FileNotFoundError):  # another search has removed it
            status = file.lstat()
            found.append((status.st_mtime_ns, status.st_size, file))
    left = 0
    for _, size, file in sorted(found, reverse=True):
        left += size
        if left > _MOST_BYTES:
            file.unlink(missing_ok=True)
