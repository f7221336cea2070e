"""The files of one trial, which the parent and its ranks exchange."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TrialFolder"]


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """The names of a trial's files; only this class knows them."""

    path: Path

    @property
    def job(self) -> Path:
        """What the ranks are to do."""
        return self.path / "job.json"

    @property
    def report(self) -> Path:
        """What rank 0 answers."""
        return self.path / "report.json"

    @property
    def blocks(self) -> Path:
        """Where rank 0 writes each block of its window as soon as it has ended, a line each."""
        return self.path / "blocks.jsonl"

    @property
    def rendezvous(self) -> Path:
        """Where the ranks of a group meet: the file of torch.distributed's FileStore."""
        return self.path / "rendezvous"

    def report_of(self, rank: int) -> Path:
        """What a rank answers."""
        return self.report if rank == 0 else self.path / f"report-{rank}.json"

    def stack_of(self, rank: int) -> Path:
        """The stack of a rank of a group shortly before its end, as faulthandler writes it."""
        return self.path / f"stack-{rank}.txt"

    def has_stacks(self) -> bool:
        """Whether a rank of a group has written its stack."""
        with suppress(OSError):  # the user's code may remove it
            return any(path.stat().st_size > 0 for path in self.path.glob("stack-*.txt"))
        return False
