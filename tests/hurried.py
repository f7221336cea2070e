"""A launcher whose windows are short: searches by real processes take seconds."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.launch.launcher import Exit, Launch
from autotune.launch.local import LocalLauncher
from autotune.policy import WindowRules
from autotune.protocol.disk import write_model
from autotune.protocol.messages import NO_EXTRAS, TrialJob, read_job

__all__ = ["Hurried"]

_SHORT = WindowRules(max_s=0.3, precision=10.0, block_s=0.01)


@dataclass(frozen=True)
class Hurried:
    """Has each trial end its window as soon as it may, and measure nothing behind it, whatever was asked for."""

    launcher: LocalLauncher
    window: WindowRules = _SHORT

    def launch(self, launch: Launch) -> Exit:
        """As the launcher does."""
        job = read_job(launch.folder.job)
        if isinstance(job, TrialJob):
            write_model(
                launch.folder.job,
                job.model_copy(update={"window": self.window, "extras": NO_EXTRAS}),
            )
        return self.launcher.launch(launch)

    def close(self) -> None:
        """It stays open."""
