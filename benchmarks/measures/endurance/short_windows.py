"""Shortens what trials are asked for, so that searches of real processes take seconds."""

from __future__ import annotations

from autotune.launch.launcher import Exit, Launch
from autotune.launch.local.fork_server import ForkServerLauncher
from autotune.protocol.disk import write_model
from autotune.protocol.jobs import NO_EXTRAS, StressJob, TrialJob, WindowRules, read_job
from autotune.tuning import confirmation

__all__ = ["shorten", "shorten_all"]

_WINDOW = WindowRules(max_s=0.2, precision=0.5, block_s=0.02)
_STRESS_S = 0.2
_ROUNDS = 3


def shorten(launch: Launch) -> None:
    """Have a trial end its window early and measure nothing behind it, and a stress check train briefly."""
    job = read_job(launch.folder.job)
    if isinstance(job, TrialJob):
        write_model(launch.folder.job, job.model_copy(update={"window": _WINDOW, "extras": NO_EXTRAS}))
    elif isinstance(job, StressJob):
        write_model(launch.folder.job, job.model_copy(update={"train_s": _STRESS_S}))


def shorten_all() -> None:
    """Shorten whatever this process launches from a fork server, and confirm in few rounds."""
    whole = ForkServerLauncher.launch

    def launch(self: ForkServerLauncher, launch: Launch) -> Exit:
        shorten(launch)
        return whole(self, launch)

    ForkServerLauncher.launch = launch  # type: ignore[method-assign]
    vars(confirmation)["MOST_ROUNDS"] = _ROUNDS
