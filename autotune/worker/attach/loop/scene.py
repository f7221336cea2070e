"""What a job has to work with once a script's training loop is found, and what a script's own end means.

Comes in: a feed and a trainer that drive the script, and what was seen of it. Goes out: a Scene, for a Doer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from autotune.protocol.reports import RankReport
from autotune.worker.attach.loop.conductor import ScriptTrainer
from autotune.worker.attach.loop.feeds import ScriptFeed, StepFeed
from autotune.worker.attach.loop.sightings import Sightings
from autotune.worker.measure.feed import FeedEnded
from autotune.worker.setup.build import WorkloadFault
from autotune.worker.setup.device import Device

__all__ = ["Doer", "Scene", "is_clean_exit", "no_job", "no_loop", "raised", "rank", "ranks", "told"]


@dataclass(slots=True, kw_only=True)
class Scene:
    """A script whose loop measuring has the lead of."""

    sightings: Sightings
    device: Device
    feed: ScriptFeed | StepFeed
    trainer: ScriptTrainer
    before_steps: Callable[[Callable[[torch.optim.Optimizer], None]], None]
    """Has something done right before each optimizer step."""

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The training loader; None where the script has none."""
        return self.feed.loader if isinstance(self.feed, ScriptFeed) else None


Doer: TypeAlias = Callable[[Scene], RankReport]
"""Does a job in a scene."""


def no_job(_: Scene) -> RankReport:
    """What a session without a job never comes to."""
    raise AssertionError("a session without a job measures nothing")


def told(work: Callable[[], RankReport]) -> RankReport:
    """Do some work; a script that ends meanwhile is told as a fault of the workload."""
    try:
        return work()
    except FeedEnded:
        raise WorkloadFault(
            "a script must train for some seconds to be measured, but it ended before that; give it more epochs or "
            "more steps, as a real training has"
        ) from None


def no_loop(seen: Sightings) -> str:
    """Why a script that has come to its end was not measured, in a sentence."""
    what = "made a DataLoader" if seen.made else "stepped an optimizer"
    return (
        f"a script must train to be measured, but it {what} and ended after {seen.most_steps} optimizer steps; give it "
        "more epochs or more steps, and see that it trains when it is started so"
    )


def raised(error: BaseException) -> RankReport:
    """Raise an exception where a report is asked for."""
    raise error


def is_clean_exit(error: BaseException) -> bool:
    """Whether an exception is a script's way to end well."""
    return isinstance(error, SystemExit) and error.code in {None, 0}


def ranks() -> int:
    """Ranks that train in step, as the process group has it."""
    group: Any = torch.distributed
    return int(group.get_world_size()) if group.is_available() and group.is_initialized() else 1


def rank() -> int:
    """This process's rank, as the process group has it."""
    group: Any = torch.distributed
    return int(group.get_rank()) if group.is_available() and group.is_initialized() else 0
