"""The shared memory of a dead process is freed, and no other's."""

from __future__ import annotations

from pathlib import Path

from autotune.launch.processes import free_shared_memory


def test_shared_memory_of_one_process_alone_is_freed() -> None:
    mine, anothers = Path("/dev/shm/torch_99999991_1_0"), Path("/dev/shm/torch_999999911_1_0")
    mine.touch()
    anothers.touch()
    try:
        free_shared_memory(99999991)
        assert not mine.exists()
        assert anothers.exists()
    finally:
        mine.unlink(missing_ok=True)
        anothers.unlink(missing_ok=True)
