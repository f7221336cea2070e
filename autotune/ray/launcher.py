"""Launcher over the hosts of a Ray cluster: the driver keeps the study, the hosts measure.

`launch` may be called from several threads; each waits for its turn and its hosts. Where a host is lost, the same trial
is measured again on others, which only costs time.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import ray

from autotune.errors import LauncherError
from autotune.launch.launcher import EndedFor, Exit, Launch
from autotune.note import Note
from autotune.protocol.clock import monotonic
from autotune.protocol.disk import write_atomic, write_model
from autotune.protocol.jobs import DescribeJob, GroupPart, Job, TrialJob, read_job
from autotune.protocol.reports import RankReport
from autotune.ray.cluster import join
from autotune.ray.host import HostAnswer, HostTask, answer_files
from autotune.ray.hosts import HostPool
from autotune.ray.nodes import SEARCH_IS_OVER, HostLostError, NoRoomError, OneHost, Team
from autotune.records.trial import Outcome, TrialResult
from autotune.settings.executor import Executor

__all__ = ["BlockCopy", "RayLauncher", "merged_exit"]

_MOST_LOSSES = 3  # our convention: a trial that loses so many hosts most likely ends them itself
_BY_WEIGHT: tuple[EndedFor, ...] = ("memory", "deadline", "cancelled", "standstill", "straggling")
_SILENT_S = 60.0  # our convention: past its deadline, at which the host itself ends a trial


class RayLauncher:
    """Runs each trial on whole hosts of a Ray cluster. Made by `connect`."""

    def __init__(self, pool: HostPool, opened: ExitStack) -> None:
        self._pool, self._opened = pool, opened

    @classmethod
    def connect(cls, executor: Executor, *, device: str) -> RayLauncher:
        """Join a running cluster and describe its hosts; a connection that the caller has already made is used.

        Raises:
            ConfigError: no cluster answers.
            LauncherError: none of its hosts can run trials.
        """
        with ExitStack() as undo:
            join(executor.address, undo)
            pool = HostPool(executor, device)
            undo.callback(pool.close)
            pool.require_hosts()
            return cls(pool, undo.pop_all())

    @property
    def slots(self) -> int:
        """Trials that can run at once, one a host."""
        return self._pool.slots

    @property
    def notes(self) -> tuple[Note, ...]:
        """Hosts that are not used."""
        return self._pool.notes

    def launch(self, launch: Launch) -> Exit:
        """Run a trial on hosts that are free, and again elsewhere where one is lost.

        The outcome is invalid where the cluster has no room for the trial (any more), crashed where it loses one host
        after the other, and out of memory where Ray ends it for its host's memory.

        Raises:
            LauncherError: no host is left, or the launcher was closed meanwhile.
        """
        job = read_job(launch.folder.job)
        begun, lost = monotonic(), list[str]()
        for _ in range(20):  # losses before a trial has begun are not its fault
            team: Team = ()
            try:
                team = self._pool.acquire(launch.ranks)
                return self._run(launch, job, team)
            except NoRoomError as error:
                return _without_answer(launch, "invalid", str(error), monotonic() - begun)
            except HostLostError as loss:
                if self._pool.is_closed:
                    raise LauncherError(SEARCH_IS_OVER) from loss
                self._pool.drop(loss.host)
                if loss.for_memory:
                    return _without_answer(launch, "host_oom", loss.for_memory, monotonic() - begun)
                if loss.was_running:
                    lost.append(loss.host.name)
            finally:
                self._pool.release([host for host, _ in team])
            if len(lost) == _MOST_LOSSES:
                break
        reason = f"{len(lost)} hosts were lost one after the other while it ran ({', '.join(lost)})"
        return _without_answer(launch, "crashed", f"{reason}; it is not tried again", monotonic() - begun)

    def close(self) -> None:
        """End all that runs on the hosts, and leave the cluster where `connect` has joined it."""
        self._opened.close()

    def _run(self, launch: Launch, job: Job, team: Team) -> Exit:
        if not isinstance(job, DescribeJob):
            key = _key_of(job.payload)
            for host, _ in team:
                host.take_payload(key, job.payload)
            job = job.model_copy(update={"payload": Path(key)})
        launch.folder.blocks.unlink(missing_ok=True)  # of a host that was lost
        streams = isinstance(job, TrialJob) and job.streams_blocks
        running = _RunningTrial(launch, BlockCopy(launch.folder.blocks) if streams else None)
        answers = running.run(team, _jobs_of(job, team))
        if self._pool.is_closed:
            raise LauncherError(SEARCH_IS_OVER)
        return _collect(launch, team, answers, running.cancelled_for)


def _key_of(payload: Path) -> str:
    """Of what is in a payload: its index, its stream, and the raw bytes' size and age."""
    raw = (payload / "bytes").stat()
    digest = zlib.crc32((payload / "index.json").read_bytes() + (payload / "stream").read_bytes())
    return f"{digest:08x}-{raw.st_size}-{raw.st_mtime_ns}"


def _jobs_of(job: Job, team: Team) -> Sequence[Job]:
    """The job of each host; the ranks of several hosts meet at the first one."""
    if len(team) == 1 or not isinstance(job, TrialJob):
        return [job]
    first, _ = team[0]
    place = f"tcp://{first.address}:{first.receive(first.call('free_port'))}"
    return [job.model_copy(update={"rendezvous": place, "part": part}) for _, part in team]


