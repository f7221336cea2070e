"""A log takes whatever comes out of a pipe, and of a flood the beginning and the end."""

from __future__ import annotations

import errno
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


def test_a_log_keeps_a_small_output_as_it_is(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    os.write(log.output, b"one\n\xff")
    assert not log.pump()
    os.write(log.output, b"two")
    os.close(log.output)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"one\n\xfftwo"


def test_a_full_pipe_is_told_since_more_may_wait(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    os.write(log.output, b"x" * 2**16)
    assert log.pump()
    os.close(log.output)
    log.close()


def test_what_lies_between_beginning_and_end_is_counted_and_left_out(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    for number in range(64):
        os.write(log.output, bytes([number]) * 2**15)
        log.pump()
    os.close(log.output)
    log.close()
    kept = (tmp_path / "log").read_bytes()
    head, notice, tail = kept.partition(b"\n... ")
    count, _, tail = tail.partition(b" bytes left out ...\n")
    assert head == b"".join(bytes([number]) * 2**15 for number in range(8))
    assert notice
    assert tail.endswith(bytes([63]) * 2**15)
    assert len(head) + int(count.replace(b",", b"")) + len(tail) == 2**21


def test_a_log_that_cannot_be_written_is_told_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = set(_opened())
    with pytest.raises(RunFolderError):
        LogFile(tmp_path / "absent" / "log")
    assert set(_opened()) <= before


def test_where_no_pipe_can_be_had_nothing_of_a_log_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pipe", pipe)
    before = set(_opened())
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        LogFile(tmp_path / "log")
    assert set(_opened()) <= before


def test_a_log_is_its_owners_alone(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    os.close(log.output)
    log.close()
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
