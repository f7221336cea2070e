"""Launcher that starts a fresh interpreter for each trial: seconds of import a trial, but needs nothing of Linux."""

from __future__ import annotations

import os
import subprocess
import uuid
from dataclasses import dataclass

from autotune.errors import LauncherError
from autotune.launch.launcher import Exit, Launch, worker_command, worker_environment
from autotune.launch.log_file import open_log
from autotune.launch.watch import watch

__all__ = ["FreshInterpreterLauncher"]


class FreshInterpreterLauncher:
    """Holds nothing between trials."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex

    def launch(self, launch: Launch) -> Exit:
        """Start an interpreter in a session of its own and wait for it."""
        log, writing = open_log(launch.log)
        try:
            process = subprocess.Popen(
                worker_command("run", str(launch.folder.path)),
                env=worker_environment(os.environ, self._token),
                stdin=subprocess.PIPE,  # closes with this process, and the rank ends
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        except OSError as error:
            log.close()
            raise LauncherError(f"a trial's process can't be started: {error}") from error
        finally:
            os.close(writing)
        with process:
            return watch(_Rank(process), launch, log, self._token)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    spare: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self, timeout_s: float) -> int | None:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
