"""How fast this machine is right now, by fixed work of three kinds: a neighbour's load shows as a change.

Two runs can be compared only where the machine was as fast for the one as for the other, and on a shared machine that
is no matter of course: cores that are hyperthreads, a cache and a memory bus are shared with whoever runs beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch

__all__ = ["drift", "look_at_speeds"]

_SECONDS = 0.3
_FLOATS = 16 * 2**20
_SIZE = 384
_ROUNDS = 20_000


def look_at_speeds(seconds: float = _SECONDS) -> dict[str, float]:
    """Rounds a second of interpreting, of copying memory, and of multiplying matrices with all threads.

    Each kind is looked at for so many seconds.
    """
    source, target = torch.zeros(_FLOATS), torch.empty(_FLOATS)
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
    return max(max(look[name] for look in looks) / min(look[name] for look in looks) - 1 for name in looks[0])


def _rate(work: Callable[[], None], seconds: float) -> float:
    work()
    begun, rounds = perf_counter(), 0
    while (spent_s := perf_counter() - begun) < seconds:
        work()
        rounds += 1
    return rounds / spent_s