@dataclass(slots=True)
class BlockCopy:
    """Copies the blocks of a window from rank 0's host into the trial's folder here, one request at a time."""

    path: Path
    request: Any = None
    """Reference to the answer that is under way."""
    size: int = 0

    def fetch(self, host: OneHost, ticket: str) -> None:
        """Write what has arrived, and ask for more; returns at once."""
        if self.request is not None:
            if not ray.wait([self.request], timeout=0)[0]:
                return
            data = host.receive(self.request, was_running=True)
            with suppress(OSError), self.path.open("ab") as file:  # a full disk: the trial is not stopped early
                file.write(data)
            self.size += len(data)
        self.request = host.call("blocks", ticket, self.size)


@dataclass(slots=True)
class _RunningTrial:
    """A trial under way on its hosts: followed to the end, cancelled where it must not go on."""

    launch: Launch
    blocks: BlockCopy | None
    """Copies the blocks of rank 0's window, where they are asked for."""
    hosts: dict[Any, OneHost] = field(default_factory=dict)
    """By the reference to the host's answer."""
    begun: float = field(default_factory=monotonic)
    ticket: str = field(default_factory=lambda: uuid.uuid4().hex)
    cancelled_for: EndedFor | None = None
    """Why the driver has ended it; None where it has not."""

    def run(self, team: Team, jobs: Sequence[Job]) -> list[HostAnswer]:
        """Start the hosts' jobs and wait; every host's answer, in the order of the ranks."""
        try:
            for (host, part), job in zip(team, jobs, strict=True):
                task = HostTask(ticket=self.ticket, job=job, part=part, ram_ceiling_bytes=self.launch.ram_ceiling_bytes)
                self.hosts[host.call("run", task.model_dump_json())] = host
            return self._wait()
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        for host in self.hosts.values():
            with suppress(HostLostError):
                host.call("cancel", self.ticket)

    def _wait(self) -> list[HostAnswer]:
        answers: dict[Any, HostAnswer] = {}
        straggling_from = inf
        while left := [reference for reference in self.hosts if reference not in answers]:
            # blocks come about five times a second
            ready, _ = ray.wait(left, num_returns=len(left), timeout=0.1, fetch_local=True)
            for reference in ready:
                answer = self.hosts[reference].receive(reference, was_running=True)
                answers[reference] = HostAnswer.model_validate_json(answer)
            if len(answers) == len(self.hosts):
                break
            now = monotonic()
            if ready:
                straggling_from = min(straggling_from, now + self.launch.ending.follow_within_s)
            if self.blocks is not None and (first := next(iter(self.hosts))) not in answers:
                self.blocks.fetch(self.hosts[first], self.ticket)
            if self.cancelled_for is None:
                self._cancel_where_due(is_late=now >= straggling_from)
            if now > self.begun + self.launch.deadline_s + _SILENT_S:
                raise HostLostError(self.hosts[left[0]], was_running=True)
        return [answers[reference] for reference in self.hosts]

    def _cancel_where_due(self, *, is_late: bool) -> None:
        is_called_off = self.launch.should_end is not None and self.launch.should_end()
        if is_called_off or is_late:
            self.cancelled_for = "cancelled" if is_called_off else "straggling"
            self._cancel()


def _collect(launch: Launch, team: Team, answers: Sequence[HostAnswer], cancelled_for: EndedFor | None) -> Exit:
    """Write the hosts' reports and logs where a trial on this machine would have left them."""
    log = b""
    for (host, part), answer in zip(team, answers, strict=True):
        for path in answer_files(launch.folder, part):  # no other name that a host sends is written to
            if path.name in answer.files:
                write_atomic(path, answer.files[path.name])
        last = part.first_rank + part.ranks - 1
        ranks = f"rank {last}" if part.ranks == 1 else f"ranks {part.first_rank} to {last}"
        log += f"[{host.name}, {ranks}]\n".encode() + answer.log.rstrip() + b"\n"
    write_atomic(launch.log, log)
    return merged_exit([answer.exit for answer in answers], [part for _, part in team], cancelled_for)


def merged_exit(exits: Sequence[Exit], parts: Sequence[GroupPart], cancelled_for: EndedFor | None = None) -> Exit:
    """How a group over several hosts ended; the first rank to end is that of the host with the earliest end.

    `cancelled_for`: why the driver has cancelled the trial, which the hosts do not know.
    """
    ends = [
        (exit_.first_s, part.first_rank + exit_.first)
        for exit_, part in zip(exits, parts, strict=True)
        if exit_.first_s is not None and exit_.first is not None
    ]
    first_s, first = min(ends, default=(None, None))
    reasons = {(cancelled_for or "cancelled") if exit_.ended_for == "cancelled" else exit_.ended_for for exit_ in exits}
    codes = tuple(code for exit_ in exits for code in exit_.codes)
    return Exit(
        code=codes[0],
        codes=codes,
        first=first,
        first_s=first_s,
        ended_for=next((reason for reason in _BY_WEIGHT if reason in reasons), None),
        memory_bytes=max((exit_.memory_bytes for exit_ in exits if exit_.memory_bytes is not None), default=None),
        was_oom_killed=any(exit_.was_oom_killed for exit_ in exits),
        wall_s=max(exit_.wall_s for exit_ in exits),
    )


def _without_answer(launch: Launch, outcome: Outcome, reason: str, wall_s: float) -> Exit:
    """The end of a trial that no host has answered: an outcome like any other."""
    write_model(launch.folder.report, RankReport(result=TrialResult(outcome=outcome, reason=reason)))
    write_atomic(launch.log, f"{reason}\n".encode())
    return Exit(code=None, codes=(None,) * launch.ranks, wall_s=wall_s)
