"""The fork server: has imported torch once, has touched no device, ran no tensor operation and no user code.

Receives over its socket, one message a trial, the trial's folder and the descriptor to print to; forks a rank (10 ms
instead of an interpreter's start and `import torch`); answers its pid, then, once all that the rank has started is gone
too, its exit status. When the socket closes, the parent is gone: the same sweep is made and the server ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, perf_counter, sleep

import psutil
import torch._dynamo  # noqa: F401 - the first optimizer would import it, a second in every fork

from autotune.protocol import TrialFolder, free_shared_memory
from autotune.worker.rank import run_rank

__all__ = ["die_with_parent", "live", "serve"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # as above: orphans below the server become its children
_SWEEP_WITHIN_S = 5.0
_OOM_SCORE_ADJ = "800"  # man 5 proc: of -1000 to 1000; the kernel spares the caller
_MESSAGE_BYTES = 64 * 1024


def serve(descriptor: int) -> None:
    """Answer requests on an inherited SOCK_SEQPACKET socket until its other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=descriptor) as connection:
        connection.send(b'{"ready": true}')
        gc.collect()
        gc.freeze()  # what is imported stays shared with every fork
        while True:
            message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
            if not message:
                return
            _serve_one(connection, TrialFolder(Path(json.loads(message)["folder"])), descriptors[0])


def _serve_one(connection: socket.socket, folder: TrialFolder, output: int) -> None:
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become_rank(folder, output, server_pid)
    os.close(output)
    connection.send(json.dumps({"pid": pid}).encode())
    exited = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([exited, connection.fileno()], [], [])
        if exited not in ready:  # only a closed socket speaks while a trial runs
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(exited)
    free_shared_memory(pid)
    _sweep()
    with suppress(BrokenPipeError):
        connection.send(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode())


def _sweep() -> None:
    """End all that a rank has left, daemons included: whoever loses his parent becomes the server's child."""
    begun = monotonic()
    while monotonic() - begun < _SWEEP_WITHIN_S:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.kill()
        try:
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                free_shared_memory(ended[0])
        except ChildProcessError:
            return
        sleep(0.001)


def _become_rank(folder: TrialFolder, output: int, server_pid: int) -> None:
    """In the fork: own session and streams, dies with the server, never returns."""
    started = perf_counter()
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        os._exit(1)  # the server died before the line above
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    live(folder, started)


def live(folder: TrialFolder, started: float) -> None:
    """Run a rank and end the process at once, without waiting for loader workers: the parent sweeps its group."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    code = 1
    try:
        code = run_rank(folder, started)
    except BaseException:  # noqa: BLE001 - the process ends here; the log says why
        with suppress(OSError, ValueError):  # the user's code may have closed it
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def die_with_parent() -> None:
    """End this process's group once the parent's end of standard input closes; user code reads from nothing."""
    lifeline, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    Thread(target=wait, daemon=True).start()
