"""How Python processes that a command starts come to attach: an environment variable and a folder on PYTHONPATH.

Comes in: what they are to know, as JSON. Goes out: variables of the environment. Imports neither torch nor anything
heavy: every Python process below a command reads this.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ATTACH_VARIABLE", "attached_environment", "with_own_python"]

ATTACH_VARIABLE = "AUTOTUNE_ATTACH"
"""Set where a Python process is to attach: JSON of what it is to do."""
_SITE = Path(__file__).parent / "site"


def attached_environment(told: Mapping[str, Any]) -> dict[str, str]:
    """The variables under which Python processes attach; this interpreter's own programs come first on PATH."""
    own = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", os.defpath)
    searched = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        ATTACH_VARIABLE: json.dumps(told),
        "PYTHONPATH": os.pathsep.join(searched),
        "PATH": paths if own in paths.split(os.pathsep)[:1] else os.pathsep.join([own, paths]),
    }


def with_own_python(words: Sequence[str]) -> tuple[str, ...]:
    """A command whose program is found where this interpreter's own are, a bare `python` among them."""
    beside = Path(sys.executable).parent / words[0]
    is_bare = os.sep not in words[0]
    if is_bare and words[0].startswith("python"):
        return (str(beside) if beside.exists() else sys.executable, *words[1:])
    if is_bare and shutil.which(words[0]) is None and beside.exists():
        return (str(beside), *words[1:])
    return tuple(words)
