"""A trial from its start to its end: reads its output, keeps its deadline, watches its RAM, ends all that is left.

The ranks of a group end together: once one has ended, the others soon end by themselves or are ended. Once one has
written its stack because the group stands still, and has not removed it since, all are ended. The log takes all that
the processes print, or the beginning and the end where that is too much.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import BinaryIO

import psutil

from autotune.launch.launcher import EndedFor, Exit, Launch
from autotune.launch.local.process_tree import bytes_above, free_segments, kill_all, oom_kills, segments
from autotune.protocol.clock import monotonic
from autotune.protocol.disk import TrialFolder, disk_error

__all__ = ["LogFile", "Started", "sockets_in", "watch"]

# Our conventions:
_TICK_S = 0.05
_FLOODED_TICK_S = 0.001  # a full pipe blocks the process that prints
_RAM_CHECK_S = 0.5
_WORTH_A_CHECK = 0.5  # of the ceiling gone from the machine's free RAM: to sum up the process tree costs the trial time
_CHECKS_ANYWAY = 10  # one check in so many is made in any case: other processes may have freed RAM meanwhile
_HEAD_BYTES = _TAIL_BYTES = 256 * 1024  # some thousand lines of each
_PUMP_BYTES = 1024 * 1024  # then the deadline and the memory are checked again
_CHUNK_BYTES = 64 * 1024  # what a pipe holds; man 7 pipe
_SOCKET = "/pymp-12345678/listener-12345678"  # tempfile.mkdtemp; arbitrary_address of multiprocessing/connection.py
_SOCKET_PATH_BYTES = 104  # sys/un.h, with the zero at its end: 108 on Linux, 104 on macOS


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A trial's processes as their launcher knows them."""

    pids: Sequence[int]
    """The leader of each rank's session, in the order of the ranks; not reaped before `watch` returns."""
    poll: Callable[[float], Mapping[int, int]]
    """Waits at most so long; exit codes (negative: a signal) of the ranks that have ended since the last call. Never
    called once all have ended."""
    spare: int | None = None
    """A server that has the trial's token and lives on."""


def watch(launch: Launch, token: str, start: Callable[[int, ExitStack], Started]) -> Exit:
    """Start a trial and wait for its end, or end it; when this returns or raises, nothing of it runs any more.

    Args:
        launch: The trial.
        token: Marks its processes.
        start: Starts its ranks, which print to a descriptor; puts on the stack what is to go with them:
            `sockets_in`, right before.
    """
    with ExitStack() as held:
        return _watch(launch, token, lambda output: start(output, held))


@contextmanager
def sockets_in(folder: TrialFolder) -> Iterator[None]:
    """A folder for sockets that is gone with the trial; where none can be made, processes find a place themselves.

    That place may be too long for a socket, and a trial with loader workers then hangs to its deadline.

    Its name is as long as those that multiprocessing gives. Once the fork server knows of it, it is gone even where
    this process is killed; so nothing is waited for in between.
    """
    with ExitStack() as held:
        with suppress(OSError):
            made = TemporaryDirectory(prefix="pymp-", dir=_place_for_sockets(), ignore_cleanup_errors=True)
            folder.sockets.symlink_to(held.enter_context(made))
        yield


def _place_for_sockets() -> str:
    """Where temporary files go, unless a socket there can't be bound for its path's length: its loader would hang.

    Source: CPython's issue 132124; newer versions of multiprocessing go the same way.
    """
    place = gettempdir()
    return place if len(os.fsencode(place)) + len(_SOCKET) < _SOCKET_PATH_BYTES else "/tmp"  # noqa: S108


def _watch(launch: Launch, token: str, start: Callable[[int], Started]) -> Exit:
    log = LogFile(launch.log)
    try:
        started = start(log.output)
    except BaseException:
        kill_all((), token)
        log.close()
        raise
    finally:
        os.close(log.output)
    begun, kills, before = monotonic(), oom_kills(), segments()
    try:
        end = _wait(started, launch, log, begun)
    finally:
        kill_all(started.pids, token, spare=started.spare)
        if launch.ranks > 1:
            free_segments(before)
        log.close()
    _await_last_exits(started, end.codes.count(None))
    return replace(end, was_oom_killed=oom_kills() > kills)


