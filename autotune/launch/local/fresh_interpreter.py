"""Launcher that starts a fresh interpreter for each rank: seconds of import for each trial, on any system."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from time import sleep

from autotune.launch.launcher import Exit, Launch
from autotune.launch.local.process_tree import exit_code, start_worker
from autotune.launch.local.watch import Started, sockets_in, watch
from autotune.protocol.clock import monotonic

__all__ = ["FreshInterpreterLauncher"]


class FreshInterpreterLauncher:
    """Has no process between trials.

    Args:
        environment: what trials see; None: this process's.
        log_line: why trials are started this way, where that was not asked for: the first trial's log begins with it.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, log_line: str = "") -> None:
        self._token = uuid.uuid4().hex
        self._environment = os.environ if environment is None else environment
        self._log_line = log_line

    def launch(self, launch: Launch) -> Exit:
        """Start an interpreter for each rank, in a session of its own, and wait for them."""
        with ExitStack() as started:  # reaps the ranks at its end, when all that they have started is gone

            def start(output: int, held: ExitStack) -> Started:
                held.enter_context(sockets_in(launch.folder))
                os.write(output, self._log_line.encode())
                self._log_line = ""
                ranks = [started.enter_context(self._start(launch, rank, output)) for rank in range(launch.ranks)]
                return Started(pids=[rank.pid for rank in ranks], poll=partial(_poll, dict(enumerate(ranks))))

            return watch(launch, self._token, start)

    def close(self) -> None:
        """Nothing to end."""

    def _start(self, launch: Launch, rank: int, output: int) -> subprocess.Popen[bytes]:
        return start_worker(
            *("run", str(launch.folder.path), str(rank)),
            environment=self._environment,
            token=self._token,
            stdin=subprocess.PIPE,  # closes with this process, and the rank ends
            output=output,
        )


def _poll(running: dict[int, subprocess.Popen[bytes]], timeout_s: float) -> dict[int, int]:
    """As Started has it; ranks that have ended are taken out of those that run."""
    until = monotonic() + timeout_s
    while True:
        codes = {rank: exit_code(process) for rank, process in running.items()}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        left_s = until - monotonic()
        if ended or left_s <= 0:
            for rank in ended:
                del running[rank]
            return ended
        sleep(min(0.01, left_s))
