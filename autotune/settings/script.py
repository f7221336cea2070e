"""What is seen of somebody else's training script when it runs under the probe: facts, data alone.

The worker fills a ScriptFacts; the space, the trials and `autotune apply` go by it.
"""

from __future__ import annotations

from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.settings.training_config import TrainingConfig

__all__ = ["LoaderSite", "ScriptFacts"]


class LoaderSite(FrozenModel):
    """Where the script, or a framework for it, makes a DataLoader: the same in each run of the script."""

    file: str
    """Path of the source file, outside of torch."""
    line: int
    """Line of the call."""
    nth: int = 0
    """How many loaders this place had made before."""


class ScriptFacts(FrozenModel):
    """What a script does, as seen while it trained some steps."""

    observed: TrainingConfig
    """What it does by itself: the baseline."""
    framework: str = "plain loop"
    """Who runs its steps: "plain loop", "accelerate", "transformers", "lightning", ..."""
    loaders: tuple[LoaderSite, ...] = ()
    """The training loader, last, and those of the same data that it was rebuilt from."""
    reached: tuple[str, ...] = ()
    """Settings that can be changed from outside, by name."""
    unreached: tuple[Note, ...] = ()
    """Settings that can't be, each with the reason and the way to reach it."""
    modules: tuple[str, ...] = ()
    """Modules of installed packages that it had imported, in their order."""
    new_files: tuple[str, ...] = ()
    """Files that it has made outside of the trial's own folder."""
    is_in_process: bool = True
    """It runs in the trial's own process; else a launcher or a shell starts it."""
    placeholders: tuple[str, ...] = ()
    """Settings that the command takes as words of its own."""
    device: str = "cpu"
    """Where its parameters lie, by torch's name."""
