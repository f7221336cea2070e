"""Launcher over the hosts of a Ray cluster: the driver keeps the study, the hosts measure."""

from __future__ import annotations

import uuid
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from pathlib import Path
from threading import Condition
from typing import Any

import ray

from autotune.config.environment import Environment
from autotune.config.plan import Executor, places
from autotune.errors import LauncherError
from autotune.launch.launcher import EndedFor, Exit, Launch
from autotune.launch.ray_cluster import (
    SEARCH_IS_OVER,
    HostLostError,
    NoRoomError,
    OneHost,
    Reservations,
    Team,
    join,
    living_nodes,
    most_of_a_kind,
    of_other_kind,
    start_actor,
)
from autotune.launch.ray_host import HostAnswer, HostTask, answer_files
from autotune.note import Note
from autotune.protocol.disk import monotonic, write_atomic, write_model
from autotune.protocol.messages import DescribeJob, GroupPart, Job, RankReport, TrialJob, read_job
from autotune.records.measurement import Block
from autotune.records.trial import Outcome, TrialResult

# The hosts of a Ray cluster as a search uses them: found, described, reserved for a trial each,
# dropped when lost.
#
# One actor a host (ray_host.py) lives as long as the search. A trial takes whole hosts, so that no two
# trials share cores. A study is bound to one kind of machine: hosts of another kind are named in
# `notes` and not used.


# Our conventions:
_READY_WITHIN_S = 180.0  # an actor imports torch, from a network's disk on some clusters
_RESERVED_WITHIN_S = 300.0
_RESERVED_SOON_S = 5.0  # else another host is tried first
_ASIDE_S = 60.0
_BACK_WITHIN_S = 60.0  # a lost node's successor, where a cluster manager starts one
_REFRESH_S = 1.0
_CLOSED_WITHIN_S = 10.0