def _wait(started: Started, launch: Launch, log: LogFile, begun: float) -> Exit:
    codes: dict[int, int] = {}
    ends_at: dict[EndedFor, float] = {"deadline": begun + launch.deadline_s, "straggling": inf, "standstill": inf}
    ram = _RamWatch(
        launch.ram_ceiling or (lambda: launch.ram_ceiling_bytes),
        begun + _RAM_CHECK_S,
        psutil.virtual_memory().available,
    )
    running, first_s, taken = started.pids, None, None
    ended_for: EndedFor | None = None
    while running and ended_for is None:
        is_flooded = log.pump()
        ended = started.poll(_FLOODED_TICK_S if is_flooded else _TICK_S)
        now = monotonic()
        if ended and not codes:
            ends_at["straggling"], first_s = now + launch.ending.follow_within_s, now - begun
        stacks_end = min(ends_at["standstill"], now + launch.ending.stacks_within_s)
        ends_at["standstill"] = stacks_end if launch.folder.has_stacks() else inf
        codes.update(ended)
        running = [pid for rank, pid in enumerate(started.pids) if rank not in codes]
        if not running:
            break
        ended_for = next((reason for reason, at in ends_at.items() if now >= at), None)
        if ended_for is None and launch.should_end is not None and launch.should_end():
            ended_for = "cancelled"
        if ended_for is None and launch.folder.done.exists():
            ended_for = "done"
        if ended_for is None and (taken := ram.above_ceiling(running, now)) is not None:
            ended_for = "memory"
    by_rank = tuple(codes.get(rank) for rank in range(launch.ranks))
    return Exit(
        code=by_rank[0],
        codes=by_rank,
        first=next(iter(codes), None),  # they are in the order in which they came
        first_s=first_s,
        ended_for=ended_for,
        memory_bytes=taken,
        wall_s=monotonic() - begun,
    )


def _await_last_exits(started: Started, count: int) -> None:
    """Receive the exits of ranks that were ended, so that they are not taken for the next trial's."""
    begun = monotonic()
    while count > 0 and (left_s := begun + 5.0 - monotonic()) > 0:  # for the codes of ranks that were killed
        count -= len(started.poll(left_s))


@dataclass(slots=True)
class _RamWatch:
    """Checks a trial's memory from time to time, and sums up its processes only where that may matter."""

    ceiling: Callable[[], int | None]
    next_check: float
    free_bytes: int
    checks: int = 0

    def above_ceiling(self, leaders: Collection[int], now: float) -> int | None:
        """Memory of the ranks together where it is above the ceiling."""
        if now < self.next_check or (ceiling_bytes := self.ceiling()) is None:
            return None
        self.next_check, self.checks = now + _RAM_CHECK_S, self.checks + 1
        taken_bytes = self.free_bytes - psutil.virtual_memory().available
        if taken_bytes < _WORTH_A_CHECK * ceiling_bytes and self.checks % _CHECKS_ANYWAY != 0:
            return None
        return bytes_above(leaders, ceiling_bytes)


class LogFile:
    """Writes what comes out of a pipe to a file, at most half a MiB.

    Attributes:
        output: the descriptor that a trial's processes write to, for the caller to close.

    Raises:
        RunFolderError: the log can't be written; nothing stays open.
    """

    def __init__(self, path: Path) -> None:
        self._pipe, self.output = os.pipe()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            os.close(self._pipe)
            os.close(self.output)
            raise disk_error(path, error) from error
        self._file: BinaryIO = open(descriptor, "wb", buffering=0)  # noqa: PTH123, SIM115 - a descriptor, closed by close()
        os.set_blocking(self._pipe, False)
        self._room, self._dropped = _HEAD_BYTES, 0
        self._tail = bytearray()

    def pump(self) -> bool:
        """Read what is in the pipe now, 1 MiB at most; whether it was full, so that more may wait."""
        taken = 0
        with suppress(BlockingIOError):
            while taken < _PUMP_BYTES and (chunk := os.read(self._pipe, _CHUNK_BYTES)):
                self._keep(chunk)
                taken += len(chunk)
        return taken >= _CHUNK_BYTES

    def close(self) -> None:
        """Read the rest and write the end; a full disk costs the log its end, not the study a trial."""
        while self.pump():
            pass
        if self._dropped:
            self._write(f"\n... {self._dropped:,} bytes left out ...\n".encode())
        self._write(self._tail)
        self._file.close()
        os.close(self._pipe)

    def _keep(self, chunk: bytes) -> None:
        head, rest = chunk[: self._room], chunk[self._room :]
        self._room -= len(head)
        self._write(head)
        self._tail += rest
        excess = max(0, len(self._tail) - _TAIL_BYTES)
        del self._tail[:excess]
        self._dropped += excess

    def _write(self, data: bytes | bytearray) -> None:
        with suppress(OSError):
            self._file.write(data)
