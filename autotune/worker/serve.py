"""The fork server: has imported torch once, has touched no device, ran no tensor operation and no user code.

Between trials it may be asked to import what a script imports from installed packages, too; it
answers how far it came and what of that must not be forked (preload.py): its parent ends it then,
and begins another.

Sends once it is ready which devices its forks can't open, since a package that torch has loaded by
itself has opened them. Receives over its channel, in one message for each trial, the trial's folder,
the number of its ranks and the descriptor to print to; forks the ranks (10 ms each instead of an
interpreter's start and `import torch`); answers with their pids, then with each rank's exit code as
it ends, the last one once all that the ranks have started is gone too. The ranks are reaped when
the parent asks for it, after it has ended their sessions: until then no other process can get their
numbers. When the socket closes, the parent is gone: the ranks are ended, the same sweep is made,
and the server ends without what packages have registered for an exit.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import shutil
import signal
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil
import torch._dynamo  # noqa: F401 - the first optimizer would import it, a second in every fork

from autotune.launch.processes import exit_code_of, free_shared_memory
from autotune.protocol.channel import Channel
from autotune.protocol.disk import TrialFolder, monotonic
from autotune.worker.preload import preload
from autotune.worker.rank import bad_fork_devices_of_children

_SWEEP_WITHIN_S = 5.0  # our convention, as the parent's (launch/processes.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """A rank that this process is to run."""

    folder: TrialFolder
    local_rank: int
    started: float
    """When the process began, by perf_counter."""
    shared_from_s: float
    """Seconds of building from which the process is kept for further trials; see LocalLauncher."""


def serve(descriptor: int) -> RankStart:
    """Answer requests on an inherited socket until its other end closes, which ends the process.

    Returns:
        The rank to run, in each process that it forks for one; it never returns in the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    ctypes.CDLL(None).prctl(
        36, 1
    )  # PR_SET_CHILD_SUBREAPER: orphans below the server become its children
    channel = Channel(socket.socket(fileno=descriptor))
    _answer(channel, {"bad_forks": bad_fork_devices_of_children()})
    _share_with_forks()
    server_pid = os.getpid()
    while True:
        try:
            request = channel.receive(None, descriptors=1) or {}
        except EOFError:
            os._exit(0)
        for pid in request.get("reap", ()):
            os.waitpid(pid, 0)
        if "preload" in request:
            _preload(channel, request)
        if "folder" not in request:
            continue

        # Fork the ranks; each leaves this function, as a process of its own.
        folder = TrialFolder(Path(request["folder"]))
        sockets = os.path.realpath(folder.sockets)  # a later trial could put another link there
        output = channel.descriptors.pop()
        pids = []
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                channel.close()
                _become_rank(output, server_pid)
                return RankStart(
                    folder=folder,
                    local_rank=rank,
                    started=perf_counter(),
                    shared_from_s=request["shared_from_s"],
                )
            pids.append(pid)
        os.close(output)
        _answer(channel, {"pids": pids})
        _follow(channel, pids, sockets)


def _answer(channel: Channel, content: Mapping[str, object]) -> None:
    """Send to the parent; if it is gone, whoever next waits for it notices."""
    with suppress(OSError):
        channel.send(content)


def _share_with_forks() -> None:
    """Keep what is imported shared with every fork."""
    gc.collect()
    gc.freeze()


def _preload(channel: Channel, request: Mapping[str, Any]) -> None:
    """Import what the parent asks for, and send the package that is being imported and how far it came."""
    names = request["preload"]
    signal.alarm(150)  # more than the parent waits, which may be gone when an import hangs
    result = preload(
        names,
        request["environment"],
        bad_fork_devices_of_children,
        before_import=lambda package: _answer(channel, {"importing": package}),
    )
    signal.alarm(0)
    found = f"it has {result.reason} now" if result.reason else "it can be forked"
    preloaded = f"imported {result.preloaded} of {len(names)} modules"
    print(f"{preloaded}: {found}", flush=True)  # noqa: T201 - the server's log
    _share_with_forks()
    _answer(channel, result.model_dump())


def _follow(channel: Channel, pids: Sequence[int], sockets: str) -> None:
    """Send each rank's exit code as it ends; before the last one, end all that the ranks have started."""
    for ended, (rank, code) in enumerate(_exits(pids, channel.fileno()), 1):
        free_shared_memory(pids[rank])
        if ended == len(pids):
            _sweep(pids)
            # here as well: the parent may have been killed
            shutil.rmtree(sockets, ignore_errors=True)
        _answer(channel, {"rank": rank, "exit": code})


def _exits(pids: Sequence[int], connection: int) -> Iterator[tuple[int, int | None]]:
    """Yield each rank and its exit code as it ends, unreaped; all are ended once the socket has closed."""
    running = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    parent = [connection]
    while running:
        ready, _, _ = select.select([*running, *parent], [], [])
        ended = [exited for exited in ready if exited in running]
        if not ended:  # while a trial runs the socket is only readable once it has closed
            parent = []
            for rank in running.values():
                os.kill(
                    pids[rank], signal.SIGKILL
                )  # there even where it has just ended: it is not reaped
        for exited in ended:
            rank = running.pop(exited)
            os.close(exited)
            yield rank, exit_code_of(pids[rank])


def _sweep(ranks: Collection[int]) -> None:
    """End all that the ranks have left, daemons included: processes without a parent become the server's children."""
    begun = monotonic()
    while monotonic() - begun < _SWEEP_WITHIN_S:
        children = [child for child in psutil.Process().children() if child.pid not in ranks]
        if not children:
            return
        for child in children:
            with suppress(psutil.Error):
                child.kill()
            with suppress(ChildProcessError):
                if os.waitpid(child.pid, os.WNOHANG) != (0, 0):
                    free_shared_memory(child.pid)
        sleep(0.001)


def _become_rank(output: int, server_pid: int) -> None:
    """Give a fork a session and streams of its own, and have it die with the server."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG (linux/prctl.h)
    if os.getppid() != server_pid:
        os._exit(1)  # the server died before the line above
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