class HostPool:
    """Hands out hosts in the order of the requests: the free hosts that it has known for longest.

    Args:
        executor: how the ranks of a trial are laid out.
        device: torch's name for the device, or "auto".
    """

    def __init__(self, executor: Executor, device: str) -> None:
        self._executor = executor
        self._device = device
        self._state = Condition()
        self._hosts: dict[str, OneHost] = {}
        self._candidates: dict[str, OneHost] = {}
        self._unused: dict[str, Note] = {}
        """Why a node is not used, by its id."""
        self._busy: set[str] = set()
        self._reservations = Reservations(self._state)
        self._queue: deque[object] = deque()
        self._refreshed = 0.0
        self.is_closed = False
        """True once the search is over."""
        self._bound: Environment | None = None
        """The kind of machine that this search is bound to."""
        with self._state:
            self._settle()

    @property
    def slots(self) -> int:
        """Return how many hosts trials may run on now."""
        with self._state:
            self._refresh()
            return max(1, len(self._hosts))

    @property
    def notes(self) -> tuple[Note, ...]:
        """Return the notes on hosts that are not used."""
        with self._state:
            return tuple(self._unused.values())

    def require_hosts(self) -> None:
        """Refuse a cluster without a host that can run trials.

        Raises:
            LauncherError: there is none; the message gives the reason for each.
        """
        if self._hosts:
            return
        why = [*map(str, self.notes)]
        if self._candidates:
            why.append(f"{len(self._candidates)} did not answer within {_READY_WITHIN_S:.0f} s.")
        why = why or ["None of its nodes has a processor (ray start --num-cpus) to give."]
        raise LauncherError(
            f"a Ray cluster must have a host that can run trials, but has none. {' '.join(why)}"
        )

    def acquire(self, ranks: int) -> Team:
        """Wait until a trial's turn has come and its hosts are free; return each of them, and the ranks that it gets.

        Raises:
            LauncherError: no host is left, the ranks don't fit, or other jobs keep the hosts.
        """
        while True:
            team = self._next_team(ranks)
            hosts = [host for host, _ in team]
            with ExitStack() as undo:
                undo.callback(self.release, hosts)
                if self._is_reserved(hosts):
                    undo.pop_all()
                    return team
            for host in hosts:
                if host.node not in living_nodes():
                    self.drop(host)

    def release(self, hosts: Collection[OneHost]) -> None:
        """Make hosts free for other trials."""
        nodes = tuple(host.node for host in hosts)
        with self._state:
            self._busy -= set(nodes)
            give_back = (
                self._reservations.give_back
                if self.is_closed
                else self._reservations.give_back_soon
            )
            give_back(nodes)
            self._state.notify_all()

    def drop(self, host: OneHost) -> None:
        """Forget a host that was lost; if its node still lives, it is described again."""
        with self._state:
            if self.is_closed:
                return
            self._hosts.pop(host.node, None)
            self._reservations.give_back([host.node])
            host.kill()
            self._refreshed = 0.0
            self._state.notify_all()

    def close(self) -> None:
        """End the actors, whatever they do, and wait until no host is in use."""
        with self._state:
            self.is_closed = True
            hosts = [*self._hosts.values(), *self._candidates.values()]
            closing = []
            for host in hosts:
                with suppress(HostLostError):
                    closing.append(host.call("close"))
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSED_WITHIN_S)
            for host in hosts:
                host.kill()
            self._reservations.give_back()
            self._hosts.clear()
            self._candidates.clear()
            self._state.notify_all()
            self._state.wait_for(lambda: not (self._busy or self._queue), _CLOSED_WITHIN_S)

    def _next_team(self, ranks: int) -> Team:
        ticket = object()
        missing_since: float | None = None
        with self._state:
            self._queue.append(ticket)
            try:
                while True:
                    if self.is_closed:
                        raise LauncherError(SEARCH_IS_OVER)
                    if self._queue[0] is ticket:
                        self._refresh()
                        team = self._team(ranks)
                        if team:
                            self._busy |= {host.node for host, _ in team}
                            return team
                        missing_since = None if team is not None else missing_since or monotonic()
                    if missing_since and monotonic() - missing_since > _BACK_WITHIN_S:
                        raise self._no_room(ranks)
                    self._state.wait(_REFRESH_S)
            finally:
                self._queue.remove(ticket)
                self._state.notify_all()

    def _team(self, ranks: int) -> Team | None:
        """Return free hosts for N ranks; [] if they are still busy, None if there are not enough at all."""
        if not self._hosts or self._bound is None:
            return None
        is_cpu = self._bound.device_kind == "cpu"
        per_host = self._bound.cores if is_cpu else self._bound.device_count
        is_spread = self._executor.ranks == "spread"
        try:
            shares = places(ranks, hosts=len(self._hosts), per_host=per_host, spread=is_spread)
        except ValueError:
            return None
        free = [host for host in self._hosts.values() if host.node not in self._busy]
        free.sort(key=lambda host: host.aside_until > monotonic())
        if len(free) < len(shares):
            return []
        firsts = accumulate(shares, initial=0)
        return [
            (
                host,
                GroupPart(host=number, first_rank=first, ranks=share, interface=host.interface),
            )
            for number, (host, first, share) in enumerate(zip(free, firsts, shares, strict=False))
        ]

    def _no_room(self, ranks: int) -> LauncherError:
        """Return the error for a trial that its hosts don't suffice for, or that has none."""
        count = len(self._hosts)
        found = f"the {count} that there are can't hold it" if count else "there is none"
        missing = (
            f"a trial of {ranks} {'rank' if ranks == 1 else 'ranks'} needs hosts of the cluster, "
            f"but {found} for "
            f"{_BACK_WITHIN_S:.0f} s; start nodes (ray start --address=HOST:PORT) and run the same "
            f"search again."
        )
        return (NoRoomError if count else LauncherError)(" ".join([missing, *map(str, self.notes)]))

    def _settle(self) -> None:
        """Wait until every node has answered."""
        begun = monotonic()
        self._refresh()
        while self._candidates and monotonic() - begun < _READY_WITHIN_S:
            answers = [candidate.answer for candidate in self._candidates.values()]
            ray.wait(answers, num_returns=len(answers), timeout=_REFRESH_S)
            self._refreshed = 0.0
            self._refresh()
        self._admit(is_patient=False)

    def _refresh(self) -> None:
        """Start actors on nodes that have joined, and forget those that are gone."""
        if self.is_closed or monotonic() - self._refreshed < _REFRESH_S:
            return
        self._refreshed = monotonic()
        living = living_nodes()
        gone = (self._hosts | self._candidates | self._unused).keys() - living.keys() - self._busy
        self._reservations.give_back(gone)
        for node in gone:
            for known in (self._hosts, self._candidates, self._unused):
                known.pop(node, None)
        for node, found in living.items():
            if (
                node not in self._hosts | self._candidates | self._unused
                and found["Resources"].get("CPU", 0) >= 1
            ):
                self._candidates[node] = start_actor(node, found, self._device)
        self._admit()

    def _admit(self, *, is_patient: bool = True) -> None:
        """Make hosts of candidates that have answered; at first wait for all: the kind that most are of is chosen."""
        waiting = [candidate.answer for candidate in self._candidates.values()]
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        if is_patient and self._bound is None and len(ready) < len(waiting):
            return
        described: list[tuple[OneHost, Environment]] = []
        for candidate in [*self._candidates.values()]:
            if candidate.answer not in ready:
                continue
            del self._candidates[candidate.node]
            machine = candidate.describe()
            if isinstance(machine, Note):
                self._refuse(candidate, machine)
            else:
                described.append((candidate, machine))
        if self._bound is None:
            self._bound = most_of_a_kind([environment for _, environment in described])
        for candidate, environment in described:
            if self._bound is not None and environment.fingerprint != self._bound.fingerprint:
                self._refuse(candidate, of_other_kind(candidate.name, environment, self._bound))
            else:
                self._hosts[candidate.node] = candidate
        self._state.notify_all()

    def _refuse(self, candidate: OneHost, why: Note) -> None:
        self._unused[candidate.node] = why
        candidate.kill()

    def _is_reserved(self, hosts: Sequence[OneHost]) -> bool:
        """Reserve the hosts' processors and devices; False where others are to be tried."""
        nodes = [host.node for host in hosts]
        with self._state:
            if self.is_closed:
                raise LauncherError(SEARCH_IS_OVER)
            group = self._reservations.reserve(hosts)
        begun = monotonic()
        while not group.wait(_REFRESH_S):
            if self.is_closed or not set(nodes) <= living_nodes().keys():
                return False
            if monotonic() - begun > _RESERVED_SOON_S and self._set_aside(hosts):
                return False
            if monotonic() - begun > _RESERVED_WITHIN_S:
                self._reservations.give_back(nodes)
                raise LauncherError(
                    "a trial needs whole hosts, but other jobs of the cluster have kept "
                    f"{', '.join(host.name for host in hosts)} for {_RESERVED_WITHIN_S:.0f} s; "
                    "run the same search again when they are done"
                )
        return True

    def _set_aside(self, hosts: Sequence[OneHost]) -> bool:
        """Prefer other hosts for a while, where as many are free."""
        with self._state:
            now = monotonic()
            others = [
                host
                for host in self._hosts.values()
                if host.node not in self._busy and host.aside_until <= now
            ]
            if len(others) < len(hosts):
                return False
            for host in hosts:
                host.aside_until = now + _ASIDE_S
            self._reservations.give_back([host.node for host in hosts])
            return True


