"""A trial under way on its hosts: started on each, followed to the end, cancelled where it must not go on.

Takes a Launch and the hosts' tasks; hands on each host's answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import ray

from autotune.launch.launcher import EndedFor, Launch
from autotune.ray.actors import HostLostError, answer_of, call
from autotune.ray.host import HostAnswer, HostTask
from autotune.ray.nodes import OneHost

__all__ = ["BlockCopy", "RunningTrial"]

_TICK_S = 0.1
_FOLLOW_WITHIN_S = 5.0  # as on one machine (watch.py): the others of a group end soon after one rank has
_SILENT_S = 60.0  # our convention: past its deadline, at which the host itself ends a trial


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
            data = answer_of(host, self.request, was_running=True)
            with suppress(OSError), self.path.open("ab") as file:  # a full disk: the trial is not stopped early
                file.write(data)
            self.size += len(data)
        self.request = call(host, "blocks", ticket, self.size)


@dataclass(slots=True)
class RunningTrial:
    """A trial under way on its hosts."""

    launch: Launch
    blocks: BlockCopy | None = None
    """Copies the blocks of rank 0's window, where they are asked for."""
    hosts: dict[Any, OneHost] = field(default_factory=dict)
    """By the reference to the host's answer."""
    begun: float = field(default_factory=monotonic)
    ticket: str = field(default_factory=lambda: uuid.uuid4().hex)
    cancelled_for: EndedFor | None = None
    """Why the driver has ended it; None where it has not."""

    def run(self, tasks: Iterable[tuple[OneHost, HostTask]]) -> list[HostAnswer]:
        """Start the hosts' tasks and wait; every host's answer, in the order of the ranks."""
        try:
            for host, task in tasks:
                self.hosts[call(host, "run", task.model_dump_json())] = host
            return self._wait()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End what still runs on the hosts."""
        for host in self.hosts.values():
            with suppress(HostLostError):
                call(host, "cancel", self.ticket)

    def _wait(self) -> list[HostAnswer]:
        answers: dict[Any, HostAnswer] = {}
        first_ended: float | None = None
        while left := [reference for reference in self.hosts if reference not in answers]:
            ready, _ = ray.wait(left, num_returns=len(left), timeout=_TICK_S, fetch_local=True)
            for reference in ready:
                answer = answer_of(self.hosts[reference], reference, was_running=True)
                answers[reference] = HostAnswer.model_validate_json(answer)
            if len(answers) == len(self.hosts):
                break
            now = monotonic()
            if ready and first_ended is None:
                first_ended = now
            if self.blocks is not None and (first := next(iter(self.hosts))) not in answers:
                self.blocks.fetch(self.hosts[first], self.ticket)
            if self.cancelled_for is None and (reason := self._reason_to_end(first_ended, now)) is not None:
                self.cancelled_for = reason
                self.cancel()
            if now > self.begun + self.launch.deadline_s + _SILENT_S:
                raise HostLostError(self.hosts[left[0]], was_running=True)
        return [answers[reference] for reference in self.hosts]

    def _reason_to_end(self, first_ended: float | None, now: float) -> EndedFor | None:
        if self.launch.should_end is not None and self.launch.should_end():
            return "cancelled"
        return None if first_ended is None or now < first_ended + _FOLLOW_WITHIN_S else "straggling"
