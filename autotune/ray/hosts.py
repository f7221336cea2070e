"""The hosts of a Ray cluster as a search uses them: found, described, reserved for a trial each, dropped when lost.

One actor a host (host.py) lives as long as the search. A trial takes whole hosts, so that no two trials share cores. A
study is bound to one kind of machine: hosts of another kind are named in `notes` and not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from threading import Condition

import ray

from autotune.errors import LauncherError
from autotune.note import Note
from autotune.protocol.clock import monotonic
from autotune.protocol.jobs import GroupPart
from autotune.ray.nodes import (
    SEARCH_IS_OVER,
    HostLostError,
    NoRoomError,
    OneHost,
    Team,
    living_nodes,
    most_of_a_kind,
    of_other_kind,
    start_actor,
)
from autotune.ray.reservations import Reservations
from autotune.settings.environment import Environment
from autotune.settings.executor import Executor, places

__all__ = ["HostPool"]

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
        self._executor, self._device = executor, device
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
        """Whether the search is over."""
        self._bound: Environment | None = None
        """The kind of machine that this search is bound to."""
        with self._state:
            self._settle()

    @property
    def slots(self) -> int:
        """Hosts that trials may run on now."""
        with self._state:
            self._refresh()
            return max(1, len(self._hosts))

    @property
    def notes(self) -> tuple[Note, ...]:
        """Hosts that are not used, and why."""
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
        raise LauncherError(f"a Ray cluster must have a host that can run trials, but has none. {' '.join(why)}")

    def acquire(self, ranks: int) -> Team:
        """Wait until a trial's turn has come and its hosts are free; each of them, and the ranks that it gets.

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
        """Hosts are free again."""
        nodes = tuple(host.node for host in hosts)
        with self._state:
            self._busy -= set(nodes)
            give_back = self._reservations.give_back if self.is_closed else self._reservations.give_back_soon
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
        with self._state:
            self._queue.append(ticket)
            try:
                team = self._wait_for_turn(ticket, ranks)
                self._busy |= {host.node for host, _ in team}
            finally:
                self._queue.remove(ticket)
                self._state.notify_all()
        return team

    def _wait_for_turn(self, ticket: object, ranks: int) -> Team:
        missing_since: float | None = None
        while True:
            if self.is_closed:
                raise LauncherError(SEARCH_IS_OVER)
            if self._queue[0] is ticket:
                self._refresh()
                team = self._team(ranks)
                if team:
                    return team
                if team is not None:
                    missing_since = None
                elif missing_since is None:
                    missing_since = monotonic()
                elif monotonic() - missing_since > _BACK_WITHIN_S:
                    raise (NoRoomError if self._hosts else LauncherError)(self._say_missing(ranks))
            self._state.wait(_REFRESH_S)

    def _team(self, ranks: int) -> Team | None:
        """Free hosts for so many ranks; [] where they are still busy, None where there are not enough at all."""
        known = list(self._hosts.values())
        if not known or self._bound is None:
            return None
        per_host = self._bound.cores if self._bound.device_kind == "cpu" else self._bound.device_count
        try:
            shares = places(ranks, hosts=len(known), per_host=per_host, spread=self._executor.ranks == "spread")
        except ValueError:
            return None
        free = [host for host in known if host.node not in self._busy]
        free.sort(key=lambda host: host.aside_until > monotonic())
        if len(free) < len(shares):
            return []
        return [
            (host, GroupPart(host=number, first_rank=sum(shares[:number]), ranks=share, interface=host.interface))
            for number, (host, share) in enumerate(zip(free, shares, strict=False))
        ]

    def _say_missing(self, ranks: int) -> str:
        found = f"the {len(self._hosts)} that there are can't hold it" if self._hosts else "there is none"
        missing = (
            f"a trial of {ranks} {'rank' if ranks == 1 else 'ranks'} needs hosts of the cluster, but {found} for "
            f"{_BACK_WITHIN_S:.0f} s; start nodes (ray start --address=HOST:PORT) and run the same search again."
        )
        return " ".join([missing, *map(str, self.notes)])

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
            if node not in self._hosts | self._candidates | self._unused and found["Resources"].get("CPU", 0) >= 1:
                self._candidates[node] = start_actor(node, found, self._device)
        self._admit()

    def _admit(self, *, is_patient: bool = True) -> None:
        """Make hosts of candidates that have answered; at first wait for all: the kind that most are of is chosen."""
        waiting = [candidate.answer for candidate in self._candidates.values()]
        ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        if is_patient and self._bound is None and len(ready) < len(waiting):
            return
        described: list[tuple[OneHost, Environment]] = []
        for node in [node for node, candidate in self._candidates.items() if candidate.answer in ready]:
            candidate = self._candidates.pop(node)
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
            others = [host for host in self._hosts.values() if host.node not in self._busy and host.aside_until <= now]
            if len(others) < len(hosts):
                return False
            for host in hosts:
                host.aside_until = now + _ASIDE_S
            self._reservations.give_back([host.node for host in hosts])
            return True
