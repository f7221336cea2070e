"""Launcher over the hosts of a Ray cluster: the driver keeps the study, the hosts measure.

`launch` may be called from several threads; each waits for its turn and its hosts. Where a host is lost, the same trial
is measured again on others: it costs time, and nothing else.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from autotune.errors import LauncherError
from autotune.launch.launcher import EndedFor, Exit, Launch
from autotune.phrasing import first_line
from autotune.protocol.messages import GroupPart, Job, RankReport, read_model, write_atomic, write_model
from autotune.ray.cluster import join, refuse_another, unheard_messages
from autotune.ray.host import HostAnswer, HostTask
from autotune.ray.hosts import SEARCH_IS_OVER, HostPool, NoRoomError
from autotune.ray.nodes import OneHost
from autotune.records.trial import Outcome, TrialResult
from autotune.settings.executor import Executor

__all__ = ["RayLauncher", "merged_exit"]

_LOST = (RayActorError, ActorUnavailableError, NodeDiedError, ObjectLostError, WorkerCrashedError)
_MOST_LOSSES = 3
_MOST_TRIES = 20  # losses before a trial has begun are none of its own
_BY_WEIGHT: tuple[EndedFor, ...] = ("memory", "deadline", "called_off", "standstill", "straggling")
_TICK_S = 0.1
_FOLLOW_WITHIN_S = 5.0  # as on one machine: the others of a group end soon after one has, or are ended
_SILENT_S = 60.0  # past its deadline: the host itself ends a trial then
_PART_BYTES = 32 * 1024 * 1024
_NO_WORKLOAD = frozenset({"describe"})


class RayLauncher:
    """Runs each trial on whole hosts of a Ray cluster. Made by `connect`."""

    def __init__(self, pool: HostPool, held: ExitStack) -> None:
        self._pool, self._held = pool, held

    @classmethod
    def connect(cls, executor: Executor, *, device: str) -> RayLauncher:
        """Join a running cluster and look at its hosts; a connection that the caller has already made is used.

        Raises:
            ConfigError: no cluster answers.
            LauncherError: no host of it can run trials.
        """
        with ExitStack() as undo:
            if ray.is_initialized():
                refuse_another(executor.address)
            else:
                join(executor.address)
                undo.callback(ray.shutdown)
                undo.enter_context(unheard_messages())
            pool = HostPool(executor, device)
            undo.callback(pool.close)
            pool.require_hosts()
            return cls(pool, undo.pop_all())

    @property
    def slots(self) -> int:
        """Trials that can run at once, one a host."""
        return self._pool.slots

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about hosts that are not used."""
        return self._pool.notes

    def launch(self, launch: Launch) -> Exit:
        """Run a trial on hosts that are free, again elsewhere where one is lost.

        What the cluster has no room for (any more) is told as invalid, what takes one host after the other with it as
        crashed, what Ray ends for its host's memory as out of memory.

        Raises:
            LauncherError: no host is left, or the launcher was closed meanwhile.
        """
        job = read_model(launch.folder.job, Job)
        begun, killed = monotonic(), list[str]()
        for _ in range(_MOST_TRIES):
            try:
                team = self._pool.acquire(launch.ranks)
            except NoRoomError as error:
                return _told(launch, "invalid", str(error), monotonic() - begun)
            try:
                return self._run(launch, job, team)
            except _HostLostError as loss:
                if self._pool.is_closed:
                    raise LauncherError(SEARCH_IS_OVER) from loss
                self._pool.drop(loss.host)
                if loss.for_memory:
                    return _told(launch, "host_oom", loss.for_memory, monotonic() - begun)
                if loss.was_running:
                    killed.append(loss.host.name)
            finally:
                self._pool.release([host for host, _ in team])
            if len(killed) == _MOST_LOSSES:
                break
        reason = f"{len(killed)} hosts were lost one after the other while it ran ({', '.join(killed)})"
        return _told(launch, "crashed", f"{reason}; it is not tried again", monotonic() - begun)

    def close(self) -> None:
        """End all that runs on the hosts, and leave the cluster where `connect` has joined it."""
        self._held.close()

    def _run(self, launch: Launch, job: Job, team: Sequence[tuple[OneHost, int]]) -> Exit:
        key = None if job.kind in _NO_WORKLOAD else _key_of(job.payload)
        if key is not None:
            for host, _ in team:
                _send_payload(host, key, job.payload)
        rendezvous = _meeting_place(team) if len(team) > 1 else None
        parts = _parts_of(team)
        launch.folder.blocks.unlink(missing_ok=True)  # of a host that was lost
        running = _Running(launch, _Blocks(launch.folder.blocks) if job.streams_blocks else None)
        try:
            for part, (host, ranks) in zip(parts, team, strict=True):
                task = HostTask(
                    ticket=running.ticket,
                    job=job,
                    payload_key=key,
                    rendezvous=rendezvous,
                    part=part if len(team) > 1 else None,
                    ranks=ranks,
                    deadline_s=launch.deadline_s,
                    ram_ceiling_bytes=launch.ram_ceiling_bytes,
                )
                running.hosts[_asked(host, "run", task.model_dump_json())] = host
            answers = running.wait()
        except BaseException:
            running.call_off()
            raise
        if self._pool.is_closed:
            raise LauncherError(SEARCH_IS_OVER)
        return _taken(launch, answers, parts, running.called_off_for)


