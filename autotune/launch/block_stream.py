"""The blocks of a trial under way: what rank 0 has written of them, and the decision whether the trial goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from pydantic import ValidationError

from autotune.note import Note
from autotune.records.measurement import Block
from autotune.records.trial import TrialResult

__all__ = ["BlockStream", "ShouldEnd"]

ShouldEnd = Callable[[tuple[Block, ...]], Note | str | None]
"""Given the blocks of a trial so far: why it is to be ended, or None."""

_PART_BYTES = 64 * 1024  # our convention: some 500 blocks; the user's code may write more than that
_MOST_BLOCKS = 10_000  # our convention: far more than a window of 8 s has


@dataclass(slots=True)
class BlockStream:
    """Reads the blocks that a trial's rank 0 writes, and asks for each new one whether the trial may go on."""

    path: Path
    ranks: int
    should_end: ShouldEnd
    blocks: list[Block] = field(default_factory=list)
    reason: Note | str | None = None
    _read: int = 0

    def is_lost(self) -> bool:
        """Whether the trial is to be ended; called many times a second."""
        if self.reason is None and self._read_new():
            self.reason = self.should_end(tuple(self.blocks))
        return self.reason is not None

    def stopped(self) -> TrialResult:
        """Return the result of a trial that was ended; blocks of the warm-up count if there are no others."""
        in_window = tuple(block for block in self.blocks if not block.is_warm_up)
        blocks = in_window or tuple(self.blocks)
        return TrialResult(outcome="pruned", reason=str(self.reason or ""), blocks=blocks)

    def _read_new(self) -> bool:
        """Read the blocks that have been written since; whether there are any.

        A line that is not a block is skipped: a full disk may have cut it off, and the next block continues it.
        """
        try:
            lines = self._read_lines()
        except FileNotFoundError:  # the window has not begun, or has begun again on another host
            self._read = 0
            self.blocks.clear()
            return False
        except OSError:
            return False
        known = len(self.blocks)
        for line in lines.splitlines():
            with suppress(ValidationError):
                block = Block.model_validate_json(line)
                if block.samples > 0 and 0 < block.seconds < inf and known < _MOST_BLOCKS:
                    made = None if block.made is None else block.made * self.ranks
                    self.blocks.append(block.model_copy(update={"samples": block.samples * self.ranks, "made": made}))
        return len(self.blocks) > known

    def _read_lines(self) -> bytes:
        """The complete lines that were written since, at most one part: the user's code may write anything there."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block the parent
        try:
            data = os.pread(descriptor, _PART_BYTES, self._read)
        finally:
            os.close(descriptor)
        lines, newline, rest = data.rpartition(b"\n")
        self._read += len(rest) if len(rest) == _PART_BYTES else len(lines) + len(newline)
        return lines
