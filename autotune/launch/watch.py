"""Waiting for a trial: takes its output, keeps its deadline, watches the RAM, and sweeps up when it is over."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol

import psutil

from autotune.launch.launcher import Exit, Launch
from autotune.launch.log_file import LogFile
from autotune.launch.process_tree import bytes_above, kill_all, oom_kills

__all__ = ["Started", "watch"]

_TICK_S = 0.05
_FLOODED_TICK_S = 0.001  # a full pipe holds up whoever prints
_RAM_LOOK_S = 0.5
_WORTH_A_LOOK = 0.5  # of the ceiling gone from the machine's free RAM: to walk the processes' tree takes from the trial
_LOOKS_ANYWAY = 10  # one in so many is made in any case: others may have freed RAM meanwhile
_LAST_EXIT_WITHIN_S = 5.0


class Started(Protocol):
    """A trial's process as its launcher knows it."""

    @property
    def pid(self) -> int:
        """The leader of the trial's session."""
        ...

    @property
    def spare(self) -> int | None:
        """A server that carries the trial's token and lives on."""
        ...

    def poll(self, timeout_s: float) -> int | None:
        """The exit code once it has ended (negative: a signal), waiting for it so long at most."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    code: int | None
    ended_for: Literal["deadline", "memory"] | None
    seen_bytes: int | None = None


def watch(started: Started, launch: Launch, log: LogFile, token: str) -> Exit:
    """Wait for a trial's end or make it; when this returns or raises, nothing of the trial runs any more."""
    begun, kills = monotonic(), oom_kills()
    try:
        end = _wait(started, launch, log, begun)
        wall_s = monotonic() - begun
    finally:
        kill_all(started.pid, token, spare=started.spare)
        log.close()
    if end.ended_for is not None:
        started.poll(_LAST_EXIT_WITHIN_S)  # its exit is not to be taken for the next trial's
    return Exit(
        code=end.code,
        ended_for=end.ended_for,
        seen_bytes=end.seen_bytes,
        was_oom_killed=oom_kills() > kills,
        wall_s=wall_s,
    )


def _wait(started: Started, launch: Launch, log: LogFile, begun: float) -> _End:
    next_look, looks, free_bytes = begun + _RAM_LOOK_S, 0, psutil.virtual_memory().available
    while True:
        is_flooded = log.pump()
        code = started.poll(_FLOODED_TICK_S if is_flooded else _TICK_S)
        now = monotonic()
        if code is not None:
            return _End(code, None)
        if now - begun >= launch.deadline_s:
            return _End(None, "deadline")
        if launch.ram_ceiling_bytes is not None and now >= next_look:
            next_look, looks = now + _RAM_LOOK_S, looks + 1
            taken_bytes = free_bytes - psutil.virtual_memory().available
            if taken_bytes < _WORTH_A_LOOK * launch.ram_ceiling_bytes and looks % _LOOKS_ANYWAY != 0:
                continue
            held = bytes_above(started.pid, launch.ram_ceiling_bytes)
            if held is not None:
                return _End(None, "memory", held)
