"""The hosts of a Ray cluster as a search uses them: found, looked at, reserved for a trial each, dropped when lost.

One actor a host (ray_host.py) lives as long as the search; a trial takes a placement group over whole hosts, so that no
other job of the cluster runs beside it and no two trials share a loader's cores. A study is bound to one kind of
machine: hosts of another kind are named in `notes` and left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Timer
from time import monotonic

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from autotune.errors import LauncherError
from autotune.ray.host import HostFacts
from autotune.ray.nodes import (
    Candidate,
    OneHost,
    facts_of,
    kill_actor,
    living_nodes,
    most_of_a_kind,
    ranks_a_host,
    say_other,
    start_actor,
)
from autotune.settings.environment import Environment
from autotune.settings.executor import Executor, places

__all__ = ["SEARCH_IS_OVER", "HostPool", "NoRoomError"]

SEARCH_IS_OVER = "the search is over: its hosts are given back"
"""What a trial is told that was under way."""

_READY_WITHIN_S = 180.0
_RESERVED_WITHIN_S = 300.0
_RESERVED_SOON_S = 5.0  # else another host is tried first
_ASIDE_S = 60.0
_BACK_WITHIN_S = 60.0  # a lost node's successor, where a cluster manager starts one
_LOOK_S = 1.0
_LINGERS_S = 1.0
_LONGEST_HELD_S = 60.0  # then others who wait for the host come first
_CLOSED_WITHIN_S = 10.0
_NODE_LABEL = "ray.io/node-id"


class NoRoomError(LauncherError):
    """The cluster has hosts, but too few for a trial's ranks."""


@dataclass(slots=True, eq=False)
class _Reservation:
    """Hosts that Ray keeps for this search: anew for each trial it would take up to a second."""

    group: PlacementGroup
    begun: float
    ending: Timer | None = None
    """Gives them back; None while a trial runs."""


