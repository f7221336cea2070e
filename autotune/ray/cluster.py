"""A Ray cluster joined by the driver, with what Ray does to its process on the way put right again."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import ray
from ray._private import worker as rays_worker
from ray._private.services import get_ray_address_from_environment

from autotune.errors import ConfigError
from autotune.phrasing import first_line

__all__ = ["join", "refuse_another", "unheard_messages"]

_LOG = logging.getLogger(__name__)
_ANSWERS_WITHIN_S = 5.0


def join(address: str | None) -> None:
    """Connect to the cluster. Ray's own handler of SIGTERM is taken out again: a search saves what it has."""
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _knock(get_ray_address_from_environment("auto", None) if where == "auto" else where)
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


def refuse_another(address: str | None) -> None:
    """Refuse an address that is not that of the cluster which the caller has joined already."""
    joined = ray.get_runtime_context().gcs_address
    if address not in {None, "auto", joined}:
        raise ConfigError(
            f"one process can use one Ray cluster, and this one has joined that at {joined}, but executor.address is "
            f"{address}; leave it out, or call ray.shutdown() before"
        )


def _knock(address: str) -> None:
    """Raise where nobody listens: Ray itself would try it for minutes, printing."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN_S).close()


def _unreachable(where: str, error: Exception) -> ConfigError:
    place = f"at {where}" if where != "auto" else "on this machine, and RAY_ADDRESS is not set"
    return ConfigError(
        f"executor ray needs a running Ray cluster, but none answers {place} ({first_line(error)}); start one "
        "(ray start --head) or name its address (executor: {kind: ray, address: HOST:6379})"
    )


@contextmanager
def unheard_messages() -> Iterator[None]:
    """Keep off the caller's stdout what Ray prints of a node that died: 25 lines of its log, and results belong there.

    Ray has no setting for it. Source: ray/_private/worker.py, listen_error_messages, also with log_to_driver=False.
    """
    name = "print_to_stdstream"
    before = getattr(rays_worker, name, None)
    if before is None:
        yield
        return

    def keep(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        _LOG.debug("%s", data.get("lines"))

    setattr(rays_worker, name, keep)
    try:
        yield
    finally:
        setattr(rays_worker, name, before)
