"""NCCL's shared memory that a killed group has left is removed; what others use, or had before, stays."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import pytest

from autotune.launch.processes import free_segments, segments
from tests.launch.conftest import GENEROUS_S, Rig

PLACE = "/dev/shm"


@pytest.fixture
def made() -> Iterator[list[Path]]:
    """Paths that are removed when a test is over."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def make(made: list[Path], prefix: str = "nccl-") -> Path:
    with tempfile.NamedTemporaryFile(prefix=prefix, dir=PLACE, delete=False) as file:
        file.write(b"x" * 4096)
    made.append(Path(file.name))
    return made[-1]


def mapped(path: Path) -> mmap.mmap:
    """The file in this process's memory, its descriptor closed."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


@pytest.mark.slow
def test_a_killed_groups_files_are_removed_and_one_that_somebody_has_mapped_is_not(
    rig: Rig, made: list[Path]
) -> None:
    earlier = make(made)

    def hold_one() -> mmap.mmap:
        begun = monotonic()
        while not Path("made").exists():
            assert monotonic() - begun < GENEROUS_S
            sleep(0.01)
        made.extend(map(Path, Path("made").read_text().splitlines()))
        held = mapped(made[2])
        Path("go").touch()
        return held

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold_one)
        result = rig.run_group("leaving_shared_memory_in_1")
    with holding.result():
        assert "SIGKILL" in result.reason
        _, left, held = made
        assert (left.exists(), held.exists(), earlier.exists()) == (False, True, True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_file_stays(made: list[Path]) -> None:
    before, path = segments(), make(made)
    os.chown(path, 12345, -1)
    free_segments(before)
    assert path.exists()


def test_a_file_stays_while_anybody_has_it_open_or_mapped_and_goes_then(made: list[Path]) -> None:
    before = segments()
    mapped_one, open_one, other = make(made), make(made), make(made, "nothing-of-nccl-")
    with mapped(mapped_one), open_one.open():
        free_segments(before)
        assert mapped_one.exists()
        assert open_one.exists()
    free_segments(before)
    assert [path.exists() for path in (mapped_one, open_one, other)] == [False, False, True]
