"""Messages between the parent and its processes: JSON objects, a line each, over a Unix socket.

The fork server and the parent hold the two ends of a pair. A trial's processes, and those of a
command, connect by name: the socket lies in the trial's folder of sockets. Documents (a job, a
report) are files; what happens meanwhile (a block has ended, enough was seen) is a message. Nothing
is unpickled. A line that is no JSON object is skipped; one that stops halfway is not a message; and
one that is longer than any message ends the connection.
"""

from __future__ import annotations

import json
import socket
from array import array
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

CHANNEL = "channel"
"""Name of the socket in a trial's folder of sockets at which its parent listens."""
_CHUNK_BYTES = 64 * 1024
_LONGEST_LINE_BYTES = 4 * 1024 * 1024
"""A server is asked to import some thousand modules. Source: our own convention."""
_SEND_WITHIN_S = 30.0
"""Seconds in which the other end must take a message. Source: our own convention."""
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""A lost connection raises even in a script that lets SIGPIPE end its process (send(2))."""


class Channel:
    """One end of a connection.

    Attributes:
        descriptors: File descriptors that have come with the messages so far, for the caller to
            take out and close.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.descriptors: list[int] = []
        self._connection = connection
        self._messages: deque[dict[str, Any]] = deque()
        self._begun = b""
        """A line that has not come whole."""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end."""
        with suppress(OSError):  # the user's code has closed it
            self._connection.close()

    def send(
        self, message: Mapping[str, object], *descriptors: int, within_s: float = _SEND_WITHIN_S
    ) -> None:
        """Send a message, with file descriptors.

        Raises:
            OSError: The other end is gone, or does not take it in time; this end is of no use then.
        """
        data = json.dumps(message).encode() + b"\n"
        self._connection.settimeout(within_s)
        if descriptors:
            # socket.send_fds ignores its flags
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
            data = data[self._connection.sendmsg([data], passed, _NO_SIGNAL) :]
        self._connection.sendall(data, _NO_SIGNAL)

    def receive(self, within_s: float | None, *, descriptors: int = 0) -> dict[str, Any] | None:
        """Return the next message; None if none has come whole after one read.

        Args:
            within_s: Seconds to wait for the read; None: without an end.
            descriptors: The most file descriptors that come with it.

        Raises:
            EOFError: The other end is gone, or has sent a line that is far too long.
        """
        if not self._messages:
            self._connection.settimeout(within_s)
            data = b""
            try:
                with suppress(ConnectionError):
                    data, found, _, _ = socket.recv_fds(self._connection, _CHUNK_BYTES, descriptors)
                    self.descriptors += found
            except (BlockingIOError, TimeoutError):
                return None
            *lines, self._begun = (self._begun + data).split(b"\n")
            if not data or len(self._begun) > _LONGEST_LINE_BYTES:
                raise EOFError
            for line in lines:
                with suppress(ValueError, RecursionError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        self._messages.append(message)
        return self._messages.popleft() if self._messages else None


def connect(sockets: Path) -> Channel | None:
    """Connect to the parent of a trial; return None if it can't be reached.

    Args:
        sockets: The link to the trial's folder of sockets: a socket's own path must be short.
    """
    try:
        with ExitStack() as undo:
            connection = undo.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            connection.connect(f"{sockets.readlink()}/{CHANNEL}")
            undo.pop_all()
    except OSError:
        return None
    return Channel(connection)