class _HostLostError(Exception):
    """A host is gone.

    Args:
        host: that one.
        was_running: its part of the trial had begun.
        for_memory: why Ray has ended what ran there, where that was for the host's memory.
    """

    def __init__(self, host: OneHost, *, was_running: bool = False, for_memory: str = "") -> None:
        super().__init__(host.name)
        self.host, self.was_running, self.for_memory = host, was_running, for_memory


@dataclass(slots=True)
class _Running:
    """A trial under way on its hosts."""

    launch: Launch
    blocks: _Blocks | None = None
    """Brings the blocks of rank 0's window here, where they are asked for."""
    hosts: dict[Any, OneHost] = field(default_factory=dict)
    """By the reference to the host's answer."""
    begun: float = field(default_factory=monotonic)
    ticket: str = field(default_factory=lambda: uuid.uuid4().hex)
    called_off_for: EndedFor | None = None
    """Why we have ended it; None where we have not."""

    def wait(self) -> list[tuple[OneHost, HostAnswer]]:
        """Every host's answer, in the order of the ranks."""
        answers: dict[Any, HostAnswer] = {}
        first_ended: float | None = None
        while left := [one for one in self.hosts if one not in answers]:
            ready, _ = ray.wait(left, num_returns=len(left), timeout=_TICK_S, fetch_local=True)
            for one in ready:
                answers[one] = HostAnswer.model_validate_json(_answer_of(self.hosts[one], one, was_running=True))
            if len(answers) == len(self.hosts):
                break
            now = monotonic()
            if ready and first_ended is None:
                first_ended = now
            if self.blocks is not None and (first := next(iter(self.hosts))) not in answers:
                self.blocks.fetch(self.hosts[first], self.ticket)
            if self.called_off_for is None and (reason := self._reason_to_end(first_ended, now)) is not None:
                self.called_off_for = reason
                self.call_off()
            if now > self.begun + self.launch.deadline_s + _SILENT_S:
                raise _HostLostError(self.hosts[left[0]], was_running=True)
        return [(host, answers[one]) for one, host in self.hosts.items()]

    def _reason_to_end(self, first_ended: float | None, now: float) -> EndedFor | None:
        if self.launch.should_end is not None and self.launch.should_end():
            return "called_off"
        return None if first_ended is None or now < first_ended + _FOLLOW_WITHIN_S else "straggling"

    def call_off(self) -> None:
        """End what still runs on the hosts."""
        for host in self.hosts.values():
            with suppress(_HostLostError):
                _asked(host, "call_off", self.ticket)


@dataclass(slots=True)
class _Blocks:
    """Copies what a host writes of a window's blocks into the trial's folder here, a request at a time."""

    path: Path
    asked: Any = None
    """Reference to the answer that is under way."""
    size: int = 0

    def fetch(self, host: OneHost, ticket: str) -> None:
        """Take what has come, and ask for more; returns at once."""
        if self.asked is not None:
            if not ray.wait([self.asked], timeout=0)[0]:
                return
            came = _answer_of(host, self.asked, was_running=True)
            with suppress(OSError), self.path.open("ab") as file:  # a full disk: the trial is not stopped early
                file.write(came)
            self.size += len(came)
        self.asked = _asked(host, "blocks", ticket, self.size)


def _asked(host: OneHost, method: str, *arguments: object) -> Any:
    """Call a method of the host's actor; the reference to its answer."""
    try:
        return getattr(host.actor, method).remote(*arguments)
    except Exception as error:  # Ray raises a plain one for an actor that it knows no more
        raise _HostLostError(host) from error


