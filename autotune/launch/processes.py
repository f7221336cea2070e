"""Start, watch and end the processes of a trial: messages, deadline, memory limit, process tree."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from time import sleep
from typing import Any, BinaryIO

import psutil
from pydantic import ValidationError

from autotune.errors import LauncherError
from autotune.launch.launcher import TOKEN_VARIABLE, EndedFor, Exit, Launch
from autotune.launch.machine import with_kept_memory
from autotune.protocol.channel import CHANNEL, Channel
from autotune.protocol.disk import TrialFolder, disk_error, monotonic
from autotune.records.measurement import Block

# Starts workers; finds and ends all processes that a trial has started, also those that have left
# its session.
#
# A trial's processes are found by the session and process group of each rank, and by a token in
# their environment. A session's number is only used while the rank that leads it has not been
# reaped: after that the kernel may give the number to another process, and killpg would end a
# stranger's group. The launchers therefore read exit codes without reaping the ranks (`exit_code`,
# and serve.py in the fork server), and reap them after `kill_all`. Only where the fork server
# itself dies does init reap its ranks before that. Numbers are given out in turn: one comes round
# again after 32,768 forks or more (man 5 proc, pid_max), which take seconds, not the moment until
# `kill_all`.
#
# The dead leave shared memory. torch's, by the sharing strategy "file_system": its process that
# would remove the files (torch_shm_manager) is ended with the trial. Source:
# torch/csrc/MapAllocator.cpp (NewProcessWideShmHandle): "/torch_", pid, "_", random, "_", counter.
# NCCL's, which it removes once all ranks have them open. Source: NCCL's src/misc/shmutils.cc
# (ncclShmOpen): mkstemp of "/dev/shm/nccl-XXXXXX", unlinked by the last rank that attaches.


# Our convention: a process that a SIGKILL has not ended by then waits for a device or a disk.
_GONE_WITHIN_S = 5.0
_SHARED = Path("/dev/shm")  # noqa: S108 - torch's and NCCL's own place
_NCCL = "nccl-"


def start_worker(
    *arguments: str,
    environment: Mapping[str, str],
    token: str,
    stdin: int,
    output: int,
    descriptors: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start an interpreter with the worker's code, in a session of its own.

    Args:
        arguments: Of its command line.
        environment: The caller's; its module search path, which the working directory does not
            change, is added, and what has malloc keep memory.
        token: Marks all that the worker starts.
        stdin: What it reads, as for Popen.
        output: The descriptor that it prints to.
        descriptors: Others that it inherits.

    Raises:
        LauncherError: the system refuses.
    """
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str) and entry)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune.worker", *arguments],
            env={**with_kept_memory(environment), "PYTHONPATH": path, TOKEN_VARIABLE: token},
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            start_new_session=True,
        )
    except OSError as error:
        raise LauncherError(f"a process for trials can't be started: {error}") from error


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a child that has ended (negative: a signal), None if it runs; it is not reaped."""
    if process.returncode is not None or sys.platform != "linux":
        return process.poll()
    return exit_code_of(process.pid)


def exit_code_of(child: int) -> int | None:
    """Return the same of a child by its number; on Linux alone."""
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill_all(leaders: Collection[int], token: str, *, spare: int | None = None) -> None:
    """End a trial and wait until all of it is gone: loader workers that live on would disturb the next trial.

    Args:
        leaders: The trial's ranks, each the leader of a session and process group; not reaped yet.
        token: The value of TOKEN_VARIABLE in the environment of the trial's processes.
        spare: A server that has the token too and lives on.
    """
    begun = monotonic()
    pids = set(leaders)
    pids.update(
        process.pid for process in _members(leaders, token, spare)
    )  # the groups' end leaves no trace of them
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    while (doomed := _members(leaders, token, spare)) and monotonic() - begun < _GONE_WITHIN_S:
        for process in doomed:  # again, until none is left: a process may have forked meanwhile
            with suppress(psutil.Error):
                process.kill()
            pids.add(process.pid)
        sleep(0.002)  # about as long as a killed process needs to be gone
    for pid in pids:
        free_shared_memory(pid)


def bytes_above(leaders: Collection[int], ceiling_bytes: int) -> int | None:
    """Return the memory of the process trees below `leaders` together if it is above the ceiling, else None.

    Resident sizes, which are cheap, count shared pages once for each process; only if they pass the
    ceiling is the proportional share (PSS) asked for, which takes the process's memory lock.
    """
    processes = list[psutil.Process]()
    for leader in leaders:
        with suppress(psutil.Error):
            root = psutil.Process(leader)
            processes += [root, *root.children(recursive=True)]
    resident_bytes = total_bytes = 0
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            resident_bytes += process.memory_info().rss
    if resident_bytes <= ceiling_bytes:
        return None
    for process in processes:
        with suppress(psutil.Error):
            full = process.memory_full_info()
            total_bytes += int(getattr(full, "pss", full.uss))
    return total_bytes if total_bytes > ceiling_bytes else None


def oom_kills() -> int:
    """Return how often the kernel's out-of-memory killer has struck since boot; 0 if the kernel does not count."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _members(leaders: Collection[int], token: str, spare: int | None) -> list[psutil.Process]:
    """Return a trial's processes that run; zombies wait for their parent, which in a container may never reap them."""
    found = list[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid not in {os.getpid(), spare} and (
                os.getsid(process.pid) in leaders or process.environ().get(TOKEN_VARIABLE) == token
            ):
                is_dead = process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
                found += [] if is_dead else [process]
    return found


def free_shared_memory(pid: int) -> None:
    """Remove torch's files in /dev/shm that a dead process has left."""
    for path in _SHARED.glob(f"torch_{pid}_*"):
        with suppress(OSError):
            path.unlink()


def segments() -> dict[int, Path]:
    """Return this user's files of NCCL that are there now, by their inodes."""
    found = {}
    for path in _SHARED.glob(f"{_NCCL}*"):
        with suppress(OSError):
            status = path.stat(follow_symlinks=False)
            if status.st_uid == os.getuid():
                found[status.st_ino] = path
    return found


def free_segments(before: Collection[int]) -> None:
    """Remove NCCL's files that were not there before, and that no living process has open or mapped.

    Processes of other containers that share /dev/shm are not visible: a group of this user's that
    starts in one while a trial's ranks run here may lose its file. Hence this is called after
    groups only, which may have left some.
    """
    new = {inode: path for inode, path in segments().items() if inode not in before}
    used = list[str]()
    for process in Path("/proc").glob("[0-9]*") if new else ():
        with suppress(OSError):  # it has ended, or is another user's
            used += (process / "maps").read_text(errors="replace").splitlines()
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    used.append(str(descriptor.readlink()))
    for path in new.values():
        # the kernel adds " (deleted)" to the name of a file that is gone
        if not any(target.endswith(str(path)) for target in used):
            with suppress(OSError):  # its owner has removed it
                path.unlink()


# A trial's processes from their start to their end: reads what they print and send, keeps deadlines,
# watches RAM, ends all that is left.
#
# The ranks of a group end together: once one has ended, the others soon end by themselves or are
# ended. Once one has written its stack because the group stands still, and has not removed it
# since, all are ended. A shared process does one trial after another: it is not ended after each.


# Our conventions:
_TICK_S = 0.05
_FLOODED_TICK_S = 0.001  # a full pipe blocks the process that prints
_RAM_CHECK_S = 0.5
# Of the ceiling gone from the machine's free RAM: to sum up the process tree costs the trial time.
_WORTH_A_CHECK = 0.5
_CHECKS_ANYWAY = (
    10  # one check in so many is made in any case: other processes may have freed RAM meanwhile
)
_HEAD_BYTES = _TAIL_BYTES = 256 * 1024  # some thousand lines of each
_PUMP_BYTES = 1024 * 1024  # then the deadline and the memory are checked again
_CHUNK_BYTES = 64 * 1024  # what a pipe holds; man 7 pipe
_MESSAGES_AT_ONCE = 1000  # as with _PUMP_BYTES
_MOST_CONNECTIONS = 100  # each process that reports blocks, or does jobs in turn, has one
_MOST_BLOCKS = 10_000  # far more than a window of 8 s has
# Tempfile.mkdtemp; arbitrary_address of multiprocessing/connection.py.
_SOCKET = "/pymp-12345678/listener-12345678"
_SOCKET_PATH_BYTES = 104  # sys/un.h, with the zero at its end: 108 on Linux, 104 on macOS


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A trial's processes as what has started them knows them."""

    pids: Sequence[int]
    """The leader of each rank's session, in the order of the ranks; not reaped before all is gone."""
    ended: Callable[[], Mapping[int, int]]
    """Returns the exit codes (negative: a signal) of the ranks that have ended since the last call."""
    wakes: Collection[int] = ()
    """Descriptors that can be read once a rank has ended that `ended` has not returned yet."""
    spare: int | None = None
    """A server that has the trial's token and lives on."""


class Ranks:
    """A trial's processes. A shared one does the job of one trial after another.

    Args:
        launch: The first trial.
        token: Marks the processes.
        start: Starts the ranks, which print to a descriptor.
        is_shared: Whether the process waits for another job after each.

    Attributes:
        is_done: A shared process has done its job and waits for the next.

    Raises:
        LauncherError: They can't be started; nothing of them is left.
        RunFolderError: The log can't be written.
    """

    def __init__(
        self, launch: Launch, token: str, start: Callable[[int], Started], *, is_shared: bool
    ) -> None:
        self.is_done = False
        self._is_shared = is_shared
        self._token = token
        self._started = Started(pids=(), ended=dict)
        self._codes: dict[int, int] = {}
        """Exit codes by rank, in the order in which they came."""
        self._channels: list[Channel] = []
        self._segments = segments()
        self._free_bytes = psutil.virtual_memory().available
        """Before anything of it ran: what a shared process took in earlier trials counts too."""
        with ExitStack() as undo:
            self._listener = undo.enter_context(_listening_in(launch.folder))
            self._pipe, output = os.pipe()
            undo.callback(os.close, self._pipe)
            os.set_blocking(self._pipe, False)
            try:
                self._log = LogFile(launch.log, self._pipe)
                undo.callback(self._end_all)
                self._started = start(output)
            finally:
                os.close(output)
            self._held = undo.pop_all()

    def begin(self, launch: Launch) -> None:
        """Have a shared process that is done do the job of another trial.

        Raises:
            RunFolderError: The log can't be written.
        """
        self._log = LogFile(launch.log, self._pipe)
        self.is_done = False
        with suppress(OSError):  # it has ended meanwhile, as `follow` will notice
            self._channels[0].send({"folder": str(launch.folder.path)})

    def follow(self, launch: Launch, kept_bytes: int = 0) -> Exit:
        """Wait until the trial is done, all ranks have ended, or what runs must be ended, which the caller does.

        Args:
            launch: The trial.
            kept_bytes: RAM that a shared process has besides what the job takes.
        """
        begun = monotonic()
        kills = oom_kills()
        ends_at: dict[EndedFor, float] = {
            "deadline": begun + launch.deadline_s,
            "straggling": inf,
            "standstill": inf,
            "cancelled": inf,
        }
        ram = _RamWatch(
            launch.ram_ceiling_bytes and launch.ram_ceiling_bytes + kept_bytes,
            begun + _RAM_CHECK_S,
            self._free_bytes,
        )
        first_s = None
        taken = None
        ended_for: EndedFor | None = None
        while not ended_for:
            self._wait(_FLOODED_TICK_S if self._log.pump() else _TICK_S)
            now = monotonic()
            ended = self._started.ended()
            if ended and not self._codes:
                ends_at["straggling"] = now + launch.ending.follow_within_s
                first_s = now - begun
            self._codes.update(ended)
            is_measured = self._take_messages(launch)
            running = [
                pid for rank, pid in enumerate(self._started.pids) if rank not in self._codes
            ]
            if not running or self.is_done:
                break
            stacks_end = min(ends_at["standstill"], now + launch.ending.stacks_within_s)
            ends_at["standstill"] = stacks_end if launch.folder.has_stacks() else inf
            ended_for = next((reason for reason, at in ends_at.items() if now >= at), None)
            is_asked = ends_at["cancelled"] < inf
            if not ended_for and not is_asked and launch.should_end and launch.should_end():
                # a shared process may live on: it has the time of a block to end its trial
                patience_s = max(launch.ending.block_within_s, now - begun)
                ends_at["cancelled"] = now + (patience_s if self._ask_to_end() else 0.0)
                ended_for = None if ends_at["cancelled"] > now else "cancelled"
            if not ended_for and is_measured:
                ended_for = "done"
            if not ended_for and (taken := ram.above_ceiling(running, now)) is not None:
                ended_for = "memory"
        if self.is_done:
            self._log.close()
        by_rank = [self._codes.get(rank) for rank in range(launch.ranks)]
        return Exit(
            code=0 if self.is_done else by_rank[0],
            codes=(0,) if self.is_done else tuple(by_rank),
            first=next(iter(self._codes), None),
            first_s=first_s,
            ended_for="cancelled" if ends_at["cancelled"] < inf else ended_for,
            memory_bytes=taken,
            was_oom_killed=oom_kills() > kills,
            wall_s=monotonic() - begun,
        )

    def can_go_on(self) -> bool:
        """Return whether a shared process still waits for a job."""
        self._codes.update(self._started.ended())
        return self.is_done and bool(self._channels) and not self._codes

    def end(self) -> None:
        """End all that the ranks have started, and wait until it is gone."""
        self._held.close()
        until = monotonic() + _GONE_WITHIN_S  # for the codes of ranks that were killed
        while len(self._codes) < len(self._started.pids) and monotonic() < until:
            self._wait(_TICK_S)
            self._codes.update(self._started.ended())

    def _end_all(self) -> None:
        kill_all(self._started.pids, self._token, spare=self._started.spare)
        self._log.close()
        if len(self._started.pids) > 1:
            free_segments(self._segments)
        self._listener = None
        while self._channels:
            self._channels.pop().close()

    def _wait(self, within_s: float) -> None:
        """Wait until a rank has ended or sends a message."""
        sources: list[Any] = [*self._started.wakes, *self._channels]
        if self._listener is not None and len(self._channels) < _MOST_CONNECTIONS:
            sources.append(self._listener)
        # without a descriptor for the ends of processes, ask for them
        wait(sources, within_s if self._started.wakes else min(within_s, 0.01))

    def _take_messages(self, launch: Launch) -> bool:
        """Read what the processes have sent; return whether a script says that it was measured."""
        if self._listener is not None and len(self._channels) < _MOST_CONNECTIONS:
            try:
                self._channels.append(Channel(self._listener.accept()[0]))
            except OSError as error:  # nobody has connected, or has given up meanwhile
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    # whoever waits there would wake this process again and again
                    self._listener.close()
                    self._listener = None
        is_measured = False
        for channel in [*self._channels]:
            try:
                for _ in range(_MESSAGES_AT_ONCE):
                    message = channel.receive(0.0)
                    if message is None:
                        break
                    if "block" in message and len(launch.blocks) < _MOST_BLOCKS:
                        launch.blocks.extend(_blocks_in(message["block"]))
                    self.is_done |= "done" in message and self._is_shared
                    is_measured |= "measured" in message
            except EOFError:
                self._channels.remove(channel)
                channel.close()
        return is_measured

    def _ask_to_end(self) -> bool:
        """Ask a shared process to end its trial; return whether it could be asked."""
        if self._is_shared and self._channels:
            with suppress(OSError):
                self._channels[0].send({"enough": True}, within_s=0.0)
                return True
        return False


def _blocks_in(sent: object) -> list[Block]:
    """Return the block that a rank has sent; nothing if it is none, since user code may have written it."""
    with suppress(ValidationError):
        block = Block.model_validate(sent)
        if block.samples > 0 and 0 < block.seconds < inf:
            return [block]
    return []


@contextmanager
def _listening_in(folder: TrialFolder) -> Iterator[socket.socket | None]:
    """Listen for a trial's processes in a folder for sockets that is gone with the trial.

    Without a place for temporary files there is None: no trial is stopped early, no process shared,
    and multiprocessing finds a place itself. That place may be too long for a socket, and a trial
    with loader workers then hangs to its deadline.

    Its name is as long as those that multiprocessing gives. Once the fork server knows of it, it is
    gone even if this process is killed; so nothing is waited for in between.
    """
    with ExitStack() as held:
        listener = None
        with suppress(OSError):
            made = held.enter_context(
                TemporaryDirectory(
                    prefix="pymp-", dir=_place_for_sockets(), ignore_cleanup_errors=True
                )
            )
            folder.sockets.unlink(missing_ok=True)  # of a server that died before it could fork
            folder.sockets.symlink_to(made)
            opened = held.enter_context(socket.socket(socket.AF_UNIX))
            opened.bind(f"{made}/{CHANNEL}")
            opened.listen()
            opened.setblocking(False)
            listener = opened
        yield listener


def _place_for_sockets() -> str:
    """Return where temporary files go, unless the path is too long for a socket: its loader would hang.

    Source: CPython's issue 132124; newer versions of multiprocessing go the same way.
    """
    place = gettempdir()
    return place if len(os.fsencode(place)) + len(_SOCKET) < _SOCKET_PATH_BYTES else "/tmp"  # noqa: S108


@dataclass(slots=True)
class _RamWatch:
    """Checks a trial's memory from time to time, and sums up its processes only if that may matter."""

    ceiling_bytes: int | None
    next_check: float
    free_bytes: int
    checks: int = 0

    def above_ceiling(self, leaders: Collection[int], now: float) -> int | None:
        """Return the memory of the ranks together if it is above the ceiling."""
        if now < self.next_check or self.ceiling_bytes is None:
            return None
        self.next_check = now + _RAM_CHECK_S
        self.checks += 1
        taken_bytes = self.free_bytes - psutil.virtual_memory().available
        if taken_bytes < _WORTH_A_CHECK * self.ceiling_bytes and self.checks % _CHECKS_ANYWAY != 0:
            return None
        return bytes_above(leaders, self.ceiling_bytes)


class LogFile:
    """Writes what comes out of a pipe that does not block to a file, at most half a MiB.

    Raises:
        RunFolderError: The log can't be written.
    """

    def __init__(self, path: Path, pipe: int) -> None:
        self._pipe = pipe
        try:
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
            )
        except OSError as error:
            raise disk_error(path, error) from error
        self._file: BinaryIO = open(descriptor, "wb", buffering=0)  # noqa: PTH123, SIM115 - a descriptor, closed by close()
        self._room = _HEAD_BYTES
        self._dropped = 0
        self._tail = bytearray()

    def pump(self) -> bool:
        """Read what is in the pipe now, 1 MiB at most; return whether it was full, so that more may wait."""
        taken = 0
        with suppress(BlockingIOError):
            while taken < _PUMP_BYTES and (chunk := os.read(self._pipe, _CHUNK_BYTES)):
                self._keep(chunk)
                taken += len(chunk)
        return taken >= _CHUNK_BYTES

    def close(self) -> None:
        """Read the rest and write the end; a full disk costs the log its end, not the study a trial."""
        if self._file.closed:
            return
        while self.pump():
            pass
        if self._dropped:
            self._write(f"\n... {self._dropped:,} bytes left out ...\n".encode())
        self._write(self._tail)
        self._file.close()

    def _keep(self, chunk: bytes) -> None:
        head = chunk[: self._room]
        rest = chunk[self._room :]
        self._room -= len(head)
        self._write(head)
        self._tail += rest
        excess = max(0, len(self._tail) - _TAIL_BYTES)
        del self._tail[:excess]
        self._dropped += excess

    def _write(self, data: bytes | bytearray) -> None:
        with suppress(OSError):
            self._file.write(data)