# Launcher over the hosts of a Ray cluster: the driver keeps the study, the hosts measure.
#
# `launch` may be called from several threads; each waits for its turn and its hosts. Where a host
# is lost, the same trial is measured again on others, which only costs time.


_MOST_LOSSES = 3  # our convention: a trial that loses so many hosts most likely ends them itself
_BY_WEIGHT: tuple[EndedFor, ...] = ("memory", "deadline", "cancelled", "standstill", "straggling")
_SILENT_S = 60.0  # our convention: past its deadline, at which the host itself ends a trial


class RayLauncher:
    """Runs each trial on whole hosts of a Ray cluster. Made by `connect`."""

    def __init__(self, pool: HostPool, opened: ExitStack) -> None:
        self._pool = pool
        self._opened = opened

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
        """Return the number of trials that can run at once, one a host."""
        return self._pool.slots

    @property
    def notes(self) -> tuple[Note, ...]:
        """Return the notes on hosts that are not used."""
        return self._pool.notes

    def launch(self, launch: Launch) -> Exit:
        """Run a trial on hosts that are free, and again elsewhere if one is lost.

        The outcome is invalid where the cluster has no room for the trial (any more), crashed where
        it loses one host after the other, and out of memory where Ray ends it for its host's
        memory.

        Raises:
            LauncherError: no host is left, or the launcher was closed meanwhile.
        """
        job = read_job(launch.folder.job)
        begun = monotonic()
        lost = list[str]()
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
        return _without_answer(
            launch, "crashed", f"{reason}; it is not tried again", monotonic() - begun
        )

    def close(self) -> None:
        """End all that runs on the hosts, and leave the cluster where `connect` has joined it."""
        self._opened.close()

    def _run(self, launch: Launch, job: Job, team: Team) -> Exit:
        if not isinstance(job, DescribeJob):
            stream = job.payload / "stream"
            raw = (job.payload / "bytes").stat()
            digest = zlib.crc32((job.payload / "index.json").read_bytes() + stream.read_bytes())
            key = f"{digest:08x}-{raw.st_size}-{raw.st_mtime_ns}"
            for host, _ in team:
                host.take_payload(key, job.payload)
            job = job.model_copy(update={"payload": Path(key)})
        launch.blocks.clear()  # of a host that was lost
        running = RunningTrial(launch)
        answers = running.run(team, _jobs_of(job, team))
        if self._pool.is_closed:
            raise LauncherError(SEARCH_IS_OVER)
        return _collect(launch, team, answers, running.cancelled_for)


