"""Attach to this Python process, then run the next sitecustomize on the path, if there is one.

Python imports this module at its start, as this folder is first on PYTHONPATH. It must never keep
a process from starting. Source: Python's documentation of the module site.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_own = Path(__file__).resolve().parent

if "AUTOTUNE_ATTACH" in os.environ:
    try:
        from autotune.worker.script.bootstrap import begin

        begin()
    except Exception as error:  # noqa: BLE001 - another interpreter than autotune's, or a deleted folder
        sys.stderr.write(
            f"autotune: could not attach to this process: {type(error).__name__}: {error}\n"
        )

_files = (Path(entry, "sitecustomize.py") for entry in sys.path)
_next = next((file for file in _files if file.is_file() and file.resolve().parent != _own), None)
if _next is not None:
    code = compile(_next.read_bytes(), str(_next), "exec", dont_inherit=True)
    exec(code, {"__name__": "sitecustomize", "__file__": str(_next)})  # noqa: S102
