"""Read other processes' share of the cores from the kernel's files, at a window's two edges."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autotune.apply import cores
from autotune.records.measurement import HostLoad
from autotune.worker import conditions
from autotune.worker.conditions import HostLoadProbe

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
HZ = os.sysconf("SC_CLK_TCK")
GROUP = "job/cpu.stat"


class Kernel:
    """Files of /proc and of control groups, and a clock; three cores, of which the process may run on two."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        (folder / "proc").mkdir()
        (folder / "membership").write_text("0::/job\n")
        self.set_cores((0, 0), (0, 0), (0, 0))
        self.set_process("self", children=())

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def set_cores(self, *times: tuple[float, float]) -> None:
        """Busy and stolen seconds of each core so far; each was idle, waited for disks and ran guests for long."""
        lines = [
            f"cpu{core} {busy * HZ:.0f} 0 0 999999 999999 0 0 {stolen * HZ:.0f} 999999 0"
            for core, (busy, stolen) in enumerate(times)
        ]
        self.write("proc/stat", "\n".join(["cpu 1 1 1 1 1 1 1 1 1 1", *lines, "intr 12"]))

    def set_process(
        self, pid: str, own_s: float = 0.0, reaped_s: float = 0.0, children: tuple[int, ...] = ()
    ) -> None:
        ticks = [f"{seconds * HZ / 2:.0f}" for seconds in (own_s, own_s, reaped_s, reaped_s)]
        self.write(
            f"proc/{pid}/stat", " ".join([f"{pid} (a) b)", "S", *["7"] * 10, *ticks, "20", "0"])
        )
        self.write(f"proc/{pid}/task/{pid}/children", " ".join(map(str, children)))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(tmp_path)
    monkeypatch.setattr(conditions, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(conditions, "perf_counter", lambda: made.now)
    monkeypatch.setattr(cores, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(cores, "_CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    return made


def started(kernel: Kernel) -> HostLoadProbe:
    """Return a probe that was started ten seconds ago."""
    probe = HostLoadProbe()
    probe.start()
    kernel.now += 10
    return probe


def stopped(probe: HostLoadProbe) -> HostLoad:
    found = probe.stop()
    assert found is not None
    return found


@needs_linux
def test_reachable_cores(kernel: Kernel) -> None:
    probe = started(kernel)
    kernel.set_cores((4, 1), (9, 9), (3, 2))
    kernel.set_process("self", 5)
    assert probe.stop() == HostLoad(
        seconds=10, cores=2, reachable_cores=2, busy_s=10, own_s=5, stolen_s=3
    )


@needs_linux
def test_time_of_the_process_tree(kernel: Kernel) -> None:
    kernel.set_process("self", 1, children=(11, 12))
    kernel.set_process("11", 2)
    kernel.set_process("12", 2)
    probe = started(kernel)
    kernel.set_process("self", 2, reaped_s=5, children=(12, 13, 14))  # 11 has had 5 s by its end
    kernel.set_process("12", 3, children=(15,))
    kernel.set_process("13", 4)
    kernel.set_process("15", 0.5)  # 14 has just ended
    assert stopped(probe).own_s == pytest.approx(1 + 3 + 1 + 4 + 0.5)


@needs_linux
def test_group_with_a_quota(kernel: Kernel) -> None:
    kernel.write("job/cpu.max", "100000 100000")
    kernel.write(GROUP, "usage_usec 1000000\nuser_usec 1\n")
    kernel.write(
        "job/cpu.pressure",
        "some avg10=1.00 avg60=0.00 avg300=0.00 total=500000\nfull avg10=0.00 total=7\n",
    )
    probe = started(kernel)
    kernel.write(GROUP, "usage_usec 9000000\nuser_usec 1\n")
    kernel.write("job/cpu.pressure", "some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\n")
    found = stopped(probe)
    assert (found.cores, found.reachable_cores) == (1, 2)
    assert (found.group_s, found.pressure_s) == (8.0, 2.0)


@needs_linux
def test_group_without_a_quota(kernel: Kernel) -> None:
    kernel.write("proc/pressure/cpu", "some avg10=1.00 avg60=0.00 avg300=0.00 total=0\n")
    kernel.write(GROUP, "usage_usec 1000000\n")
    probe = started(kernel)
    kernel.write("proc/pressure/cpu", "some avg10=1.00 avg60=0.00 avg300=0.00 total=3000000\n")
    found = stopped(probe)
    assert (found.group_s, found.pressure_s) == (None, 3.0)


@needs_linux
@pytest.mark.parametrize("missing", ["proc/self/task/self/children", "proc/stat"])
def test_missing_files(kernel: Kernel, missing: str) -> None:
    """Without a list of children the trial's own loader workers would be told as others."""
    (kernel.folder / missing).unlink()
    assert started(kernel).stop() is None


def test_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    probe = HostLoadProbe()
    probe.start()
    assert probe.stop() is None
