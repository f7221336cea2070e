"""Watch how memory grows over the blocks of a window."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from itertools import count

import pytest
import torch

from autotune.records.measurement import Block, MemoryGrowth
from autotune.worker import conditions
from autotune.worker.conditions import open_memory_watch
from autotune.worker.device import open_device

LEAK_BYTES = 32 * 1024
BATCHES = 40
BLOCKS = 24

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="host memory is read from /proc")


def block(seconds: float = 0.2) -> Block:
    return Block(samples=4 * BATCHES, batches=BATCHES, seconds=seconds, data_wait_s=0.0)


def of_new_pages() -> torch.Tensor:
    """A tensor outside the heap, in which much may be free already, and which gives all back at its end."""
    pages = mmap.mmap(-1, LEAK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def growth_of_training(kept: list[torch.Tensor] | None) -> dict[str, MemoryGrowth]:
    """Of a loop whose steps make a tensor, and keep it where there is a list for it."""
    with open_memory_watch(open_device("cpu")) as watch:
        for _ in range(BLOCKS):
            for _ in range(BATCHES):
                made = of_new_pages()  # as the loss whose graph a list of losses keeps
                if kept is not None:
                    kept.append(made)
            watch.after(block())
    return {found.kind: found for found in watch.growth()}


def test_leak() -> None:
    found = growth_of_training([])
    assert {*found} == {"host"}  # the CPU has no memory of its own
    assert found["host"].low > 0
    assert 0.7 * LEAK_BYTES < found["host"].bytes_per_batch < 1.5 * LEAK_BYTES


def test_no_leak() -> None:
    assert growth_of_training(None)["host"].bytes_per_batch < LEAK_BYTES / 8


def test_seven_blocks_are_enough() -> None:
    with open_memory_watch(open_device("cpu")) as watch:
        for _ in range(7):
            watch.after(block())
    assert [found.kind for found in watch.growth()] == ["host"]


def test_worker_that_ends() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open_memory_watch(open_device("cpu")) as watch:
        watch.after(block())
        worker.communicate(b"\n")
        for _ in range(BLOCKS):
            watch.after(block())
        assert watch.growth() == ()


def test_files_are_closed() -> None:
    with open_memory_watch(open_device("cpu")) as watch:
        descriptors = [*watch.statm]
    assert descriptors
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_seconds_of_growth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [50.0]
    monkeypatch.setattr(conditions, "perf_counter", lambda: now[0])
    with open_memory_watch(open_device("cpu")) as watch:
        for _ in range(BLOCKS):
            watch.after(block())
            now[0] += 2.0
        now[0] += 1000.0
    (found,) = watch.growth()
    assert found.seconds / found.batches == pytest.approx(2.0 / BATCHES)


# Pages that workers copy


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the processes whose pages were read; each reading copies a MiB more, and takes no time."""
    pids = list[int]()

    def pages_of(pid: int) -> tuple[int, int]:
        pids.append(pid)
        copied = pids.count(pid) * 2**20
        return copied, 2**30 - copied

    monkeypatch.setattr(conditions, "pages_of", pages_of)
    monkeypatch.setattr(conditions, "perf_counter", lambda: 50.0)
    return pids


def test_pages_of_the_loaders_workers_alone_are_read(read: list[int]) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open_memory_watch(open_device("cpu"), [7, 8]) as watch:
        for samples in (10, 20):
            watch.read_pages(samples)
    other.communicate(b"\n")
    assert read == [7, 8] * 3
    copying = watch.copied()
    assert copying is not None
    assert (copying.workers, copying.copied_bytes) == (2, 2 * 2**20)


def test_pages_that_take_long_are_read_once(
    read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = count(step=1.0)
    monkeypatch.setattr(conditions, "perf_counter", lambda: next(moments))
    with open_memory_watch(open_device("cpu"), [7, 8]) as watch:
        for samples in (10, 20):
            watch.read_pages(samples)
    assert read == [7, 8]
    assert watch.copied() is None
