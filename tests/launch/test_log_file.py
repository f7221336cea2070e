"""A log takes whatever comes out of a pipe, and of a flood the beginning and the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from autotune.errors import RunFolderError
from autotune.launch.processes import LogFile


def _opened() -> Iterator[Path]:
    """What this process holds open, as /proc names it; garbage of tests before may be closed at any time."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            yield descriptor.readlink()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Open a pipe that does not block."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for one in ends:
        os.close(one)


def test_a_log_keeps_a_small_output_as_it_is(tmp_path: Path, pipe: tuple[int, int]) -> None:
    log = LogFile(tmp_path / "log", pipe[0])
    os.write(pipe[1], b"one\n\xff")
    assert not log.pump()
    os.write(pipe[1], b"two")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"one\n\xfftwo"


def test_a_full_pipe_is_told_since_more_may_wait(tmp_path: Path, pipe: tuple[int, int]) -> None:
    log = LogFile(tmp_path / "log", pipe[0])
    os.write(pipe[1], b"x" * 2**16)
    assert log.pump()
    log.close()


def test_what_lies_between_beginning_and_end_is_counted_and_left_out(
    tmp_path: Path, pipe: tuple[int, int]
) -> None:
    log = LogFile(tmp_path / "log", pipe[0])
    for number in range(64):
        os.write(pipe[1], bytes([number]) * 2**15)
        log.pump()
    log.close()
    kept = (tmp_path / "log").read_bytes()
    head, notice, tail = kept.partition(b"\n... ")
    count, _, tail = tail.partition(b" bytes left out ...\n")
    assert head == b"".join(bytes([number]) * 2**15 for number in range(8))
    assert notice
    assert tail.endswith(bytes([63]) * 2**15)
    assert len(head) + int(count.replace(b",", b"")) + len(tail) == 2**21


def test_a_log_that_cannot_be_written_is_told_and_leaves_no_descriptor(
    tmp_path: Path, pipe: tuple[int, int]
) -> None:
    before = set(_opened())
    with pytest.raises(RunFolderError):
        LogFile(tmp_path / "absent" / "log", pipe[0])
    assert set(_opened()) <= before


def test_a_log_is_its_owners_alone(tmp_path: Path, pipe: tuple[int, int]) -> None:
    log = LogFile(tmp_path / "log", pipe[0])
    log.close()
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
