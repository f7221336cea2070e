"""Shared memory that a dead process of a trial has left."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["free_shared_memory"]


def free_shared_memory(pid: int) -> None:
    """Remove the files in /dev/shm that a dead process has left: torch's, by the sharing strategy "file_system".

    The process of torch that would remove them (torch_shm_manager) is ended with the trial.
    Source: torch/csrc/MapAllocator.cpp (NewProcessWideShmHandle): "/torch_", pid, "_", random, "_", counter.
    """
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):  # noqa: S108 - torch's own place
        with suppress(OSError):
            path.unlink()
