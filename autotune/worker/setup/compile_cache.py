"""Where torch.compile keeps code: a folder that only this user can have filled.

torch runs and unpickles what it finds below TMPDIR/torchinductor_USER, a name that anybody can know and make first in a
shared /tmp. Comes in: a trial's folder. Goes out: the variable that names a folder in it, where torch's is not ours.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["keep_compiled_code_private"]

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code_private(scratch: Path) -> None:
    """Leave torch its usual folder, which is made here if it is not there, unless others own or may write it.

    A folder that the user has named stays as it is.
    """
    if _VARIABLE in os.environ:
        return
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # no public name

    usual = Path(default_cache_dir())
    if not _is_ours(usual):
        os.environ[_VARIABLE] = str(scratch / "compiled")


def _is_ours(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    is_writable_by_others = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not is_writable_by_others
