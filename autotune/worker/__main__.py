"""`python -m autotune.worker serve FD` and `... run FOLDER RANK SECONDS`: start a worker for the parent."""

from __future__ import annotations

import ctypes
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _dies_with_parent(connection: int) -> None:
    """End this process with its parent, while nothing else would notice: torch is still to be imported."""
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    closed = select.poll()
    closed.register(connection, select.POLLHUP)
    if any(
        event & select.POLLHUP for _, event in closed.poll(0)
    ):  # it has died before the line above
        raise SystemExit(1)


def _outlives_parent() -> None:
    """Let the connection show that the parent is gone, to end the ranks first."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def _main(arguments: list[str]) -> None:
    started = perf_counter()
    if arguments[:1] == ["serve"]:
        _dies_with_parent(int(arguments[1]))
    from autotune.protocol.disk import TrialFolder
    from autotune.worker.serve import die_with_parent, live, serve

    match arguments:
        case ["serve", descriptor]:
            _outlives_parent()
            serve(int(descriptor))
        case ["run", folder, rank, shared_from_s]:
            die_with_parent()
            live(TrialFolder(Path(folder)), int(rank), started, float(shared_from_s))
        case _:
            raise SystemExit(
                "usage: python -m autotune.worker (serve FD | run FOLDER RANK SECONDS)"
            )


if __name__ == "__main__":
    _main(sys.argv[1:])
