"""Launcher that starts a fresh interpreter for each rank: seconds of import a trial, but needs nothing of Linux."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from autotune.errors import LauncherError
from autotune.launch.launcher import Exit, Launch, worker_command, worker_environment
from autotune.launch.local.log_file import open_log
from autotune.launch.local.process_tree import kill_all
from autotune.launch.local.watch import watch

__all__ = ["FreshInterpreterLauncher"]


class FreshInterpreterLauncher:
    """Holds nothing between trials.

    Args:
        environment: what trials see; None: this process's.
        notes: why trials are started so, where that was not what was asked for; the first trial's log begins with it.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, notes: tuple[str, ...] = ()) -> None:
        self._token = uuid.uuid4().hex
        self._environment = os.environ if environment is None else environment
        self._unsaid = self.notes = notes

    def launch(self, launch: Launch) -> Exit:
        """Start an interpreter for each rank, in a session of its own, and wait for them."""
        log, writing = open_log(launch.log)
        with ExitStack() as started:
            try:
                os.write(writing, "".join(f"{note}\n" for note in self._unsaid).encode())
                self._unsaid = ()
                ranks = [started.enter_context(self._start(launch, rank, writing)) for rank in range(launch.ranks)]
            except BaseException:
                kill_all((), self._token)
                log.close()
                raise
            finally:
                os.close(writing)
            return watch(_Ranks(dict(enumerate(ranks))), launch, log, self._token)

    def close(self) -> None:
        """Nothing is held."""

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
        with suppress(subprocess.TimeoutExpired):
            next(iter(self._running.values())).wait(timeout_s)  # another's end is seen after it
        codes = {rank: process.poll() for rank, process in self._running.items()}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        for rank in ended:
            del self._running[rank]
        return ended
