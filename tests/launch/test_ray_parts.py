"""What trials on a Ray cluster are put together from, without a cluster."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.core.environment import Environment
from autotune.launch import ray_host
from autotune.launch.launcher import Exit
from autotune.launch.ray_host import Host, trial_environment
from autotune.launch.ray_hosts import most_of_a_kind
from autotune.launch.ray_launcher import merged_exit
from autotune.protocol import GroupPart

PARTS = [GroupPart(host=0, first_rank=0, ranks=2), GroupPart(host=1, first_rank=2, ranks=2)]


@pytest.fixture
def make_machine() -> Callable[..., Environment]:
    def make(**changes: Any) -> Environment:
        values: dict[str, Any] = {
            "device": "cuda:0",
            "device_kind": "cuda",
            "device_name": "H200",
            "device_memory_bytes": 2**37,
            "device_count": 8,
            "native_amp_dtypes": (),
            "driver": "570",
            "cores": 64,
            "ram_bytes": 2**38,
            "platform": "Linux",
            "python": "3.12",
            "torch": "2.13",
            "cuda": "13.0",
            "versions": {},
        }
        return Environment.model_validate(values | changes)

    return make


def test_the_kind_with_most_devices_is_taken(make_machine: Callable[..., Environment]) -> None:
    one_large, small = make_machine(), make_machine(device_name="L4", device_count=1)
    assert most_of_a_kind([small, small, one_large]) == one_large
    assert most_of_a_kind([small] * 9 + [one_large]) == small


def test_accelerators_come_before_processors(make_machine: Callable[..., Environment]) -> None:
    lone, processors = make_machine(device_count=1), make_machine(device="cpu", device_kind="cpu", device_count=1)
    assert most_of_a_kind([processors] * 5 + [lone]) == lone
    assert most_of_a_kind([processors]) == processors
    assert most_of_a_kind([]) is None


def test_trials_see_the_callers_environment_but_for_what_is_the_hosts_own() -> None:
    here = {"PATH": "/host", "CUDA_VISIBLE_DEVICES": "3", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1", "HOST_ONLY": "yes"}
    callers = {"PATH": "/caller", "TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "0", "SLURM_PROCID": "0", "TMPDIR": "/x"}
    assert trial_environment(here, callers) == {
        "PATH": "/caller",
        "TOKEN": "secret",
        "HOST_ONLY": "yes",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert trial_environment(here, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4", "what the caller set, not Ray"


def test_a_groups_first_end_is_that_of_the_host_that_ended_first() -> None:
    exits = [
        Exit(code=None, codes=(None, -11), first=1, first_s=10.0, ended_for="straggling", wall_s=15.0),
        Exit(code=1, codes=(1, 1), first=0, first_s=10.3, wall_s=10.4),
    ]
    merged = merged_exit(exits, PARTS)
    assert (merged.first, merged.first_s, merged.codes, merged.code) == (1, 10.0, (None, -11, 1, 1), None)
    assert (merged.ended_for, merged.wall_s) == ("straggling", 15.0)


def test_what_did_not_follow_the_others_end_was_not_called_off_by_the_search() -> None:
    exits = [
        Exit(code=None, codes=(None, None), ended_for="called_off", wall_s=9.0),
        Exit(code=0, codes=(0, 0), first=0, first_s=4.0, wall_s=4.1),
    ]
    assert merged_exit(exits, PARTS, "straggling").ended_for == "straggling"
    assert merged_exit(exits, PARTS, "called_off").ended_for == "called_off"
    assert merged_exit(exits, PARTS, "straggling").first == 2


def test_memory_is_told_before_time() -> None:
    exits = [
        Exit(code=None, codes=(None, None), ended_for="deadline", wall_s=9.0),
        Exit(code=None, codes=(None, None), ended_for="memory", seen_bytes=7, was_oom_killed=True, wall_s=8.0),
    ]
    merged = merged_exit(exits, PARTS)
    assert (merged.ended_for, merged.seen_bytes, merged.was_oom_killed, merged.first) == ("memory", 7, True, None)


def test_a_free_port_lies_below_those_that_linux_hands_out() -> None:
    assert 20_000 <= Host.free_port(Host.__new__(Host)) < 32_000


def test_what_killed_hosts_have_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    dead = next(pid for pid in range(2**22 - 1, 1, -1) if not psutil.pid_exists(pid))
    names = [f"autotune-host-{dead}-abc", f"autotune-host-{os.getpid()}-abc", "autotune-host-mine", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    ray_host._remove_left_behind()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_report_that_is_far_too_large_does_not_travel_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "_FILE_BYTES", 10)
    (tmp_path / "report.json").write_bytes(b"x" * 100)
    assert ray_host._read(tmp_path / "report.json") == b"x" * 10
    assert ray_host._read(tmp_path / "missing") is None
