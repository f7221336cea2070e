"""What a power cut leaves of a folder, by the calls that were made in it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from random import Random

import pytest

from benchmarks.measures.endurance.disk_log import Loss, Step, left_by_power_cut, record_steps

WRITER = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[1])
with open(folder / ".new", "wb") as file:
    file.write(b"whole")
    file.flush()
    os.fsync(file.fileno())
(folder / ".new").rename(folder / "file")
descriptor = os.open(folder, os.O_RDONLY)
os.fsync(descriptor)
os.close(descriptor)
print("told", flush=True)
with open(folder / "file", "ab") as file:
    file.write(b" and more")
with open(folder / "file", "r+b") as file:
    os.pwrite(file.fileno(), b"W", 0)
    os.ftruncate(file.fileno(), 9)
(folder / "gone").touch()
(folder / "gone").unlink()
"""
WRITTEN = [
    Step(kind="create", name="a"),
    Step(kind="write", name="a", data=b"first"),
    Step(kind="sync", name="a"),
    Step(kind="sync names"),
    Step(kind="write", name="a", offset=5, data=b" second"),
    Step(kind="create", name="b"),
    Step(kind="write", name="b", data=b"new"),
    Step(kind="rename", name="b", to="c"),
]


@pytest.mark.parametrize(
    ("loss", "left"),
    [
        ("nothing", {"a": b"first second", "c": b"new"}),
        ("all unsynced", {"a": b"first"}),
        ("unsynced data", {"a": b"first", "c": b""}),
    ],
)
def test_what_was_not_synced_is_lost(loss: Loss, left: dict[str, bytes], tmp_path: Path) -> None:
    assert left_after(WRITTEN, loss, tmp_path / "cut") == left


def test_of_torn_writes_what_was_synced_is_whole(tmp_path: Path) -> None:
    seen = {left_after(WRITTEN, "torn", tmp_path / str(seed), seed)["a"] for seed in range(30)}
    assert all(
        content.startswith(b"first") and b"first second".startswith(content) for content in seen
    )
    assert len(seen) > 2


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_calls_of_a_process_are_recorded_as_they_change_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    steps = record_steps(
        [sys.executable, "-c", WRITER, str(folder)], folder, tmp_path / "calls", {}
    )
    told = next(number for number, step in enumerate(steps) if step.kind == "told")
    assert left_after(steps[:told], "all unsynced", tmp_path / "told") == {"file": b"whole"}
    there = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert left_after(steps, "nothing", tmp_path / "end") == there == {"file": b"Whole and"}


def left_after(steps: list[Step], loss: Loss, folder: Path, seed: int = 0) -> dict[str, bytes]:
    left_by_power_cut(steps, folder, loss, Random(seed))
    return {path.name: path.read_bytes() for path in folder.iterdir()}
