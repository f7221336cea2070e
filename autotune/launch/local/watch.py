"""Waiting for a trial: takes its output, keeps its deadline, watches the RAM, and sweeps up when it is over.

The ranks of a group end together: once one has ended, the others soon do so by themselves or are ended. Once one has
written down that the group stands still, and does not take it back, all are ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Protocol

import psutil

from autotune.launch.launcher import EndedFor, Exit, Launch
from autotune.launch.local.log_file import LogFile
from autotune.launch.local.nccl_segments import free_segments, segments
from autotune.launch.local.process_tree import bytes_above, kill_all, oom_kills

__all__ = ["Started", "watch"]

_TICK_S = 0.05
_FLOODED_TICK_S = 0.001  # a full pipe holds up whoever prints
_RAM_LOOK_S = 0.5
_WORTH_A_LOOK = 0.5  # of the ceiling gone from the machine's free RAM: to walk the processes' tree takes from the trial
_LOOKS_ANYWAY = 10  # one in so many is made in any case: others may have freed RAM meanwhile
_LAST_EXIT_WITHIN_S = 5.0
_STACKS_WITHIN_S = 2.0  # all ranks tell at about the same time; before the deadline they do so too, but later than this
_FOLLOW_WITHIN_S = 5.0  # gloo's ranks see a closed connection at once and report it; NCCL's would wait for minutes


class Started(Protocol):
    """A trial's processes as their launcher knows them."""

    @property
    def pids(self) -> Sequence[int]:
        """The leader of each rank's session, in the order of the ranks."""
        ...

    @property
    def spare(self) -> int | None:
        """A server that carries the trial's token and lives on."""
        ...

    def poll(self, timeout_s: float) -> Mapping[int, int]:
        """Exit codes (negative: a signal) of ranks that have ended since the last call, which waits so long at most.

        Not to be called once all have ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class _End:
    codes: Mapping[int, int]
    """Of the ranks that ended by themselves, in that order."""
    ended_for: EndedFor | None
    first_s: float | None = None
    seen_bytes: int | None = None


def watch(started: Started, launch: Launch, log: LogFile, token: str) -> Exit:
    """Wait for a trial's end or make it; when this returns or raises, nothing of the trial runs any more."""
    begun, kills = monotonic(), oom_kills()
    before = segments()
    try:
        end = _wait(started, launch, log, begun)
        wall_s = monotonic() - begun
    finally:
        kill_all(started.pids, token, spare=started.spare)
        if launch.ranks > 1:
            free_segments(before)
        log.close()
    _await_last_exits(started, launch.ranks - len(end.codes))
    codes = tuple(end.codes.get(rank) for rank in range(launch.ranks))
    return Exit(
        code=codes[0],
        codes=codes,
        first=next(iter(end.codes), None),
        first_s=end.first_s,
        ended_for=end.ended_for,
        seen_bytes=end.seen_bytes,
        was_oom_killed=oom_kills() > kills,
        wall_s=wall_s,
    )


def _wait(started: Started, launch: Launch, log: LogFile, begun: float) -> _End:
    codes: dict[int, int] = {}
    ram = _RamWatch(launch.ram_ceiling_bytes, begun + _RAM_LOOK_S, psutil.virtual_memory().available)
    straggling_from, standing_from, first_s = inf, inf, None
    while True:
        is_flooded = log.pump()
        ended = started.poll(_FLOODED_TICK_S if is_flooded else _TICK_S)
        now = monotonic()
        if ended and not codes:
            straggling_from, first_s = now + _FOLLOW_WITHIN_S, now - begun
        standing_from = min(standing_from, now + _STACKS_WITHIN_S) if launch.folder.has_stacks() else inf
        codes.update(ended)
        if len(codes) == launch.ranks:
            return _End(codes, None, first_s)
        if now - begun >= launch.deadline_s:
            return _End(codes, "deadline", first_s)
        if now >= straggling_from:
            return _End(codes, "straggling", first_s)
        if now >= standing_from:
            return _End(codes, "standstill", first_s)
        if launch.should_end is not None and launch.should_end():
            return _End(codes, "called_off", first_s)
        held = ram.held_above([pid for rank, pid in enumerate(started.pids) if rank not in codes], now)
        if held is not None:
            return _End(codes, "memory", first_s, held)


def _await_last_exits(started: Started, count: int) -> None:
    """Take the exits of ranks that were ended: they are not to be taken for the next trial's."""
    begun = monotonic()
    while count > 0 and (left_s := begun + _LAST_EXIT_WITHIN_S - monotonic()) > 0:
        count -= len(started.poll(left_s))


@dataclass(slots=True)
class _RamWatch:
    """Looks at a trial's memory now and then, and walks its processes only where it may matter."""

    ceiling_bytes: int | None
    next_look: float
    free_bytes: int
    looks: int = 0

    def held_above(self, leaders: Collection[int], now: float) -> int | None:
        """What the ranks together hold where that is above the ceiling."""
        if self.ceiling_bytes is None or now < self.next_look:
            return None
        self.next_look, self.looks = now + _RAM_LOOK_S, self.looks + 1
        taken_bytes = self.free_bytes - psutil.virtual_memory().available
        if taken_bytes < _WORTH_A_LOOK * self.ceiling_bytes and self.looks % _LOOKS_ANYWAY != 0:
            return None
        return bytes_above(leaders, self.ceiling_bytes)
