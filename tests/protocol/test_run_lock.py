"""One search at a time: who holds a run folder is said, and a file system without locks is."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from autotune.errors import RunFolderError
from autotune.protocol.disk import held_lock


@pytest.fixture
def names(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / ".lock", tmp_path / ".holder"


def test_a_second_search_is_told_whose_the_first_is(names: tuple[Path, Path]) -> None:
    with held_lock(*names), pytest.raises(RunFolderError) as caught, held_lock(*names):
        pass
    assert f"(process {os.getpid()} on {socket.gethostname()})" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_holder_is_gone_with_the_search(names: tuple[Path, Path]) -> None:
    with held_lock(*names):
        assert names[1].exists()
    assert not names[1].exists()
    with held_lock(*names):
        pass


@pytest.mark.parametrize("kind", ["other text", "nothing"])
def test_a_holder_that_can_not_be_read_costs_its_name_alone(
    names: tuple[Path, Path], kind: str
) -> None:
    with held_lock(*names):
        names[1].unlink()
        if kind == "other text":
            names[1].write_text("x" * 10_000)
        with pytest.raises(RunFolderError, match=r"^[^()]*$"), held_lock(*names):
            pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(
    names: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(RunFolderError, match=r"locks .*run_dir"),
        held_lock(*names),
    ):
        pass
