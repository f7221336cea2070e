"""Read the cores and RAM that the machine and its control groups grant, and peaks of processes."""

from __future__ import annotations

import mmap
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.apply import cores as processor
from autotune.worker import device

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, on a machine with 16 cores and 64 GiB; /membership beside it."""
    monkeypatch.setattr(processor, "_CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(processor, "_CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 64 * GIB}))
    return tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("membership", "files", "cores", "ram"),
    [
        ("0::/\n", {}, 16, 64),
        ("0::/job\n", {"job/cpu.max": "max 100000\n", "job/memory.max": "max\n"}, 16, 64),
        ("0::/job\n", {"job/cpu.max": "250000 100000\n", "job/memory.max": f"{8 * GIB}\n"}, 3, 8),
        (
            "0::/a/b\n",
            {
                "a/cpu.max": "200000 100000\n",
                "a/b/cpu.max": "400000 100000\n",
                "a/memory.max": f"{GIB}",
            },
            2,
            1,
        ),
        ("0::/gone\n", {"cpu.max": "100000 100000\n", "memory.max": f"{2 * GIB}\n"}, 1, 2),
        ("0::/job\n", {"job/cpu.max": "10000 100000\n"}, 1, 64),
        (
            "0::/job\n",
            {"job/cpu.max": "3200000 100000\n", "job/memory.max": f"{128 * GIB}"},
            16,
            64,
        ),
        ("0::/job\n", {"job/cpu.max": "nonsense", "job/memory.max": ""}, 16, 64),
        (
            "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n",
            {
                "cpu/job/cpu.cfs_quota_us": "150000\n",
                "cpu/job/cpu.cfs_period_us": "100000\n",
                "memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            },
            2,
            4,
        ),
        (
            "4:memory:/docker/abc\n3:cpu:/docker/abc\n",
            {
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            16,
            64,
        ),
    ],
)
def test_tightest_limit(
    membership: str, files: dict[str, str], cores: int, ram: int, groups: Path
) -> None:
    assert (processor.usable_cores(), device.usable_ram_bytes()) == (16, 64 * GIB)
    (groups.parent / "membership").write_text(membership)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert processor.usable_cores() == cores
    assert device.usable_ram_bytes() == ram * GIB


def test_processor() -> None:
    assert processor.processor_name()
    assert isinstance(device.processor_flags(), frozenset)


def _rise_and_fall(conn: Any) -> None:
    """Wait for a word, take 64 MiB, give them back, and tell; then wait to be ended."""
    conn.recv()
    block = bytearray(64 * 2**20)
    block[:: mmap.PAGESIZE] = b"x" * len(block[:: mmap.PAGESIZE])
    del block
    conn.send("done")
    conn.recv()


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of other processes are read from /proc")
def test_peak_of_a_worker() -> None:
    here, there = get_context("fork").Pipe()
    worker = get_context("fork").Process(target=_rise_and_fall, args=(there,))
    worker.start()
    device.reset_tree_peak()
    before, source = device.tree_peak()
    here.send("go")
    assert here.recv() == "done"
    after, _ = device.tree_peak()
    device.reset_tree_peak()
    again, _ = device.tree_peak()
    here.send("end")
    worker.join()
    assert source.startswith("PSS")
    assert after - before > 48 * 2**20
    assert after - again > 48 * 2**20
