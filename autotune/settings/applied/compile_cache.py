"""The folder of compiled code that trials and the training share, so that what a search has compiled is found again.

Comes in: the user's environment. Goes out: the variable that names the folder to torch. Imports no torch, since
`autotune apply` starts without it.
"""

from __future__ import annotations

import getpass
import os
import re
import stat
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from platformdirs import user_cache_path

from autotune.settings.applied.cores.processor import cpuinfo, processor_name

__all__ = ["compile_cache_variables"]

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_cache_variables() -> dict[str, str]:
    """Return the variable that makes torch keep compiled code in a folder of the user's cache.

    Return {} where the user has named a folder, or where the cache can't be used: torch then has its usual folder.
    torch unpickles and loads what it finds, so the folder must be the user's own, and nobody else may enter it.
    """
    if sys.platform == "win32":  # files there have no owner to compare
        return {}
    try:
        cache = user_cache_path("autotune") / "inductor"
    except RuntimeError:  # the user has no home
        return {}
    # A home may be shared by unlike hosts, and torch compiles for the instructions of the one that it runs on.
    instructions = cpuinfo("flags", "Features") or processor_name()
    folder = str(cache / sha256(instructions.encode()).hexdigest()[:16])
    named = os.environ.get(_VARIABLE, folder)
    if not cache.is_absolute() or (named != folder and not _is_usual(Path(named))):
        return {}
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache.lstat()
    except OSError:
        return {}
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    is_open_to_others = bool(status.st_mode & (stat.S_IRWXG | stat.S_IRWXO))  # torch makes folders below it by umask
    if not is_own or is_open_to_others or not os.access(cache, os.W_OK | os.X_OK):  # the disk may be read-only
        return {}
    return {_VARIABLE: folder}


def _is_usual(folder: Path) -> bool:
    """Return whether torch, rather than the user, has set the variable to this folder: it does once it is imported.

    Source: torch/_inductor/runtime/cache_dir_utils.py, default_cache_dir.
    """
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (OSError, KeyError):  # nobody has this process's user id
        return False
    return folder == Path(tempfile.gettempdir(), f"torchinductor_{user}")
