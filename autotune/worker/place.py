"""A rank's place among a trial's processes: what it reports and sends to the parent."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import RunFolderError
from autotune.protocol.channel import Channel, connect
from autotune.protocol.disk import TrialFolder, write_model
from autotune.protocol.messages import RankReport
from autotune.worker.conditions import Others
from autotune.worker.group import ALONE, Group
from autotune.worker.jobs.precision import References


def is_written(place: Place, report: RankReport, spare: int) -> bool:
    """Write the report; where that fails, with a descriptor more, since the user's code may have used up all others.

    Meanwhile the end of a loader worker raises nothing, as torch's handler would.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return _is_written(place, report, spare)
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _is_written(place: Place, report: RankReport, spare: int) -> bool:
    with suppress(RunFolderError):
        place.write(report)
        return True
    with suppress(OSError):  # the user's code has closed it
        os.close(spare)
    try:
        place.write(report)
    except RunFolderError as error:
        with suppress(OSError, ValueError):  # the user's code may have closed it
            print(f"autotune: {error}", file=sys.stderr, flush=True)  # noqa: T201 - into the trial's log
        return False
    return True


DEADLINE_SHARE = 0.85  # our convention: of the deadline; a window that is late is ended, not lost


@dataclass(slots=True)
class Place:
    """A rank's place among the trial's processes, which every job of the worker gets besides its workload."""

    folder: TrialFolder
    rank: int
    local_rank: int
    """Its number among the ranks on this host: that of its device."""
    host: int = 0
    group: Group = ALONE
    is_shared: bool = False  # other trials follow in this process
    earlier_trials: int = 0  # were measured in it before
    references: References | None = None
    """Of precision checks that the process has made; None if no other follows."""
    channel: Channel | None = None

    @property
    def report(self) -> Path:
        """Return the file of this rank's report."""
        return self.folder.report_of(self.rank)

    def write(self, report: RankReport) -> None:
        """Write what this rank reports, in place of what it has reported before."""
        write_model(self.report, report)

    def connect(self) -> None:
        """Connect to the parent, if it can be reached, so that no later message takes time for it."""
        self.channel = connect(self.folder.sockets)

    def send(self, message: Mapping[str, object]) -> None:
        """Send the parent a message without waiting; if it takes none, nothing is sent any more."""
        if self.channel is not None:
            try:
                self.channel.send(message, within_s=0.0)
            except OSError:
                self.channel.close()
                self.channel = None

    def end_trial(self) -> None:
        """Have all of the trial ended, once a script is measured: by the parent, else by whoever runs the command."""
        if self.channel is None:
            self.connect()
        self.send({"measured": True})
        if self.channel is None:
            with suppress(OSError):
                self.folder.measured.touch(mode=0o600)

    def receive(self, within_s: float | None) -> Mapping[str, Any]:
        """Return what the parent has sent; nothing if that does not come in time, or it is gone."""
        try:
            return (self.channel and self.channel.receive(within_s)) or {}
        except (EOFError, OSError):  # the parent is gone, or the user's code has closed the socket
            self.channel = None
            return {}

    def keep(self, report: RankReport) -> None:
        """Write what is known so far."""
        with suppress(RunFolderError):  # a full disk: there may be room for the last report
            self.write(report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What was opened and noted before a workload is built; times by perf_counter."""

    started: float
    """When the process began."""
    built_from: float
    """When the workload began to be read."""
    ends_at: float
    """When measuring is to end, before the deadline."""
    before: Mapping[str, Others]
    """Others' use of the devices before this process opened them."""
