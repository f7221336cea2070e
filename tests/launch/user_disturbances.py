"""A user's code to which something happens from outside in its first run, and not in the second."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class _Items(Dataset[tuple[Tensor, int]]):
    """More items than any window takes; something happens at the first one, once for all runs."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.has_acted = act, False

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.0002)
        if not self.has_acted:
            self.has_acted, first = True, Path("happened")
            try:
                first.touch(exist_ok=False)
            except FileExistsError:
                return torch.zeros(2), 0
            self.act()
        return torch.zeros(2), 0


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def killed_rank() -> _Items:
    return _Items(lambda: os.kill(os.getpid(), signal.SIGKILL))


def killed_server() -> _Items:
    return _Items(lambda: os.kill(os.getppid(), signal.SIGKILL))


def stopped_rank() -> _Items:
    return _Items(_stop)


def _stop() -> None:
    """Stop and go on, again and again, as long as this process lives."""
    pid = os.getpid()
    loop = f"sleep 0.3; while kill -STOP {pid}; do sleep 0.3; kill -CONT {pid}; sleep 0.5; done"
    subprocess.Popen(["sh", "-c", loop], stderr=subprocess.DEVNULL)
