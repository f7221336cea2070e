"""Launcher that starts a fresh interpreter for each trial: seconds of import a trial, but needs nothing of Linux."""

from __future__ import annotations

import os
import subprocess
import uuid
from dataclasses import dataclass

from autotune.errors import LauncherError
from autotune.launch.launcher import Exit, Launch, worker_command, worker_environment
from autotune.launch.log_file import LogFile
from autotune.launch.watch import watch

__all__ = ["FreshInterpreterLauncher"]


class FreshInterpreterLauncher:
    """Holds nothing between trials."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex

    def launch(self, launch: Launch) -> Exit:
        """Start an interpreter in a session of its own and wait for it."""
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                worker_command("run", str(launch.folder.path)),
                env=worker_environment(os.environ, self._token),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        except OSError as error:
            os.close(reading)
            raise LauncherError(f"a trial's process can't be started: {error}") from error
        finally:
            os.close(writing)
        return watch(_Rank(process), launch, LogFile(launch.log, reading), self._token)

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
