"""How a rank's report comes onto the disk, also where the user's code has left no descriptor, or torch raises."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from autotune.errors import RunFolderError
from autotune.protocol.reports import RankReport
from autotune.worker.place import Place

__all__ = ["is_written"]


def is_written(place: Place, report: RankReport, spare: int) -> bool:
    """Write the report; where that fails, with a descriptor more, since the user's code may have used up all others.

    Meanwhile the end of a loader worker raises nothing, as torch's handler would.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return _is_written(place, report, spare)
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _is_written(place: Place, report: RankReport, spare: int) -> bool:
    with suppress(RunFolderError):
        place.write(report)
        return True
    with suppress(OSError):  # the user's code has closed it
        os.close(spare)
    try:
        place.write(report)
    except RunFolderError as error:
        with suppress(OSError, ValueError):  # the user's code may have closed it
            print(f"autotune: {error}", file=sys.stderr, flush=True)  # noqa: T201 - into the trial's log
        return False
    return True