def _jobs_of(job: Job, team: Team) -> Sequence[Job]:
    """Return the job of each host; the ranks of several hosts meet at the first one."""
    if len(team) == 1 or not isinstance(job, TrialJob):
        return [job]
    first, _ = team[0]
    place = f"tcp://{first.address}:{first.receive(first.call('free_port'))}"
    return [job.model_copy(update={"rendezvous": place, "part": part}) for _, part in team]


@dataclass(slots=True)
class RunningTrial:
    """A trial under way on its hosts: followed to the end, cancelled if it must not go on."""

    launch: Launch
    hosts: dict[Any, OneHost] = field(default_factory=dict)
    """By the reference to the host's answer."""
    begun: float = field(default_factory=monotonic)
    ticket: str = field(default_factory=lambda: uuid.uuid4().hex)
    cancelled_for: EndedFor | None = None
    """Why the driver has ended it; None if it has not."""
    blocks: Any = None
    """Reference to an answer with further blocks that is under way."""

    def run(self, team: Team, jobs: Sequence[Job]) -> list[HostAnswer]:
        """Start the hosts' jobs and wait; return every host's answer, in the order of the ranks."""
        try:
            for (host, part), job in zip(team, jobs, strict=True):
                task = HostTask(
                    ticket=self.ticket,
                    job=job,
                    part=part,
                    ram_ceiling_bytes=self.launch.ram_ceiling_bytes,
                    ending=self.launch.ending,
                )
                self.hosts[host.call("run", task.model_dump_json())] = host
            return self._wait(follows=isinstance(jobs[0], TrialJob) and jobs[0].streams_blocks)
        except BaseException:
            self._cancel("cancelled")
            raise

    def fetch_blocks(self, host: OneHost) -> None:
        """Add the blocks that have arrived from rank 0's host, and ask for more; returns at once."""
        if self.blocks is not None:
            if not ray.wait([self.blocks], timeout=0)[0]:
                return
            arrived = host.receive(self.blocks, was_running=True)
            self.launch.blocks.extend(map(Block.model_validate_json, arrived))
        self.blocks = host.call("blocks", self.ticket, len(self.launch.blocks))

    def _cancel(self, why: EndedFor) -> None:
        self.cancelled_for = why
        for host in self.hosts.values():
            with suppress(HostLostError):
                host.call("cancel", self.ticket)

    def _wait(self, *, follows: bool) -> list[HostAnswer]:
        answers: dict[Any, HostAnswer] = {}
        straggling_from = inf
        while left := [reference for reference in self.hosts if reference not in answers]:
            # blocks come about five times a second
            ready, _ = ray.wait(left, num_returns=len(left), timeout=0.1, fetch_local=True)
            for reference in ready:
                answer = self.hosts[reference].receive(reference, was_running=True)
                answers[reference] = HostAnswer.model_validate_json(answer)
            now = monotonic()
            if ready:
                straggling_from = min(straggling_from, now + self.launch.ending.follow_within_s)
            if follows and (first := next(iter(self.hosts))) not in answers:
                self.fetch_blocks(self.hosts[first])
            if self.cancelled_for is None and len(answers) < len(self.hosts):
                if self.launch.should_end is not None and self.launch.should_end():
                    self._cancel("cancelled")
                elif now >= straggling_from:
                    self._cancel("straggling")
            if now > self.begun + self.launch.deadline_s + _SILENT_S:
                raise HostLostError(self.hosts[left[0]], was_running=True)
        return [answers[reference] for reference in self.hosts]