class HostPool:
    """Hands out hosts in the order in which they are asked for: the free ones that it has known for longest.

    Args:
        executor: how the ranks of a trial are laid out.
        device: torch's name for the device, or "auto".
    """

    def __init__(self, executor: Executor, device: str) -> None:
        self._executor, self._device = executor, device
        self._state = Condition()
        self._hosts: dict[str, OneHost] = {}
        self._candidates: dict[str, Candidate] = {}
        self._others: dict[str, str] = {}
        """Why a node is not used, by its id."""
        self._busy: set[str] = set()
        self._reservations: dict[tuple[str, ...], _Reservation] = {}
        self._queue: deque[object] = deque()
        self._looked = 0.0
        self._is_closed = False
        self._bound: Environment | None = None
        """The kind of machine that this search is bound to."""
        with self._state:
            self._settle()

    @property
    def slots(self) -> int:
        """Hosts that trials may run on now."""
        with self._state:
            self._look()
            return max(1, len(self._hosts))

    @property
    def notes(self) -> tuple[str, ...]:
        """Hosts that are not used, and why."""
        with self._state:
            return tuple(dict.fromkeys(self._others.values()))

    def require_hosts(self) -> None:
        """Refuse a cluster without a host that can run trials.

        Raises:
            LauncherError: there is none; the message says why of each.
        """
        if not self._hosts:
            silent = (
                f"{len(self._candidates)} did not answer within {_READY_WITHIN_S:.0f} s." if self._candidates else ""
            )
            reasons = " ".join([*self.notes, silent]).strip()
            reasons = reasons or "None of its nodes has a processor (ray start --num-cpus) to give."
            raise LauncherError(f"a Ray cluster must have a host that can run trials, but has none. {reasons}")

    @property
    def is_closed(self) -> bool:
        """Whether the search is over."""
        return self._is_closed

    def acquire(self, ranks: int) -> list[tuple[OneHost, int]]:
        """Wait until a trial's turn has come and its hosts are free; each of them, and the ranks that it gets.

        Raises:
            LauncherError: no host is left, the ranks don't fit, or other jobs keep the hosts.
        """
        while True:
            team = self._next_team(ranks)
            hosts = [host for host, _ in team]
            try:
                if self._is_reserved(hosts):
                    return team
            except BaseException:
                self.release(hosts)
                raise
            self.release(hosts)
            for host in hosts:
                if host.node not in living_nodes():
                    self.drop(host)

    def release(self, hosts: Collection[OneHost]) -> None:
        """Hosts are free again; the reservation stays for a moment, in which the next trial most likely comes."""
        nodes = tuple(host.node for host in hosts)
        with self._state:
            self._busy -= set(nodes)
            held = self._reservations.get(nodes)
            if held is not None and (self._is_closed or monotonic() - held.begun > _LONGEST_HELD_S):
                self._unreserve(set(nodes))
            elif held is not None:
                held.ending = Timer(_LINGERS_S, self._let_go, (nodes, held))
                held.ending.daemon = True
                held.ending.start()
            self._state.notify_all()

    def drop(self, host: OneHost) -> None:
        """Forget a host that was lost; a node that still lives is looked at anew."""
        with self._state:
            if self._is_closed:
                return
            self._hosts.pop(host.node, None)
            self._unreserve({host.node})
            kill_actor(host.actor)
            self._looked = 0.0
            self._state.notify_all()

    def close(self) -> None:
        """End the actors, whatever they do, and wait until nobody holds a host."""
        with self._state:
            self._is_closed = True
            actors = [host.actor for host in self._hosts.values()]
            actors += [one.actor for one in self._candidates.values()]
            closing = []
            for actor in actors:
                with suppress(Exception):  # Ray raises a plain one for an actor that it knows no more
                    closing.append(actor.close.remote())
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSED_WITHIN_S)
            for actor in actors:
                kill_actor(actor)
            self._unreserve({node for nodes in self._reservations for node in nodes})
            self._hosts.clear()
            self._candidates.clear()
            self._state.notify_all()
            self._state.wait_for(lambda: not (self._busy or self._queue), _CLOSED_WITHIN_S)

    def _next_team(self, ranks: int) -> list[tuple[OneHost, int]]:
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

    def _wait_for_turn(self, ticket: object, ranks: int) -> list[tuple[OneHost, int]]:
        missing_since: float | None = None
        while True:
            if self._is_closed:
                raise LauncherError(SEARCH_IS_OVER)
            if self._queue[0] is ticket:
                self._look()
                team = self._team(ranks)
                if team:
                    return team
                if team is not None:
                    missing_since = None
                elif missing_since is None:
                    missing_since = monotonic()
                elif monotonic() - missing_since > _BACK_WITHIN_S:
                    raise (NoRoomError if self._hosts else LauncherError)(self._say_missing(ranks))
            self._state.wait(_LOOK_S)

    def _team(self, ranks: int) -> list[tuple[OneHost, int]] | None:
        """Free hosts for so many ranks; [] where they are still busy, None where there are not enough at all."""
        known = list(self._hosts.values())
        if not known:
            return None
        try:
            shares = places(
                ranks,
                hosts=len(known),
                per_host=ranks_a_host(known[0].environment),
                spread=self._executor.ranks == "spread",
            )
        except ValueError:
            return None
        free = [host for host in known if host.node not in self._busy]
        free.sort(key=lambda host: host.aside_until > monotonic())
        return [] if len(free) < len(shares) else list(zip(free, shares, strict=False))

    def _say_missing(self, ranks: int) -> str:
        count = len(self._hosts)
        found = f"the {count} that there are can't hold it" if count else "there is none"
        missing = (
            f"a trial of {ranks} {'rank' if ranks == 1 else 'ranks'} needs hosts of the cluster, but {found} for "
            f"{_BACK_WITHIN_S:.0f} s; start nodes (ray start --address=HOST:PORT) and run the same search again."
        )
        return " ".join([missing, *self._others.values()])

    def _settle(self) -> None:
        """Look at the cluster until every node has answered."""
        begun = monotonic()
        self._look()
        while self._candidates and monotonic() - begun < _READY_WITHIN_S:
            answers = [one.answer for one in self._candidates.values()]
            ray.wait(answers, num_returns=len(answers), timeout=_LOOK_S)
            self._looked = 0.0
            self._look()
        self._admit(is_patient=False)

    def _look(self) -> None:
        """Take in nodes that have come, and forget those that are gone."""
        if self._is_closed or monotonic() - self._looked < _LOOK_S:
            return
        self._looked = monotonic()
        living = living_nodes()
        for node in [node for node in self._hosts if node not in living and node not in self._busy]:
            del self._hosts[node]
            self._unreserve({node})
        for known in (self._candidates, self._others):
            for node in [node for node in known if node not in living]:
                del known[node]
        for node, found in living.items():
            if node not in self._hosts | self._candidates | self._others and found["Resources"].get("CPU", 0) >= 1:
                self._candidates[node] = start_actor(node, found, self._device)
        self._admit()

    def _admit(self, *, is_patient: bool = True) -> None:
        """Make hosts of candidates that have answered; at first all are waited for: the most decide on the kind."""
        waiting = [one.answer for one in self._candidates.values()]
        ready = ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []
        if is_patient and self._bound is None and len(ready) < len(waiting):
            return
        answered = {node: one for node, one in self._candidates.items() if one.answer in ready}
        facts: dict[str, HostFacts] = {}
        for node, one in answered.items():
            del self._candidates[node]
            told = facts_of(one)
            if isinstance(told, str):
                self._others[node] = told
                kill_actor(one.actor)
            else:
                facts[node] = told
        kinds = {node: one.environment for node, one in facts.items() if one.environment is not None}
        if self._bound is None:
            self._bound = most_of_a_kind(kinds.values())
        for node, environment in kinds.items():
            one = answered[node]
            if self._bound is None or environment.fingerprint != self._bound.fingerprint:
                self._others[node] = say_other(one.name, environment, self._bound)
                kill_actor(one.actor)
                continue
            self._hosts[node] = OneHost(
                node=node,
                name=one.name,
                address=one.address,
                actor=one.actor,
                environment=environment,
                interface=facts[node].interface,
                bundle=one.bundle,
            )
        self._state.notify_all()

    def _is_reserved(self, hosts: Sequence[OneHost]) -> bool:
        """Hold the hosts' processors and devices by a placement group; False where others are to be tried."""
        nodes = tuple(host.node for host in hosts)
        group = self._group_of(nodes, [host.bundle for host in hosts])
        begun = monotonic()
        while not group.wait(_LOOK_S):
            if self._is_closed or not set(nodes) <= living_nodes().keys():
                return False
            if monotonic() - begun > _RESERVED_SOON_S and self._set_aside(hosts):
                return False
            if monotonic() - begun > _RESERVED_WITHIN_S:
                with self._state:
                    self._unreserve(set(nodes))
                names = ", ".join(host.name for host in hosts)
                raise LauncherError(
                    f"a trial needs whole hosts, but other jobs of the cluster have kept {names} for "
                    f"{_RESERVED_WITHIN_S:.0f} s; run the same search again when they are done"
                )
        return True

    def _set_aside(self, hosts: Sequence[OneHost]) -> bool:
        """Let others come first, where as many are free."""
        with self._state:
            now = monotonic()
            others = [one for one in self._hosts.values() if one.node not in self._busy and one.aside_until <= now]
            if len(others) < len(hosts):
                return False
            for host in hosts:
                host.aside_until = now + _ASIDE_S
            self._unreserve({host.node for host in hosts})
            return True

    def _group_of(self, nodes: tuple[str, ...], bundles: Sequence[dict[str, float]]) -> PlacementGroup:
        """The placement group of the last trial on these hosts where it is still held, else a new one."""
        with self._state:
            if self._is_closed:
                raise LauncherError(SEARCH_IS_OVER)
            held = self._reservations.get(nodes)
            if held is None:
                self._unreserve(set(nodes))
                group = placement_group(
                    list(bundles),
                    strategy="STRICT_PACK" if len(nodes) == 1 else "STRICT_SPREAD",
                    bundle_label_selector=[{_NODE_LABEL: node} for node in nodes],
                )
                held = self._reservations[nodes] = _Reservation(group, monotonic())
            elif held.ending is not None:
                held.ending.cancel()
                held.ending = None
            return held.group

    def _unreserve(self, nodes: set[str]) -> None:
        for held in [held for held in self._reservations if nodes & set(held)]:
            reservation = self._reservations.pop(held)
            if reservation.ending is not None:
                reservation.ending.cancel()
            remove_placement_group(reservation.group)

    def _let_go(self, nodes: tuple[str, ...], held: _Reservation) -> None:
        """Give hosts back to the cluster that no trial has asked for since."""
        with self._state:
            if self._reservations.get(nodes) is held and held.ending is not None and not self._is_closed:
                self._unreserve(set(nodes))
