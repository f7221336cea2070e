"""When a rank writes down where it stands, before it is ended: faulthandler's timer needs no interpreter for it.

Owns two times: shortly before the deadline, and, between the blocks of a group's window, when for ten times the longest
block no other one has ended. The ranks train their blocks in step: one of them hangs then, and the others wait for it.
The parent ends a group once such a dump is there.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import TextIO

__all__ = ["HangDump"]

_PATIENCE = 10.0  # own convention: a loader that pauses, or a second compilation, takes about as long as before
_LEAST_S = 30.0  # own convention: longer than most checkpoints and evaluations inside a step


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDump:
    """A rank's words, of which those that are asked for last are the only ones to come."""

    file: TextIO
    """Where they go."""
    ends_at: float
    """Time of perf_counter of the trial's deadline."""
    pid: int = field(default_factory=os.getpid)
    """The process whose words they are."""

    def before_deadline(self) -> None:
        """Let them come shortly before the deadline."""
        self.unless_a_block_ends(inf)

    def unless_a_block_ends(self, longest_s: float) -> None:
        """Let them come when a group stands still, or before the deadline; to be asked for again after each block.

        Words that have come meanwhile are taken back: a block has ended after all.

        Args:
            longest_s: Seconds of the longest block so far, of any rank: all come to the same time.
        """
        if os.getpid() != self.pid:
            return  # a forked child has no timer's thread, for which faulthandler would wait without end
        left_s = self.ends_at - 0.5 - perf_counter()  # time to write the stacks
        seconds = min(left_s, max(_LEAST_S, _PATIENCE * longest_s))
        with suppress(OSError, ValueError):  # the user's code may have closed it
            if self.file is not sys.stderr:
                self.file.seek(0)
                self.file.truncate()
            # the deadline is over, the parent about to end the rank
            faulthandler.dump_traceback_later(max(seconds, 0.1), exit=False, file=self.file)
