"""What makes runs on a CPU comparable: memory that is kept, and a look at how fast the machine is right now.

Two runs can be compared only where the machine was as fast for the one as for the other, and on a shared machine that
is no matter of course: cores that are hyperthreads, a cache and a memory bus are shared with whoever runs beside. Fixed
work of three kinds shows a neighbour's load as a change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch

from autotune.launch.machine import KEEPING

__all__ = ["drift", "keep_freed_memory", "look_at_speeds"]

_SECONDS = 0.3
_FLOATS = 16 * 2**20
_SIZE = 384
_ROUNDS = 20_000


def keep_freed_memory() -> None:
    """Start this program anew with a malloc that keeps what is freed, as trials have it by default.

    Whatever it starts has the same: plain loops, which a trial is compared with.

    By default glibc gives the memory of large tensors back to the system and takes the page faults anew in the next
    step; how many depends on how the heap of a process happens to lie. One small CNN trained at 1,060 to 1,430 samples
    a second from process to process, with 4,200 to 6,700 faults a step, and with this at 2,530 to 2,660.
    Source: mallopt(3).
    """
    wanted = {**os.environ, **KEEPING}
    if wanted != dict(os.environ):
        os.execve(sys.executable, sys.orig_argv, wanted)


def look_at_speeds(seconds: float = _SECONDS, floats: int = _FLOATS) -> dict[str, float]:
    """Rounds a second of interpreting, of copying so many floats, and of multiplying matrices with all threads.

    Each kind is looked at for so many seconds.
    """
    source, target = torch.zeros(floats), torch.empty(floats)
    left, right = torch.rand(_SIZE, _SIZE), torch.rand(_SIZE, _SIZE)

    def interpret() -> None:
        total = 0
        for number in range(_ROUNDS):
            total += number

    def copy() -> None:
        target.copy_(source)

    def multiply() -> None:
        torch.mm(left, right)

    return {work.__name__: _rate(work, seconds) for work in (interpret, copy, multiply)}


def drift(looks: Sequence[Mapping[str, float]]) -> float:
    """The largest change of any of the speeds between looks: 0.05 where one was once 5 % slower than at best."""
    return max(
        max(look[name] for look in looks) / min(look[name] for look in looks) - 1
        for name in looks[0]
    )


def _rate(work: Callable[[], None], seconds: float) -> float:
    work()
    begun, rounds = perf_counter(), 0
    while (spent_s := perf_counter() - begun) < seconds:
        work()
        rounds += 1
    return rounds / spent_s
