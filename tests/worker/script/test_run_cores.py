"""Cores are read during steps: who bound the process after its start, and what SLURM granted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.records.watched_run import Modes
from autotune.worker.script import cores
from autotune.worker.script.cores import granted_cores, remember_start, with_cores

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads the affinity")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, set[int]]:
    """A process (0) with two threads and a worker (7) on eight cores; returns each one's cores."""
    own = {0: set(range(8)), 101: set(range(8)), 102: set(range(8)), 7: set(range(8))}

    def affinity(pid: int) -> set[int]:
        if pid not in own:
            raise ProcessLookupError
        return own[pid]

    def bind(pid: int, mask: Any) -> None:
        own[0 if pid == os.getpid() else pid] = set(mask)

    for thread in (101, 102):
        (tmp_path / "self" / "task" / str(thread)).mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cores, "_PROC", tmp_path)
    monkeypatch.setattr(cores, "_START", cores._Start())
    remember_start()
    return own


@linux_only
def test_free_process_has_all_cores(machine: dict[int, set[int]]) -> None:
    found = with_cores(Modes(is_deterministic=True), [7], {})
    assert found.is_deterministic
    assert (found.process_cores, found.worker_cores, found.thread_cores) == (8, 8, 8)
    assert (found.start_cores, found.machine_cores, found.pinned_by) == (8, 8, "")


@linux_only
def test_script_that_binds_itself_is_named(machine: dict[int, set[int]]) -> None:
    os.sched_setaffinity(0, {3})
    for thread in (101, 102):
        machine[thread] = {3}
    found = with_cores(Modes(), [], {})
    assert (found.process_cores, found.thread_cores, found.start_cores) == (1, 1, 8)
    assert Path(found.pinned_by.rpartition(":")[0]).name == "test_run_cores.py"
    assert found.worker_cores is None


@linux_only
def test_own_binding_is_the_start(machine: dict[int, set[int]]) -> None:
    own_file = str(Path(cores.__file__).with_name("overrides.py"))
    exec(compile("import os; os.sched_setaffinity(0, {1, 2})", own_file, "exec"), {})
    found = with_cores(Modes(), [], {})
    assert (found.process_cores, found.start_cores, found.pinned_by) == (2, 2, "")


@linux_only
def test_binding_of_another_process_is_not_ours(machine: dict[int, set[int]]) -> None:
    os.sched_setaffinity(7, {1})
    found = with_cores(Modes(), [7], {})
    assert (found.process_cores, found.worker_cores, found.pinned_by) == (8, 1, "")


@linux_only
def test_openmp_that_binds_the_training_thread_is_named(machine: dict[int, set[int]]) -> None:
    machine[0] = {0}
    found = with_cores(Modes(), [7], {"OMP_PROC_BIND": "true"})
    assert (found.process_cores, found.thread_cores) == (1, 8)
    assert found.pinned_by == "OMP_PROC_BIND=true"


@linux_only
def test_worker_that_has_ended_is_left_out(machine: dict[int, set[int]]) -> None:
    machine[7] = {1, 2}
    assert with_cores(Modes(), [7, 99], {}).worker_cores == 2
    assert with_cores(Modes(), [99], {}).worker_cores is None


def test_system_without_affinity_has_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert with_cores(Modes(), [1], {}) == Modes()


@pytest.mark.parametrize(
    ("variables", "granted"),
    [
        ({}, (None, "")),
        ({"SLURM_CPUS_PER_TASK": "8"}, (8, "SLURM_CPUS_PER_TASK")),
        ({"SLURM_CPUS_PER_TASK": "", "SLURM_CPUS_ON_NODE": "16"}, (16, "SLURM_CPUS_ON_NODE")),
        (
            {"SLURM_CPUS_ON_NODE": "16", "SLURM_NTASKS_PER_NODE": "4"},
            (4, "SLURM_CPUS_ON_NODE"),
        ),
        ({"SLURM_JOB_CPUS_PER_NODE": "72(x2),36"}, (72, "SLURM_JOB_CPUS_PER_NODE")),
        ({"SLURM_CPUS_PER_TASK": "many"}, (None, "")),
    ],
)
def test_slurms_grant(variables: dict[str, str], granted: tuple[int | None, str]) -> None:
    assert granted_cores(variables) == granted
