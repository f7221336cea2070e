"""Launcher that starts a fresh interpreter for each rank: seconds of import for each trial, on any system."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from time import monotonic, sleep

from autotune.errors import LauncherError
from autotune.launch.launcher import Exit, Launch, worker_command, worker_environment
from autotune.launch.local.log_file import open_log
from autotune.launch.local.process_tree import exit_code, kill_all
from autotune.launch.local.watch import watch
from autotune.note import Note

__all__ = ["FreshInterpreterLauncher"]

_TICK_S = 0.01


class FreshInterpreterLauncher:
    """Has no process between trials.

    Args:
        environment: what trials see; None: this process's.
        notes: why trials are started this way, where that was not asked for.
        log_line: the same as a line of text, with which the first trial's log begins.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, notes: tuple[Note, ...] = (), log_line: str = ""
    ) -> None:
        self._token = uuid.uuid4().hex
        self._environment = os.environ if environment is None else environment
        self.notes, self._log_line = notes, log_line

    def launch(self, launch: Launch) -> Exit:
        """Start an interpreter for each rank, in a session of its own, and wait for them."""
        log, writing = open_log(launch.log)
        with ExitStack() as started:  # reaps the ranks at its end, when all that they have started is gone
            try:
                os.write(writing, self._log_line.encode())
                self._log_line = ""
                ranks = [started.enter_context(self._start(launch, rank, writing)) for rank in range(launch.ranks)]
            except BaseException:
                kill_all((), self._token)
                log.close()
                raise
            finally:
                os.close(writing)
            return watch(_Ranks(dict(enumerate(ranks))), launch, log, self._token)

    def close(self) -> None:
        """Nothing to end."""

    def _start(self, launch: Launch, rank: int, output: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                worker_command("run", str(launch.folder.path), str(rank)),
                env=worker_environment(self._environment, self._token),
                stdin=subprocess.PIPE,  # closes with this process, and the rank ends
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise LauncherError(f"a trial's process can't be started: {error}") from error


class _Ranks:
    """Interpreters that are this process's children."""

    spare: int | None = None

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]]) -> None:
        self.pids = tuple(process.pid for process in processes.values())
        self._running = processes

    def poll(self, timeout_s: float) -> dict[int, int]:
        until = monotonic() + timeout_s
        while not (ended := self._ended()) and (left_s := until - monotonic()) > 0:
            sleep(min(_TICK_S, left_s))
        for rank in ended:
            del self._running[rank]
        return ended

    def _ended(self) -> dict[int, int]:
        codes = {rank: exit_code(process) for rank, process in self._running.items()}
        return {rank: code for rank, code in codes.items() if code is not None}
