"""Joins a Ray cluster from the driver, and undoes what Ray changes in its process: signal handlers, prints."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from threading import current_thread, main_thread
from typing import Any

import ray
from ray._private import worker as rays_worker
from ray._private.services import get_ray_address_from_environment

from autotune.errors import ConfigError, first_line

__all__ = ["join"]

_LOG = logging.getLogger(__name__)


def join(address: str | None, undo: ExitStack) -> None:
    """Connect to the cluster; a connection that the caller has already made is used. `undo` leaves it as it was.

    Ray's own handler of SIGTERM is removed: a search saves its results first.

    Raises:
        ConfigError: no cluster answers, or the caller has joined another one.
    """
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in {None, "auto", joined}:
            raise ConfigError(
                f"one process can use one Ray cluster, and this one has joined that at {joined}, but executor.address "
                f"is {address}; leave it out, or call ray.shutdown() before"
            )
        return
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _connect(get_ray_address_from_environment("auto", None) if where == "auto" else where)
    except (OSError, ValueError) as error:
        raise _unreachable(where, error) from error
    signals = (signal.SIGTERM, signal.SIGINT) if current_thread() is main_thread() else ()
    before = {number: signal.getsignal(number) for number in signals}
    try:
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, namespace="autotune")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(where, error) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    undo.callback(ray.shutdown)
    _silence_prints(undo)


def _connect(address: str) -> None:
    """Raise where nothing listens: Ray itself would retry for minutes, and print."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), 5.0).close()


def _unreachable(where: str, error: Exception) -> ConfigError:
    place = f"at {where}" if where != "auto" else "on this machine, and RAY_ADDRESS is not set"
    return ConfigError(
        f"executor ray needs a running Ray cluster, but none answers {place} ({first_line(error)}); start one "
        "(ray start --head) or name its address (executor: {kind: ray, address: HOST:6379})"
    )


def _silence_prints(undo: ExitStack) -> None:
    """Keep Ray from printing 25 lines of a dead node's log on the caller's stdout, which is for results.

    Ray has no setting for it. Source: ray/_private/worker.py, listen_error_messages, also with log_to_driver=False.
    """

    def keep(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        _LOG.debug("%s", data.get("lines"))

    name = "print_to_stdstream"
    if hasattr(rays_worker, name):
        undo.callback(setattr, rays_worker, name, getattr(rays_worker, name))
        setattr(rays_worker, name, keep)
