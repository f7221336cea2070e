"""What still runs of a launcher's processes."""

from __future__ import annotations

import psutil

from autotune.launch.launcher import TOKEN_VARIABLE

__all__ = ["marked"]


def marked(token: str) -> list[psutil.Process]:
    """Living processes that carry a launcher's token."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(TOKEN_VARIABLE) == token
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found
