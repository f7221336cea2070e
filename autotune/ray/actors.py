"""Calls to the actors of hosts, and the exceptions for a host that is gone and for hosts that do not suffice."""

from __future__ import annotations

from collections.abc import Sequence
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

from autotune.errors import LauncherError, first_line
from autotune.ray.nodes import OneHost

__all__ = ["SEARCH_IS_OVER", "HostLostError", "NoRoomError", "Team", "answer_of", "call"]

Team = Sequence[tuple[OneHost, int]]
"""The hosts of a trial, in the order of its ranks, and the number of ranks on each."""

SEARCH_IS_OVER = "the search is over: its hosts are given back"
"""The error of a trial that was under way."""
_LOST = (RayActorError, ActorUnavailableError, NodeDiedError, ObjectLostError, WorkerCrashedError)


class NoRoomError(LauncherError):
    """The cluster has hosts, but too few for a trial's ranks."""


class HostLostError(Exception):
    """A host is gone.

    Args:
        host: that one.
        was_running: its part of the trial had begun.
        for_memory: why Ray has ended what ran there, where that was for the host's memory.
    """

    def __init__(self, host: OneHost, *, was_running: bool = False, for_memory: str = "") -> None:
        super().__init__(host.name)
        self.host, self.was_running, self.for_memory = host, was_running, for_memory


def call(host: OneHost, method: str, *arguments: object) -> Any:
    """Call a method of the host's actor; the reference to its answer.

    Raises:
        HostLostError: the actor is gone.
    """
    try:
        return getattr(host.actor, method).remote(*arguments)
    except Exception as error:  # Ray raises a plain one for an actor that it does not know any more
        raise HostLostError(host) from error


def answer_of(host: OneHost, reference: Any, *, was_running: bool = False) -> Any:
    """A host's answer.

    Raises:
        HostLostError: the host is gone, in whichever way Ray reports that.
        LauncherError: the call failed on the host.
    """
    try:
        return ray.get(reference)
    except OutOfMemoryError as error:
        for_memory = f"Ray ended the trial for the memory of its host, {host.name}: {first_line(error)}"
        raise HostLostError(host, was_running=was_running, for_memory=for_memory if was_running else "") from error
    except _LOST as error:
        raise HostLostError(host, was_running=was_running) from error
    except RayError as error:
        raise LauncherError(f"{host.name} can't run trials: {error}") from error
