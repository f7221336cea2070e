"""Workloads for trials on several hosts: they note where they run, wait for each other, and take hosts with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import psutil
from torch import Tensor, nn

NOTES = "AUTOTUNE_TEST_NOTES"
"""Names the folder that the workloads below write to: they see it in the caller's environment, on whichever host."""
_WITHIN_S = 60.0


class Acting(nn.Linear):
    """Does something when it first trains."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(4, 2)
        self.acts = [act]

    def forward(self, values: Tensor) -> Tensor:
        if self.acts:
            self.acts.pop()()
        return super().forward(values)


def meeting() -> nn.Module:
    """Trains on only once three trials are under way at the same time."""

    def meet() -> None:
        note("host", actor().pid)
        note("met", os.getpid())
        _await(lambda: len(_noted("met")) >= 3)

    return Acting(meet)


def waiting() -> nn.Module:
    """Trains on only once there is a note "go"."""

    def wait() -> None:
        note("waiting", actor().pid)
        _await(lambda: bool(_noted("go")))

    return Acting(wait)


def fatal() -> nn.Module:
    """Takes the actor of its host with it."""

    def kill() -> None:
        actor().send_signal(signal.SIGKILL)
        _await(lambda: False)

    return Acting(kill)


def noting_its_place() -> nn.Module:
    """Notes its rank and its number on its host."""
    return Acting(lambda: note("place", f"{os.environ['RANK']}-{os.environ['LOCAL_RANK']}"))


def training() -> nn.Module:
    """Notes its host."""
    return Acting(lambda: note("trained", f"{actor().pid}-{os.getpid()}"))


def actor() -> psutil.Process:
    """The actor of this host: the parent of the fork server, which is this rank's."""
    return psutil.Process().parents()[1]


def note(kind: str, value: object) -> None:
    Path(os.environ[NOTES], f"{kind}-{value}").touch()


def _noted(kind: str) -> list[Path]:
    return list(Path(os.environ[NOTES]).glob(f"{kind}-*"))


def _await(is_so: Callable[[], bool]) -> None:
    begun = monotonic()
    while not is_so():
        if monotonic() - begun > _WITHIN_S:
            raise TimeoutError("the others did not come")
        sleep(0.01)