def _answer_of(host: OneHost, reference: Any, *, was_running: bool = False) -> Any:
    """A host's answer. Ray's ways of saying that it is gone are one exception; what else fails there, a launcher's."""
    try:
        return ray.get(reference)
    except OutOfMemoryError as error:
        for_memory = f"Ray ended the trial for the memory of its host, {host.name}: {first_line(error)}"
        raise _HostLostError(host, was_running=was_running, for_memory=for_memory if was_running else "") from error
    except _LOST as error:
        raise _HostLostError(host, was_running=was_running) from error
    except RayError as error:
        raise LauncherError(f"{host.name} can't run trials: {error}") from error


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
                problem = _answer_of(host, _asked(host, "take", key, name, offset, data))
                if problem:
                    raise LauncherError(f"{host.name}: {problem}")
                offset += len(data)
                if not data:
                    break
    host.payloads.add(key)


def _meeting_place(team: Sequence[tuple[OneHost, int]]) -> str:
    host = team[0][0]
    return f"tcp://{host.address}:{_answer_of(host, _asked(host, 'free_port'))}"


def _parts_of(team: Sequence[tuple[OneHost, int]]) -> list[GroupPart]:
    firsts = [sum(ranks for _, ranks in team[:number]) for number in range(len(team))]
    return [
        GroupPart(host=number, first_rank=first, ranks=ranks, interface=host.interface)
        for number, (first, (host, ranks)) in enumerate(zip(firsts, team, strict=True))
    ]


def _taken(
    launch: Launch,
    answers: Sequence[tuple[OneHost, HostAnswer]],
    parts: Sequence[GroupPart],
    called_off_for: EndedFor | None,
) -> Exit:
    """Put the hosts' reports and logs where a trial on this machine would have left them."""
    folder = launch.folder
    for (host, answer), part in zip(answers, parts, strict=True):
        if answer.exit is None:
            raise LauncherError(f"{host.name} can't run trials: {answer.error}")
        ranks = range(part.first_rank, part.first_rank + part.ranks)
        for path in (place for rank in ranks for place in (folder.report_of(rank), folder.stack_of(rank))):
            if path.name in answer.files:
                write_atomic(path, answer.files[path.name])
    write_atomic(
        launch.log, b"".join(_log_of(host, answer, part) for (host, answer), part in zip(answers, parts, strict=True))
    )
    return merged_exit([answer.exit for _, answer in answers if answer.exit is not None], parts, called_off_for)


def _log_of(host: OneHost, answer: HostAnswer, part: GroupPart) -> bytes:
    last = part.first_rank + part.ranks - 1
    ranks = f"rank {last}" if part.ranks == 1 else f"ranks {part.first_rank} to {last}"
    return f"[{host.name}, {ranks}]\n".encode() + answer.log.rstrip() + b"\n"


def merged_exit(exits: Sequence[Exit], parts: Sequence[GroupPart], called_off_for: EndedFor | None = None) -> Exit:
    """How a group over several hosts ended: the host of the earliest end tells which rank was the first.

    `called_off_for`: why the hosts were told to call it off, which they themselves do not know.
    """
    ends = [
        (one.first_s, part.first_rank + one.first)
        for one, part in zip(exits, parts, strict=True)
        if one.first_s is not None and one.first is not None
    ]
    reasons = {called_off_for if one.ended_for == "called_off" and called_off_for else one.ended_for for one in exits}
    codes = tuple(code for one in exits for code in one.codes)
    return Exit(
        code=codes[0],
        codes=codes,
        first=min(ends)[1] if ends else None,
        first_s=min(ends)[0] if ends else None,
        ended_for=next((reason for reason in _BY_WEIGHT if reason in reasons), None),
        seen_bytes=max((one.seen_bytes for one in exits if one.seen_bytes is not None), default=None),
        was_oom_killed=any(one.was_oom_killed for one in exits),
        wall_s=max(one.wall_s for one in exits),
    )


def _told(launch: Launch, outcome: Outcome, reason: str, wall_s: float) -> Exit:
    """The end of a trial that no host has told of: an outcome as any other."""
    write_model(launch.folder.report, RankReport(result=TrialResult(outcome=outcome, reason=reason)))
    write_atomic(launch.log, f"{reason}\n".encode())
    return Exit(code=None, codes=(None,) * launch.ranks, wall_s=wall_s)