def _collect(
    launch: Launch, team: Team, answers: Sequence[HostAnswer], cancelled_for: EndedFor | None
) -> Exit:
    """Write the hosts' reports and logs where a trial on this machine would have left them."""
    log = b""
    for (host, part), answer in zip(team, answers, strict=True):
        for path in answer_files(
            launch.folder, part
        ):  # no other name that a host sends is written to
            if path.name in answer.files:
                write_atomic(path, answer.files[path.name])
        last = part.first_rank + part.ranks - 1
        ranks = f"rank {last}" if part.ranks == 1 else f"ranks {part.first_rank} to {last}"
        log += f"[{host.name}, {ranks}]\n".encode() + answer.log.rstrip() + b"\n"
    write_atomic(launch.log, log)
    return merged_exit(
        [answer.exit for answer in answers], [part for _, part in team], cancelled_for
    )


def merged_exit(
    exits: Sequence[Exit], parts: Sequence[GroupPart], cancelled_for: EndedFor | None = None
) -> Exit:
    """Return how a group over several hosts ended; the first rank to end is that of the host with the earliest end.

    `cancelled_for`: why the driver has cancelled the trial, which the hosts do not know.
    """
    ends = [
        (exit_.first_s, part.first_rank + exit_.first)
        for exit_, part in zip(exits, parts, strict=True)
        if exit_.first_s is not None and exit_.first is not None
    ]
    first_s, first = min(ends, default=(None, None))
    reasons = {exit_.ended_for for exit_ in exits}
    if "cancelled" in reasons:
        reasons = {*reasons - {"cancelled"}, cancelled_for or "cancelled"}
    codes = tuple(code for exit_ in exits for code in exit_.codes)
    memory_bytes = [exit_.memory_bytes for exit_ in exits if exit_.memory_bytes is not None]
    return Exit(
        code=codes[0],
        codes=codes,
        first=first,
        first_s=first_s,
        ended_for=next((reason for reason in _BY_WEIGHT if reason in reasons), None),
        memory_bytes=max(memory_bytes, default=None),
        was_oom_killed=any(exit_.was_oom_killed for exit_ in exits),
        wall_s=max(exit_.wall_s for exit_ in exits),
    )


def _without_answer(launch: Launch, outcome: Outcome, reason: str, wall_s: float) -> Exit:
    """Return the end of a trial that no host has answered: an outcome like any other."""
    write_model(
        launch.folder.report, RankReport(result=TrialResult(outcome=outcome, reason=reason))
    )
    write_atomic(launch.log, f"{reason}\n".encode())
    return Exit(code=None, codes=(None,) * launch.ranks, wall_s=wall_s)
