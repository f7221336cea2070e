"""`python -m autotune.worker serve FD` and `... run FOLDER RANK SECONDS`: live as a worker of the parent.

A worker is a rank of a trial, or the fork server, whose forks become ranks here too.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import perf_counter

_OOM_SCORE_ADJ = "800"
"""Of -1000 to 1000: the kernel ends a rank before its parent. Source: man 5 proc."""
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


def _group_dies_with_parent() -> None:
    """End this process's group once the parent's end of standard input closes; user code reads an empty input."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    Thread(target=wait, daemon=True).start()


def _main(arguments: list[str]) -> None:
    started = perf_counter()
    if arguments[:1] == ["serve"]:
        _dies_with_parent(int(arguments[1]))
    from autotune.protocol.disk import TrialFolder
    from autotune.worker.rank import run_rank
    from autotune.worker.serve import RankStart, serve

    # Become a rank: at once, or as a fork of the server.
    match arguments:
        case ["serve", descriptor]:
            _outlives_parent()
            start = serve(int(descriptor))
        case ["run", folder, rank, shared_from_s]:
            _group_dies_with_parent()
            start = RankStart(
                folder=TrialFolder(Path(folder)),
                local_rank=int(rank),
                started=started,
                shared_from_s=float(shared_from_s),
            )
        case _:
            raise SystemExit(
                "usage: python -m autotune.worker (serve FD | run FOLDER RANK SECONDS)"
            )

    # Run it.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    code = 1
    try:
        code = run_rank(start.folder, start.started, start.local_rank, start.shared_from_s)
    except BaseException:  # noqa: BLE001 - the process ends here; the reason is in the log
        with suppress(OSError, ValueError):  # the user's code may have closed it
            traceback.print_exc()

    # End without waiting for loader workers: the parent ends all that is left.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[1:])
