"""Launcher over the hosts of a Ray cluster: the driver keeps the study, the hosts measure.

`launch` may be called from several threads; each waits for its turn and its hosts. Where a host is lost, the same trial
is measured again on others, which only costs time.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import ray

from autotune.errors import LauncherError
from autotune.launch.launcher import EndedFor, Exit, Launch
from autotune.note import Note
from autotune.protocol.disk import write_atomic, write_model
from autotune.protocol.jobs import DescribeJob, GroupPart, Job, TrialJob, read_job
from autotune.protocol.reports import RankReport
from autotune.ray.actors import SEARCH_IS_OVER, HostLostError, NoRoomError, Team, answer_of, call
from autotune.ray.cluster import join, refuse_another, silenced_prints
from autotune.ray.host import HostAnswer, HostTask
from autotune.ray.hosts import HostPool
from autotune.ray.nodes import OneHost
from autotune.ray.running import BlockCopy, RunningTrial
from autotune.records.trial import Outcome, TrialResult
from autotune.settings.executor import Executor

__all__ = ["RayLauncher", "merged_exit"]

_MOST_LOSSES = 3  # our convention: a trial that loses so many hosts most likely ends them itself
_MOST_TRIES = 20  # our convention: losses before a trial has begun are not its fault
_BY_WEIGHT: tuple[EndedFor, ...] = ("memory", "deadline", "cancelled", "standstill", "straggling")
_PART_BYTES = 32 * 1024 * 1024  # our convention: a third of the smallest object store


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
            if ray.is_initialized():
                refuse_another(executor.address)
            else:
                join(executor.address)
                undo.callback(ray.shutdown)
                undo.enter_context(silenced_prints())
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
        for _ in range(_MOST_TRIES):
            try:
                team = self._pool.acquire(launch.ranks)
            except NoRoomError as error:
                return _without_answer(launch, "invalid", str(error), monotonic() - begun)
            try:
                return self._run(launch, job, team)
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
        key = None
        if not isinstance(job, DescribeJob):
            key = _key_of(job.payload)
            for host, _ in team:
                _send_payload(host, key, job.payload)
        parts = _parts_of(team)
        launch.folder.blocks.unlink(missing_ok=True)  # of a host that was lost
        streams = isinstance(job, TrialJob) and job.streams_blocks
        running = RunningTrial(launch, BlockCopy(launch.folder.blocks) if streams else None)
        tasks = [
            HostTask(
                ticket=running.ticket,
                job=part_job,
                payload_key=key,
                ranks=part.ranks,
                ram_ceiling_bytes=launch.ram_ceiling_bytes,
            )
            for part, part_job in zip(parts, _jobs_of(job, team, parts), strict=True)
        ]
        hosts = [host for host, _ in team]
        answers = running.run(zip(hosts, tasks, strict=True))
        if self._pool.is_closed:
            raise LauncherError(SEARCH_IS_OVER)
        return _collect(launch, list(zip(hosts, answers, parts, strict=True)), running.cancelled_for)


def _key_of(payload: Path) -> str:
    """Of what is in a payload: its index, its stream, and the raw bytes' size and age."""
    raw = (payload / "bytes").stat()
    digest = zlib.crc32((payload / "index.json").read_bytes() + (payload / "stream").read_bytes())
    return f"{digest:08x}-{raw.st_size}-{raw.st_mtime_ns}"


def _send_payload(host: OneHost, key: str, payload: Path) -> None:
    """Give a host its copy of the workload, in parts: once a search."""
    if key in host.payloads:
        return
    for name in ("stream", "bytes", "index.json"):
        with (payload / name).open("rb") as file:
            offset = 0
            while (data := file.read(_PART_BYTES)) or offset == 0:
                problem = answer_of(host, call(host, "take", key, name, offset, data))
                if problem:
                    raise LauncherError(f"{host.name}: {problem}")
                offset += len(data)
                if not data:
                    break
    host.payloads.add(key)


def _meeting_place(team: Team) -> str:
    host = team[0][0]
    return f"tcp://{host.address}:{answer_of(host, call(host, 'free_port'))}"


def _parts_of(team: Team) -> list[GroupPart]:
    firsts = [sum(ranks for _, ranks in team[:number]) for number in range(len(team))]
    return [
        GroupPart(host=number, first_rank=first, ranks=ranks, interface=host.interface)
        for number, (first, (host, ranks)) in enumerate(zip(firsts, team, strict=True))
    ]


def _jobs_of(job: Job, team: Team, parts: Sequence[GroupPart]) -> Sequence[Job]:
    """The job of each host; the ranks of several hosts meet at the first one."""
    if len(team) == 1 or not isinstance(job, TrialJob):
        return [job]
    place = _meeting_place(team)
    return [job.model_copy(update={"rendezvous": place, "part": part}) for part in parts]


def _collect(
    launch: Launch, ended: Sequence[tuple[OneHost, HostAnswer, GroupPart]], cancelled_for: EndedFor | None
) -> Exit:
    """Write the hosts' reports and logs where a trial on this machine would have left them."""
    exits = []
    for host, answer, part in ended:
        if answer.exit is None:
            raise LauncherError(f"{host.name} can't run trials: {answer.error}")
        exits.append(answer.exit)
        for rank in range(part.first_rank, part.first_rank + part.ranks):
            for path in (launch.folder.report_of(rank), launch.folder.stack_of(rank)):
                if path.name in answer.files:
                    write_atomic(path, answer.files[path.name])
    write_atomic(launch.log, b"".join(_log_of(*part) for part in ended))
    return merged_exit(exits, [part for _, _, part in ended], cancelled_for)


def _log_of(host: OneHost, answer: HostAnswer, part: GroupPart) -> bytes:
    last = part.first_rank + part.ranks - 1
    ranks = f"rank {last}" if part.ranks == 1 else f"ranks {part.first_rank} to {last}"
    return f"[{host.name}, {ranks}]\n".encode() + answer.log.rstrip() + b"\n"


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
